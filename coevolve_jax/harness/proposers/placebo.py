"""The control that matters most: a random move of a random lever, under the same backtests and conditions.

It has no hypothesis, so the condition `target` is left out, and no diagnostic can be right or wrong.
"""

from __future__ import annotations

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.harness.proposers.base import History
from coevolve_jax.harness.records import Proposal

RULES = ("score", "reward", "gating", "audit")


class Placebo:
    """Draws a lever, then one of its moves, each with equal odds."""

    def propose(self, history: History, rng: np.random.Generator) -> Proposal | None:
        parent = history.best
        moves: dict[str, list[tuple[str, str]]] = {}
        for found in history.new_moves(parent.id):
            moves.setdefault(found[0], []).append(found)
        order = [moves[lever] for lever in rng.permutation(list(moves))]
        drawn = [own[i] for own in order for i in rng.permutation(len(own))]
        found = history.first_that_runs(parent.id, drawn)
        return found and Proposal(parent.id, *found, because="Drawn at random.", proposer="placebo")


def make(config: ConfigDict) -> Placebo:
    return Placebo()
