"""Many methods against one control, over shared seeds: simultaneous intervals, two ways, and letters.

The layout is arms x seeds, one value each; some may be missing. Least squares gives each arm a mean with the
effects of the seeds taken out, and one error for all arms.

    dunnett   intervals by the multivariate t of the contrasts (Dunnett, JASA 50, 1955), with the residual
              degrees of freedom of the two-way layout
    max_t     intervals by the largest studentised difference under sign flips of seeds (Westfall and
              Young, 1993; Romano and Wolf, Econometrica 73, 2005); it pools no error, assumes no normal law
    letters   arms that share one cannot be told apart, all pairs considered (Tukey and Kramer; Piepho, 2004)

Values are rates; differences have the same unit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from coevolve_jax.analysis.stats import alike

LEVEL = 0.95
FLIPS = 40_000  # sign vectors at most; all of them up to 12 seeds
ALL_UP_TO = 12
POINTS = 20_000  # of the integral over the multivariate t

Values = Mapping[str, Mapping[int, float]]  # arm -> {seed: value}


class Fit(NamedTuple):
    """A two-way layout.

    arms: names. means: [A], each adjusted to the average of all seeds. shape: [A, A], the covariance of the
    means in units of the error's variance. sd: of the error. df: its degrees of freedom.
    """

    arms: list[str]
    means: np.ndarray
    shape: np.ndarray
    sd: float
    df: int


class Contrast(NamedTuple):
    """The difference a - b with an interval and a p value; None where the data have no spread or too few."""

    a: str
    b: str
    difference: float
    low: float | None = None
    high: float | None = None
    p: float | None = None


def fit(values: Values) -> Fit:
    """Fits value = arm + seed by least squares, with seed effects that sum to 0.

    A complete layout gives plain means. sd is NaN without degrees of freedom. Raises ValueError for arms that
    no seeds connect, whose difference is then unknown.
    """
    arms = [arm for arm, own in values.items() if own]
    seeds = sorted({seed for arm in arms for seed in values[arm]})
    points = [(arms.index(a), seeds.index(s), values[a][s]) for a in arms for s in values[a]]
    x = np.zeros((len(points), len(arms) + max(len(seeds) - 1, 0)))
    for row, (a, s, _) in zip(x, points, strict=True):
        row[a] = 1
        row[len(arms) :] = -1.0 if s == len(seeds) - 1 else 0.0
        if s < len(seeds) - 1:
            row[len(arms) + s] = 1
    y = np.array([value for *_, value in points])
    if np.linalg.matrix_rank(x) < x.shape[1]:
        raise ValueError(
            f"The arms {', '.join(arms)} fall into groups without a seed in common, so they cannot be "
            "compared: run one seed in all of them."
        )
    inverse = np.linalg.inv(x.T @ x)
    effects = inverse @ x.T @ y
    df, rest = len(y) - x.shape[1], y - x @ effects
    sd = math.sqrt(float(rest @ rest) / df) if df > 0 else math.nan
    if df > 0 and alike([*rest, 0.0]):
        sd = 0.0
    return Fit(arms, effects[: len(arms)], inverse[: len(arms), : len(arms)], sd, df)


def contrasts(found: Fit, pairs: Sequence[tuple[str, str]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the differences a - b of pairs [P], their standard errors [P] and their correlations [P, P]."""
    c = np.zeros((len(pairs), len(found.arms)))
    for row, (a, b) in zip(c, pairs, strict=True):
        row[found.arms.index(a)] += 1
        row[found.arms.index(b)] -= 1
    shape = c @ found.shape @ c.T
    scale = np.sqrt(np.diag(shape))
    return c @ found.means, scale * found.sd, shape / np.outer(scale, scale)


def dunnett(found: Fit, arms: Sequence[str], control: str) -> list[Contrast]:
    """Compares arms with the control: intervals that hold together with probability LEVEL, and adjusted p."""
    pairs = [(arm, control) for arm in arms]
    difference, error, correlation = contrasts(found, pairs)
    if not (found.sd > 0 and pairs):
        return [Contrast(*pair, float(d)) for pair, d in zip(pairs, difference, strict=True)]
    half = bound(correlation, found.df) * error
    p = [1 - within(t, correlation, found.df) for t in np.abs(difference) / error]
    return [
        Contrast(*pair, float(d), float(d - h), float(d + h), q)
        for pair, d, h, q in zip(pairs, difference, half, p, strict=True)
    ]


def bound(correlation: np.ndarray, df: int) -> float:
    """The c with P(all |T_i| <= c) = LEVEL, for `within`."""
    from scipy import optimize

    inside = lambda c: within(c, correlation, df) - LEVEL
    root: Any = optimize.brentq(inside, 0.5, 1e3, xtol=1e-4)
    return float(root)


