"""TTCS (arXiv 2601.22628): a synthesiser makes variants of test queries, and the solver trusts its majority.

The policy learns from held-out queries without their answers (config.evaluation.queries) and from variants of
them. A rollout earns 1 if its ending is the one that most rollouts of its group share, else 0. Only groups
whose agreement p_hat lies in a band are learned from. D_0 is never drawn. With `variants` off this is TTRL.

The synthesiser earns max(0, (4 p_hat (1 - p_hat))^1.2 * novelty - share) of a variant. Novelty is 1, or 1
less its likeness to its query where that is high. Share is that of variants with the same actions. A setting
that gives no variant earns 0.

Read against the authors' code. Faithful: both rewards, the pseudo-labels, the band, the weight of queries.
Missing: the synthesiser is a softmax over operators on a query (synthesis/variants.py), not a language model.
A variant starts from the calls of the query's majority. Its own reference calls are no label.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.envs.base import features
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import SIGNALS, Lab, StepReport, check_band, check_least, evolves, must_be
from coevolve_jax.strategies.groups import majority
from coevolve_jax.strategies.growth import adopt_first, draft, full, probed
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.knobs import KnobPolicy, standardised
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.similarity import CountCosines
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.synthesis.variants import possible, variant
from coevolve_jax.types import GIVEN, Call, Group, Task, TrainingSample, Turn

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
NEEDS = frozenset({"endings", "probe", "queries"})
IGNORES = dict.fromkeys(
    ("data.sampling", "data.sampling_floor", "data.retire_after", "data.min_evolved_share"), ""
)
FIDELITY = "P: the synthesiser is a softmax over operators on a query, and its texts are not trained."
DEFAULTS = {
    "variants": True,  # False: the queries alone (TTRL)
    "query_weight": 5.0,  # odds of a query, where a variant has 1
    "band": (0.25, 0.75),  # p_hat of the groups that are learned from, and of the variants that D_t takes
    "drafts": 2.0,  # drafts for each place of an evolution
    "probe": 10,  # rollouts of each draft
    "power": 1.2,  # of 4 p_hat (1 - p_hat) in the synthesiser's reward
    "alike": 0.6,  # cosine to its query from which on a variant's likeness is taken off
    "learning_rate": 1.0,  # of the synthesiser
    "kl_coef": 0.01,  # of the synthesiser, towards the uniform distribution
}
OPERATORS = ("drop_call", "add_call", "other_arguments", "new_turn")


class TTCS(Static):
    """`Static` with other rewards, odds and another `evolve` (strategies/base.py documents the methods).

    Its state, besides that of `Static`: the synthesiser's logits, and what each query's majority did last.
    """

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        check_band(config)
        must_be(config, "query_weight", config.strategy.query_weight > 0, "above 0")
        least = {"drafts": 1, "probe": 2, "power": 0, "learning_rate": 0, "kl_coef": 0}
        check_least(config, least)
        super().__init__(config, state, rewards=agreement, weights=self.weights, min_evolved_share=0.0)
        own = state or {"knobs": {}, "done": {}}
        self._knobs, self._done = dict(own["knobs"]), dict(own["done"])

    def weights(self, tasks: TaskPool) -> np.ndarray:
        """Odds of each task of D_t [N]: queries, variants, and 0 for D_0."""
        own = self._config.strategy.query_weight
        odds = lambda task: own if task.is_query else float(task.lineage.kind not in GIVEN)
        return np.array([odds(task) for task in tasks])

    def compute_advantages(self, groups: Sequence[Group]) -> list[TrainingSample]:
        return super().compute_advantages([g for g in groups if self._in_band(g)])

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        for group in groups:
            if group.task.is_query and group.valid:
                self._done[group.task.id] = majority_calls(group)
        found = super().observe(step, groups)
        own = {
            "queries": sum(g.task.is_query for g in groups),
            "in_band": sum(map(self._in_band, groups)),
        }
        rows = [
            {"kind": "agreement", "task_id": g.task.id, "step": step, "p_hat": majority(g)[0]}
            for g in groups
            if g.valid
        ]
        return StepReport({**found.counts, **own}, [*found.rows, *rows])

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        c, own = self._config, self._config.strategy
        if not (own.variants and evolves(c, step)):
            return None
        known = [acted(task, done) for task in lab.tasks if (done := self._done.get(task.id))]
        if (refused := full(c, lab)) or not known:
            return refused or SynthesisStats()
        rng, wanted = rng_for(c.seed, "evolve", step), c.evolution.tasks
        policy = KnobPolicy({"operator": OPERATORS}, self._knobs)
        drawn = policy.sample(math.ceil(own.drafts * wanted), rng)
        sources = [known[i] for i in rng.integers(len(known), size=len(drawn))]
        asked, sizes = list(zip(drawn, sources)), (c.data.min_calls, c.data.max_calls, c.data.max_turns)
        contexts = [
            variant(t, d["operator"], rng, f"ttcs/{step}/{i}") if possible(t, d["operator"], *sizes) else None
            for i, (d, t) in enumerate(asked)
        ]
        drafts, made = draft(lab, [context for context in contexts if context], step=step, rng=rng)
        by_context = {task.lineage.context: task for task in drafts}
        pairs = probed(lab, asked, [c and by_context.get(c.id) for c in contexts], own.probe, step)
        rewards = earned([g for _, g in pairs], [query for (_, query), _ in pairs], own)
        policy.update([d for (d, _), _ in pairs], standardised(rewards), own.learning_rate, own.kl_coef)
        self._knobs = policy.to_json()
        chosen = [g.task for _, g in pairs if g and self._in_band(g)]
        return made.adopting(adopt_first(lab, chosen, wanted, kind="signal"), lab.tasks)

    def to_json(self) -> dict:
        return {**super().to_json(), "knobs": self._knobs, "done": self._done}

    def _in_band(self, group: Group) -> bool:
        low, high = self._config.strategy.band
        return low <= majority(group)[0] <= high


make = TTCS


def agreement(group: Group) -> list[float]:
    """The solver's reward: for each valid rollout, whether its ending is the majority's."""
    return [float(agrees) for agrees in majority(group)[2]]


def majority_calls(group: Group) -> list[list]:
    """Returns (turn, call, action pattern) of each good call of the first rollout that is of the majority.

    Empty where there is none, or where it called nothing.
    """
    agreeing = [t for t, agrees in zip(group.valid, majority(group)[2], strict=True) if agrees]
    steps = [s for t in agreeing[:1] for s in t.steps if s.call and s.action and not s.error]
    return [[s.turn, s.call.to_json(), s.action] for s in steps if s.call]


def acted(query: Task, done: Sequence[Sequence]) -> Task:
    """Returns the query with the calls that its majority made, as if these were its reference."""
    own = [(turn, Call.from_json(call), action) for turn, call, action in done]
    turns = [Turn(t.query, tuple(call for n, call, _ in own if n == i)) for i, t in enumerate(query.turns)]
    patterns = tuple(action for _, call, action in own) if any(a != call.name for _, call, a in own) else ()
    return dataclasses.replace(query, turns=tuple(turns), patterns=patterns)


def earned(groups: Sequence[Group | None], queries: Sequence[Task], own: ConfigDict) -> list[float]:
    """The synthesiser's reward for each of its settings.

    Args:
      groups: the probe of each variant; None for a setting that gave none.
      queries: the query of each, with its majority's calls.
      own: the strategy's settings.
    """
    drafts = [g.task for g in groups if g]
    same = Counter(task.actions for task in drafts)
    sources = {task.id: task for task in queries}
    cosines = CountCosines(list(sources.values()), features, drafts)
    place = {id: i for i, id in enumerate(sources)}

    def reward(group: Group | None, query: Task) -> float:
        if group is None:
            return 0.0
        p, likeness = majority(group)[0], float(cosines(group.task)[place[query.id]])
        novelty = 1 - likeness if likeness > own.alike else 1.0
        return max(0.0, (4 * p * (1 - p)) ** own.power * novelty - same[group.task.actions] / len(drafts))

    return [reward(g, query) for g, query in zip(groups, queries, strict=True)]
