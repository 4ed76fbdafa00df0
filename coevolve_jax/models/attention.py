"""Grouped-query attention: of packed rows to themselves, and of new tokens to a KV cache.

B: rows; L: tokens of a row; T: queries; S: keys; H: query heads; K: key-value heads; D: head dimension;
C: tokens of a block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import attention as gpu_kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import Mesh

from coevolve_jax.distributed import sharding

# Its exponential is 0 and, unlike that of an infinity, no difference of two of them is NaN.
MASKED = -1e30
# `plain` takes the queries in this many blocks, each against the keys up to its end, which skips nearly
# half of the masked products. More blocks skip little more and compile longer.
BLOCKS = 4
# Tokens of a block of `chunked`, on a CPU and elsewhere. Small ones compute little beside the segments' own products.
SEGMENT_BLOCK, LARGE_BLOCK = 64, 256
# Above this many tokens of a row the CPU takes `chunked`, which then is faster and smaller.
PLAIN_LENGTH = 512


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None = None,
    implementation: str = "auto",
    mesh: Mesh | None = None,
    *,
    platform: str,
    parents: jax.Array | None = None,
) -> jax.Array:
    """Causal attention within packed rows.

    q: [B, L, H, D]; k, v: [B, L, K, D] with H a multiple of K. segment_ids: int [B, L]; tokens attend
    to themselves and to earlier tokens of their own segment. Padding is segment 0: no token of another
    segment attends to it, and its outputs are finite. None: a row is one segment. parents: int [B, L], the segment
    that a token attends to besides, which lies before its own: a prompt that several segments share. Its own
    where there is none; None: nowhere is one. Returns [B, L, H, D].

    implementation: "plain" and "chunked" run everywhere, "flash" on NVIDIA GPUs, "splash" on TPUs; "auto"
    takes the platform's own. Only "plain" holds L x L numbers in memory. Raises ValueError for another name.
    mesh: where q, k and v are spread over devices, that mesh; "plain" and "chunked" need not know it.
    platform: that the program is for ("cpu", "gpu", "tpu"), which need not be the host's.
    """
    if segment_ids is None:
        segment_ids = jnp.ones(q.shape[:2], jnp.int32)
    name = choose(platform, q.shape[1]) if implementation == "auto" else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"Attention {name!r} (config.learner.attention) is unknown: use auto, "
            f"{', '.join(IMPLEMENTATIONS)}."
        )
    if parents is not None and name in KERNELS:
        name = "chunked"  # whose blocks go to both segments
    attend = IMPLEMENTATIONS[name]
    if name == "chunked" and platform != "cpu":
        attend = functools.partial(attend, size=LARGE_BLOCK)
    if name in KERNELS and mesh is not None and mesh.size > 1:
        attend = on_each_device(attend, mesh)
    return attend(q, k, v, segment_ids) if parents is None else attend(q, k, v, segment_ids, parents)


def choose(platform: str, length: int) -> str:
    """What "auto" means for rows of `length` tokens on a JAX platform ("cpu", "gpu", "tpu")."""
    accelerated = {"gpu": "flash", "tpu": "splash"}
    return accelerated.get(platform) or ("plain" if length <= PLAIN_LENGTH else "chunked")


def plain(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, parents: jax.Array | None = None
) -> jax.Array:
    """`attention` as products of whole matrices; fastest where these are small."""
    L = q.shape[1]
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    size = -(-L // BLOCKS)
    outputs = []
    for start in range(0, L, size):
        end = min(start + size, L)
        mask = (jnp.arange(start, end)[:, None] >= jnp.arange(end))[None]
        before = None if parents is None else parents[:, start:end, None]
        mask = mask & _sees(segment_ids[:, start:end, None], before, segment_ids[:, None, :end])
        outputs.append(_attend(q[:, start:end], k[:, :, :end], v[:, :, :end], mask))
    return jnp.concatenate(outputs, axis=1)


def chunked(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    parents: jax.Array | None = None,
    size: int = SEGMENT_BLOCK,
) -> jax.Array:
    """`attention` block by block with a running softmax, forward and backward (arXiv 2307.08691).

    Blocks are `size` tokens square; those above the diagonal and those of other segments are skipped, so memory grows
    with L, and time with the length of the segments and of what they share.
    """
    L = q.shape[1]
    size = min(size, L)
    q, k, v, segment_ids = _pad_rows(size, q, k, v, segment_ids)
    B, padded, K, D = k.shape
    split = lambda x: x.reshape(B, -1, size, K, x.shape[2] // K, D).transpose(1, 0, 3, 4, 2, 5)
    blocks = lambda x: x.reshape(B, -1, size).swapaxes(0, 1)
    segments = _Segments(blocks(segment_ids), None if parents is None else blocks(*_pad_rows(size, parents)))
    out = _blockwise(split(q), split(k)[:, :, :, 0], split(v)[:, :, :, 0], segments)
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(B, padded, -1, D)[:, :L]


class _Segments(NamedTuple):
    """int [n, B, C] both; parents None where no token has another segment's."""

    ids: jax.Array
    parents: jax.Array | None


