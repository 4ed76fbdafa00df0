"""Log-probabilities of given tokens without the full [tokens, vocabulary] matrix.

Logits exist for one block of positions and one tile of the vocabulary at a time. The forward pass keeps a
running maximum and sum over the tiles, as flash attention does over keys (arXiv 2205.14135). The backward
pass computes each tile's logits again.

On a mesh each device does so for its own positions (`sharded_logprobs.py`).

R: rows; L: tokens of a row; D: hidden size; V: vocabulary; N: blocks of a row; C: columns of a block;
n: R * C; T: entries of a tile.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float32, Int

from coevolve_jax.distributed import sharding
from coevolve_jax.grpo import sharded_logprobs
from coevolve_jax.models import products

# Logits of 256 x 2,048 stay in a CPU's cache between the passes over them. Elsewhere the vocabulary is one
# tile: products are so fast there that fewer and larger ones are better.
CPU_BLOCK, CPU_TILE = 256, 2048
SCOPE = "logprobs"  # names its loops in compiled programs
LOWEST = -1e30  # for logits that do not count; finite, because 0 * -inf is NaN


class _Plan(NamedTuple):
    """The static settings of a computation.

    Attributes:
      columns: C.
      tile: T.
      axis: the unembedding's axis of V.
      temperature: divides the logits.
      frozen: the unembedding gets no gradient.
      platform: the program's target.
      mesh: the mesh over which rows or vocabulary are spread, if they are.
      matmul_dtype: as for `token_logprobs`.
    """

    columns: int
    tile: int
    axis: int
    temperature: float
    frozen: bool
    platform: str
    mesh: Mesh | None
    matmul_dtype: Any


def token_logprobs(
    hidden: Float[Array, "*rows L D"],
    unembedding: Float[Array, "D V"] | Float[Array, "V D"],
    targets: Int[Array, "*rows L"],
    *,
    vocab_axis: int = 1,
    mask: Bool[Array, "*rows L"] | None = None,
    temperature: float = 1.0,
    chunk: int = 2048,
    frozen: bool = False,
    platform: str = "cpu",
    mesh: Mesh | None = None,
    matmul_dtype: Any = None,
) -> tuple[Float32[Array, "*rows L"], Float32[Array, "*rows L"]]:
    """log p(target) and the entropy at each position, in nats.

    Logits are computed only where the mask is True, and for padding. Padding fills the last block, and rows
    with fewer such positions than the fullest one. Each row moves its own positions together and takes them
    block by block, so rows may lie on different devices.

    Args:
      hidden: of R rows, or of one without that axis.
      unembedding: [V, D] with vocab_axis=0. It is used in the type of `hidden`, and so is the gradient of the
        logits. The unembedding's own gradient is summed in float32.
      mask: the results are 0 where it is False. None: True everywhere.
      temperature: logits are divided by it, as in the sampler.
      chunk: the most positions whose logits are held at once, rounded to whole columns (at least one).
      frozen: the unembedding is not trained. Its gradient, a third of the backward pass, is zeros.
      platform: the program's target (cpu, gpu, tpu), which decides the sizes of blocks.
      mesh: given where rows and unembedding lie on several devices. Its parts divide the rows.
      matmul_dtype: dtype of the products' operands, as for `Decoder`. None: that of `hidden`.

    Returns:
      logprobs, entropy (no gradient flows through the entropy).
    """
    if hidden.ndim == 2:
        single = token_logprobs(
            hidden[None],
            unembedding,
            targets[None],
            vocab_axis=vocab_axis,
            mask=None if mask is None else mask[None],
            temperature=temperature,
            chunk=chunk,
            frozen=frozen,
            platform=platform,
            mesh=mesh,
            matmul_dtype=matmul_dtype,
        )
        return single[0][0], single[1][0]

    rows, length, _ = hidden.shape
    columns = block_columns(rows, length, chunk, platform)
    tile = unembedding.shape[vocab_axis] // (1 if mesh is None else sharding.vocabulary_parts(mesh))
    if platform == "cpu":
        tile = _even(tile, CPU_TILE)
    mask = jnp.ones(targets.shape, bool) if mask is None else mask
    plan = _Plan(columns, tile, vocab_axis, temperature, frozen, platform, mesh, matmul_dtype)
    return _masked_logprobs(plan, hidden, unembedding, targets, mask)


def block_columns(rows: int, length: int, chunk: int, platform: str) -> int:
    """Columns of a block: how many positions of each of `rows` rows have their logits at once."""
    columns = min(max(1, chunk // rows), length)
    return min(columns, CPU_BLOCK) if platform == "cpu" else columns


def _even(size: int, limit: int, multiple: int = 16) -> int:
    """Size of the tiles, about `limit` at most, that cover `size` with the least overlap."""
    tiles = -(-size // limit)
    return min(size, -(-size // (tiles * multiple)) * multiple)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _masked_logprobs(plan: _Plan, hidden: jax.Array, matrix: jax.Array, targets: jax.Array, mask: jax.Array):
    return _forward(plan, hidden, matrix, targets, mask)[0]


def _forward(plan: _Plan, hidden, matrix, targets, mask):
    order, back, used = _order(plan.columns, mask)
    blocks = tuple(_blocks(plan.columns, x, order) for x in (_where(mask, hidden), targets))
    loop, gathered = functools.partial(_statistics, plan), matrix
    if plan.mesh is not None:
        gathered = sharded_logprobs.gather(plan.mesh, plan.axis, matrix, hidden.dtype)
        loop = sharded_logprobs.statistics(plan.mesh, plan.axis, loop)
    peak, total, surprise, picked = loop(used, gathered, blocks)
    logz = peak + jnp.log(total)  # below, results use logits minus the peak: differences of small numbers
    outputs = picked - jnp.log(total), jnp.log(total) - surprise / total
    outputs = tuple(jnp.where(mask, _unblock(x, back), 0) for x in outputs)
    return outputs, (hidden, matrix, gathered, targets, mask, logz)


@jax.named_scope(SCOPE)
def _statistics(plan: _Plan, used, matrix, blocks):
    """Four statistics of each position, [N, n] each.

    The first is the largest logit. The others use logits minus that: the sum of exponentials, the sum of
    exponential times logit, and the target's logit.
    """
    h_NxnxD, t_Nxn = blocks

    def one_tile(i, stats):
        start, first, tile = _tile(plan, matrix, i)

        def one_block(b, stats):
            peak, total, surprise, picked = (x[b] for x in stats)
            logits, place = _logits(plan, h_NxnxD[b], tile, first), t_Nxn[b] - start
            new_peak = jnp.maximum(peak, jnp.max(logits, axis=-1))
            lower = logits - new_peak[:, None]
            exps = jnp.exp(lower)
            if plan.platform == "cpu":
                # Without the barrier its compiler computes the exponentials again for each of the two sums.
                exps, lower = jax.lax.optimization_barrier((exps, lower))
            rise = peak - new_peak
            shrink = jnp.exp(rise)
            here = jnp.take_along_axis(lower, jnp.clip(place, 0, plan.tile - 1)[:, None], axis=-1)[:, 0]
            new = (
                new_peak,
                shrink * total + jnp.sum(exps, axis=-1),
                shrink * (surprise + rise * total) + jnp.sum(exps * lower, axis=-1),
                jnp.where((place >= first) & (place < plan.tile), here, picked + rise),
            )
            return tuple(x.at[b].set(y) for x, y in zip(stats, new))

        return jax.lax.fori_loop(0, used, one_block, stats)

    nothing = jnp.zeros(t_Nxn.shape)
    # A target outside the vocabulary is never picked.
    stats = nothing + LOWEST, nothing, nothing, nothing + jnp.nan
    return _each_tile(plan, matrix, one_tile, stats)


def _backward(plan: _Plan, residuals, cotangents):
    hidden, matrix, gathered, targets, mask, logz = residuals
    order, back, used = _order(plan.columns, mask)
    blocks = tuple(_blocks(plan.columns, x, order) for x in (_where(mask, hidden), targets))
    g_Nxn = _blocks(plan.columns, jnp.where(mask, cotangents[0], 0), order) / plan.temperature
    loop = functools.partial(_gradients, plan)
    if plan.mesh is not None:
        loop = sharded_logprobs.gradients(plan.mesh, plan.axis, loop)
    d_hidden, d_matrix = loop(used, gathered, (*blocks, g_Nxn, logz))
    # Move back by a gather: the transpose of the first gather is a scatter, which is serial on CPU.
    d_hidden = _where(mask, _unblock(d_hidden, back)).astype(hidden.dtype)
    return d_hidden, None if d_matrix is None else d_matrix.astype(matrix.dtype), None, None


@jax.named_scope(SCOPE)
def _gradients(plan: _Plan, used, matrix, blocks):
    """Gradients by the hidden states, [N, n, D], and by the matrix (None where it is frozen)."""
    h_NxnxD, t_Nxn, g_Nxn, logz = blocks

    def one_tile(i, carry):
        d_hidden, d_matrix = carry
        start, first, tile = _tile(plan, matrix, i)

        def one_block(b, carry):
            d_hidden, d_tile = carry
            h, place = h_NxnxD[b], t_Nxn[b] - start
            logits = _logits(plan, h, tile, first)
            # A one-hot product, not a scatter, which XLA runs serially on CPU.
            chosen = jnp.where(place >= first, place, -1)[:, None] == jnp.arange(plan.tile)
            d_logits = (g_Nxn[b][:, None] * (chosen - jnp.exp(logits - logz[b][:, None]))).astype(h.dtype)
            d_hidden = d_hidden.at[b].add(_product(plan, d_logits, tile, 1, plan.axis).astype(d_hidden.dtype))
            if plan.frozen:
                return d_hidden, None
            left, right = (d_logits, h) if plan.axis == 0 else (h, d_logits)
            return d_hidden, d_tile + _product(plan, left, right, 0, 0)

        d_tile = None if plan.frozen else _slice(plan, d_matrix, start).astype(jnp.float32)
        d_hidden, d_tile = jax.lax.fori_loop(0, used, one_block, (d_hidden, d_tile))
        return d_hidden, None if plan.frozen else _put(plan, d_matrix, d_tile.astype(d_matrix.dtype), start)

    split = plan.mesh is not None and sharding.vocabulary_parts(plan.mesh) > 1
    tiles = split or matrix.shape[plan.axis] > plan.tile  # tiles or devices each add a term
    d_hidden = jnp.zeros(h_NxnxD.shape, jnp.float32 if tiles else h_NxnxD.dtype)
    d_matrix = None if plan.frozen else jnp.zeros(matrix.shape, jnp.float32)
    return _each_tile(plan, matrix, one_tile, (d_hidden, d_matrix))


_masked_logprobs.defvjp(_forward, _backward)


def _each_tile(plan: _Plan, matrix: jax.Array, body, carry):
    tiles = -(-matrix.shape[plan.axis] // plan.tile)
    return body(0, carry) if tiles == 1 else jax.lax.fori_loop(0, tiles, body, carry)


def _tile(plan: _Plan, matrix: jax.Array, i: jax.Array | int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns where tile i starts in the vocabulary, its first entry that counts, and the tile itself.

    The last tile ends with the vocabulary, so it may repeat entries of the one before. These do not count
    again.
    """
    start = jnp.minimum(i * plan.tile, matrix.shape[plan.axis] - plan.tile)
    return start, i * plan.tile - start, _slice(plan, matrix, start)


