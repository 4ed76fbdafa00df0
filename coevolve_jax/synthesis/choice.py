"""Chooses task sets of a given composition from more candidates, for evaluation and for testbeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from coevolve_jax.types import Task


def tools_of(task: Task) -> frozenset[str]:
    """Names of the tools in the task's reference calls."""
    return frozenset(call.name for call in task.calls)


def _actions_of(task: Task) -> frozenset[str]:
    """The tools of the task's reference calls, each with its action where that is another name.

    So a family with one tool has several, such as TextWorld's verbs.
    """
    named = zip(task.calls, task.actions, strict=True)
    return frozenset(
        call.name if action in ("", call.name) else f"{call.name} {action}" for call, action in named
    )


def balanced(candidates: Sequence[Task], count: int, rng: np.random.Generator) -> list[Task]:
    """Chooses `count` tasks in which all tools come as equally often as the candidates allow.

    Where a family tells actions of one tool apart, the actions are balanced. Each counts once per task.
    Greedy: the next task is a random one that has the action chosen least so far. The result keeps the
    candidates' order, and has fewer tasks if the candidates run out.
    """
    actions = sorted({action for task in candidates for action in _actions_of(task)})
    left = {action: [t for t in candidates if action in _actions_of(t)] for action in actions}
    for tasks in left.values():
        tasks[:] = [tasks[i] for i in rng.permutation(len(tasks))]
    chosen: dict[str, Task] = {}
    seen: Counter[str] = Counter()
    while len(chosen) < count:
        for action in list(left):
            while left[action] and left[action][-1].id in chosen:
                left[action].pop()
            if not left[action]:
                del left[action]
        if not left:
            break
        task = left[min(left, key=lambda action: (seen[action], action))].pop()
        chosen[task.id] = task
        seen.update(_actions_of(task))
    return [t for t in candidates if t.id in chosen]


def scarce(
    candidates: Sequence[Task],
    count: int,
    tools: Iterable[str],
    low: int,
    high: int,
    rng: np.random.Generator,
) -> list[Task]:
    """Chooses `count` tasks so that at least `low` and at most `high` of them call each of `tools`.

    The result keeps the candidates' order.

    Raises:
      ValueError: 20 random greedy searches find no such choice.
    """
    tools = frozenset(tools)
    for _ in range(20):
        order = [candidates[i] for i in rng.permutation(len(candidates))]
        seen: Counter[str] = Counter()
        chosen: dict[str, Task] = {}

        def take(task: Task, seen=seen, chosen=chosen) -> None:
            named = tools_of(task) & tools
            if task.id not in chosen and len(chosen) < count and all(seen[n] < high for n in named):
                chosen[task.id] = task
                seen.update(named)

        for tool in [t for t in sorted(tools) for _ in range(low)]:
            for task in order:
                if seen[tool] < low and tool in tools_of(task):
                    take(task)
        for task in order:
            take(task)
        if len(chosen) == count and all(seen[tool] >= low for tool in tools):
            return [t for t in candidates if t.id in chosen]
    held = Counter(tool for task in candidates for tool in tools_of(task) & tools)
    counts = ", ".join(
        f"{tool} in {held[tool]}" for tool in sorted(tools, key=lambda tool: (held[tool], tool))
    )
    raise ValueError(
        f"Of {len(candidates)} candidates ({counts}) no {count} tasks could be chosen in which "
        f"each of these tools comes {low} to {high} times: raise config.testbed.candidates, or ask for less."
    )
