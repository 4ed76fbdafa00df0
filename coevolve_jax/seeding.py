"""Random generators seeded from (seed, purpose, step), so that a killed run resumes to the same bits."""

from __future__ import annotations

import hashlib
import json

import numpy as np


def salted(seed: int, salt: int) -> int:
    """Returns a seed of other streams than `seed` has. Salt 0 returns the seed itself."""
    words = json.dumps(["salt", int(seed), int(salt)])
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "big") if salt else seed


def rng_for(seed: int, purpose: str, step: int = 0, *again: int) -> np.random.Generator:
    """Returns the generator for one purpose at one step. None lives across steps.

    Args:
      purpose: any name. A new name changes no other stream.
      again: numbers of a repetition within the step.

    A digest of all arguments seeds the generator, so no two lists of arguments share a stream. NumPy's own
    seeds would: it pads short ones with zeros, so (1, 2) draws the same as (1, 2, 0).
    """
    words = json.dumps([purpose, int(seed), int(step), *map(int, again)])
    return np.random.default_rng(int.from_bytes(hashlib.sha256(words.encode()).digest(), "big"))
