"""Everything random is drawn from (seed, purpose, step), so that a run that was killed goes on as if it had not."""

from __future__ import annotations

import numpy as np

PURPOSES = ("held_out", "initial", "sample", "rollout", "evolve", "probe")


def rng_for(seed: int, purpose: str, step: int = 0, *again: int) -> np.random.Generator:
    """The generator of one purpose at one step, and of its repetition `again`; none lives across steps."""
    return np.random.default_rng([seed, PURPOSES.index(purpose), step, *again])
