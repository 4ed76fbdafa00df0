"""How a batch is drawn from D_t: odds of tasks, and groups drawn anew where rewards are equal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.diagnosis.rewards import Rewards, outcome_rewards, rewards_of
from coevolve_jax.grpo.advantages import drop_zero_variance
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import Roll, must_be, spread_of
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import GIVEN, Group, Task


def collect_batch(
    config: ConfigDict,
    step: int,
    tasks: TaskPool,
    roll: Roll,
    *,
    rewards: Rewards = outcome_rewards,
    weights: Callable[[TaskPool], np.ndarray] | None = None,
    min_evolved_share: float | None = None,
    **how: Any,
) -> list[Group]:
    """Draws a batch of tasks from D_t and rolls each out K times.

    The draw follows config.data: min_evolved_share, sampling and retire_after.
    With config.learner.dynamic_sampling (DAPO, arXiv 2503.14476, section 3.2) each zero-variance group is
    replaced by another task, in at most that many further rounds. All groups are returned, the zero-variance
    ones too.

    Args:
      rewards: the rewards whose spread counts, before the terms of config.reward are added.
      weights: D_t [N] -> odds of its tasks [N], in the order of D_t. 0 retires a task: it comes only if no
        other is left. None: those of config.data.
      min_evolved_share: None: that of config.data.
      how: further arguments of `roll`.
    """
    c, groups, rewards = config, [], rewards_of(config, rewards)
    odds = (lambda rows: weights(tasks)) if weights else (lambda rows: sampling_weights(c, rows))
    share = c.data.min_evolved_share if min_evolved_share is None else min_evolved_share
    missing = c.rollout.tasks_per_step
    for round in range(1 + c.learner.dynamic_sampling):
        again = (round,) if round else ()
        drawn = tasks.draw(
            missing,
            rng_for(c.seed, "sample", step, *again),
            min_evolved_share=share,
            weights=odds,
            apart_from={group.task.id for group in groups},
        )
        if not drawn:
            break
        groups += roll(drawn, c.rollout.group_size, **how)
        missing = c.rollout.tasks_per_step - len(
            drop_zero_variance({i: spread_of(c, g, rewards(g)) for i, g in enumerate(groups)})
        )
        if missing <= 0:
            break
    return groups


def sampling_weights(config: ConfigDict, rows: np.ndarray) -> np.ndarray:
    """Sampling weight of each task, [N], from the task pool's rows [N].

    config.data.sampling "uniform" gives 1. "variance" gives max(config.data.sampling_floor, 4 p (1 - p)) for
    a last score p, and 1 before the first visit. A task weighs 0 if its last config.data.retire_after visits
    were all solved or all failed (0 turns this rule off).
    """
    c, weights = config.data, np.ones(len(rows))
    if c.sampling != "uniform":
        p = rows["last_score"]
        weights = np.where(np.isnan(p), 1.0, np.maximum(c.sampling_floor, 4 * p * (1 - p)))
    if c.retire_after:
        weights = np.where(rows["saturated_visits"] >= c.retire_after, 0.0, weights)
    return weights


def by_variance(config: ConfigDict) -> Callable[[TaskPool], np.ndarray]:
    """Odds of the tasks by p (1 - p), whatever config.data.sampling says: `weights` of `collect_batch`."""
    rule = ConfigDict({"data": {**config.data.to_dict(), "sampling": "variance"}})
    return lambda tasks: sampling_weights(rule, tasks.rows)


def keeping_share(order: Iterable[Task], places: Iterable[Task]) -> list[Task]:
    """Takes the first tasks of an order, as many evolved and as many given ones as hold the places.

    So a method that puts other tasks into a batch keeps the share of evolved tasks that was drawn.
    """
    left, taken = Counter(task.lineage.kind in GIVEN for task in places), []
    for task in order:
        if left[given := task.lineage.kind in GIVEN]:
            left[given] -= 1
            taken.append(task)
    return taken


TASK_NAMES = ("calls", "turns")  # names of a `category` that every task has: numbers of calls and of turns


def check_category(config: ConfigDict, name: str) -> None:
    """Raises ValueError unless a setting of the strategy may name a `category`."""
    named = all(part.strip() for part in config.strategy[name].split(","))
    must_be(config, name, named, "calls, turns or keys of scenarios, separated by commas")


def category(task: Task, names: str) -> str:
    """The task's category: its values of these names, joined by "/".

    names: separated by commas. "calls" is the number of reference calls, "turns" that of user turns. Any
      other name is a key of the scenario.

    Raises:
      ValueError: the scenario lacks a key.
    """
    known = {"calls": len(task.calls), "turns": len(task.turns), **task.scenario}
    for name in (wanted := names.split(",")):
        if name not in known:
            raise ValueError(
                f"Category {name!r} is no key of the scenario of task {task.id}: use calls, turns, "
                f"or one of {', '.join(sorted(task.scenario))}."
            )
    return "/".join(v if isinstance(v := known[name], str) else json.dumps(v) for name in wanted)
