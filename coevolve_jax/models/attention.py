"""Grouped-query attention: within packed rows, and of new tokens to a KV cache.

B: rows; L: tokens of a row; T: queries; S: keys; H: query heads; K: key-value heads; D: head dimension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from coevolve_jax.distributed import sharding
from coevolve_jax.models import context_parallel
from coevolve_jax.models.blockwise import LARGE_BLOCK, chunked
from coevolve_jax.models.flash import flash
from coevolve_jax.models.packed import MASKED, Row, sees
from coevolve_jax.models.splash import splash

# `plain` takes the queries in this many blocks, each against the keys up to its end. That skips three
# quarters of the masked products. More blocks skip little more and compile longer.
BLOCKS = 4
# Above this many tokens per row the CPU takes `chunked`, which is then faster and needs less memory.
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

    A token attends to itself and to earlier tokens of its own segment. Padding is segment 0: no token of
    another segment attends to it, and its outputs are finite.

    Args:
      q: [B, L, H, D].
      k, v: [B, L, K, D], with H a multiple of K.
      segment_ids: int [B, L]. None: each row is one segment.
      implementation: "plain" and "chunked" run everywhere, "flash" on NVIDIA GPUs, "splash" on TPUs. "auto"
        takes the platform's own. Only "plain" holds L x L numbers in memory.
      mesh: the mesh over which q, k and v are spread, if they are. If it splits rows, all arrays hold parts
        of rows (`context_parallel.split`). Otherwise "plain" and "chunked" do not need it.
      platform: the program's target ("cpu", "gpu", "tpu"), which need not be the host's.
      parents: int [B, L], a second segment that a token attends to. It lies earlier in the row: a prompt that
        several segments share. A token without one repeats its own segment. None: no token has one.

    Returns:
      [B, L, H, D].

    Raises:
      ValueError: the implementation is unknown, or the mesh would cut a key-value head.
    """
    if segment_ids is None:
        segment_ids = jnp.ones(q.shape[:2], jnp.int32)
    split = mesh is not None and sharding.context_parts(mesh) > 1
    name = choose(platform, q.shape[1]) if implementation == "auto" else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"Attention {name!r} (config.learner.attention) is unknown: use auto, "
            f"{', '.join(IMPLEMENTATIONS)}."
        )
    attend = IMPLEMENTATIONS[name]
    if name == "chunked" and platform != "cpu":
        attend = functools.partial(attend, size=LARGE_BLOCK)
    if mesh is not None and (split or name in KERNELS and mesh.size > 1):
        attend = on_each_device(attend, mesh)
    return attend(q, k, v, segment_ids, *[] if parents is None else [parents])


def choose(platform: str, length: int) -> str:
    """Resolves "auto" for rows of `length` tokens on a JAX platform ("cpu", "gpu", "tpu")."""
    accelerated = {"gpu": "flash", "tpu": "splash"}
    return accelerated.get(platform) or ("plain" if length <= PLAIN_LENGTH else "chunked")