@jax.custom_vjp
def _blockwise(q, k, v, segments: _Segments):
    """q [n, B, K, G, C, D], G query heads to a key-value head; k, v [n, B, K, C, D]."""
    return _blockwise_forward(q, k, v, segments)[0]


def _block_scores(q, k, segments: _Segments, i, j):
    """Scores of query block i with key block j, float32 [B, K, G, C, C]; masked ones are MASKED."""
    C, D = q.shape[-2:]
    scores = jnp.einsum("bkgcd,bksd->bkgcs", q[i], k[j], preferred_element_type=jnp.float32) * D**-0.5
    mask = i * C + jnp.arange(C)[:, None] >= j * C + jnp.arange(C)
    before = None if segments.parents is None else segments.parents[i][:, :, None]
    mask = mask & _sees(segments.ids[i][:, :, None], before, segments.ids[j][:, None])
    return jnp.where(mask[:, None, None], scores, MASKED)


def _visited(segments: _Segments) -> tuple[jax.Array, jax.Array]:
    """For each block of queries [n, n], the blocks of keys that hold a token that it sees in any row, in order and
    before all others; and their number [n].

    It goes by the range of a block's segments, with padding, which is at a row's end, as the largest: exact where
    segments lie as `grpo/packing.py` lays them, and never too few.
    """
    end = jnp.iinfo(jnp.int32).max
    ids = jnp.where(segments.ids == 0, end, segments.ids)
    low, high = ids.min(axis=2), ids.max(axis=2)
    meets = lambda low_q, high_q: jnp.any((low_q[:, None] <= high) & (low <= high_q[:, None]), axis=2)
    seen = meets(low, high)
    if segments.parents is not None:
        other = segments.parents != segments.ids
        first, last = jnp.where(other, segments.parents, end), jnp.where(other, segments.parents, -1)
        seen |= meets(first.min(axis=2), last.max(axis=2))
    seen = jnp.tril(seen)
    return jnp.argsort(~seen, axis=1, stable=True), seen.sum(axis=1)


def _blockwise_forward(q, k, v, segments):
    n, *rows, D = q.shape
    order, count = _visited(segments)

    def queries(i):
        def keys(turn, carry):
            j, (total, norm, peak) = order[i, turn], carry
            scores = _block_scores(q, k, segments, i, j)
            higher = jnp.maximum(peak, scores.max(-1))
            weights, fade = jnp.exp(scores - higher[..., None]), jnp.exp(peak - higher)
            part = jnp.einsum(
                "bkgcs,bksd->bkgcd", weights.astype(v.dtype), v[j], preferred_element_type=jnp.float32
            )
            return total * fade[..., None] + part, norm * fade + weights.sum(-1), higher

        start = jnp.zeros((*rows, D)), jnp.zeros(rows), jnp.full(rows, MASKED)
        total, norm, peak = jax.lax.fori_loop(0, count[i], keys, start)
        return (total / norm[..., None]).astype(v.dtype), peak + jnp.log(norm)

    out, logsumexp = jax.lax.map(queries, jnp.arange(n))
    return out, (q, k, v, segments, out, logsumexp)


