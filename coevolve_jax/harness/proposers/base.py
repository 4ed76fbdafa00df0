"""The Proposer protocol, and what a proposer may see.

A proposer is a module with `make(config) -> Proposer`; config.harness.proposer names it, as
config.strategy.name names a strategy. A module may set `RULES`, the conditions of its campaigns' verdicts
(verdict.py): some of them, the score always. Unless it leaves `target` out, each proposal says what it
expects. A module may also set `BACKTEST` to False, where versions are trained unseen, and `SEVERAL` to True,
where one proposal moves several levers. A proposer may also `invent` diagnostics (`Inventor`), and ask a
model (`Asking`). A module whose proposers ask a model has `recorded(llm_calls)`: a proposer for --replay,
which takes the rows of llm_calls.jsonl for the model's answers.

No proposer sees the selection set or the test: of a version's score it is told what `Seen` holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.harness.levers import Changes, Lever, Refused, changed, move
from coevolve_jax.harness.records import Proposal, Skill
from coevolve_jax.harness.registry import Diagnostic
from coevolve_jax.harness.store import twin
from coevolve_jax.harness.templates import Candidate
from coevolve_jax.llm.calls import LLMCall
from coevolve_jax.types import Group


@dataclasses.dataclass(frozen=True)
class Seen:
    """A version as proposers see it.

    Attributes:
      proposal: None for the start.
      kind: of its verdict; "start" for v000.
      decided: the sentence of the condition that decided, without numbers of the selection set.
      score: success on the selection set, rounded to one standard error; None if it was not trained.
      row: its values in training (evidence.py); {} if it was not trained.
    """

    id: str
    proposal: Proposal | None
    kind: str
    decided: str
    score: float | None
    row: Mapping[str, float | None]


@dataclasses.dataclass(frozen=True)
class History:
    """All that a proposer knows.

    configs: version -> config. levers: the open ones. skills: with their record so far. rollouts: version ->
    groups of its training on the half of the tasks that proposers see (registry.py). diagnostics: with their
    tests. names: version -> the tools and stop reasons of that half, which a formula may name.
    """

    versions: Sequence[Seen]
    configs: Mapping[str, ConfigDict]
    levers: Mapping[str, Lever]
    skills: Sequence[Skill]
    rollouts: Callable[[str], Sequence[Group]] = lambda version: ()
    diagnostics: Sequence[Diagnostic] = ()
    names: Callable[[str], Collection[str]] = lambda version: ()

    @property
    def best(self) -> Seen:
        """The version to go on from: the last promoted one, or the start."""
        return [v for v in self.versions if v.kind in ("start", "promoted")][-1]

    def new_moves(self, parent: str) -> list[tuple[str, str]]:
        """(lever, move) of every move of the parent that was not proposed before. Some may not run."""
        done = {
            (v.proposal.lever, v.proposal.move)
            for v in self.versions
            if v.proposal and v.proposal.parent == parent
        }
        every = [(x.name, name) for x in self.levers.values() for name in x.moves(self.configs[parent])]
        return [found for found in every if found not in done]

    def first_that_runs(
        self, parent: str, moves: Iterable[tuple[str, str]]
    ) -> tuple[str, str, Changes] | None:
        """The first (lever, move) whose config can run, has an effect and is new, with its changes."""
        for lever, name in moves:
            try:
                changes = move(self.levers, self.configs[parent], lever, name)
            except Refused:
                continue
            if not self.twin(parent, changes):
                return lever, name, changes
        return None

    def twin(self, parent: str, changes: Mapping[str, Any]) -> str:
        """The version that has the config which these changes of the parent give; "" if none has."""
        return twin(changed(self.configs[parent], changes), self.configs)


class Proposer(Protocol):
    """Says what to try next."""

    def propose(self, history: History, rng: np.random.Generator) -> Proposal | None:
        """Returns the next proposal; None where nothing is left to try."""
        ...


class Asking(Protocol):
    """A proposer that asks a model."""

    @property
    def llm_calls(self) -> Sequence[LLMCall]:
        """All questions so far, those of `resume` first."""
        ...

    def resume(self, llm_calls: Sequence[LLMCall]) -> None:
        """Takes the questions of an earlier process, which have used up some of the budget."""
        ...


class Inventor(Protocol):
    """A proposer that also says which formulas might tell failures from successes."""

    def invent(self, history: History, version: str, rng: np.random.Generator) -> list[Candidate]:
        """Returns formulas to be tested after a version was judged, each checked by expressions.py."""
        ...
