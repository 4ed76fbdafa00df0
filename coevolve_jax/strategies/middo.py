"""Middo (arXiv 2508.21589): tasks that stay too hard are replaced by easier ones, lonely ones get company.

Source: the paper and the authors' code, with its three axes.

* Complexity: a task whose loss is above mean + deviations * std at both of its last two visits, so under two
  policies, is replaced by itself with one call less. It is drawn no more. The loss is 1 - share solved, so
  no task is too hard while most fail.
* Diversity: tasks that are least like their nearest neighbours get a sibling with other arguments. Likeness
  is the cosine of the counts of actions, with rare actions weighing most.

* Quality: with a language model as explorer it grades each task once, by its words. A task below mean -
  deviations * std of the grades is replaced by one of the same actions with other arguments, which the model
  words anew. The calls cannot stay: D_t holds a task once, whatever its words.

A task of other actions, which exploration gives where it cannot follow its plan, replaces none: it is refused
as "other_calls".

Missing: a model that simplifies, and without a language model the third axis. The paper's set keeps its
size. Ours keeps retired tasks at weight 0, and grows by the siblings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies import questions
from coevolve_jax.strategies.base import SIGNALS, Lab, StepReport, check_shares, evolves, must_be
from coevolve_jax.strategies.batches import sampling_weights
from coevolve_jax.strategies.groups import solve_rate
from coevolve_jax.strategies.growth import full, synthesize_in_turn
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.similarity import CountCosines
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.synthesis.validate import Verdict
from coevolve_jax.synthesis.variants import variant
from coevolve_jax.types import Group, Task

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
NEEDS = frozenset({"ask"})
FIDELITY = "P: complexity and diversity are measured, quality only where a language model explores."
DEFAULTS = {
    "deviations": 1.0,  # so many standard deviations is a hard task's loss above the mean, a grade below it
    "neighbours": 5,  # over which a task's likeness to others is averaged
    "lonely": 0.1,  # share of D_t, the tasks least like their neighbours, that get a sibling
}


# Ends of the contexts' ids whose tasks replace their parents; "drop_call" is that of earlier runs.
REPLACING = ("easier", "better", "drop_call")


class Middo(Static):
    """`Static` with another `evolve`, and odds of 0 for replaced tasks.

    Its state: the losses of each task at its last two visits, and the grades of tasks (0: the answer was no
    grade). D_t's lineages say which tasks are replaced.
    """

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        must_be(config, "neighbours", config.strategy.neighbours >= 1, "1 or more")
        check_shares(config, "lonely")
        super().__init__(config, state, weights=self.weights, needs_calls=True)
        self._losses: dict[str, list[float]] = dict(state["losses"]) if state else {}
        self._grades: dict[str, int] = dict(state.get("grades", {})) if state else {}

    def weights(self, tasks: TaskPool) -> np.ndarray:
        """Odds of each task of D_t [N]: those of config.data, and 0 for replaced tasks."""
        return sampling_weights(self._config, tasks.rows) * in_use(tasks)

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        for group in groups:
            if (p := solve_rate(group)) is not None:
                self._losses[group.task.id] = [*self._losses.get(group.task.id, []), 1 - p][-2:]
        return super().observe(step, groups)

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        c = self._config
        if not evolves(c, step):
            return None
        if refused := full(c, lab):
            return refused
        rng, losses = rng_for(c.seed, "evolve", step), self._losses
        used = in_use(lab.tasks)
        tasks = [task for task, weight in zip(lab.tasks, used, strict=True) if weight]
        hard = too_hard({t.id: losses.get(t.id, []) for t in tasks}, c.strategy.deviations)
        easier = [t for t in tasks if t.id in hard and len(t.calls) > c.data.min_calls]
        graded = questions.grades(lab, [t for t in tasks if t.id not in self._grades])
        self._grades = {**self._grades, **graded}  # a new one: an evolution that is given up leaves the old
        bad = poor({t.id: n for t in tasks if (n := self._grades.get(t.id))}, c.strategy.deviations)
        bad -= {t.id for t in easier}
        siblings = loneliest(tasks, c.strategy.neighbours)[: int(c.strategy.lonely * len(tasks))]
        wanted = [(t, "drop_call", "easier") for t in easier]
        wanted += [(t, "other_arguments", "better") for t in tasks if t.id in bad]
        replaced = bad | {t.id for t in easier}
        wanted += [(t, "other_arguments", "sibling") for t in siblings if t.id not in replaced]
        contexts = [variant(t, operator, rng, f"middo/{step}/{t.id}/{what}") for t, operator, what in wanted]

        def admit(made: Sequence[Task]) -> list[Verdict]:
            fit = [replaces(t, lab.tasks[t.lineage.parent or ""]) for t in made]
            return [Verdict(None if fits else "other_calls") for fits in fit]

        how = dict(kind="signal", step=step, rng=rng, admit=admit)
        return synthesize_in_turn(lab, contexts, wanted=c.evolution.tasks, **how)

    def to_json(self) -> dict:
        return {**super().to_json(), "losses": dict(self._losses), "grades": dict(self._grades)}


make = Middo


def in_use(tasks: TaskPool) -> np.ndarray:
    """Whether each task of D_t is in use [N]: 0 where an easier or better one of this method replaces it."""
    made = [(t.lineage.parent, (t.lineage.context or "").split("/")) for t in tasks]
    replaced = {id for id, born in made if born[0] == "middo" and born[-1] in REPLACING}
    return np.array([float(task.id not in replaced) for task in tasks])


def replaces(child: Task, parent: Task) -> bool:
    """Whether a task may replace its parent: an easier one has a part of its actions, a better one has all.

    A sibling, which replaces none, may have any.
    """
    own, wanted = Counter(child.actions), Counter(parent.actions)
    fits = {"easier": own <= wanted, "better": own == wanted}
    return fits.get((child.lineage.context or "").split("/")[-1], True)


def too_hard(losses: Mapping[str, Sequence[float]], deviations: float) -> set[str]:
    """The tasks whose losses at both of their last two visits are above mean + deviations * std.

    The mean and the standard deviation are those of all tasks at the same visit, the last or the one before.
    A task that was visited once counts at the last.
    """
    twice = {id: both for id, both in losses.items() if len(both) == 2}
    if not twice:
        return set()
    before = np.array([both[0] for both in twice.values()])
    last = np.array([visits[-1] for visits in losses.values() if visits])
    bounds = [x.mean() + deviations * x.std() for x in (before, last)]
    return {id for id, both in twice.items() if all(x > bound for x, bound in zip(both, bounds))}


def poor(grades: Mapping[str, int], deviations: float) -> set[str]:
    """The tasks whose grades are below mean - deviations * std of all."""
    if not grades:
        return set()
    found = np.array(list(grades.values()))
    return {id for id, n in grades.items() if n < found.mean() - deviations * found.std()}


def loneliest(tasks: Sequence[Task], neighbours: int) -> list[Task]:
    """The tasks by their mean cosine to their nearest neighbours, the least first."""
    cosines = CountCosines(tasks, lambda task: Counter(task.actions))
    means = []
    for i, task in enumerate(tasks):
        others = np.delete(cosines(task), i)
        means.append(float(np.sort(others)[::-1][:neighbours].mean()) if len(others) else 0.0)
    return [tasks[i] for i in np.argsort(means, kind="stable")]
