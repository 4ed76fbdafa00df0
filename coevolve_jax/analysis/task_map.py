"""A map of tasks: two coordinates each. Tasks lie close if leak control finds them similar."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from scipy import sparse
from scipy.sparse.linalg import aslinearoperator, svds


def coordinates(counts: Sequence[Counter[str]]) -> tuple[np.ndarray, float]:
    """Classical multidimensional scaling of the distances between unit TF-IDF vectors.

    counts: of features, one Counter for each of n tasks (envs/base.py). The squared distance of two tasks is
    2 - 2 x their cosine. So the axes are the first two principal axes of the vectors.

    Returns float64 [n, 2], and the share of all squared distances that the two axes hold (0 to 1). The
    coordinates are zeros where there are too few tasks or features. Equal counts give equal coordinates,
    unless axes are equally long: then their directions are left to rounding.
    """
    vectors = _unit_tfidf(counts)
    n, features = len(counts), len({feature for count in counts for feature in count})
    if min(n, features) < 3:
        return np.zeros((n, 2)), 0.0
    mean = np.asarray(vectors.mean(0)).ravel()
    # A linear operator, since subtracting the mean would make the sparse matrix dense.
    centred = aslinearoperator(vectors) - aslinearoperator(np.ones((n, 1))) @ aslinearoperator(mean[None])
    total = float((vectors**2).sum() - n * (mean @ mean))  # squared norms of all centred vectors
    if total < 1e-9:  # all tasks are the same
        return np.zeros((n, 2)), 0.0
    start = np.random.default_rng(0).standard_normal(min(n, features))
    left, size, _ = svds(centred, k=2, v0=start)
    points = np.round((left * size)[:, ::-1], 9) + 0.0  # the longest axis first; rounding removes noise
    heaviest = np.abs(points).argmax(0)
    points = points * np.where(points[heaviest, [0, 1]] < 0, -1, 1)  # fixes the sign, which svds leaves open
    return points, float((size**2).sum() / total)


def _unit_tfidf(counts: Sequence[Counter[str]]) -> sparse.csr_array:
    """TF-IDF [tasks, features] with rows of length 1, weighed as in synthesis/leakage.py."""
    frequency = Counter(feature for count in counts for feature in count)
    column = {feature: i for i, feature in enumerate(sorted(frequency))}
    rows, columns, values = [], [], []
    for row, count in enumerate(counts):
        weights = {f: n * math.log((len(counts) + 1) / (frequency[f] + 0.5)) for f, n in count.items()}
        norm = math.sqrt(math.fsum(w * w for w in weights.values())) or 1.0
        rows += [row] * len(weights)
        columns += [column[f] for f in weights]
        values += [w / norm for w in weights.values()]
    return sparse.csr_array((values, (rows, columns)), shape=(len(counts), len(column)), dtype=np.float64)
