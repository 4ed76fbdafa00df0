"""Attention of packed rows by Pallas (Triton) kernels for NVIDIA GPUs (arXiv 2307.08691).

Three of them: forward, gradient of queries, gradient of keys and values. Their mask has both of a token's segments, and their
loops go over the blocks of these two only, so that a row costs what its segments need. Query heads of a group read the same keys.

B: rows; L: tokens of a row; H: query heads; K: key-value heads; D: head dimension; C: tokens of a block; n: blocks of a row.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from coevolve_jax.models.packed import MASKED, Segments, meeting_blocks, pad_heads, pad_rows, sees

FORWARD_BLOCK, BACKWARD_BLOCK = 128, 64


def flash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    parents: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """`attention` by these kernels. interpret: run them on a CPU, slowly."""
    L, D = q.shape[1], q.shape[3]
    # Products take head dimensions of 16, 32, 64, ...
    q, k, v = pad_heads(max(16, 1 << (D - 1).bit_length()), q, k, v)
    parents = segment_ids if parents is None else parents
    q, k, v, *segments = pad_rows(FORWARD_BLOCK, q, k, v, segment_ids, parents)
    out: Any = _flash(q, k, v, Segments(*segments), D**-0.5, interpret)
    return out[:, :L, :, :D]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _flash(q, k, v, segments: Segments, scale: float, interpret: bool):
    """q [B, L, H, D]; k, v [B, L, K, D] -> [B, L, H, D]. scale: of scores."""
    return _forward(q, k, v, segments, scale, interpret)[0]


def _forward(q, k, v, segments, scale, interpret):
    B, L, H, _ = q.shape
    of, (turns, _) = _Specs(q, k, FORWARD_BLOCK), _visits(segments, FORWARD_BLOCK)
    out, logsumexp = pl.pallas_call(
        functools.partial(_forward_kernel, scale),
        grid=(L // FORWARD_BLOCK, B, H),
        in_specs=[of.turns, of.ids, of.ids, of.block, of.keys, of.keys],
        out_specs=[of.block, of.numbers_block],
        out_shape=[q, jax.ShapeDtypeStruct((B, H, L), jnp.float32)],
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=2),
        interpret=interpret,
        name="flash_forward",
    )(turns, *segments, q, k, v)
    return out, (q, k, v, segments, out, logsumexp)


def _backward(scale, interpret, saved, d_out):
    q, k, v, segments, out, logsumexp = saved
    B, L, H, D = q.shape
    drift = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    of, (turns, ends) = _Specs(q, k, BACKWARD_BLOCK), _visits(segments, BACKWARD_BLOCK)
    settings: dict[str, Any] = dict(
        grid=(L // BACKWARD_BLOCK, B, H),
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=2),
        interpret=interpret,
    )
    dq = pl.pallas_call(
        functools.partial(_dq_kernel, scale),
        in_specs=[of.turns, of.ids, of.ids, of.block, of.keys, of.keys, of.block, *[of.numbers_block] * 2],
        out_specs=of.block,
        out_shape=q,
        name="flash_dq",
        **settings,
    )(turns, *segments, q, k, v, d_out, logsumexp, drift)
    dk, dv = pl.pallas_call(
        functools.partial(_dkv_kernel, scale),
        in_specs=[
            of.end,
            of.ids,
            of.ids,
            of.queries,
            of.keys_block,
            of.keys_block,
            of.queries,
            *[of.numbers] * 2,
        ],
        out_specs=[of.block, of.block],
        out_shape=[q, q],
        name="flash_dkv",
        **settings,
    )(ends, *segments, q, k, v, d_out, logsumexp, drift)
    of_group = lambda x: x.reshape(B, L, k.shape[2], -1, D).astype(jnp.float32).sum(axis=3)
    return dq, of_group(dk).astype(k.dtype), of_group(dv).astype(v.dtype), None


_flash.defvjp(_forward, _backward)


class _Specs:
    """What a program of the grid (block, row, query head) sees of each array."""

    def __init__(self, q: jax.Array, k: jax.Array, size: int):
        L, D, group = q.shape[1], q.shape[3], q.shape[2] // k.shape[2]
        self.block = pl.BlockSpec((None, size, None, D), lambda i, b, h: (b, i, h, 0))
        self.queries = pl.BlockSpec((None, L, None, D), lambda i, b, h: (b, 0, h, 0))
        self.keys_block = pl.BlockSpec((None, size, None, D), lambda i, b, h: (b, i, h // group, 0))
        self.keys = pl.BlockSpec((None, L, None, D), lambda i, b, h: (b, 0, h // group, 0))
        self.numbers_block = pl.BlockSpec((None, None, size), lambda i, b, h: (b, h, i))
        self.numbers = pl.BlockSpec((None, None, L), lambda i, b, h: (b, h, 0))
        self.turns = pl.BlockSpec((None, None, 4), lambda i, b, h: (b, i, 0))
        self.end = pl.BlockSpec((None, None, 1), lambda i, b, h: (b, i, 0))
        self.ids = pl.BlockSpec((None, L), lambda i, b, h: (b, 0))


def _visits(segments: Segments, size: int) -> tuple[jax.Array, jax.Array]:
    """Which blocks meet, as ranges. int [B, n, 4], of each block of queries: the first block of keys of its prompts, how many
    of these come before those of its own segments, the first of those, how many it visits in all. int [B, n, 1], of each
    block of keys: where the blocks of queries end that begin with the block itself."""
    of_row: Any = lambda *row: meeting_blocks(Segments(*(x[None] for x in row)).blocks(size))
    own, prompts = jax.vmap(of_row)(*segments)
    n = own.shape[1]
    first, first_own = jnp.argmax(prompts, axis=2), jnp.argmax(own, axis=2)
    end = jnp.where(jnp.any(prompts, axis=2), n - jnp.argmax(prompts[:, :, ::-1], axis=2), 0)
    count = jnp.maximum(jnp.minimum(end, first_own) - first, 0)
    turns = jnp.stack([first, count, first_own, count + jnp.arange(1, n + 1) - first_own], axis=2)
    ends = n - jnp.argmax((own | prompts)[:, ::-1], axis=1)
    return turns.astype(jnp.int32), ends[:, :, None].astype(jnp.int32)


def pairs(segments: Segments) -> dict[str, np.ndarray]:
    """A word in a kernel's name -> int [B], pairs of a query and a key that it multiplies for one head."""
    if segments.parents is None:
        segments = segments._replace(parents=segments.ids)
    (forward, _), (backward, ends) = (_visits(segments, size) for size in (FORWARD_BLOCK, BACKWARD_BLOCK))
    blocks = forward[:, :, 3], backward[:, :, 3], ends[:, :, 0] - np.arange(ends.shape[1])
    sizes = FORWARD_BLOCK, BACKWARD_BLOCK, BACKWARD_BLOCK
    return {
        word: np.asarray(n, np.int64).sum(axis=1) * size**2
        for word, n, size in zip(("forward", "dq", "dkv"), blocks, sizes)
    }