def plain(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    parents: jax.Array | None = None,
    row: Row | None = None,
) -> jax.Array:
    """Computes `attention` as products of whole matrices. This is fastest where they are small.

    row: given where the queries are only part of a row, as in all implementations. Keys and values are then
    those of the whole row.
    """
    L = q.shape[1]
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    if row is not None:
        mask = (row.places[:, None] >= jnp.arange(k.shape[2]))[None]
        before = None if parents is None else parents[:, :, None]
        return attend(q, k, v, mask & sees(segment_ids[:, :, None], before, row.ids[:, None]))
    size = -(-L // BLOCKS)
    outputs = []
    for start in range(0, L, size):
        end = min(start + size, L)
        mask = (jnp.arange(start, end)[:, None] >= jnp.arange(end))[None]
        before = None if parents is None else parents[:, start:end, None]
        mask = mask & sees(segment_ids[:, start:end, None], before, segment_ids[:, None, :end])
        outputs.append(attend(q[:, start:end], k[:, :, :end], v[:, :, :end], mask))
    return jnp.concatenate(outputs, axis=1)


KERNELS = {"flash": flash, "splash": splash}
IMPLEMENTATIONS: dict[str, Callable] = {"plain": plain, "chunked": chunked, **KERNELS}


def on_each_device(kernel: Callable, mesh: Mesh) -> Callable:
    """Wraps a kernel, which the compiler cannot split, to run on each device's own heads and rows.

    If the mesh splits rows, a device takes the queries of its part and gathers the row's keys and values. The
    wrapped function raises ValueError where the mesh would cut a key-value head.
    """
    heads, tokens = sharding.head_sharding(mesh).spec, sharding.part_sharding(mesh).spec
    axis, count = heads[2], sharding.context_parts(mesh)

    def one_device(q, k, v, segment_ids, *parents):
        if count == 1:
            return kernel(q, k, v, segment_ids, *parents)
        k, v = context_parallel.whole(k, count), context_parallel.whole(v, count)
        return kernel(q, k, v, segment_ids, *parents, row=context_parallel.row(segment_ids, count))

    def run(q, k, v, *segments):
        if k.shape[2] % mesh.shape[axis]:
            raise ValueError(
                f"{k.shape[2]} key-value heads do not divide by the mesh's {axis} axis of "
                f"{mesh.shape[axis]}: choose a smaller config.mesh.{axis}"
                + (", or config.learner.attention='chunked'." if count == 1 else ".")
            )
        specs = (heads, heads, heads, *[tokens] * len(segments))
        split = jax.shard_map(one_device, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)
        return split(q, k, v, *segments)

    return run


def cached_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    keys: Sequence[jax.Array],
    values: Sequence[jax.Array],
    positions: jax.Array,
    mesh: Mesh | None = None,
    axes: str = "bkds",
) -> tuple[jax.Array, Sequence[jax.Array], Sequence[jax.Array]]:
    """Writes new tokens to a cache whose columns are positions, then attends to it.

    Args:
      q: [B, T, H, D].
      k, v: [B, T, K, D].
      keys: P arrays that divide the heads: [B, K / P, D, S] where `axes` is "bkds", [B, K / P, S, D] where it
        is "bksd".
      values: P arrays [B, K / P, S, D].
      positions: int [B, T]. A token attends to the columns up to and including its position, so later columns
        never matter. A token at position S or beyond is not written.
      mesh: the mesh over which the cache is spread, if it is. Each device has rows and heads of its own.

    Returns:
      The output [B, T, H, D], and the updated keys and values.
    """
    attend = functools.partial(_cached_attention, axes=axes)
    if mesh is None or mesh.size == 1:
        return attend(q, k, v, keys, values, positions)
    heads, cache, rows = (sharding.DECODED[kind] for kind in ("heads", "cache", "rows"))
    split = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(heads, heads, heads, cache, cache, rows),
        out_specs=(heads, cache, cache),
    )
    return split(q, k, v, keys, values, positions)


def _cached_attention(q, k, v, keys, values, positions, axes):
    # Index every head explicitly. To write all heads at once, XLA's TPU backend would put the heads
    # innermost and copy the cache for it.
    columns, rows = positions[:, :, None], jnp.arange(len(positions))[:, None, None]
    mask = jnp.arange(values[0].shape[2]) <= columns

    def one_part(q, k, v, keys, values):
        heads = jnp.arange(k.shape[2])
        place = (rows, heads, columns) if axes == "bksd" else (rows, heads, slice(None), columns)
        keys = keys.at[place].set(k.astype(keys.dtype), mode="drop")
        values = values.at[rows, heads, columns].set(v.astype(values.dtype), mode="drop")
        return attend(q, keys, values, mask, axes), keys, values

    of_heads = (jnp.split(x, len(keys), axis=2) for x in (q, k, v))
    heads, keys, values = zip(*map(one_part, *of_heads, keys, values))
    return jnp.concatenate(heads, axis=2), keys, values


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, keys: str = "bksd") -> jax.Array:
    """Softmax attention under a mask; the softmax is float32.

    q: [B, T, H, D]; k: [B, K, S, D], or with the axes that `keys` names; v: [B, K, S, D]; mask: bool
    [B or 1, T, S]. Returns [B, T, H, D].
    """
    B, T, H, D = q.shape
    K, S = v.shape[1:3]
    # A group's query heads become rows of one matrix, so keys and values are not repeated.
    q = q.reshape(B, T, K, H // K, D).transpose(0, 2, 3, 1, 4).reshape(B, K, -1, D)
    scores = jnp.einsum(f"bkmd,{keys}->bkms", q, k, preferred_element_type=jnp.float32) * D**-0.5
    scores = jnp.where(mask[:, None, None], scores.reshape(B, K, -1, T, S), MASKED).reshape(B, K, -1, S)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    # Normalise after the product: D numbers per query instead of S.
    out = jnp.einsum("bkms,bksd->bkmd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = (out / weights.sum(axis=-1, keepdims=True)).astype(v.dtype)
    return out.reshape(B, K, H // K, T, D).transpose(0, 3, 1, 2, 4).reshape(B, T, H, D)
