"""Packed rows: which tokens see which, which blocks meet, and padding to whole blocks.

B: rows; L: tokens of a row; T: queries among them; C: tokens of a block; n: blocks of a row; m: blocks of
queries.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# The score of a masked pair. Its exponential is 0; unlike with infinities, the difference of two is not NaN.
MASKED = -1e30


class Segments(NamedTuple):
    """The segments that each query sees, int [B, T] or in blocks [m, B, C].

    Attributes:
      ids: its own segment.
      parents: a segment that lies before its own and is seen too. It repeats its own where there is none.
        None: no token has another one.
    """

    ids: jax.Array
    parents: jax.Array | None

    def blocks(self, size: int) -> Segments:
        """Pads [B, T] and divides it into [m, B, size]."""
        return Segments(
            _blocks(self.ids, size), None if self.parents is None else _blocks(self.parents, size)
        )


class Row(NamedTuple):
    """The keys that queries meet.

    Attributes:
      ids: the segments of the whole row, int [B, L] or in blocks [n, B, C].
      places: where the queries lie in the row, increasing, int [T] or in blocks [m, C].
    """

    ids: jax.Array
    places: jax.Array

    @classmethod
    def of(cls, segment_ids: jax.Array) -> Row:
        """A row whose tokens are all queries."""
        return cls(segment_ids, jnp.arange(segment_ids.shape[1]))

    def blocks(self, size: int) -> Row:
        """Divides ids [B, L] into [n, B, size] and places [T] into [m, size]."""
        return Row(_blocks(self.ids, size), pad_places(size, self.places).reshape(-1, size))


def _blocks(x: jax.Array, size: int) -> jax.Array:
    """Pads [B, L] and divides it into [n, B, size]."""
    return pad_rows(size, x)[0].reshape(len(x), -1, size).swapaxes(0, 1)


def sees(segments: jax.Array, parents: jax.Array | None, keys: jax.Array) -> jax.Array:
    """True where a key's segment is a query's own or its parent.

    segments, parents: [B, T, 1]. keys: [B, 1, S].
    """
    own = segments == keys
    return own if parents is None else own | (parents == keys)


def meeting_blocks(segments: Segments, row: Row) -> tuple[jax.Array, jax.Array]:
    """Tells which blocks of queries and keys meet. Takes both in blocks.

    Returns two bool [m, n]: whether, in any row, a token of the query block may see one of the key block. The
    first counts keys of its own segment, the second those of its parent where that is another segment.

    The test compares the ranges of segments in the blocks, so it never misses a pair that meets. It is exact
    where segments lie as `grpo/packing.py` lays them. Exceptions are a block with branches of several
    prompts, and one with queries from two places of the row. Padding, at a row's end, meets that of its own
    block.
    """
    end = jnp.iinfo(jnp.int32).max
    n, _, size = row.ids.shape
    block = jnp.arange(n)
    home = row.places // size
    # Padding gets a number per block: as segment 0 it would stretch its block's range over earlier segments.
    numbered = lambda ids, block: jnp.where(ids == 0, end - n + block, ids)
    keys, queries = numbered(row.ids, block[:, None, None]), numbered(segments.ids, home[:, None])
    low, high = keys.min(axis=2), keys.max(axis=2)
    causal = home.max(axis=1)[:, None] >= block
    meet = lambda first, last: causal & jnp.any((first[:, None] <= high) & (low <= last[:, None]), axis=2)
    own = meet(queries.min(axis=2), queries.max(axis=2))
    if segments.parents is None:
        return own, jnp.zeros_like(own)
    other = segments.parents != segments.ids
    first, last = jnp.where(other, segments.parents, end), jnp.where(other, segments.parents, -1)
    return own, meet(first.min(axis=2), last.max(axis=2))


def pad_rows(multiple: int, *arrays: jax.Array) -> list[jax.Array]:
    """Pads the tokens of [B, L, ...] with zeros at the end, where causality lets no token attend to them."""
    pad = -arrays[0].shape[1] % multiple
    return [jnp.pad(x, [(0, pad if axis == 1 else 0) for axis in range(x.ndim)]) for x in arrays]


def pad_places(multiple: int, places: jax.Array) -> jax.Array:
    """Pads int [T] as `pad_rows` pads the queries. Padding lies where the last token does."""
    return jnp.pad(places, (0, -len(places) % multiple), mode="edge")


def pad_heads(size: int, *arrays: jax.Array) -> list[jax.Array]:
    """Pads the head dimension of [B, L, H, D] with zeros, which change no product."""
    return [jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, size - x.shape[3]))) for x in arrays]
