"""What a self-evolving method is to the loop of train.py, and pieces that methods share.

A method is a module with `make(config, state=None) -> Strategy`, named by config.strategy.name: `coevolve` is
`coevolve_jax.strategies.coevolve`, a dotted path is a module of anybody's (docs/add_strategy.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.grpo.advantages import group_advantages, live_groups, spread
from coevolve_jax.grpo.filter import FilterState, filter_groups
from coevolve_jax.seeding import rng_for
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Context, Evidence, Group, Hint, Sample, Task, Trajectory

Rewards = Callable[[Group], Sequence[float]]  # of the valid trajectories of a group, in their order


class Roll(Protocol):
    """Rollouts by the present policy, of one step."""

    def __call__(
        self,
        tasks: Sequence[Task],
        k: int,
        hints: Callable[[Task, int], Hint | None] | None = None,
        role: str = "policy",
    ) -> list[Group]:
        """K rollouts of each task, a group per task. hints: (task, rollout_index) -> help for that rollout.
        role: what they are booked as in the ledger."""
        ...


class Lab(Protocol):
    """What a method may ask for while the training set evolves. Each call is booked in the ledger.

    tasks: D_t. scenarios: those that may be explored for training.
    """

    @property
    def tasks(self) -> TaskPool: ...

    @property
    def scenarios(self) -> Sequence[Task]: ...

    def reflect(self, evidence: Sequence[Evidence]) -> list[Context]:
        """The reflector's structured context of each piece of evidence."""
        ...

    def grow(
        self, contexts: Sequence[Context], *, wanted: int, kind: str, step: int, rng: np.random.Generator
    ) -> SynthesisStats:
        """explore -> abstract -> validate under these contexts; D_t grows by `wanted` tasks at most. kind: what
        the new tasks' lineage says of their origin."""
        ...

    def grow_unguided(self, *, wanted: int, kind: str, step: int, rng: np.random.Generator) -> SynthesisStats:
        """The same by free exploration of random scenarios, until D_t has grown by `wanted`. ValueError where they
        give no more new tasks."""
        ...

    def probe(self, tasks: Sequence[Task], k: int, step: int) -> list[Group]:
        """Rollouts that nothing is learned from."""
        ...


@dataclasses.dataclass(frozen=True)
class Findings:
    """What a method read from the rollouts of a step. counts: by kind, for metrics.jsonl. rows: for
    signals.jsonl, in a form of the method's own; the report links those that have a Signal's keys to tasks."""

    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    rows: Sequence[Mapping[str, Any]] = ()


class Strategy(Protocol):
    """A self-evolving method; the four calls come in this order in every GRPO step.

    With config.rollout.max_staleness above 0, `collect` of step t + 1 comes before `credit` of step t and runs in
    another thread: it must then change nothing but what it draws from `tasks`.
    """

    def collect(self, step: int, tasks: TaskPool, roll: Roll) -> list[Group]:
        """Draws a batch of tasks from D_t and rolls it out."""
        ...

    def credit(self, groups: Sequence[Group]) -> list[Sample]:
        """What to learn from the rollouts; invalid trajectories are left out. Outcomes are never changed."""
        ...

    def observe(self, step: int, groups: Sequence[Group]) -> Findings:
        """Remembers what the rollouts tell."""
        ...

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        """Lets the training set evolve; None at a step where it does not."""

    def to_json(self) -> dict:
        """All that `make` needs to go on exactly here, as JSON values."""
        ...


def outcome_rewards(group: Group) -> list[float]:
    """The environment's own rewards."""
    return [t.outcome.reward for t in group.valid]


def trajectories_of(groups: Sequence[Group]) -> list[Trajectory]:
    """All of them, group by group."""
    return [t for group in groups for t in group.trajectories]


def collect_batch(
    config: ConfigDict, step: int, tasks: TaskPool, roll: Roll, *, rewards: Rewards = outcome_rewards, **how
) -> list[Group]:
    """A batch drawn uniformly from D_t, K rollouts each.

    With config.learner.dynamic_sampling (DAPO, arXiv 2503.14476, section 3.2) a group without spread asks for
    another task, for at most that many rounds more. All that was rolled out is returned. how: goes to `roll`.
    """
    c, groups = config, []
    missing = c.rollout.tasks_per_step
    for round in range(1 + c.learner.dynamic_sampling):
        again = (round,) if round else ()
        drawn = tasks.sample(missing, rng_for(c.seed, "sample", step, *again), new_share=c.data.new_share)
        if round:  # a small pool may give a task of this step once more
            seen = {group.task.id for group in groups}
            drawn = [t for t in drawn if t.id not in seen]
        if not drawn:
            break
        groups += roll(drawn, c.rollout.group_size, **how)
        missing = c.rollout.tasks_per_step - len(
            live_groups({i: spread(rewards(g)) for i, g in enumerate(groups)})
        )
        if missing <= 0:
            break
    return groups


def credit_groups(
    config: ConfigDict, groups: Sequence[Group], state: FilterState, rewards: Rewards = outcome_rewards
) -> tuple[list[Sample], FilterState]:
    """The samples of GRPO: advantages within each group, groups chosen by the spread of their rewards.

    This alone decides which groups count: config.learner.skip_dead_groups, dynamic_sampling and group_filter.

    Returns:
      the samples, and the group filter's state after them.
    """
    c = config.learner
    shaped = {i: list(rewards(group)) for i, group in enumerate(groups) if group.valid}
    kept = {i: spread(values) for i, values in shaped.items()}
    if c.skip_dead_groups or c.dynamic_sampling:
        kept = live_groups(kept)
    if c.group_filter:
        kept, state = filter_groups(state, kept)
    pairs = [(i, t, r) for i in kept for t, r in zip(groups[i].valid, shaped[i], strict=True)]
    advantages = group_advantages(
        [r for _, _, r in pairs], [i for i, _, _ in pairs], [True] * len(pairs), estimator=c.advantage
    )
    samples = [
        Sample(t, np.full(len(t.ids), a, np.float32)) for (_, t, _), a in zip(pairs, advantages, strict=True)
    ]
    return samples, state
