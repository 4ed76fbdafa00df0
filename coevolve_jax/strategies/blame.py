"""Blame: CoEvolve's loop with another signal, the tool whose call the failed rollouts miss.

Signal: the first reference call that a failed rollout does not make is to blame. Decayed counts of attempts
and misses give each tool's success rate p. Only the first visits to a task count. Later the policy knows the
task, and succeeds with tools that it still gets wrong elsewhere.

Budget: tools are drawn in proportion to a power of p (1 - p), so neither mastered nor hopeless tools take it.
Several different tools come before any comes again, so one weakness does not hide the others. Where all
attempts missed, or none did, nothing tells the tools apart: all on offer weigh the same.

Tasks: a task made for a tool has to call it. If a scenario gives no such task, another scenario is explored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.explorers.evidence import signature
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies import static
from coevolve_jax.strategies.base import SIGNALS, Lab, StepReport, check_least, check_shares, evolves
from coevolve_jax.strategies.growth import actions_on_offer, solvable, synthesize_for_tools
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.types import Group, Task, Trajectory

PRIOR = 4.0  # pseudo-attempts at the mean success rate of all tools, added to each tool's counts

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
DEFAULTS = {
    "first_sight": 1,  # how many first visits to a task count; 0: all
    "memory": 0.95,  # decay of the counts per GRPO step
    "sharpness": 2.0,  # the power: 1 for p (1 - p) itself; the higher, the fewer tools share the budget
    "breadth": 6,  # different tools that an evolution explores before it comes back to one
    "chasing": False,  # weigh tools by their failure rate 1 - p alone, to the same power
    "probe": 0,  # admit only tasks that this many rollouts solve sometimes, not always; 0: every valid task
}


class Blame(static.Static):
    """`Static` with another `observe` and `evolve` (strategies/base.py documents the methods).

    Its state, besides that of `Static`: (attempts, misses) of each tool, and visits to each task up to
    `first_sight`.
    """

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        check_least(config, {"first_sight": 0, "sharpness": 0, "breadth": 1})
        check_shares(config, "memory")
        super().__init__(config, state)
        self._tools: dict[str, tuple[float, float]] = {
            tool: tuple(counts) for tool, counts in (state["tools"] if state else {}).items()
        }
        self._visits: dict[str, int] = dict(state["visits"]) if state else {}

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        found, memory = super().observe(step, groups), self._config.strategy.memory
        fresh = [group for group in groups if self._counts(group)]
        tools = {tool: (memory * n, memory * missed) for tool, (n, missed) in self._tools.items()}
        blamed = 0
        for group in fresh:
            for t in group.valid:
                for action, missed in attempts(group.task, t):
                    n, misses = tools.get(action, (0.0, 0.0))
                    tools[action] = (n + 1, misses + missed)
                    blamed += missed
        self._tools = tools
        return StepReport({**found.counts, "blame": blamed}, found.rows)

    def _counts(self, group: Group) -> bool:
        """Whether this visit to the group's task counts for the signal. Also records the visit."""
        most, visits = self._config.strategy.first_sight, self._visits.get(group.task.id, 0)
        if most and group.valid:
            self._visits[group.task.id] = min(most, visits + 1)
        return not most or visits < most

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        c = self._config
        if not evolves(c, step):
            return None
        rng = rng_for(c.seed, "evolve", step)
        weights = tool_weights(self._tools, c.strategy.sharpness, c.strategy.chasing)
        if not any(weights.values()):  # all attempts missed, or none did
            weights = dict.fromkeys(actions_on_offer(lab), 1.0)
        tools = draw(weights, c.evolution.tasks, c.strategy.breadth, rng)
        return synthesize_for_tools(
            lab, tools, "blame", wanted=c.evolution.tasks, kind="signal", step=step, rng=rng,
            admit=solvable(lab, step, c.strategy.probe),
        )  # fmt: skip

    def to_json(self) -> dict:
        tools = {t: list(self._tools[t]) for t in sorted(self._tools)}
        return {**super().to_json(), "tools": tools, "visits": self._visits}


make = Blame


def attempts(task: Task, trajectory: Trajectory) -> list[tuple[str, bool]]:
    """The actions of the reference calls that a rollout attempted, each with whether it missed the call.

    The rollout made all of them in order, except perhaps the last: the first reference call that it missed. A
    rollout that succeeded by other calls misses none.
    """
    made = iter([signature(s.call) for s in trajectory.steps if s.call is not None])
    came: list[tuple[str, bool]] = []
    for call, action in zip(task.calls, task.actions, strict=True):
        if signature(call) in made:  # consumes the iterator up to this call, so the order counts
            came.append((action, False))
        else:
            return came if trajectory.outcome.success else [*came, (action, True)]
    return came


def tool_weights(
    tools: Mapping[str, tuple[float, float]], sharpness: float = 1.0, chasing: bool = False
) -> dict[str, float]:
    """Weight of each tool from its (attempts, misses): p (1 - p) to the power `sharpness`; `chasing`: 1 - p.

    p is the tool's success rate, shrunk towards the rate of all tools by PRIOR attempts. Otherwise a tool
    that was seldom tried would look weak.
    """
    # fsum is independent of order: after a resume `tools` is sorted.
    attempts, misses = (math.fsum(counts[i] for counts in tools.values()) for i in (0, 1))
    mean = (1 - misses / attempts) if attempts else 0.5
    rates = {tool: (n - missed + PRIOR * mean) / (n + PRIOR) for tool, (n, missed) in tools.items()}
    return {tool: ((1 - p) * (1.0 if chasing else p)) ** sharpness for tool, p in rates.items()}


def draw(weights: Mapping[str, float], count: int, breadth: int, rng: np.random.Generator) -> list[str]:
    """Draws `count` tools by weight, in rounds of `breadth` different tools.

    A round has fewer tools if fewer weigh more than 0. Returns [] if none does.
    """
    names = [tool for tool in sorted(weights) if weights[tool] > 0]
    if not names:
        return []
    shares = np.array([weights[tool] for tool in names]) / sum(weights[tool] for tool in names)
    drawn: list[str] = []
    while len(drawn) < count:
        size = min(breadth, len(names), count - len(drawn))
        drawn += [names[i] for i in rng.choice(len(names), size, replace=False, p=shares)]
    return drawn
