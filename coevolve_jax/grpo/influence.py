"""The influence of a group of rollouts: the cosine between its update and the gradient of development tasks.

INFUSER (arXiv 2606.09052) scores a task q by cos(g_dev, Gamma(q)) with Gamma = g / (sqrt(v') + eps). v' is
Adam's second moment with the task's own gradient in it. On our own tasks the score hardly repeats between two
halves of 16 rollouts (docs/notes/influence.md).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

EPS = 1e-8  # of Adam
TINY = 1e-30  # least product of two norms, so that a gradient of zeros has influence 0


def cosine(a: Any, b: Any) -> jax.Array:
    """Cosine of two trees of equal shapes, a float32 scalar; 0 if one of them is all zeros."""
    return jnp.asarray(optax.tree.vdot(a, b)) / jnp.maximum(optax.tree.norm(a) * optax.tree.norm(b), TINY)


def preconditioned(grads: Any, opt_state: Any, b2: float) -> Any:
    """The direction of Adam's step for a gradient, without momentum and clipping: g / (sqrt(v') + eps).

    v' = (b2 v + (1 - b2) g^2) / (1 - b2^(t + 1)) for the second moment v after t updates. v holds
    squares of clipped gradients; g is not clipped.
    """
    found = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, optax.ScaleByAdamState))
    (adam,) = [x for x in found if isinstance(x, optax.ScaleByAdamState)]
    scale = 1 - b2 ** (jnp.asarray(adam.count, jnp.float32) + 1)

    def direction(g: jax.Array, v: jax.Array) -> jax.Array:
        after = (b2 * v.astype(jnp.float32) + (1 - b2) * jnp.square(g)) / scale
        return g / (jnp.sqrt(after) + EPS)

    return jax.tree.map(direction, grads, adam.nu)
