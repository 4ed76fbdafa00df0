"""Attention of packed rows by Pallas (Triton) kernels for NVIDIA GPUs (arXiv 2307.08691).

There are three kernels: forward, gradient of queries, gradient of keys and values. Their mask covers both
segments of a token: its own and its parent. Their loops visit the blocks of these two only, so a row costs
what its segments need. Query heads of a group read the same keys.

B: rows; L: tokens of a row; T: queries among them; H: query heads; K: key-value heads; D: head dimension;
C: tokens of a block; n: blocks of a row; m: blocks of queries.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from coevolve_jax.models.packed import (
    MASKED,
    Row,
    Segments,
    meeting_blocks,
    pad_heads,
    pad_places,
    pad_rows,
    sees,
)

FORWARD_BLOCK, BACKWARD_BLOCK = 128, 64


def flash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    parents: jax.Array | None = None,
    row: Row | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """Computes `attention` by these kernels. interpret: run them on a CPU, slowly."""
    T, D = q.shape[1], q.shape[3]
    # Triton's products take head dimensions of 16, 32, 64, ...
    q, k, v = pad_heads(max(16, 1 << (D - 1).bit_length()), q, k, v)
    parents, row = segment_ids if parents is None else parents, row or Row.of(segment_ids)
    q, *segments = pad_rows(FORWARD_BLOCK, q, segment_ids, parents)
    k, v, ids = pad_rows(FORWARD_BLOCK, k, v, row.ids)
    row = Row(ids, pad_places(FORWARD_BLOCK, row.places))
    out: Any = _flash(q, k, v, Segments(*segments), row, D**-0.5, interpret)
    return out[:, :T, :, :D]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _flash(q, k, v, segments: Segments, row: Row, scale: float, interpret: bool):
    """Attends q [B, T, H, D] to k and v [B, L, K, D]. Returns [B, T, H, D]. scale: multiplies the scores."""
    return _forward(q, k, v, segments, row, scale, interpret)[0]


def _forward(q, k, v, segments, row, scale, interpret):
    B, T, H, _ = q.shape
    of, (turns, _) = _Specs(q, k, FORWARD_BLOCK), _visits(segments, row, FORWARD_BLOCK)
    out, logsumexp = pl.pallas_call(
        functools.partial(_forward_kernel, scale),
        grid=(T // FORWARD_BLOCK, B, H),
        in_specs=[of.turns, *of.seen, of.block, of.keys, of.keys],
        out_specs=[of.block, of.numbers_block],
        out_shape=[q, jax.ShapeDtypeStruct((B, H, T), jnp.float32)],
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=2),
        interpret=interpret,
        name="flash_forward",
    )(turns, *segments, *row, q, k, v)
    return out, (q, k, v, segments, row, out, logsumexp)


def _backward(scale, interpret, saved, d_out):
    q, k, v, segments, row, out, logsumexp = saved
    (B, T, H, D), L = q.shape, k.shape[1]
    # D = rowsum(dO * O) of the paper: the part of the gradient that the softmax's normaliser takes.
    drift = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    of, (turns, spans) = _Specs(q, k, BACKWARD_BLOCK), _visits(segments, row, BACKWARD_BLOCK)
    settings: dict[str, Any] = dict(
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=2),
        interpret=interpret,
    )
    dq = pl.pallas_call(
        functools.partial(_dq_kernel, scale),
        grid=(T // BACKWARD_BLOCK, B, H),
        in_specs=[of.turns, *of.seen, of.block, of.keys, of.keys, of.block, *[of.numbers_block] * 2],
        out_specs=of.block,
        out_shape=q,
        name="flash_dq",
        **settings,
    )(turns, *segments, *row, q, k, v, d_out, logsumexp, drift)
    dk, dv = pl.pallas_call(
        functools.partial(_dkv_kernel, scale),
        grid=(L // BACKWARD_BLOCK, B, H),
        in_specs=[
            of.span,
            *of.seen,
            of.queries,
            of.keys_block,
            of.keys_block,
            of.queries,
            *[of.numbers] * 2,
        ],
        out_specs=[of.block, of.block],
        out_shape=[jax.ShapeDtypeStruct((B, L, H, D), q.dtype)] * 2,
        name="flash_dkv",
        **settings,
    )(spans, *segments, *row, q, k, v, d_out, logsumexp, drift)
    # A program writes one query head's gradient, so that no two programs add to the same place.
    of_group = lambda x: x.reshape(B, L, k.shape[2], -1, D).astype(jnp.float32).sum(axis=3)
    return dq, of_group(dk).astype(k.dtype), of_group(dv).astype(v.dtype), None, None


_flash.defvjp(_forward, _backward)


class _Specs:
    """The part of each array that a program of the grid (block, row, query head) sees."""

    def __init__(self, q: jax.Array, k: jax.Array, size: int):
        T, L, D, group = q.shape[1], k.shape[1], q.shape[3], q.shape[2] // k.shape[2]
        self.block = pl.BlockSpec((None, size, None, D), lambda i, b, h: (b, i, h, 0))
        self.queries = pl.BlockSpec((None, T, None, D), lambda i, b, h: (b, 0, h, 0))
        self.keys_block = pl.BlockSpec((None, size, None, D), lambda i, b, h: (b, i, h // group, 0))
        self.keys = pl.BlockSpec((None, L, None, D), lambda i, b, h: (b, 0, h // group, 0))
        self.numbers_block = pl.BlockSpec((None, None, size), lambda i, b, h: (b, h, i))
        self.numbers = pl.BlockSpec((None, None, T), lambda i, b, h: (b, h, 0))
        self.turns = pl.BlockSpec((None, None, 4), lambda i, b, h: (b, i, 0))
        self.span = pl.BlockSpec((None, None, 2), lambda i, b, h: (b, i, 0))
        of_row = lambda length: pl.BlockSpec((None, length), lambda i, b, h: (b, 0))
        places = pl.BlockSpec((T,), lambda i, b, h: (0,))
        self.seen = of_row(T), of_row(T), of_row(L), places  # the arrays of Segments and of Row


def _visits(segments: Segments, row: Row, size: int) -> tuple[jax.Array, jax.Array]:
    """Lists which blocks meet, as ranges.

    Returns:
      int [B, m, 4], for each block of queries: the first block of keys of its prompts; how many such blocks
        come before those of its own segments; the first of the latter; how many blocks it visits in all.
      int [B, n, 2], for each block of keys: its first block of queries, and the one after its last.
    """

    def of_one(ids, parents, keys):
        given = Segments(ids[None], parents[None]).blocks(size), Row(keys[None], row.places).blocks(size)
        return meeting_blocks(*given)

    own, prompts = jax.vmap(of_one)(*segments, row.ids)
    first, count = _ranges(prompts)
    first_own, count_own = _ranges(own)
    count = jnp.maximum(jnp.minimum(first + count, first_own) - first, 0)
    turns = jnp.stack([first, count, first_own, count + count_own], axis=2)
    begin, count = _ranges((own | prompts).swapaxes(1, 2))
    return turns.astype(jnp.int32), jnp.stack([begin, begin + count], axis=2).astype(jnp.int32)


def _ranges(meets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Turns bool [B, blocks, others] into ranges.

    Returns the first block that each block meets, and how many lie from that to the last; zeros for none.
    """
    first = jnp.argmax(meets, axis=2)
    end = meets.shape[2] - jnp.argmax(meets[:, :, ::-1], axis=2)
    return first, jnp.where(jnp.any(meets, axis=2), end - first, 0)


