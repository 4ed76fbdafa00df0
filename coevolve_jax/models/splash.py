"""Attention of packed rows by JAX's splash kernel for TPUs, which skips the blocks that do not meet.

Where a token sees a prompt besides its own segment, the kernel runs once for each. The two outputs are merged
by their log-sum-exp. The backward pass of each run takes the merged output and log-sum-exp, and so gives its
part of the gradient.

B: rows; L: tokens of a row; T: queries among them; H: query heads; K: key-value heads; D: head dimension;
n: blocks of a row; m: blocks of queries.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask

from coevolve_jax.models.packed import Row, Segments, meeting_blocks, pad_heads, pad_places, pad_rows

LANES = 128  # of a vector register; a block's size is a multiple
BLOCK = 512


def splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    parents: jax.Array | None = None,
    row: Row | None = None,
    *,
    size: int = BLOCK,
    interpret: bool = False,
) -> jax.Array:
    """Computes `attention` by splash. size: most tokens of a block. interpret: run it on a CPU, slowly."""
    T, D = q.shape[1], q.shape[3]
    size, row = _size(T, size), row or Row.of(segment_ids)
    q, k, v = pad_heads(-(-D // LANES) * LANES, q * D**-0.5, k, v)
    q, segment_ids = pad_rows(size, q, segment_ids)
    k, v, ids = pad_rows(size, k, v, row.ids)
    places = pad_places(size, row.places)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    given = [q, k, v, segment_ids]
    of_row: Any = _of_one
    if parents is not None:
        given += pad_rows(size, parents)
        of_row = _of_two
    rows = [of_row(*one, Row(ids, places), size, interpret) for *one, ids in zip(*given, ids)]
    return jnp.stack(rows).swapaxes(1, 2)[:, :T, :, :D]


def _of_one(q, k, v, segment_ids, row: Row, size: int, interpret: bool) -> Any:
    """Computes one row: q [H, T, D], k and v [K, L, D], segment_ids [T], row.ids [L] -> [H, T, D]."""
    meets, _ = _meetings(segment_ids, None, row, size)
    kernel = _visiting(_kernel(q, k, size, interpret), meets, row.places)
    return kernel(q, k, v, kernels.SegmentIds(segment_ids, row.ids))


def _meetings(segment_ids, parents, row: Row, size: int) -> tuple[jax.Array, jax.Array]:
    """`meeting_blocks` of one row: segments and parents [T], row.ids [L]."""
    segments = Segments(segment_ids[None], None if parents is None else parents[None])
    return meeting_blocks(segments.blocks(size), row._replace(ids=row.ids[None]).blocks(size))


def pairs(segments: Segments, row: Row) -> dict[str, np.ndarray]:
    """Counts the pairs of a query and a key that the kernels' runs multiply for one head.

    Returns a word in each kernel's name -> int [B].
    """
    size = _size(segments.ids.shape[1], BLOCK)
    return dict.fromkeys(
        ("fwd", "dq", "dkv"), np.asarray(_multiplied(segments, row, size), np.int64) * size**2
    )


@functools.partial(jax.jit, static_argnums=2)
def _multiplied(segments: Segments, row: Row, size: int) -> jax.Array:
    """The number of pairs of blocks (of queries, of keys) that are multiplied, int [B]."""
    of_one: Any = lambda ids, parents, keys: sum(
        jnp.sum(meets) for meets in _meetings(ids, parents, Row(keys, row.places), size)
    )
    parents = segments.ids if segments.parents is None else segments.parents
    return jax.vmap(of_one)(segments.ids, parents, row.ids)


def _size(length: int, most: int) -> int:
    return min(most, -(-length // LANES) * LANES)


def _kernel(
    q: jax.Array, k: jax.Array, size: int, interpret: bool, residuals: bool = False
) -> kernels.SplashAttentionKernel:
    # The kernel computes this mask block by block, and never visits what is above the diagonal.
    causal = splash_attention_mask.CausalMask((q.shape[1], k.shape[1]))
    return kernels.make_splash_mha(
        splash_attention_mask.MultiHeadMask([causal] * len(q)),
        block_sizes=_blocks(size),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
        save_residuals=residuals,
    )


def _blocks(size: int) -> kernels.BlockSizes:
    names = (
        "block_q",
        "block_kv",
        "block_kv_compute",
        "block_q_dkv",
        "block_kv_dkv",
        "block_kv_dkv_compute",
        "block_q_dq",
        "block_kv_dq",
    )
    return kernels.BlockSizes(**dict.fromkeys(names, size))


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _of_two(q, k, v, segment_ids, parents, row: Row, size: int, interpret: bool):
    """Does what `_of_one` does, with parents [T], some of which are other segments."""
    return _of_two_forward(q, k, v, segment_ids, parents, row, size, interpret)[0]


def _of_two_forward(q, k, v, segment_ids, parents, row, size, interpret):
    own, prompt = _runs(q, k, segment_ids, parents, row, size, interpret)
    (out, (logsumexp,)), (out_prompt, (logsumexp_prompt,)) = (
        part(q, k, v, ids) for part, ids in (own, prompt)
    )
    both = parents != segment_ids  # elsewhere the second run's result is meaningless
    merged = jnp.where(both, jnp.logaddexp(logsumexp, logsumexp_prompt), logsumexp)
    weigh = lambda x, part: x.astype(jnp.float32) * jnp.exp(part - merged)[..., None]
    out = weigh(out, logsumexp) + jnp.where(both[:, None], weigh(out_prompt, logsumexp_prompt), 0)
    out = out.astype(q.dtype)
    return out, (q, k, v, segment_ids, parents, row, out, merged)


def _of_two_backward(size, interpret, saved, d_out):
    q, k, v, segment_ids, parents, row, out, logsumexp = saved
    grads = []
    for part, ids in _runs(q, k, segment_ids, parents, row, size, interpret):
        given = (q, k, v, ids, None, out, logsumexp, part.dq_mask_info, part.dkv_mask_info)
        grads.append(kernels._splash_attention_bwd(**part.kwargs, res=given, do=d_out)[3:6])
    return *map(jnp.add, *grads), None, None, None


_of_two.defvjp(_of_two_forward, _of_two_backward)


def _runs(q, k, segment_ids, parents, row: Row, size: int, interpret: bool):
    """Yields the kernels for own segments and for parents, each with the segments of queries and keys."""
    kernel = _kernel(q, k, size, interpret, residuals=True)
    meetings = _meetings(segment_ids, parents, row, size)
    alone = jnp.where(parents == segment_ids, -1, parents)  # no key has segment -1
    for meets, ids in zip(meetings, (segment_ids, alone)):
        yield _visiting(kernel, meets, row.places), kernels.SegmentIds(ids, row.ids)


def _visiting(kernel, meets: jax.Array, places: jax.Array) -> kernels.SplashAttentionKernel:
    """Limits a kernel to the blocks that meet.

    meets: bool [m, n], by queries and keys. places: int [T], where the queries lie.
    """
    of_queries = _visits(meets)
    of_keys = _visits(meets.T)
    visited = meets[None].astype(jnp.int32)
    change = lambda info, next: info._replace(block_mask=visited, data_next=next[None], q_sequence=places)
    return kernels.SplashAttentionKernel(
        change(kernel.fwd_mask_info, of_queries),
        change(kernel.dq_mask_info, of_queries),
        change(kernel.dkv_mask_info, of_keys.T),
        **kernel.kwargs,
    )


def _visits(meets: jax.Array) -> jax.Array:
    """The column of the next visited block at each turn of the grid, which goes row by row.

    It has the shape of `meets`. A visited block is its own next one. The kernel prefetches the next block.
    """
    turns = jnp.where(meets, jnp.arange(meets.size).reshape(meets.shape), meets.size - 1).reshape(-1)
    return (jax.lax.cummin(turns, reverse=True) % meets.shape[1]).reshape(meets.shape)
