"""Abstraction: from exploration steps to goal-directed tasks.

An explorer picks steps of one round whose effects and answers make a goal.
The sequence is then shortened by re-execution in the real environment until
no step can go without changing the outcome, split into user turns and worded.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from coevolve_jax.envs.base import EnvPool, Execution
from coevolve_jax.synthesis.explore import spawn
from coevolve_jax.synthesis.reflect import signature
from coevolve_jax.types import Call, Context, Observation, Task, Triplet, Turn

EMPTY = frozenset(("", "null", "None", "{}", "[]"))  # answers that tell nothing
MAX_ANSWER = 400  # characters of an answer that a user may ask for
TURN_SHARES = (0.6, 0.3, 0.1)  # of tasks with 1, 2, 3 user turns, where the calls suffice


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A task before validation. observations[i] is what exploration recorded for the i-th call.

    triplets: the index of each call's exploration step. asked: positions of the
    calls whose answers the user asks for.
    """

    context: Context
    description: str
    turns: tuple[Turn, ...]
    triplets: tuple[int, ...]
    observations: tuple[Observation, ...]
    asked: tuple[int, ...]

    @property
    def calls(self) -> tuple[Call, ...]:
        return tuple(c for turn in self.turns for c in turn.calls)


class Abstractor(Protocol):
    def tools(self, task: Task) -> list[dict]: ...

    def propose_goals(
        self,
        context: Context,
        triplets: Sequence[Triplet],
        count: int,
        sizes: tuple[int, int],
        rng: np.random.Generator,
    ) -> list[tuple[int, ...]]:
        """Up to `count` goals: sorted indices of sizes[0] to sizes[1] successful triplets of one round."""

    def word(self, calls: Sequence[Call], tools: Sequence[dict], rng: np.random.Generator) -> str:
        """The user's message that asks for these calls; every argument value stands in it."""

    def describe(self, calls: Sequence[Call], asked: Sequence[int]) -> str:
        """One line on the goal."""


@dataclasses.dataclass(frozen=True)
class Draft:
    """A goal on its way to a proposal. kept: the steps that are left, in order. wanted: indices of the
    triplets that make the goal. asked: indices of those whose answers count (known once executed)."""

    owner: int
    task: Task
    kept: tuple[Triplet, ...]
    wanted: frozenset[int]
    asked: frozenset[int] = frozenset()

    def without(self, positions: Iterable[int]) -> Draft:
        gone = set(positions)
        return dataclasses.replace(self, kept=tuple(t for i, t in enumerate(self.kept) if i not in gone))


def abstract(
    explorer: Abstractor, pool: EnvPool, context: Context, triplets: Sequence[Triplet], **options
) -> list[Proposal]:
    """Abstracts one context; see `abstract_all` for the options."""
    return abstract_all(explorer, pool, [context], [triplets], **options)[0]


def abstract_all(
    explorer: Abstractor,
    pool: EnvPool,
    contexts: Sequence[Context],
    triplets: Sequence[Sequence[Triplet]],
    *,
    rng: np.random.Generator,
    count: int,
    min_calls: int = 2,
    max_calls: int = 6,
    max_turns: int = 3,
) -> list[list[Proposal]]:
    """Up to `count` proposals per context: min_calls to max_calls calls in 1 to max_turns turns."""
    rngs = spawn(rng, len(contexts))
    drafts = []
    for owner, context in enumerate(contexts):
        steps = {t.index: t for t in triplets[owner]}
        for wanted in explorer.propose_goals(
            context, triplets[owner], count, (min_calls, max_calls), rngs[owner]
        ):
            last = steps[max(wanted)]
            prefix = tuple(
                t
                for t in triplets[owner]
                if t.round == last.round and t.index <= last.index and not t.observation.error
            )
            drafts.append(Draft(owner, context.task, prefix, frozenset(wanted)))
    proposals: list[dict[str, Proposal]] = [{} for _ in contexts]
    for draft in shorten(pool, drafts):
        if min_calls <= len(draft.kept) <= max_calls:
            key = " ".join(signature(t.call) for t in draft.kept)
            if key not in proposals[draft.owner]:
                context, rng_ = contexts[draft.owner], rngs[draft.owner]
                proposals[draft.owner][key] = _propose(explorer, context, draft, max_turns, rng_)
    return [list(p.values()) for p in proposals]


