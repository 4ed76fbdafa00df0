"""Intervals and tests against published values, brute force and their defining properties."""

import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, permutation_test

from coevolve_jax.analysis import stats

RATES = st.sampled_from([0, 0.25, 0.5, 1])


def test_bootstrap_agrees_with_the_normal_interval_on_many_values():
    values = np.random.default_rng(1).normal(3.0, 2.0, 400)
    ones = np.ones(400)
    interval = stats.clustered_ratio(values, ones, seed=5)
    half = 1.96 * values.std() / 20
    assert interval.value == pytest.approx(values.mean())
    expected = (values.mean() - half, values.mean() + half)
    assert (interval.low, interval.high) == pytest.approx(expected, abs=0.03)
    assert (
        interval == stats.clustered_ratio(values, ones, seed=5) != stats.clustered_ratio(values, ones, seed=6)
    )


def test_samples_of_one_task_do_not_count_as_independent():
    """30 tasks are each all right or all wrong on 8 samples: this is evidence of 30 trials, not 240."""
    successes = [8] * 15 + [0] * 15
    clustered = stats.clustered_ratio(successes, [8] * 30)
    assert clustered.value == 0.5
    assert clustered.high - clustered.low == pytest.approx(2 * 1.96 * np.sqrt(0.25 / 30), rel=0.1)
    naive = binomtest(120, 240).proportion_ci(method="wilson")
    assert clustered.high - clustered.low > 2 * (naive.high - naive.low)


def test_a_ratio_refuses_what_it_cannot_estimate():
    for successes, trials, clusters in (
        ([], [], None),
        ([1], [0], None),
        ([1, 2], [3], None),
        ([1], [1], ["a", "b"]),
    ):
        with pytest.raises(ValueError, match="parts, wholes and clusters of as many tasks"):
            stats.clustered_ratio(successes, trials, clusters)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(RATES, RATES), min_size=1, max_size=7))
def test_exact_permutation_is_the_enumeration(pairs):
    before, after = zip(*pairs)
    d = np.subtract(after, before)
    sums = [abs(np.dot(signs, d)) for signs in itertools.product((1, -1), repeat=len(d))]
    result = stats.paired_by_task(before, after)
    assert result.tasks == result.clusters == len(pairs)
    assert result.p == pytest.approx(np.mean([s >= abs(d.sum()) - 1e-12 for s in sums]))
    swapped = stats.paired_by_task(after, before)
    assert swapped.p == pytest.approx(result.p) and swapped.difference.value == pytest.approx(
        -result.difference.value
    )


def test_permutation_on_darwins_maize():
    """Fisher, The Design of Experiments (1935), section 21: 15 pairs, 1726 of 32768 sums are as extreme."""
    d = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
    assert stats.paired_by_task([0] * 15, d).p == pytest.approx(1726 / 32768)
    many = stats.paired_by_task([0] * 60, d * 4, seed=3)
    assert many == stats.paired_by_task([0] * 60, d * 4, seed=3) and many.p < 1e-3


@pytest.mark.parametrize("clusters", [14, 15, 16, 40])
def test_the_p_of_a_permutation_test_does_not_depend_on_how_many_flips_are_in_memory(clusters):
    d = np.random.default_rng(clusters).normal(0.3, 1.0, clusters)
    difference = lambda x, y, axis: np.sum(x - y, axis=axis)
    how = {"permutation_type": "samples", "vectorized": True, "n_resamples": stats.FLIPS}
    rng = np.random.default_rng(0)
    at_once = permutation_test((d, np.zeros(clusters)), difference, **how, rng=rng).pvalue
    assert 0 < at_once < 1 and stats.paired_by_task(np.zeros(clusters), d).p == at_once


def test_a_comparison_over_many_scenarios_needs_little_memory():
    d = np.random.default_rng(0).normal(0.1, 1.0, 300)
    tracemalloc.start()
    try:
        stats.paired_by_task(np.zeros(300), d)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < stats.FLIPS * 300 * 8  # bytes of all sign vectors, of which scipy makes several copies


def test_no_change_is_no_evidence():
    result = stats.paired_by_task([0.5, 0.25], [0.5, 0.25])
    assert result.p == 1 and result.difference == stats.Estimate(0, None, None)


