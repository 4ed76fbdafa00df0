"""The updates of a step: samples in, the next policy out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.grpo import losses, objective
from coevolve_jax.grpo.learner import TrainState
from coevolve_jax.grpo.packing import Batch, pack_for
from coevolve_jax.types import TrainingSample

# Metrics of the policy's tokens, which a batch without any does not have.
BY_TOKEN = frozenset((*objective.MEANS, *objective.WEIGHTS, objective.KL, *objective.PEAKS))


class Updates(Protocol):
    """The part of `grpo.learner.Learner` that `learn` uses."""

    @property
    def routing(self) -> tuple[int, int]: ...

    @property
    def scores(self) -> bool: ...

    def flops(self, batch: Batch[np.ndarray], updates: int) -> float: ...

    def score(self, state: TrainState, batch: Batch[np.ndarray]) -> jax.Array: ...

    def update(
        self, state: TrainState, batch: Batch[np.ndarray], old_logprobs: jax.Array | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]: ...


def learn(
    config: ConfigDict,
    learner: Updates,
    state: TrainState,
    samples: Sequence[TrainingSample],
    version: int | None = None,
) -> tuple[TrainState, dict[str, Any]]:
    """config.learner.epochs updates on the samples; without any the state stays as it is.

    Args:
      config: of the run.
      learner: `grpo.learner.Learner`, or a run's own (`loop.leader.lead`).
      state: donated.
      version: of the policy in `state`, as `Trajectory.versions` counts. None: no token counts as stale.

    Returns:
      the state, and the metrics of the last epoch as Python numbers. Those of the mismatch are the first
      epoch's, whose policy is the sampler's. Those of BY_TOKEN are None where no token was sampled.
      "flops" counts all epochs (flops.py).

    Raises:
      FloatingPointError: an update is not finite.
      ValueError: as `pack`.
    """
    c = config.learner
    batch = pack_for(
        c,
        samples,
        max_rows=config.rollout.tasks_per_step * config.rollout.group_size,
        routing=learner.routing,
        version=version if version is not None and losses.uses_ages(config) else None,
    )
    old_logprobs = learner.score(state, batch) if learner.scores else None
    mismatch: dict[str, float] = {}
    for _ in range(c.epochs):
        state, learned = learner.update(state, batch, old_logprobs)
        learned = {name: value.item() for name, value in jax.device_get(learned).items()}
        if not learned.pop("finite"):
            raise FloatingPointError(
                f"The update (loss {learned['loss']}, gradient norm {learned['grad_norm']}) or its step "
                "is not finite: the last checkpoint is intact; start a new workdir with a lower "
                "config.learner.learning_rate."
            )
        if not batch.mask.any():
            learned |= dict.fromkeys(BY_TOKEN & learned.keys())
        mismatch = mismatch or {name: value for name, value in learned.items() if name.startswith("mismatch")}
    return state, {**learned, **mismatch, "flops": learner.flops(batch, c.epochs)}
