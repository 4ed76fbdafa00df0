"""Contexts that ask for a variant of a task: one call less or more, other arguments, another scene or turn.

A variant is only a plan (types.Context.plan). Exploration follows it in the real environment, and what comes
of it is worded, shortened, validated and compared with the evaluation tasks as any task is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from coevolve_jax.types import Context, Task

OPERATORS = ("drop_call", "add_call", "other_arguments", "other_scene", "new_turn")


def elsewhere(task: Task, scenarios: Sequence[Task], offered: Sequence[Collection[str]]) -> list[Task]:
    """Returns the other scenarios that offer all tools of a task's calls. offered: tools of each scenario."""
    tools = {call.name for call in task.calls}
    pairs = zip(scenarios, offered, strict=True)
    return [s for s, names in pairs if s.scenario != task.scenario and tools.issubset(names)]


def possible(
    task: Task, operator: str, least: int, most: int, turns: int, places: Sequence[Task] = ()
) -> bool:
    """Whether an operator's variant of a task has `least` to `most` calls, and at most `turns` user turns.

    places: of `elsewhere`. other_scene is possible only where there are some.
    """
    if operator == "other_scene" and not places:
        return False
    if operator == "new_turn" and len(task.turns) >= turns:
        return False
    count = len(task.calls) + {"drop_call": -1, "add_call": 1, "new_turn": 1}.get(operator, 0)
    return least <= count <= most


def variant(
    task: Task, operator: str, rng: np.random.Generator, id: str, places: Sequence[Task] = ()
) -> Context:
    """Returns the context for one variant of a task.

        drop_call         the same calls but one, drawn at random
        add_call          the same calls, and one more after them
        other_arguments   the same actions, with arguments that the explorer fills
        other_scene       the same actions in another scenario, drawn at random from `places`
        new_turn          the same calls and one more, in one user turn more

    Args:
      id: of the context.
      places: of `elsewhere`; only other_scene needs them.

    Raises:
      ValueError: an unknown operator, drop_call for a task of one call, or other_scene without places.
    """
    calls, count = task.calls, len(task.calls)
    base = Context(
        id=id, signal=operator, task=task, summary="A variant of this task is wanted.", failure_cause="",
        instability_pattern="", focus_pattern=tuple(dict.fromkeys(task.actions)), avoid=(),
    )  # fmt: skip
    if operator == "drop_call":
        if count < 2:
            raise ValueError(
                f"Task {task.id} has {count} call, so none can be dropped: use another operator."
            )
        out = int(rng.integers(count))
        plan = tuple(call for i, call in enumerate(calls) if i != out)
        return dataclasses.replace(base, plan=plan, calls=(count - 1, count - 1))
    if operator == "add_call":
        return dataclasses.replace(base, plan=calls, calls=(count + 1, count + 1))
    if operator == "other_arguments":
        return dataclasses.replace(base, plan=task.actions, calls=(count, count))
    if operator == "other_scene":
        if not places:
            raise ValueError(f"No other scenario offers the tools of task {task.id}: use another operator.")
        place = places[int(rng.integers(len(places)))]
        return dataclasses.replace(base, task=place, parent=task.id, plan=task.actions, calls=(count, count))
    if operator == "new_turn":
        turns = len(task.turns) + 1
        return dataclasses.replace(base, plan=calls, calls=(count + 1, count + 1), turns=turns)
    raise ValueError(f"There is no operator {operator!r}: use one of {', '.join(OPERATORS)}.")
