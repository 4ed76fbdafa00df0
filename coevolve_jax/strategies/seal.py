"""SEAL (github.com/yihaohu0118/SEAL): the types of failures, read from calls, reweight the advantages.

Source: a description of the authors' repository; its code was not read, so the formula is ours. The task set
does not grow, as there.

Types of a failed rollout, from its calls against the task's reference, the first that fits:

    limit            a limit of tokens, steps or context cut it, or a call that took too long
    malformed        a text that is no call
    ungraded         the task has no reference calls, by which the rest is told
    missing_call     it ended before the first reference call that it does not make
    wrong_arguments  it makes a call to that tool later, with other arguments
    wrong_tool       it makes other calls instead
    error            the tool refused the reference call
    extra_call       it makes all reference calls, and others that do harm

Weights: f_c is the share of type c among the failed rollouts of earlier steps, whose counts decay by `memory`
per step. s_c is the same with the slower decay memory^(1/4). A failed rollout of type c weighs
1 + frequent f_c + rising max(0, f_c - s_c), a success 1. All are divided by their mean over the batch, so the
mean weight is 1.

Missing: the tool documents, which adapt in training there.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.explorers.evidence import signature
from coevolve_jax.strategies.base import SIGNALS, Lab, StepReport, must_be, trajectories_of
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.types import Group, Task, TrainingSample, Trajectory

READS = SIGNALS
FIDELITY = "P: the formula of the weights is ours, and tool documents do not adapt."
DEFAULTS = {
    "memory": 0.8,  # decay of the counts of failures per step, of f; s decays four times more slowly
    "frequent": 1.0,  # how much the share of a type adds to the weight of its rollouts
    "rising": 1.0,  # how much the rise of this share adds
}


class SEAL(Static):
    """`Static` with reweighted advantages. Its state: fast and slowly decayed counts of each type."""

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        must_be(config, "memory", 0 <= config.strategy.memory < 1, "0 or more, below 1")
        for name in ("frequent", "rising"):
            must_be(config, name, config.strategy[name] >= 0, "0 or more")
        super().__init__(config, state)
        self._fast: dict[str, float] = dict(state["fast"]) if state else {}
        self._slow: dict[str, float] = dict(state["slow"]) if state else {}

    def compute_advantages(self, groups: Sequence[Group]) -> list[TrainingSample]:
        tasks, samples = {g.task.id: g.task for g in groups}, super().compute_advantages(groups)
        types = [failure(tasks[s.trajectory.task_id], s.trajectory) for s in samples]
        weights = np.array([self._weight(kind) for kind in types])
        return [
            dataclasses.replace(s, advantages=(s.advantages * w).astype(np.float32))
            for s, w in zip(samples, weights / weights.mean() if samples else [], strict=True)
            if s.advantages is not None
        ]

    def _weight(self, kind: str) -> float:
        """The weight of a rollout before the division by the mean. kind: "" for a success."""
        own = self._config.strategy
        f, s = share(self._fast, kind), share(self._slow, kind)
        return 1 + own.frequent * f + own.rising * max(0.0, f - s)

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        found, memory = super().observe(step, groups), self._config.strategy.memory
        tasks = {g.task.id: g.task for g in groups}
        valid = [t for t in trajectories_of(groups) if t.outcome.valid]
        new = Counter(filter(None, (failure(tasks[t.task_id], t) for t in valid)))
        self._fast, self._slow = decayed(self._fast, memory, new), decayed(self._slow, memory**0.25, new)
        return StepReport({**found.counts, **new}, found.rows)

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        return None

    def to_json(self) -> dict:
        return {**super().to_json(), "fast": self._fast, "slow": self._slow}


make = SEAL


def failure(task: Task, t: Trajectory) -> str:
    """The type of a rollout's failure, as above; "" for a success."""
    if t.outcome.success:
        return ""
    if t.truncated or t.stop == "call_failed":
        return "limit"
    if any(s.call is None for s in t.steps):
        return "malformed"
    if not task.calls:
        return "ungraded"
    made = [(signature(s.call), s.call.name, s.error) for s in t.steps if s.call is not None]
    for call in task.calls:
        alike = [i for i, (line, _, _) in enumerate(made) if line == signature(call)]
        good = [i for i in alike if not made[i][2]]
        if not made:
            return "missing_call"
        if not alike:
            return "wrong_arguments" if call.name in {name for _, name, _ in made} else "wrong_tool"
        if not good:
            return "error"
        made = made[good[0] + 1 :]
    return "extra_call"


def decayed(counts: Mapping[str, float], decay: float, new: Mapping[str, int]) -> dict[str, float]:
    """The counts after one more step. Types in alphabetical order, so that a resumed run adds alike."""
    return {kind: decay * counts.get(kind, 0.0) + new.get(kind, 0) for kind in sorted({*counts, *new})}


def share(counts: Mapping[str, float], kind: str) -> float:
    """The share of a type among the counts; 0 where there are none."""
    total = sum(counts.values())
    return counts.get(kind, 0.0) / total if total else 0.0
