"""The KV cache of sampled conversations, one row of columns for each. (paged.py keeps it in pages.)

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
from coevolve_jax.models.config import ModelConfig


@flax.struct.dataclass
class KVCache:
    """Keys (rotated) and values. Column s of row b belongs to the token at position s.

    Attributes:
      k: per layer, P arrays that divide the heads in order. They are
        [B, num_key_value_heads / P, head_dim, S] where `axes` is "bkds", and laid out as v where it is
        "bksd".
      v: per layer, P arrays [B, num_key_value_heads / P, S, head_dim].
      axes: the order of the axes of k.

    The arrays are separate, each in the layout that its product with queries or weights reads. XLA then
    writes new columns in place and feeds the others to the products without a copy.
    """

    k: tuple[tuple[jax.Array, ...], ...]
    v: tuple[tuple[jax.Array, ...], ...]
    axes: str = flax.struct.field(pytree_node=False)

    def take(self, rows: jax.Array) -> KVCache:
        """Reads the `rows` [R]. A row that does not exist is zeros."""
        return jax.tree.map(lambda x: x.at[rows].get(mode="fill", fill_value=0), self)

    def put(self, rows: jax.Array, part: KVCache) -> KVCache:
        """Writes `part` to the `rows` [R]. Entries for rows that do not exist are dropped."""
        return jax.tree.map(lambda x, new: x.at[rows].set(new, mode="drop"), self, part)

    def resize(self, columns: int) -> KVCache:
        """Cuts the cache to `columns` columns, or pads it with zeros."""
        each = lambda arrays, axis: jax.tree.map(lambda x: resize_axis(x, axis, columns), arrays)
        return KVCache(each(self.k, self.axes.index("s")), each(self.v, 2), self.axes)

    @property
    def columns(self) -> int:
        """The number of columns, S."""
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
        """Runs `cached_attention` on one layer, whose keys and values are `kept`.

        Returns the output and the updated `kept`.
        """
        keys, values = kept
        heads, *written = cached_attention(q, k, v, keys, values, positions, mesh, self.axes)
        return heads, tuple(written)

    @property
    def places(self) -> tuple[int, int]:
        """The sizes (B, S) of an array that has an entry for each token of the cache."""
        return self.v[0][0].shape[0], self.columns

    def write(self, kept: jax.Array, new: jax.Array, positions: jax.Array, mesh: Mesh | None) -> jax.Array:
        """Writes `new` [B, T, X, Y] to `kept` [B, X, S, Y] at the tokens' `positions` [B, T].

        `kept` holds data other than keys and values for each place. As with keys, positions beyond the
        columns are not written.
        """
        rows = jnp.arange(len(positions))[:, None]
        return kept.at[rows, :, positions].set(new.astype(kept.dtype), mode="drop")


def resize_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Cuts x, or pads it with zeros, at the end of this axis."""
    x = jax.lax.slice_in_dim(x, 0, min(size, x.shape[axis]), axis=axis)
    return jnp.pad(x, [(0, size - n if i == axis else 0) for i, n in enumerate(x.shape)])


def init_cache(
    config: ModelConfig,
    rows: int,
    capacity: int,
    dtype: Any = jnp.float32,
    platform: str = "cpu",
    parts: int = 1,
) -> KVCache:
    """Makes an empty cache of `capacity` columns (tokens) for each of `rows` rows.

    Its layout is that of a JAX platform. Each layer's heads are divided over `parts` arrays.
    """
    heads, dim = config.num_key_value_heads // parts, config.head_dim
    # Every array needs a buffer of its own: XLA refuses to donate one buffer twice.
    layer = lambda shape: tuple(jnp.zeros(shape, dtype) for _ in range(parts))
    empty = lambda *shape: tuple(layer(shape) for _ in range(config.num_hidden_layers))
    values = rows, heads, capacity, dim
    if platform == "cpu":
        return KVCache(empty(rows, heads, dim, capacity), empty(*values), "bkds")
    return KVCache(empty(*values), empty(*values), "bksd")
