"""A world that logs its calls and fails in the operation that the scenario names.

scenario: {"fails_in": an operation or "", "how": ...}. Ways to fail ("how"):
"crash": the process dies. "spin": it computes for ever. "wait": it sleeps for ever.
"once": it crashes unless the file `mark` exists, and creates it. "broken": it reports a failure of its own.
"fatal": it reports that the call has ended the world.
"""

import os
import signal
import time
from pathlib import Path

from coevolve_jax.envs.base import Broken, digest
from coevolve_jax.types import Call, Observation, Outcome, Task

FRAGILE = Call("fragile", {})


def scenarios(split, settings, apart_from=""):
    return [Task("fragile", "fragile", {"fails_in": "", "how": ""})]


tasks = scenarios


def tools(task):
    return []


def judge(task_id, turns):
    """Computes for as many seconds as the task's id states."""
    end = time.process_time() + float(task_id)
    while time.process_time() < end:
        pass
    return {"valid": True, "error_type": "", "error_message": ""}


def make():
    return World()


class World:
    def reset(self, task):
        self._task, self._called = task, []
        self._perform("reset")

    def step(self, call):
        failed = self._perform("step", call == FRAGILE)
        if failed == "broken":
            return Observation("The server of the world is down.", valid=False)
        if failed == "fatal":
            return Observation("The call has ended the server.", error=True, fatal=True)
        self._called.append(call.name)
        return Observation(" ".join(self._called))

    def options(self):
        self._perform("options")
        return [Call("safe", {})]

    def end_turn(self):
        self._perform("end_turn")

    def score(self):
        self._perform("score")
        return Outcome(1.0, True, progress=1.0)

    def fingerprint(self):
        self._perform("fingerprint")
        return digest(self._called)

    def close(self):
        pass

    def _perform(self, operation, fragile=True):
        if not fragile or self._task.scenario["fails_in"] != operation:
            return ""
        how = self._task.scenario["how"]
        if how == "once":
            mark = Path(self._task.scenario["mark"])
            if mark.exists():
                return ""
            mark.touch()
        if how in ("crash", "once"):
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "broken" and operation != "step":
            raise Broken("The server of the world is down.")
        while how == "spin":
            pass
        while how == "wait":
            signal.pause()
        return how
