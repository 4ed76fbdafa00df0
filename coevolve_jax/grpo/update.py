"""The update of one GRPO step: samples in, the next policy out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.grpo.learner import TrainState
from coevolve_jax.grpo.packing import pack
from coevolve_jax.types import Sample


def learn(config: ConfigDict, learner: Any, state: TrainState, samples: Sequence[Sample]):
    c = config.learner
    batch = pack(
        [s.trajectory for s in samples],
        np.asarray([s.advantages[0] for s in samples], np.float32),
        row_length=c.row_length,
        rows_per_microbatch=c.rows_per_microbatch,
        max_rows=config.rollout.tasks_per_step * config.rollout.group_size,
        routing=learner.routing,
    )
    old_logprobs = learner.score(state, batch) if c.tis_cap else None
    mismatch: dict[str, float] = {}
    for _ in range(c.epochs):
        state, learned = learner.update(state, batch, old_logprobs)
        learned = {name: value.item() for name, value in jax.device_get(learned).items()}
        if not learned.pop("finite"):
            raise FloatingPointError(
                f"The update (loss {learned['loss']}, gradient norm {learned['grad_norm']}) or its step is not "
                "finite: the last checkpoint is intact; start a new workdir with a lower config.learner.learning_rate."
            )
        mismatch = mismatch or {name: value for name, value in learned.items() if name.startswith("mismatch")}
    return state, {**learned, **mismatch}
