"""Shortening by re-execution: finds the exploration steps that a goal needs.

It removes steps, re-executing the rest in the real environment, until every further removal changes the
outcome.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

from coevolve_jax.envs.base import EnvPool, Execution
from coevolve_jax.explorers.base import Goal

EMPTY = frozenset(("", "null", "None", "{}", "[]", "Execution successful."))  # answers without information
MAX_ANSWER = 400  # characters of an answer that a user may ask for


def shorten(env_pool: EnvPool, goals: Sequence[Goal]) -> list[Goal | None]:
    """Finds the steps that each goal needs, by re-execution from the scenario's initial state.

    1. Remove the steps that the wanted steps do not depend on.
    2. The rest defines the outcome: the final state and the answers asked for.
    3. Remove single steps and pairs (`cd x`, `cd ..`) while the outcome stays the same and every other step
       still answers as recorded.

    Returns None for a goal that does not reproduce, or whose wanted steps are not successful steps of one
    round. Also for one that leaves everything as it is and asks for no answer.
    """
    whole = {n: found for n, goal in enumerate(goals) if (found := _with_round(goal)) is not None}
    needed, left, ends = _drop_unneeded(env_pool, whole), dict[int, Goal](), dict[int, str]()
    for (n, goal), run in zip(needed.items(), _execute(env_pool, needed.values())):
        if not _reproduces(goal, run):
            continue
        asked = _answers(goal, run)
        # Without an answer or another state, an agent that does nothing would reach the goal too.
        if asked or run.fingerprints[-1] != run.fingerprints[0]:
            left[n] = dataclasses.replace(goal, asked=asked)
            ends[n] = run.fingerprints[-1]
    active = list(left)
    while active:
        trials = [(n, _without(left[n], gone)) for n in active for gone in _deletions(len(left[n].steps))]
        trials = [(n, trial) for n, trial in trials if _informs(trial, left[n])]
        runs = _execute(env_pool, [trial for _, trial in trials])
        shorter = {
            n: trial
            for (n, trial), run in zip(trials, runs)
            if _reproduces(trial, run) and run.fingerprints[-1] == ends[n]
        }
        left |= shorter
        active = list(shorter)
    return [left.get(n) for n in range(len(goals))]


def _with_round(goal: Goal) -> Goal | None:
    """The goal with the steps of its round up to the last wanted one, without errors.

    None if these do not include all wanted steps.
    """
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
    return dataclasses.replace(goal, steps=prefix, asked=()) if whole else None


def _without(goal: Goal, positions: Iterable[int]) -> Goal:
    """The goal without the steps at these positions."""
    gone = frozenset(positions)
    left = [i for i in range(len(goal.steps)) if i not in gone]
    asked = tuple(place for place, i in enumerate(left) if i in goal.asked)
    return dataclasses.replace(goal, steps=tuple(goal.steps[i] for i in left), asked=asked)


def _drop_unneeded(env_pool: EnvPool, goals: Mapping[int, Goal]) -> dict[int, Goal]:
    """Keeps the wanted steps and what they depend on.

    Tries the wanted steps alone first. If that fails, removes the others one by one, starting at the end: the
    steps that depend on a step come after it.
    """
    bold = [
        _without(g, (i for i, t in enumerate(g.steps) if t.index not in g.wanted)) for g in goals.values()
    ]
    runs = _execute(env_pool, bold)
    result = {n: b if _reproduces(b, run) else goals[n] for n, b, run in zip(goals, bold, runs)}
    for position in reversed(range(max((len(goal.steps) for goal in result.values()), default=0))):
        trials = {
            n: _without(goal, [position])
            for n, goal in result.items()
            if position < len(goal.steps) and goal.steps[position].index not in goal.wanted
        }
        for (n, trial), run in zip(trials.items(), _execute(env_pool, trials.values())):
            if _reproduces(trial, run):
                result[n] = trial
    return result


def _deletions(length: int) -> list[tuple[int, ...]]:
    """Positions to try to remove from a sequence: each one, then each pair. The last that works is kept."""
    return [*itertools.combinations(range(length), 1), *itertools.combinations(range(length), 2)]


def _execute(env_pool: EnvPool, goals: Collection[Goal]) -> list[Execution]:
    return (
        env_pool.execute([(g.exploration.context.task, [t.call for t in g.steps]) for g in goals])
        if goals
        else []
    )


def _reproduces(goal: Goal, run: Execution) -> bool:
    """Whether every step answers as exploration recorded it."""
    return run.valid and all(o == t.observation for o, t in zip(run.observations, goal.steps, strict=True))


def _answers(goal: Goal, run: Execution) -> tuple[int, ...]:
    """Positions of wanted steps that change no state and whose answers a user could ask for."""
    still = [before == after for before, after in itertools.pairwise(run.fingerprints)]
    return tuple(
        i
        for i, (t, unchanged) in enumerate(zip(goal.steps, still))
        if unchanged
        and t.index in goal.wanted
        and t.observation.text.strip() not in EMPTY
        and len(t.observation.text) <= MAX_ANSWER
    )


def _informs(trial: Goal, goal: Goal) -> bool:
    """Whether the trial still gives all answers that the goal asks for."""
    given = {t.observation.text for t in trial.steps}
    return all(goal.steps[i].observation.text in given for i in goal.asked)
