"""Attention of packed rows block by block in plain JAX, for CPUs and platforms without a kernel.

B: rows; L: tokens of a row; H: query heads; K: key-value heads; G: query heads per key-value head; D: head
dimension; C: tokens of a block; n: blocks of a row; m: blocks of queries.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from coevolve_jax.models.packed import MASKED, Row, Segments, meeting_blocks, pad_rows, sees

# Tokens per block, on a CPU and elsewhere. Small blocks compute little beyond the segments' own products.
SMALL_BLOCK, LARGE_BLOCK = 64, 256


def chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    parents: jax.Array | None = None,
    row: Row | None = None,
    size: int = SMALL_BLOCK,
) -> jax.Array:
    """Computes `attention` block by block with a running softmax, forward and backward (arXiv 2307.08691).

    Blocks are `size` tokens square. Those above the diagonal and those of other segments are skipped. So
    memory grows with L, and time with the length of the segments and of the prompts that they share.
    """
    T = q.shape[1]
    size = min(size, T)
    (q,), (k, v) = pad_rows(size, q), pad_rows(size, k, v)
    B, _, K, D = k.shape
    split = lambda x: x.reshape(B, -1, size, K, x.shape[2] // K, D).transpose(1, 0, 3, 4, 2, 5)
    segments, row = Segments(segment_ids, parents).blocks(size), (row or Row.of(segment_ids)).blocks(size)
    out = _blockwise(split(q), split(k)[:, :, :, 0], split(v)[:, :, :, 0], segments, row)
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(*q.shape)[:, :T]


@jax.custom_vjp
def _blockwise(q, k, v, segments: Segments, row: Row):
    """Attends q [m, B, K, G, C, D] to k and v [n, B, K, C, D]."""
    return _blockwise_forward(q, k, v, segments, row)[0]


def _block_scores(q, k, segments: Segments, row: Row, i, j):
    """Scores of query block i with key block j, float32 [B, K, G, C, C]. Masked ones are MASKED."""
    C, D = q.shape[-2:]
    scores = jnp.einsum("bkgcd,bksd->bkgcs", q[i], k[j], preferred_element_type=jnp.float32) * D**-0.5
    mask = row.places[i][:, None] >= j * C + jnp.arange(C)
    before = None if segments.parents is None else segments.parents[i][:, :, None]
    mask = mask & sees(segments.ids[i][:, :, None], before, row.ids[j][:, None])
    return jnp.where(mask[:, None, None], scores, MASKED)


def _visited(segments: Segments, row: Row) -> tuple[jax.Array, jax.Array]:
    """Lists the key blocks that each query block visits.

    Returns int [m, n], the blocks that meet it first and in order, and how many these are [m].
    """
    own, parents = meeting_blocks(segments, row)
    seen = own | parents
    return jnp.argsort(~seen, axis=1, stable=True), seen.sum(axis=1)


def _blockwise_forward(q, k, v, segments, row):
    m, *rows, D = q.shape
    order, count = _visited(segments, row)

    def queries(i):
        def keys(turn, carry):
            j, (total, norm, peak) = order[i, turn], carry
            scores = _block_scores(q, k, segments, row, i, j)
            higher = jnp.maximum(peak, scores.max(-1))
            weights, fade = jnp.exp(scores - higher[..., None]), jnp.exp(peak - higher)
            part = jnp.einsum(
                "bkgcs,bksd->bkgcd", weights.astype(v.dtype), v[j], preferred_element_type=jnp.float32
            )
            return total * fade[..., None] + part, norm * fade + weights.sum(-1), higher

        start = jnp.zeros((*rows, D)), jnp.zeros(rows), jnp.full(rows, MASKED)
        total, norm, peak = jax.lax.fori_loop(0, count[i], keys, start)
        return (total / norm[..., None]).astype(v.dtype), peak + jnp.log(norm)

    out, logsumexp = jax.lax.map(queries, jnp.arange(m))
    return out, (q, k, v, segments, row, out, logsumexp)


def _blockwise_backward(saved, d_out):
    q, k, v, segments, row, out, logsumexp = saved
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scale = q.shape[-1] ** -0.5
    order, count = _visited(segments, row)

    def queries(carry, i):
        d = d_out[i]
        # D = rowsum(dO * O) of the paper: the part of the gradient that the softmax's normaliser takes.
        drift = jnp.sum(d.astype(jnp.float32) * out[i].astype(jnp.float32), -1, keepdims=True)

        def keys(turn, carry):
            j, (dq, dk, dv) = order[i, turn], carry
            weights = jnp.exp(_block_scores(q, k, segments, row, i, j) - logsumexp[i][..., None])
            d_scores = weights * (product("bkgcd,bksd->bkgcs", d, v[j]) - drift) * scale
            weights, d_scores = weights.astype(v.dtype), d_scores.astype(v.dtype)
            dv = dv.at[j].add(product("bkgcs,bkgcd->bksd", weights, d))
            dk = dk.at[j].add(product("bkgcs,bkgcd->bksd", d_scores, q[i]))
            return dq + product("bkgcs,bksd->bkgcd", d_scores, k[j]), dk, dv

        dq, dk, dv = jax.lax.fori_loop(0, count[i], keys, (jnp.zeros(q.shape[1:]), *carry))
        return (dk, dv), dq.astype(q.dtype)

    zeros = jnp.zeros(k.shape), jnp.zeros(v.shape)
    (dk, dv), dq = jax.lax.scan(queries, zeros, jnp.arange(len(q)))
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, None


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)
