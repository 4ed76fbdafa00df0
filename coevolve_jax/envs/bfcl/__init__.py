"""Tasks of the Berkeley Function-Calling Leaderboard, multi-turn and single-turn, as an environment family.

Multi-turn: environment.py has the worlds and their grading, toolsets.py the tools, benchmark.py the official
tasks and verdict. single_turn.py has all of this for single-turn tasks, whose calls are only recorded. These
files import bfcl_eval; this file imports them inside functions, so that it loads without bfcl_eval.
docs/environments/bfcl.md says which part follows which source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coevolve_jax.envs import base
from coevolve_jax.envs.base import Environment, digest, report_verdicts
from coevolve_jax.envs.bfcl.scenario import SINGLE_TURN_ENVIRONMENT, alike
from coevolve_jax.envs.bfcl.scenario import scenario as scenario
from coevolve_jax.types import Call, Group, Observation, Outcome, Task

PACKAGES = ("bfcl-eval",)
MULTI_TURN = ("base", "miss_func", "miss_param", "long_context")
_KINDS = ("simple_python", "multiple", "parallel", "parallel_multiple")
SINGLE_TURN = (*_KINDS, "live_simple", *(f"live_{kind}" for kind in _KINDS[1:]))
SHORT = {"simple": "simple_python"}
CATEGORIES = (*MULTI_TURN, *SHORT, *SINGLE_TURN)
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
    documentation of the tools; "few_shot", a number of worked examples before each single-turn task, and
    "seed", which draws them. Multi-turn categories share their indices: task i is nearly the same in all.
    Single-turn categories have no tasks in the splits to train on.
    """
    from coevolve_jax.envs.bfcl import benchmark, single_turn

    settings, known = settings or {}, (*benchmark.SPLITS, "all")
    if split not in known:
        raise ValueError(f"Unknown split {split!r}: use one of {', '.join(known)}.")
    keep = sorted(range(200) if split == "all" else benchmark.split(split))
    documents = "official" if settings.get("protocol") else ""
    names = dict.fromkeys(SHORT.get(n, n) for n in settings.get("categories") or MULTI_TURN[:1])
    found, shots = [], settings.get("few_shot", 0)
    for name in names:
        if name in SINGLE_TURN:
            found += single_turn.load(name, split, documents)
        else:
            loaded = benchmark.load(f"multi_turn_{name}", documents)
            found += [loaded[i] for i in keep]
    if shots and not names.keys() <= {*SINGLE_TURN}:
        raise ValueError(
            f"Only single-turn tasks take worked examples: use some of {', '.join(SINGLE_TURN)}."
        )
    seed = settings.get("seed", 0)
    return [single_turn.with_examples(t, shots, seed) for t in found] if shots else found


def tools(task: Task) -> list[dict]:
    """Returns the docs of the tools that `task` offers, for Hugging Face chat templates."""
    from coevolve_jax.envs.bfcl import single_turn, toolsets

    return single_turn.tools(task) if _single(task) else toolsets.tools(task)


class _World:
    """A world of the task's kind, multi-turn or single-turn."""

    def __init__(self):
        from coevolve_jax.envs.bfcl import environment

        self._world: Environment = environment.Environment()

    def reset(self, task: Task) -> None:
        from coevolve_jax.envs.bfcl import environment, single_turn

        self._world = (single_turn if _single(task) else environment).Environment()
        self._world.reset(task)

    def step(self, call: Call) -> Observation:
        return self._world.step(call)

    def end_turn(self) -> None:
        self._world.end_turn()

    def score(self) -> Outcome:
        return self._world.score()

    def fingerprint(self) -> str:
        return self._world.fingerprint()

    def close(self) -> None:
        self._world.close()


def make() -> Environment:
    return _World()


def warm_up() -> None:
    """Imports checkers and tool classes and reads their documentation, so that no later call waits for it."""
    from coevolve_jax.envs.bfcl import environment, single_turn, toolsets  # noqa: F401

    single_turn.official_checker()
    toolsets.documented(toolsets.TOOLSETS)


def judge(task_id: str, turns: Sequence[Sequence[Sequence[Call]]]) -> dict:
    """Judges with BFCL's official multi_turn_checker or ast_checker."""
    from coevolve_jax.envs.bfcl import benchmark, single_turn

    single = task_id.rpartition("_")[0] in SINGLE_TURN
    return (single_turn if single else benchmark).official_check(task_id, turns)


def report(groups: Sequence[Group], judge) -> dict:
    """Reports the official score of rollouts of benchmark tasks."""
    places = {g.task.id: g.task.id.removeprefix("multi_turn_").rpartition("_") for g in groups}
    categories = {name: category for name, (category, _, _) in places.items()}
    kinds = {_single(g.task): "single_turn" if _single(g.task) else "multi_turn" for g in groups}
    checkers = {False: "multi_turn_checker", True: "ast_checker"}
    return {
        "benchmark": f"BFCL {' and '.join(kinds.values())}: {', '.join(dict.fromkeys(categories.values()))}",
        "scoring": f"official {' and '.join(checkers[single] for single in kinds)}",
        "categories": categories,
        "alike": {g.task.id: alike(g.task) if _single(g.task) else places[g.task.id][2] for g in groups},
        **report_verdicts(groups, judge),
    }


def _single(task: Task) -> bool:
    return task.environment == SINGLE_TURN_ENVIRONMENT


def task_key(task: Task) -> str:
    """Digests what makes two tasks the same: initial state, classes in any order, reference calls by turn.

    A turn without reference calls counts by its words.
    """
    if _single(task):
        return base.task_key(task)
    turns = [[call.to_json() for call in turn.calls] or turn.query for turn in task.turns]
    start = task.scenario
    return digest([task.environment, sorted(start["toolsets"]), start["initial_state"], turns])