def _blockwise_backward(saved, d_out):
    q, k, v, segments, out, logsumexp = saved
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    scale = q.shape[-1] ** -0.5
    order, count = _visited(segments)

    def queries(carry, i):
        d = d_out[i]
        drift = jnp.sum(d.astype(jnp.float32) * out[i].astype(jnp.float32), -1, keepdims=True)

        def keys(turn, carry):
            j, (dq, dk, dv) = order[i, turn], carry
            weights = jnp.exp(_block_scores(q, k, segments, i, j) - logsumexp[i][..., None])
            d_scores = weights * (product("bkgcd,bksd->bkgcs", d, v[j]) - drift) * scale
            weights, d_scores = weights.astype(v.dtype), d_scores.astype(v.dtype)
            dv = dv.at[j].add(product("bkgcs,bkgcd->bksd", weights, d))
            dk = dk.at[j].add(product("bkgcs,bkgcd->bksd", d_scores, q[i]))
            return dq + product("bkgcs,bksd->bkgcd", d_scores, k[j]), dk, dv

        dq, dk, dv = jax.lax.fori_loop(0, count[i], keys, (jnp.zeros(q.shape[1:]), *carry))
        return (dk, dv), dq.astype(q.dtype)

    zeros = jnp.zeros(k.shape), jnp.zeros(v.shape)
    (dk, dv), dq = jax.lax.scan(queries, zeros, jnp.arange(len(q)))
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)


