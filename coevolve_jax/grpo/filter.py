"""The group filter: keeps the groups of rollouts whose rewards spread as much as usual."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from coevolve_jax.grpo.advantages import drop_zero_variance


class FilterState(NamedTuple):
    """Running statistics of the spread, over groups whose spread is above 0.

    mean, var: exponential moving averages of the spread and of its squared deviation. seen: number of groups
    so far.
    """

    mean: float = 0.0
    var: float = 0.0
    seen: int = 0


def filter_groups(
    state: FilterState,
    spreads: Mapping,
    *,
    z: float,
    decay: float,
    warmup: int,
    keep: float,
    side: str = "low",
) -> tuple[list, FilterState]:
    """EvoTrainer's group filter (arXiv 2606.03108).

    It drops zero-variance groups, and groups whose spread is below mean - z * std of the groups seen before
    this call. With z = 1.28 that is the lowest tenth of a normal distribution. At least the share `keep` of
    the groups with spread stays, those with the largest spreads.

    Zero-variance groups do not enter the statistics. No threshold applies until `warmup` other groups have
    been seen.

    Args:
      spreads: group -> standard deviation of its rewards.
      decay: weight of a new group in the averages.
      side: "high" drops spreads above mean + z * std instead, and keeps the smallest.

    Returns:
      the active groups, in the order of `spreads`, and the state after this call.
    """
    varied, sign = drop_zero_variance(spreads), 1 if side == "low" else -1
    threshold = sign * state.mean - z * state.var**0.5 if state.seen >= warmup else -math.inf
    active = {group for group in varied if sign * spreads[group] >= threshold}
    least = int(-(-len(varied) * keep // 1))
    if len(active) < least:
        active = set(sorted(varied, key=lambda group: -sign * spreads[group])[:least])
    for group in varied:
        state = _observe(state, spreads[group], decay)
    return [group for group in varied if group in active], state


def _observe(state: FilterState, spread: float, decay: float) -> FilterState:
    """The exponentially weighted mean and variance after one more value (Finch 2009, section 9)."""
    if state.seen == 0:
        return FilterState(spread, 0.0, 1)
    delta = spread - state.mean
    return FilterState(
        state.mean + decay * delta, (1 - decay) * (state.var + decay * delta**2), state.seen + 1
    )
