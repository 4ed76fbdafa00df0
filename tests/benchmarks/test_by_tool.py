"""Blame for a failure goes to the tool of the first reference call that was missed."""

import sys

import numpy as np
import pytest

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from by_tool import by_tool, reached_calls, table

from coevolve_jax.types import Call, Outcome, Step, Task, Trajectory, Turn

A, B, C = Call("a", {"x": 1}), Call("b", {}), Call("c", {"y": "z"})
TASK = Task("t", "bfcl", {}, (Turn("", (A, B)), Turn("", (C,))))


def trajectory(*turns: list[Call | None], success=False, stop="done") -> Trajectory:
    empty = np.zeros(0, np.int32)
    steps = tuple(Step(i, "", call, "", False) for i, turn in enumerate(turns) for call in turn)
    return Trajectory(
        task_id="t",
        rollout_index=0,
        ids=empty,
        mask=empty.astype(bool),
        logprobs=empty.astype(np.float32),
        versions=empty,
        turn_starts=(0,),
        steps=steps,
        stop=stop,
        outcome=Outcome(float(success), success),
    )


@pytest.mark.parametrize(
    "rolled, expected",
    [
        (trajectory([A, B], [C], success=True), [("a", True), ("b", True), ("c", True)]),
        # Solved in its own way
        (trajectory([B, A], [C], success=True), [("a", True), ("b", True), ("c", True)]),
        (trajectory([Call("a", {"x": 1.0}), B], [C]), [("a", True), ("b", True), ("c", True)]),
        (trajectory([Call("a", {"x": 2}), B], [C]), [("a", False)]),  # another argument
        (trajectory([A], [C]), [("a", True), ("b", False)]),  # skipped, or given up
        (trajectory([A, None, B], [C]), [("a", True), ("b", False)]),  # no readable call
        (trajectory([A, B], [B]), [("a", True), ("b", True), ("c", False)]),
        (trajectory([A, B, C], []), [("a", True), ("b", True), ("c", False)]),  # in the wrong turn
        (trajectory([A], stop="context_limit"), [("a", True)]),  # no room for b: not its fault
    ],
)
def test_calls_are_counted_up_to_the_first_that_was_missed(rolled, expected):
    assert [(call.name, made) for call, made in reached_calls(TASK, rolled)] == expected


def test_a_tools_figures_are_of_all_tasks_in_which_it_was_reached():
    other = Task("u", "bfcl", {}, (Turn("", (B,)),))
    rolled = {
        "t": [trajectory([A, B], [C], success=True), trajectory([A])],
        "u": [trajectory([B], success=True), trajectory([])],
    }
    rows = by_tool([TASK, other], rolled)
    assert rows == {
        "a": {"tasks": 1, "success": 0.5, "calls_reached": 2, "call_success": 1.0},
        "b": {"tasks": 2, "success": 0.5, "calls_reached": 4, "call_success": 0.5},
        "c": {"tasks": 1, "success": 0.5, "calls_reached": 1, "call_success": 1.0},
    }
    lines = table(rows, {"b": {"error": "skip", "rate": 0.5}}, {"a": 0.1, "b": 0.25, "c": 0.0}).splitlines()
    assert [line.split()[0] for line in lines] == ["tool", "b", "a", "c"] and "skip 50%" in lines[1]
