"""The learner as a run uses it: with checkpoints, weights for the engine, and export of the policy."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from coevolve_jax import build, shipped
from coevolve_jax.build import Policy
from coevolve_jax.distributed.gathering import in_memory, on_one_device
from coevolve_jax.exports import model_card
from coevolve_jax.grpo.learner import Learner, TrainState
from coevolve_jax.grpo.packing import Batch
from coevolve_jax.models import hf_io, peft_io
from coevolve_jax.records import checkpoint
from coevolve_jax.rollout.engine import Engine


class Trainer:
    """One process's learner, checkpoints and policy. Each of several processes has one (loop/leader.py).

    `score`, `update`, `aim`, `influence`, `flops`, `routing` and `scores` are the learner's own.

    Args:
      learner: `init` or `restore` make its TrainState.
      policy: the policy before RL. Its params become None once there is a state, to free memory. The learner
        keeps what it needs of them.
      config: the run's config; config.engine names the engine and where it computes.
    """

    def __init__(self, learner: Learner, policy: Policy, config: ConfigDict):
        self.routing, self.scores, self.flops = learner.routing, learner.scores, learner.flops
        self.score, self.update = learner.score, learner.update
        self.aim, self.influence = learner.aim, learner.influence
        self._learner, self._policy, self._config = learner, policy, config
        self._writer = checkpoint.Writer()
        self._native = config.engine.name == "native"
        self.sharded_engine = self._native and config.engine.sharded

    def engine(self, workdir: Path) -> Engine:
        """The engine that config.engine names, with the policy before RL. The caller closes it.

        Raises ValueError and EngineError as `build.engine` does.
        """
        return build.engine(self._config, self.initial_policy(), workdir)

    def initial_policy(self) -> Policy:
        """The policy before RL, with its parameters placed where the engine takes them."""
        return dataclasses.replace(self._policy, params=self._for_engine(self._policy.params))

    def init(self, params: Any) -> TrainState:
        """The state before the first update. params: the policy before RL."""
        state = self._learner.init(params)
        self._policy.params = None
        return state

    def restore(self, directory: str | os.PathLike) -> tuple[int, TrainState, dict] | None:
        """Restores the newest checkpoint, as `checkpoint.restore` does."""
        found = checkpoint.restore(directory, self._learner.abstract_state)
        if found:
            self._policy.params = None
        return found

    def policy(self, state: TrainState, dtype: str | None = None) -> Any:
        """The policy's parameters, placed where the engine takes them.

        dtype: of the kernels into which LoRA's adapters are merged; None: the engine's.
        """
        return self._for_engine(self._learner.policy(state, dtype or self._config.engine.dtype))

    def fork(self, state: TrainState) -> TrainState:
        """A copy of the state, for a branch (loop/services.py)."""
        return jax.tree.map(jnp.copy, state)

    def update_branch(self, branch: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """Does `Learner.update` to a branch, which is donated."""
        return self.update(branch, batch)

    def policy_of_branch(self, branch: TrainState) -> Any:
        """Does `policy` for a branch."""
        return self.policy(branch)

    def save(
        self, directory: str | os.PathLike, step: int, state: TrainState, saved: Mapping, *, keep: int
    ) -> None:
        """Saves `state` and the JSON values `saved`, as `checkpoint.Writer.save` does."""
        self._writer.save(directory, step, state, saved, keep=keep)

    def save_state(self, directory: str | os.PathLike, step: int, saved: Mapping) -> None:
        """Gives a checkpoint other JSON values, as `checkpoint.Writer.save_state` does."""
        self._writer.save_state(directory, step, saved)

    def save_policy(self, state: TrainState, folder: str | os.PathLike, dtype: str | None = None) -> None:
        """Writes the policy as a Hugging Face folder, from its devices, without gathering it whole.

        With LoRA the weights are merged, and the folder adapter/ in it holds the adapters alone, for peft.
        What a killed process left of an export goes: the caller has claimed the workdir.

        dtype: of the weights; None: that of the master weights.
        """
        c, adapter = self._config.learner, Path(folder) / model_card.ADAPTER
        if jax.process_index() == 0:
            for path in (Path(folder), adapter):
                hf_io.discard_halves(path)
        written: str = dtype or c.param_dtype
        hf_io.save(folder, self._policy.config, self._learner.policy_to_save(state, written), written)
        if c.lora_rank and jax.process_index() == 0:
            base = str(shipped.folder(self._policy.folder).resolve())  # it is read from anywhere
            adapters = peft_io.Adapters(state.params, c.lora_rank, c.lora_alpha, base, c.dtype)
            peft_io.save(adapter, self._policy.config, adapters)

    def close(self) -> None:
        """Waits for the last save."""
        self._writer.close()

    def _for_engine(self, params: Any) -> Any:
        """Places the parameters where the engine takes them.

        The place depends on the engine:

            native engine          on one device
            native, sharded        where they are
            server, one process    where they are
            server, several        in process 0's host memory, gathered from all processes
        """
        if self._native and not self.sharded_engine:
            return on_one_device(params)
        if self.sharded_engine or jax.process_count() == 1:
            return params
        # Cast to the engine's dtype before the transfer: more precision would only cost time.
        return in_memory(params, self._config.engine.dtype)
