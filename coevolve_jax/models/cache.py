"""Keys and values of sampled conversations, a row of columns for each; paged.py has them in pages.

B: rows; S: cache columns; T: new tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from coevolve_jax.models.attention import cached_attention
from coevolve_jax.models.config import QwenConfig


@flax.struct.dataclass
class KVCache:
    """Keys (rotated) and values; column s of row b belongs to the token at position s.

    k: of each layer P arrays, one after the other's heads, [B, num_key_value_heads / P, head_dim, S] where `axes` is
    "bkds", and laid out as v where it is "bksd"; v: as many [B, num_key_value_heads / P, S, head_dim].
    Separate arrays, each laid out as its product with a query or with weights reads it, because XLA then writes new
    columns in place and feeds the rest to the products uncopied.
    """

    k: tuple[tuple[jax.Array, ...], ...]
    v: tuple[tuple[jax.Array, ...], ...]
    axes: str = flax.struct.field(pytree_node=False)

    def take(self, rows: jax.Array) -> KVCache:
        """Those `rows` [R]; a row that does not exist is zeros."""
        return jax.tree.map(lambda x: x.at[rows].get(mode="fill", fill_value=0), self)

    def put(self, rows: jax.Array, part: KVCache) -> KVCache:
        """Writes `part` to `rows` [R]; what goes to no existing row is dropped."""
        return jax.tree.map(lambda x, new: x.at[rows].set(new, mode="drop"), self, part)

    def resize(self, columns: int) -> KVCache:
        """The first `columns` columns; those beyond the last are zeros."""
        each = lambda arrays, axis: jax.tree.map(lambda x: resize_axis(x, axis, columns), arrays)
        return KVCache(each(self.k, self.axes.index("s")), each(self.v, 2), self.axes)

    @property
    def columns(self) -> int:
        """S."""
        return self.v[0][0].shape[2]

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kept: Sequence[Any],
        positions: jax.Array,
        mesh: Mesh | None,
        platform: str,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """`cached_attention` to a layer's own, `kept` (k and v of it), and what it has then."""
        keys, values = kept
        heads, *written = cached_attention(q, k, v, keys, values, positions, mesh, self.axes)
        return heads, tuple(written)

    @property
    def places(self) -> tuple[int, int]:
        """B, S."""
        return self.v[0][0].shape[0], self.columns

    def write(self, kept: jax.Array, new: jax.Array, positions: jax.Array, mesh: Mesh | None) -> jax.Array:
        """kept [B, X, S, Y], of each place something else than keys and values, with `new` [B, T, X, Y] at the `positions`
        [B, T] of tokens that were fed. As with their keys, what lies beyond the columns is not written."""
        rows = jnp.arange(len(positions))[:, None]
        return kept.at[rows, :, positions].set(new.astype(kept.dtype), mode="drop")


def resize_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Cuts or pads x with zeros, at the end of this axis."""
    x = jax.lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis)
    return jnp.pad(x, [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)])


def init_cache(
    config: QwenConfig,
    rows: int,
    capacity: int,
    dtype: Any = jnp.float32,
    platform: str = "cpu",
    parts: int = 1,
) -> KVCache:
    """An empty cache of `capacity` columns (tokens) for each of `rows` rows, laid out for a JAX platform, a layer's heads
    in `parts` arrays."""
    heads, dim = config.num_key_value_heads // parts, config.head_dim
    # Every array has its own buffer: one that is donated must not occur twice.
    layer = lambda shape: tuple(jnp.zeros(shape, dtype) for _ in range(parts))
    empty = lambda *shape: tuple(layer(shape) for _ in range(config.num_hidden_layers))
    values = rows, heads, capacity, dim
    if platform == "cpu":
        return KVCache(empty(rows, heads, dim, capacity), empty(*values), "bkds")
    return KVCache(empty(*values), empty(*values), "bksd")
