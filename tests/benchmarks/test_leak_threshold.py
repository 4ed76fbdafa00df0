"""The paraphrases that leak control's thresholds are chosen by are what their labels say."""

import sys
from collections import Counter

import numpy as np
import pytest

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import leak_threshold
from paraphrases import in_other_words, other_values, paraphrases, synonymous, values_of

from coevolve_jax.types import Call, Task, Turn

DOCS = {
    "cd": "Change the working directory.",
    "mv": "Move a file, with a new name.",
    "pwd": "Return the folder.",
}
TOOLS = lambda task: [{"function": {"name": name, "description": doc}} for name, doc in DOCS.items()]


def task(name, *turns):
    return Task(name, "bfcl", {}, tuple(Turn(f"Move the file '{name}' first.", calls) for calls in turns))


TASKS = [
    task(
        f"t{i}",
        (Call("cd", {"folder": f"folder_{i}"}), Call("pwd", {})),
        (Call("mv", {"source": f"file_{i}.txt", "times": i}), Call("cd", {"folder": ".."})),
    )
    for i in range(12)
]
VALUES = values_of(TASKS)


def arguments(task):
    return Counter((c.name, k, v) for c in task.calls for k, v in c.arguments.items())


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_keeps_all_values_and_what_is_no_leak_none(seed):
    one, rng = TASKS[seed], np.random.default_rng(seed)
    made = paraphrases(one, TOOLS, VALUES, rng)
    assert {kind for kind, leak, _ in made if leak} >= {"synonyms", "templates", "one call more, templates"}
    assert {kind for kind, leak, _ in made if not leak} == {"other values", "other values, templates"}
    assert len({t.id for _, _, t in made} | {one.id}) == len(made) + 1
    for kind, leak, other in made:
        assert [len(t.calls) for t in other.turns] == [2, 3 if "more" in kind else 2]
        assert all(new.query != old.query for new, old in zip(other.turns, one.turns))
        if leak:
            assert arguments(other) >= arguments(one)
        else:
            assert not arguments(other) & arguments(one)
            assert [c.name for c in other.calls] == [c.name for c in one.calls]


def test_values_are_said_whatever_the_words():
    calls = TASKS[3].calls
    for seed in range(10):
        said = in_other_words(calls, np.random.default_rng(seed))
        assert all(f"{v}" in said for c in calls for v in c.arguments.values())
    assert (
        synonymous("Move the file 'file move', then list.")
        == "relocate the document 'file move', next enumerate."
    )


def test_a_parameter_with_one_value_gets_one_that_is_made_up():
    for value in ("a", 1, 2.5, True, [1, "b"]):
        call = Call("tool", {"x": value})
        made = other_values(call, values_of([task("t", (call,))]), np.random.default_rng(0)).arguments["x"]
        assert made != value and type(made) is type(value)


def test_no_other_task_has_the_calls_of_an_evaluation_task():
    copy = Task("copy", "bfcl", {"elsewhere": 1}, TASKS[0].turns)
    found = leak_threshold.candidates(TASKS[:6], [*TASKS[6:], copy], TOOLS, np.random.default_rng(0))
    assert "copy" not in {c.task.id for c in found} and {t.id for t in TASKS[6:]} <= {
        c.task.id for c in found
    }


def test_precision_and_recall():
    leaks = np.array([True, True, True, False, False])
    assert leak_threshold.quality(np.array([True, True, False, True, False]), leaks) == (2 / 3, 2 / 3)
    assert leak_threshold.quality(np.zeros(5, bool), leaks) == (1.0, 0.0)


def test_made_up_tasks_have_two_to_six_calls_on_offer():
    made = leak_threshold.made_up(TASKS, TOOLS, 30, np.random.default_rng(0))
    assert len({t.id for t in made}) == 30
    assert all(2 <= len(t.calls) <= 6 and {c.name for c in t.calls} <= set(DOCS) for t in made)
