"""Packed rows: which tokens see which, which blocks of them meet, and what fills a row up to whole blocks.

B: rows; L: tokens of a row; T: those of them that are queries; C: tokens of a block; n: blocks of a row; m: of queries.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# A score that does not count. Its exponential is 0 and, unlike that of an infinity, no difference of two of them is NaN.
MASKED = -1e30


class Segments(NamedTuple):
    """Of each query, int [B, T] or in blocks [m, B, C]: its own segment, and the one that lies before that and is seen
    besides; its own where there is none. parents None: no token has another segment's."""

    ids: jax.Array
    parents: jax.Array | None

    def blocks(self, size: int) -> Segments:
        """[B, T] as [m, B, size], padded."""
        return Segments(
            _blocks(self.ids, size), None if self.parents is None else _blocks(self.parents, size)
        )


class Row(NamedTuple):
    """The keys that queries meet. ids: the segments of the whole row, int [B, L] or in blocks [n, B, C]. places: where in
    that the queries lie, increasing, int [T] or in blocks [m, C]."""

    ids: jax.Array
    places: jax.Array

    @classmethod
    def of(cls, segment_ids: jax.Array) -> Row:
        """Where the queries are all of it."""
        return cls(segment_ids, jnp.arange(segment_ids.shape[1]))

    def blocks(self, size: int) -> Row:
        """ids [B, L] as [n, B, size]; places [T] as [m, size]."""
        return Row(_blocks(self.ids, size), pad_places(size, self.places).reshape(-1, size))


def _blocks(x: jax.Array, size: int) -> jax.Array:
    """[B, L] as [n, B, size], padded."""
    return pad_rows(size, x)[0].reshape(len(x), -1, size).swapaxes(0, 1)


def sees(segments: jax.Array, parents: jax.Array | None, keys: jax.Array) -> jax.Array:
    """Where a key's segment is a query's own or its parent. segments, parents: [B, T, 1]; keys: [B, 1, S]."""
    own = segments == keys
    return own if parents is None else own | (parents == keys)


def meeting_blocks(segments: Segments, row: Row) -> tuple[jax.Array, jax.Array]:
    """bool [m, n] both, from both in blocks: whether in any row a token of a block of queries may see one of a block
    of keys that is of its own segment, and one of its parent, where that is another.

    It goes by the range of a block's segments: exact where segments lie as `grpo/packing.py` lays them (but where a block
    has branches of several prompts, or queries from two places of the row), and never too few. Padding, which is at a row's
    end, meets that of its own block.
    """
    end = jnp.iinfo(jnp.int32).max
    n, _, size = row.ids.shape
    block = jnp.arange(n)
    home = row.places // size
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
    """Zeros after the tokens of [B, L, ...]: the last positions, to which causality lets no token attend."""
    pad = -arrays[0].shape[1] % multiple
    return [jnp.pad(x, [(0, pad if axis == 1 else 0) for axis in range(x.ndim)]) for x in arrays]


def pad_places(multiple: int, places: jax.Array) -> jax.Array:
    """int [T] padded as `pad_rows` pads the queries: what fills the last block lies where its last token does."""
    return jnp.pad(places, (0, -len(places) % multiple), mode="edge")


def pad_heads(size: int, *arrays: jax.Array) -> list[jax.Array]:
    """Zeros after the head dimension of [B, L, H, D]: they change no product."""
    return [jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, size - x.shape[3]))) for x in arrays]
