"""Log-probabilities of given tokens without the full [tokens, vocabulary] matrix.

R: rows; L: tokens of a row; D: hidden size; V: vocabulary; N: blocks of a row; C: columns of a block.
"""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

# Positions of a row that the CPU takes at once: few, so that little is computed beside what is needed, and enough
# that adding up the gradient of the unembedding takes little of the time of its products.
BLOCK = 256


@dataclasses.dataclass(frozen=True)
class _Plan:
    """logits_of: hidden [R * C, D] and what the unembedding closes over -> float32 logits [R * C, V]. size: C.
    kept: blocks whose exponentials are kept for the backward pass."""

    logits_of: Callable[..., jax.Array]
    size: int
    kept: int


def token_logprobs(
    unembed: Callable[[jax.Array], jax.Array],
    hidden: jax.Array,
    targets: jax.Array,
    *,
    mask: jax.Array | None = None,
    temperature: float = 1.0,
    chunk: int = 2048,
) -> tuple[jax.Array, jax.Array]:
    """log p(target) and the entropy at each position, in nats.

    Of the positions where the mask is True, and of no more than a block beside them, logits are computed. Each
    row's are moved together for this and taken block by block, so that rows may lie on different devices. What
    `chunk` positions gave is kept for the backward pass; where there are more, their logits are computed again.

    Args:
      unembed: [n, D] -> logits [n, V].
      hidden: [R, L, D] or [L, D]; targets: int32 [R, L] or [L].
      mask: bool, like targets; what is returned where it is False is 0. None: True everywhere.
      temperature: logits are divided by it, as the sampler does.
      chunk: positions whose logits are held at once, rounded to whole columns (at least one).

    Returns:
      logprobs, entropy (no gradient flows through the entropy), float32, like targets.
    """
    if hidden.ndim == 2:
        single = token_logprobs(unembed, hidden[None], targets[None], mask=None if mask is None else mask[None],
                                temperature=temperature, chunk=chunk)
        return single[0][0], single[1][0]

    rows, length, width = hidden.shape
    columns = min(max(1, chunk // rows), length)
    # Elsewhere products are so fast that adding up the gradient of the unembedding must happen rarely.
    size = min(columns, BLOCK) if jax.default_backend() == "cpu" else columns
    mask = jnp.ones(targets.shape, bool) if mask is None else mask
    # What it closes over, the unembedding's matrix, becomes an argument, so that it can have a gradient.
    unembed, captured = jax.closure_convert(unembed, jnp.zeros((rows * size, width), hidden.dtype))
    logits_of = lambda h, *captured: unembed(h, *captured).astype(jnp.float32) / temperature
    plan = _Plan(logits_of, size, columns // size)
    return _masked_logprobs(plan, hidden, captured, targets, mask)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _masked_logprobs(plan: _Plan, hidden: jax.Array, captured: list[Any], targets: jax.Array, mask: jax.Array):
    return _forward(dataclasses.replace(plan, kept=0), hidden, captured, targets, mask)[0]


def _forward(plan: _Plan, hidden, captured, targets, mask):
    order, back, used = _order(plan.size, mask)
    h_NxRxCxD, t_NxRxC = (_blocks(plan.size, x, order) for x in (hidden, targets))
    blocks, n = len(t_NxRxC), t_NxRxC[0].size
    kept = min(plan.kept, blocks)
    vocabulary = jax.eval_shape(plan.logits_of, h_NxRxCxD[0].reshape(n, -1), *captured).shape[-1]

    def one_block(keep, i, carry):
        logprobs, entropy, norm, saved = carry
        logits = plan.logits_of(h_NxRxCxD[i].reshape(n, -1), *captured)
        peak = jnp.max(logits, axis=-1)
        lower = logits - peak[:, None]
        exps = jnp.exp(lower)
        surprise = exps * lower
        if keep:
            # Written once and then read: where the compiler takes them anew for each of their uses, exponentials and
            # sums of products cost more than a pass over memory.
            exps, surprise = jax.lax.optimization_barrier((exps, surprise))
            saved = saved.at[i].set(exps)
        total = jnp.sum(exps, axis=-1)
        logz = peak + jnp.log(total)
        uncertain = jnp.log(total) - jnp.sum(surprise, axis=-1) / total
        picked = jnp.take_along_axis(logits, t_NxRxC[i].reshape(n, 1), axis=-1)[:, 0]
        return logprobs.at[i].set(picked - logz), entropy.at[i].set(uncertain), norm.at[i].set(total), saved

    nothing = jnp.zeros((blocks, n))
    carry = nothing, nothing, nothing, jnp.zeros((kept, n, vocabulary))
    logprobs, entropy, norm, saved = _each_block(one_block, kept, blocks, used, carry)
    outputs = tuple(jnp.where(mask, _unblock(x.reshape(t_NxRxC.shape), back), 0) for x in (logprobs, entropy))
    return outputs, (hidden, captured, targets, mask, norm, saved)


def _backward(plan: _Plan, residuals, cotangents):
    hidden, captured, targets, mask, norm, saved = residuals
    order, back, used = _order(plan.size, mask)
    h_NxRxCxD, t_NxRxC = (_blocks(plan.size, x, order) for x in (hidden, targets))
    g_NxRxC = _blocks(plan.size, jnp.where(mask, cotangents[0], 0), order)
    n, kept = t_NxRxC[0].size, len(saved)

    def one_block(keep, i, carry):
        d_hidden, d_captured = carry
        logits, pull = jax.vjp(plan.logits_of, h_NxRxCxD[i].reshape(n, -1), *captured)
        # The logits themselves are dropped by the compiler where the exponentials have been kept.
        p = saved[i] / norm[i][:, None] if keep else jax.nn.softmax(logits)
        # A one-hot product, not a scatter, which XLA runs serially on CPU.
        chosen = t_NxRxC[i].reshape(n, 1) == jnp.arange(p.shape[-1])
        d_logits = g_NxRxC[i].reshape(n, 1) * (chosen - p)
        dh, *dc = pull(d_logits)
        return d_hidden.at[i].set(dh.reshape(d_hidden.shape[1:])), jax.tree.map(jnp.add, d_captured, dc)

    start = jnp.zeros(h_NxRxCxD.shape, hidden.dtype), [jnp.zeros(x.shape, x.dtype) for x in captured]
    d_hidden, d_captured = _each_block(one_block, kept, len(t_NxRxC), used, start)
    # Moved back by a gather: the transpose of the gather that moved them is a scatter, serial on CPU.
    return jnp.where(mask[..., None], _unblock(d_hidden, back), 0), d_captured, None, None


_masked_logprobs.defvjp(_forward, _backward)


def _each_block(body: Callable, kept: int, blocks: int, used: jax.Array, carry: Any) -> Any:
    """body(keep, i, carry) for the `used` first of the blocks, with keep=True for those before `kept`."""
    if kept:
        carry = jax.lax.fori_loop(0, jnp.minimum(used, kept), functools.partial(body, True), carry)
    if kept < blocks:
        carry = jax.lax.fori_loop(kept, used, functools.partial(body, False), carry)
    return carry


def _order(size: int, mask: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Columns of each row [R, N * C], the masked ones first; the place of each column in them [R, L]; and how
    many blocks hold masked ones."""
    padded = jnp.pad(mask, ((0, 0), (0, -mask.shape[1] % size)))
    order = jnp.argsort(~padded, axis=1, stable=True)
    used = -(-jnp.max(jnp.sum(mask, axis=1)) // size)
    return order, jnp.argsort(order, axis=1)[:, : mask.shape[1]], used


def _blocks(size: int, x: jax.Array, order: jax.Array) -> jax.Array:
    """x [R, L, ...] in that order, [N, R, C, ...]."""
    x = jnp.pad(x, ((0, 0), (0, order.shape[1] - x.shape[1])) + ((0, 0),) * (x.ndim - 2))
    return _take(x, order).reshape(len(x), -1, size, *x.shape[2:]).swapaxes(0, 1)


def _unblock(x: jax.Array, back: jax.Array) -> jax.Array:
    """[N, R, C, ...] in its own order, [R, L, ...]."""
    return _take(x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:]), back)


def _take(x: jax.Array, order: jax.Array) -> jax.Array:
    """x [R, L, ...] with the columns of each row in the order [R, any]."""
    return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)

