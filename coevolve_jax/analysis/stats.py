"""Interval estimates and tests. Pure functions over numpy and scipy; random ones take a seed.

Rollouts of one task are alike, and so are tasks of one scenario (files, users, texts). So the unit of
evidence within a run is the scenario. Over runs it is the seed.

scipy.stats takes half a second to import, so only functions that need it import it.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from coevolve_jax.envs.base import LOST
from coevolve_jax.types import QUERY

SETS = {"iid": "held_out", "balanced": "balanced", "queries": QUERY}  # held-out set -> kind of its tasks
HELP = "+help"  # after the name of a held-out set: its tasks once more, with the strategy's hints
RESAMPLES = 10_000
FEW = 15  # scenarios: with fewer, a bootstrap interval covers less than it says
POWER, ALPHA = 0.8, 0.05  # of the test that `seeds_needed` plans
MOST = 10_000  # seeds that it looks at
FLIPS = 40_000  # sign vectors; all of them up to 15 clusters
BATCH = 1000  # sign vectors in memory at a time; it changes no p


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A value with its confidence interval, all in the value's own unit.

    low and high are None where the data show no spread. This is no evidence that there is none.
    """

    value: float
    low: float | None
    high: float | None


@dataclasses.dataclass(frozen=True)
class Paired:
    """Mean difference after - before over tasks, its interval, and the two-sided p value.

    tasks, clusters: the numbers of tasks and of scenarios.
    """

    difference: Estimate
    p: float
    tasks: int
    clusters: int


def units(paired: Paired) -> str:
    """Text of what a comparison is over."""
    return f"over {paired.tasks} tasks in {paired.clusters} scenarios"


def caveat(paired: Paired) -> str:
    """A sentence where there are fewer than FEW scenarios; "" elsewhere."""
    few = f"With fewer than {FEW} scenarios the 95% intervals are too narrow."
    return few if paired.clusters < FEW else ""


def resample(clusters: int, rng: np.random.Generator, resamples: int = RESAMPLES) -> np.ndarray:
    """Draws bootstrap samples: counts of each cluster, int [resamples, clusters]. Rows sum to `clusters`."""
    return rng.multinomial(clusters, np.full(clusters, 1 / clusters), size=resamples)


