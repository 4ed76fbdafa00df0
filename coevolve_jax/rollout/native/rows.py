"""Access to the rows of a cache on one device, or on a mesh whose devices have some rows each.

B: rows of the cache; R: rows that are taken or put.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from coevolve_jax.distributed import sharding
from coevolve_jax.models.paged import PagedCache


def specs(cache: Any) -> Any:
    """Returns the partition specs of a `KVCache`, `PagedCache` or `Recorded`, as a tree like it."""
    kept = "pages" if isinstance(getattr(cache, "kv", cache), PagedCache) else "cache"
    kind = lambda path: (
        "rows" if {"experts", "table"} & {key.name for key in path if hasattr(key, "name")} else kept
    )
    return jax.tree_util.tree_map_with_path(lambda path, _: sharding.DECODED[kind(path)], cache)


def place(cache: Any, mesh: Mesh | None) -> Any:
    """Constrains the sharding of a cache inside a program."""
    if mesh is None:
        return cache
    where = jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), specs(cache))
    return jax.lax.with_sharding_constraint(cache, where)


def take(cache: Any, rows: jax.Array, mesh: Mesh | None) -> Any:
    """Returns the `rows`, int32 [R], as a cache with this sharding. Rows that do not exist mean nothing."""
    if mesh is None:
        return cache.take(rows)

    def one_device(cache, rows):
        own = _own(cache, rows)
        mine = own < _count(cache)
        part = jax.tree.map(lambda x: jnp.where(mine.reshape(-1, *[1] * (x.ndim - 1)), x, 0), cache.take(own))
        add = lambda x: jax.lax.psum_scatter(x, sharding.DECODED_ROWS, scatter_dimension=0, tiled=True)
        return jax.tree.map(add, part)

    return _on_each(one_device, mesh, (specs(cache), PartitionSpec()), specs(cache))(cache, rows)


def put(cache: Any, rows: jax.Array, part: Any, mesh: Mesh | None) -> Any:
    """Writes `part`, a result of `take`, to `rows`. Entries for rows that do not exist are dropped."""
    if mesh is None:
        return cache.put(rows, part)

    def one_device(cache, rows, part):
        whole = jax.tree.map(lambda x: jax.lax.all_gather(x, sharding.DECODED_ROWS, tiled=True), part)
        return cache.put(_own(cache, rows), whole)

    given = specs(cache), PartitionSpec(), specs(part)
    return _on_each(one_device, mesh, given, specs(cache))(cache, rows, part)


def _on_each(function, mesh, in_specs, out_specs):
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def _count(cache: Any) -> int:
    return len(jax.tree.leaves(cache)[0])


def _own(cache: Any, rows: jax.Array) -> jax.Array:
    """Returns the places of `rows` in this device's part of the cache; its size for rows of other devices."""
    n = _count(cache)
    places = rows - n * jax.lax.axis_index(sharding.DECODED_ROWS)
    return jnp.where((places >= 0) & (places < n), places, n)
