"""The control for odds by weakness: SpatialEvo's scheduler of task categories, with growth as in `random`.

Source: SpatialEvo (ZJU-REAL), its public code as described in our notes. A category is drawn with weight
max(floor, 1 - acc'). Here acc' = (sum + PSEUDO * PRIOR) / (n + PSEUDO), over all n visits to tasks of the
category so far, and sum adds up their solve rates. Within a category all tasks are equally likely.

Only the scheduler is taken over. Its exact checker of geometry is what our environments have anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.strategies.base import SIGNALS, StepReport, must_be
from coevolve_jax.strategies.batches import TASK_NAMES, category, check_category
from coevolve_jax.strategies.groups import solve_rate
from coevolve_jax.strategies.growth import synthesize_freely
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Group

PSEUDO, PRIOR = 2, 0.35  # visits to a category that are assumed, and their solve rate

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
NEEDS = frozenset({"fresh"})
SCENARIO_KEYS = {"category": TASK_NAMES}
IGNORES = dict.fromkeys(("data.sampling", "data.sampling_floor", "data.retire_after"), "")
FIDELITY = "P: the scheduler is the paper's; its categories of spatial questions are keys of our tasks."
DEFAULTS = {
    "category": "calls",  # what tasks are grouped by (strategies/batches.py: category)
    "floor": 0.05,  # least weight of a category
}


class Weakest(Static):
    """`Static` with odds by category. Its state: (visits, sum of their solve rates) of each category."""

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        check_category(config, "category")
        must_be(config, "floor", 0 < config.strategy.floor <= 1, "above 0, at most 1")
        super().__init__(config, state, synthesize_freely, weights=self.weights)
        self._seen = {name: tuple(counts) for name, counts in (state["seen"] if state else {}).items()}

    def weights(self, tasks: TaskPool) -> np.ndarray:
        """Odds of each task of D_t [N]: its category's weight, shared among the category's tasks."""
        names = [category(task, self._config.strategy.category) for task in tasks]
        sizes = Counter(names)
        return np.array([self._weight(name) / sizes[name] for name in names])

    def _weight(self, name: str) -> float:
        n, total = self._seen.get(name, (0, 0.0))
        accuracy = (total + PSEUDO * PRIOR) / (n + PSEUDO)
        return max(self._config.strategy.floor, 1 - accuracy)

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        for group in groups:
            if (p := solve_rate(group)) is not None:
                name = category(group.task, self._config.strategy.category)
                n, total = self._seen.get(name, (0, 0.0))
                self._seen[name] = (n + 1, total + p)
        return super().observe(step, groups)

    def to_json(self) -> dict:
        return {**super().to_json(), "seen": {name: list(n) for name, n in self._seen.items()}}


make = Weakest
