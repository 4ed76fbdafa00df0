"""The surrogate objectives of the policy gradient, by the name in config.learner.surrogate.

A name is one of ours (SURROGATES), or the dotted path of a function of yours:

    # my_package/losses.py: `--config.learner.surrogate=my_package.losses.sapo` (arXiv 2511.20347)
    import jax
    import jax.numpy as jnp

    def sapo(tokens, config):
        temperature = jnp.where(tokens.advantages > 0, 1.0, 1.05)
        gate = jax.nn.sigmoid(temperature * (tokens.ratio - 1))
        return -4 / temperature * gate * tokens.advantages, jnp.zeros(gate.shape, bool)

It is a pure function of `Tokens` and of the `learner` section of the run's config. It returns two arrays
[R, L]: the loss of each token, which is minimised, and whether the token counts as clipped in the metrics.
Masks, mean over tokens (config.learner.aggregate), KL, tis_cap and the ratio's level stay as they are.

R: rows; L: tokens of a row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from ml_collections import FrozenConfigDict

from coevolve_jax import names
from coevolve_jax.grpo import losses

KEY = "learner.surrogate"


class Tokens(NamedTuple):
    """The tokens of a micro-batch. Only `ratio` and `log_ratio`, its logarithm, have gradients.

    ratio: pi / pi_old at the token, or with config.learner.ratio "sequence" of its trajectory.
    entropy: nats, of the policy's distribution at the token.
    mask: the policy's tokens; what is returned elsewhere does not count.
    segment_ids: equal within a trajectory of a row, 0 at pads.
    """

    ratio: Float[Array, "R L"]
    log_ratio: Float[Array, "R L"]
    advantages: Float[Array, "R L"]
    entropy: Float[Array, "R L"]
    mask: Bool[Array, "R L"]
    segment_ids: Int[Array, "R L"]


Surrogate = Callable[[Tokens, FrozenConfigDict], tuple[jax.Array, jax.Array]]


def clipped(tokens: Tokens, config: FrozenConfigDict) -> tuple[jax.Array, jax.Array]:
    """PPO's clipped surrogate (`losses.clipped_surrogate`)."""
    return losses.clipped_surrogate(tokens.ratio, tokens.advantages, config.clip_low, config.clip_high)


def cispo(tokens: Tokens, config: FrozenConfigDict) -> tuple[jax.Array, jax.Array]:
    """CISPO's objective: the ratio is a bounded weight without gradient (arXiv 2506.13585, eq. 4 and 5).

    So a token beyond the bounds still learns, where PPO's clip would drop it. clip_low = 1 is no lower bound,
    as in the paper. The loss has log(pi / pi_old) for the paper's log pi, which has the same gradient.
    """
    ratio = jax.lax.stop_gradient(tokens.ratio)
    weight = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
    return -weight * tokens.advantages * tokens.log_ratio, (weight != ratio) & (tokens.advantages != 0)


SURROGATES: dict[str, Surrogate] = {"clipped": clipped, "cispo": cispo}


@functools.cache
def find(name: str) -> Surrogate:
    """Returns the surrogate of that name. Raises ValueError, in one sentence, where there is none."""
    if name in SURROGATES:
        return SURROGATES[name]
    if "." not in name:
        raise ValueError(
            f"config.{KEY} is {name!r}: it must be one of {', '.join(SURROGATES)}, or the dotted path of a "
            "function."
        )
    return names.function(name, KEY)


def check(config: FrozenConfigDict) -> None:
    """Tries a user's surrogate on made-up tokens.

    config: the `learner` section.

    Raises:
      ValueError: it fails, returns something else than a loss and a bool of each token, has a gradient that
        is not finite, or punishes what has a positive advantage. In one sentence.
    """
    if config.surrogate in SURROGATES:
        return
    shape = 2, 3
    for advantage in (1.0, -1.0):
        spread = jnp.linspace(-1.0, 1.0, 6).reshape(shape)
        for log_ratio in (jnp.zeros(shape), spread):
            ones = jnp.ones(shape)
            made_up = Tokens(ones, log_ratio, advantage * ones, ones, ones > 0, ones.astype(jnp.int32))
            slope = _slope(made_up, config)
            wrong = "" if bool(jnp.isfinite(slope).all()) else f"is not finite at log_ratio {log_ratio[0]}"
            if not wrong and bool((advantage * slope.sum()) > 0):
                wrong = f"pushes tokens of advantage {advantage:+g} the wrong way: the loss is minimised"
            if wrong:
                raise ValueError(f"config.{KEY} is {config.surrogate!r}, and its gradient {wrong}.")


def _slope(tokens: Tokens, config: FrozenConfigDict) -> jax.Array:
    """[R, L] gradient of the summed loss by the log-ratio. Raises ValueError for what is no surrogate."""
    function, shape = find(config.surrogate), tokens.log_ratio.shape

    def total(log_ratio: jax.Array) -> jax.Array:
        loss, cut = function(tokens._replace(ratio=jnp.exp(log_ratio), log_ratio=log_ratio), config)
        if (loss.shape, cut.shape, cut.dtype) != (shape, shape, bool):
            raise TypeError(
                f"of {shape[0]} rows of {shape[1]} tokens it returns {loss.dtype} {loss.shape} and "
                f"{cut.dtype} {cut.shape}"
            )
        return jnp.sum(loss)

    try:
        return jax.grad(total)(tokens.log_ratio)
    except Exception as error:  # a user's own code may raise anything
        why = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"config.{KEY} is {config.surrogate!r}, which must return the loss and a bool of each token, "
            f"given tokens and config: {why}."
        ) from None
