"""The difference between a version and its parent: on the same tasks, and no gain by lost trials."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coevolve_jax.diagnosis.features import fields
from coevolve_jax.harness import diagnostics, verdict
from coevolve_jax.harness.evidence import Selection
from coevolve_jax.harness.records import Expectation
from coevolve_jax.harness.registry import Diagnostic, Evidence


def selection(counts):
    by_task = {f"t{i}": list(count) for i, count in enumerate(counts)}
    return Selection(by_task, {task: task for task in by_task})


HALF = [(2, 2)] * 20 + [(0, 2)] * 20


@pytest.mark.parametrize(
    "child",
    [
        [(2, 2)] * 20 + [(0, 0)] * 20,  # all that it fails is lost
        [(2, 2)] + [(0, 0)] * 39,  # one task is left
        [(2, 2)] * 20 + [(0, 1)] * 20,
    ],
)
def test_a_version_gains_nothing_by_losing_what_it_fails(child):
    judged = verdict.judge({0: selection(HALF)}, {0: selection(child)}, noise=0.0)
    assert judged.kind == "rejected" and judged.by_seed["0"] <= 0
    better = verdict.judge({0: selection(HALF)}, {0: selection([(2, 2)] * 40)}, noise=0.0)
    assert better.kind == "promoted" and better.by_seed["0"] == 0.5


def test_a_version_gains_nothing_by_losing_the_failed_trials_of_tasks_that_it_solves_in_part():
    judged = verdict.judge({0: selection([(1, 2)] * 40)}, {0: selection([(1, 1)] * 40)}, noise=0.0)
    assert (judged.kind, judged.by_seed["0"]) == ("rejected", 0.0)


SOLVED = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=4, max_size=8)


@settings(max_examples=30)
@given(st.lists(SOLVED, min_size=1, max_size=3), st.sampled_from([0.0, 0.02, 0.2, 0.5]))
def test_the_standard_error_is_that_of_runs_or_of_scenarios_and_the_larger_decides(seeds, noise):
    """Two tasks share a scenario, so the bootstrap of equal parts is the deviation of their means."""
    count = 2 * (min(map(len, seeds)) // 2)
    scenarios = {f"t{i}": f"s{i // 2}" for i in range(count)}
    side = lambda k: {
        s: Selection({f"t{i}": [own[i][k], 4] for i in range(count)}, scenarios)
        for s, own in enumerate(seeds)
    }
    gains = np.array([[(child - parent) / 4 for parent, child in own[:count]] for own in seeds])
    each = gains.mean(0).reshape(-1, 2).mean(1)
    runs, luck = noise * math.sqrt(2 / len(seeds)), each.std() / math.sqrt(len(each))
    se = verdict.standard_error(side(0), side(1), noise)
    assert se == pytest.approx(max(runs, luck), rel=0.15, abs=1e-9)
    judged = verdict.judge(side(0), side(1), noise=noise)
    assert judged.rules[0].bound == judged.se == se
    if abs(each.mean() - se) > 1e-9:
        assert judged.kind == ("promoted" if each.mean() > se else "rejected")


def test_without_a_task_that_both_have_the_runs_alone_give_the_standard_error():
    parent, child = selection([(0, 0), (1, 2)]), selection([(1, 2), (0, 0)])
    assert verdict.standard_error({0: parent, 1: parent}, {0: child, 1: child}, 0.02) == pytest.approx(0.02)


def test_a_version_that_scored_higher_and_moved_the_judge_stands_there_as_such():
    higher = verdict.judge({0: selection(HALF)}, {0: selection([(2, 2)] * 40)}, noise=0.0)
    moved = verdict.with_canary(higher, "A lever moved the judge.")
    assert (moved.kind, moved.decided.sentence) == ("invalid", "A lever moved the judge.")
    assert moved.higher_and_refused and (moved.success, moved.difference) == (1.0, 0.5)
    assert verdict.with_canary(higher, "").kind == "promoted"


@pytest.mark.parametrize("kind", ["promoted", "rejected", "invalid", "failed"])
def test_a_persons_word_stops_a_promotion_and_makes_none(kind):
    judged = verdict.Verdict(kind, ())
    assert verdict.with_person(judged, True, "").kind == kind
    assert verdict.with_person(judged, False, "").kind == ("rejected" if kind == "promoted" else kind)


@pytest.mark.parametrize(("direction", "bound"), [("up", 0.5), ("down", 0.3)])
def test_the_bound_of_the_target_lies_on_the_side_that_was_expected(direction, bound):
    rows = {"before": {"dead": 0.4}, "after": {"dead": 0.4}}
    expects = Expectation("dead", direction, least=0.1)
    judged = verdict.judge({0: selection(HALF)}, {0: selection(HALF)}, noise=0.0, expects=expects, **rows)
    assert {rule.name: rule.bound for rule in judged.rules}["target"] == pytest.approx(bound)


@given(st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_a_version_is_promoted_just_above_a_standard_error_and_rejected_just_below(count, solved, above):
    side = lambda n: {seed: selection([(n, 4)] * 8) for seed in range(count)}  # no luck of the tasks
    noise = solved / 4 / math.sqrt(2 / count) * (0.999 if above else 1.001)
    judged = verdict.judge(side(0), side(solved), noise=noise)
    assert judged.kind == ("promoted" if above else "rejected")
    assert verdict.judge(side(0), side(solved), noise=noise, rules=("score",)).kind == "promoted"


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12), st.integers(0, 99))
def test_the_difference_is_that_of_the_tasks_or_at_worst_and_the_smaller_counts(child, seed):
    rng = np.random.default_rng(seed)
    child = [(min(s, n), n) for s, n in child]
    parent = [(int(rng.integers(0, 5)), 4) for _ in child]
    found = verdict.difference(selection(parent), selection(child))
    pairs = [a[0] / a[1] - b[0] / b[1] for a, b in zip(child, parent, strict=True) if a[1]]
    if not pairs:
        assert math.isnan(found)
    else:
        at_worst = sum(a[0] - b[0] for a, b in zip(child, parent, strict=True)) / (4 * len(child))
        assert found == pytest.approx(min(np.mean(pairs), at_worst))


@pytest.mark.parametrize(
    ("after", "unknown", "told"),
    [
        (0.5, 0.0, []),
        (0.7, 0.0, ["kind is 0.7, beyond 0.6"]),
        (0.5, 0.05, []),
        (0.5, 0.12, ["kind has no value in 12% of the rollouts"]),
        (None, 1.0, ["kind has no value in 100% of the rollouts"]),
    ],
)
def test_a_diagnostic_that_may_refuse_is_at_alert_beyond_its_bound_or_where_it_lacks_values(
    after, unknown, told
):
    watched = {
        "before": 0.5, "after": after, "unknown": [0.01, unknown], "warn": 0.55, "alert": 0.6,
        "direction": "up_is_bad", "gating": True,
    }  # fmt: skip
    assert diagnostics.newly_at_alert({"kind": watched}) == told
    assert diagnostics.newly_at_alert({"kind": {**watched, "gating": False}}) == []
    before = {"before": after, "unknown": [unknown, unknown]}
    assert diagnostics.newly_at_alert({"kind": {**watched, **before}}) == []  # it is not new


def test_a_watched_diagnostic_tells_the_share_of_rollouts_without_a_value():
    known = [Diagnostic("ratio", "trajectory", "double(errors / calls)", "up_is_bad", "gating")]
    row = dict.fromkeys(fields("trajectory"), 1)
    rows = [{**row, "errors": 1, "calls": 1}] * 3 + [{**row, "calls": 0}]
    ones = np.ones(4, int)
    child = Evidence(tuple(rows), ones > 0, ones, ones, ones, ones, ones)
    found = diagnostics.watched(known, child.where(np.arange(4) < 3), child)["ratio"]
    assert (found["before"], found["after"], found["unknown"]) == (1.0, 1.0, [0.0, 0.25])


@pytest.mark.parametrize(
    ("was", "now", "ok"),
    [((0.4, 0.4), (0.6, 0.5), True), ((0.4, 0.4), (0.6, 0.4), False), ((0.4, 0.4), (0.6, 0.3), False),
     ((0.4, 0.4), (0.3, 0.3), True), ((0.4, 0.4), (0.6, None), False), ((0.4, None), (0.6, 0.9), False),
     ((None, 0.4), (0.6, 0.4), False), ((None, 0.4), (0.6, 0.5), True), ((0.4, None), (0.3, None), True)],
)  # fmt: skip
def test_a_reward_that_rises_without_success_is_refused_and_what_is_unknown_shows_no_rise(was, now, ok):
    before, after = ({"shaped_last": shaped, "success_last": solved} for shaped, solved in (was, now))
    child = selection([(2, 2)] * 40)
    judged = verdict.judge({0: selection(HALF)}, {0: child}, noise=0.0, before=before, after=after)
    assert [rule.ok for rule in judged.rules if rule.name == "reward"] == [ok]
    assert judged.kind == ("promoted" if ok else "rejected")
