"""SEIF (arXiv 2605.07465): an instructor is paid for what a follower misses, the follower for what it meets.

A is the share of a task's constraints that the follower meets. The instructor earns 1 - A, and 0 where it
gives no valid task; the follower earns A. Here a constraint is the effect of one user turn, so A is the share
of turns that pass before the first that fails. Validation stands for the paper's filter of conflicts.

Where a language model explores, the instructor may add a demand on the whole task, which the model says in a
user's words: no more calls than the reference makes, or never a certain tool that the reference does not use.
It is one more constraint. A rollout meets it whose turns all pass, and whose calls keep to it. An answer that
does not name the number or the tool counts as none.

Both learn in turn: the instructor at each evolution from the present policy, the follower between them.

Read against the authors' code, which pays 1 - A. Faithful: the opposing rewards, on tasks of several turns.
Missing: the instructor is a softmax over settings of a context (synthesis/knobs.py), and no text of it is
trained. Without demands, tasks of one turn have one constraint, so A is success.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies import questions
from coevolve_jax.strategies.base import SIGNALS, Lab, StepReport, check_least, evolves
from coevolve_jax.strategies.groups import solve_rate
from coevolve_jax.strategies.growth import adopt_first, full, probed, propose
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.knobs import KnobPolicy, factors, standardised
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.types import Group, Task, Trajectory

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
NEEDS = {"probe": "", "ask": "demands"}
FIDELITY = "P: constraints are the effects of user turns, and the instructor's texts are not trained."
DEFAULTS = {
    "drafts": 2.0,  # drafts for each place of an evolution, all of which the instructor learns from
    "probe": 5,  # rollouts of each draft
    "learning_rate": 1.0,  # of the instructor
    "kl_coef": 0.01,  # of the instructor, towards the uniform distribution
    "demands": True,  # constraints in words, where a language model explores
}
DEMANDS = ("none", "few calls", "without")

Demand = Sequence  # ["few calls", the most] or ["without", a tool]


class Seif(Static):
    """`Static` with other rewards and another `evolve` (strategies/base.py documents the methods).

    Its state, besides that of `Static`: the instructor's logits, and the demands of tasks of D_t by id.
    """

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        check_least(config, {"drafts": 1, "probe": 1, "learning_rate": 0, "kl_coef": 0})
        super().__init__(config, state, rewards=self.met)
        self._knobs = dict(state["knobs"]) if state else {}
        self._demands: dict[str, Demand] = dict(state.get("demands", {})) if state else {}

    def met(self, group: Group) -> list[float]:
        """The follower's reward of each valid rollout, with the demand of the task."""
        return met(group, self._demands.get(group.task.id))

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        found = super().observe(step, groups)
        partly = sum(0 < a < 1 for g in groups for a in self.met(g))
        return StepReport({**found.counts, "partly_met": partly}, found.rows)

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        c, own = self._config, self._config.strategy
        if not evolves(c, step):
            return None
        if refused := full(c, lab):
            return refused
        rng, wanted, data = rng_for(c.seed, "evolve", step), c.evolution.tasks, c.data
        sizes = range(data.min_calls, data.max_calls + 1), range(1, data.max_turns + 1)
        demands = {"demand": DEMANDS} if own.demands and c.explorer.name != "scripted" else {}
        policy = KnobPolicy({**factors(lab.scenarios, *sizes), **demands}, self._knobs)
        drawn = policy.sample(math.ceil(own.drafts * wanted), rng)
        drafts, made = propose(lab, drawn, "seif", step=step, rng=rng)
        if demands:
            drawn, drafts = self._demanding(drawn, drafts, lab, rng)
        pairs = probed(lab, drawn, drafts, own.probe, step)
        known, rewards = [d for d, _ in pairs], [instructed(self.met(g) if g else []) for _, g in pairs]
        policy.update(known, standardised(rewards), own.learning_rate, own.kl_coef)
        self._knobs = policy.to_json()
        solved = {g.task.id: p for _, g in pairs if g and (p := solve_rate(g)) is not None}
        valid = [g.task for _, g in pairs if g]
        adopted = adopt_first(lab, valid, wanted, kind="signal", solved=solved)
        held = {task.id for task in lab.tasks}
        self._demands = {id: demand for id, demand in self._demands.items() if id in held}
        return made.adopting(adopted, lab.tasks)

    def _demanding(
        self,
        drawn: Sequence[Mapping[str, Any]],
        drafts: Sequence[Task | None],
        lab: Lab,
        rng: np.random.Generator,
    ) -> tuple[list[Mapping[str, Any]], list[Task | None]]:
        """Adds the drawn demands to the drafts. Where the model gives no words, "none" was drawn instead."""
        pairs = [(t, d["demand"]) for d, t in zip(drawn, drafts, strict=True) if t]
        wanted = {t.id: demand for t, name in pairs if (demand := demand_of(name, t, lab, rng))}
        texts = questions.demands(lab, {t.id: (t, wanted[t.id]) for t, _ in pairs if t.id in wanted})
        self._demands |= {id: wanted[id] for id, text in texts.items() if names(text, wanted[id])}
        has = lambda t: t is None or t.id in self._demands
        drawn = [d if has(t) else {**d, "demand": "none"} for d, t in zip(drawn, drafts, strict=True)]
        return drawn, [demanding(t, texts[t.id]) if t and has(t) else t for t in drafts]

    def to_json(self) -> dict:
        return {**super().to_json(), "knobs": self._knobs, "demands": self._demands}


make = Seif


def met(group: Group, demand: Demand | None = None) -> list[float]:
    """The follower's reward: the share of the constraints that are met, of each valid rollout in order.

    A success passes all turns, also in a family without turns.
    """
    passed = [max(t.outcome.progress, t.outcome.reward) for t in group.valid]
    if demand is None:
        return passed
    turns = len(group.task.turns)
    kept = [share == 1 and keeps(t, demand) for share, t in zip(passed, group.valid, strict=True)]
    return [(share * turns + ok) / (turns + 1) for share, ok in zip(passed, kept, strict=True)]


def instructed(shares: Sequence[float]) -> float:
    """The instructor's reward for a draft whose probe met these shares; 0 for a setting without a draft."""
    return 1 - math.fsum(shares) / len(shares) if shares else 0.0


def demand_of(name: str, task: Task, lab: Lab, rng: np.random.Generator) -> Demand | None:
    """Returns a demand that the task's reference calls meet; None for "none", or where no tool is left."""
    called = [call.name for call in task.calls]
    if name == "without":
        others = sorted(lab.offered(task) - set(called))
        return [name, others[rng.integers(len(others))]] if others else None
    return [name, len(called)] if name == "few calls" else None


def keeps(trajectory: Trajectory, demand: Demand) -> bool:
    """Whether the calls of a rollout keep to a demand."""
    name, what = demand
    called = [step.call.name for step in trajectory.steps if step.call is not None]
    return len(called) <= what if name == "few calls" else what not in called


def names(text: str, demand: Demand) -> bool:
    """Whether a sentence names the number or the tool of a demand."""
    return bool(re.search(rf"(?<!\w){re.escape(str(demand[1]))}(?!\w)", text))


def demanding(task: Task, text: str) -> Task:
    """The task whose first query ends with this sentence."""
    first, *rest = task.turns
    return dataclasses.replace(task, turns=(dataclasses.replace(first, query=f"{first.query} {text}"), *rest))