def flash(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """`attention` by JAX's Pallas (Triton) kernel for NVIDIA GPUs. interpret: run it on a CPU, slowly."""
    L, D = q.shape[1], q.shape[3]
    # The kernel has no groups of heads, and its products take head dimensions of 16, 32, 64, ...
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    q, k, v = _pad_heads(max(16, 1 << (D - 1).bit_length()), q, k, v)
    q, k, v, segment_ids = _pad_rows(128, q, k, v, segment_ids)
    out: Any = gpu_kernel.mha(q, k, v, segment_ids, sm_scale=D**-0.5, causal=True, interpret=interpret)
    return out[:, :L, :, :D]


def splash(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """`attention` by JAX's splash kernel for TPUs. interpret: run it on a CPU, slowly."""
    L, H, D = q.shape[1:]
    size = min(512, -(-L // 128) * 128)  # lanes are 128 wide
    q, k, v = _pad_heads(-(-D // 128) * 128, q * D**-0.5, k, v)
    q, k, v, segment_ids = _pad_rows(size, q, k, v, segment_ids)
    # Computed block by block inside the kernel; what is above the diagonal is never visited.
    causal = splash_attention_mask.CausalMask((q.shape[1], q.shape[1]))
    attend: Any = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([causal] * H),
        block_sizes=_splash_blocks(size),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    row = lambda q, k, v, s: attend(q, k, v, splash_attention_kernel.SegmentIds(s, s))
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    out = jax.vmap(row)(q, k, v, segment_ids)
    return out.swapaxes(1, 2)[:, :L, :, :D]


def _splash_blocks(size: int) -> splash_attention_kernel.BlockSizes:
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
    return splash_attention_kernel.BlockSizes(**dict.fromkeys(names, size))


KERNELS = {"flash": flash, "splash": splash}
IMPLEMENTATIONS: dict[str, Callable] = {"plain": plain, "chunked": chunked, **KERNELS}


def _pad_rows(multiple: int, *arrays: jax.Array) -> list[jax.Array]:
    """Zeros after the tokens of [B, L, ...]: the last positions, to which causality lets no token attend."""
    pad = -arrays[0].shape[1] % multiple
    return [jnp.pad(x, [(0, pad if axis == 1 else 0) for axis in range(x.ndim)]) for x in arrays]


def _pad_heads(size: int, *arrays: jax.Array) -> list[jax.Array]:
    """Zeros after the head dimension of [B, L, H, D]: they change no product."""
    return [jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, size - x.shape[3]))) for x in arrays]


def on_each_device(kernel: Callable, mesh: Mesh) -> Callable:
    """A kernel, which the compiler cannot split, as a function that runs on each device's own rows and heads.

    It raises ValueError where the mesh would cut a key-value head.
    """
    heads, rows = sharding.head_sharding(mesh).spec, sharding.batch_sharding(mesh).spec
    axis = heads[2]

    def run(q, k, v, segment_ids):
        if k.shape[2] % mesh.shape[axis]:
            raise ValueError(
                f"{k.shape[2]} key-value heads do not divide by the mesh's {axis} axis of "
                f"{mesh.shape[axis]}: choose a smaller config.mesh.{axis}, or "
                "config.learner.attention='chunked'."
            )
        specs = (heads, heads, heads, rows)
        split = jax.shard_map(kernel, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)
        return split(q, k, v, segment_ids)

    return run


def cached_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of new tokens to a cache whose columns are positions, which it writes them to before.

    q: [B, T, H, D]; k, v: [B, T, K, D]; keys: [B, K, D, S]; values: [B, K, S, D]; positions: int [B, T], S or more is
    not written; a token attends to the columns up to and including its position, so what a column beyond it holds
    never matters. mesh: where the cache is spread over devices, that mesh; each device has rows and heads of its own.
    Returns [B, T, H, D], and keys and values.
    """
    if mesh is None or mesh.size == 1:
        return _cached_attention(q, k, v, keys, values, positions)
    heads, cache, rows = (sharding.DECODED[kind] for kind in ("heads", "cache", "rows"))
    split = jax.shard_map(
        _cached_attention,
        mesh=mesh,
        in_specs=(heads, heads, heads, cache, cache, rows),
        out_specs=(heads, cache, cache),
    )
    return split(q, k, v, keys, values, positions)


def _cached_attention(q, k, v, keys, values, positions):
    rows = jnp.arange(len(positions))[:, None]
    keys = keys.at[rows, :, :, positions].set(k.astype(keys.dtype), mode="drop")
    values = values.at[rows, :, positions].set(v.astype(values.dtype), mode="drop")
    mask = jnp.arange(values.shape[2]) <= positions[:, :, None]
    return _attend(q, keys, values, mask, "bkds"), keys, values


def _sees(segments: jax.Array, parents: jax.Array | None, keys: jax.Array) -> jax.Array:
    """Where a key's segment is a query's own or its parent. segments, parents: [B, T, 1]; keys: [B, 1, S]."""
    own = segments == keys
    return own if parents is None else own | (parents == keys)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, keys: str = "bksd") -> jax.Array:
    """q [B, T, H, D], k [B, K, S, D] (or as `keys` names its axes), v [B, K, S, D], mask [B or 1, T, S] ->
    [B, T, H, D]; softmax in float32."""
    B, T, H, D = q.shape
    K, S = v.shape[1:3]
    # The queries of all heads of a group become rows of one matrix: keys and values are not repeated.
    q = q.reshape(B, T, K, H // K, D).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, D)
    scores = jnp.einsum(f"bkmd,{keys}->bkms", q, k, preferred_element_type=jnp.float32) * D**-0.5
    scores = jnp.where(mask[:, None, None], scores.reshape(B, K, -1, T, S), MASKED).reshape(B, K, -1, S)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    # Normalised after the product, where the numbers are D instead of S.
    out = jnp.einsum("bkms,bksd->bkmd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = (out / weights.sum(axis=-1, keepdims=True)).astype(v.dtype)
    return out.reshape(B, K, H // K, T, D).transpose(0, 3, 1, 2, 4).reshape(B, T, H, D)
