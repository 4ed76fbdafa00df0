"""Signals against a slow reference written from the paper's table."""

import json
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from coevolve_jax.synthesis import signals as sig
from coevolve_jax.types import Call, Group, Outcome, Signal, Step, Task, Trajectory

EMPTY = np.zeros(0, np.int32)


def rollout(task, rollout_index, reward, actions=(), valid=True):
    steps = tuple(Step(0, "", None if a is None else Call(a, {}), "", False) for a in actions)
    outcome = Outcome(reward, reward >= 0.5, valid)
    return Trajectory(task, rollout_index, EMPTY, EMPTY, EMPTY, EMPTY, (), steps, "done", outcome)


def group(task, rewards, actions=()):
    return [rollout(task, i, r, actions) for i, r in enumerate(rewards)]


def groups_of(rollouts):
    """One group per task, in order of first appearance."""
    by_task = {}
    for t in rollouts:
        by_task.setdefault(t.task_id, []).append(t)
    return [Group(Task(task, "made_up", {}), tuple(own)) for task, own in by_task.items()]


def extract(history, rollouts, step, **how):
    return sig.extract(history, groups_of(rollouts), step, **how)


def reference(steps, window, theta):
    """All signals as a set of tuples, recomputed from the full record of every step."""
    found = set()
    for now, rollouts in enumerate(steps):
        valid_until_now = [t for past in steps[: now + 1] for t in past if t.outcome.valid]
        taken = [a for t in valid_until_now for a in t.actions]

        def score(at, task):
            rewards = [Fraction(t.outcome.reward) for t in steps[at] if t.task_id == task and t.outcome.valid]
            return sum(rewards) / len(rewards) if rewards else None

        for t in rollouts:
            if not t.outcome.valid:
                continue
            past = [score(at, t.task_id) for at in range(now)]
            past = [s for s in past if s is not None][-window:]
            success = t.outcome.reward >= 0.5
            if any(s >= 0.5 for s in past) and score(now, t.task_id) < 0.5 and not success:
                found.add(("forgetting", t.task_id, t.rollout_index, now, None))
            peers = [p for p in rollouts if p.task_id == t.task_id and p.outcome.valid]
            if any(p.outcome.reward >= 0.5 for p in peers) and any(p.outcome.reward < 0.5 for p in peers):
                found.add(("boundary", t.task_id, t.rollout_index, now, None))
            rare = [
                (taken.count(a), a)
                for a in t.actions
                if 0 < Fraction(taken.count(a), len(taken)) < Fraction(theta, 100)
            ]
            if rare:
                found.add(("rare", t.task_id, t.rollout_index, now, min(rare)[1]))
    return found


REWARDS = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
ACTIONS = st.lists(st.sampled_from(["ls", "ls", "cd", "mv", None]), max_size=4)
GROUP = st.lists(st.tuples(REWARDS, ACTIONS, st.sampled_from([True, True, True, False])), max_size=4)
STEP = st.fixed_dictionaries({"a": GROUP, "b": GROUP}).map(
    lambda groups: [rollout(task, i, *r) for task, rs in groups.items() for i, r in enumerate(rs)]
)
STEPS = st.lists(STEP, max_size=7)


def as_tuples(signals):
    return [(s.kind, s.task_id, s.rollout_index, s.step, s.pattern) for s in signals]


@settings(max_examples=300, deadline=None)
@given(STEPS, st.integers(1, 4), st.sampled_from([1, 5, 20, 34, 50, 100]), st.randoms())
def test_equals_the_reference(steps, window, theta, random):
    history, found = sig.History(), []
    for now, rollouts in enumerate(steps):
        shuffled = list(rollouts)
        random.shuffle(shuffled)
        new, history = extract(history, shuffled, now, window=window, theta=theta)
        found += as_tuples(new)
        assert all(len(s) <= window for s in history.scores.values())
    assert len(found) == len(set(found))
    assert set(found) == reference(steps, window, theta)


@settings(max_examples=100, deadline=None)
@given(STEPS, STEPS)
def test_json_in_the_middle_changes_nothing(before, after):
    history = sig.History()
    for now, rollouts in enumerate(before):
        _, history = extract(history, rollouts, now, window=3, theta=20)
    copy = sig.History.from_json(json.loads(json.dumps(history.to_json())))
    assert copy == history
    for now, rollouts in enumerate(after):
        expected, history = extract(history, rollouts, now, window=3, theta=20)
        got, copy = extract(copy, rollouts, now, window=3, theta=20)
        assert got == expected
    assert json.dumps(copy.to_json()) == json.dumps(history.to_json())


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_invalid_rollouts_are_as_if_they_had_not_been(steps):
    with_them, without = sig.History(), sig.History()
    for now, rollouts in enumerate(steps):
        a, with_them = extract(with_them, rollouts, now, window=2, theta=30)
        b, without = extract(without, [t for t in rollouts if t.outcome.valid], now, window=2, theta=30)
        assert a == b
    assert with_them == without


