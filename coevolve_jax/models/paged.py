"""The KV cache in pages: a conversation's pages lie anywhere, and their number grows with its length.

This is PagedAttention (arXiv 2309.06180), with the kernels that come with JAX.

B: rows; T: new tokens of a row; N: pages; M: pages of a row; H: query heads; K: key-value heads; D: head_dim.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from coevolve_jax.distributed import sharding
from coevolve_jax.models.attention import attend
from coevolve_jax.models.config import ModelConfig

PAGE = 64  # tokens
BLOCK = 4  # pages that a kernel takes at once; M is a multiple
STRIDE = PAGE * BLOCK  # tokens; a row's columns are a multiple
SPLITS = 4  # parts of a row's pages that GPUs work on in parallel


@flax.struct.dataclass
class PagedCache:
    """Keys (rotated) and values. Column s of row b is place s % PAGE of page table[b, s // PAGE].

    k, v: per layer [K, N, PAGE, D]. table: int32 [B, M]. An entry without a page may name any. On a mesh each
    device has its own pages for its own rows, and the table counts them from 0.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    table: jax.Array

    @property
    def columns(self) -> int:
        """The number of tokens that a row can have."""
        return self.table.shape[1] * PAGE

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kept: Sequence[jax.Array],
        positions: jax.Array,
        mesh: Mesh | None,
        platform: str,
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Does what `KVCache.attend` does, on pages."""
        heads, pages, rows = (sharding.DECODED[kind] for kind in ("heads", "pages", "rows"))
        attend = _on_each(
            functools.partial(_write_and_attend, platform=platform),
            mesh,
            (heads, heads, heads, pages, pages, rows, rows),
            (heads, (pages, pages)),
        )
        return attend(q, k, v, *kept, self.table, positions)

    @property
    def places(self) -> tuple[int, int]:
        """The sizes (N, PAGE) of an array that has an entry for each token of the cache."""
        return self.v[0].shape[1], PAGE

    def write(self, kept: jax.Array, new: jax.Array, positions: jax.Array, mesh: Mesh | None) -> jax.Array:
        """Does what `KVCache.write` does, to `kept` [N, X, PAGE, Y]."""
        rows = sharding.DECODED["rows"]
        return _on_each(_write, mesh, (rows,) * 4, rows)(kept, new, self.table, positions)

    def with_table(self, table: Any) -> PagedCache:
        """The same pages for other rows."""
        return self.replace(table=table)  # type: ignore[attr-defined]


def init_pages(config: ModelConfig, pages: int, dtype: Any) -> PagedCache:
    """Makes a cache of so many pages, without rows."""
    shape = config.num_key_value_heads, pages, PAGE, config.head_dim
    empty = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(config.num_hidden_layers))
    return PagedCache(empty(), empty(), jnp.zeros((0, BLOCK), jnp.int32))


def _on_each(function: Any, mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Any:
    """Runs the function on each device's part, if there are several devices."""
    if mesh is None or mesh.size == 1:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _places(table, positions, pages):
    """Finds the page, and the place in it, of the tokens at `positions`.

    Returns whether each has a page, the page and the place. A token beyond the table gets the page number
    `pages`, which does not exist.
    """
    here = positions < table.shape[1] * PAGE
    page = jnp.take_along_axis(table, jnp.where(here, positions // PAGE, 0), axis=1)
    return here, jnp.where(here, page, pages), positions % PAGE


def _write(kept, new, table, positions):
    _, page, place = _places(table, positions, len(kept))
    return kept.at[page, :, place].set(new.astype(kept.dtype), mode="drop")


def _write_and_attend(q, k, v, keys, values, table, positions, platform):
    """Writes the new tokens' keys and values, then attends to each row's columns up to a token's own."""
    (heads, pages, _, size), rows = keys.shape, table.shape[1]
    here, *of_head = _places(table, positions, pages)
    # Index every head explicitly, as in attention.cached_attention.
    place = jnp.arange(heads)[:, None, None], *of_head
    write = lambda x, new: x.at[place].set(new.transpose(2, 0, 1, 3).astype(x.dtype), mode="drop")
    keys, values = write(keys, k), write(values, v)
    # The kernels compute in bfloat16 whatever their inputs, so other dtypes take the plain path.
    kernel = KERNELS.get(platform) if keys.dtype == jnp.bfloat16 and size % 128 == 0 else None
    if kernel and q.shape[1] == 1:
        lengths = jnp.where(here, positions + 1, 1)[:, 0]
        out = kernel((q[:, 0] * size**-0.5).astype(q.dtype), keys, values, lengths, table)[:, None]
    else:
        gather = lambda x: x[:, table].reshape(heads, len(table), -1, size).swapaxes(0, 1)
        out = attend(q, gather(keys), gather(values), jnp.arange(rows * PAGE) <= positions[:, :, None])
    return out.astype(v.dtype), (keys, values)


def tpu_kernel(q, keys, values, lengths, table):
    """JAX's kernel for TPUs.

    q: [B, H, D], scaled. lengths: int32 [B], tokens that a row attends to. Returns [B, H, D].
    """
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    return paged_attention(q, keys, values, lengths, table, pages_per_compute_block=BLOCK)


def gpu_kernel(q, keys, values, lengths, table, interpret=False):
    """JAX's kernel for GPUs. It takes the arguments of `tpu_kernel`."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    return paged_attention(
        q, keys, values, table, lengths, pages_per_compute_block=1, k_splits=SPLITS, interpret=interpret
    )


KERNELS = {"tpu": tpu_kernel, "gpu": gpu_kernel}