def shorten(pool: EnvPool, drafts: Sequence[Draft]) -> list[Draft]:
    """Drops every step that the goal does not need, by re-execution from the scenario's initial state.

    First goes whatever the wanted steps do not depend on. What is left defines
    the outcome: the final state and the answers asked for. Then single steps
    and pairs (`cd x`, `cd ..`) go for as long as the outcome stays and every other
    step still answers as recorded. Drafts that do not reproduce are left out.
    """
    drafts = _drop_unneeded(pool, drafts)
    runs = _execute(pool, drafts)
    sound = [(d, r) for d, r in zip(drafts, runs) if _reproduces(d, r)]
    goals = [r.fingerprints[-1] for _, r in sound]
    drafts = [dataclasses.replace(d, asked=_answers(d, r)) for d, r in sound]
    active = range(len(drafts))
    while active:
        trials = [(n, drafts[n].without(gone)) for n in active for gone in _deletions(len(drafts[n].kept))]
        trials = [(n, trial) for n, trial in trials if _informs(trial, drafts[n])]
        runs = _execute(pool, [trial for _, trial in trials])
        shorter = {
            n: trial
            for (n, trial), run in zip(trials, runs)
            if _reproduces(trial, run) and run.fingerprints[-1] == goals[n]
        }
        for n, trial in shorter.items():
            drafts[n] = trial
        active = list(shorter)
    return drafts


def _drop_unneeded(pool: EnvPool, drafts: Sequence[Draft]) -> list[Draft]:
    """Keeps the wanted steps and what they depend on.

    The wanted steps alone are tried first. Where that fails, the others are
    taken out one by one from the end, so that a step goes after its dependents.
    """
    bold = [d.without(i for i, t in enumerate(d.kept) if t.index not in d.wanted) for d in drafts]
    result = [b if _reproduces(b, run) else d for b, d, run in zip(bold, drafts, _execute(pool, bold))]
    for position in reversed(range(max((len(d.kept) for d in result), default=0))):
        trials = {
            n: d.without([position])
            for n, d in enumerate(result)
            if position < len(d.kept) and d.kept[position].index not in d.wanted
        }
        for (n, trial), run in zip(trials.items(), _execute(pool, list(trials.values()))):
            if _reproduces(trial, run):
                result[n] = trial
    return result


def _deletions(length: int) -> list[tuple[int, ...]]:
    """Positions to try to take out of a sequence: each one, then each pair (the later entries win)."""
    return [*itertools.combinations(range(length), 1), *itertools.combinations(range(length), 2)]


def _execute(pool: EnvPool, drafts: Sequence[Draft]) -> list[Execution]:
    return pool.execute([(d.task, [t.call for t in d.kept]) for d in drafts]) if drafts else []


def _reproduces(draft: Draft, run: Execution) -> bool:
    """Every step answers as exploration recorded it."""
    return run.valid and all(o == t.observation for o, t in zip(run.observations, draft.kept, strict=True))


def _answers(draft: Draft, run: Execution) -> frozenset[int]:
    """Wanted steps that change no state and tell something a user would ask for."""
    still = [before == after for before, after in itertools.pairwise(run.fingerprints)]
    return frozenset(
        t.index
        for t, unchanged in zip(draft.kept, still)
        if unchanged
        and t.index in draft.wanted
        and t.observation.text not in EMPTY
        and len(t.observation.text) <= MAX_ANSWER
    )


def _informs(trial: Draft, draft: Draft) -> bool:
    """The answers asked for are still among those of the trial."""
    given = {t.observation.text for t in trial.kept}
    return all(t.observation.text in given for t in draft.kept if t.index in draft.asked)


def _propose(
    explorer: Abstractor, context: Context, draft: Draft, max_turns: int, rng: np.random.Generator
) -> Proposal:
    """Splits a shortened draft into user turns and words them."""
    calls = tuple(t.call for t in draft.kept)
    asked = tuple(i for i, t in enumerate(draft.kept) if t.index in draft.asked)
    shares = np.array(TURN_SHARES[: min(max_turns, len(calls))])
    count = 1 + int(rng.choice(len(shares), p=shares / shares.sum()))
    cuts = sorted(1 + int(i) for i in rng.choice(len(calls) - 1, size=count - 1, replace=False))
    tools = explorer.tools(context.task)
    turns = tuple(
        Turn(explorer.word(calls[a:b], tools, rng), calls[a:b])
        for a, b in itertools.pairwise([0, *cuts, len(calls)])
    )
    return Proposal(
        context,
        explorer.describe(calls, asked),
        turns,
        tuple(t.index for t in draft.kept),
        tuple(t.observation for t in draft.kept),
        asked,
    )
