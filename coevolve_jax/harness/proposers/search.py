"""Search without a loop: a Latin hypercube over the levers, drawn before any version is trained.

Each version starts from v000 and moves every lever to one of its values. Over the campaign each lever's moves
come about equally often. A point that is v000 itself is left out, and so is one that came before. The largest
gain wins: what a sweep of equal cost would find.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.harness.levers import DESIGN, Refused, changed, check_effect
from coevolve_jax.harness.proposers.base import History
from coevolve_jax.harness.records import Proposal
from coevolve_jax.harness.store import config_id
from coevolve_jax.seeding import rng_for

RULES = ("score",)
BACKTEST = False
SEVERAL = True


class Search:
    """Draws the design from the campaign's seed. versions: its size."""

    def __init__(self, versions: int, seed: int):
        self._versions, self._seed = versions, seed

    def propose(self, history: History, rng: np.random.Generator) -> Proposal | None:
        """Returns the next point of the design; None where it is used up.

        A diagnostic that was registered since is one more term of the reward, and moves some points. So a
        point may still be the config of an earlier version: it is passed over.
        """
        points = itertools.islice(self._design(history), len(history.versions) - 1, None)
        return next((p for p in points if not history.twin(p.parent, p.changes)), None)

    def _design(self, history: History) -> Iterator[Proposal]:
        """The points in their order, but for the start itself and any config that came before."""
        start = history.configs[history.versions[0].id]
        there = {config_id(start)}
        for number in range(self._versions):
            point = self._point(history, number)
            name = config_id(changed(start, point.changes))
            if name not in there:
                there.add(name)
                yield point

    def _point(self, history: History, number: int) -> Proposal:
        """A point of the design. It changes nothing where it is the start itself."""
        start = history.versions[0].id
        config, changes, told = history.configs[start], {}, {}
        for lever in 2 * [*history.levers.values()]:  # some have an effect only after later ones are moved
            values = [None, *lever.moves(config)]
            order = rng_for(self._seed, f"search {lever.name}").permutation(self._versions)
            name = values[order[number] * len(values) // self._versions]
            if name is None or lever.name in told:
                continue
            moved = lever.moves(config)[name]
            try:
                check_effect(config, changes | moved)
            except Refused:
                continue  # it does not go with the levers before it
            if changes.keys() & moved.keys():
                continue  # a lever before it writes one of its keys
            changes |= moved
            told[lever.name] = name
        move = "; ".join(f"{lever} {name}" for lever, name in told.items())
        return Proposal(start, DESIGN, move, changes, "A point of the design.", "search")


def make(config: ConfigDict) -> Search:
    return Search(config.harness.versions, config.harness.seed)
