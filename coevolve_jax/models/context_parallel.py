"""Rows that are split over the mesh's context axis, because one device does not hold them.

All code but attention treats a part as a row of its own. Attention takes a part's queries and gathers the
keys and values of the whole row. Grouped heads make these small (Llama 3, arXiv 2407.21783, section 3.3.2).

A row is cut into 2 P chunks. Part i takes the i-th chunk and the i-th from the end. So causal attention takes
equally long for every part.

R: rows; L: tokens of a row; P: parts of a row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from coevolve_jax.distributed import sharding
from coevolve_jax.models.packed import Row


def places(part: jax.Array | int, parts: int, length: int) -> jax.Array:
    """The places in its row of a part's tokens, int32 [L / P]. length: L, a multiple of 2 P."""
    chunk = jnp.arange(length // (2 * parts))
    return jnp.concatenate([part * len(chunk) + chunk, (2 * parts - 1 - part) * len(chunk) + chunk])


def split(mesh: Mesh, x: jax.Array) -> jax.Array:
    """Splits [R, L, ...], laid out as a batch, into [R * P, L / P, ...], each part where it is computed.

    Raises ValueError where L is not a multiple of 2 P.
    """
    parts = sharding.context_parts(mesh)
    if parts == 1:
        return x
    if x.shape[1] % (2 * parts):
        raise ValueError(
            f"Rows of {x.shape[1]} tokens do not divide by twice the mesh's context axis of {parts}: choose "
            f"config.learner.pack_length and pack_length_buckets as multiples of {2 * parts}."
        )

    def one_device(x):
        row = jax.lax.all_gather(x, sharding.CONTEXT, axis=1, tiled=True)
        own = places(jax.lax.axis_index(sharding.CONTEXT), parts, row.shape[1])
        return jnp.take(row, own, axis=1, unique_indices=True, indices_are_sorted=True)

    return _on_each(mesh, one_device, sharding.batch_sharding(mesh), sharding.part_sharding(mesh))(x)


def join(mesh: Mesh, x: jax.Array) -> jax.Array:
    """Undoes `split`."""
    parts = sharding.context_parts(mesh)
    if parts == 1:
        return x

    def one_device(x):
        start = jax.lax.axis_index(sharding.CONTEXT) * x.shape[1]
        return jax.lax.dynamic_slice_in_dim(whole(x, parts), start, x.shape[1], axis=1)

    return _on_each(mesh, one_device, sharding.part_sharding(mesh), sharding.batch_sharding(mesh))(x)


def whole(x: jax.Array, parts: int) -> jax.Array:
    """Gathers a device's [R, L / P, ...] into [R, L, ...]. Call it on each device of the context axis."""
    chunks = jax.lax.all_gather(x, sharding.CONTEXT, axis=1)
    chunks = chunks.reshape(len(x), parts, 2, -1, *x.shape[2:])
    chunks = jnp.concatenate([chunks[:, :, 0], chunks[:, ::-1, 1]], axis=1)
    return chunks.reshape(len(x), -1, *x.shape[2:])


def row(segment_ids: jax.Array, parts: int) -> Row:
    """The row that this device holds a part of. segment_ids: those of the part, [R, L / P]."""
    segments = whole(segment_ids, parts)
    return Row(segments, places(jax.lax.axis_index(sharding.CONTEXT), parts, segments.shape[1]))


def _on_each(mesh: Mesh, one_device, given, result):
    return jax.shard_map(one_device, mesh=mesh, in_specs=given.spec, out_specs=result.spec, check_vma=False)
