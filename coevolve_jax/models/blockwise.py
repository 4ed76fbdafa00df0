"""Attention of packed rows block by block in plain JAX, for CPUs and platforms without a kernel.

B: rows; L: tokens of a row; H: query heads; K: key-value heads; G: query heads per key-value head; D: head
dimension; C: tokens of a block; n: blocks of a row; m: blocks of queries.

Scores have their keys before their queries, [B, K, C, G, C]. Then each product walks its operands as they
lie in memory. Otherwise XLA's CPU backend would transpose every block of scores for the gradients.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from coevolve_jax.models.packed import MASKED, Row, Segments, meeting_blocks, pad_rows, sees

# Small blocks compute little beyond the segments' own products. Products of large ones run on several cores.
SMALL_BLOCK, LARGE_BLOCK = 64, 256

_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    parents: jax.Array | None = None,
    row: Row | None = None,
    size: int | None = None,
) -> jax.Array:
    """Computes `attention` block by block with a running softmax, forward and backward (arXiv 2307.08691).

    Blocks are `size` tokens square. Those above the diagonal and those of other segments are skipped. So
    memory grows with L, and time with the length of the segments and of the prompts that they share.

    size: None: `block_size`.
    """
    T = q.shape[1]
    size = min(size or block_size(parents is not None), T)
    (q,), (k, v) = pad_rows(size, q), pad_rows(size, k, v)
    B, _, K, D = k.shape
    split = lambda x: x.reshape(B, -1, size, K, x.shape[2] // K, D).transpose(1, 0, 3, 4, 2, 5)
    segments, row = Segments(segment_ids, parents).blocks(size), (row or Row.of(segment_ids)).blocks(size)
    out = _blockwise(split(q), split(k)[:, :, :, 0], split(v)[:, :, :, 0], segments, row)
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(*q.shape)[:, :T]


def block_size(shared: bool) -> int:
    """Tokens of a block on a CPU. shared: tokens have parents, so that few blocks of a prompt are skipped."""
    return LARGE_BLOCK if shared else SMALL_BLOCK


@jax.custom_vjp
def _blockwise(q, k, v, segments: Segments, row: Row):
    """Attends q [m, B, K, G, C, D] to k and v [n, B, K, C, D]."""
    return _blockwise_forward(q, k, v, segments, row)[0]


def _features_first(x):
    """Maps blocks of queries [..., G, C, D] to [..., D, G, C]."""
    return jnp.moveaxis(x, -1, -3)


def _block_scores(q, k, segments: Segments, row: Row, i, j):
    """Scores of query block i, q [B, K, D, G, C], with key block j of k. Masked ones are MASKED.

    Returns float32 [B, K, C, G, C], keys before queries.
    """
    C, D = k.shape[-2:]
    scores = _product("bksd,bkdgc->bksgc", k[j], q) * D**-0.5
    mask = row.places[i] >= (j * C + jnp.arange(C))[:, None]
    before = None if segments.parents is None else segments.parents[i][:, None]
    mask = mask & sees(segments.ids[i][:, None], before, row.ids[j][:, :, None])
    return jnp.where(mask[:, None, :, None], scores, MASKED)


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
    turned, v_turned = _features_first(q), v.swapaxes(-1, -2)

    def queries(i):
        own = turned[i]

        def keys(turn, carry):
            j, (total, norm, peak) = order[i, turn], carry
            scores = _block_scores(own, k, segments, row, i, j)
            higher = jnp.maximum(peak, scores.max(2))
            weights, fade = jnp.exp(scores - higher[:, :, None]), jnp.exp(peak - higher)
            part = _product("bkds,bksgc->bkdgc", v_turned[j], weights.astype(v.dtype))
            return total * fade[:, :, None] + part, norm * fade + weights.sum(2), higher

        start = jnp.zeros(own.shape), jnp.zeros(rows), jnp.full(rows, MASKED)
        total, norm, peak = jax.lax.fori_loop(0, count[i], keys, start)
        return jnp.moveaxis(total / norm[:, :, None], 2, -1).astype(v.dtype), peak + jnp.log(norm)

    out, logsumexp = jax.lax.map(queries, jnp.arange(m))
    return out, (q, k, v, segments, row, out, logsumexp)


def _blockwise_backward(saved, d_out):
    q, k, v, segments, row, out, logsumexp = saved
    scale = q.shape[-1] ** -0.5
    order, count = _visited(segments, row)
    # rowsum(dO * O) of the paper, D there: the part of the gradient that the softmax's normaliser takes.
    drift = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), -1)
    turned, d_turned, k_turned = _features_first(q), _features_first(d_out), k.swapaxes(-1, -2)

    def queries(carry, i):
        own, d_own = turned[i], d_turned[i]

        def keys(turn, carry):
            j, (dq, dk, dv) = order[i, turn], carry
            weights = jnp.exp(_block_scores(own, k, segments, row, i, j) - logsumexp[i][:, :, None])
            d_scores = weights * (_product("bksd,bkdgc->bksgc", v[j], d_own) - drift[i][:, :, None]) * scale
            weights, d_scores = weights.astype(v.dtype), d_scores.astype(v.dtype)
            # c is called q here: einsum sums over letters in their alphabetical order, which must be the
            # order in memory.
            dv = dv.at[j].add(_product("bksgq,bkgqd->bksd", weights, d_out[i]))
            dk = dk.at[j].add(_product("bksgq,bkgqd->bksd", d_scores, q[i]))
            return dq + _product("bkds,bksgc->bkdgc", k_turned[j], d_scores), dk, dv

        dq, dk, dv = jax.lax.fori_loop(0, count[i], keys, (jnp.zeros(own.shape), *carry))
        return (dk, dv), jnp.moveaxis(dq, 2, -1).astype(q.dtype)

    zeros = jnp.zeros(k.shape), jnp.zeros(v.shape)
    (dk, dv), dq = jax.lax.scan(queries, zeros, jnp.arange(len(q)))
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, None


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)