def pairs(segments: Segments, row: Row) -> dict[str, np.ndarray]:
    """Counts the pairs of a query and a key that the kernels multiply for one head.

    Returns a word in each kernel's name -> int [B].
    """
    if segments.parents is None:
        segments = segments._replace(parents=segments.ids)
    sizes = FORWARD_BLOCK, BACKWARD_BLOCK, BACKWARD_BLOCK
    return {
        word: np.asarray(n, np.int64).sum(axis=1) * size**2
        for word, n, size in zip(("forward", "dq", "dkv"), _multiplied(segments, row), sizes)
    }


@jax.jit
def _multiplied(segments: Segments, row: Row) -> tuple[jax.Array, ...]:
    """Three int [B, blocks] (forward, dq, dkv): the number of blocks that each block is multiplied with."""
    (forward, _), (backward, spans) = (
        _visits(segments, row, size) for size in (FORWARD_BLOCK, BACKWARD_BLOCK)
    )
    return forward[:, :, 3], backward[:, :, 3], spans[:, :, 1] - spans[:, :, 0]


def _key_block(turns, t):
    """The block of keys that is visited at turn t: first those of prompts, then those of own segments."""
    return jnp.where(t < turns[1], turns[0] + t, turns[2] + t - turns[1])


def _scores(scale, q, k, seen, i, j):
    """Scores [C, C] of the i-th block of queries with the j-th block of keys. Masked ones are MASKED."""
    size, (ids, parents, keys, places) = len(q), seen
    here, there = pl.ds(i * size, size), pl.ds(j * size, size)
    mask = sees(ids[here][:, None], parents[here][:, None], keys[there][None])
    mask &= places[here][:, None] >= (j * size + jnp.arange(size))[None]
    return jnp.where(mask, triton.dot(q, k.T) * scale, MASKED)


