"""Forecasts of how many groups are live under other group sizes and other draws, from recorded groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
import scipy.optimize
import scipy.special
import scipy.stats
from ml_collections import ConfigDict

from coevolve_jax.diagnosis.rewards import rewards_of
from coevolve_jax.strategies.batches import collect_batch
from coevolve_jax.synthesis.signals import task_scores
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Group, Task, spread

Run = Sequence[Sequence[Group]]  # the groups of each step, in order


def share_mixed(groups: Iterable[Group], k: int) -> float:
    """The expected share of mixed groups of k rollouts.

        1 - (C(s, k) + C(n - s, k)) / C(n, k)

    for s successes among n >= k valid rollouts, the mean over groups. Where no group has k, by a
    beta-binomial fit of the successes.
    """
    counts = [(sum(t.outcome.success for t in g.valid), len(g.valid)) for g in groups if g.valid]
    solved, tried = np.array(counts, float).reshape(-1, 2).T
    if not len(tried):
        return 0.0
    large = tried >= k
    if large.any():
        s, n = solved[large], tried[large]
        alike = (scipy.special.comb(s, k) + scipy.special.comb(n - s, k)) / scipy.special.comb(n, k)
        return float(1 - alike.mean())
    a, b = beta_binomial(solved, tried)
    all_solved = lambda a, b: np.exp(scipy.special.betaln(a + k, b) - scipy.special.betaln(a, b))
    return float(1 - all_solved(a, b) - all_solved(b, a))


def beta_binomial(solved: np.ndarray, tried: np.ndarray) -> tuple[float, float]:
    """The likeliest a and b, within e^-6 and e^6, for successes [n] of trials [n]."""
    likelihood = lambda x: -scipy.stats.betabinom.logpmf(solved, tried, *np.exp(x)).sum()
    found = scipy.optimize.minimize(likelihood, np.zeros(2), bounds=[(-6, 6)] * 2)
    a, b = np.exp(found.x).tolist()
    return a, b


def live_drawn(config: ConfigDict, runs: Sequence[Run]) -> tuple[float, float]:
    """Replays the draws of runs under a config with their recorded groups.

    The batches are those of `collect_batch`. A task's rollouts are those of its visit nearest to the step.

    Returns:
      (groups with spread, all groups), each per step.
    """
    rewards = rewards_of(config)
    live = drawn = steps = 0
    for run in runs:
        tasks, recorded = TaskPool(), _Recorded(run)
        waiting = recorded.tasks
        for recorded.step in range(len(run)):
            tasks.add([task for task in waiting if task.lineage.step <= recorded.step])
            waiting = [task for task in waiting if task.lineage.step > recorded.step]
            groups = collect_batch(config, recorded.step, tasks, recorded) if len(tasks) else []
            tasks.record(task_scores(groups))
            live += sum(spread(rewards(group)) > 0 for group in groups)
            drawn += len(groups)
        steps += len(run)
    return live / max(steps, 1), drawn / max(steps, 1)


class _Recorded:
    """A strategies.base.Roll that gives each task's recorded group of the visit nearest to `step`."""

    def __init__(self, run: Run):
        self.step = 0
        self._visits: dict[str, list[tuple[int, Group]]] = defaultdict(list)
        for step, groups in enumerate(run):
            for group in groups:
                self._visits[group.task.id].append((step, group))

    @property
    def tasks(self) -> list[Task]:
        return [visits[0][1].task for visits in self._visits.values()]

    def __call__(self, tasks: Sequence[Task], k: int, hints: object = None, role: str = "") -> list[Group]:
        nearest = lambda visit: abs(visit[0] - self.step)
        return [min(self._visits[task.id], key=nearest)[1] for task in tasks]
