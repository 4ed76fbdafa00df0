"""Interval estimates and tests. Pure functions over numpy and scipy; what is random takes a seed.

scipy.stats takes half a second to import, so only what computes a test or an interval does.

Samples of one task are alike, and so are tasks of one scenario (files, users, texts): the unit of evidence within a run is
the scenario. Over runs it is the seed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 10_000
FLIPS = 40_000  # sign vectors; all of them up to 15 clusters


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A value with its confidence interval, all in the value's own unit."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Paired:
    """Mean difference after - before over tasks, its interval, and the two-sided p value. clusters: scenarios."""

    difference: Estimate
    p: float
    tasks: int
    clusters: int


def resample(clusters: int, rng: np.random.Generator, resamples: int = RESAMPLES) -> np.ndarray:
    """How often each cluster comes in each bootstrap sample: int [resamples, clusters], rows sum to `clusters`."""
    return rng.multinomial(clusters, np.full(clusters, 1 / clusters), size=resamples)


def clustered_ratio(
    parts: ArrayLike,
    wholes: ArrayLike,
    clusters: Sequence[object] | None = None,
    *,
    seed: int = 0,
    confidence: float = 0.95,
) -> Estimate:
    """sum(parts) / sum(wholes) over n tasks with a percentile interval that resamples clusters of them.

    parts: such as successes [n]. wholes: such as trials [n], all above 0. clusters: a label of each task [n]; by
    default each is one of its own. Source: cluster bootstrap, Davison and Hinkley (1997), section 3.8; Miller, "Adding
    Error Bars to Evals" (arXiv 2411.00640), section 2.2. Raises ValueError on unequal lengths, or no task.
    """
    p, w = np.asarray(parts, np.float64), np.asarray(wholes, np.float64)
    labels = range(p.size) if clusters is None else clusters
    if p.shape != w.shape or p.ndim != 1 or not p.size or not (w > 0).all() or len(labels) != p.size:
        raise ValueError(
            f"Expected parts, wholes and clusters of as many tasks, at least one, all wholes > 0; got {p.shape}, "
            f"{w.shape} and {len(labels)} clusters."
        )
    p, w = by_cluster(p, labels), by_cluster(w, labels)
    drawn = resample(len(p), np.random.default_rng(seed))
    rates = (drawn @ p) / (drawn @ w)
    low, high = np.quantile(rates, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Estimate(float(p.sum() / w.sum()), float(low), float(high))


def share(parts: ArrayLike, wholes: ArrayLike, clusters: Sequence[object] | None = None) -> Estimate:
    """clustered_ratio of successes and trials; where all clusters are alike, so that resampling shows no spread, the
    exact interval of as many independent trials (Clopper and Pearson, Biometrika 26, 1934): 0 of 100 is 0 to 3.6%."""
    found = clustered_ratio(parts, wholes, clusters)
    if found.low < found.high:
        return found
    from scipy import stats

    n = len(np.ravel(parts)) if clusters is None else len(set(clusters))
    exact = stats.binomtest(round(found.value * n), n).proportion_ci(0.95)
    return Estimate(found.value, float(exact.low), float(exact.high))


def by_cluster(values: ArrayLike, clusters: Sequence[object]) -> np.ndarray:
    """Sums of values [n] over the tasks of each cluster, in order of its first task: [C]."""
    place = {label: i for i, label in enumerate(dict.fromkeys(clusters))}
    return np.bincount([place[label] for label in clusters], np.asarray(values, np.float64), len(place))


def paired_by_task(
    before: ArrayLike, after: ArrayLike, clusters: Sequence[object] | None = None, *, seed: int = 0
) -> Paired:
    """Mean difference between per-task means before [n] and after [n]; the tasks of a cluster stand or fall together.

    The test flips the sign of whole clusters (Fisher, 1935): all sign vectors where there are few, else a sample.
    """
    b, a = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if b.shape != a.shape or b.ndim != 1 or not b.size:
        raise ValueError(f"A paired test needs the same tasks before and after, got {b.shape} and {a.shape}.")
    labels = list(range(b.size)) if clusters is None else list(clusters)
    difference = clustered_ratio(a - b, np.ones(b.size), labels, seed=seed)
    sums = by_cluster(a - b, labels)
    if len(sums) < 2 or not sums.any():
        return Paired(difference, 1.0, b.size, len(sums))
    from scipy import stats

    p = stats.permutation_test(
        (sums, np.zeros_like(sums)),
        lambda x, y, axis: np.sum(x - y, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=FLIPS,
        rng=np.random.default_rng(seed),
    ).pvalue
    return Paired(difference, float(p), b.size, len(sums))


def over_seeds(values: ArrayLike, confidence: float = 0.95) -> Estimate:
    """Mean over seeds [n] with Student's t interval. Raises ValueError below two seeds: one run has no spread."""
    from scipy import stats

    x = np.asarray(values, np.float64)
    if x.size < 2:
        raise ValueError(f"A t interval needs at least 2 seeds, got {x.size}; run more seeds.")
    mean = float(x.mean())
    if np.ptp(x) == 0:
        return Estimate(mean, mean, mean)
    low, high = stats.ttest_1samp(x, 0.0).confidence_interval(confidence)
    return Estimate(mean, float(low), float(high))


