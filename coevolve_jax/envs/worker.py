"""The process behind one worker: holds worlds of one environment family and answers over pipes, one JSON line at a
time.

Request: [session, [op, ...]]; each op is answered by its own line as soon as it is done:
["ok", value], or ["refused", why] where the caller's request makes no sense (ValueError), as are then the ops after it.
Started by worker_process.py as `python -P -m coevolve_jax.envs.worker FAMILY TIMEOUT_SECONDS MEMORY_GIB [warm]`, perhaps
under an interpreter that has the family's packages and the standard library only.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from types import ModuleType
from typing import Any, BinaryIO

from coevolve_jax.envs import family as families
from coevolve_jax.envs.base import Environment
from coevolve_jax.types import Call, Task


def answer(family: ModuleType, worlds: dict[int, Environment], session: int, kind: str, *args: Any) -> Any:
    """Performs one op and returns its JSON value. ValueError where the environment refuses it."""
    if kind == "reset":
        world = family.make()
        world.reset(Task.from_json(args[0]))
        worlds[session] = world
        return None
    if kind == "close":
        worlds.pop(session).close()
        return None
    if kind == "ask":
        return families.ask_here(family, *args)
    if kind == "judge":
        task_id, turns = args
        calls = [[[Call(**c) for c in step] for step in turn] for turn in turns]
        return families.function(family, "judge")(task_id, calls)
    world = worlds[session]
    if kind == "step":
        return step(world, Call(**args[0]))
    if kind == "options":
        return [call.to_json() for call in getattr(world, "options", list)()]
    if kind == "score":
        outcome = world.score()
        return [outcome.reward, outcome.success, outcome.valid, outcome.progress, outcome.reason]
    return {"end_turn": world.end_turn, "fingerprint": world.fingerprint}[kind]()


def step(world: Environment, call: Call) -> list:
    """An exception is a fault of the environment, not of the caller: it ends this process, which costs the session."""
    try:
        observation = world.step(call)
    except ValueError as error:
        raise RuntimeError(f"step raised for {call.name[:60]!r}") from error
    if not observation.valid:
        raise RuntimeError(f"The environment itself failed: {observation.text[:200]}")
    return [observation.text, observation.error, observation.ends]


def serve(family: ModuleType, requests: BinaryIO, answers: BinaryIO, timeout: float) -> None:
    """Answers until `requests` ends. A call that hangs although nobody is left to kill this process meets
    the alarm, whose default action ends the process even inside a C function that never returns."""
    worlds: dict[int, Environment] = {}
    for line in requests:
        session, ops = json.loads(line)
        refused = None
        for op in ops:
            signal.setitimer(signal.ITIMER_REAL, 2 * timeout + 1)
            try:
                reply = refused or ["ok", answer(family, worlds, session, *op)]
            except ValueError as error:
                reply = refused = ["refused", str(error)]
            text = json.dumps(reply)
            signal.setitimer(signal.ITIMER_REAL, 0)
            answers.write(text.encode() + b"\n")
            answers.flush()


def main(name: str, timeout: float, memory_gib: float, warm: bool) -> None:
    if memory_gib:
        limit = int(memory_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # The pipes are moved away from 0 and 1, so that a tool that prints or reads cannot disturb the protocol.
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
        serve(family, requests, answers, timeout)
    except BrokenPipeError:  # nobody is left to hear; what is not flushed yet goes nowhere
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), answers.fileno())


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), "warm" in sys.argv[4:])
