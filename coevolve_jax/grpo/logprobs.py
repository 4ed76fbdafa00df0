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
    temperature: float = 1.0,
    chunk: int = 2048,
) -> tuple[jax.Array, jax.Array]:
    """log p(target) and the entropy at each position, in nats.

    Logits exist for `chunk` positions at a time, forward and backward: each
    chunk is rematerialised in the backward pass.

    Args:
      unembed: [chunk, D] -> logits [chunk, V] (float32).
      hidden: [N, D], targets: int32 [N]. N is padded to a multiple of chunk.
      temperature: logits are divided by it, as the sampler does.

    Returns:
      logprobs [N], entropy [N] (no gradient flows through the entropy), float32.
    """
    n = hidden.shape[0]
    chunk = min(chunk, n)
    pad = -n % chunk
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(-1, chunk, hidden.shape[1])
    targets = jnp.pad(targets, (0, pad)).reshape(-1, chunk)

    @jax.checkpoint
    def one_chunk(h_CxD, targets_C):
        logits = unembed(h_CxD).astype(jnp.float32) / temperature
        logz = jax.nn.logsumexp(logits, axis=-1)
        # A one-hot product, not a gather: its transpose is a cheap elementwise
        # product where the gather's is a scatter, which XLA runs serially on CPU.
        picked = jnp.sum(jnp.where(targets_C[:, None] == jnp.arange(logits.shape[-1]), logits, 0), axis=-1)
        frozen = jax.lax.stop_gradient(logits - logz[:, None])
        return picked - logz, -jnp.sum(jnp.exp(frozen) * frozen, axis=-1)

    logprobs, entropy = jax.lax.map(lambda xs: one_chunk(*xs), (hidden, targets))
    return logprobs.reshape(-1)[:n], entropy.reshape(-1)[:n]
