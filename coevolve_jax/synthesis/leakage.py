"""Leak control: how close is a synthetic task to the tasks that we evaluate on?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from coevolve_jax.envs.base import canonical, features
from coevolve_jax.types import Task

REASON = "near_evaluation"


class LeakGuard:
    """Compares tasks with every evaluation task by the cosine of their idf-weighted features.

    Features that every task shares, such as the wording of the tool
    documentation, weigh next to nothing; values and the sequence of calls,
    which make the instance, weigh most.
    """

    def __init__(
        self,
        evaluation_tasks: Sequence[Task],
        threshold: float = 0.9,
        corpus: Iterable[Task] = (),
        features: Callable[[Task], Counter[str]] = features,
    ):
        """corpus: further tasks (such as D_0) that show which features are common. features: counts of what is
        compared (the environment family's).

        Raises ValueError if the threshold is not within (0, 1].
        """
        if not 0 < threshold <= 1:
            raise ValueError(f"The leak threshold is {threshold}; it is a cosine above 0 and up to 1.")
        self.threshold, self._features = threshold, features
        self._ids = [t.id for t in evaluation_tasks]
        self._sequences = {_sequence(t) for t in evaluation_tasks if t.calls}
        counts = [features(t) for t in evaluation_tasks]
        documents = [*counts, *(features(t) for t in corpus)]
        self._n_documents = len(documents)
        self._frequency = Counter(f for document in documents for f in document)
        self._row = {f: i for i, f in enumerate(dict.fromkeys(f for c in counts for f in c))}
        # [features, evaluation tasks]: a query reads only the rows of its own features.
        self._weights = np.zeros((len(self._row), len(counts)), np.float32)
        for column, count in enumerate(counts):
            weights = self._weigh(count)
            self._weights[[self._row[f] for f in count], column] = list(weights.values())

    def similarities(self, task: Task) -> np.ndarray:
        """Cosine to every evaluation task, float32 [E] within [0, 1]; 0 where no feature is shared."""
        known = {f: w for f, w in self._weigh(self._features(task)).items() if f in self._row}
        rows = [self._row[f] for f in known]
        values = np.fromiter(known.values(), np.float32, len(known))
        return np.clip(values @ self._weights[rows], 0.0, 1.0)

    def nearest(self, task: Task) -> tuple[float, str | None]:
        """(similarity, id) of the most similar evaluation task (the first of equals), or (0.0, None)."""
        if not self._ids:
            return 0.0, None
        similarities = self.similarities(task)
        best = int(np.argmax(similarities))
        return float(similarities[best]), self._ids[best]

    def check(self, task: Task) -> str | None:
        """None for a task that may be trained on, else "near_evaluation".

        Refused are tasks at or above the threshold, and, whatever its wording
        and scenario, a task whose whole call sequence is that of an evaluation task.
        """
        same_calls = bool(task.calls) and _sequence(task) in self._sequences
        return REASON if same_calls or self.nearest(task)[0] >= self.threshold else None

    def _weigh(self, count: Counter[str]) -> dict[str, float]:
        """Unit vector of one task: count times idf (the half keeps that of a ubiquitous feature above 0)."""
        total = self._n_documents + 1
        weights = {f: n * math.log(total / (self._frequency[f] + 0.5)) for f, n in count.items()}
        norm = math.sqrt(math.fsum(w * w for w in weights.values()))
        return {f: w / norm for f, w in weights.items()}


def histogram(similarities: Sequence[float], bins: int = 20) -> dict[str, list]:
    """Counts of similarities in equal bins over [0, 1]: {"edges": bins + 1 floats, "counts": bins ints}."""
    counts, edges = np.histogram(np.asarray(similarities, np.float64), bins=bins, range=(0.0, 1.0))
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def _sequence(task: Task) -> str:
    return canonical([call.to_json() for call in task.calls])
