"""Step credit (SLEA-RL, arXiv 2603.18079, in GiGPO's form): each message is judged against its alternatives.

    A of a message's tokens = A of the rollout + weight * (its return - mean return at its anchor)

An anchor is what the policy read last before the message: the user's query or the answers to its calls. All
messages of a task's rollouts with equal anchors are compared. A return is the rollout's reward, discounted by
the number of messages that follow.

Read against the authors' code. Faithful: anchors, discount, centring without a standard deviation. The code
centres the A of the rollout in the same way: set learner.advantage to group_mean, as the arm does. Missing:
anchors that are only alike are not joined, and the paper's library of lessons is left out. No hint is given.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.diagnosis.rewards import rewards_of
from coevolve_jax.explorers.evidence import signature
from coevolve_jax.strategies import random
from coevolve_jax.strategies.base import SIGNALS, Lab, Roll, StepReport, check_least, check_shares
from coevolve_jax.strategies.groups import spans
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Group, Task, TrainingSample, Trajectory, spread

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
FIDELITY = "P: the step credit alone, among equal anchors; the library of lessons and its hints are left out."
DEFAULTS = {
    "weight": 1.0,  # of a message's own advantage; 0: GRPO
    "discount": 0.95,  # of the reward, for each message that follows
    "anchor": "observation",  # what the policy read last; "state": with the calls of the turn before it
    **random.DEFAULTS,  # D_t grows as that method's does, so the credit is the only difference
}


class StepCredit:
    """`random` with other advantages (strategies/base.py documents the methods). Its state is `random`'s."""

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        check_least(config, {"weight": 0})
        check_shares(config, "discount")
        if config.strategy.anchor not in ("observation", "state"):
            raise ValueError(
                f"config.strategy.anchor is {config.strategy.anchor!r}: it must be observation or state."
            )
        self._config, self._grpo = config, random.make(config, state)

    def collect(self, step: int, tasks: TaskPool, roll: Roll) -> list[Group]:
        return self._grpo.collect(step, tasks, roll)

    def compute_advantages(self, groups: Sequence[Group]) -> list[TrainingSample]:
        return credited(self._config, self._grpo.compute_advantages(groups), groups)

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        found, own = self._grpo.observe(step, groups), self._config.strategy
        told = [a for g in groups for row in message_advantages(g, own.discount, own.anchor) for a in row]
        return StepReport({**found.counts, "messages_told_apart": sum(a != 0 for a in told)}, found.rows)

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        return self._grpo.evolve(step, lab)

    def to_json(self) -> dict:
        return self._grpo.to_json()


make = StepCredit


def credited(
    config: ConfigDict, samples: Sequence[TrainingSample], groups: Sequence[Group]
) -> list[TrainingSample]:
    """GRPO's samples with `weight` times each message's own advantage added at its tokens.

    GRPO leaves groups of equal rewards out. Their messages may differ all the same: those that do join.

    config.strategy: weight, discount, anchor.
    """
    own, c, credit = config.strategy, config.learner, {}
    for group in groups:
        parts = message_advantages(group, own.discount, own.anchor)
        credit.update({id(t): part for t, part in zip(group.valid, parts, strict=True)})

    def finer(sample: TrainingSample) -> TrainingSample:
        advantages = np.array(sample.advantages)
        for span, advantage in zip(spans(sample.trajectory), credit[id(sample.trajectory)], strict=True):
            advantages[span] += own.weight * advantage
        return dataclasses.replace(sample, advantages=advantages)

    left_out, rewards = [], rewards_of(config)
    if own.weight and (c.skip_zero_variance_groups or c.dynamic_sampling or c.group_filter):
        alike = [t for g in groups if g.valid and spread(rewards(g)) == 0 for t in g.valid]
        alike = [t for t in alike if not (c.overlong_filtering and t.truncated)]
        left_out = [TrainingSample(t, np.zeros(len(t.ids), np.float32)) for t in alike if any(credit[id(t)])]
    return [finer(sample) for sample in [*samples, *left_out]]


def message_advantages(group: Group, discount: float, anchor: str) -> list[list[float]]:
    """The advantage of each message of each valid rollout: its return minus the mean at its anchor.

    A message whose anchor no other message has gets 0.
    """
    places = [anchors(group.task, t, anchor) for t in group.valid]
    returns = [
        [t.outcome.reward * discount ** (len(own) - 1 - i) for i in range(len(own))]
        for t, own in zip(group.valid, places, strict=True)
    ]
    at: dict[tuple, list[float]] = defaultdict(list)
    for own, values in zip(places, returns, strict=True):
        for place, value in zip(own, values, strict=True):
            at[place].append(value)
    mean = lambda values: values[0] if len(set(values)) == 1 else float(np.mean(values))  # equal ones give 0
    means = {place: mean(values) for place, values in at.items()}
    return [[v - means[p] for p, v in zip(own, values)] for own, values in zip(places, returns)]


def anchors(task: Task, trajectory: Trajectory, anchor: str) -> list[tuple]:
    """The anchor of each message.

    anchor: "observation": the text that it read last. "state": with the turn and its calls so far.
    """
    starts, steps = trajectory.turn_starts, trajectory.steps
    turns = [sum(start <= span.start for start in starts) - 1 for span in spans(trajectory)]
    found = []
    for message, turn in enumerate(turns):
        read = tuple(s.observation for s in steps if s.message == message - 1 and not s.ignored)
        if message == 0 or turn != turns[message - 1] or not read:
            read = (task.turns[turn].query,)
        made = [s.call for s in steps if s.turn == turn and s.message < message and s.call]
        found.append((read, turn, *map(signature, made)) if anchor == "state" else (read,))
    return found
