"""Skills: what a task exercises, how sure a policy is of it, and which skills the next tasks are made for.

A skill is an action pattern, in worlds with levels a pattern at a level. Everything here is arithmetic; the
strategies that use it decide what counts as an attempt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Task, mixed

Counts = Mapping[str, tuple[float, float]]  # skill -> (attempts, misses)

HOPELESS = 12  # attempts that all failed make a skill hopeless


def skill(task: Task, action: str, key: str) -> str:
    """Names a skill: the action alone, or with the value of a scenario's key before it."""
    return f"{task.scenario.get(key, '')}|{action}" if key else action


def skills_of(tasks: Iterable[Task], key: str) -> set[str]:
    """The skills that the tasks call."""
    return {skill(task, action, key) for task in tasks for action in task.actions}


def unsettled(tasks: TaskPool, key: str) -> Counter[str]:
    """Counts the tasks that call each skill and are unvisited, or were last solved by some rollouts only."""
    scores = zip(tasks, tasks.rows["last_score"].tolist())
    return Counter(s for t, p in scores if math.isnan(p) or mixed(p, 1) for s in skills_of([t], key))


def beta(counts: Counts, prior: float, skills: Iterable[str] = ()) -> dict[str, tuple[float, float]]:
    """The Beta posterior (a, b) of each skill's success rate, in order of name.

    Each starts from `prior` attempts at the rate of all skills, which is a half if there are none.

    skills: further ones, without attempts.
    """
    # fsum is independent of order: after a resume the counts are sorted.
    n, misses = (math.fsum(own[i] for own in counts.values()) for i in (0, 1))
    rate, after = (1 - misses / n if n else 0.5), {}
    for name in sorted({*counts, *skills}):
        tried, missed = counts.get(name, (0.0, 0.0))
        after[name] = (1 + prior * rate + tried - missed, 1 + prior * (1 - rate) + missed)
    return after


def variance_of(theta: Mapping[str, float], failed: Mapping[str, float], floor: float) -> dict[str, float]:
    """Worth w of each skill: theta (1 - theta), or the floor for a hopeless one.

    failed: how many attempts at each skill have all failed (since the last that did not).
    """
    hopeless = {a for a, n in failed.items() if floor and n >= HOPELESS}
    return {a: floor if a in hopeless else p * (1 - p) for a, p in theta.items()}


def allocate(
    worth: Callable[[], Mapping[str, float]],
    live: Mapping[str, float],
    places: int,
    half: float,
    size: float = 1.0,
) -> list[str]:
    """Gives each place to the skill whose next task adds most; [] if there is no skill.

    Args:
      worth: () -> w of each skill. It is called for each place.
      live: number of tasks that each skill has already.
      half: n0 of w n / (n + n0); 0: one more task adds w, however many there are.
      size: tasks that a place is likely to give.
    """
    count, chosen = dict(live), []
    for _ in range(places):
        more = {a: w * next_share(count.get(a, 0.0), half) for a, w in worth().items()}
        if more:
            chosen.append(max(more, key=lambda a: more[a]))
            count[chosen[-1]] = count.get(chosen[-1], 0.0) + size
    return chosen


def next_share(n: float, half: float) -> float:
    """Share of a skill's whole worth that one task beyond n adds, if n tasks give n / (n + half); 0: all."""
    return half / ((n + half) * (n + 1 + half)) if half else 1.0
