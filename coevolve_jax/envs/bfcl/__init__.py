"""The multi-turn classes of the Berkeley Function-Calling Leaderboard as an environment family.

environment.py has the worlds and their grading, toolsets.py the tools, benchmark.py the official tasks and verdict.
They import bfcl_eval, this file does so only when they are needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coevolve_jax.envs.base import Environment, digest, report_verdicts
from coevolve_jax.envs.bfcl.scenario import scenario as scenario
from coevolve_jax.types import Call, Task, Trajectory


def scenarios(split: str, settings: Mapping[str, Any] | None = None, apart_from: str = "") -> list[Task]:
    """The initial states of one side of a split. settings: "toolsets" keeps only these classes (default: all).
    apart_from: less those in which some class starts as in a scenario of that split."""
    from coevolve_jax.envs.bfcl import benchmark

    toolsets = (settings or {}).get("toolsets")
    found = benchmark.scenarios(split, toolsets)
    if not apart_from:
        return found
    seen = {
        start
        for scenario in benchmark.scenarios(apart_from, toolsets)
        for start in benchmark.starts(scenario)
    }
    return [scenario for scenario in found if seen.isdisjoint(benchmark.starts(scenario))]


def tasks(split: str, settings: Mapping[str, Any] | None = None) -> list[Task]:
    """BFCL's own multi_turn_base tasks of one side of a split; "all" is every one."""
    from coevolve_jax.envs.bfcl import benchmark

    keep = range(200) if split == "all" else benchmark.split(split)
    return [task for i, task in enumerate(benchmark.load("multi_turn_base")) if i in keep]


def tools(task: Task) -> list[dict]:
    """Docs of the tools that `task` offers, in the form of Hugging Face chat templates (toolsets.tools)."""
    from coevolve_jax.envs.bfcl import toolsets

    return toolsets.tools(task)


def make() -> Environment:
    from coevolve_jax.envs.bfcl import environment

    return environment.Environment()


def warm_up() -> None:
    """Imports the tool classes and reads their documentation, so that no later call waits for it."""
    from coevolve_jax.envs.bfcl import toolsets

    make()
    toolsets.documented(toolsets.TOOLSETS)


def judge(task_id: str, turns: Sequence[Sequence[Sequence[Call]]]) -> dict:
    """BFCL's official multi_turn_checker (benchmark.official_check)."""
    from coevolve_jax.envs.bfcl import benchmark

    return benchmark.official_check(task_id, turns)


def report(tasks: Sequence[Task], trajectories: Sequence[Trajectory], samples: int, judge) -> dict:
    """The official score of trajectories of benchmark tasks: trajectories[i] belongs to tasks[i // samples]."""
    return {
        "benchmark": "BFCL multi_turn_base",
        "scoring": "official multi_turn_checker",
        **report_verdicts(tasks, trajectories, samples, judge),
    }


def task_key(task: Task) -> str:
    """Digest of what makes two tasks the same: initial state, classes in any order, reference calls per turn."""
    turns = [[call.to_json() for call in turn.calls] for turn in task.turns]
    start = task.scenario
    return digest([task.environment, sorted(start["toolsets"]), start["initial_state"], turns])
