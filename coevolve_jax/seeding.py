"""Everything random is drawn from (seed, purpose, step), so that a run that was killed goes on as if it had not."""

from __future__ import annotations

import hashlib
import json

import numpy as np


def rng_for(seed: int, purpose: str, step: int = 0, *again: int) -> np.random.Generator:
    """Returns the generator of one purpose at one step, and of its repetition `again`; none lives across steps.

    purpose: any name; one that is new changes no other. A digest of all arguments seeds the generator, so that no two
    lists of arguments share a stream: NumPy itself pads short seeds with zeros, and (1, 2) would draw what (1, 2, 0) does.
    """
    words = json.dumps([purpose, int(seed), int(step), *map(int, again)])
    return np.random.default_rng(int.from_bytes(hashlib.sha256(words.encode()).digest(), "big"))
