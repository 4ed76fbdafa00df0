"""Everything random is drawn from (seed, purpose, step), so that a run that was killed goes on as if it had not."""

from __future__ import annotations

import hashlib

import numpy as np

# These are numbered, so that every run made since the first release comes out again; all others are hashed.
NUMBERED = ("held_out", "initial", "sample", "rollout", "evolve")


def rng_for(seed: int, purpose: str, step: int = 0, *again: int) -> np.random.Generator:
    """The generator of one purpose at one step, and of its repetition `again`; none lives across steps.

    purpose: any name; one that is new changes no other.
    """
    if purpose in NUMBERED:
        number = NUMBERED.index(purpose)
    else:
        number = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "big")
    return np.random.default_rng([seed, number, step, *again])
