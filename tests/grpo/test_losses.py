"""Each loss, advantage and filter against numpy from the paper's formula, trajectory by trajectory."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coevolve_jax.grpo import losses
from coevolve_jax.grpo.advantages import drop_zero_variance, group_advantages
from coevolve_jax.grpo.filter import FilterState, filter_groups
from coevolve_jax.types import spread

# Two rows: trajectories of 3 and 5 policy tokens; then one of 4, one without any, and padding.
SEGMENTS = np.array([[1] * 5 + [2] * 7, [1] * 6 + [2] * 3 + [0] * 3])
MASK = np.array([[0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0], [0, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 0]], bool)
TRAJECTORIES = [(0, 1), (0, 2), (1, 1)]


def draws(seed=0):
    """New, old and reference log-probabilities [2, 12], and each trajectory's advantage at its tokens."""
    rng = np.random.default_rng(seed)
    new, old, ref = (rng.normal(-1, 0.4, MASK.shape).astype(np.float32) for _ in range(3))
    advantages = rng.normal(size=(2, 3)).astype(np.float32)[np.arange(2)[:, None], SEGMENTS]
    return new, old, ref, advantages


def tokens_of(row, segment):
    return np.flatnonzero((SEGMENTS[row] == segment) & MASK[row])


def aggregated(token_losses, aggregate):
    weights = losses.token_weights(MASK, SEGMENTS, aggregate)
    total = losses.denominator(MASK[None], SEGMENTS[None], aggregate, 10)
    return float(jnp.sum(jnp.where(MASK, token_losses * weights, 0)) / total)


def surrogate(level, low, high):
    new, old, _, advantages = draws()
    ratio = jnp.exp(losses.log_ratio(new, old, MASK, SEGMENTS, level))
    return *losses.clipped_surrogate(ratio, advantages, low, high), ratio


def expected(token_loss, reduce):
    """Applies `reduce` to the trajectories' lists of token_loss(row, token, tokens of its trajectory)."""
    return reduce([[token_loss(r, t, tokens_of(r, s)) for t in tokens_of(r, s)] for r, s in TRAJECTORIES])


def clip_term(r, a, low, high):
    return -min(r * a, min(max(r, 1 - low), 1 + high) * a)


def test_grpo_is_the_mean_over_trajectories_of_their_token_means():
    new, old, _, a = draws()
    term = lambda r, t, _: clip_term(np.exp(new[r, t] - old[r, t]), a[r, t], 0.2, 0.2)
    want = expected(term, lambda parts: np.mean([np.mean(p) for p in parts]))
    assert aggregated(surrogate("token", 0.2, 0.2)[0], "sequence") == pytest.approx(want, rel=1e-5)


def test_dapo_is_the_mean_over_all_tokens_with_a_higher_upper_clip():
    new, old, _, a = draws()
    term = lambda r, t, _: clip_term(np.exp(new[r, t] - old[r, t]), a[r, t], 0.2, 0.28)
    want = expected(term, lambda parts: np.mean(sum(parts, [])))
    assert aggregated(surrogate("token", 0.2, 0.28)[0], "token") == pytest.approx(want, rel=1e-5)


def test_dr_grpo_divides_each_trajectory_by_a_constant_and_not_by_its_length():
    new, old, _, a = draws()
    term = lambda r, t, _: clip_term(np.exp(new[r, t] - old[r, t]), a[r, t], 0.2, 0.2)
    want = expected(term, lambda parts: np.mean([np.sum(p) / 10 for p in parts]))
    assert aggregated(surrogate("token", 0.2, 0.2)[0], "constant") == pytest.approx(want, rel=1e-5)


def test_gspo_clips_the_ratio_of_the_whole_trajectory():
    new, old, _, a = draws()

    def sequence_loss(row, segment):
        tokens = tokens_of(row, segment)
        s = np.exp(np.sum(new[row, tokens] - old[row, tokens]) / len(tokens))
        return clip_term(s, a[row, tokens[0]], 0.05, 0.06)

    loss, clipped, ratio = surrogate("sequence", 0.05, 0.06)
    want = np.mean([sequence_loss(*key) for key in TRAJECTORIES])
    assert aggregated(loss, "sequence") == pytest.approx(want, rel=1e-5)
    assert len(np.unique(np.asarray(ratio)[MASK])) == len(TRAJECTORIES)
    assert clipped[MASK].any()


