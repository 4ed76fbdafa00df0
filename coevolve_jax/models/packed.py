"""Packed rows: which tokens see which, which blocks of them meet, and what fills a row up to whole blocks.

B: rows; L: tokens of a row; C: tokens of a block; n: blocks of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

# A score that does not count. Its exponential is 0 and, unlike that of an infinity, no difference of two of them is NaN.
MASKED = -1e30


class Segments(NamedTuple):
    """Of each token, int [B, L] or in blocks [n, B, C]: its own segment, and the one that lies before that and is seen
    besides; its own where there is none. parents None: no token has another segment's."""

    ids: jax.Array
    parents: jax.Array | None

    def blocks(self, size: int) -> Segments:
        """[B, L] as [n, B, size], padded."""
        cut = lambda x: pad_rows(size, x)[0].reshape(len(x), -1, size).swapaxes(0, 1)
        return Segments(cut(self.ids), None if self.parents is None else cut(self.parents))


def sees(segments: jax.Array, parents: jax.Array | None, keys: jax.Array) -> jax.Array:
    """Where a key's segment is a query's own or its parent. segments, parents: [B, T, 1]; keys: [B, 1, S]."""
    own = segments == keys
    return own if parents is None else own | (parents == keys)


def meeting_blocks(segments: Segments) -> tuple[jax.Array, jax.Array]:
    """bool [n, n] both, from segments in blocks: whether in any row a token of a block of queries may see one of a block
    of keys that is of its own segment, and one of its parent, where that is another.

    It goes by the range of a block's segments: exact where segments lie as `grpo/packing.py` lays them (but where a block
    has branches of several prompts), and never too few. Padding, which is at a row's end, meets that of its own block.
    """
    end = jnp.iinfo(jnp.int32).max
    padding = end - len(segments.ids) + jnp.arange(len(segments.ids))[:, None, None]
    ids = jnp.where(segments.ids == 0, padding, segments.ids)
    low, high = ids.min(axis=2), ids.max(axis=2)
    meet = lambda first, last: jnp.tril(jnp.any((first[:, None] <= high) & (low <= last[:, None]), axis=2))
    if segments.parents is None:
        return meet(low, high), jnp.zeros((len(ids), len(ids)), bool)
    other = segments.parents != segments.ids
    first, last = jnp.where(other, segments.parents, end), jnp.where(other, segments.parents, -1)
    return meet(low, high), meet(first.min(axis=2), last.max(axis=2))


def pad_rows(multiple: int, *arrays: jax.Array) -> list[jax.Array]:
    """Zeros after the tokens of [B, L, ...]: the last positions, to which causality lets no token attend."""
    pad = -arrays[0].shape[1] % multiple
    return [jnp.pad(x, [(0, pad if axis == 1 else 0) for axis in range(x.ndim)]) for x in arrays]


def pad_heads(size: int, *arrays: jax.Array) -> list[jax.Array]:
    """Zeros after the head dimension of [B, L, H, D]: they change no product."""
    return [jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, size - x.shape[3]))) for x in arrays]
