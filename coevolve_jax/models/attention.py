"""Grouped-query attention in plain XLA: of packed rows to themselves, and of new tokens to a KV cache.

B: rows; L: tokens of a row; T: queries; S: keys; H: query heads; K: key-value heads; D: head dimension.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp

# Its exponential is 0 and, unlike that of an infinity, no difference of two of them is NaN.
MASKED = -1e30
# Queries are taken in this many blocks, each against the keys up to its end, which skips nearly half
# of the masked products. More blocks skip little more and compile longer.
BLOCKS = 4


def attention(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None = None) -> jax.Array:
    """Causal attention within packed rows.

    q: [B, L, H, D]; k, v: [B, L, K, D] with H a multiple of K. segment_ids: int [B, L]; tokens attend
    to themselves and to earlier tokens of their own segment. Padding is segment 0: no token of another
    segment attends to it, and its outputs are finite. None: a row is one segment. Returns [B, L, H, D].
    """
    L = q.shape[1]
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    size = -(-L // BLOCKS)
    outputs = []
    for start in range(0, L, size):
        end = min(start + size, L)
        mask = (jnp.arange(start, end)[:, None] >= jnp.arange(end))[None]
        if segment_ids is not None:
            mask = mask & (segment_ids[:, start:end, None] == segment_ids[:, None, :end])
        outputs.append(_attend(q[:, start:end], k[:, :, :end], v[:, :, :end], mask))
    return jnp.concatenate(outputs, axis=1)


def cached_attention(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
    """Attention of new tokens to a cache whose columns are positions.

    q: [B, T, H, D]; k, v: [B, K, S, D]; positions: int [B, T]; a token attends to the columns up to
    and including its position, so what a column beyond it holds never matters. Returns [B, T, H, D].
    """
    return _attend(q, k, v, jnp.arange(k.shape[2]) <= positions[:, :, None])


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """q [B, T, H, D], k and v [B, K, S, D], mask [B or 1, T, S] -> [B, T, H, D]; softmax in float32."""
    B, T, H, D = q.shape
    K, S = k.shape[1:3]
    # The queries of all heads of a group become rows of one matrix: keys and values are not repeated.
    q = q.reshape(B, T, K, H // K, D).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, D)
    scores = jnp.einsum("bkmd,bksd->bkms", q, k, preferred_element_type=jnp.float32) * D**-0.5
    scores = jnp.where(mask[:, None, None], scores.reshape(B, K, -1, T, S), MASKED).reshape(B, K, -1, S)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    # Normalised after the product, where the numbers are D instead of S.
    out = jnp.einsum("bkms,bksd->bkmd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = (out / weights.sum(axis=-1, keepdims=True)).astype(v.dtype)
    return out.reshape(B, K, H // K, T, D).transpose(0, 3, 1, 2, 4).reshape(B, T, H, D)