def clustered_ratio(
    parts: ArrayLike,
    wholes: ArrayLike,
    clusters: Sequence[object] | None = None,
    *,
    seed: int = 0,
    confidence: float = 0.95,
) -> Estimate:
    """sum(parts) / sum(wholes) over n tasks, with a percentile interval that resamples clusters of tasks.

    parts: such as successes [n]. wholes: such as trials [n], all above 0. clusters: a label of each task [n].
    By default each task is its own cluster. There is no interval where all clusters are alike.

    Raises ValueError for unequal lengths, for no task, and for a whole that is not above 0. Source: cluster
    bootstrap, Davison and Hinkley (1997), section 3.8; Miller, "Adding Error Bars to Evals" (arXiv
    2411.00640), section 2.2.
    """
    p, w = np.asarray(parts, np.float64), np.asarray(wholes, np.float64)
    labels = range(p.size) if clusters is None else clusters
    if p.shape != w.shape or p.ndim != 1 or not p.size or not (w > 0).all() or len(labels) != p.size:
        raise ValueError(
            f"Expected parts, wholes and clusters of as many tasks, at least one, all wholes > 0; got "
            f"{p.shape}, {w.shape} and {len(labels)} clusters."
        )
    p, w = by_cluster(p, labels), by_cluster(w, labels)
    value = float(p.sum() / w.sum())
    if alike(p / w):
        return Estimate(value, None, None)
    drawn = resample(len(p), np.random.default_rng(seed))
    rates = (drawn @ p) / (drawn @ w)
    low, high = np.quantile(rates, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Estimate(value, float(low), float(high))


def alike(values: ArrayLike) -> bool:
    """Whether all values are equal up to rounding."""
    x = np.asarray(values, np.float64)
    return bool(np.ptp(x) <= 1e-12 * max(1.0, float(np.abs(x).max())))


def share(parts: ArrayLike, wholes: ArrayLike, clusters: Sequence[object] | None = None) -> Estimate:
    """clustered_ratio of successes and trials, with an exact interval where all clusters are alike.

    Resampling shows no spread then. The exact interval takes each cluster for one independent trial: 0 of 100
    is 0 to 3.6%. Source: Clopper and Pearson, Biometrika 26, 1934. Quantiles of the beta distribution give it
    for fractions of a success too.
    """
    found = clustered_ratio(parts, wholes, clusters)
    if found.low is not None:
        return found
    from scipy import stats

    n = len(np.ravel(parts)) if clusters is None else len(set(clusters))
    s = found.value * n
    low = stats.beta.ppf(0.025, s, n - s + 1) if s > 0 else 0.0
    high = stats.beta.ppf(0.975, s + 1, n - s) if s < n else 1.0
    return Estimate(found.value, float(low), float(high))


def by_cluster(values: ArrayLike, clusters: Sequence[object]) -> np.ndarray:
    """Sums values [n] over the tasks of each cluster: [C], in the order of the clusters' first tasks."""
    place = {label: i for i, label in enumerate(dict.fromkeys(clusters))}
    return np.bincount([place[label] for label in clusters], np.asarray(values, np.float64), len(place))


def paired_by_task(
    before: ArrayLike, after: ArrayLike, clusters: Sequence[object] | None = None, *, seed: int = 0
) -> Paired:
    """Mean difference between per-task means before [n] and after [n], with an interval and a test.

    Both treat a cluster as one unit. The permutation test flips the signs of whole clusters (Fisher, 1935).
    It takes all sign vectors if there are at most FLIPS, else a sample of FLIPS. Raises ValueError for
    unequal lengths and for no task.
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
        batch=BATCH,
        rng=np.random.default_rng(seed),
    ).pvalue
    return Paired(difference, float(p), b.size, len(sums))


def over_seeds(values: ArrayLike, confidence: float = 0.95) -> Estimate:
    """Mean over seeds [n] with Student's t interval. There is none where all seeds are alike.

    Raises ValueError for fewer than two seeds.
    """
    from scipy import stats

    x = np.asarray(values, np.float64)
    if x.size < 2:
        raise ValueError(f"A t interval needs at least 2 seeds, got {x.size}; run more seeds.")
    mean = float(x.mean())
    if alike(x):
        return Estimate(mean, None, None)
    low, high = stats.ttest_1samp(x, 0.0).confidence_interval(confidence)
    return Estimate(mean, float(low), float(high))


def interquartile_mean(values: ArrayLike) -> float:
    """Mean of the middle half (Agarwal et al., arXiv 2108.13264)."""
    from scipy import stats

    return float(stats.trim_mean(np.asarray(values, np.float64), 0.25))


def probability_of_improvement(ours: ArrayLike, theirs: ArrayLike) -> float:
    """P(a run of ours beats a run of theirs); a tie counts half (Agarwal et al., arXiv 2108.13264)."""
    from scipy import stats

    x, y = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(stats.mannwhitneyu(x, y).statistic / (x.size * y.size))


def paired_p(differences: ArrayLike) -> float | None:
    """Two-sided p value of a paired t test on the differences by seed.

    None where there is no test: for fewer than three differences, or if all are alike.
    """
    from scipy import stats

    d = np.asarray(differences, np.float64)
    if d.size < 3 or alike(d):
        return None
    t = d.mean() / (d.std(ddof=1) / math.sqrt(d.size))
    return float(2 * stats.t.sf(abs(t), d.size - 1))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjusts p values for the family of tests (Holm, Scandinavian Journal of Statistics 6, 1979).

    None marks a test that could not be made. It stays None, and counts in the size of the family.
    """
    made = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    least = 0.0
    for rank, (p, i) in enumerate(made):
        least = max(least, min(1.0, (len(p_values) - rank) * p))
        adjusted[i] = least
    return adjusted


def seeds_needed(sd: float, effect: float) -> int:
    """Seeds with which a two-sided paired t test at level ALPHA finds `effect` with probability POWER.

    sd: the standard deviation of differences by seed, in the unit of the effect. Returns MOST where more
    seeds would be needed. Raises ValueError unless effect > 0 and sd is finite.
    """
    from scipy import stats

    if not (effect > 0 and math.isfinite(sd)):
        raise ValueError(f"The effect is {effect}, which must be above 0, and sd {sd}, which must be finite.")

    def enough(n: int) -> bool:  # monotone in n, so bisection works
        shift, bound = effect / max(sd, 1e-12) * math.sqrt(n), stats.t.ppf(1 - ALPHA / 2, n - 1)
        found = stats.nct.sf(bound, n - 1, shift)
        return bool(found >= POWER or not np.isfinite(found))

    return bisect.bisect_left(range(MOST), True, lo=2, key=enough)


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Held-out success before and after training. paired: the comparison on the same tasks."""

    before: Estimate
    after: Estimate
    paired: Paired


def samples_of(row: Mapping) -> int:
    """Trials per task that an evaluation asked for: its "samples", or the most that a task has if greater."""
    return max([row.get("samples") or 0, *(n for _, n in (row.get("by_task") or {}).values())])


def lost_trials(row: Mapping) -> tuple[int, int]:
    """Returns the number of trials that an evaluation lost to invalid rollouts, and the number asked for."""
    by_task = row.get("by_task") or {}
    asked = samples_of(row) * len(by_task)
    return asked - sum(n for _, n in by_task.values()), asked


def lost_as_failures(row: Mapping) -> dict:
    """Returns the evaluation with each lost trial counted as a failure."""
    samples = samples_of(row)
    by_task = {task: [s, samples] for task, (s, _) in (row.get("by_task") or {}).items() if samples}
    return {**row, "by_task": by_task}


def held_out(summary: Mapping) -> HeldOut | None:
    """Computes intervals and the test from a run's summary; None where it holds no held-out success.

    `held_out.before` and `held_out.after` hold by_task {task id: [successes, trials]} and scenarios {task id:
    scenario}. Scenarios are the clusters. A side's success is over all trials that it has. The comparison
    leaves out a task that lost every trial on one side.
    """
    details = summary.get("held_out") or {}
    return before_and_after(*(details.get(when) or {} for when in ("before", "after")))


def before_and_after(before: Mapping, after: Mapping) -> HeldOut | None:
    """Computes `held_out` from two evaluations of the same tasks."""
    counts = [side.get("by_task") or {} for side in (before, after)]
    both = [
        task
        for task in sorted(counts[0].keys() & counts[1].keys())
        if counts[0][task][1] and counts[1][task][1]
    ]
    if not both:
        return None
    where = {**(after.get("scenarios") or {}), **(before.get("scenarios") or {})}
    labels = lambda tasks: [where.get(task, task) for task in tasks]

    def success(side: Mapping) -> Estimate:
        own = [task for task in sorted(side) if side[task][1]]
        return share([side[task][0] for task in own], [side[task][1] for task in own], labels(own))

    (s0, n0), (s1, n1) = (np.array([c[task] for task in both], np.float64).T for c in counts)
    paired = paired_by_task(s0 / n0, s1 / n1, labels(both))
    return HeldOut(success(counts[0]), success(counts[1]), paired)


def held_out_at_worst(summary: Mapping) -> HeldOut | None:
    """Computes `held_out` with each lost trial as a failure. None if no side lost more than LOST of them."""
    details = summary.get("held_out") or {}
    return at_worst(details.get("before") or {}, details.get("after") or {})


def at_worst(before: Mapping, after: Mapping) -> HeldOut | None:
    """Compares two evaluations with each lost trial as a failure. None if neither lost more than LOST."""
    sides = before, after
    if all(lost <= LOST * asked for lost, asked in map(lost_trials, sides)):
        return None
    return before_and_after(*map(lost_as_failures, sides))
