"""SEC (arXiv 2505.14970): a bandit learns from which category of tasks the batches should come.

Source: the paper, and a copy of the authors' code. After each step an arm's value moves towards its reward,

    Q_a <- (1 - rate) Q_a + rate r_a,

where r_a is the mean |advantage| of the arm's rollouts. A group whose rewards are equal counts as 0, also
where the learner skips it. An arm whose rollouts are all invalid keeps its value. Each place of a batch draws
an arm by softmax(Q / tau), then a task uniformly.

Faithful: the bandit, its reward, and the fading of absent arms, which only the code has. Growth is that of
`random`, on purpose: at equal seeds both have the same D_t. They differ in odds, and in what is reserved:
`random` keeps data.min_evolved_share of each batch for evolved tasks, SEC nothing. With
data.min_evolved_share=0 they differ in odds alone.

Departs: as the tasks of an arm are drawn, its odds in the rest of the batch fall a little.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.diagnosis.rewards import rewards_of
from coevolve_jax.grpo.advantages import group_advantages
from coevolve_jax.strategies.base import SIGNALS, StepReport, must_be
from coevolve_jax.strategies.batches import TASK_NAMES, category, check_category
from coevolve_jax.strategies.growth import synthesize_freely
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Group

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
NEEDS = frozenset({"fresh"})
SCENARIO_KEYS = {"arms": TASK_NAMES}
IGNORES = dict.fromkeys(
    ("data.sampling", "data.sampling_floor", "data.retire_after", "data.min_evolved_share"), ""
)
FIDELITY = "F: the bandit is the paper's; D_t grows as in random, where the paper's set is fixed."
DEFAULTS = {
    "arms": "calls",  # what tasks are grouped by (strategies/batches.py: category), as "level,calls"
    "signal": "advantage",  # an arm's reward: "advantage", or "progress", the change of its mean reward
    "rate": 0.5,  # alpha, the share of the new reward
    "tau": 0.4,  # temperature of the softmax: the paper has 1.0 for Countdown, 0.4 for maths, 0.2 for puzzles
    "fade": True,  # an arm that the batch lacks is rewarded with 0
}


class SEC(Static):
    """`Static` with odds by the bandit. Its state: Q and the last mean reward of each arm."""

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        own = config.strategy
        check_category(config, "arms")
        must_be(config, "signal", own.signal in ("advantage", "progress"), "advantage or progress")
        must_be(config, "rate", 0 < own.rate <= 1, "above 0, at most 1")
        must_be(config, "tau", own.tau > 0, "above 0")
        super().__init__(config, state, synthesize_freely, weights=self.weights, min_evolved_share=0.0)
        self._values: dict[str, float] = dict(state["values"]) if state else {}
        self._means: dict[str, float] = dict(state["means"]) if state else {}

    def weights(self, tasks: TaskPool) -> np.ndarray:
        """Odds of each task of D_t [N]: its arm's share of the softmax, by the number of the arm's tasks."""
        arms = [category(task, self._config.strategy.arms) for task in tasks]
        sizes = Counter(arms)
        logits = np.array([self._values.get(arm, 0.0) for arm in arms]) / self._config.strategy.tau
        return np.exp(logits - logits.max()) / np.array([sizes[arm] for arm in arms])

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        own, rollouts = self._config.strategy, defaultdict(list)
        for group in groups:
            rewards = rewards_of(self._config)(group)
            sizes = np.abs(group_advantages(rewards, estimator=self._config.learner.advantage))
            rollouts[category(group.task, own.arms)] += zip(rewards, sizes.tolist(), strict=True)
        absent = self._values.keys() - rollouts.keys() if own.fade else set()
        for arm in sorted({*absent, *(arm for arm, found in rollouts.items() if found)}):
            value = self._values.get(arm, 0.0)
            self._values[arm] = (1 - own.rate) * value + own.rate * self._reward(arm, rollouts[arm])
        return super().observe(step, groups)

    def _reward(self, arm: str, rollouts: Sequence[tuple[float, float]]) -> float:
        """The arm's reward for rollouts of (reward, |advantage|); 0 without any. Keeps their mean reward."""
        if not rollouts:
            return 0.0
        mean, size = (float(np.mean(values)) for values in zip(*rollouts, strict=True))
        change = mean - self._means.get(arm, mean)
        self._means[arm] = mean
        return size if self._config.strategy.signal == "advantage" else change

    def to_json(self) -> dict:
        return {**super().to_json(), "values": self._values, "means": self._means}


make = SEC