def test_the_gradient_of_gspo_reaches_every_token_of_its_trajectory_alike_and_no_other():
    new, old, _, _ = draws()
    one = (SEGMENTS == 2) & (np.arange(2) == 0)[:, None]

    def loss(logprobs):
        ratio = jnp.exp(losses.log_ratio(logprobs, old, MASK, SEGMENTS, "sequence"))
        return jnp.sum(jnp.where(one & MASK, losses.clipped_surrogate(ratio, jnp.ones(()), 9.0, 9.0)[0], 0))

    got = np.asarray(jax.grad(loss)(new))
    s = np.exp(np.mean((new - old)[one & MASK]))  # d(5 s) / d logprob = 5 s / 5
    np.testing.assert_allclose(got[one & MASK], -s, rtol=1e-5)
    np.testing.assert_array_equal(got[~(one & MASK)], 0)


def test_the_ratio_is_not_one_off_policy_and_the_clip_stops_its_gradient():
    new, old, _, _ = draws()
    of = lambda logprobs: losses.clipped_surrogate(jnp.exp(logprobs - old), jnp.ones(()), 0.2, 0.2)
    gradient, clipped = jax.grad(lambda logprobs: jnp.sum(of(logprobs)[0]))(new), of(new)[1]
    assert (np.abs(np.exp(new - old) - 1) > 0.01).mean() > 0.9
    np.testing.assert_array_equal(clipped, np.exp(new - old) > 1.2)
    np.testing.assert_array_equal(np.asarray(gradient) == 0, clipped)
    assert 0 < np.mean(clipped) < 1


def test_kl_estimators_follow_their_formulas_and_two_are_unbiased():
    new, _, ref, _ = draws()
    d = ref - new
    for name, want in {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - 1 - d}.items():
        np.testing.assert_allclose(losses.kl(new, ref, name), want, rtol=1e-4, atol=1e-6)
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    exact = np.sum(p * np.log(p / q))
    for name, unbiased in {"k1": True, "k2": False, "k3": True}.items():
        mean = np.sum(p * np.asarray(losses.kl(np.log(p), np.log(q), name)))
        assert (abs(mean - exact) < 1e-6) == unbiased


def test_the_gradients_of_the_kl_terms_are_what_the_docstring_says():
    q, start = np.array([0.2, 0.5, 0.3]), jnp.array([0.4, -0.2, 0.1])
    p = jax.nn.softmax(start)
    term = lambda name: jax.grad(lambda x: jnp.sum(p * losses.kl(jax.nn.log_softmax(x), jnp.log(q), name)))(
        start
    )
    reverse = jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) * (jax.nn.log_softmax(x) - jnp.log(q))))(start)
    forward = jax.grad(lambda x: -jnp.sum(q * jax.nn.log_softmax(x)))(start)
    np.testing.assert_allclose(term("k1"), 0, atol=1e-6)
    np.testing.assert_allclose(term("k2"), reverse, atol=1e-6)
    np.testing.assert_allclose(term("k3"), forward, atol=1e-6)


