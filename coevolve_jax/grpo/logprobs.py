"""Log-probabilities of given tokens without the full [tokens, vocabulary] matrix."""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


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

    Logits exist for about `chunk` positions at a time, forward and backward: each chunk is rematerialised
    in the backward pass. A chunk is some columns of every row, so that rows may lie on different devices.

    Args:
      unembed: [n, D] -> logits [n, V].
      hidden: [R, L, D] or [L, D]; targets: int32 [R, L] or [L].
      mask: bool, like targets; positions where it is False may be left out, and what is returned for
        them is then 0. With more than one chunk each row's masked positions are moved together, and chunks
        without any are skipped: of prompts and observations no logits are computed.
      temperature: logits are divided by it, as the sampler does.
      chunk: positions whose logits exist at once, rounded to whole columns (at least one).

    Returns:
      logprobs, entropy (no gradient flows through the entropy), float32, like targets.
    """
    if hidden.ndim == 2:
        single = token_logprobs(unembed, hidden[None], targets[None], mask=None if mask is None else mask[None],
                                temperature=temperature, chunk=chunk)
        return single[0][0], single[1][0]

    rows, length, width = hidden.shape
    columns = min(max(1, chunk // rows), length)
    needed = jnp.ones(targets.shape, bool) if mask is None else mask
    order = None
    if mask is not None and columns < length:
        order = jnp.argsort(~mask, axis=1, stable=True)
        hidden, targets, needed = (_take(x, order) for x in (hidden, targets, needed))

    def chunks(x):
        x = jnp.pad(x, ((0, 0), (0, -length % columns)) + ((0, 0),) * (x.ndim - 2))
        return x.reshape(rows, -1, columns, *x.shape[2:]).swapaxes(0, 1)

    @jax.checkpoint
    def one_chunk(h_RxCxD, targets_RxC):
        logits = unembed(h_RxCxD.reshape(-1, width)).astype(jnp.float32) / temperature
        logz = jax.nn.logsumexp(logits, axis=-1)
        # A one-hot product, not a gather: its transpose is a cheap elementwise
        # product where the gather's is a scatter, which XLA runs serially on CPU.
        chosen = targets_RxC.reshape(-1, 1) == jnp.arange(logits.shape[-1])
        picked = jnp.sum(jnp.where(chosen, logits, 0), axis=-1)
        frozen = jax.lax.stop_gradient(logits - logz[:, None])
        entropy = -jnp.sum(jnp.exp(frozen) * frozen, axis=-1)
        return (picked - logz).reshape(targets_RxC.shape), entropy.reshape(targets_RxC.shape)

    # Without the outer checkpoint the loop would keep what the branch needs backward, a copy of the unembedding
    # of each chunk among it.
    @jax.checkpoint
    def one_chunk_if_needed(h_RxCxD, targets_RxC, needed_RxC):
        nothing = lambda h, t: (jnp.zeros(t.shape), jnp.zeros(t.shape))
        return jax.lax.cond(jnp.any(needed_RxC), one_chunk, nothing, h_RxCxD, targets_RxC)

    if order is None:
        outputs = jax.lax.map(lambda xs: one_chunk(*xs), (chunks(hidden), chunks(targets)))
    else:
        outputs = jax.lax.map(lambda xs: one_chunk_if_needed(*xs), (chunks(hidden), chunks(targets), chunks(needed)))
    outputs = [x.swapaxes(0, 1).reshape(rows, -1)[:, :length] for x in outputs]
    if order is not None:
        back = jnp.argsort(order, axis=1)
        outputs = [jnp.where(mask, _take(x, back), 0) for x in outputs]
    return tuple(outputs)


def _take(x: jax.Array, order: jax.Array) -> jax.Array:
    """x [R, L, ...] with the columns of each row in the order [R, L]."""
    return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)
