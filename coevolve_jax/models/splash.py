"""Attention of packed rows by JAX's splash kernel for TPUs, which skips the blocks that do not meet.

Where a token sees a prompt besides its own segment, the kernel runs once for each; the two are merged by their
log-sum-exp. The backward pass of each takes the merged output and log-sum-exp, with which it gives its part of the gradient.

B: rows; L: tokens of a row; T: those of them that are queries; H: query heads; K: key-value heads; D: head dimension;
n: blocks of a row; m: of queries.
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

LANES = 128  # of a vector, of which a block has whole ones
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
    """`attention` by splash. size: tokens of a block at most. interpret: run it on a CPU, slowly."""
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
    """One row: q [H, T, D], k and v [K, L, D], segment_ids [T], row.ids [L] -> [H, T, D]."""
    meets, _ = _meetings(segment_ids, None, row, size)
    kernel = _visiting(_kernel(q, k, size, interpret), meets, row.places)
    return kernel(q, k, v, kernels.SegmentIds(segment_ids, row.ids))


def _meetings(segment_ids, parents, row: Row, size: int) -> tuple[jax.Array, jax.Array]:
    """`meeting_blocks` of one row: segments and parents [T], row.ids [L]."""
    segments = Segments(segment_ids[None], None if parents is None else parents[None])
    return meeting_blocks(segments.blocks(size), row._replace(ids=row.ids[None]).blocks(size))


def pairs(segments: Segments, row: Row) -> dict[str, np.ndarray]:
    """A word in a kernel's name -> int [B], pairs of a query and a key that its runs multiply for one head."""
    size = _size(segments.ids.shape[1], BLOCK)
    return dict.fromkeys(
        ("fwd", "dq", "dkv"), np.asarray(_multiplied(segments, row, size), np.int64) * size**2
    )


@functools.partial(jax.jit, static_argnums=2)
def _multiplied(segments: Segments, row: Row, size: int) -> jax.Array:
    """int [B], blocks of queries and of keys that are multiplied."""
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
    # Computed block by block inside the kernel; what is above the diagonal is never visited.
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
    """The same with parents [T], of which some are other segments."""
    return _of_two_forward(q, k, v, segment_ids, parents, row, size, interpret)[0]


def _of_two_forward(q, k, v, segment_ids, parents, row, size, interpret):
    own, prompt = _runs(q, k, segment_ids, parents, row, size, interpret)
    (out, (logsumexp,)), (out_prompt, (logsumexp_prompt,)) = (
        part(q, k, v, ids) for part, ids in (own, prompt)
    )
    both = parents != segment_ids  # elsewhere the second run means nothing
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
    """The kernel of a token's own segment and that of its parent, each with the segments of queries and keys."""
    kernel = _kernel(q, k, size, interpret, residuals=True)
    meetings = _meetings(segment_ids, parents, row, size)
    alone = jnp.where(parents == segment_ids, -1, parents)  # which no key is
    for meets, ids in zip(meetings, (segment_ids, alone)):
        yield _visiting(kernel, meets, row.places), kernels.SegmentIds(ids, row.ids)


def _visiting(kernel, meets: jax.Array, places: jax.Array) -> kernels.SplashAttentionKernel:
    """The kernel of queries in those places [T], with only those blocks visited that meet, bool [m, n] by queries and keys."""
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
    """int of the same shape, for each turn of a grid that takes the rows one after the other: the column of the next block
    that is visited, this one included. The kernel fetches it ahead."""
    turns = jnp.where(meets, jnp.arange(meets.size).reshape(meets.shape), meets.size - 1).reshape(-1)
    return (jax.lax.cummin(turns, reverse=True) % meets.shape[1]).reshape(meets.shape)
