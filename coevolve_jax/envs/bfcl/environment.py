"""BFCL's multi-turn classes as an environment, and its benchmark tasks (bfcl-eval 2026.3.23, BFCL v4).

Turns are graded with BFCL's own comparisons of states and responses. No jax
and nothing heavy is imported here: every worker process imports this file.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

from bfcl_eval.constants import executable_backend_config as backend
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker as checker
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils

from coevolve_jax.envs.bfcl.tools import (
    TOOLSETS,
    documented,
    execute,
    load_class,
    parse,
    read_data,
    render,
    tools,
)
from coevolve_jax.types import Call, Observation, Outcome, Task, Turn

__all__ = [
    "CATEGORIES",
    "ENVIRONMENTS",
    "SPLITS",
    "TOOLSETS",
    "Environment",
    "load",
    "official_check",
    "parse",
    "render",
    "scenarios",
    "split",
    "tools",
    "warm_up",
]

CATEGORIES = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
ENVIRONMENTS = ("bfcl", "bfcl_long_context")
SPLITS = ("train", "test", "sequential_train", "sequential_test")
SPLIT_SEED = 2604

# What the official inference loop says when the functions held out in multi_turn_miss_func arrive.
_ANNOUNCEMENT = "{functions}\nI have updated some more functions you can choose from. What about now?"
_serial = itertools.count()


# --- Worlds ------------------------------------------------------------------------------------


def _build(task: Task) -> dict[str, Any]:
    """Instances by class name in the initial state of the task, sharing nothing with it or with others."""
    long_context = task.environment == "bfcl_long_context"
    world = {}
    for toolset in task.toolsets:
        instance = load_class(toolset)()
        if toolset not in backend.STATELESS_CLASSES:
            scenario = copy.deepcopy(task.initial_state.get(toolset, {}))
            instance._load_scenario(scenario, long_context=long_context)
        # The long-context extensions are module globals that instances would change in place.
        world[toolset] = copy.deepcopy(instance) if long_context else instance
    return world


def _canonical(value: Any, above: tuple[int, ...] = ()) -> str:
    """Text that is equal for values that compare equal: 1 == 1.0 == True, dicts and sets have no order,
    directories ignore their parent. A directory that contains itself refers upwards."""
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return hex(int(value))
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({','.join([_canonical(v, above) for v in value])})"
    if isinstance(value, (set, frozenset)):
        return f"set({','.join(sorted([_canonical(v, above) for v in value]))})"
    if isinstance(value, dict):
        items = sorted([f"{_canonical(k)}:{_canonical(v, above)}" for k, v in value.items()])
        return f"dict({','.join(items)})"
    if not hasattr(value, "__dict__"):
        return repr(value)
    if id(value) in above:
        return f"above({len(above) - above.index(id(value))})"
    public = {k: v for k, v in vars(value).items() if not k.startswith("_") and k != "parent"}
    return f"{type(value).__name__}{_canonical(public, (*above, id(value)))}"


class Environment:
    """One BFCL world and, for grading, the world that the reference calls lead to."""

    def reset(self, task: Task) -> None:
        """Builds the task's initial state. ValueError: unknown environment or toolset, unusable state."""
        if task.environment not in ENVIRONMENTS:
            raise ValueError(
                f"Task {task.id!r} is of the environment {task.environment!r}: "
                f"use one of {', '.join(ENVIRONMENTS)}."
            )
        # A withheld tool that the reference needs is announced later (multi_turn_miss_func): callable.
        withheld = set(task.excluded) - {call.name for call in task.calls}
        self._allowed = {n: t for n, t in documented(task.toolsets).items() if n not in withheld}
        try:
            self._world = _build(task)
        except Exception as error:
            raise ValueError(f"Task {task.id!r}: BFCL cannot load its initial state ({error!r}).") from error
        self._task = task
        self._reference: dict[str, Any] | None = None
        self._results: list[str] = []
        self._called = False
        self._ended = self._passed = 0
        self._failure = ""

    def step(self, call: Call) -> Observation:
        """Executes one call; whatever is wrong with it comes back as {"error": ...}."""
        observation = execute(self._world, self._allowed, call)
        self._called = True
        self._results.append(observation.text)
        return observation

    def end_turn(self) -> None:
        """Grades the turn as multi_turn_checker does. ValueError when all turns have ended."""
        if self._ended == len(self._task.turns):
            raise ValueError(f"Task {self._task.id!r} has only {self._ended} turns: all have ended.")
        if not self._failure:
            self._failure = self._grade(self._task.turns[self._ended])
            self._passed += not self._failure
        self._ended += 1
        self._called = False

    def _grade(self, turn: Turn) -> str:
        """Official error type, or "" when the turn passes. The results of all turns so far count."""
        if self._reference is None:
            self._reference = _build(self._task)
        expected = [execute(self._reference, self._allowed, call).text for call in turn.calls]
        if not expected:
            return ""
        if not self._called:
            return "multi_turn:empty_turn_model_response"
        try:
            verdict = checker.state_checker(self._world, self._reference)
        except RecursionError:  # a directory copied into itself has no end
            return "multi_turn:instance_state_mismatch"
        if verdict["valid"]:
            verdict = checker.response_checker(self._results, expected, self._ended)
        return "" if verdict["valid"] else verdict["error_type"]

    def score(self) -> Outcome:
        """Reward 1 when all turns ended and passed. ValueError for a bare scenario, which has no reference."""
        turns = len(self._task.turns)
        if not turns:
            raise ValueError(f"Task {self._task.id!r} has no turns: a bare scenario cannot be scored.")
        success = self._passed == turns
        reason = self._failure or ("passed" if success else "turns not finished")
        return Outcome(float(success), success, progress=self._passed / turns, reason=reason)

    def fingerprint(self) -> str:
        """sha256 of the public attributes of all instances: equal where state_checker finds them equal."""
        public = {
            name: {k: v for k, v in vars(instance).items() if not k.startswith("_")}
            for name, instance in self._world.items()
        }
        return hashlib.sha256(_canonical(public).encode("utf-8", "surrogatepass")).hexdigest()

    def close(self) -> None:
        self._world = self._reference = None