def _key_block(turns, t):
    """The block of keys that is visited at turn t."""
    return jnp.where(t < turns[1], turns[0] + t, turns[2] + t - turns[1])


def _scores(scale, q, k, ids, parents, i, j):
    """Scores [C, C] of a block of queries, the i-th, with a block of keys, the j-th; masked ones are MASKED."""
    size = len(q)
    there = pl.ds(i * size, size)
    mask = sees(ids[there][:, None], parents[there][:, None], ids[pl.ds(j * size, size)][None])
    places = jnp.arange(size)
    mask &= (i * size + places)[:, None] >= (j * size + places)[None]
    return jnp.where(mask, triton.dot(q, k.T) * scale, MASKED)


def _forward_kernel(scale, turns, ids, parents, q, k, v, out, logsumexp):
    i, q = pl.program_id(0), q[...]
    size = len(q)

    def keys(t, carry):
        (total, norm, peak), j = carry, _key_block(turns, t)
        there = pl.ds(j * size, size)
        scores = _scores(scale, q, k[there, :], ids, parents, i, j)
        higher = jnp.maximum(peak, scores.max(axis=1))
        weights, fade = jnp.exp(scores - higher[:, None]), jnp.exp(peak - higher)
        part = triton.dot(weights.astype(v.dtype), v[there, :])
        return total * fade[:, None] + part, norm * fade + weights.sum(axis=1), higher

    start = jnp.zeros(q.shape, jnp.float32), jnp.zeros(size), jnp.full(size, MASKED)
    total, norm, peak = jax.lax.fori_loop(0, turns[3], keys, start)
    out[...] = (total / norm[:, None]).astype(out.dtype)
    logsumexp[...] = peak + jnp.log(norm)


def _dq_kernel(scale, turns, ids, parents, q, k, v, d_out, logsumexp, drift, dq):
    i, q, d, logsumexp, drift = pl.program_id(0), q[...], d_out[...], logsumexp[...], drift[...]
    size = len(q)

    def keys(t, total):
        j = _key_block(turns, t)
        there = pl.ds(j * size, size)
        weights = jnp.exp(_scores(scale, q, k[there, :], ids, parents, i, j) - logsumexp[:, None])
        d_scores = weights * (triton.dot(d, v[there, :].T) - drift[:, None])
        return total + triton.dot(d_scores.astype(k.dtype), k[there, :])

    total = jax.lax.fori_loop(0, turns[3], keys, jnp.zeros(q.shape, jnp.float32))
    dq[...] = (total * scale).astype(dq.dtype)


def _dkv_kernel(scale, end, ids, parents, q, k, v, d_out, logsumexp, drift, dk, dv):
    j, k, v = pl.program_id(0), k[...], v[...]
    size = len(k)

    def queries(i, totals):
        here = pl.ds(i * size, size)
        d = d_out[here, :]
        weights = jnp.exp(_scores(scale, q[here, :], k, ids, parents, i, j) - logsumexp[here][:, None])
        d_scores = weights * (triton.dot(d, v.T) - drift[here][:, None])
        d_keys = triton.dot(d_scores.astype(q.dtype).T, q[here, :])
        return totals[0] + d_keys, totals[1] + triton.dot(weights.astype(d.dtype).T, d)

    start = jnp.zeros(k.shape, jnp.float32), jnp.zeros(k.shape, jnp.float32)
    d_keys, d_values = jax.lax.fori_loop(j, end[0], queries, start)
    dk[...], dv[...] = (d_keys * scale).astype(dk.dtype), d_values.astype(dv.dtype)
