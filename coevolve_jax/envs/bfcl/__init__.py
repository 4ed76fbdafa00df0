"""The multi-turn classes of the Berkeley Function-Calling Leaderboard as an environment family.

environment.py has the worlds and their grading, toolsets.py the tools, benchmark.py the official tasks and
verdict. They import bfcl_eval; this file imports them inside functions, so that it loads without bfcl_eval.
docs/environments/bfcl.md says which part follows which source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coevolve_jax.envs.base import Environment, digest, report_verdicts
from coevolve_jax.envs.bfcl.scenario import scenario as scenario
from coevolve_jax.types import Call, Group, Task

PACKAGES = ("bfcl-eval",)
CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
_WHOLE = 10**9  # characters: no tool result is cut
# Protocol -> the keys of config.rollout that it fixes. Both show BFCL's own documentation of the tools.
# official: bfcl_eval's base_handler.py. steps_30: AgentEvolver's limit of 30 messages in the whole
# conversation (agent_flow.py).
_READING = {"malformed": "end_turn", "max_observation": _WHOLE}
PROTOCOLS = {
    "official": {"max_steps": 20, "max_messages": 0, **_READING},
    "steps_30": {"max_steps": 30, "max_messages": 30, **_READING},
}


def scenarios(split: str, settings: Mapping[str, Any] | None = None, apart_from: str = "") -> list[Task]:
    """Returns the initial states of a split.

    settings: "toolsets" keeps only these classes (default: all). apart_from: a split. A state is left out
    where one of its classes starts as in a scenario of that split.
    """
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
    """Returns BFCL's own tasks of a split; "all" is every task.

    settings: "categories", some of CATEGORIES (default: base); "protocol", one of PROTOCOLS, which sets the
    documentation of the tools. Categories share their indices: task i is nearly the same in all of them.
    """
    from coevolve_jax.envs.bfcl import benchmark

    settings = settings or {}
    keep = range(200) if split == "all" else benchmark.split(split)
    documents = "official" if settings.get("protocol") else ""
    names = settings.get("categories") or CATEGORIES[:1]
    loaded = [benchmark.load(f"multi_turn_{name}", documents) for name in names]
    return [tasks[i] for tasks in loaded for i in sorted(keep)]


def tools(task: Task) -> list[dict]:
    """Returns the docs of the tools that `task` offers, for Hugging Face chat templates (toolsets.tools)."""
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
    """Judges with BFCL's official multi_turn_checker (benchmark.official_check)."""
    from coevolve_jax.envs.bfcl import benchmark

    return benchmark.official_check(task_id, turns)


def report(groups: Sequence[Group], judge) -> dict:
    """Reports the official score of rollouts of benchmark tasks."""
    places = {g.task.id: g.task.id.removeprefix("multi_turn_").rpartition("_") for g in groups}
    categories = {name: category for name, (category, _, _) in places.items()}
    return {
        "benchmark": f"BFCL multi_turn: {', '.join(dict.fromkeys(categories.values()))}",
        "scoring": "official multi_turn_checker",
        "categories": categories,
        "alike": {name: index for name, (_, _, index) in places.items()},
        **report_verdicts(groups, judge),
    }


def task_key(task: Task) -> str:
    """Digests what makes two tasks the same: initial state, classes in any order, reference calls by turn."""
    turns = [[call.to_json() for call in turn.calls] for turn in task.turns]
    start = task.scenario
    return digest([task.environment, sorted(start["toolsets"]), start["initial_state"], turns])
