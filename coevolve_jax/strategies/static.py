"""Plain GRPO on D_0: the control without new tasks. It still counts signals, so that runs can be compared.

Most other methods are the same class with functions of their own: how D_t grows, how likely a task is drawn,
what a rollout is worth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.diagnosis.rewards import Rewards, outcome_rewards
from coevolve_jax.grpo.filter import FilterState
from coevolve_jax.strategies.base import SIGNALS, Help, Lab, Roll, StepReport, check_calls, grpo_samples
from coevolve_jax.strategies.batches import collect_batch
from coevolve_jax.synthesis import signals
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Group, Signal, TrainingSample

READS = SIGNALS

Evolve = Callable[[ConfigDict, int, Lab], SynthesisStats | None]  # (config, step, lab) -> stats


class Static:
    """GRPO with a group filter (strategies/base.py documents the methods).

    evolve: grows D_t; None: D_t stays D_0. rewards: what the rollouts of a group are worth, before the
    terms of config.reward are added. weights and min_evolved_share: as in `collect_batch`. hints: what help
    each rollout is given. needs_calls: refuses a D_t without reference calls (base.check_calls).
    """

    def __init__(
        self,
        config: ConfigDict,
        state: Mapping | None = None,
        evolve: Evolve | None = None,
        *,
        rewards: Rewards = outcome_rewards,
        weights: Callable[[TaskPool], np.ndarray] | None = None,
        min_evolved_share: float | None = None,
        hints: Help | None = None,
        needs_calls: bool = False,
    ):
        self._config, self._evolve, self._rewards = config, evolve, rewards
        self._needs_calls = needs_calls
        self._how = {"weights": weights, "min_evolved_share": min_evolved_share}
        self._how |= {"hints": hints} if hints else {}
        self._filter = FilterState(**state["filter"]) if state else FilterState()
        self._history = signals.History.from_json(state["history"]) if state else signals.History()

    def collect(self, step: int, tasks: TaskPool, roll: Roll) -> list[Group]:
        if self._needs_calls:
            check_calls(self._config, tasks)
        return collect_batch(self._config, step, tasks, roll, rewards=self._rewards, **self._how)

    def compute_advantages(self, groups: Sequence[Group]) -> list[TrainingSample]:
        samples, self._filter = grpo_samples(self._config, groups, self._filter, self._rewards)
        return samples

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        found = self._signals(step, groups)
        return StepReport(signals.count_by_kind(found), [s.to_json() for s in found])

    def _signals(self, step: int, groups: Sequence[Group]) -> list[Signal]:
        """Finds the step's signals. The history then holds the step."""
        c = self._config.signals
        found, self._history = signals.extract(
            self._history, groups, step, window=c.window, theta=c.rare_percent
        )
        return found

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        return self._evolve(self._config, step, lab) if self._evolve else None

    def to_json(self) -> dict:
        return {"filter": self._filter._asdict(), "history": self._history.to_json()}


make = Static
