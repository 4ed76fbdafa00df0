"""Tests whether a task's words suffice: the explorer solves it from them alone, in a fresh environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from coevolve_jax.envs.base import EnvPool
from coevolve_jax.explorers.base import Episode, Explorer
from coevolve_jax.synthesis.explore import Tools, offered_names, spawn
from coevolve_jax.types import Call, Context, Outcome, Task, Triplet, Turn


class Attempt(NamedTuple):
    """The result of solving a task. steps: number of calls made."""

    outcome: Outcome
    steps: int


def solve(
    explorer: Explorer,
    tools: Tools,
    env_pool: EnvPool,
    tasks: Sequence[Task],
    *,
    attempts: int,
    steps: int,
    rng: np.random.Generator,
) -> list[Attempt]:
    """Attempts each task up to `attempts` times, until it succeeds.

    The tasks run in lockstep, turn by turn, with at most `steps` calls per turn. The explorer sees the user's
    messages so far and the tools' answers, but no reference calls. An episode whose context has the signal
    "solve" asks it for the next call towards the last message; None means done.

    Returns:
      for each task the outcome of its last attempt and the calls of all its attempts.
    """
    left, last = list(range(len(tasks))), [Attempt(Outcome(0.0, False), 0)] * len(tasks)
    for _ in range(attempts):
        made = _attempt(explorer, tools, env_pool, [tasks[n] for n in left], steps, rng)
        for n, (outcome, calls) in zip(left, made, strict=True):
            last[n] = Attempt(outcome, last[n].steps + calls)
        left = [n for n in left if not last[n].outcome.success]
    return last


def _attempt(
    explorer: Explorer,
    tools: Tools,
    env_pool: EnvPool,
    tasks: Sequence[Task],
    steps: int,
    rng: np.random.Generator,
) -> list[Attempt]:
    env_ids, offered = env_pool.reset(tasks), [tools(task) for task in tasks]
    histories: list[list[Triplet]] = [[] for _ in tasks]
    rngs = spawn(rng, len(tasks))
    for turn in range(max((len(task.turns) for task in tasks), default=0)):
        present = [n for n, task in enumerate(tasks) if turn < len(task.turns)]
        active = present
        for _ in range(steps):
            episodes = [
                Episode(_asked(tasks[n], turn), offered[n], tuple(histories[n]), turn, rngs[n])
                for n in active
            ]
            chosen = zip(active, explorer.act(episodes), strict=True)
            calls: dict[int, Call] = {
                n: call for n, call in chosen if call is not None and call.name in offered_names(offered[n])
            }
            if not calls:
                break
            answers = env_pool.step([env_ids[n] for n in calls], [[call] for call in calls.values()])
            for n, (observation,) in zip(calls, answers):
                histories[n].append(Triplet(len(histories[n]), turn, calls[n], observation))
            active = [n for n, (o,) in zip(calls, answers) if o.valid and not o.fatal]
        env_pool.end_turn([env_ids[n] for n in present])
    outcomes = env_pool.score(env_ids)
    env_pool.close(env_ids)
    return [Attempt(outcome, len(history)) for outcome, history in zip(outcomes, histories)]


def _asked(task: Task, turn: int) -> Context:
    """The context of an attempt: the task up to this message, without reference calls."""
    words = tuple(Turn(t.query) for t in task.turns[: turn + 1])
    return Context(f"{task.id}/solve", "solve", dataclasses.replace(task, turns=words, description=""))
