"""Leak control: what counts as a near copy of an evaluation task."""

import dataclasses
import time

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from coevolve_jax.synthesis.leakage import LeakGuard, histogram
from coevolve_jax.types import Call, Task, Turn

TEMPLATES = {
    "cd": "Change the current working directory to the specified folder {}.",
    "mv": "Move a file from one location to another, namely {}.",
    "grep": "Search for lines in a file that contain the specified pattern {}.",
    "post_tweet": "Post a new tweet with the content {}.",
    "book_flight": "Book a flight for the traveller with the card {}.",
}
WORDS = [f"{a}_{b}" for a in ("final", "draft", "budget", "summer", "alpha", "omega") for b in range(12)]


def task(name, *calls):
    """Worded from the tool documentation, as the synthetic tasks are."""
    query = " ".join(TEMPLATES[tool].format(value) for tool, value in calls)
    return Task(name, "bfcl", {}, (Turn(query, tuple(Call(t, {"x": v}) for t, v in calls)),))


def random_task(name, rng):
    tools = rng.choice(sorted(TEMPLATES), size=rng.integers(2, 6))
    return task(name, *((str(t), str(rng.choice(WORDS))) for t in tools))


EVALUATION = [random_task(f"e{i}", np.random.default_rng([0, i])) for i in range(60)]
GUARD = LeakGuard(EVALUATION)


def test_an_identical_task_has_similarity_one_and_is_refused():
    for one in EVALUATION[:10]:
        similarity, nearest = GUARD.nearest(dataclasses.replace(one, id="copy"))
        assert similarity == pytest.approx(1.0, abs=1e-6) and nearest == one.id
        assert GUARD.check(one) == "near_evaluation"


def test_the_same_calls_in_other_words_and_turns_are_refused():
    one = EVALUATION[3]
    calls = one.turns[0].calls
    turns = (Turn("Please be so kind.", calls[:1]), Turn("And now something else entirely!", calls[1:]))
    other = dataclasses.replace(one, id="other", turns=turns, scenario={"other": 1})
    assert GUARD.nearest(other)[0] < GUARD.threshold
    assert GUARD.check(other) == "near_evaluation"


def test_numbers_that_the_tools_take_as_equal_are_equal():
    def buy(amount):
        return Task("n", "bfcl", {}, (Turn(f"spend {amount!r}", (Call("buy", {"amount": amount}),)),))

    guard = LeakGuard([buy(5), *EVALUATION], threshold=1.0)
    assert guard.check(buy(5.0)) == "near_evaluation"
    assert guard.check(buy(5.5)) is None and guard.check(buy("5")) is None


def test_the_same_tools_with_other_values_are_far_below_the_threshold():
    guard = LeakGuard([*EVALUATION, task("mine", ("cd", "docs"), ("mv", "note.txt"), ("grep", "error"))])
    other = task("x", ("cd", "pictures"), ("mv", "cat.png"), ("grep", "budget"))
    assert guard.similarities(other)[-1] < 0.5
    assert guard.check(other) is None


def test_a_copy_with_one_small_change_lies_between():
    guard = LeakGuard([*EVALUATION, task("mine", ("cd", "docs"), ("mv", "note.txt"), ("grep", "error"))])
    near = guard.similarities(task("x", ("cd", "docs"), ("mv", "note.txt"), ("grep", "warning")))[-1]
    far = guard.similarities(task("x", ("cd", "pictures"), ("mv", "cat.png"), ("grep", "budget")))[-1]
    assert far + 0.2 < near < 1.0


def test_reworded_near_copies_are_refused_by_the_threshold():
    mine = task("mine", ("cd", "docs"), ("mv", "note.txt"), ("grep", "error"), ("post_tweet", "done"))
    calls = (*mine.calls, Call("cd", {"x": "docs"}))
    longer = dataclasses.replace(mine, turns=(Turn(mine.turns[0].query, calls),))
    assert LeakGuard([*EVALUATION, mine]).check(longer) == "near_evaluation"


def test_unrelated_tasks_are_near_zero():
    other = Task("z", "bfcl", {}, (Turn("zebras ahoy", (Call("sail", {"y": 1}),)),))
    assert GUARD.nearest(other)[0] == 0.0 and GUARD.check(other) is None


def test_shared_wording_weighs_little():
    # Query and tools are shared by the whole corpus; only the value differs.
    corpus = [task(f"c{i}", ("cd", f"folder{i}")) for i in range(100)]
    assert LeakGuard(corpus[:1]).similarities(corpus[1])[0] > 0.3
    assert LeakGuard(corpus[:1], corpus=corpus[2:]).similarities(corpus[1])[0] < 0.05


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_bounded_and_symmetric(a, b):
    one, two = random_task("one", np.random.default_rng(a)), random_task("two", np.random.default_rng(b))
    guard = LeakGuard([one, two])
    similarities = guard.similarities(one), guard.similarities(two)
    assert all((0 <= s).all() and (s <= 1).all() for s in similarities)
    assert similarities[0][1] == pytest.approx(similarities[1][0], abs=1e-6)
    assert similarities[0][0] == pytest.approx(1.0, abs=1e-6)


def test_cosine_equals_the_formula():
    a, b = task("a", ("cd", "docs")), task("b", ("cd", "pictures"))
    # Shared (2 of 2 tasks): eight words, "the" twice, and the tool. Own (1 of 2): a word and a value each.
    shared, own = np.log(3 / 2.5), np.log(3 / 1.5)
    counts = np.array([1, 2, 1, 1, 1, 1, 1, 1, 1])
    dot = np.sum(counts**2) * shared**2
    expected = dot / (dot + 2 * own**2)
    assert LeakGuard([a, b]).similarities(a)[1] == pytest.approx(expected, abs=1e-6)


def test_no_evaluation_tasks_and_scenarios_without_calls():
    guard = LeakGuard([])
    assert guard.nearest(EVALUATION[0]) == (0.0, None) and guard.check(EVALUATION[0]) is None
    scenario = Task("scenario", "bfcl", {})
    assert LeakGuard([scenario]).check(dataclasses.replace(scenario, id="other")) is None


def test_threshold_is_inclusive_and_checked():
    one = task("x", ("cd", "docs"), ("mv", "draft_1"), ("cd", "draft_2"))
    similarity = GUARD.nearest(one)[0]
    assert LeakGuard(EVALUATION, similarity).check(one) == "near_evaluation"
    assert LeakGuard(EVALUATION, float(np.nextafter(similarity, 1))).check(one) is None
    for bad in (0.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="threshold"):
            LeakGuard(EVALUATION, bad)


def test_300_evaluation_tasks_take_less_than_two_milliseconds_each():
    guard = LeakGuard([random_task(f"e{i}", np.random.default_rng([1, i])) for i in range(300)])
    new = [random_task("n", np.random.default_rng([2, i])) for i in range(50)]
    seconds = []
    for one in new:
        start = time.thread_time()  # it computes, and waits for nothing
        guard.check(one)
        seconds.append(time.thread_time() - start)
    assert np.median(seconds) < 2e-3


def test_histogram():
    assert histogram([0.0, 0.05, 0.5, 0.99, 1.0], bins=10) == {
        "edges": pytest.approx([i / 10 for i in range(11)]),
        "counts": [2, 0, 0, 0, 0, 1, 0, 0, 0, 2],
    }
    assert histogram([], bins=2)["counts"] == [0, 0]
