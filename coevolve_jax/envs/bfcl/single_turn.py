"""BFCL's single-turn categories: tasks, worlds that record calls, and the official AST checker's verdict.

A task is one request, the documents of some functions, and the possible answers. Nothing is executed. Every
worker process imports this file: it must import neither jax nor numpy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from bfcl_eval.constants.enums import Language

from coevolve_jax.envs.base import digest
from coevolve_jax.envs.bfcl.scenario import SINGLE_TURN_ENVIRONMENT, alike, single_turn_scenario
from coevolve_jax.envs.bfcl.toolsets import HINT, json_schema, read_data
from coevolve_jax.envs.calls import bind, plain, signatures
from coevolve_jax.envs.turns import Turns
from coevolve_jax.types import Call, Observation, Outcome, Task, Turn

_HALVES = {"development": (0,), "test": (1,), "evaluation": (0, 1), "all": (0, 1)}  # by split
# A model of bfcl_eval's list whose function names keep their dots, as they do in our prompts.
_MODEL = "Qwen/Qwen3-8B-FC"
_MODELS = "bfcl_eval.constants.model_config"


# --- Tasks -------------------------------------------------------------------------------------


def load(category: str, split: str = "all", documents: str = "") -> list[Task]:
    """Returns the tasks of a category, such as simple_python, in the order of BFCL's data.

    split: "development" and "test" are halves; "evaluation" and "all" are both. Other splits have no tasks.
    documents: "official" shows BFCL's own documents as its Qwen handler does; "" shows JSON schema.
    """
    halves = _HALVES.get(split, ())
    return [task for task in _tasks(category, documents) if _half(task) in halves]


@functools.cache
def _tasks(category: str, documents: str) -> tuple[Task, ...]:
    entries = read_data(f"BFCL_v4_{category}.json")
    answers = read_data("possible_answer", f"BFCL_v4_{category}.json")
    return tuple(
        _task(category, entry, answer["ground_truth"], documents)
        for entry, answer in zip(entries, answers, strict=True)
    )


def _task(category: str, entry: Mapping, answers: list[dict], documents: str) -> Task:
    ((*system, question),) = entry["question"]  # a system message precedes some questions of users
    return Task(
        id=entry["id"],
        environment=SINGLE_TURN_ENVIRONMENT,
        scenario=single_turn_scenario(category, entry["function"], answers, documents),
        turns=(Turn(question["content"], _reference(entry["function"], answers)),),
        system="\n\n".join(message["content"] for message in system),
    )


def _reference(functions: Sequence[Mapping], answers: Sequence[Mapping]) -> tuple[Call, ...]:
    """Returns one right answer: the first value of each parameter, without those that may be left out."""
    required = {f["name"]: f["parameters"]["required"] for f in functions}
    calls = []
    for answer in answers:
        ((name, parameters),) = answer.items()
        given = {
            parameter: _plainly(next((v for v in values if v != ""), ""))
            for parameter, values in parameters.items()
            if parameter in required[name] or "" not in values
        }
        calls.append(Call(name, given))
    return tuple(calls)


def _plainly(value: Any) -> Any:
    """Returns a possible value as a call gives it. A dict there lists the possible values of each key."""
    if isinstance(value, Mapping):
        return {key: values[0] for key, values in value.items() if "" not in values}
    return [_plainly(v) for v in value] if isinstance(value, list) else value


def _half(task: Task) -> int:
    """Returns 0 or 1, so that tasks which are alike are in one half."""
    return hashlib.sha256(alike(task).encode()).digest()[0] % 2


def with_examples(task: Task, count: int, seed: int) -> Task:
    """Draws worked examples: development tasks of the same category, no two of which are alike.

    None calls a function that the task's answer calls, and none has the task's request. Their functions are
    offered too, after the task's own; an example with another function of a name that is offered is passed
    over. The same seed gives a task the same examples. ValueError if there are fewer.
    """
    called, request = {call.name for call in task.calls}, task.turns[0].query
    worked = [t for t in _worked(task.scenario["category"]) if t.turns[0].query != request]
    known = list({alike(t): t for t in worked if called.isdisjoint(c.name for c in t.calls)}.values())
    # The task's own functions come first: the checker reads the first of `simple`.
    offered, drawn = {f["name"]: f for f in task.scenario["functions"]}, []
    for example in random.Random(f"{seed} {task.id}").sample(known, len(known)):
        functions = {f["name"]: f for f in example.scenario["functions"]}
        if len(drawn) < count and all(offered.get(name, f) == f for name, f in functions.items()):
            drawn.append(example)
            offered |= functions
    if count > len(drawn):
        raise ValueError(f"{task.id} has {len(drawn)} worked examples at most: {count} are asked for.")
    scenario = {**task.scenario, "functions": list(offered.values())}
    return dataclasses.replace(task, scenario=scenario, examples=tuple(t.turns[0] for t in drawn))


@functools.cache
def _worked(category: str) -> tuple[Task, ...]:
    """Returns the development tasks whose reference passes: BFCL's data hold a few that no answer passes."""
    return tuple(t for t in load(category, "development") if check(t, t.calls)["valid"])


