"""Similarity of a task to each of many others: cosines of counts or of an embedding model, shared calls."""

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
    """Counts of character n-grams (3 to 5) within each query. Ignores case and the width of blanks."""
    found: Counter[str] = Counter()
    for turn in task.turns:
        text = f" {' '.join(turn.query.lower().split())} "
        for size in SIZES:
            found.update(text[i : i + size] for i in range(len(text) - size + 1))
    return found


def calls(task: Task) -> Counter[str]:
    """Counts of the reference calls, each with all its arguments. Ignores their order and the queries."""
    return Counter(canonical(call.to_json()) for call in task.calls)


class CountCosines:
    """Cosines of idf-weighted counts: features that all tasks share weigh next to nothing, rare ones most.

    Memory: an inverted index of the E tasks, with 8 bytes per pair of a task and one of its features.
    """

    def __init__(self, tasks: Sequence[Task], features: Features, corpus: Iterable[Task] = ()):
        """tasks: the E tasks to compare with. corpus: further tasks that show which features are common."""
        self._features, self._size = features, len(tasks)
        self._number: dict[str, int] = {}
        numbers, counts, ends = self._read(tasks)
        self._known = len(self._number)  # numbers from here on are features of the corpus alone
        others, _, further = self._read(corpus)
        rows = np.bincount(numbers, minlength=len(self._number))  # number of tasks that have each feature
        frequency = rows + np.bincount(others, minlength=len(self._number))
        total = len(ends) + len(further) + 1
        # Adding 0.5 keeps the weight of a ubiquitous feature above 0. The last entry is for unseen features.
        self._idf = np.array([math.log(total / (n + 0.5)) for n in (*frequency.tolist(), 0)])

        weights = np.empty(len(numbers), np.float32)
        for start, end in zip([0, *ends], ends):
            weights[start:end] = self._weigh(numbers[start:end], counts[start:end])
        columns = np.repeat(np.arange(len(ends), dtype=np.int32), np.diff([0, *ends]))
        by_feature = np.argsort(numbers, kind="stable")
        self._columns, self._weights = columns[by_feature], weights[by_feature]
        self._starts = np.concatenate([[0], np.cumsum(rows)])

    def __call__(self, task: Task) -> np.ndarray:
        """Returns the cosine to each of the tasks, float32 [E] within [0, 1]; 0 if no feature is shared."""
        found = self._features(task)
        numbers = np.fromiter((self._number.get(f, -1) for f in found), np.int64, len(found))
        weights = self._weigh(numbers, np.fromiter(found.values(), np.float64, len(found)))
        known = (0 <= numbers) & (numbers < self._known)
        return np.clip(self._sums(numbers[known].tolist(), weights[known].astype(np.float32)), 0.0, 1.0)

    def _sums(self, numbers: list[int], weights: np.ndarray) -> np.ndarray:
        """Dot products of the weights with those of the E tasks, over the features of these numbers: [E].

        It builds dense rows for these features alone. BLAS then sums in the same order as for a fully dense
        matrix, so published similarities reproduce to the last bit.
        """
        rows = np.zeros((len(numbers), self._size), np.float32)
        for row, number in zip(rows, numbers):
            own = slice(self._starts[number], self._starts[number + 1])
            row[self._columns[own]] = self._weights[own]
        return weights @ rows

    def _read(self, tasks: Iterable[Task]) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Concatenates the features of all tasks: returns (numbers, counts, end position of each task)."""
        numbers, counts, ends = array("i"), array("d"), []
        for task in tasks:
            for feature, count in self._features(task).items():
                numbers.append(self._number.setdefault(feature, len(self._number)))
                counts.append(count)
            ends.append(len(numbers))
        return np.asarray(numbers, np.int32), np.asarray(counts, np.float64), ends

    def _weigh(self, numbers: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Unit vector of one task, float64: counts times idf, normalised. Number -1 is an unseen feature."""
        weights = counts * self._idf[numbers]
        return weights / (math.sqrt(math.fsum((weights * weights).tolist())) or 1.0)


class KnownCosines(CountCosines):
    """`CountCosines` that ignores features which none of the tasks has.

    A paraphrase has many unseen n-grams, and a longer task many unseen calls. Counting them would hide the
    overlap.

    It uses a sparse matrix: a query has so many n-grams that dense rows would dominate the run time.
    """

    def __init__(self, tasks: Sequence[Task], features: Features):
        from scipy import sparse  # here, so that runs without these measures do not wait for the import

        super().__init__(tasks, features)
        self._idf[-1] = 0.0
        self._rows = sparse.csr_array(
            (self._weights, self._columns, self._starts), shape=(self._known, self._size)
        )

    def _sums(self, numbers: list[int], weights: np.ndarray) -> np.ndarray:
        return weights @ self._rows[numbers]


class Containment:
    """The share of each task's calls that another task has, by idf: 1 where it has them all among others.

    A cosine falls with every further call that one of the tasks has. So it misses a task that holds all calls
    of one, or even of two, besides such calls.

    Only a task with two different calls that have arguments counts. Many tasks hold `pwd` and `ls`, or one
    certain call, by chance. Rare calls weigh most, so that a task without such a `pwd` still has most of it.
    """

    def __init__(self, tasks: Sequence[Task]):
        counts = [calls(task) for task in tasks]
        frequency = Counter(call for own in counts for call in own)
        self._idf = {call: math.log((len(tasks) + 1) / (n + 0.5)) for call, n in frequency.items()}
        self._holders: dict[str, list[tuple[int, int]]] = {}  # call -> (index of a task, how often it has it)
        self._whole = np.ones(len(tasks))
        for index, (task, own) in enumerate(zip(tasks, counts)):
            if len({canonical(call.to_json()) for call in task.calls if call.arguments}) > 1:
                self._whole[index] = math.fsum(n * self._idf[call] for call, n in own.items())
                for call, n in own.items():
                    self._holders.setdefault(call, []).append((index, n))

    def __call__(self, task: Task) -> np.ndarray:
        """Returns the share of each of the tasks, float32 [E] within [0, 1]."""
        had = np.zeros(len(self._whole))
        for call, times in calls(task).items():
            for index, n in self._holders.get(call, ()):
                had[index] += min(n, times) * self._idf[call]
        return np.clip(had / self._whole, 0.0, 1.0).astype(np.float32)


class EmbeddingCosines:
    """Cosines of an embedding model's vectors. A task's text is its queries, joined by line breaks."""

    def __init__(self, tasks: Sequence[Task], embed: Embed):
        """embed: called once with the texts of all tasks, then with one text per call.

        Raises ValueError, here and in a call, if it does not return finite numbers [n, d].
        """
        self._embed = embed
        self._vectors = self._read(tasks)

    def __call__(self, task: Task) -> np.ndarray:
        """Returns the cosine to each of the tasks, float32 [E]. Negative cosines and zero vectors give 0."""
        return np.clip(self._vectors @ self._read([task])[0], 0.0, 1.0)

    def _read(self, tasks: Sequence[Task]) -> np.ndarray:
        texts = ["\n".join(turn.query for turn in task.turns) for task in tasks]
        try:
            vectors = np.asarray(self._embed(texts), np.float32) if texts else np.zeros((0, 1), np.float32)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"The function of config.data.leak_embedding fails ({error}): it must be embed(texts) -> "
                "floats [n, d]."
            ) from error
        if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
            raise ValueError(
                f"The embedding of {len(texts)} texts has the shape {vectors.shape}: "
                "it must be finite numbers [n, d]."
            )
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.where(norms > 0, norms, 1.0)
