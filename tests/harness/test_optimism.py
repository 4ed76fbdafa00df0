"""The luck that a campaign selects, against order statistics and the figures that chose the rules."""

import numpy as np
import pytest
from scipy import integrate, stats

from coevolve_jax.harness.optimism import RULES, normal, optimism, resampled

HOW = dict(noise=0.025, truth=0.0, campaigns=20_000)


def test_the_best_of_many_is_the_expected_maximum_of_normal_numbers():
    best = optimism(normal(1.0), rule="best", versions=17, seeds=1, noise=1.0, truth=0.0, campaigns=40_000)
    density = lambda x: x * 18 * stats.norm.pdf(x) * stats.norm.cdf(x) ** 17
    assert best.mean() == pytest.approx(integrate.quad(density, -10, 10)[0], abs=0.02)


def test_a_rule_that_keeps_what_is_not_worse_keeps_the_best():
    for versions, seeds in ((1, 1), (8, 2)):
        how = dict(versions=versions, seeds=seeds, **HOW)
        same = optimism(normal(0.025), rule="not worse", **how), optimism(normal(0.025), rule="best", **how)
        np.testing.assert_array_equal(*same)


@pytest.mark.parametrize(("rule", "points"), [("not worse", 2.6), ("one se", 1.9)])
def test_eight_versions_of_two_seeds_show_this_out_of_nothing(rule, points):
    found = optimism(normal(0.025), rule=rule, versions=8, seeds=2, **HOW)
    assert 100 * found.mean() == pytest.approx(points, abs=0.15)


def test_scores_that_were_measured_can_be_drawn_again():
    scores = np.array([[0.7, 0.6], [0.72, 0.5], [0.69, 0.65], [0.75, 0.55]])
    drawn = resampled(scores)(np.random.default_rng(0), (5, 3))
    assert drawn.shape == (5, 3, 2) and {tuple(row) for row in drawn.reshape(-1, 2)} <= set(
        map(tuple, scores)
    )
    none = optimism(
        resampled(scores[:1]), rule="best", versions=4, seeds=2, noise=0, truth=scores[0], campaigns=10
    )
    np.testing.assert_allclose(none, 0, atol=1e-12)


def test_what_a_campaign_selects_is_read_on_the_other_sets_too():
    """On a copy the gain is the same, on one that knows nothing of the first set it is nothing."""
    rng, n = np.random.default_rng(1), 4000
    own, other = rng.normal(size=(2, n))
    scores = np.array([own, own, other, (own + other) / 2]).T
    how = dict(versions=3, seeds=2, noise=1.0, truth=scores.mean(0), campaigns=20_000)
    for rule in RULES:
        gain, same, none, half = optimism(resampled(scores), rule=rule, **how).mean(0)
        assert gain == same > 0.3
        assert abs(none) < 0.03 and abs(half - gain / 2) < 0.03


def test_one_standard_error_is_asked_of_the_version_that_is_kept_so_far():
    """By hand: 0, 1.5, 2.0 and 3.2, where a version must be better by 1.41."""
    steps = iter([0.0, 1.5, 2.0, 3.2])
    draw = lambda rng, shape: np.array([next(steps) for _ in range(4)]).reshape(1, 4, 1, 1)
    how = dict(rule="one se", versions=3, seeds=1, noise=1.0, truth=0.0, campaigns=1)
    assert optimism(draw, **how).item() == 3.2
    steps = iter([0.0, 1.5, 2.8, 1.6])
    assert optimism(draw, **how).item() == 1.5