def tools(task: Task) -> list[dict]:
    """Returns the documents of the task's functions (as toolsets.tools, by Task.scenario["documents"])."""
    functions = task.scenario["functions"]
    if task.scenario.get("documents") == "official":
        return [{**f, "description": f["description"] + HINT} for f in functions]
    return [
        {"type": "function", "function": {**f, "parameters": json_schema(f["parameters"])}} for f in functions
    ]


# --- Verdicts ----------------------------------------------------------------------------------


@contextlib.contextmanager
def without_handlers() -> Iterator[None]:
    """Lets ast_checker be imported alone: it reads one flag from a table that imports every vendor's SDK."""
    before, stand_in = sys.modules.get(_MODELS), ModuleType(_MODELS)
    vars(stand_in)["MODEL_CONFIG_MAPPING"] = {_MODEL: SimpleNamespace(underscore_to_dot=False)}
    sys.modules[_MODELS] = stand_in
    try:
        yield
    finally:
        del sys.modules[_MODELS]
        if before:
            sys.modules[_MODELS] = before


@functools.cache
def official_checker() -> Callable[..., dict]:
    """Returns bfcl_eval's own ast_checker."""
    with without_handlers():
        return importlib.import_module("bfcl_eval.eval_checker.ast_eval.ast_checker").ast_checker


def check(task: Task, calls: Sequence[Call]) -> dict:
    """Gives BFCL's own verdict on the calls of a message.

    Returns {"valid": bool, "error_type": str, "error_message": str}; the strings are empty where valid.
    """
    refused = lambda kind, why: {"valid": False, "error_type": kind, "error_message": str(why)}
    start = task.scenario
    try:
        made = [{call.name: plain(call.arguments)} for call in calls]
    except ValueError as error:
        return refused("ast_decoder:decoder_failed", error)
    try:
        verdict = official_checker()(
            start["functions"], made, start["answers"], Language.PYTHON, start["category"], _MODEL
        )
    except Exception as error:  # the checker itself fails on some values, such as text in a list of dicts
        return refused("ast_checker:failed", repr(error))
    if not verdict["valid"]:
        return refused(verdict["error_type"], verdict["error"])
    return {"valid": True, "error_type": "", "error_message": ""}


def official_check(task_id: str, turns: Sequence[Sequence[Sequence[Call]]]) -> dict:
    """Checks the calls turns[0][step][call] of a benchmark task. ValueError for an unknown id."""
    category = task_id.rpartition("_")[0]
    (task,) = [t for t in load(category) if t.id == task_id] or [None]
    if task is None or len(turns) != 1:
        raise ValueError(f"BFCL's {category} has no task {task_id!r} of {len(turns)} turns.")
    return check(task, [call for step in turns[0] for call in step])


# --- Worlds ------------------------------------------------------------------------------------


class Environment:
    """Records the calls of one message, which ends the turn."""

    def reset(self, task: Task) -> None:
        """Begins an empty record."""
        self._task = task
        self._signatures = signatures([{"function": f} for f in task.scenario["functions"]])
        self._calls: list[Call] = []
        self._turns = Turns(task)

    def step(self, call: Call) -> Observation:
        """Records a call. An unknown function or parameter is recorded too, and answered {"error": ...}."""
        self._calls.append(call)
        try:
            bind(call, self._signatures)
        except ValueError as error:
            return Observation(json.dumps({"error": str(error)}), error=True, last_message=True)
        return Observation("recorded", last_message=True)

    def end_turn(self) -> None:
        """Grades the calls. ValueError when the turn has ended."""
        self._turns.end(lambda turn: check(self._task, self._calls)["error_type"])

    def score(self) -> Outcome:
        """Returns reward 1 where the turn ended and passed. ValueError for a task without a turn."""
        return self._turns.outcome()

    def fingerprint(self) -> str:
        """Hashes (sha256) the calls."""
        return digest([[call.name, call.arguments] for call in self._calls])

    def close(self) -> None:
        self._calls = []