def bounded(d, estimator, bound):
    """(value, slope by d) of the bounded estimate in float64; bisection finds where the line begins."""
    value = {"k1": lambda d: -d, "k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}[estimator]
    slope = {"k1": lambda d: -1.0, "k2": lambda d: d, "k3": lambda d: math.exp(d) - 1}[estimator]
    low, high = 0.0, bound + 10
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if value(middle) < bound else (low, middle)
    if estimator == "k1" or abs(d) < low or (estimator == "k3" and d < 0):
        return value(d), slope(d)
    sign = math.copysign(1, d)
    return bound + slope(low) * (abs(d) - low), sign * slope(low)


@pytest.mark.parametrize("bound", [0.01, 1.0, 10.0])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_beyond_the_bound_the_estimate_is_a_line_that_still_pulls(estimator, bound):
    for d in (-1e9, -60.0, -3.0, -0.05, 0.0, 0.05, 1.0, 2.5, 2.7, 5.0, 60.0, 1e3, 1e9):
        got = jax.value_and_grad(lambda p, d=d: losses.kl(p, p * 0 + d, estimator, bound))(0.0)
        value, slope = bounded(d, estimator, bound)
        assert np.isfinite(got).all()
        assert got[0] == pytest.approx(value, rel=1e-5, abs=1e-6), d
        assert got[1] == pytest.approx(-slope, rel=1e-5, abs=1e-6), d


def test_a_policy_far_below_the_reference_is_pulled_back():
    """The pull never weakens with the distance: no token is let go."""
    for estimator in ("k2", "k3"):
        pull = -jax.vmap(jax.grad(lambda p: losses.kl(p, 0.0, estimator, 10.0)))(
            -jnp.linspace(0.1, 40.0, 200)
        )
        assert (np.diff(pull) >= 0).all() and pull[0] > 0
        assert float(pull[-1]) == pytest.approx({"k2": 20**0.5, "k3": 12.61}[estimator], rel=1e-3)


def test_without_a_bound_nothing_is_bent():
    d = np.linspace(-20, 20, 41)
    np.testing.assert_allclose(losses.kl(-d, 0 * d, "k3"), np.exp(d) - 1 - d, rtol=1e-5, atol=1e-6)


def test_the_proximal_policy_lies_between_sampler_and_learner():
    new, sampler, _, _ = draws()
    ages = np.arange(24).reshape(2, 12) % 5
    want = new.copy()
    for row, t in np.argwhere(ages > 0):
        d = ages[row, t]
        want[row, t] = sampler[row, t] / d + new[row, t] * (d - 1) / d
    got = np.asarray(losses.proximal_logprobs(new, sampler, ages))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_array_equal(got[ages == 0], new[ages == 0])
    np.testing.assert_array_equal(got[ages == 1], sampler[ages == 1])
    slope = jax.grad(lambda lp: jnp.sum(losses.proximal_logprobs(lp, sampler, ages)))(new)
    np.testing.assert_array_equal(slope, 0)


def test_truncated_importance_weights():
    new, sampler, _, _ = draws()
    got = losses.truncated_weight(new, sampler, 1.5)
    np.testing.assert_allclose(got, np.minimum(np.exp(new - sampler), 1.5), rtol=1e-6)
    assert (np.asarray(got) == 1.5).any() and (np.asarray(got) < 1).any()
    gradient = jax.grad(lambda lp: jnp.sum(losses.truncated_weight(lp, sampler, 1.5)))(new)
    np.testing.assert_array_equal(gradient, 0)


def test_an_unknown_setting_is_no_silent_default():
    new, old, ref, _ = draws()
    for call in (
        lambda: losses.kl(new, ref, "k4"),
        lambda: losses.log_ratio(new, old, MASK, SEGMENTS, "group"),
        lambda: losses.token_weights(MASK, SEGMENTS, "mean"),
        lambda: losses.denominator(MASK[None], SEGMENTS[None], "mean", 1),
        lambda: group_advantages([0, 1], estimator="std"),
    ):
        with pytest.raises(KeyError):
            call()


REWARDS = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=1, max_size=12)


@settings(deadline=None)
@given(REWARDS)
def test_advantages_follow_their_papers(rewards):
    for estimator in ("group_std", "group_mean", "leave_one_out"):
        got = group_advantages(rewards, estimator=estimator)
        for i, reward in enumerate(rewards):
            others = [*rewards[:i], *rewards[i + 1 :]]
            if len(set(rewards)) == 1:
                assert got[i] == 0
                continue
            if estimator == "group_std":
                want = (reward - np.mean(rewards)) / np.std(rewards)
            elif estimator == "group_mean":
                want = reward - np.mean(rewards)
            else:
                want = reward - np.mean(others)
            assert got[i] == pytest.approx(want, rel=1e-4, abs=1e-6)