def _forward_kernel(scale, turns, *given):
    *seen, q, k, v, out, logsumexp = given
    i, q = pl.program_id(0), q[...]
    size = len(q)

    def keys(t, carry):
        (total, norm, peak), j = carry, _key_block(turns, t)
        there = pl.ds(j * size, size)
        scores = _scores(scale, q, k[there, :], seen, i, j)
        higher = jnp.maximum(peak, scores.max(axis=1))
        weights, fade = jnp.exp(scores - higher[:, None]), jnp.exp(peak - higher)
        part = triton.dot(weights.astype(v.dtype), v[there, :])
        return total * fade[:, None] + part, norm * fade + weights.sum(axis=1), higher

    start = jnp.zeros(q.shape, jnp.float32), jnp.zeros(size), jnp.full(size, MASKED)
    total, norm, peak = jax.lax.fori_loop(0, turns[3], keys, start)
    out[...] = (total / norm[:, None]).astype(out.dtype)
    logsumexp[...] = peak + jnp.log(norm)


def _dq_kernel(scale, turns, *given):
    *seen, q, k, v, d_out, logsumexp, drift, dq = given
    i, q, d, logsumexp, drift = pl.program_id(0), q[...], d_out[...], logsumexp[...], drift[...]
    size = len(q)

    def keys(t, total):
        j = _key_block(turns, t)
        there = pl.ds(j * size, size)
        weights = jnp.exp(_scores(scale, q, k[there, :], seen, i, j) - logsumexp[:, None])
        d_scores = weights * (triton.dot(d, v[there, :].T) - drift[:, None])
        return total + triton.dot(d_scores.astype(k.dtype), k[there, :])

    total = jax.lax.fori_loop(0, turns[3], keys, jnp.zeros(q.shape, jnp.float32))
    dq[...] = (total * scale).astype(dq.dtype)


def _dkv_kernel(scale, span, *given):
    *seen, q, k, v, d_out, logsumexp, drift, dk, dv = given
    j, k, v = pl.program_id(0), k[...], v[...]
    size = len(k)

    def queries(i, totals):
        here = pl.ds(i * size, size)
        d = d_out[here, :]
        weights = jnp.exp(_scores(scale, q[here, :], k, seen, i, j) - logsumexp[here][:, None])
        d_scores = weights * (triton.dot(d, v.T) - drift[here][:, None])
        d_keys = triton.dot(d_scores.astype(q.dtype).T, q[here, :])
        return totals[0] + d_keys, totals[1] + triton.dot(weights.astype(d.dtype).T, d)

    start = jnp.zeros(k.shape, jnp.float32), jnp.zeros(k.shape, jnp.float32)
    d_keys, d_values = jax.lax.fori_loop(span[0], span[1], queries, start)
    dk[...], dv[...] = (d_keys * scale).astype(dk.dtype), d_values.astype(dv.dtype)
