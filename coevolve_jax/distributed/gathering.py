"""Gathering of parameters that lie on many devices, for an engine that needs them in one place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from coevolve_jax.distributed import sharding


def on_one_device(params: Any) -> Any:
    """Gathers the parameters on this process's first device of their mesh, as copies that outlive a donation.

    They come parameter by parameter, so that every other device holds one of them at a time. If they lie on
    several processes, all must call this. Parameters that lie on one device are returned as they are.
    """
    if jax.tree.leaves(params)[0].sharding.num_devices == 1:
        return params
    return jax.tree.map(lambda x: _gather(x, jnp.copy), params)


def in_memory(params: Any, dtype: str) -> Any:
    """Gathers the parameters as numpy arrays in `dtype`.

    All processes call this; followers get None in place of each array. The parameters are cast where they lie
    and come layer by layer. So no device holds all layers' experts at once.
    """
    leads = jax.process_index() == 0

    def fetch(x: jax.Array) -> np.ndarray | None:
        x = x.astype(dtype)
        parts = [_gather(x, jnp.copy)] if x.ndim < 3 else (_gather(x, _layer, i) for i in range(len(x)))
        if leads:
            return np.stack([np.asarray(part) for part in parts]).reshape(x.shape)
        for _ in parts:  # followers take part in each gather, and keep nothing
            pass
        return None

    return jax.tree.map(fetch, params)


def _gather(x: jax.Array, part: Callable[..., jax.Array], *arguments: Any) -> jax.Array:
    """part(x, *arguments) on this process's first device."""
    placed = x.sharding
    assert isinstance(placed, NamedSharding) and isinstance(placed.mesh, Mesh)  # several devices form a mesh
    everywhere = _program(part, sharding.replicated(placed.mesh))(x, *arguments)
    return everywhere.addressable_data(0).block_until_ready()


def _layer(x: jax.Array, i: int) -> jax.Array:
    return x[i]


@functools.cache
def _program(part: Callable[..., jax.Array], everywhere: jax.sharding.Sharding) -> Callable[..., jax.Array]:
    return jax.jit(part, out_shardings=everywhere)
