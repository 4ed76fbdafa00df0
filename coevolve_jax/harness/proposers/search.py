"""Search without a loop: a Latin hypercube over the levers, drawn before any version is trained.

Each version starts from v000 and moves every lever to one of its values. Over the campaign each lever's moves
come about equally often. The best score wins: what a sweep of equal cost would find.
"""

from __future__ import annotations

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.harness.levers import SEVERAL, Refused, changed
from coevolve_jax.harness.proposers.base import History
from coevolve_jax.harness.records import Proposal
from coevolve_jax.seeding import rng_for

RULES = ("score",)
BACKTEST = False


class Search:
    """Draws the design from the campaign's seed. versions: its size."""

    def __init__(self, versions: int, seed: int):
        self._versions, self._seed = versions, seed

    def propose(self, history: History, rng: np.random.Generator) -> Proposal | None:
        start = history.versions[0].id
        number = len(history.versions) - 1
        config, changes, told = history.configs[start], {}, []
        for lever in history.levers.values():
            values = [None, *lever.moves(config)]
            order = rng_for(self._seed, f"search {lever.name}").permutation(self._versions)
            name = values[order[number % self._versions] * len(values) // self._versions]
            if name is None:
                continue
            try:
                changed(config, changes | lever.moves(config)[name])
            except Refused:
                continue  # it does not go with the levers before it
            changes |= lever.moves(config)[name]
            told.append(f"{lever.name} {name}")
        return Proposal(start, SEVERAL, "; ".join(told), changes, "A point of the design.", "search")


def make(config: ConfigDict) -> Search:
    return Search(config.harness.versions, config.harness.seed)
