"""Shortening by re-execution: which steps of an exploration does a goal need?

Steps go, in the real environment, until none can go without changing the outcome.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from coevolve_jax.envs.base import EnvPool, Execution
from coevolve_jax.explorers.base import Goal, Solution
from coevolve_jax.types import Task, Triplet

EMPTY = frozenset(("", "null", "None", "{}", "[]", "Execution successful."))  # answers that tell nothing
MAX_ANSWER = 400  # characters of an answer that a user may ask for


@dataclasses.dataclass(frozen=True)
class Draft:
    """A goal on its way to a solution. goal: its position among all goals. kept: the steps that are left, in
    order. wanted: indices of the steps that make the goal. asked: indices of those whose answers count (known once
    executed)."""

    goal: int
    task: Task
    kept: tuple[Triplet, ...]
    wanted: frozenset[int]
    asked: frozenset[int] = frozenset()

    def without(self, positions: Iterable[int]) -> Draft:
        gone = set(positions)
        return dataclasses.replace(self, kept=tuple(t for i, t in enumerate(self.kept) if i not in gone))


def shorten(env_pool: EnvPool, goals: Sequence[Goal]) -> list[Solution | None]:
    """Drops every step that a goal does not need, by re-execution from the scenario's initial state.

    First goes whatever the wanted steps do not depend on. What is left defines
    the outcome: the final state and the answers asked for. Then single steps
    and pairs (`cd x`, `cd ..`) go for as long as the outcome stays and every other
    step still answers as recorded. None: a goal that does not reproduce, or that is not made of successful
    steps of one round.
    """
    drafts = _drop_unneeded(env_pool, [d for d in map(_draft, range(len(goals)), goals) if d is not None])
    runs = _execute(env_pool, drafts)
    sound = [(d, r) for d, r in zip(drafts, runs) if _reproduces(d, r)]
    ends = [r.fingerprints[-1] for _, r in sound]
    drafts = [dataclasses.replace(d, asked=_answers(d, r)) for d, r in sound]
    active = range(len(drafts))
    while active:
        trials = [(n, drafts[n].without(gone)) for n in active for gone in _deletions(len(drafts[n].kept))]
        trials = [(n, trial) for n, trial in trials if _informs(trial, drafts[n])]
        runs = _execute(env_pool, [trial for _, trial in trials])
        shorter = {
            n: trial
            for (n, trial), run in zip(trials, runs)
            if _reproduces(trial, run) and run.fingerprints[-1] == ends[n]
        }
        for n, trial in shorter.items():
            drafts[n] = trial
        active = list(shorter)
    solutions: list[Solution | None] = [None] * len(goals)
    for d in drafts:
        solutions[d.goal] = Solution(d.kept, tuple(i for i, t in enumerate(d.kept) if t.index in d.asked))
    return solutions


def _draft(position: int, goal: Goal) -> Draft | None:
    """The round up to the last wanted step, without errors; None where the wanted steps are not all in it."""
    steps, wanted = {t.index: t for t in goal.exploration.triplets}, frozenset(goal.wanted)
    if not wanted or not wanted <= steps.keys():
        return None
    last = steps[max(wanted)]
    prefix = tuple(
        t
        for t in goal.exploration.triplets
        if t.round == last.round and t.index <= last.index and not t.observation.error
    )
    whole = wanted <= {t.index for t in prefix}
    return Draft(position, goal.exploration.context.task, prefix, wanted) if whole else None


def _drop_unneeded(env_pool: EnvPool, drafts: Sequence[Draft]) -> list[Draft]:
    """Keeps the wanted steps and what they depend on.

    The wanted steps alone are tried first. Where that fails, the others are
    taken out one by one from the end, so that a step goes after its dependents.
    """
    bold = [d.without(i for i, t in enumerate(d.kept) if t.index not in d.wanted) for d in drafts]
    result = [b if _reproduces(b, run) else d for b, d, run in zip(bold, drafts, _execute(env_pool, bold))]
    for position in reversed(range(max((len(d.kept) for d in result), default=0))):
        trials = {
            n: d.without([position])
            for n, d in enumerate(result)
            if position < len(d.kept) and d.kept[position].index not in d.wanted
        }
        for (n, trial), run in zip(trials.items(), _execute(env_pool, list(trials.values()))):
            if _reproduces(trial, run):
                result[n] = trial
    return result


def _deletions(length: int) -> list[tuple[int, ...]]:
    """Positions to try to take out of a sequence: each one, then each pair (the later entries win)."""
    return [*itertools.combinations(range(length), 1), *itertools.combinations(range(length), 2)]


def _execute(env_pool: EnvPool, drafts: Sequence[Draft]) -> list[Execution]:
    return env_pool.execute([(d.task, [t.call for t in d.kept]) for d in drafts]) if drafts else []


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