def test_data_without_spread_give_no_interval_of_width_zero():
    """0 of 40 in 5 scenarios weighs as much as 0 of 5 independent trials."""
    tasks = {f"t{i}": [0, 1] for i in range(40)}
    scenarios = {f"t{i}": i // 8 for i in range(40)}
    side = {"by_task": tasks, "scenarios": scenarios}
    solved = {"by_task": {t: [1, 1] for t in tasks}}
    found = stats.held_out({"held_out": {"before": side, "after": solved}})
    exact = binomtest(0, 5).proportion_ci(0.95)
    assert (found.before.low, found.before.high) == pytest.approx((exact.low, exact.high))
    assert (found.after.low, found.after.high) == pytest.approx((1 - exact.high, 1.0))
    assert found.paired.difference == stats.Estimate(1.0, None, None) and found.paired.p == 2 / 2**5
    # Equal but for rounding, and half a success in each of two scenarios or in one.
    assert stats.clustered_ratio([0.1 + 0.2, 0.3], [1, 1]).low is None
    half = stats.share([1, 1], [2, 2])
    assert (half.low, half.high) == pytest.approx(tuple(binomtest(1, 2).proportion_ci(0.95)))
    one = stats.share([1, 2, 0], [2, 2, 2], ["x"] * 3)
    assert one.low < 0.01 and one.high > 0.99 and one.value == 0.5


def test_lost_trials_of_a_run_are_counted_and_may_count_as_failures():
    before = {"by_task": {"a": [1, 2], "b": [1, 2], "c": [0, 2]}, "samples": 2}
    after = {"by_task": {"a": [1, 1], "b": [1, 2], "c": [0, 0]}, "samples": 2}
    assert stats.lost_trials(before) == (0, 6) and stats.lost_trials(after) == (3, 6)
    # A row without the number of trials asked for
    assert stats.lost_trials({"by_task": {"a": [0, 1], "b": [0, 4]}}) == (3, 8)
    assert stats.lost_trials({"by_task": {"a": [0, 0]}, "samples": 4}) == (4, 4)
    assert stats.lost_trials({}) == (0, 0)
    summary = {"held_out": {"before": before, "after": after}}
    found, worst = stats.held_out(summary), stats.held_out_at_worst(summary)
    # A side's success is that of its own trials, as summary.json has it; the gain is of tasks on both sides.
    assert (found.before.value, found.after.value, found.paired.tasks) == (2 / 6, 2 / 3, 2)
    assert found.paired.difference.value == (0.5 + 0) / 2
    assert (worst.before.value, worst.after.value, worst.paired.tasks) == (2 / 6, 2 / 6, 3)
    assert stats.held_out_at_worst({"held_out": {"before": before, "after": before}}) is None


def test_t_interval_over_seeds():
    # t(0.975, 4) = 2.7764; values 1..5 have sd sqrt(2.5).
    estimate = stats.over_seeds([1, 2, 3, 4, 5])
    assert estimate.value == 3 and estimate.high - 3 == pytest.approx(2.7764 * (2.5 / 5) ** 0.5, rel=1e-4)
    with pytest.raises(ValueError, match="at least 2 seeds, got 1"):
        stats.over_seeds([0.3])


def test_held_out_uses_tasks_where_they_are_listed():
    tasks = {f"t{i}": [i % 4, 4] for i in range(12)}
    better = {name: [s + 1, 4] for name, (s, _) in reversed(tasks.items())}
    summary = {
        "held_out_success_before": 18 / 48,
        "held_out_success_after": 30 / 48,
        "held_out_tasks": 12,
        "held_out": {"before": {"by_task": tasks}, "after": {"by_task": better}},
    }
    result = stats.held_out(summary)
    assert result.paired.difference.value == pytest.approx(0.25) and result.paired.p == 2 / 2**12
    assert result.before.value == pytest.approx(18 / 48)
    assert stats.held_out({**summary, "held_out": {}}) is stats.held_out({}) is None
    other = {"before": {"by_task": tasks}, "after": {"by_task": {"x": [1, 1]}}}
    assert stats.held_out({**summary, "held_out": other}) is None
    # The tasks of four scenarios are four pieces of evidence, whichever side names these.
    scenarios = {name: f"s{int(name[1:]) % 4}" for name in tasks}
    for when, side in summary["held_out"].items():
        sides = {**summary["held_out"], when: {**side, "scenarios": scenarios}}
        clustered = stats.held_out({**summary, "held_out": sides})
        assert clustered.paired.clusters == 4 and clustered.paired.p == 2 / 2**4
    # t0 had no valid rollout afterwards: the comparison leaves it out, and the rate has no trial of it.
    invalid = {"before": {"by_task": tasks}, "after": {"by_task": {**better, "t0": [0, 0]}}}
    result = stats.held_out({**summary, "held_out": invalid})
    assert result.paired.tasks == 11 and result.after.value == pytest.approx(29 / 44)
    assert result.before.value == pytest.approx(18 / 48)
