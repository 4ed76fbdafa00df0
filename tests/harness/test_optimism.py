"""The luck that a campaign selects, against order statistics and the figures that chose the rules."""

import numpy as np
import pytest
from scipy import integrate, stats

from coevolve_jax.harness.optimism import normal, optimism, resampled

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
    scores = np.array([0.7, 0.72, 0.69, 0.75])
    drawn = resampled(scores)(np.random.default_rng(0), (5, 3))
    assert drawn.shape == (5, 3) and set(drawn.ravel()) <= set(scores)
    none = optimism(resampled(scores[:1]), rule="best", versions=4, seeds=2, noise=0, truth=0.7, campaigns=10)
    np.testing.assert_allclose(none, 0, atol=1e-12)
