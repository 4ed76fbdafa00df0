"""ET-Agent (arXiv 2601.06860): successes with fewer calls and shorter texts are worth more.

Source: the paper and the authors' code. The reward of a rollout is

    R = success * f_calls * f_length + format,
    f_calls = 2 / (1 + exp(call_slope (calls - mean of the group))),
    f_length = 2 / (1 + exp(length_slope z)),

with z the standardised number of sampled tokens within the group, and format -1 for a rollout with a text
that is no call, else 0. Groups whose rewards now differ are live though all of them succeed.

Selection: groups whose numbers of calls and whose successes vary most, by Pareto fronts over both variances
at the last visit (non-dominated sort, then crowding distance). The better half of D_t is drawn at full odds.

Faithful: reward and selection. The published scripts of all stages set both slopes to 0; the defaults here
are those of the functions.

Missing: the flywheel before RL, where a model refines right traces and corrects wrong ones for SFT. Growth is
that of `random`. It aims at calls and tokens per solved task, at equal success.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.strategies.base import SIGNALS, StepReport, check_shares, must_be
from coevolve_jax.strategies.growth import synthesize_freely
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Group, Trajectory

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
NEEDS = frozenset({"fresh"})
IGNORES = dict.fromkeys(("data.sampling", "data.sampling_floor", "data.retire_after"), "")
FIDELITY = "F: reward and Pareto selection are the paper's; the flywheel of refined traces is missing."
DEFAULTS = {
    "call_slope": 0.2,  # how much a call more than the group's mean costs; 0: nothing
    "length_slope": 0.5,  # likewise for a standard deviation of sampled tokens
    "passed_over": 0.2,  # odds of the tasks that the selection passes over; 1: no selection
}


class ETAgent(Static):
    """`Static` with shaped rewards and odds. Its state: both variances of each task at its last visit."""

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        own = config.strategy
        for name in ("call_slope", "length_slope"):
            must_be(config, name, own[name] >= 0, "0 or more")
        check_shares(config, "passed_over")
        super().__init__(config, state, synthesize_freely, rewards=self.rewards, weights=self.weights)
        self._spread = {id: tuple(v) for id, v in state["spread"].items()} if state else {}

    def rewards(self, group: Group) -> list[float]:
        """R of each valid rollout of a group."""
        own, valid = self._config.strategy, group.valid
        if not valid:
            return []
        calls = np.array([calls_of(t) for t in valid], float)
        tokens = np.array([t.mask.sum() for t in valid], float)
        z = (tokens - tokens.mean()) / tokens.std() if len(set(tokens.tolist())) > 1 else np.zeros(len(valid))
        few = 2 / (1 + np.exp(own.call_slope * (calls - calls.mean())))
        short = 2 / (1 + np.exp(own.length_slope * z))
        won = np.array([t.outcome.success for t in valid])
        malformed = np.array([any(s.call is None for s in t.steps) for t in valid])
        return (won * few * short - malformed).tolist()

    def weights(self, tasks: TaskPool) -> np.ndarray:
        """Odds of each task of D_t [N]: 1 for the selected half and for unvisited tasks, else passed_over."""
        ids = [task.id for task in tasks]
        chosen = set(pareto({id: self._spread[id] for id in ids if id in self._spread})[: len(ids) // 2])
        full = [id in chosen or id not in self._spread for id in ids]
        return np.where(full, 1.0, self._config.strategy.passed_over)

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        for group in (g for g in groups if g.valid):
            calls = [calls_of(t) for t in group.valid]
            won = [t.outcome.success for t in group.valid]
            self._spread[group.task.id] = (float(np.var(calls)), float(np.var(won)))
        return super().observe(step, groups)

    def to_json(self) -> dict:
        return {**super().to_json(), "spread": {id: list(v) for id, v in self._spread.items()}}


make = ETAgent


def calls_of(t: Trajectory) -> int:
    """How many calls a rollout made, those to tools that are not on offer too."""
    return sum(s.call is not None for s in t.steps)


def pareto(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Sorts tasks by Pareto front of (variance of calls, of success), then by crowding distance.

    Larger is better in both. Tasks of equal success in all rollouts are left out (the paper's mixed groups).
    """
    left = {id: point for id, point in points.items() if point[1] > 0}
    order: list[str] = []
    while left:
        values = np.array(list(left.values()))
        beaten = [((values >= v).all(1) & (values > v).any(1)).any() for v in values]
        front = [id for id, by_another in zip(left, beaten, strict=True) if not by_another]
        far = crowding(np.array([left[id] for id in front]))
        order += [front[i] for i in np.lexsort((np.array(front), -far))]
        left = {id: point for id, point in left.items() if id not in set(front)}
    return order


def crowding(points: np.ndarray) -> np.ndarray:
    """Crowding distance of each point of a front [n, 2] (NSGA-II): infinite at the ends of an axis."""
    far = np.zeros(len(points))
    for axis in points.T:
        order = np.argsort(axis, kind="stable")
        low, high = axis[order[0]], axis[order[-1]]
        far[order[[0, -1]]] = np.inf
        if high > low:
            far[order[1:-1]] += (axis[order[2:]] - axis[order[:-2]]) / (high - low)
    return far
