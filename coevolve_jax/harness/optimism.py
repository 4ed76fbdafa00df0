"""How far a campaign's own score is above the truth when no version is better than another.

Every version is trained the same way, so all that a campaign selects is luck: of the run, of the samples and
of the tasks. What the selected runs score on other tasks tells how much of it was the run's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Float

# (rng, shape) -> [*shape, sets], scores of runs; a campaign selects by the first set
Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]

RULES = ("not worse", "one se", "best")


def optimism(
    draw: Draw,
    *,
    rule: str,
    versions: int,
    seeds: int,
    noise: float,
    truth: float | np.ndarray,
    campaigns: int,
    seed: int = 0,
) -> Float[np.ndarray, "campaigns sets"]:
    """The selected version's score minus the truth, for each of many campaigns and on each set of tasks.

    Args:
      draw: scores of runs, as rates.
      rule: a version replaces its parent if it is "not worse", or better by "one se", which is
        sqrt(2 noise^2 / seeds). "best" takes the best of start and versions at the end.
      versions: trained besides the start. seeds: runs of each.
      noise: what the rule takes for the standard deviation of one run's score on the first set.
      truth: the mean of the scores, of all sets or of each.
    """
    scores = draw(np.random.default_rng(seed), (campaigns, versions + 1, seeds)).mean(2)
    every, own = np.arange(campaigns), scores[..., 0]
    if rule == "best":
        selected = own.argmax(1)
    else:
        least = {"not worse": 0.0, "one se": (2 * noise**2 / seeds) ** 0.5}[rule]
        selected = np.zeros(campaigns, int)
        for child in range(1, versions + 1):
            selected = np.where(own[:, child] - own[every, selected] >= least, child, selected)
    return scores[every, selected] - truth


def normal(noise: float) -> Draw:
    """Scores on one set, around 0 with this standard deviation."""
    return lambda rng, shape: rng.normal(0.0, noise, (*shape, 1))


def resampled(scores: Float[np.ndarray, "runs sets"]) -> Draw:
    """Runs drawn with replacement from measured ones."""
    return lambda rng, shape: scores[rng.integers(len(scores), size=shape)]