def within(most: float, correlation: np.ndarray, df: int) -> float:
    """P(all |T_i| <= most) for a multivariate t with these correlations [P, P] and df."""
    from scipy import stats

    count = len(correlation)
    if count == 1:
        return float(1 - 2 * stats.t.sf(most, df))
    law: Any = stats.multivariate_t
    ends = np.full(count, float(most))
    # One seed for all: the integral is then a smooth function of its bound.
    found = law.cdf(
        ends,
        shape=correlation,
        df=df,
        lower_limit=-ends,
        maxpts=POINTS,
        random_state=np.random.default_rng(0),
    )
    return float(min(max(found, 0.0), 1.0))


def max_t(values: Values, arms: Sequence[str], control: str) -> list[Contrast]:
    """Compares arms with the control by flipping the signs of all differences of a seed together.

    All 2^n sign vectors up to ALL_UP_TO seeds, else a sample of FLIPS. p: the share of them whose largest
    |t| reaches the arm's own. Intervals take the same quantile of differences around their means, since
    other arms need not be equal to the control.
    """
    theirs = values[control]
    d = {arm: {s: x - theirs[s] for s, x in values[arm].items() if s in theirs} for arm in arms}
    means = {arm: float(np.mean(list(own.values()))) if own else math.nan for arm, own in d.items()}
    tested = [arm for arm in arms if len(d[arm]) > 2 and not alike(list(d[arm].values()))]
    if not tested:
        return [Contrast(arm, control, means[arm]) for arm in arms]
    seeds = sorted({s for arm in tested for s in d[arm]})
    rows = np.array([[d[arm].get(s, np.nan) for s in seeds] for arm in tested]).reshape(
        len(tested), len(seeds)
    )
    flips = signs(len(seeds))
    observed = np.abs(studentised(rows))
    null = studentised_flips(rows, flips).max(axis=1, initial=0.0)
    around = studentised_flips(rows - np.nanmean(rows, axis=1, keepdims=True), flips).max(axis=1, initial=0.0)
    critical = float(np.quantile(around, LEVEL, method="higher"))
    if not math.isfinite(critical):  # flips that make all differences of an arm alike
        return [Contrast(arm, control, means[arm]) for arm in arms]
    found = []
    for arm in arms:
        if arm not in tested:
            found.append(Contrast(arm, control, means[arm]))
            continue
        t = observed[tested.index(arm)]
        own = np.array(list(d[arm].values()))
        half = critical * float(own.std(ddof=1)) / math.sqrt(len(own))
        p = float(np.mean(null >= t * (1 - 1e-9)))
        found.append(Contrast(arm, control, means[arm], means[arm] - half, means[arm] + half, p))
    return found


def signs(count: int) -> np.ndarray:
    """Sign vectors [F, count]: all of them where they are few, else a sample that begins with the data's."""
    if count <= ALL_UP_TO:
        return np.array(list(itertools.product((1.0, -1.0), repeat=count))).reshape(-1, count)
    drawn = np.random.default_rng(0).choice((1.0, -1.0), size=(FLIPS, count))
    drawn[0] = 1.0
    return drawn


def studentised(rows: np.ndarray) -> np.ndarray:
    """Student's t of the means of rows [A, S], NaN where a seed is missing: [A]."""
    n = np.isfinite(rows).sum(axis=1)
    return np.nanmean(rows, axis=1) / (np.nanstd(rows, axis=1, ddof=1) / np.sqrt(n))


