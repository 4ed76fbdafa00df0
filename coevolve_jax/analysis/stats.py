"""Interval estimates and tests for success rates. Pure functions; what is random takes a seed.

The unit of evidence is the task, not the sample: the s samples of one task
are correlated, so intervals and tests over n tasks x s samples resample tasks.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

_CHUNK = 1 << 22  # numbers held at once by a resampling loop (32 MiB of float64)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A value with its confidence interval, all in the value's own unit."""

    value: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Paired:
    """Mean difference after - before over tasks, its interval, and the two-sided p value.

    exact: every assignment of signs was enumerated.
    """

    difference: Estimate
    p: float
    tasks: int
    exact: bool


def wilson(successes: float, trials: float, confidence: float = 0.95) -> Estimate:
    """Score interval for a proportion of independent trials.

    Source: Wilson, JASA 22 (1927). It stays in [0, 1] and is sound at 0 and 1,
    where the normal interval has width 0. Raises ValueError unless 0 <= successes <= trials, trials > 0.
    """
    if not 0 <= successes <= trials or trials <= 0:
        raise ValueError(f"wilson needs 0 <= successes <= trials, trials > 0; got {successes} of {trials}.")
    z = statistics.NormalDist().inv_cdf(0.5 + confidence / 2)
    p = successes / trials
    centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    # At 0 and 1 one bound equals p in exact arithmetic; rounding must not push it past p.
    return Estimate(p, min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half)))


def bootstrap_mean(
    values: ArrayLike, seed: int = 0, confidence: float = 0.95, resamples: int = 10_000
) -> Estimate:
    """Mean of values [n] with the percentile bootstrap interval (Efron, Annals of Statistics 7, 1979)."""
    return clustered_success(values, np.ones(np.size(values)), seed, confidence, resamples)


