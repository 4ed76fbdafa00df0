"""Blame: CoEvolve's loop with another signal, the tool whose call the failed rollouts miss.

A rollout that fails a task with reference calls has left them somewhere: the first reference call that it does not
make is to blame. Attempts and misses of each tool, the older ones fading, give the rate p at which the policy gets it
right. Only the first visits to a task count: later on the policy knows the task, and succeeds with tools that it still
gets wrong elsewhere. Tools are explored in proportion to a power of p (1 - p), so that neither what works nor what is
hopeless takes the budget, several before any comes again, so that one weakness does not hide the others. A task made for
a tool has to call it; a tool that a scenario gives no task for is explored in another.
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
from coevolve_jax.strategies.base import (
    SIGNALS,
    Lab,
    Roll,
    StepReport,
    evolves,
    solvable,
    synthesize_for_tools,
)
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Call, Group, TrainingSample, Trajectory

PRIOR = 4.0  # attempts at the mean rate of all tools that each tool begins with

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
DEFAULTS = {
    "first_sight": 1,  # visits to a task that count, the first ones; 0: all
    "memory": 0.95,  # what an attempt counts for after each GRPO step
    "sharpness": 2.0,  # the power: 1 for p (1 - p) itself; the higher, the fewer tools share the budget
    "breadth": 6,  # different tools that an evolution explores before it comes back to one
    "chasing": False,  # weigh tools by their failure rate 1 - p alone, to the same power
    "probe": 0,  # admit only tasks that so many rollouts of the policy solve sometimes; 0 admits all that are valid
}


class Blame:
    """Static, but for `observe` and `evolve`. See strategies/base.py. Its state besides: [attempts, misses] of each
    tool, and the visits to each task so far, as far as they count."""

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        least = {"first_sight": 0, "memory": 0, "sharpness": 0, "breadth": 1}
        for name, bound in least.items():
            if config.strategy[name] < bound:
                raise ValueError(
                    f"config.strategy.{name} is {config.strategy[name]!r}: it must be {bound} or more."
                )
        self._config = config
        self._grpo = static.Static(config, state)
        self._tools: dict[str, tuple[float, float]] = {
            tool: tuple(counts) for tool, counts in (state["tools"] if state else {}).items()
        }
        self._visits: dict[str, int] = dict(state["visits"]) if state else {}

    def collect(self, step: int, tasks: TaskPool, roll: Roll) -> list[Group]:
        return self._grpo.collect(step, tasks, roll)

    def compute_advantages(self, groups: Sequence[Group]) -> list[TrainingSample]:
        return self._grpo.compute_advantages(groups)

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        found, memory = self._grpo.observe(step, groups), self._config.strategy.memory
        fresh = [group for group in groups if self._counts(group)]
        tools = {tool: (memory * n, memory * missed) for tool, (n, missed) in self._tools.items()}
        blamed = 0
        for group in fresh:
            for t in group.valid:
                for call, missed in attempts(group.task.calls, t):
                    n, misses = tools.get(call.name, (0.0, 0.0))
                    tools[call.name] = (n + 1, misses + missed)
                    blamed += missed
        self._tools = tools
        return StepReport({**found.counts, "blame": blamed}, found.rows)

    def _counts(self, group: Group) -> bool:
        """Whether this visit to the group's task does; it is noted."""
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
        tools = draw(weights, c.evolution.tasks, c.strategy.breadth, rng)
        return synthesize_for_tools(
            lab, tools, "blame", wanted=c.evolution.tasks, kind="signal", step=step, rng=rng,
            admit=solvable(c, lab, step, c.strategy.probe),
        )  # fmt: skip

    def to_json(self) -> dict:
        tools = {t: list(self._tools[t]) for t in sorted(self._tools)}
        return {**self._grpo.to_json(), "tools": tools, "visits": self._visits}


make = Blame


def attempts(reference: Sequence[Call], trajectory: Trajectory) -> list[tuple[Call, bool]]:
    """The reference calls that a rollout came to, and whether it missed them: all but the last were made, in order.

    A rollout that succeeded by other calls came to none of those that it left out.
    """
    made = iter([signature(s.call) for s in trajectory.steps if s.call is not None])
    came: list[tuple[Call, bool]] = []
    for call in reference:
        if signature(call) in made:  # goes on behind it
            came.append((call, False))
        else:
            return came if trajectory.outcome.success else [*came, (call, True)]
    return came


def tool_weights(
    tools: Mapping[str, tuple[float, float]], sharpness: float = 1.0, chasing: bool = False
) -> dict[str, float]:
    """Weight of each tool from its [attempts, misses]: p (1 - p), or 1 - p, to the power `sharpness`. p is its rate of
    success, drawn towards that of all tools by PRIOR attempts, so that what was seldom tried is not taken for weak."""
    # fsum: the order of `tools` is another one after a restart.
    attempts, misses = (math.fsum(counts[i] for counts in tools.values()) for i in (0, 1))
    mean = (1 - misses / attempts) if attempts else 0.5
    rates = {tool: (n - missed + PRIOR * mean) / (n + PRIOR) for tool, (n, missed) in tools.items()}
    return {tool: ((1 - p) * (1.0 if chasing else p)) ** sharpness for tool, p in rates.items()}


def draw(weights: Mapping[str, float], count: int, breadth: int, rng: np.random.Generator) -> list[str]:
    """`count` tools by weight, in rounds of `breadth` different ones (of as many as weigh something, if fewer do)."""
    names = [tool for tool in sorted(weights) if weights[tool] > 0]
    if not names:
        return []
    shares = np.array([weights[tool] for tool in names]) / sum(weights[tool] for tool in names)
    drawn: list[str] = []
    while len(drawn) < count:
        size = min(breadth, len(names), count - len(drawn))
        drawn += [names[i] for i in rng.choice(len(names), size, replace=False, p=shares)]
    return drawn
