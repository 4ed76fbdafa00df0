"""Leak control: measures how close a synthetic task is to the evaluation tasks, and refuses near copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from coevolve_jax.envs import calls as tool_calls
from coevolve_jax.envs.base import canonical, features
from coevolve_jax.synthesis.similarity import (
    Containment,
    CountCosines,
    Embed,
    EmbeddingCosines,
    Features,
    KnownCosines,
    calls,
    ngrams,
)
from coevolve_jax.types import Call, Task

REASON = "near_evaluation"
EQUAL = 1 - 1e-6  # the least cosine of equal tasks, with room for float32 rounding


class Near(NamedTuple):
    """The id of the evaluation task most similar by a measure (None: there is none), and its cosine."""

    measure: str
    similarity: float
    task: str | None

    def to_json(self) -> dict:
        return {**self._asdict(), "similarity": round(self.similarity, 4)}


class LeakGuard:
    """Compares a task with every evaluation task, by several measures.

        features   features of the environment family; values and the sequence of calls weigh most
        arguments  calls with their arguments: their cosine, or the share of the evaluation task's that it has
        ngrams     character n-grams of the queries
        embedding  an embedding model's vectors of the queries
        calls      equal calls in equal order

    An argument that says a parameter's default counts as left out, in all of them.

    Each measure but "calls" is a similarity up to 1 with a threshold. A task that matches by "calls" is a
    copy, whatever its words and scenario.

    A task without reference calls is its words and its world, and a game says the same words in each. It is
    near only those tasks whose world begins as its own, where both scenarios tell by "begins".

    The share sees a longer task that holds a whole evaluation task, or two of them, which the cosine misses.
    `Containment` says which evaluation tasks have one.
    """

    def __init__(
        self,
        evaluation_tasks: Sequence[Task],
        threshold: float = 0.9,
        features: Features = features,
        query_threshold: float = 0.0,
        embed: Embed | None = None,
        embedding_threshold: float = 0.0,
        call_threshold: float = 0.0,
        tools: Callable[[Task], Sequence[dict]] = lambda task: (),
    ):
        """Prepares the comparison.

        Args:
          threshold: of the measure "features".
          features: task -> counts of its features (the environment family's).
          query_threshold: of "ngrams"; 0 turns the measure off.
          embed: the embedding model; None turns "embedding" off.
          embedding_threshold: of "embedding".
          call_threshold: of "arguments"; 0 turns the measure off.
          tools: task -> function schemas of its tools, which say the defaults (the environment family's).

        Raises:
          ValueError: a threshold in use is not within (0, 1].
        """
        self._thresholds = {"features": threshold}
        if call_threshold:
            self._thresholds["arguments"] = call_threshold
        if query_threshold:
            self._thresholds["ngrams"] = query_threshold
        if embed is not None:
            self._thresholds["embedding"] = embedding_threshold
        for name, least in self._thresholds.items():
            if not 0 < least <= 1:
                raise ValueError(
                    f"The leak threshold of {name} is {least}; it is a cosine above 0 and up to 1."
                )
        self._tools = tools
        evaluation_tasks = [self._plain(task) for task in evaluation_tasks]
        self._ids = [t.id for t in evaluation_tasks]
        self._begins = [t.scenario.get("begins") for t in evaluation_tasks]
        self._sequences = {_sequence(t): t.id for t in reversed(evaluation_tasks) if t.calls}
        own = CountCosines(evaluation_tasks, features)
        self._cosines: dict[str, Callable[[Task], np.ndarray]] = {"features": own}
        if call_threshold:
            cosines, shares = KnownCosines(evaluation_tasks, calls), Containment(evaluation_tasks)
            self._cosines["arguments"] = lambda task: np.maximum(cosines(task), shares(task))
        if query_threshold:
            self._cosines["ngrams"] = KnownCosines(evaluation_tasks, ngrams)
        if embed is not None:
            self._cosines["embedding"] = EmbeddingCosines(evaluation_tasks, embed)

    def nearest(self, task: Task) -> Near:
        """Returns the evaluation task that decides whether `task` is refused.

        A task with the same calls in the same order decides, if there is one (measure "calls"). Otherwise the
        measure with the largest similarity / threshold decides, by its nearest task. Ties go to the first.
        """
        task = self._plain(task)
        same = self._sequences.get(_sequence(task)) if task.calls else None
        if same is not None:
            return Near("calls", 1.0, same)
        by_measure = [self._nearest(name, task) for name in self._cosines]
        return max(by_measure, key=lambda near: near.similarity / self._least(near.measure))

    def refuses(self, near: Near) -> bool:
        """Returns whether a task with this `nearest` is a leak: its similarity reaches the threshold."""
        return near.similarity >= self._least(near.measure)

    def check(self, task: Task) -> str | None:
        """Returns None if the task may be trained on, else "near_evaluation"."""
        return REASON if self.refuses(self.nearest(task)) else None

    def _plain(self, task: Task) -> Task:
        """The task with reference calls that say no default."""
        if not any(call.arguments for call in task.calls):
            return task
        default = tool_calls.defaults(self._tools(task))

        def plain(call: Call) -> Call:
            left_out = {name: canonical(value) for name, value in default.get(call.name, {}).items()}
            said = {k: v for k, v in call.arguments.items() if left_out.get(k) != canonical(v)}
            return dataclasses.replace(call, arguments=said)

        turns = [dataclasses.replace(turn, calls=tuple(map(plain, turn.calls))) for turn in task.turns]
        return dataclasses.replace(task, turns=tuple(turns))

    def _least(self, measure: str) -> float:
        return min(self._thresholds.get(measure, 1.0), EQUAL)

    def _nearest(self, name: str, task: Task) -> Near:
        begins = None if task.calls else task.scenario.get("begins")
        alike = [begins is None or other in (None, begins) for other in self._begins]
        if not any(alike):
            return Near(name, 0.0, None)
        cosines = self._cosines[name](task)
        if not all(alike):
            cosines = np.where(alike, cosines, -1.0)
        best = int(np.argmax(cosines))
        return Near(name, float(cosines[best]), self._ids[best])


def _sequence(task: Task) -> str:
    return canonical([call.to_json() for call in task.calls])