def clustered_success(
    successes: ArrayLike,
    trials: ArrayLike,
    seed: int = 0,
    confidence: float = 0.95,
    resamples: int = 10_000,
) -> Estimate:
    """Success rate of n tasks; successes [n] of trials [n] samples each; the interval resamples tasks.

    Source: cluster bootstrap, Davison and Hinkley (1997), section 3.8; Miller, "Adding Error Bars to
    Evals" (arXiv 2411.00640), section 2.2.
    Raises ValueError on unequal lengths, no task or a task without trials.
    """
    s, t = np.asarray(successes, np.float64), np.asarray(trials, np.float64)
    if s.shape != t.shape or s.ndim != 1 or not s.size or not (t > 0).all():
        raise ValueError(
            f"Expected as many successes as trials, at least one, all trials > 0; got {s.shape}, {t.shape}."
        )
    rng = np.random.default_rng(seed)
    rates = []
    for rows in _chunks(resamples, s.size):
        drawn = rng.integers(0, s.size, (rows, s.size))
        rates.append(s[drawn].sum(1) / t[drawn].sum(1))
    low, high = np.quantile(np.concatenate(rates), [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Estimate(float(s.sum() / t.sum()), float(low), float(high))


def paired_permutation(
    before: ArrayLike,
    after: ArrayLike,
    seed: int = 0,
    resamples: int = 20_000,
    exact_up_to: int = 16,
) -> Paired:
    """Sign-flip test of the mean difference between two per-task means, before [n] and after [n].

    Under the null hypothesis each task's difference is as likely negative as positive. Tasks without a
    difference do not change the count, so they are left out of the enumeration. Up to `exact_up_to` changed
    tasks all 2^n sign vectors are counted; beyond, the Monte Carlo p value is (1 + hits) / (1 + resamples).
    Source: Fisher (1935), section 21; Phipson and Smyth (2010) for the + 1. Interval: `bootstrap_mean`.
    """
    b, a = np.asarray(before, np.float64), np.asarray(after, np.float64)
    if b.shape != a.shape or b.ndim != 1 or not b.size:
        raise ValueError(f"A paired test needs the same tasks before and after, got {b.shape} and {a.shape}.")
    difference = bootstrap_mean(a - b, seed)
    d = (a - b)[a != b]
    threshold = abs(d.sum()) * (1 - 1e-9)  # equal sums in another order of addition must count as equal
    exact = d.size <= exact_up_to
    if exact:
        codes = np.arange(1 << d.size)[:, None] >> np.arange(d.size)
        p = float((abs((1 - 2 * (codes & 1)) @ d) >= threshold).mean())
    else:
        rng = np.random.default_rng(seed)
        hits = sum(
            int((abs(rng.choice([-1.0, 1.0], (rows, d.size)) @ d) >= threshold).sum())
            for rows in _chunks(resamples, d.size)
        )
        p = (1 + hits) / (1 + resamples)
    return Paired(difference, p, b.size, exact)


def mean_over_seeds(values: ArrayLike, confidence: float = 0.95) -> tuple[Estimate, float]:
    """Mean over seeds with Student's t interval, and the sample standard deviation (n - 1).

    Source: Student, Biometrika 6 (1908). Raises ValueError below two seeds: one run has no spread.
    """
    x = np.asarray(values, np.float64)
    if x.size < 2:
        raise ValueError(f"A t interval needs at least 2 seeds, got {x.size}; run more seeds.")
    mean, sd = float(x.mean()), float(x.std(ddof=1))
    half = float(special.stdtrit(x.size - 1, 0.5 + confidence / 2)) * sd / math.sqrt(x.size)
    return Estimate(mean, mean - half, mean + half), sd


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
    """Held-out success before and after training, as summary.json records it.

    paired compares the tasks with valid samples on both sides; None where results by task are not recorded.
    """

    before: Estimate
    after: Estimate
    paired: Paired | None


def held_out(summary: Mapping) -> HeldOut | None:
    """Intervals and test from a run's summary; None where it holds no held-out success.

    `held_out.before` / `held_out.after` may hold by_task {task id: [successes, trials]}: intervals are then
    clustered by task. Without it they are Wilson intervals as if each task were one trial, which is the
    widest the samples of a task can make them.
    """
    rates = [summary.get("held_out_success_before"), summary.get("held_out_success_after")]
    tasks = summary.get("held_out_tasks")
    if None in rates or not tasks:
        return None
    details = summary.get("held_out") or {}
    counts = [(details.get(when) or {}).get("by_task") or {} for when in ("before", "after")]
    if not all(any(n for _, n in c.values()) for c in counts):
        return HeldOut(*(wilson(rate * tasks, tasks) for rate in rates), paired=None)
    # A task whose every rollout was invalid says nothing.
    counts = [{task: c[task] for task in sorted(c) if c[task][1]} for c in counts]
    before, after = (clustered_success(*zip(*c.values())) for c in counts)
    both = sorted(counts[0].keys() & counts[1].keys())
    if not both:
        return HeldOut(before, after, paired=None)
    means = [[c[task][0] / c[task][1] for task in both] for c in counts]
    return HeldOut(before, after, paired_permutation(*means))


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Centred mean of values [T] over `window` steps, fewer at the ends; NaN is left out.

    It stays NaN before the first and after the last known value."""
    known, ones = np.isfinite(values), np.ones(min(window, len(values)))
    count = np.convolve(known, ones, "same")
    total = np.convolve(np.where(known, values, 0), ones, "same")
    begun, going_on = np.maximum.accumulate(known), np.maximum.accumulate(known[::-1])[::-1]
    return np.where(begun & going_on & (count > 0), total / np.maximum(count, 1), np.nan)


def _chunks(total: int, width: int) -> list[int]:
    """Row counts that add up to total, each small enough that rows x width stays below _CHUNK."""
    rows = max(1, _CHUNK // max(1, width))
    return [min(rows, total - start) for start in range(0, total, rows)]
