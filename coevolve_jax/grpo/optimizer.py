"""AdamW behind clipping, with warm-up, schedule, weight-decay mask and a choice of precision."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict


def learning_rate(config: ConfigDict) -> float | optax.Schedule:
    """The rate by update: linear from learning_rate / warmup_steps over `warmup_steps` updates, then by `schedule` to
    the share `final_rate` of `learning_rate` at update `decay_steps`, and constant from there.

    No update has rate 0: the rollouts of a whole step would be learned from in vain.
    """
    c = config
    steps = c.decay_steps - c.warmup_steps
    after = {
        "constant": lambda: optax.constant_schedule(c.learning_rate),
        "cosine": lambda: optax.cosine_decay_schedule(c.learning_rate, steps, alpha=c.final_rate),
        "linear": lambda: optax.linear_schedule(c.learning_rate, c.final_rate * c.learning_rate, steps),
    }[c.schedule]
    if not c.warmup_steps:
        return c.learning_rate if c.schedule == "constant" else after()
    warmup = lambda update: c.learning_rate * ((update + 1) / c.warmup_steps)
    return optax.join_schedules([warmup, after()], [c.warmup_steps])


def decay_mask(params: Any, *, embeddings: bool) -> Any:
    """True for the parameters that decay: matrices; the embedding table only where asked for, norms and biases never."""
    spared = {"scale", "bias"} if embeddings else {"scale", "bias", "embedding"}
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in spared, params)


def in_float32(
    inner: optax.GradientTransformationExtraArgs, moment_dtype: Any
) -> optax.GradientTransformationExtraArgs:
    """Runs `inner` on float32 copies of gradients, parameters and state; the state is stored in moment_dtype."""
    cast = lambda tree, dtype: jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )

    def init(params):
        return cast(inner.init(cast(params, jnp.float32)), moment_dtype)

    def update(updates, state, params=None, **extra):
        updates, state = inner.update(
            *(cast(tree, jnp.float32) for tree in (updates, state, params)), **extra
        )
        return updates, cast(state, moment_dtype)

    return optax.GradientTransformationExtraArgs(init, update)


def clip_by_global_norm(limit: float) -> optax.GradientTransformationExtraArgs:
    """As optax's, by one product with a number, which XLA folds into what reads the gradient. It would write the
    quotient that optax takes, a second gradient. Where `update` is given a part of a gradient, it is told the norm of all."""

    def clip(
        updates: Any, state: Any, params: Any = None, *, norm: jax.Array | None = None, **_: Any
    ) -> tuple[Any, Any]:
        norm = optax.tree.norm(updates) if norm is None else norm
        scale = jnp.where(norm < limit, 1.0, limit / norm)
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), clip)


def make_optimizer(config: ConfigDict) -> optax.GradientTransformationExtraArgs:
    """AdamW (arXiv 1711.05101) behind global-norm clipping. config: the `learner` section."""
    c = config
    adamw = optax.adamw(
        learning_rate(c),
        b1=c.adam_b1,
        b2=c.adam_b2,
        weight_decay=c.weight_decay,
        mask=lambda params: decay_mask(params, embeddings=c.decay_embeddings),
    )
    return in_float32(optax.chain(clip_by_global_norm(c.max_grad_norm), adamw), c.moment_dtype)
