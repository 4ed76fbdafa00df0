"""BFCL's worlds: states, grading and fingerprints.

BFCL's own comparisons of states and responses grade the turns. Every worker process imports this file: it
must import neither jax nor numpy.
"""

from __future__ import annotations

import copy
import hashlib
from typing import Any

from bfcl_eval.constants import executable_backend_config as backend
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker as checker

from coevolve_jax.envs.bfcl.toolsets import documented, execute, load_class
from coevolve_jax.envs.turns import Turns
from coevolve_jax.types import Call, Observation, Outcome, Task, Turn

ENVIRONMENTS = ("bfcl", "bfcl_long_context")


def _build(task: Task) -> dict[str, Any]:
    """Builds instances by class name in the task's initial state. They share nothing with the task."""
    long_context = task.environment == "bfcl_long_context"
    world = {}
    for toolset in task.scenario["toolsets"]:
        instance = load_class(toolset)()
        if toolset not in backend.STATELESS_CLASSES:
            start = copy.deepcopy(task.scenario["initial_state"].get(toolset, {}))
            instance._load_scenario(start, long_context=long_context)
        # The long-context extensions are module globals, which instances would change in place.
        world[toolset] = copy.deepcopy(instance) if long_context else instance
    return world


def _canonical(value: Any, above: tuple[int, ...] = ()) -> str:
    """Returns text that is equal for values that compare equal.

    1 == 1.0 == True, dicts and sets have no order, directories ignore their parent. A directory that contains
    itself refers upwards.
    """
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
    """One BFCL world. For grading it also holds the world that the reference calls lead to."""

    def reset(self, task: Task) -> None:
        """Builds the task's initial state. ValueError: unknown environment or toolset, unusable state."""
        if task.environment not in ENVIRONMENTS:
            raise ValueError(
                f"Task {task.id!r} is of the environment {task.environment!r}: "
                f"use one of {', '.join(ENVIRONMENTS)}."
            )
        withheld = task.scenario["excluded"]
        documents = documented(task.scenario["toolsets"])
        self._allowed = {n: t for n, t in documents.items() if n not in withheld}
        try:
            self._world = _build(task)
        except Exception as error:
            raise ValueError(f"Task {task.id!r}: BFCL cannot load its initial state ({error!r}).") from error
        self._task = task
        self._reference: dict[str, Any] | None = None
        self._results: list[str] = []
        self._called = False
        self._turns = Turns(task)

    def step(self, call: Call) -> Observation:
        """Executes one call. Any mistake in it comes back as {"error": ...}."""
        observation = execute(self._world, self._allowed, call)
        self._called = True
        self._results.append(observation.text)
        return observation

    def end_turn(self) -> None:
        """Grades the turn as multi_turn_checker does. ValueError when all turns have ended."""
        self._turns.end(self._grade)
        self._called = False

    def _grade(self, turn: Turn) -> str:
        """Returns the official error type, "" where the turn passes. Results of earlier turns count too."""
        if self._reference is None:
            self._reference = _build(self._task)
        expected = [execute(self._reference, self._allowed, call).text for call in turn.calls]
        if not expected:
            return ""
        if not self._called:
            return "multi_turn:empty_turn_model_response"
        try:
            verdict: dict[str, Any] = checker.state_checker(self._world, self._reference)
        except RecursionError:  # a directory copied into itself has no end
            return "multi_turn:instance_state_mismatch"
        if verdict["valid"]:
            verdict = checker.response_checker(self._results, expected, self._turns.ended)
        return "" if verdict["valid"] else verdict["error_type"]

    def score(self) -> Outcome:
        """Returns reward 1 where all turns ended and passed. ValueError for a bare scenario."""
        return self._turns.outcome()

    def fingerprint(self) -> str:
        """Hashes (sha256) the instances' public attributes: equal where state_checker finds them equal."""
        public = {
            name: {k: v for k, v in vars(instance).items() if not k.startswith("_")}
            for name, instance in self._world.items()
        }
        return hashlib.sha256(_canonical(public).encode("utf-8", "surrogatepass")).hexdigest()

    def close(self) -> None:
        self._world, self._reference = {}, None