# --- Benchmark ---------------------------------------------------------------------------------


def _check_category(category: str) -> None:
    if category not in CATEGORIES:
        raise ValueError(f"Unknown BFCL category {category!r}: use one of {', '.join(CATEGORIES)}.")


@functools.cache
def _entries(category: str) -> dict[str, tuple[dict, list[list[str]]]]:
    """Official entry and official answer by task id."""
    _check_category(category)
    answers = read_data("possible_answer", f"BFCL_v4_{category}.json")
    return {
        entry["id"]: (entry, answer["ground_truth"])
        for entry, answer in zip(read_data(f"BFCL_v4_{category}.json"), answers, strict=True)
    }


def _query(entry: Mapping, turn: int, messages: Sequence[Mapping]) -> str:
    """The user's words; where held-out functions arrive, their docs in the official sentence."""
    arriving = entry.get("missed_function", {}).get(str(turn), [])
    if not arriving:
        return "\n".join(m["content"] for m in messages)
    docs = documented(entry["involved_classes"])
    return _ANNOUNCEMENT.format(functions=json.dumps([docs[name].doc["function"] for name in arriving]))


def _task(entry: Mapping, answer: Sequence[Sequence[str]], environment: str) -> Task:
    turns = tuple(
        Turn(_query(entry, i, messages), tuple(parse(text) for text in calls))
        for i, (messages, calls) in enumerate(zip(entry["question"], answer, strict=True))
    )
    # The data's excluded_function is left aside, as by the official harness, which offers those tools too.
    held_out = [name for names in entry.get("missed_function", {}).values() for name in names]
    return Task(
        id=entry["id"],
        environment=environment,
        toolsets=tuple(entry["involved_classes"]),
        initial_state=entry["initial_config"],
        turns=turns,
        excluded=tuple(held_out),
    )


@functools.cache
def _tasks(category: str) -> tuple[Task, ...]:
    environment = "bfcl_long_context" if category == "multi_turn_long_context" else "bfcl"
    return tuple(_task(entry, answer, environment) for entry, answer in _entries(category).values())


