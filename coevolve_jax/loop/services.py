"""Services of the laboratory that need the learner: influence of tasks, and branches of the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.diagnosis.rewards import rewards_of
from coevolve_jax.grpo.filter import FilterState
from coevolve_jax.grpo.learn import learn
from coevolve_jax.grpo.learner import TrainState
from coevolve_jax.grpo.packing import Batch, pack_for
from coevolve_jax.loop.collect import Roller
from coevolve_jax.loop.leader import Leader
from coevolve_jax.loop.trainer import Trainer
from coevolve_jax.rollout.engine import Engine
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import Branch, grpo_samples, samples_of, spread_of
from coevolve_jax.types import Group, Task, TrainingSample


class Services:
    """Computes with the learner's present state, and leaves it as it is.

    state: returns that state.
    """

    def __init__(
        self, config: ConfigDict, learner: Trainer | Leader, engine: Engine, state: Callable[[], TrainState]
    ):
        self._config, self._learner, self._engine, self._state = config, learner, engine, state

    def influence(
        self, goal: Sequence[Group], groups: Sequence[Group], preconditioned: bool
    ) -> tuple[list[float], int]:
        """Does `Lab.influence`. Returns its numbers, and how many gradients they took."""
        c, state, rewards = self._config, self._state(), rewards_of(self._config)

        def learned(group: Group) -> list[TrainingSample]:
            values = list(rewards(group))
            return samples_of(c, group, values) if spread_of(c, group, values) > 0 else []

        rollouts = max(len(group.trajectories) for group in (*goal, *groups))
        pack = lambda samples, rows: pack_for(
            c.learner, samples, max_rows=rows, routing=self._learner.routing
        )
        aims, drafts = [list(map(learned, part)) for part in (goal, groups)]
        if not any(aims):
            return [0.0] * len(groups), 0
        self._learner.aim(state, pack([s for own in aims for s in own], rollouts * len(goal)))
        score = lambda own: float(self._learner.influence(state, pack(own, rollouts), preconditioned))
        return [score(own) if own else 0.0 for own in drafts], sum(map(bool, aims + drafts))

    def branch(
        self,
        roll: Roller,
        tasks: Sequence[Task],
        goal: Sequence[Task],
        number: int,
        *,
        updates: int,
        batch: int,
        k: int,
        step: int,
    ) -> tuple[Branch, int]:
        """Does `Lab.branch`. Returns it, and how many updates it made. number: of the branch in this step.

        A copy of the policy that diverges ends there. It is worth what the policy itself is.
        """
        c = configs.override(self._config, {"learner.epochs": 1})
        rng = rng_for(c.seed, "branch tasks", step, number)
        before = roll(goal, 1, role="branch", greedy=True)
        on_branch, state, made = _OnBranch(self._learner), self._learner.fork(self._state()), 0
        try:
            for _ in range(updates):
                drawn = rng.choice(len(tasks), size=min(batch, len(tasks)), replace=False)
                groups = roll([tasks[i] for i in drawn], k, role="branch")
                samples, _ = grpo_samples(c, groups, FilterState())
                if samples:
                    try:
                        state, _ = learn(c, on_branch, state, samples)
                    except FloatingPointError:  # of the copy, which is dropped: the policy is as it was
                        return Branch(before, before), made
                    self._engine.update_weights(self._learner.policy_of_branch(state), step + 1)
                    made += 1
            after = roll(goal, 1, role="branch", greedy=True)
        finally:
            if made:
                self._engine.update_weights(self._learner.policy(self._state()), step + 1)
        return Branch(before, after), made


class _OnBranch:
    """grpo.learn.Updates for a branch, with one update per batch."""

    scores = False

    def __init__(self, learner: Trainer | Leader):
        self._learner = learner
        self.routing, self.flops, self.score = learner.routing, learner.flops, learner.score

    def update(
        self, state: TrainState, batch: Batch[np.ndarray], old_logprobs: jax.Array | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        return self._learner.update_branch(state, batch)
