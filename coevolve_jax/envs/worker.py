"""The process behind one worker of ProcessPool: holds worlds and answers over pipes, one JSON line at a time.

Request: [session, [op, ...]]; each op is answered by its own line as soon as it is done:
["ok", value], or ["refused", why] where the caller's request makes no sense (ValueError).
Started by pool.py as `python -P -m coevolve_jax.envs.worker TIMEOUT_SECONDS MEMORY_GIB`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

from coevolve_jax.envs import bfcl
from coevolve_jax.types import Call, Task


def answer(worlds: dict[int, bfcl.Environment], session: int, kind: str, *args: Any) -> Any:
    """Performs one op and returns its JSON value. ValueError where the environment refuses it."""
    if kind == "check":
        task_id, turns = args
        return bfcl.official_check(task_id, [[[Call(**c) for c in step] for step in turn] for turn in turns])
    if kind == "reset":
        world = bfcl.Environment()
        world.reset(Task.from_json(args[0]))
        worlds[session] = world
        return None
    if kind == "close":
        worlds.pop(session).close()
        return None
    world = worlds[session]
    if kind == "step":
        observation = world.step(Call(**args[0]))
        return [observation.text, observation.error]
    if kind == "score":
        outcome = world.score()
        return [outcome.reward, outcome.success, outcome.progress, outcome.reason]
    return {"end_turn": world.end_turn, "fingerprint": world.fingerprint}[kind]()


def serve(requests: BinaryIO, answers: BinaryIO, timeout: float) -> None:
    """Answers until `requests` ends. A call that hangs although nobody is left to kill this process meets
    the alarm, whose default action ends the process even inside a C function that never returns."""
    worlds: dict[int, bfcl.Environment] = {}
    for line in requests:
        session, ops = json.loads(line)
        for op in ops:
            signal.setitimer(signal.ITIMER_REAL, 2 * timeout + 1)
            try:
                reply = ["ok", answer(worlds, session, *op)]
            except ValueError as error:
                reply = ["refused", str(error)]
            text = json.dumps(reply)
            signal.setitimer(signal.ITIMER_REAL, 0)
            answers.write(text.encode() + b"\n")
            answers.flush()


def main(timeout: float, memory_gib: float) -> None:
    limit = int(memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # The pipes are moved away from 0 and 1, so that a tool that prints or reads cannot disturb the protocol.
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "r+b", buffering=0) as null:
        os.dup2(null.fileno(), 0)
        os.dup2(null.fileno(), 1)
    bfcl.warm_up()
    answers.write(b'["ready"]\n')
    answers.flush()
    serve(requests, answers, timeout)


if __name__ == "__main__":
    main(float(sys.argv[1]), float(sys.argv[2]))
