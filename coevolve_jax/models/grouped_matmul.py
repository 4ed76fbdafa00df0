"""The grouped matrix product for NVIDIA GPUs: tokens sorted by expert, each times its expert's matrix.

XLA has no such instruction for GPUs. It makes `jax.lax.ragged_dot` a dense product, with a copy of the tokens
for each expert. These kernels (Pallas for Triton) read every token once per block of columns.

M: tokens, sorted by expert; E: experts; K: the summed dimension; N: columns.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


class Blocks(NamedTuple):
    """Tile sizes of a kernel's program, powers of two. Not tuned: no such GPU was at hand.

    rows, columns: of its tile of the result. depth: entries of the summed axis that it multiplies in one
    turn.
    """

    rows: int
    columns: int
    depth: int


def grouped_matmul(
    x: jax.Array,
    matrices: jax.Array,
    sizes: jax.Array,
    *,
    blocks: Blocks | None = None,
    interpret: bool = False,
) -> jax.Array:
    """y[m] = x[m] @ matrices[e] for each token m of expert e, as `jax.lax.ragged_dot`.

    Args:
      x: [M, K], the tokens of expert 0 first, then those of expert 1, and so on.
      matrices: [E, K, N], of x's type.
      sizes: int32 [E], tokens of each expert. Rows beyond their sum belong to none.
      interpret: run the kernels step by step in JAX, on any platform.

    Returns:
      [M, N] in x's type, with sums in float32. Rows that belong to no expert are undefined, in the result and
        in its gradient.
    """
    blocks = blocks or Blocks(rows=128, columns=128, depth=128 // x.dtype.itemsize)
    # Within shard_map all operands of a kernel must vary over the same axes.
    varying = lambda a: jax.typeof(a).manual_axis_type.varying
    axes = varying(x) | varying(matrices) | varying(sizes)
    vary = lambda a: jax.lax.pcast(a, tuple(axes - varying(a)), to="varying")
    return _grouped(vary(x), vary(matrices), vary(sizes), blocks, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped(x, matrices, sizes, blocks: Blocks, interpret: bool):
    return _product(x, matrices, sizes, blocks, interpret, transposed=False)


def _forward(x, matrices, sizes, blocks, interpret):
    return _grouped(x, matrices, sizes, blocks, interpret), (x, matrices, sizes)


def _backward(blocks, interpret, residuals, g):
    x, matrices, sizes = residuals
    dx = _product(g, matrices, sizes, blocks, interpret, transposed=True)
    return dx, _outer(x, g, sizes, blocks, interpret), None


_grouped.defvjp(_forward, _backward)


def _product(x, matrices, sizes, blocks: Blocks, interpret: bool, transposed: bool) -> jax.Array:
    """Multiplies x [M, K] with matrices [E, K, N], or [E, N, K] where they are `transposed`."""
    M, K = x.shape
    N = matrices.shape[1 if transposed else 2]
    expert, first, end = _tiles(sizes, M, blocks.rows)

    def kernel(expert_ref, first_ref, end_ref, x_ref, matrices_ref, out_ref):
        t = pl.program_id(1)
        e, rows = expert_ref[t], first_ref[t] + jnp.arange(blocks.rows)
        columns = pl.program_id(0) * blocks.columns + jnp.arange(blocks.columns)
        real, shown = rows[:, None] < end_ref[t], columns[None, :] < N

        def turn(i, total):
            depth = i * blocks.depth + jnp.arange(blocks.depth)
            left = _load(x_ref.at[rows[:, None], depth[None, :]], real & (depth[None, :] < K))
            place = (columns[None, :], depth[:, None]) if transposed else (depth[:, None], columns[None, :])
            right = _load(matrices_ref.at[e, *place], shown & (depth[:, None] < K))
            return total + plgpu.dot(left, right)

        @pl.when(first_ref[t] < end_ref[t])
        def _():
            total = jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
            total = jax.lax.fori_loop(0, pl.cdiv(K, blocks.depth), turn, total)
            plgpu.store(
                out_ref.at[rows[:, None], columns[None, :]], total.astype(out_ref.dtype), mask=real & shown
            )

    grid = pl.cdiv(N, blocks.columns), len(expert)
    return _call(kernel, grid, (M, N), interpret, expert, first, end, x, matrices)


def _load(ref, mask) -> jax.Array:
    return plgpu.load(ref, mask=mask, other=0)


def _call(kernel, grid: tuple[int, ...], shape: tuple[int, ...], interpret: bool, *operands) -> jax.Array:
    x = operands[-1]
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=3),
        name="grouped_matmul",
    )(*operands)


def _outer(x, g, sizes, blocks: Blocks, interpret: bool) -> jax.Array:
    """For each expert, x [M, K] transposed times g [M, N], over its tokens: [E, K, N]."""
    K, N = x.shape[1], g.shape[1]
    end = jnp.cumsum(sizes)
    first = end - sizes

    def kernel(first_ref, end_ref, x_ref, g_ref, out_ref):
        e = pl.program_id(2)
        down = pl.program_id(1) * blocks.rows + jnp.arange(blocks.rows)
        columns = pl.program_id(0) * blocks.columns + jnp.arange(blocks.columns)
        first, end = first_ref[e], end_ref[e]

        def turn(i, total):
            rows = first + i * blocks.depth + jnp.arange(blocks.depth)
            left = _load(x_ref.at[rows[None, :], down[:, None]], (rows[None, :] < end) & (down[:, None] < K))
            right = _load(
                g_ref.at[rows[:, None], columns[None, :]], (rows[:, None] < end) & (columns[None, :] < N)
            )
            return total + plgpu.dot(left, right)

        total = jnp.zeros((blocks.rows, blocks.columns), jnp.float32)
        total = jax.lax.fori_loop(0, pl.cdiv(end - first, blocks.depth), turn, total)
        mask = (down[:, None] < K) & (columns[None, :] < N)
        plgpu.store(out_ref.at[e, down[:, None], columns[None, :]], total.astype(out_ref.dtype), mask=mask)

    grid = pl.cdiv(N, blocks.columns), pl.cdiv(K, blocks.rows), len(sizes)
    return _call(kernel, grid, (len(sizes), K, N), interpret, first, end, x, g)


def _tiles(sizes: jax.Array, tokens: int, rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Divides the tokens into tiles of `rows` tokens, each of a single expert.

    Returns each tile's expert, its first token, and the end of its expert's tokens. The number of tiles is
    the largest that any `sizes` can need; surplus tiles hold no token.
    """
    end = jnp.cumsum(sizes)
    tiles = -(-sizes // rows)
    last = jnp.cumsum(tiles)
    t = jnp.arange(pl.cdiv(tokens, rows) + len(sizes) - 1, dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(last, t, side="right"), len(sizes) - 1).astype(jnp.int32)
    first = (end - sizes)[expert] + (t - (last - tiles)[expert]) * rows
    return expert, first, end[expert]
