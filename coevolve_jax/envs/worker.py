"""The process behind one worker: it holds worlds of one environment family and answers over pipes.

Request, a JSON line: [env_id, processor seconds of a call, wall seconds, [op, ...]].
One line answers each op as soon as it is done:
    ["ok", value]
    ["refused", why]: the caller's request makes no sense (ValueError)
    ["broken", why]: the environment says that it has failed itself, which costs the world
    ["fatal", why]: the environment says that the call has ended the world
The ops after one that is not ok get the same answer. A line before the answer asks for time:
    ["waits", seconds]: the op waits for a server for up to so long by the clock, besides its own time

worker_process.py runs `python -P -m coevolve_jax.envs.worker FAMILY MEMORY_GIB [warm]`. The interpreter may
have the family's packages and the standard library only: this file must not import anything else.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, BinaryIO

from coevolve_jax.envs import family as families
from coevolve_jax.envs.base import WAITS, Broken, Environment, allowance
from coevolve_jax.types import Call, Task


class Fatal(Exception):
    """Raised where the environment says that a call has ended its world."""


def answer(family: ModuleType, worlds: dict[int, Environment], env_id: int, kind: str, *args: Any) -> Any:
    """Performs one op and returns its JSON value. ValueError where the environment refuses it."""
    if kind == "reset":
        world = family.make()
        world.reset(Task.from_json(args[0]))
        worlds[env_id] = world
        return None
    if kind == "close":
        worlds.pop(env_id).close()
        return None
    if kind == "ask":
        return families.ask_here(family, *args)
    if kind == "judge":
        task_id, turns = args
        calls = [[[Call(**c) for c in step] for step in turn] for turn in turns]
        return families.function(family, "judge")(task_id, calls)
    world = worlds[env_id]
    if kind == "step":
        return step(world, Call(**args[0]))
    if kind == "options":
        return [call.to_json() for call in getattr(world, "options", list)()]
    if kind == "score":
        outcome = world.score()
        return [outcome.reward, outcome.success, outcome.valid, outcome.progress, outcome.reason]
    return {"end_turn": world.end_turn, "fingerprint": world.fingerprint}[kind]()


def step(world: Environment, call: Call) -> list:
    """Executes one call. An exception is the environment's fault: it ends this process and its worlds."""
    try:
        observation = world.step(call)
    except ValueError as error:
        raise RuntimeError(f"step raised for {call.name[:60]!r}") from error
    if not observation.valid:
        raise Broken(observation.text[:200])
    if observation.fatal:
        raise Fatal(observation.text[:200])
    return [observation.text, observation.error, observation.ends, observation.last_message]


def serve(family: ModuleType, requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers until `requests` ends.

    SIGPROF comes when an op has used up its processor time. SIGALRM comes far later, in case nobody is left
    to kill this process. Their default action ends the process even inside a C function.
    """
    worlds: dict[int, Environment] = {}
    most = 0.0  # seconds by the clock of the op under way

    def wait(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, 2 * (most + seconds))
        answers.write(json.dumps(["waits", seconds]).encode() + b"\n")
        answers.flush()

    WAITS.set(wait)
    for line in requests:
        env_id, seconds, wall_seconds, ops = json.loads(line)
        stopped = None
        for op in ops:
            times = allowance(op[0], seconds)
            most = times * wall_seconds
            with _limits(times * seconds, 2 * most):
                try:
                    reply = stopped or ["ok", answer(family, worlds, env_id, *op)]
                except ValueError as error:
                    reply = stopped = ["refused", str(error)]
                except (Broken, Fatal) as lost:
                    reply = stopped = ["broken" if isinstance(lost, Broken) else "fatal", str(lost)]
                    with contextlib.suppress(Exception):
                        worlds.pop(env_id).close()
                text = json.dumps(reply)
            _open_again()
            answers.write(text.encode() + b"\n")
            answers.flush()


def _open_again() -> None:
    """Opens standard streams that a tool has closed: other worlds of this process use them too."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # the lowest free number, so it may be this one
            if null != number:
                os.dup2(null, number)
                os.close(null)
        if getattr(getattr(sys, name), "closed", True):
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))


@contextlib.contextmanager
def _limits(processor_seconds: float, wall_seconds: float) -> Iterator[None]:
    limits = {signal.ITIMER_PROF: processor_seconds, signal.ITIMER_REAL: wall_seconds}
    for timer, seconds in limits.items():
        signal.setitimer(timer, seconds)
    yield
    for timer in limits:
        signal.setitimer(timer, 0)


def main(name: str, memory_gib: float, warm: bool) -> None:
    for number in (signal.SIGPROF, signal.SIGALRM):  # exec keeps signals that the parent ignores or blocks
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF, signal.SIGALRM])
    if memory_gib:
        # The soft limit: programs that a world starts have limits of their own.
        limit, (_, most) = int(memory_gib * 2**30), resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit if most < 0 else min(limit, most), most))
    # Move the pipes away from 0 and 1, so that a tool that prints or reads cannot disturb the protocol.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "r+b", buffering=0) as null:
        os.dup2(null.fileno(), 0)
        os.dup2(null.fileno(), 1)
    family = families.module(name)
    if warm:
        families.function(family, "warm_up")()
    try:
        answers.write(b'["ready"]\n')
        answers.flush()
        serve(family, requests, answers)
    except BrokenPipeError:  # the parent is gone: flushing at exit must not raise again
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), answers.fileno())
    if os.getpgrp() == os.getpid():  # what tools have started ends too
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), "warm" in sys.argv[3:])
