"""How the steps of exploration follow a context's plan (types.Context.plan)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from coevolve_jax.explorers.evidence import signature
from coevolve_jax.types import Call, Triplet

Item = TypeVar("Item", Call, Call | str)  # an item of a plan: a call, or an action pattern
ActionPattern = Callable[[Call], str]


def action_of(item: Call | str, action_pattern: ActionPattern) -> str:
    """Returns the action pattern of an item."""
    return item if isinstance(item, str) else action_pattern(item)


def upcoming(plan: Sequence[Item], history: Sequence[Triplet], action_pattern: ActionPattern) -> Item | None:
    """Returns the item after those that this round has made, matched by action and in order."""
    position = 0
    for triplet in history:
        if position < len(plan):
            position += action_pattern(triplet.call) == action_of(plan[position], action_pattern)
    return plan[position] if position < len(plan) else None


def fulfilled(
    plan: Sequence[Call | str], steps: Sequence[Triplet], action_pattern: ActionPattern
) -> tuple[int, ...]:
    """Returns the indices of the first steps that follow the whole plan in order; () if they do not.

    A call of the plan is matched with its arguments.
    """
    found: list[int] = []
    wanted = list(plan)
    for step in steps:
        if not wanted:
            break
        item = wanted[0]
        if action_pattern(step.call) == item if isinstance(item, str) else _equal(step.call, item):
            found.append(step.index)
            del wanted[0]
    return () if wanted else tuple(found)


def _equal(a: Call, b: Call) -> bool:
    return signature(a) == signature(b)
