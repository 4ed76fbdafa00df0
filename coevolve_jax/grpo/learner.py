"""One jitted GRPO update with donated state."""
from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from coevolve_jax import sharding
from coevolve_jax.grpo import losses
from coevolve_jax.grpo.logprobs import token_logprobs
from coevolve_jax.grpo.packing import Batch
from coevolve_jax.models.qwen import Qwen, QwenConfig


class TrainState(NamedTuple):
    """params: the policy. opt_state: optax's. step: int32 scalar, updates done."""

    params: Any
    opt_state: Any
    step: jax.Array


def make_optimizer(config: ConfigDict) -> optax.GradientTransformation:
    """AdamW behind global-norm clipping, with linear warm-up. config: the `learner` section."""
    rate = optax.linear_schedule(0.0, config.learning_rate, config.warmup_steps) if config.warmup_steps else None
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            rate or config.learning_rate, b1=config.adam_b1, b2=config.adam_b2, weight_decay=config.weight_decay
        ),
    )


class Learner:
    """The GRPO update for one model on one mesh.

    Args:
      model_config: the policy's architecture.
      config: the `learner` section of the run's config.
      reference: frozen parameters that the KL term pulls to (the policy before RL).
      temperature: that of the sampler; logits are divided by it, so that ratios compare equals.
      mesh: where it runs. Parameters and optimiser state follow sharding.py's rules.
    """

    def __init__(
        self, model_config: QwenConfig, config: ConfigDict, reference: Any, *, temperature: float, mesh: Mesh
    ):
        self._model = Qwen(
            model_config, dtype=jnp.dtype(config.dtype), remat=config.remat, attention=config.attention,
            mesh=mesh,
        )
        self._config = config
        self._temperature = temperature
        self._optimizer = make_optimizer(config)
        self._reference = reference

        abstract = jax.eval_shape(self._fresh, reference)
        shardings = sharding.param_shardings(mesh, abstract)
        everywhere = sharding.replicated(mesh)
        rows = sharding.batch_sharding(mesh, axis=1)
        batch_shardings = Batch(*(everywhere if name == "used" else rows for name in Batch._fields))
        self._shardings = shardings
        self.init = jax.jit(self._fresh, out_shardings=shardings)
        self._update = jax.jit(
            self._update_step,
            in_shardings=(shardings, shardings.params, batch_shardings),
            out_shardings=(shardings, everywhere),
            donate_argnums=0,
        )
        self.abstract_state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings
        )

    def _fresh(self, params: Any) -> TrainState:
        params = jax.tree.map(jnp.copy, params)  # the state is donated; the reference is kept
        return TrainState(params, self._optimizer.init(params), jnp.zeros((), jnp.int32))

    def update(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimiser step on the whole batch. `state` is donated.

        Where the loss, the gradient or the step is not finite the returned state equals the given one and
        metrics["finite"] is False. Metrics are scalars on the device.
        """
        return self._update(state, self._reference, batch)

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """The update's program for batches of this shape; `.compile().memory_analysis()` is its memory.

        Neither the batch nor the reference need hold numbers: shapes and types do.
        """
        return self._update.lower(self.abstract_state, self._reference, batch)

    def _logprobs(self, params: Any, micro: Batch) -> tuple[jax.Array, jax.Array]:
        """[R, L] log-probabilities of the targets, and entropies."""
        variables = {"params": params}
        hidden = self._model.apply(
            variables, micro.tokens, micro.positions, micro.segment_ids, method=Qwen.hidden
        )
        logprobs, entropy = token_logprobs(
            lambda h: self._model.apply(variables, h, method=Qwen.unembed),
            hidden.reshape(-1, hidden.shape[-1]),
            micro.targets.reshape(-1),
            temperature=self._temperature,
            chunk=self._config.logprob_chunk,
        )
        return logprobs.reshape(micro.tokens.shape), entropy.reshape(micro.tokens.shape)

    def _loss(self, params: Any, reference: Any, micro: Batch, policy_tokens: jax.Array):
        """Sum over the micro-batch of token losses / policy tokens of the whole batch."""
        c = self._config
        logprobs, entropy = self._logprobs(params, micro)
        mean = lambda x: jnp.sum(jnp.where(micro.mask, x, 0)) / policy_tokens
        surrogate, ratio, clipped = losses.clipped_surrogate(
            logprobs, micro.sampler_logprobs, micro.advantages, c.clip_low, c.clip_high
        )
        policy_loss, kl = mean(surrogate), jnp.zeros(())
        if c.kl_coef:
            kl = mean(losses.kl_k3(logprobs, jax.lax.stop_gradient(self._logprobs(reference, micro)[0])))
        loss = policy_loss + c.kl_coef * kl
        mismatch = jnp.abs(jax.lax.stop_gradient(logprobs) - micro.sampler_logprobs)
        sums = {
            "loss": loss,
            "policy_loss": policy_loss,
            "kl": kl,
            "entropy": mean(entropy),
            "clip_fraction": mean(clipped),
            "mismatch_mean": mean(mismatch),
        }
        peaks = {
            "mismatch_max": jnp.max(jnp.where(micro.mask, mismatch, 0)),
            "ratio_max": jnp.max(jnp.where(micro.mask, ratio, 0)),
        }
        return loss, (sums, peaks)

    def _update_step(self, state: TrainState, reference: Any, batch: Batch):
        policy_tokens = jnp.maximum(jnp.sum(batch.mask), 1).astype(jnp.float32)
        grad_of = jax.grad(self._loss, has_aux=True)

        def one_microbatch(i, carry):
            micro = Batch(*(x[i] if x.ndim else x for x in batch))
            grads, (sums, peaks) = grad_of(state.params, reference, micro, policy_tokens)
            total_grads, total_sums, total_peaks = carry
            return (
                jax.tree.map(jnp.add, total_grads, grads),
                jax.tree.map(jnp.add, total_sums, sums),
                jax.tree.map(jnp.maximum, total_peaks, peaks),
            )

        zeros = lambda names: {name: jnp.zeros(()) for name in names}
        grads, sums, peaks = jax.lax.fori_loop(
            0,
            batch.used,
            one_microbatch,
            (
                jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), state.params),
                zeros(("loss", "policy_loss", "kl", "entropy", "clip_fraction", "mismatch_mean")),
                zeros(("mismatch_max", "ratio_max")),
            ),
        )
        grad_norm = optax.tree.norm(grads)
        updates, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
        finite = jnp.isfinite(sums["loss"]) & jnp.isfinite(grad_norm) & jnp.isfinite(optax.tree.norm(updates))
        stepped = TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1)
        state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), stepped, state)
        return state, {**sums, **peaks, "grad_norm": grad_norm, "policy_tokens": policy_tokens, "finite": finite}
