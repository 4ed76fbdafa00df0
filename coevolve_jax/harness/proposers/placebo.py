"""The control that matters most: a random move of a random lever, under the same backtests and conditions.

It has no hypothesis, so no diagnostic can be right or wrong.
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
        moves: dict[str, list[str]] = {}
        for lever, name in history.open_moves(parent.id):
            moves.setdefault(lever, []).append(name)
        if not moves:
            return None
        lever = list(moves)[int(rng.integers(len(moves)))]
        name = moves[lever][int(rng.integers(len(moves[lever])))]
        return Proposal(
            parent=parent.id,
            lever=lever,
            move=name,
            changes=history.levers[lever].moves(history.configs[parent.id])[name],
            because="Drawn at random.",
            proposer="placebo",
        )


def make(config: ConfigDict) -> Placebo:
    return Placebo()
