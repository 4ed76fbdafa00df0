"""The graph of actions: which answers fed which arguments, and random walks over it, as plans of tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coevolve_jax.envs.base import canonical
from coevolve_jax.types import Group

TELLING = 3  # least characters of a value that shows that an answer fed an argument


def fed(groups: Sequence[Group]) -> set[tuple[str, str]]:
    """(action, later action) wherever a rollout's answer holds a value of a later call's argument.

    Both calls succeeded. The value may also stand in the user's words: in tasks of the scripted explorer all
    arguments do.
    """
    edges = set()
    for t in (t for group in groups for t in group.valid):
        steps = [(s, s.call.arguments) for s in t.steps if s.action and s.call is not None and not s.error]
        for i, (later, arguments) in enumerate(steps):
            values = [v if isinstance(v, str) else canonical(v) for v in arguments.values() if telling(v)]
            told = {s.action for s, _ in steps[:i] if any(v in s.observation for v in values)}
            edges |= {(action, later.action) for action in told - {later.action}}
    return edges


def telling(value: Any) -> bool:
    """Whether a value is a text or a number of at least TELLING characters."""
    text = value if isinstance(value, str) else canonical(value)
    return isinstance(value, str | int | float) and not isinstance(value, bool) and len(text) >= TELLING


def walk(
    start: str,
    actions: Sequence[str],
    related: Callable[[str, str], float],
    length: int,
    rng: np.random.Generator,
) -> tuple[str, ...]:
    """Walks from `start` over at most `length` different actions. related: weight of an edge."""
    chain = [start]
    while len(chain) < length and (left := [action for action in actions if action not in chain]):
        odds = np.array([related(chain[-1], action) for action in left])
        chain.append(left[rng.choice(len(left), p=odds / odds.sum())])
    return tuple(chain)
