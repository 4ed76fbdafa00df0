"""Hints within demonstrations, from which a policy learns to read them, and that some are wrong.

A right hint is heeded: the demonstrator has no bad habit with the actions that it names. A wrong one names
similar actions, and changes nothing. The lines are those of strategies/hints.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np

from coevolve_jax.strategies import hints
from coevolve_jax.types import Call, Hint, Step, Task

KINDS = ("task", "step", "tool")  # a line before the task, a line before each call, a tool made of calls
NAMED = 3  # actions in a line at most
WARNED = 0.3  # share of lines before a task that also name an action to avoid


class Advice(NamedTuple):
    """A hint for a demonstration.

    Attributes:
      hint: what the policy reads, or is offered.
      played: the task with the calls to demonstrate; one of them may be the offered tool's.
      heeded: actions that the demonstrator takes without bad habits.
    """

    hint: Hint
    played: Task
    heeded: frozenset[str]


def advise(task: Task, lessons: ModuleType, wrong: float, rng: np.random.Generator) -> Advice:
    """Makes a hint for a task, of a random kind. wrong: the chance that it is a wrong one.

    lessons: the family's module of lessons/.
    """
    kind, misleads = str(rng.choice(KINDS)), bool(rng.random() < wrong)
    twist = lessons.sibling if misleads else lambda call: call
    heed = lambda names: frozenset() if misleads else frozenset(names)
    actions = [lessons.action(twist(call)) for call in task.calls]
    if kind == "tool" and (places := runs(task, lessons)):
        turn, calls = places[rng.integers(len(places))]
        macro = hints.macro_of([twist(call) for call in calls])
        played = task if misleads else with_tool(task, turn, calls)
        return Advice(Hint(macros=(macro,)), played, heed(call.name for call in calls))
    if kind == "step":
        ends = {sum(len(turn.calls) for turn in task.turns[: n + 1]) for n in range(len(task.turns))}

        def before_step(steps: Sequence[Step]) -> str:
            # After the last call of a turn the message to write is none, or the next turn is not there yet.
            return (
                "" if len(steps) in ends or len(steps) >= len(actions) else hints.line([actions[len(steps)]])
            )

        return Advice(Hint(hints.line(actions[:1]), before_step), task, heed(actions))
    chosen = [a for a in dict.fromkeys(actions) if rng.random() < 0.5][:NAMED] or actions[:1]
    own = [lessons.action(call) for call in task.calls]
    others = own if misleads else [lessons.action(lessons.sibling(call)) for call in task.calls]
    avoid = [a for a in others if misleads or a not in own][:1] if rng.random() < WARNED else []
    return Advice(Hint(hints.line(chosen, avoid)), task, heed(chosen))


def runs(task: Task, lessons: ModuleType) -> list[tuple[int, tuple[Call, ...]]]:
    """All (turn, two or three calls of it in a row) that can be a tool, where actions are tools."""
    if any(lessons.action(call) != call.name for call in task.calls):
        return []
    return [
        (n, turn.calls[i : i + size])
        for n, turn in enumerate(task.turns)
        for size in (2, 3)
        for i in range(len(turn.calls) - size + 1)
    ]


def with_tool(task: Task, turn: int, calls: Sequence[Call]) -> Task:
    """The task with a call of the tool in place of these calls of a turn."""
    own, size = task.turns[turn].calls, len(calls)
    at = next(i for i in range(len(own)) if own[i : i + size] == tuple(calls))
    call = hints.call_of(hints.macro_of(calls), calls)
    changed = dataclasses.replace(task.turns[turn], calls=(*own[:at], call, *own[at + size :]))
    return dataclasses.replace(task, turns=(*task.turns[:turn], changed, *task.turns[turn + 1 :]))