def run(steps, window=10, theta=5):
    history, last = sig.History(), []
    for now, rollouts in enumerate(steps):
        last, history = extract(history, rollouts, now, window=window, theta=theta)
    return as_tuples(last), history


def test_forgetting_is_carried_by_the_failed_rollouts_only():
    last, _ = run([group("a", [1, 1, 1]), group("a", [0, 1, 0])])
    assert [s for s in last if s[0] == "forgetting"] == [
        ("forgetting", "a", 0, 1, None),
        ("forgetting", "a", 2, 1, None),
    ]


def test_forgetting_looks_back_exactly_window_scores_and_not_at_the_present_one():
    past = [group("a", [1.0]), group("a", [0.0]), group("a", [0.0])]
    assert run([*past, group("a", [0.0])], window=2)[0] == []
    assert run([*past, group("a", [0.0])], window=3)[0] == [("forgetting", "a", 0, 3, None)]
    assert run([group("a", [0.0])])[0] == []


def test_a_history_of_a_wider_window_is_read_through_the_narrow_one():
    _, history = run([group("a", [1.0]), group("a", [0.0])], window=9)
    assert extract(history, group("a", [0.0]), 2, window=1, theta=5)[0] == []


def test_steps_without_a_score_do_not_use_up_the_window():
    unscored = [[rollout("a", 0, 0.0, valid=False)], group("b", [0.0])]
    last, _ = run([group("a", [1.0]), *unscored, group("a", [0.0])], window=1)
    assert last == [("forgetting", "a", 0, 3, None)]


def test_a_score_of_one_half_is_a_success():
    assert run([group("a", [0.5]), group("a", [0.25])])[0] == [("forgetting", "a", 0, 1, None)]
    assert run([group("a", [1.0]), group("a", [0.5])])[0] == []


def test_boundary_needs_both_outcomes_among_valid_rollouts():
    assert run([group("a", [1, 0, 1])])[0] == [("boundary", "a", i, 0, None) for i in range(3)]
    assert run([[rollout("a", 0, 1.0), rollout("a", 1, 0.0, valid=False)]])[0] == []


def test_rare_is_strict_and_counts_this_step():
    # 1 of 20 actions is 5%: not below theta = 5. 1 of 21 is.
    assert run([[rollout("a", 0, 1.0, ["ls"] * 19 + ["mv"])]])[0] == []
    assert run([[rollout("a", 0, 1.0, ["ls"] * 20 + ["mv"])]])[0] == [("rare", "a", 0, 0, "mv")]


def test_rare_names_the_rarest_pattern_and_the_first_of_equals():
    assert run([[rollout("a", 0, 1.0, ["ls"] * 97 + ["mv", "mv", "cd"])]])[0] == [("rare", "a", 0, 0, "cd")]
    assert run([[rollout("a", 0, 1.0, ["ls"] * 98 + ["mv", "cd"])]])[0] == [("rare", "a", 0, 0, "cd")]


def test_history_is_not_changed_in_place():
    _, history = run([group("a", [1, 0], ["ls"])])
    before = json.dumps(history.to_json())
    extract(history, group("a", [0, 0], ["mv"]), 1, window=5, theta=5)
    assert json.dumps(history.to_json()) == before
    assert sum(history.action_counts.values()) == 2


def test_scores_survive_json_bit_for_bit():
    _, history = run([group("a", [0.1, 0.2, 0.3, 0.1])])
    assert sig.History.from_json(json.loads(json.dumps(history.to_json()))).scores["a"] == history.scores["a"]


def test_summaries():
    signals = [
        Signal("rare", "a", 0, 3, "ls"),
        Signal("boundary", "a", 0, 3),
        Signal("boundary", "a", 1, 3),
        Signal("boundary", "a", 1, 4),
    ]
    assert sig.count_by_kind(signals) == {"forgetting": 0, "boundary": 3, "rare": 1}


@pytest.mark.parametrize(
    "window, theta, word",
    [
        (0, 5, "window is 0"),
        (1, 0, "theta is 0"),
        (1, 101, "theta is 101"),
        (1, float("nan"), "theta is nan"),
    ],
)
def test_thresholds_are_checked(window, theta, word):
    with pytest.raises(ValueError, match=word):
        extract(sig.History(), [], 0, window=window, theta=theta)


@pytest.mark.parametrize(
    "rollouts, word",
    [
        (group("a", [1.5]), "reward 1.5"),
        (group("a", [float("nan")]), "reward nan"),
        (group("a", [1.0]) * 2, "two rollouts numbered 0"),
    ],
)
def test_rollouts_are_checked(rollouts, word):
    with pytest.raises(ValueError, match=word):
        extract(sig.History(), rollouts, 0, window=1, theta=5)