def _slice(plan: _Plan, matrix: jax.Array, start: jax.Array) -> jax.Array:
    if matrix.shape[plan.axis] == plan.tile:
        return matrix
    return jax.lax.dynamic_slice_in_dim(matrix, start, plan.tile, plan.axis)


def _put(plan: _Plan, matrix: jax.Array, tile: jax.Array, start: jax.Array) -> jax.Array:
    if matrix.shape[plan.axis] == plan.tile:
        return tile
    return jax.lax.dynamic_update_slice_in_dim(matrix, tile, start, plan.axis)


def _logits(plan: _Plan, h: jax.Array, tile: jax.Array, first: jax.Array) -> jax.Array:
    """Maps h [n, D] to logits [n, T], float32; LOWEST before the first entry that counts."""
    logits = _product(plan, h, tile, 1, 1 - plan.axis) / plan.temperature
    return jnp.where(jnp.arange(plan.tile) >= first, logits, LOWEST)


def _product(plan: _Plan, a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """Multiplies and sums over those axes, in the type of `a`, with sums in float32."""
    if plan.matmul_dtype is not None:
        return products.product(a, b, a_axis, b_axis)
    dimensions = ((a_axis,), (b_axis,)), ((), ())
    return jax.lax.dot_general(a, b.astype(a.dtype), dimensions, preferred_element_type=jnp.float32)


def _order(columns: int, mask: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Orders the columns of each row, those where the mask is True first.

    Returns that order [R, N * C] and the place of each column in it [R, L]. The third result is the number of
    blocks that hold such columns.
    """
    padded = jnp.pad(mask, ((0, 0), (0, -mask.shape[1] % columns)))
    order = jnp.argsort(~padded, axis=1, stable=True)
    used = -(-jnp.max(jnp.sum(mask, axis=1)) // columns)
    return order, jnp.argsort(order, axis=1)[:, : mask.shape[1]], used


def _blocks(columns: int, x: jax.Array, order: jax.Array) -> jax.Array:
    """Puts x [R, L, ...] in that order and divides it into [N, R * C, ...]."""
    x = jnp.pad(x, ((0, 0), (0, order.shape[1] - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
    x = _take(x, order).reshape(len(x), -1, columns, *x.shape[2:]).swapaxes(0, 1)
    return x.reshape(len(x), -1, *x.shape[3:])


def _unblock(x: jax.Array, back: jax.Array) -> jax.Array:
    """Puts [N, R * C, ...] back in its own order, [R, L, ...]."""
    rows = len(back)
    x = x.reshape(len(x), rows, -1, *x.shape[2:]).swapaxes(0, 1)
    return _take(x.reshape(rows, -1, *x.shape[3:]), back)


def _where(mask: jax.Array, x: jax.Array) -> jax.Array:
    """x [R, L, D] where the mask is True, else 0. NaN elsewhere would spoil sums over positions."""
    return jnp.where(mask[..., None], x, 0)


def _take(x: jax.Array, order: jax.Array) -> jax.Array:
    """Takes the columns of each row of x [R, L, ...] in the order [R, any]."""
    return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)
