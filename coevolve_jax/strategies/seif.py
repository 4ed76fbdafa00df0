"""SEIF (arXiv 2605.07465): an instructor is paid for what a follower misses, the follower for what it meets.

A is the share of a task's constraints that the follower meets. The instructor earns 1 - A, and 0 where it
gives no valid task; the follower earns A. Here a constraint is the effect of one user turn, so A is the share
of turns that pass before the first that fails. Validation stands for the paper's filter of conflicts.

Both learn in turn: the instructor at each evolution from the present policy, the follower between them.

Read against the authors' code, which pays 1 - A. Faithful: the opposing rewards, on tasks of several turns.
Missing: the instructor is a softmax over settings of a context (synthesis/knobs.py), and constraints in
language need a language model. Tasks of one turn have one constraint, so A is success.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import SIGNALS, Lab, StepReport, check_least, evolves
from coevolve_jax.strategies.groups import solve_rate
from coevolve_jax.strategies.growth import adopt_first, propose
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.knobs import KnobPolicy, factors, standardised
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.types import Group

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
NEEDS = frozenset({"probe"})
FIDELITY = "P: constraints are the effects of user turns, and the instructor's texts are not trained."
DEFAULTS = {
    "drafts": 2.0,  # drafts for each place of an evolution, all of which the instructor learns from
    "probe": 5,  # rollouts of each draft
    "learning_rate": 1.0,  # of the instructor
    "kl_coef": 0.01,  # of the instructor, towards the uniform distribution
}


class Seif(Static):
    """`Static` with other rewards and another `evolve` (strategies/base.py documents the methods).

    Its state, besides that of `Static`: the instructor's logits.
    """

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        check_least(config, {"drafts": 1, "probe": 1, "learning_rate": 0, "kl_coef": 0})
        super().__init__(config, state, rewards=met)
        self._knobs = dict(state["knobs"]) if state else {}

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        found = super().observe(step, groups)
        partly = sum(0 < a < 1 for g in groups for a in met(g))
        return StepReport({**found.counts, "partly_met": partly}, found.rows)

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        c, own = self._config, self._config.strategy
        if not evolves(c, step):
            return None
        rng, wanted, data = rng_for(c.seed, "evolve", step), c.evolution.tasks, c.data
        sizes = range(data.min_calls, data.max_calls + 1), range(1, data.max_turns + 1)
        policy = KnobPolicy(factors(lab.scenarios, *sizes), self._knobs)
        drawn = policy.sample(math.ceil(own.drafts * wanted), rng)
        drafts, made = propose(lab, drawn, "seif", step=step, rng=rng)
        groups = {g.task.id: g for g in lab.probe([t for t in drafts if t], own.probe, step)}
        rewards = [missed(groups[t.id] if t else None) for t in drafts]
        policy.update(drawn, standardised(rewards), own.learning_rate, own.kl_coef)
        self._knobs = policy.to_json()
        solved = {id: p for id, g in groups.items() if (p := solve_rate(g)) is not None}
        valid = [t for t in drafts if t and t.id in solved]
        adopted = adopt_first(lab, valid, wanted, kind="signal", solved=solved)
        return made.adopting(adopted, lab.tasks)

    def to_json(self) -> dict:
        return {**super().to_json(), "knobs": self._knobs}


make = Seif


def met(group: Group) -> list[float]:
    """The follower's reward: the share of the turns that pass, of each valid rollout in order.

    A success counts as 1, also in a family without turns.
    """
    return [max(t.outcome.progress, t.outcome.reward) for t in group.valid]


def missed(group: Group | None) -> float:
    """The instructor's reward for a draft with this probe; None stands for a setting that gave none.

    A draft that no valid rollout answered earns 0 too.
    """
    shares = met(group) if group else []
    return 1 - math.fsum(shares) / len(shares) if shares else 0.0
