"""SAGE (arXiv 2512.17102): a skill from one task of a chain is paid if it helps to solve the next.

Chain: two tasks that call many actions alike, in one scenario where there are such. The second takes the
place of a task that was drawn, an evolved one that of an evolved one. Its rollout i is offered a tool that is
cut from rollout i of the first, if that succeeds: its calls of the actions that both tasks call, with their
arguments as parameters (types.Macro). The rewards are

    R1 = r1 + [r1 = 1] [r2 = 1] [the second used the skill],   R2 = r2 + [r2 = 1] [it used the skill],

and -1 for a rollout without any call. At evaluation the policy is offered the skill, of those that paid,
whose task's query has most words in common with the present one.

No code was found. Faithful: the rewards on chains of two, without a standard deviation (arm `sage`). Missing:
the policy writes its skills as code, where rules cut them here. In AppWorld a skill would be a function of
the policy's own code, and that is not built. The growth of D_t is that of `random`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies import hints
from coevolve_jax.strategies.base import SIGNALS, Roll, StepReport, check_least, check_rolled_once, must_be
from coevolve_jax.strategies.batches import keeping_share, sampling_weights
from coevolve_jax.strategies.growth import synthesize_freely
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Group, Hint, Macro, Task, Trajectory

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
NEEDS = frozenset({"help", "macros"})
FIDELITY = "P: rules cut the skills from successful rollouts, where the policy writes them as code."
DEFAULTS = {
    "bonus": 1.0,  # of a skill that is used in a success; 0: GRPO with skills on offer
    "least_calls": 2,  # of a skill
    "most_calls": 4,
    "kept": 100,  # skills that evaluations choose from
}


class Sage(Static):
    """`Static` with another `collect`, other rewards and hints (strategies/base.py documents the methods).

    Its state, besides that of `Static`: the macro and the words of each skill that paid, oldest first. The
    chains of a step are for its other calls alone.
    """

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        check_least(config, {"bonus": 0, "least_calls": 1, "kept": 1})
        least, most = config.strategy.least_calls, config.strategy.most_calls
        must_be(config, "most_calls", most >= least, f"config.strategy.least_calls ({least}) or more")
        check_rolled_once(config)
        super().__init__(config, state, synthesize_freely, rewards=self.rewards)
        kept = state["skills"] if state else []  # by name in earlier runs
        self._skills: list[Mapping] = [*(kept.values() if isinstance(kept, Mapping) else kept)]
        self._chains: list[tuple[Group, Group]] = []

    def collect(self, step: int, tasks: TaskPool, roll: Roll) -> list[Group]:
        c, rng = self._config, rng_for(self._config.seed, "sample", step)
        size, k = c.rollout.tasks_per_step, c.rollout.group_size
        odds = lambda rows: sampling_weights(c, rows)
        share = c.data.min_evolved_share
        drawn = [*{t.id: t for t in tasks.draw(size, rng, min_evolved_share=share, weights=odds)}.values()]
        firsts, places = drawn[: (size + 1) // 2], drawn[(size + 1) // 2 :]
        taken, seconds = {t.id for t in firsts}, []
        usable = {t.id for t, weight in zip(tasks, odds(tasks.rows), strict=True) if weight}
        usable |= {t.id for t in places}  # so each place finds a task of its kind
        for first, place in zip(firsts, places):
            others = [t for t in tasks if t.id in usable - taken]
            order = sorted(others, key=lambda t, a=first: (*like(a, t), rng.random()), reverse=True)
            seconds += keeping_share(order, [place])
            taken |= {t.id for t in seconds}
        before = roll(firsts, k)
        came = {second.id: group for second, group in zip(seconds, before)}
        after = roll(seconds, k, hints=lambda task, m: self._offer(came[task.id], task, m)) if seconds else []
        self._chains = list(zip(before, after))
        return [*before, *after]

    def _offer(self, first: Group, second: Task, rollout_index: int) -> Hint | None:
        own, t = self._config.strategy, first.trajectories[rollout_index]
        shared = {*first.task.actions} & {*second.actions}
        made = [s.call for s in t.steps if s.call and not s.error and s.action in shared][: own.most_calls]
        fit = t.outcome.success and len(made) >= own.least_calls
        return Hint(macros=(hints.macro_of(made),)) if fit else None

    def help(self, task: Task, rollout_index: int) -> Hint | None:
        asked = hints.words(task.turns[0].query)
        near = [hints.overlap(own["words"], asked) for own in self._skills]
        if not any(near):
            return None
        return Hint(macros=(Macro.from_json(self._skills[int(np.argmax(near))]["macro"]),))

    def rewards(self, group: Group) -> list[float]:
        """R of each valid rollout of a group, R1 or R2 if it is in a chain."""
        chain = next((c for c in self._chains if group.task.id in (c[0].task.id, c[1].task.id)), None)
        return [self._reward(t, chain) for t in group.valid]

    def _reward(self, t: Trajectory, chain: tuple[Group, Group] | None) -> float:
        if not any(s.call for s in t.steps):
            return -1.0
        paid = chain is not None and t.outcome.success and bool(used_well(chain[1], t.rollout_index))
        return t.outcome.reward + self._config.strategy.bonus * paid

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        found, chained = super().observe(step, groups), 0
        for first, second in self._chains:
            for t in (t for t in second.valid if used_well(second, t.rollout_index)):
                chained += 1
                macro = self._offer(first, second.task, t.rollout_index)
                words = sorted(hints.words(second.task.turns[0].query))
                paid = [
                    {"macro": skill.to_json(), "words": words} for skill in (macro.macros if macro else ())
                ]
                self._skills = [skill for skill in self._skills if skill not in paid] + paid
        self._skills = self._skills[-self._config.strategy.kept :]
        offered = sum(bool(t.hints) for g in groups for t in g.trajectories)
        return StepReport({**found.counts, "offered": offered, "chained": chained}, found.rows)

    def to_json(self) -> dict:
        return {**super().to_json(), "skills": list(self._skills)}


make = Sage


def like(first: Task, t: Task) -> tuple[bool, float]:
    """How well a task follows another in a chain: in its scenario, if they share actions; then how many."""
    shared = hints.overlap(t.actions, first.actions)
    return shared > 0 and t.scenario == first.scenario, shared


def used_well(second: Group, rollout_index: int) -> bool:
    """Whether this rollout of a chain's second task succeeded and used the skill."""
    return any(
        t.outcome.success and any(s.macro for s in t.steps)
        for t in second.valid
        if t.rollout_index == rollout_index
    )
