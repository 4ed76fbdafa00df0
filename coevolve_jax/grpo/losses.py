"""Token losses: pure functions on arrays of any (equal) shape, in nats."""
from __future__ import annotations

import jax
import jax.numpy as jnp


def clipped_surrogate(
    logprobs: jax.Array, sampler_logprobs: jax.Array, advantages: jax.Array, clip_low: float, clip_high: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """PPO's clipped objective per token, to be minimised (arXiv 1707.06347, eq. 7).

    The ratio is against the policy that generated the tokens, by the
    log-probabilities that its sampler returned.

    Returns:
      loss: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).
      ratio: r = exp(logprobs - sampler_logprobs).
      clipped: bool, where the clip cuts the gradient.
    """
    ratio = jnp.exp(logprobs - sampler_logprobs)
    bounded = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    clipped = ratio * advantages > bounded * advantages
    return -jnp.minimum(ratio * advantages, bounded * advantages), ratio, clipped


def kl_k3(logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
    """Unbiased, non-negative estimate of KL(policy || reference) per sampled token.

    k3 = exp(d) - 1 - d with d = ref - policy (Schulman, "Approximating KL divergence", 2020).
    """
    delta = ref_logprobs - logprobs
    return jnp.exp(delta) - 1 - delta
