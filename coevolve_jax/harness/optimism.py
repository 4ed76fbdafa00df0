"""How far a campaign's own score is above the truth when no version is better than another.

Every version has the same true success, so all that a campaign selects is luck.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]  # (rng, shape) -> scores of runs

RULES = ("not worse", "one se", "best")


def optimism(
    draw: Draw,
    *,
    rule: str,
    versions: int,
    seeds: int,
    noise: float,
    truth: float,
    campaigns: int,
    seed: int = 0,
) -> Float[np.ndarray, " campaigns"]:
    """The selected version's score minus the truth, for each of many campaigns.

    Args:
      draw: scores of runs on the selection set, as rates.
      rule: a version replaces its parent if it is "not worse", or better by "one se", which is
        sqrt(2 noise^2 / seeds). "best" takes the best of start and versions at the end.
      versions: trained besides the start. seeds: runs of each.
      noise: standard deviation of one run's score.
      truth: the mean of the scores.
    """
    scores = draw(np.random.default_rng(seed), (campaigns, versions + 1, seeds)).mean(-1)
    if rule == "best":
        return scores.max(1) - truth
    least = {"not worse": 0.0, "one se": (2 * noise**2 / seeds) ** 0.5}[rule]
    selected = scores[:, 0]
    for child in scores.T[1:]:
        selected = np.where(child - selected >= least, child, selected)
    return selected - truth


def normal(noise: float) -> Draw:
    """Scores around 0 with this standard deviation."""
    return lambda rng, shape: rng.normal(0.0, noise, shape)


def resampled(scores: np.ndarray) -> Draw:
    """Scores drawn with replacement from measured ones [n]."""
    return lambda rng, shape: rng.choice(scores, shape)