def interquartile_mean(values: ArrayLike) -> float:
    """Mean of the middle half (Agarwal et al., arXiv 2108.13264)."""
    from scipy import stats

    return float(stats.trim_mean(np.asarray(values, np.float64), 0.25))


def probability_of_improvement(ours: ArrayLike, theirs: ArrayLike) -> float:
    """P(a run of ours beats a run of theirs), ties half (Agarwal et al., arXiv 2108.13264)."""
    from scipy import stats

    x, y = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(stats.mannwhitneyu(x, y).statistic / (x.size * y.size))


def paired_p(differences: ArrayLike) -> float:
    """Two-sided p value of a paired t test, from the differences by seed; 1 where there is none."""
    from scipy import stats

    d = np.asarray(differences, np.float64)
    if np.ptp(d) == 0:
        return 1.0 if d[0] == 0 else 0.0
    t = d.mean() / (d.std(ddof=1) / math.sqrt(d.size))
    return float(2 * stats.t.sf(abs(t), d.size - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """p values adjusted for the family (Holm, Scandinavian Journal of Statistics 6, 1979)."""
    adjusted, least = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        least = max(least, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = least
    return adjusted


def seeds_needed(
    sd: float, effect: float, power: float = 0.8, alpha: float = 0.05, most: int = 10_000
) -> int:
    """Seeds with which a two-sided paired t test finds `effect` with probability `power`, where differences by seed
    have the standard deviation `sd` (in the unit of the effect); `most` where more would be needed."""
    from scipy import stats

    if not (effect > 0 and math.isfinite(sd)):
        raise ValueError(f"The effect is {effect}, which must be above 0, and sd {sd}, which must be finite.")
    for n in range(2, most):
        shift, bound = effect / max(sd, 1e-12) * math.sqrt(n), stats.t.ppf(1 - alpha / 2, n - 1)
        found = stats.nct.sf(bound, n - 1, shift)
        if found >= power or not np.isfinite(found):
            return n
    return most


def pass_at_k(samples: int, successes: int, k: int) -> float:
    """Unbiased estimate of P(at least one of k samples succeeds) from n samples with c successes.

    1 - C(n - c, k) / C(n, k): Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv
    2107.03374), eq. 1. Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= successes <= samples and 1 <= k <= samples):
        raise ValueError(
            f"pass@k needs 0 <= successes <= samples and 1 <= k <= samples; "
            f"got successes={successes}, samples={samples}, k={k}."
        )
    return 1.0 - math.comb(samples - successes, k) / math.comb(samples, k)


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Held-out success before and after training, as summary.json records it; paired compares the same tasks."""

    before: Estimate
    after: Estimate
    paired: Paired


def held_out(summary: Mapping) -> HeldOut | None:
    """Intervals and test from a run's summary; None where it holds no held-out success.

    `held_out.before` and `held_out.after` hold by_task {task id: [successes, trials]} and scenarios {task id:
    scenario}, which are the clusters.
    """
    details = summary.get("held_out") or {}
    before, after = (details.get(when) or {} for when in ("before", "after"))
    counts = [side.get("by_task") or {} for side in (before, after)]
    # A task whose every rollout was invalid says nothing.
    both = [
        task
        for task in sorted(counts[0].keys() & counts[1].keys())
        if counts[0][task][1] and counts[1][task][1]
    ]
    if not both:
        return None
    where = before.get("scenarios") or {}
    labels = [where.get(task, task) for task in both]
    (s0, n0), (s1, n1) = (np.array([c[task] for task in both], np.float64).T for c in counts)
    sides = clustered_ratio(s0, n0, labels), clustered_ratio(s1, n1, labels)
    return HeldOut(*sides, paired_by_task(s0 / n0, s1 / n1, labels))
