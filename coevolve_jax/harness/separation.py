"""How well a value tells two outcomes of the same task and policy apart, with a permutation test.

    AUC = sum over groups of #{(a, b): x_a > x_b} + ties / 2, over the sum of n_a n_b

Only pairs within a group count, so the difficulty of tasks cancels (van Elteren 1960). Labels are permuted
within groups.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

PERMUTATIONS = 2000
RESOLVED = 2  # permutations as far off as the labels; with fewer the p is the normal form's
_CELLS = 2**21  # numbers that permutations hold at once


class Separation(NamedTuple):
    """The result of `separate`.

    auc: of the marked members against the others. p: two-sided. Both are None where no group has both sorts.
    groups: number of groups with both. missing: share of the values that are missing.
    """

    auc: float | None
    p: float | None
    groups: int
    missing: float

    @property
    def up(self) -> bool:
        """Whether the marked ones have the higher values."""
        return self.auc is not None and self.auc > 0.5


def separate(
    values: np.ndarray,
    marked: np.ndarray,
    groups: np.ndarray,
    rng: np.random.Generator | None = None,
    permutations: int = PERMUTATIONS,
) -> Separation:
    """Separates the marked members of each group from the others.

    Args:
      values: [n]; NaN where missing.
      marked: bool [n].
      groups: int [n].
      rng: of the permutations. None leaves p out.
    """
    there, ids = np.isfinite(values), np.unique(groups, return_inverse=True)[1]
    missing = 1 - float(there.mean()) if len(values) else 0.0
    least = np.minimum(*(np.bincount(ids, there & which, minlength=1) for which in (marked, ~marked)))
    kept = np.flatnonzero(there & (least > 0)[ids])
    if not len(kept):
        return Separation(None, None, 0, missing)
    kept = kept[np.argsort(ids[kept], kind="stable")]
    mark, group = marked[kept], np.unique(ids[kept], return_inverse=True)[1]
    ranks, sizes, marks = midranks(values[kept], group), np.bincount(group), np.bincount(group, mark)
    above = ranks[mark].sum() - (marks * (marks + 1) / 2).sum()
    auc = above / (marks * (sizes - marks)).sum()
    p = None if rng is None else _p_value(ranks, mark, group, rng, permutations)
    return Separation(float(auc), p, len(sizes), missing)


def midranks(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Ranks within groups from 1 on; ties share their mean. groups: int [n], ascending."""
    order = np.lexsort((values, groups))
    x, g = values[order], groups[order]
    new = np.r_[True, (x[1:] != x[:-1]) | (g[1:] != g[:-1])]
    tie = np.cumsum(new) - 1
    ends = np.cumsum(np.bincount(tie))
    middle = ends - (np.bincount(tie) - 1) / 2  # mean position of a run of ties, from 1 on
    before = np.r_[0, np.cumsum(np.bincount(g))[:-1]]
    ranks = np.empty(len(values))
    ranks[order] = middle[tie] - before[g]
    return ranks


def _p_value(
    ranks: np.ndarray, mark: np.ndarray, group: np.ndarray, rng: np.random.Generator, permutations: int
) -> float:
    """Two-sided p of the sum of the marked ranks: the share of permutations that are as far from its mean."""
    sizes, marks = np.bincount(group), np.bincount(group, mark)
    mean = float((marks * (sizes + 1) / 2).sum())
    distance, hits, done = abs(float(ranks[mark].sum()) - mean), 0, 0
    while done < permutations:
        count = min(max(_CELLS // len(ranks), 1), permutations - done)
        # Groups are contiguous, so sorting group + noise permutes within them.
        shuffled = mark[np.argsort(group + 0.999 * rng.random((count, len(ranks))), axis=1)]
        hits += int((np.abs(shuffled @ ranks - mean) >= distance - 1e-9).sum())
        done += count
    squares = np.bincount(group, (ranks - ((sizes + 1) / 2)[group]) ** 2)
    variance = float((marks * (sizes - marks) / (sizes * (sizes - 1)) * squares).sum())
    if hits >= RESOLVED or not variance:
        return (1 + hits) / (1 + permutations)
    return math.erfc(distance / math.sqrt(2 * variance))
