"""The loops of `logprobs.py` on a mesh, where each device has its own positions.

If the vocabulary is split, a device has its own part of that too. Devices meet only before and after a loop.
The unembedding is gathered in the compute type, and its gradient is reduced in float32. Results for parts of
the vocabulary are merged as those of tiles are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from coevolve_jax.distributed import sharding


def gather(mesh: Mesh, axis: int, matrix: jax.Array, dtype: Any) -> jax.Array:
    """Gathers the unembedding for the loops. axis: that of its vocabulary, here and below.

    The cast comes before the gather. The compiler alone might cast afterwards, and so move more bytes.
    """
    axes = sharding.logprob_axes(axis)
    one_device = lambda part: jax.lax.all_gather(part.astype(dtype), axes.fsdp, axis=1 - axis, tiled=True)
    return jax.shard_map(one_device, mesh=mesh, in_specs=axes.own, out_specs=axes.gathered, check_vma=False)(
        matrix
    )


def statistics(mesh: Mesh, axis: int, loop: Callable) -> Callable:
    """Wraps the forward loop for a mesh.

    loop: takes the number of blocks that count, the unembedding, and the blocks of hidden states and targets.
    """
    axes = sharding.logprob_axes(axis)

    def one_device(used, part, blocks):
        peak, total, surprise, picked = loop(used, part, _own(axes, axis, part, blocks))
        highest = jax.lax.pmax(peak, axes.vocabulary)
        rise = peak - highest
        shrink = jnp.exp(rise)
        here = ~jnp.isnan(picked)
        add = functools.partial(jax.lax.psum, axis_name=axes.vocabulary)
        picked = jnp.where(add(here) > 0, add(jnp.where(here, picked + rise, 0)), jnp.nan)
        return highest, add(shrink * total), add(shrink * (surprise + rise * total)), picked

    return _spread(mesh, axes, one_device, axes.blocks)


def gradients(mesh: Mesh, axis: int, loop: Callable) -> Callable:
    """Wraps the backward loop for a mesh.

    loop: takes the same, with more blocks. Its gradient of a frozen unembedding is None.
    """
    axes = sharding.logprob_axes(axis)

    def one_device(used, part, blocks):
        d_hidden, d_part = loop(used, part, _own(axes, axis, part, blocks))
        d_hidden = jax.lax.psum(d_hidden, axes.vocabulary)
        if d_part is None:
            return d_hidden, None
        d_part = jax.lax.psum_scatter(d_part, axes.fsdp, scatter_dimension=1 - axis, tiled=True)
        d_part = jax.lax.psum(d_part, axes.others)
        # Reduce now. After the layers' backward pass the whole gradient would be held all through it.
        return jax.lax.optimization_barrier((d_hidden, d_part))

    return _spread(mesh, axes, one_device, (axes.blocks, axes.own))


def _own(axes: sharding.LogprobAxes, axis: int, part: jax.Array, blocks: tuple) -> tuple:
    """The blocks, with targets counted from the first entry of the device's part of the vocabulary."""
    hidden, targets, *others = blocks
    return hidden, targets - jax.lax.axis_index(axes.vocabulary) * part.shape[axis], *others


def _spread(mesh: Mesh, axes: sharding.LogprobAxes, one_device: Callable, results: Any) -> Callable:
    given = P(), axes.gathered, axes.blocks
    return jax.shard_map(one_device, mesh=mesh, in_specs=given, out_specs=results, check_vma=False)