def load(category: str = "multi_turn_base") -> list[Task]:
    """The 200 tasks of a category; task i has the id "<category>_<i>". ValueError for an unknown category."""
    return list(_tasks(category))


@functools.cache
def split(name: str) -> frozenset[int]:
    """Indices (0 to 199, in every category) of one side of a fixed split.

    train, test: 25 of each block of 50, a block being one main class. sequential_*: first and second
    half, which hold different classes; other work uses it. ValueError for an unknown name.
    """
    import numpy as np  # here, so that workers start without it

    if name not in SPLITS:
        raise ValueError(f"Unknown split {name!r}: use one of {', '.join(SPLITS)}.")
    if name.startswith("sequential"):
        return frozenset(range(100) if name.endswith("train") else range(100, 200))
    rng = np.random.default_rng(SPLIT_SEED)
    train = frozenset(int(50 * block + i) for block in range(4) for i in rng.permutation(50)[:25])
    return train if name == "train" else frozenset(range(200)) - train


def scenarios(
    split_name: str, toolsets: Sequence[str] | None = None, category: str = "multi_turn_base"
) -> list[Task]:
    """Bare scenarios of one side of a split: initial states and tools without user turns.

    toolsets: keep only these (None: all); scenarios left without any are dropped. Ids: "scenario_17", or
    "scenario_long_context_17" and the like outside multi_turn_base. ValueError for unknown names.
    """
    documented(toolsets or ())
    indices = split(split_name)
    prefix = "scenario" if category == "multi_turn_base" else category.replace("multi_turn", "scenario")
    out = []
    for index, task in enumerate(load(category)):
        kept = tuple(t for t in task.toolsets if toolsets is None or t in toolsets)
        if index in indices and kept:
            state = {name: value for name, value in task.initial_state.items() if name in kept}
            out.append(Task(f"{prefix}_{index}", task.environment, kept, state))
    return out


def official_check(task_id: str, turns: Sequence[Sequence[Sequence[Call]]]) -> dict:
    """BFCL's own verdict on the calls turns[turn][step][call] that were made for a benchmark task.

    Returns {"valid": bool, "error_type": str, "error_message": str}, the strings empty where valid. Fewer
    turns than the task has count as force-terminated. ValueError for an unknown task id or too many turns.
    """
    category = task_id.rpartition("_")[0]
    _check_category(category)
    if task_id not in _entries(category):
        raise ValueError(f"BFCL has no task {task_id!r}: the ids of {category} end in 0 to 199.")
    entry, answer = _entries(category)[task_id]
    if len(turns) > len(answer):
        raise ValueError(f"{task_id} has {len(answer)} turns, but calls for {len(turns)} turns are given.")
    if len(turns) < len(answer):
        return {
            "valid": False,
            "error_type": "multi_turn:force_terminated",
            "error_message": f"{len(turns)} of {len(answer)} turns were finished.",
        }
    # The official executor keeps worlds under this name for ever: it must be new, an identifier, and cleared.
    model = f"model{next(_serial)}"
    allowed = documented(entry["involved_classes"])
    decoded = [[[_render_or_refuse(call, allowed) for call in step] for step in turn] for turn in turns]
    try:
        verdict = checker.multi_turn_checker(decoded, answer, entry, category, model)
    finally:
        for name in [n for n in vars(multi_turn_utils) if n.startswith(f"{model}_")]:
            delattr(multi_turn_utils, name)
    return {
        "valid": verdict["valid"],
        "error_type": verdict.get("error_type", ""),
        "error_message": verdict.get("error_message", ""),
    }


def _render_or_refuse(call: Call, allowed: Container[str]) -> str:
    """A call that is not allowed or not plain becomes one to which the official executor answers an error."""
    try:
        return render(call) if isinstance(call.name, str) and call.name in allowed else "refused_call()"
    except ValueError:
        return "refused_call()"


def warm_up() -> None:
    """Imports the tool classes and reads their documentation, so that no later call waits for it."""
    documented(TOOLSETS)
