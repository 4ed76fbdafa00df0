"""BFCL in which one call in twenty crashes its process, never ends, or exhausts the memory."""

import os
import signal

from coevolve_jax.envs import bfcl
from coevolve_jax.envs.base import digest
from coevolve_jax.envs.bfcl import scenarios, tasks, tools  # noqa: F401

FAULTS = ("crash", "hang", "memory")


def fault(task, number):
    """The fault of call `number` in a world of this task; "" in 19 of 20."""
    drawn = int(digest([task.id, number])[:8], 16) % 60
    return FAULTS[drawn] if drawn < len(FAULTS) else ""


def make():
    return World()


class World:
    def __init__(self):
        self._world = bfcl.make()
        for name in ("end_turn", "score", "fingerprint", "close"):
            setattr(self, name, getattr(self._world, name))

    def reset(self, task):
        self._task, self._calls = task, 0
        self._world.reset(task)

    def step(self, call):
        befalls, self._calls = fault(self._task, self._calls), self._calls + 1
        if befalls == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        while befalls == "hang":
            pass
        if befalls == "memory":
            bytearray(3 * 2**30)  # a worker may have 2 GiB
        return self._world.step(call)
