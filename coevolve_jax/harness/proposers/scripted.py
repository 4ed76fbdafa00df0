"""Follows skills. Where none holds: the parent's own move again, else the layer that has rested longest.

After three failures in a row it tries another layer than theirs.
"""

from __future__ import annotations

import re

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.harness.levers import LAYERS
from coevolve_jax.harness.proposers.base import History
from coevolve_jax.harness.records import Expectation, Proposal
from coevolve_jax.harness.skills import holding

FAILURES = 3


class Scripted:
    """The proposer without a language model."""

    def propose(self, history: History, rng: np.random.Generator) -> Proposal | None:
        parent = history.best
        new = self._elsewhere(history, history.new_moves(parent.id))
        for skill in holding(history.skills, parent.row):
            known = [found for found in new if skill.says(*found)]
            if found := history.first_that_runs(parent.id, known):
                return Proposal(
                    parent.id,
                    *found,
                    because=f"{skill.because} The trigger {skill.trigger} holds.",
                    proposer="scripted",
                    evidence={name: v for name, v in parent.row.items() if name in _words(skill.trigger)},
                    expects=skill.expects,
                    skill=skill.id,
                )
        own = parent.proposal  # it was promoted, so its direction may have more to give
        if own and (
            found := history.first_that_runs(parent.id, [m for m in new if m == (own.lever, own.move)])
        ):
            return Proposal(
                parent.id,
                *found,
                because=f"No skill holds for {parent.id}, and this move led to it: it may go on.",
                proposer="scripted",
                expects=own.expects,
            )
        order = sorted(new, key=lambda found: (self._rested(history, found[0]), rng.random()))
        found = history.first_that_runs(parent.id, order)
        if found is None:
            return None
        layer = history.levers[found[0]].layer
        return Proposal(
            parent.id,
            *found,
            because=f"No skill holds for {parent.id}; the layer {layer} has rested longest.",
            proposer="scripted",
            expects=Expectation("success_last", "up"),
        )

    def _elsewhere(self, history: History, moves: list[tuple[str, str]]) -> list[tuple[str, str]]:
        """After FAILURES in a row: the moves of other layers, if there are any."""
        last = [v.proposal.lever for v in history.versions[-FAILURES:] if v.proposal and v.kind != "promoted"]
        layers = {history.levers[lever].layer for lever in last if lever in history.levers}
        others = [found for found in moves if history.levers[found[0]].layer not in layers]
        return others or moves if len(last) == FAILURES else moves

    def _rested(self, history: History, lever: str) -> tuple[int, int]:
        """(number of the last version that moved the lever's layer, the layer's place)."""
        layer = history.levers[lever].layer
        moved = [
            i
            for i, v in enumerate(history.versions)
            if v.proposal
            and v.proposal.lever in history.levers
            and history.levers[v.proposal.lever].layer == layer
        ]
        return (moved[-1] if moved else -1), LAYERS.index(layer)


def _words(trigger: str) -> set[str]:
    return set(re.findall(r"\w+", trigger))


def make(config: ConfigDict) -> Scripted:
    return Scripted()