def test_a_spread_is_exactly_zero_without_difference_and_the_group_then_dropped():
    groups = {"a": [0.1, 0.1, 0.1], "b": [0.0, 1.0], "none": [], "one": [0.7]}
    spreads = {group: spread(rewards) for group, rewards in groups.items()}
    assert spreads == {"a": 0.0, "b": 0.5, "none": 0.0, "one": 0.0}
    assert drop_zero_variance(spreads) == {"b": 0.5}
    assert drop_zero_variance({"equal": 0.0, "close": 1e-9}) == {"close": 1e-9}


filter_by = partial(filter_groups, z=1.28, decay=0.1, warmup=20, keep=0.5)


def test_the_filter_drops_groups_far_below_the_running_spread():
    """EvoTrainer's numbers: decay 0.1, warm-up of 20 groups, 1.28 standard deviations."""
    rng = np.random.default_rng(0)
    first = dict(enumerate(rng.uniform(0.3, 0.5, 20)))
    kept, state = filter_by(FilterState(), {**first, "dead": 0.0})
    assert kept == list(first)  # the warm-up drops only groups without spread
    mean, var = first[0], 0.0
    for i in range(1, 20):
        delta = first[i] - mean
        mean, var = mean + 0.1 * delta, 0.9 * (var + 0.1 * delta**2)
    assert state == pytest.approx((mean, var, 20))
    limit = mean - 1.28 * var**0.5
    kept, later = filter_by(state, {"low": limit - 1e-6, "dead": 0.0, "just": limit + 1e-6, "high": 0.9})
    assert kept == ["just", "high"]
    assert later.seen == 23


def test_the_filter_keeps_at_least_half_of_the_groups_with_spread():
    kept, _ = filter_by(FilterState(0.5, 1e-4, 50), {"a": 0.1, "b": 0.3, "c": 0.2, "dead": 0.0})
    assert kept == ["b", "c"]


def test_the_other_side_of_the_filter_drops_groups_far_above_and_keeps_the_narrowest():
    state = FilterState(0.5, 0.01, 50)  # mean 0.5, standard deviation 0.1
    spreads = {"a": 0.69, "dead": 0.0, "b": 0.71, "c": 0.1, "d": 0.9}
    kept, later = filter_by(state, spreads, z=2.0, side="high")
    assert kept == ["a", "c"] and later == filter_by(state, spreads)[1]
    assert filter_by(state, spreads, z=2.0, side="high", keep=0.75)[0] == ["a", "b", "c"]
    assert filter_by(state, spreads, z=0.0, side="high", keep=0.1)[0] == ["c"]
    assert filter_by(state, spreads, side="high", warmup=51)[0] == ["a", "b", "c", "d"]


@settings(max_examples=15, deadline=None)
@given(st.lists(st.floats(0, 0.5), max_size=40), st.integers(0, 40))
def test_the_filter_in_two_calls_ends_in_the_state_of_one(values, cut):
    both = dict(enumerate(values))
    _, whole = filter_by(FilterState(), both)
    _, half = filter_by(FilterState(), {k: v for k, v in both.items() if k < cut})
    _, rest = filter_by(half, {k: v for k, v in both.items() if k >= cut})
    assert rest == whole


def test_cross_entropy_weighs_each_token_and_counts_those_with_a_weight():
    logprobs, weights = jnp.log(jnp.asarray([0.5, 0.25, 0.1, 0.9])), jnp.asarray([1.0, 0.5, 0.0, -2.0])
    want = -(np.log(0.5) + 0.5 * np.log(0.25) - 2 * np.log(0.9))
    np.testing.assert_allclose(losses.cross_entropy(logprobs, weights), want, rtol=1e-6)
    assert (
        losses.ce_denominator(weights.reshape(1, 2, 2)) == 3
        and losses.ce_denominator(jnp.zeros((1, 1, 4))) == 1
    )
    hidden = logprobs.at[2].set(-jnp.inf)  # a token without weight cannot spoil the sum
    np.testing.assert_allclose(losses.cross_entropy(hidden, weights), want, rtol=1e-6)