def studentised_flips(rows: np.ndarray, flips: np.ndarray) -> np.ndarray:
    """|t| of rows [A, S] under sign vectors [F, S]: [F, A]."""
    n = np.isfinite(rows).sum(axis=1)
    filled = np.nan_to_num(rows)
    mean = flips @ filled.T / n
    square = (filled**2).sum(axis=1)  # signs do not change it
    variance = np.maximum(square - n * mean**2, 0) / (n - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.abs(mean) / np.sqrt(variance / n)
    return np.where(np.isnan(t), 0.0, t)


def wider(first: Contrast, second: Contrast) -> Contrast:
    """The difference of `first` with the wider of the two intervals, moved there, and the larger p."""
    if first.low is None or first.high is None or first.p is None:
        return first
    if second.low is None or second.high is None or second.p is None:
        return first._replace(low=None, high=None, p=None)
    half = max(first.high - first.low, second.high - second.low) / 2
    middle = first.difference
    return first._replace(low=middle - half, high=middle + half, p=max(first.p, second.p))


def pooled(found: Fit, arms: Sequence[str], other: str) -> list[Contrast]:
    """Compares arms with another, each by itself: Student's t with the pooled error, not adjusted."""
    from scipy import stats

    pairs = [(arm, other) for arm in arms]
    difference, error, _ = contrasts(found, pairs)
    if not found.sd > 0:
        return [Contrast(*pair, float(d)) for pair, d in zip(pairs, difference, strict=True)]
    half = float(stats.t.ppf(0.5 + LEVEL / 2, found.df)) * error
    p = 2 * stats.t.sf(np.abs(difference) / error, found.df)
    return [
        Contrast(*pair, *map(float, (d, d - h, d + h, q)))
        for pair, d, h, q in zip(pairs, difference, half, p, strict=True)
    ]


def apart(found: Fit, arms: Sequence[str]) -> set[frozenset[str]]:
    """Pairs of arms that all-pairs intervals tell apart (Tukey and Kramer)."""
    from scipy import stats

    pairs = list(itertools.combinations(arms, 2))
    if not (found.sd > 0 and pairs):
        return set()
    difference, error, _ = contrasts(found, pairs)
    critical = float(stats.studentized_range.ppf(LEVEL, len(arms), found.df)) / math.sqrt(2)
    return {
        frozenset(pair) for pair, d, e in zip(pairs, difference, error, strict=True) if abs(d) > critical * e
    }


def letters(arms: Sequence[str], different: set[frozenset[str]]) -> dict[str, str]:
    """Letters such that two arms share one exactly where they are not in `different`.

    arms: best first, which gets "a". Source: insert and absorb (Piepho, Journal of Computational and
    Graphical Statistics 13, 2004).
    """
    groups = [frozenset(arms)]
    for pair in sorted(different, key=sorted):
        a, b = sorted(pair)
        split = [g - {x} for g in groups if pair <= g for x in (a, b)] + [g for g in groups if not pair <= g]
        groups = [g for g in dict.fromkeys(split) if not any(g < other for other in split)]
    place = {arm: i for i, arm in enumerate(arms)}
    groups.sort(key=lambda g: sorted(place[arm] for arm in g))
    names = [_letter(i) for i in range(len(groups))]
    return {arm: "".join(n for n, g in zip(names, groups, strict=True) if arm in g) for arm in arms}


def _letter(i: int) -> str:
    """a to z, then a2 to z2."""
    return chr(ord("a") + i % 26) + (f"{i // 26 + 1}" if i >= 26 else "")


def ranks(means: np.ndarray) -> np.ndarray:
    """Ranks of samples [B, A], 1 for the largest mean; ties have the best of their places."""
    return 1 + (means[:, None, :] > means[:, :, None]).sum(axis=2)


def bootstrap_means(by_scenarios: Mapping[str, Mapping[int, np.ndarray]], drawn: np.ndarray) -> np.ndarray:
    """Adjusted means of bootstrap samples [B, A], NaN where a sample leaves an arm without a value.

    by_scenarios: arm -> {seed: values [B]}, each already of resampled scenarios. drawn: [B, S], how often
    each seed (sorted) counts. The same least squares as `fit`, with these weights.
    """
    arms = list(by_scenarios)
    seeds = sorted({s for own in by_scenarios.values() for s in own})
    there = np.array([[s in by_scenarios[a] for s in seeds] for a in arms], float)  # [A, S]
    values = np.zeros((len(drawn), len(arms), len(seeds)))
    for i, a in enumerate(arms):
        for j, s in enumerate(seeds):
            if s in by_scenarios[a]:
                values[:, i, j] = by_scenarios[a][s]
    if there.all() and np.isfinite(values).all():
        return np.einsum("bas,bs->ba", values, drawn) / drawn.sum(axis=1, keepdims=True)
    found = np.full((len(drawn), len(arms)), np.nan)
    for b, counts in enumerate(drawn):
        weight = there * counts * np.isfinite(values[b])  # [A, S]
        a, s = (np.flatnonzero(weight.sum(axis=axis)) for axis in (1, 0))
        if not a.size:
            continue
        w, y = weight[np.ix_(a, s)], np.nan_to_num(values[b])[np.ix_(a, s)]
        # Normal equations of value = arm + seed; the least norm fixes their one free constant.
        normal = np.block([[np.diag(w.sum(1)), w], [w.T, np.diag(w.sum(0))]])
        effects = np.linalg.lstsq(normal, np.concatenate([(w * y).sum(1), (w * y).sum(0)]), rcond=None)[0]
        found[b, a] = effects[: len(a)] + np.average(effects[len(a) :], weights=counts[s])
    return found
