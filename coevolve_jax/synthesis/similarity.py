"""Cosines of a task to all of many others: of counts of features, and of the vectors of an embedding model."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from coevolve_jax.envs.base import canonical
from coevolve_jax.types import Task

Features = Callable[[Task], Counter[str]]
Embed = Callable[[list[str]], np.ndarray]  # n texts -> floats [n, d]

SIZES = (3, 4, 5)  # characters of an n-gram


def ngrams(task: Task) -> Counter[str]:
    """Counts of the runs of 3 to 5 characters in each of the queries; neither case nor the width of blanks counts."""
    found: Counter[str] = Counter()
    for turn in task.turns:
        text = f" {' '.join(turn.query.lower().split())} "
        for size in SIZES:
            found.update(text[i : i + size] for i in range(len(text) - size + 1))
    return found


def calls(task: Task) -> Counter[str]:
    """Counts of the calls, each with all its arguments: neither words nor order count."""
    return Counter(canonical(call.to_json()) for call in task.calls)


class CountCosines:
    """Cosines of idf-weighted counts: features that all tasks share weigh next to nothing, rare ones most.

    Kept is for each feature which of the E tasks have it, with its weight there: 8 bytes for each.
    """

    def __init__(self, tasks: Sequence[Task], features: Features, corpus: Iterable[Task] = ()):
        """tasks: the E that others are compared with. corpus: further tasks that show which features are common."""
        self._features, self._size = features, len(tasks)
        self._number: dict[str, int] = {}
        numbers, counts, ends = self._read(tasks)
        self._known = len(self._number)  # those from here on are features of the corpus alone
        others, _, further = self._read(corpus)
        rows = np.bincount(numbers, minlength=len(self._number))  # tasks that have a feature
        frequency = rows + np.bincount(others, minlength=len(self._number))
        total = len(ends) + len(further) + 1
        # The half keeps the weight of a ubiquitous feature above 0; the last is that of a feature not seen here.
        self._idf = np.array([math.log(total / (n + 0.5)) for n in (*frequency.tolist(), 0)])

        weights = np.empty(len(numbers), np.float32)
        for start, end in zip([0, *ends], ends):
            weights[start:end] = self._weigh(numbers[start:end], counts[start:end])
        columns = np.repeat(np.arange(len(ends), dtype=np.int32), np.diff([0, *ends]))
        by_feature = np.argsort(numbers, kind="stable")
        self._columns, self._weights = columns[by_feature], weights[by_feature]
        self._starts = np.concatenate([[0], np.cumsum(rows)])

    def __call__(self, task: Task) -> np.ndarray:
        """Cosine to each of the tasks, float32 [E] within [0, 1]; 0 where no feature is shared."""
        found = self._features(task)
        numbers = np.fromiter((self._number.get(f, -1) for f in found), np.int64, len(found))
        weights = self._weigh(numbers, np.fromiter(found.values(), np.float64, len(found)))
        known = (0 <= numbers) & (numbers < self._known)
        return np.clip(self._sums(numbers[known].tolist(), weights[known].astype(np.float32)), 0.0, 1.0)

    def _sums(self, numbers: list[int], weights: np.ndarray) -> np.ndarray:
        """For each of the E tasks the sum of products of weights, over features that the tasks have by these numbers.

        Only the rows of these features, but these dense: BLAS then sums in the order in which it sums for a matrix
        that is dense throughout, and published similarities come out the same to the last bit.
        """
        rows = np.zeros((len(numbers), self._size), np.float32)
        for row, number in zip(rows, numbers):
            own = slice(self._starts[number], self._starts[number + 1])
            row[self._columns[own]] = self._weights[own]
        return weights @ rows

    def _read(self, tasks: Iterable[Task]) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """The features of all tasks one after the other, as numbers and counts, and where those of each task end."""
        numbers, counts, ends = array("i"), array("d"), []
        for task in tasks:
            for feature, count in self._features(task).items():
                numbers.append(self._number.setdefault(feature, len(self._number)))
                counts.append(count)
            ends.append(len(numbers))
        return np.asarray(numbers, np.int32), np.asarray(counts, np.float64), ends

    def _weigh(self, numbers: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Unit vector of one task, float64: counts times idf. A number of -1 is a feature not seen here."""
        weights = counts * self._idf[numbers]
        return weights / (math.sqrt(math.fsum((weights * weights).tolist())) or 1.0)


class KnownCosines(CountCosines):
    """Cosines of features of which those that none of the tasks has do not count: in other words for the same they are
    many, and so are the calls of a longer task; they would hide what is the same.

    A query has so many n-grams that dense rows of them would take most of the time.
    """

    def __init__(self, tasks: Sequence[Task], features: Features):
        from scipy import sparse  # here: a start without these does not wait for it

        super().__init__(tasks, features)
        self._idf[-1] = 0.0
        self._rows = sparse.csr_array(
            (self._weights, self._columns, self._starts), shape=(self._known, self._size)
        )

    def _sums(self, numbers: list[int], weights: np.ndarray) -> np.ndarray:
        return weights @ self._rows[numbers]


class EmbeddingCosines:
    """Cosines of the vectors that an embedding model gives for the queries of a task, joined by line breaks."""

    def __init__(self, tasks: Sequence[Task], embed: Embed):
        """embed: called once with the texts of all tasks, then with one text at a time.

        Raises ValueError, here and in a call, where it does not answer with finite numbers [n, d].
        """
        self._embed = embed
        self._vectors = self._read(tasks)

    def __call__(self, task: Task) -> np.ndarray:
        """Cosine to each of the tasks, float32 [E] within [0, 1]: opposite vectors count as unlike, as does a 0."""
        return np.clip(self._vectors @ self._read([task])[0], 0.0, 1.0)

    def _read(self, tasks: Sequence[Task]) -> np.ndarray:
        texts = ["\n".join(turn.query for turn in task.turns) for task in tasks]
        vectors = np.asarray(self._embed(texts), np.float32) if texts else np.zeros((0, 1), np.float32)
        if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
            raise ValueError(
                f"The embedding of {len(texts)} texts has the shape {vectors.shape}: it must be finite numbers [n, d]."
            )
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.where(norms > 0, norms, 1.0)
