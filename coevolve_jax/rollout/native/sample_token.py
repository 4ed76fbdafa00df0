"""Samples one token per row from its logits: by inverting the distribution function, or the likeliest one."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# The inverse takes two steps, over the sums of blocks of BLOCK tokens and then within one block: the running
# sum of a whole vocabulary costs more than the product that made the logits.
BLOCK = 128
# A random number has 23 bits. Up to this many tokens one number finds the block and the token; above, two do.
ONE_NUMBER = 8192


def draw(keys: jax.Array, vocab_size: int) -> jax.Array:
    """Draws the random numbers of `sample` for rows of `vocab_size` logits, float32 [R, 1 or 2]. keys: [R].

    A row has one or two, not one per token. They lie in (0, 1], so a token of probability 0 is never reached.
    """
    count = 1 if vocab_size <= ONE_NUMBER else 2
    return 1 - jax.vmap(lambda key: jax.random.uniform(key, (count,)))(keys)


def sample(
    logits: jax.Array, temperatures: jax.Array, numbers: jax.Array, wanted: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the token of each row and its log-probability, int32 [R] and float32 [R] in nats.

    logits: float32 [R, V]. temperatures: float32 [R]; 0 takes the likeliest token, with its log-probability
    at temperature 1. numbers: from `draw`. wanted: bool [R]; the results of other rows mean nothing.
    """
    greedy = temperatures == 0
    logits = logits / jnp.where(greedy, 1.0, temperatures)[:, None]
    padded = jnp.pad(logits, ((0, 0), (0, -logits.shape[1] % BLOCK)), constant_values=-jnp.inf)
    blocks = padded.reshape(len(logits), -1, BLOCK)
    peak = logits.max(axis=-1, keepdims=True)
    sums = jnp.sum(jnp.exp(blocks - peak[:, None]), axis=-1)
    block = _first_reaching(sums, numbers[:, 0])
    within = jnp.exp(jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0] - peak)
    rest = _rest(sums, numbers[:, 0], block) if numbers.shape[1] == 1 else numbers[:, 1]
    drawn = block * BLOCK + _first_reaching(within, rest)
    # argmax is another pass over all logits; most batches have no greedy row and skip it.
    token = jax.lax.cond(
        jnp.any(greedy & wanted), lambda: jnp.where(greedy, jnp.argmax(logits, axis=-1), drawn), lambda: drawn
    )
    logz = peak[:, 0] + jnp.log(jnp.sum(sums, axis=-1))
    return token.astype(jnp.int32), jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0] - logz


def _first_reaching(weights: jax.Array, u: jax.Array) -> jax.Array:
    """Returns the first index, [R], where the running sum of weights [R, N] reaches the share u of its total.

    u: [R], in (0, 1]. The weight at the index is never 0, whatever the rounding of the sum.
    """
    mass = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), 0)
    goal = u[:, None] * mass.max(axis=-1, keepdims=True)
    return jnp.argmax((mass >= goal) & (mass > 0), axis=-1)


def _rest(weights: jax.Array, u: jax.Array, index: jax.Array) -> jax.Array:
    """Returns where the goal of `_first_reaching` lies within the weight at `index`: its share of it, [R]."""
    mass = jnp.cumsum(weights, axis=-1)
    here = lambda x: jnp.take_along_axis(x, index[:, None], axis=-1)[:, 0]
    return jnp.clip((u * mass[:, -1] - here(mass - weights)) / here(weights), 0, 1)
