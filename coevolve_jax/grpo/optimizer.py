"""AdamW behind clipping, with warm-up, schedule, weight-decay mask and a choice of precision."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

Rate = float | jax.Array


def learning_rate(config: ConfigDict, peak: Rate) -> Rate | optax.Schedule:
    """The learning rate by update.

    It grows linearly from peak / warmup_steps over `warmup_steps` updates. Then it follows `schedule` to the
    share `final_rate` of the peak at update `decay_steps`, and stays there.

    The warm-up does not start at 0: that would waste the rollouts of a whole step.

    peak: config.learning_rate. Where it is a traced number, one program serves all rates.
    """
    c = config
    steps = c.decay_steps - c.warmup_steps
    after = {
        "constant": lambda: optax.constant_schedule(peak),
        "cosine": lambda: optax.cosine_decay_schedule(peak, steps, alpha=c.final_rate),
        "linear": lambda: optax.linear_schedule(peak, c.final_rate * peak, steps),
    }[c.schedule]
    if not c.warmup_steps:
        return peak if c.schedule == "constant" else after()
    warmup = lambda update: peak * ((update + 1) / c.warmup_steps)
    return optax.join_schedules([warmup, after()], [c.warmup_steps])


def decay_mask(params: Any, *, embeddings: bool) -> Any:
    """True for the parameters that decay.

    Matrices do, and the embedding table where asked for. Norms and biases never do.
    """
    spared = {"scale", "bias"} if embeddings else {"scale", "bias", "embedding"}
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key not in spared, params)


def in_float32(
    inner: optax.GradientTransformationExtraArgs, moment_dtype: Any
) -> optax.GradientTransformationExtraArgs:
    """Runs `inner` on float32 copies of gradients, parameters and state. Stores the state in moment_dtype."""
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
    """Clips like optax's, by one product with a number, which XLA folds into the reader of the gradient.

    XLA would write the quotient that optax computes to memory: a second gradient. If `update` gets only a
    part of a gradient, pass it the norm of the whole.
    """

    def clip(
        updates: Any, state: Any, params: Any = None, *, norm: jax.Array | None = None, **_: Any
    ) -> tuple[Any, Any]:
        norm = optax.tree.norm(updates) if norm is None else norm
        scale = jnp.where(norm < limit, 1.0, limit / norm)
        return jax.tree.map(lambda g: g * scale.astype(g.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), clip)


def make_optimizer(config: ConfigDict, peak: Rate) -> optax.GradientTransformationExtraArgs:
    """AdamW (arXiv 1711.05101) behind global-norm clipping.

    config: the `learner` section. peak: of the `learning_rate`; the first state does not depend on it.
    """
    c = config
    adamw = optax.adamw(
        learning_rate(c, peak),
        b1=c.adam_b1,
        b2=c.adam_b2,
        weight_decay=c.weight_decay,
        mask=lambda params: decay_mask(params, embeddings=c.decay_embeddings),
    )
    return in_float32(optax.chain(clip_by_global_norm(c.max_grad_norm), adamw), c.moment_dtype)
