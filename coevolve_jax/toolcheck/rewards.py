"""Asks the get_reward of a user's class or file in equal worlds: what is wrong with it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax.envs.tools import SECONDS
from coevolve_jax.envs.tools.deadline import deadline
from coevolve_jax.envs.tools.environment import Instance
from coevolve_jax.envs.tools.source import Refused, load
from coevolve_jax.types import Call, Task

REWARDED = 8  # rounds in which get_reward is asked


def fault(config: ConfigDict, jobs: Sequence[tuple[Task, Sequence[Call]]]) -> str:
    """Says what is wrong with the get_reward of a class or file; "" where nothing is, or there is none."""
    if config.environment.name != "tools" or config.environment.get("python"):
        return ""
    for task, calls in jobs[:: max(1, len(jobs) // REWARDED)]:
        source, reset = task.scenario["source"], task.scenario["reset"]
        try:
            with deadline(SECONDS, "A world with get_reward"), _silence():
                if load(source).own("get_reward") is None:
                    return ""
                wrong = _unsound(source, reset, calls)
        except Refused as why:
            wrong = str(why)
        if wrong:
            return wrong
    return ""


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keeps what a user's code prints out of the report."""
    with open(os.devnull, "w") as nowhere:
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield


def _unsound(source: str, reset: Mapping[str, Any], calls: Sequence[Call]) -> str:
    """Says what is wrong with get_reward before some calls and after them; "" where nothing is."""
    rewards = []
    for _ in range(2):
        world = Instance(source, reset)
        try:
            before = world.reward()
            for call in calls:
                world.call(call)
            rewards.append([before, world.reward()])
        except Refused as why:
            return str(why).partition(": return a number")[0].rstrip(".") + "."
    differ = [pair for pair in zip(*rewards) if pair[0] != pair[1]]
    name = world.tools.name
    return (
        f"{name}.get_reward returns {differ[0][0]:g} and {differ[0][1]:g} in equal worlds." if differ else ""
    )
