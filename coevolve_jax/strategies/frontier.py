"""Frontier: tasks for the skills of which one more task is worth most (a method of ours, no paper).

A skill is an action pattern, in worlds with levels a pattern at a level. Each has a Beta posterior of its
success rate theta, from first-sight attempts in training and from all probes. A rollout with success rate
theta has the expected squared advantage w = theta (1 - theta).

Aim: the worth of n tasks of a skill is w n / (n + n0), so returns diminish. Each place of an evolution goes
to the skill whose next task adds most. theta is drawn anew for each place (batch Thompson sampling). The
tasks of D_t that call the skill and are not settled count from the start.

Choice: drafts for more places than there are are probed. Those that half of the rollouts solve come first,
those that all or none solve last. Batches of D_t are drawn by p (1 - p).

The candidates are the skills that D_t or a probe has met. Drafts hold other calls too, so their probes bring
in new skills. Where D_t has no reference calls, all tools on offer are candidates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies import blame
from coevolve_jax.strategies.base import SIGNALS, Lab, Roll, StepReport, check_least, check_shares, evolves
from coevolve_jax.strategies.batches import by_variance, collect_batch
from coevolve_jax.strategies.groups import solve_rate
from coevolve_jax.strategies.growth import adopt_first, full, synthesize_for_tools
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.skills import Counts, allocate, beta, skill, skills_of, unsettled, variance_of
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Group, Task

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
NEEDS = frozenset({"probe"})
SCENARIO_KEYS = {"level": ()}
IGNORES = {"data.sampling": "odds"}
FIDELITY = "F: a method of ours, whose whole definition is this file."
DEFAULTS = {
    "first_sight": 1,  # how many first visits to a task count; 0: all
    "memory": 0.95,  # decay of the counts per GRPO step
    "prior": 4.0,  # pseudo-attempts at the success rate of all skills
    "thompson": True,  # draw theta from the posterior; False: its mean
    "diminishing": 3.0,  # n0: so many tasks give half of a skill's worth; 0: returns do not diminish
    "probe": 4,  # rollouts of each draft; 0: every valid task, no drafts
    "drafts": 2.5,  # drafts for each place
    "odds": True,  # draw batches by p (1 - p); False: by config.data.sampling
    "floor": 0.02,  # w of a skill whose last 12 attempts all failed; 0: as the posterior says
    "level": "",  # key of a scenario that tells the level; "": a skill is a pattern alone
}


class Frontier(Static):
    """`Static` with another `collect`, `observe` and `evolve` (strategies/base.py documents the methods).

    Its state, besides that of `Static`: (attempts, misses) of each skill, how many attempts at it failed
    since the last that did not, and visits to each task.
    """

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        check_least(config, {"first_sight": 0, "prior": 0, "diminishing": 0, "probe": 0, "drafts": 1})
        check_shares(config, "memory")
        super().__init__(config, state)
        self._counts: Counts = {a: tuple(n) for a, n in (state["skills"] if state else {}).items()}
        self._failed: dict[str, int] = dict(state.get("failed", {})) if state else {}
        self._visits: dict[str, int] = dict(state["visits"]) if state else {}

    def collect(self, step: int, tasks: TaskPool, roll: Roll) -> list[Group]:
        odds = by_variance(self._config) if self._config.strategy.odds else None
        return collect_batch(self._config, step, tasks, roll, weights=odds)

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        own, found = self._config.strategy, super().observe(step, groups)
        fresh = [g for g in groups if not own.first_sight or self._seen(g) < own.first_sight]
        self._visits.update({g.task.id: self._seen(g) + 1 for g in groups if own.first_sight and g.valid})
        faded = {a: (own.memory * n, own.memory * missed) for a, (n, missed) in self._counts.items()}
        self._counts = counted(faded, fresh, own.level)
        self._failed = failed_last(self._failed, fresh, own.level)
        missed = sum(wrong for _, wrong in attempted(fresh, own.level))
        return StepReport({**found.counts, "frontier": missed}, found.rows)

    def _seen(self, group: Group) -> int:
        return self._visits.get(group.task.id, 0)

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        c, own = self._config, self._config.strategy
        if not evolves(c, step):
            return None
        rng, wanted = rng_for(c.seed, "evolve", step), c.evolution.tasks
        places = math.ceil(own.drafts * wanted) if own.probe else wanted
        posterior = beta(self._counts, own.prior, skills_of(lab.tasks, own.level) or on_offer(lab, own.level))

        def worth() -> dict[str, float]:
            draw = rng.beta if own.thompson else lambda a, b: a / (a + b)
            theta = {skill: float(draw(*ab)) for skill, ab in posterior.items()}
            return variance_of(theta, self._failed, own.floor)

        skills = allocate(worth, unsettled(lab.tasks, own.level), places, own.diminishing, wanted / places)
        how = dict(key=own.level, step=step, rng=rng)
        if not own.probe:
            return synthesize_for_skills(lab, skills, "frontier", kind="signal", **how)
        if refused := full(c, lab):
            return refused
        drafts = lab.tasks.fresh()
        made = synthesize_for_skills(lab, skills, "frontier", kind="draft", into=drafts, **how)
        groups = lab.probe(list(drafts), own.probe, step)
        self._counts = counted(self._counts, groups, own.level)
        self._failed = failed_last(self._failed, groups, own.level)
        solved = {g.task.id: p for g in groups if (p := solve_rate(g)) is not None}
        ranked = sorted((t for t in drafts if t.id in solved), key=lambda t: abs(solved[t.id] - 0.5))
        adopted = adopt_first(lab, ranked, wanted, kind="signal", solved=solved)
        return made.adopting(adopted, lab.tasks)

    def to_json(self) -> dict:
        skills = {a: list(self._counts[a]) for a in sorted(self._counts)}
        return {**super().to_json(), "skills": skills, "failed": self._failed, "visits": self._visits}


make = Frontier


def attempted(groups: Sequence[Group], key: str) -> Iterator[tuple[str, bool]]:
    """Yields (skill, whether it was missed) of each attempt of all valid rollouts (blame.attempts)."""
    for group in groups:
        for t in group.valid:
            for action, missed in blame.attempts(group.task, t):
                yield skill(group.task, action, key), missed


def failed_last(failed: Mapping[str, int], groups: Sequence[Group], key: str) -> dict[str, int]:
    """How many attempts at each skill failed since the last that did not, after these groups."""
    after = dict(failed)
    for name, missed in attempted(groups, key):
        after[name] = after.get(name, 0) + 1 if missed else 0
    return {name: n for name, n in sorted(after.items()) if n}


def counted(counts: Counts, groups: Sequence[Group], key: str) -> Counts:
    """Adds the attempts of all valid rollouts to the counts."""
    after = dict(counts)
    for name, missed in attempted(groups, key):
        n, misses = after.get(name, (0.0, 0.0))
        after[name] = (n + 1, misses + missed)
    return after


def on_offer(lab: Lab, key: str) -> set[str]:
    """The skills of D_t, and all tools on offer unless the family has action patterns of its own."""
    known = skills_of(lab.tasks, key)
    if any(task.patterns for task in lab.tasks):
        return known
    return known | {skill(s, tool, key) for s in lab.scenarios for tool in lab.offered(s)}


def synthesize_for_skills(
    lab: Lab,
    skills: Sequence[str],
    signal: str,
    *,
    key: str,
    scenarios: Sequence[Task] | None = None,
    **how: Any,
) -> SynthesisStats:
    """Makes one task for each skill by `synthesize_for_tools`, in scenarios of its level.

    scenarios: None stands for all of `lab.scenarios`. how: further arguments of `lab.synthesize`.
    """
    total, among = SynthesisStats(), lab.scenarios if scenarios is None else scenarios
    levels = sorted({s.partition("|")[0] for s in skills}) if key else [""]
    for level in levels:
        own = [s for s in skills if not key or s.partition("|")[0] == level]
        places = [s for s in among if not key or str(s.scenario.get(key, "")) == level]
        actions = [s.partition("|")[2] if key else s for s in own]
        name = f"{signal} {level}" if key else signal
        total.add(synthesize_for_tools(lab, actions, name, scenarios=places, wanted=len(own), **how))
    return total
