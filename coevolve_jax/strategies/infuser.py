"""INFUSER (arXiv 2606.09052): a proposer is paid for tasks whose update helps on goal tasks set apart.

Score: the cosine between the update that a draft's rollouts ask for and the gradient of a goal set's rollouts
(`lab.influence`). The goal set is made in scenarios set apart, and nobody trains on it. A draft that repeats
one of its tasks is dropped.

A document is a scenario, of which the proposer makes several drafts. Its advantage (DuGRPO) is a draft's
score less the mean of its document, over the document's standard deviation plus the mean of all such
deviations that are not 0. A context whose draft is dropped, or that gives none, scores 0. D_t takes the
drafts of the highest scores.

Read against the authors' code. Faithful: score and advantage. Missing: the proposer is a softmax over
settings of a context (synthesis/knobs.py), not a language model. The paper scores 1,024 drafts a loop against
800 goal tasks, adopts all, and has a loss of its own; here the loss is the config's. At our sizes the score
hardly repeats (docs/notes/influence.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import SIGNALS, Lab, check_least, evolves
from coevolve_jax.strategies.groups import solve_rate
from coevolve_jax.strategies.growth import adopt_first, full, goal_set, probed, propose, set_apart, unseen
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.knobs import KnobPolicy, factors
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.types import Group, Task

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
NEEDS = frozenset({"probe", "influence"})
FIDELITY = "P: the proposer is a softmax over settings of a scripted explorer, and its texts are not trained."
DEFAULTS = {
    "documents": 8,  # scenarios of an evolution; the paper has 128 documents
    "questions": 4,  # drafts of each; the paper's 8
    "probe": 8,  # rollouts of each draft, whose gradients are scored
    "goal": 24,  # tasks of the goal set; the paper has 800
    "goal_probe": 8,  # rollouts of each of them, at each evolution
    "reward": "influence",  # "variance": exp(-(v - 1/4)^2 / 0.02), v = p (1 - p) of a draft (SPICE's reward)
    "preconditioned": True,  # score the direction of Adam's step; False: the plain gradient
    "keep": "top",  # D_t takes evolution.tasks drafts, best first; "none", as in the paper: no choice, all
    "learning_rate": 1.0,  # of the proposer
    "kl_coef": 0.0,  # of the proposer, towards the uniform distribution
}
EPS = 1e-6  # keeps the advantages of equal scores at 0


class Infuser(Static):
    """`Static` with another `evolve` (strategies/base.py documents the methods).

    Its state, besides that of `Static`: the proposer's logits and the goal set.
    """

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        own = config.strategy
        for name, choices in (("reward", ("influence", "variance")), ("keep", ("top", "none"))):
            if own[name] not in choices:
                raise ValueError(
                    f"config.strategy.{name} is {own[name]!r}: it must be {' or '.join(choices)}."
                )
        check_least(config, {"documents": 1, "questions": 2, "probe": 2, "goal": 1, "goal_probe": 2})
        check_least(config, {"learning_rate": 0, "kl_coef": 0})
        super().__init__(config, state)
        self._knobs = dict(state["knobs"]) if state else {}
        self._goal = [Task.from_json(task) for task in state["goal"]] if state else []

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        c, own, data = self._config, self._config.strategy, self._config.data
        if not evolves(c, step):
            return None
        if refused := full(c, lab):
            return refused
        rng, total = rng_for(c.seed, "evolve", step), SynthesisStats()
        if not self._goal:
            self._goal, total = goal_set(c, lab, own.goal, step)
        places, _ = set_apart(c, lab)
        chosen = rng.choice(len(places), own.documents, replace=own.documents > len(places))
        documents = [places[i] for i in chosen for _ in range(own.questions)]
        sizes = range(data.min_calls, data.max_calls + 1), range(1, data.max_turns + 1)
        policy = KnobPolicy(factors([], *sizes), self._knobs)
        drawn = policy.sample(len(documents), rng)
        drafts, made = propose(lab, drawn, "infuser", step=step, rng=rng, scenarios=documents)
        total.add(made)
        held = lab.tasks.fresh()
        held.add(self._goal)
        kept = {t.id for t in unseen(held, [t for t in drafts if t])}
        asked = [(d, i // own.questions) for i, d in enumerate(drawn)]
        pairs = probed(lab, asked, [t if t and t.id in kept else None for t in drafts], own.probe, step)
        groups = [g for _, g in pairs if g]
        scores = {g.task.id: s for g, s in zip(groups, self._scores(lab, groups, step), strict=True)}
        earned = advantages([scores[g.task.id] if g else 0.0 for _, g in pairs], [i for (_, i), _ in pairs])
        policy.update([d for (d, _), _ in pairs], earned, own.learning_rate, own.kl_coef)
        self._knobs = policy.to_json()
        solved = {g.task.id: p for g in groups if (p := solve_rate(g)) is not None}
        ranked = sorted((g.task for g in groups), key=lambda t: -scores[t.id])
        wanted = c.evolution.tasks if own.keep == "top" else len(ranked)
        return total.adopting(adopt_first(lab, ranked, wanted, kind="signal", solved=solved), lab.tasks)

    def _scores(self, lab: Lab, groups: Sequence[Group], step: int) -> list[float]:
        own = self._config.strategy
        if own.reward == "variance":
            rates = [solve_rate(g) or 0.0 for g in groups]
            return [math.exp(-((p * (1 - p) - 0.25) ** 2) / 0.02) for p in rates]
        goal = lab.probe(self._goal, own.goal_probe, step)
        return lab.influence(goal, groups, preconditioned=own.preconditioned)

    def to_json(self) -> dict:
        goal = [task.to_json() for task in self._goal]
        return {**super().to_json(), "knobs": self._knobs, "goal": goal}


make = Infuser


def advantages(scores: Sequence[float], documents: Sequence[int]) -> np.ndarray:
    """DuGRPO's advantage of each draft [n]. documents: the number of each draft's document."""
    rows, of = np.asarray(scores, np.float64), np.asarray(documents)
    own = [of == document for document in dict.fromkeys(documents)]
    uneven = [rows[i].std() for i in own if np.ptp(rows[i]) > 0]
    apart = np.mean(uneven) if uneven else 0.0
    result = np.zeros(len(rows))
    for i in own:
        result[i] = (rows[i] - rows[i].mean()) / (rows[i].std() + apart + EPS)
    return result
