"""Agent0 (arXiv 2511.16043): a proposer is paid for tasks on which the solver's answers disagree.

The proposer earns min(p, 1 - p) of a draft, where p is the share of the probing rollouts that agree with the
majority (p_hat). It counts as 0 unless the majority is right. The share of drafts with the same actions is
taken off, and each tool call adds a little, up to four. A context that gives no draft earns -1.

The solver learns from drafts with p_hat in a band. Its label is the majority's ending at that time, so a
wrong majority can become one. Advantages of tasks with a low p_hat are scaled down (ADPO).

Read against the authors' code. Faithful: both rewards, the band, the label, the scaling. Missing: the
proposer is a softmax over settings of a context (synthesis/knobs.py), not a language model, so its texts are
not trained. The looser clip of ADPO has no effect at one update per batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import (
    SIGNALS,
    Lab,
    StepReport,
    check_band,
    check_least,
    check_shares,
    evolves,
)
from coevolve_jax.strategies.groups import majority, solve_rate
from coevolve_jax.strategies.growth import adopt_first, full, probed, propose
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.knobs import KnobPolicy, factors, standardised
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.types import Group, TrainingSample

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
NEEDS = frozenset({"endings", "probe"})
FIDELITY = "P: the proposer is a softmax over settings of a scripted explorer, and its texts are not trained."
DEFAULTS = {
    "labels": "majority",  # what the solver learns adopted tasks from; "checker": the environment's rewards
    "drafts": 2.0,  # drafts for each place of an evolution
    "probe": 10,  # rollouts of each draft
    "band": (0.3, 0.8),  # p_hat of the drafts that D_t takes
    "uncertainty": 1.0,  # weight of min(p_hat, 1 - p_hat) in the proposer's reward; 2 is R-Zero's reward
    "diversity": 1.0,  # weight of the share of drafts with the same actions
    "tool_bonus": 0.05,  # for each of up to four calls
    "updates": 2,  # of the proposer, at each evolution
    "learning_rate": 1.0,  # of the proposer
    "kl_coef": 0.01,  # of the proposer, towards the uniform distribution
    "scaling": 0.5,  # weight of advantages at the low end of p_hat; 1: all weigh the same
}
LEAST, BONUS_CALLS = 0.1, 4  # a majority of this share or less counts as none; calls that earn a bonus


class Agent0(Static):
    """`Static` with other rewards and another `evolve` (strategies/base.py documents the methods).

    Its state, besides that of `Static`: the proposer's logits, (ending, p_hat) of each adopted task, and rows
    on the last probe, which the next step reports.
    """

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        if config.strategy.labels not in ("majority", "checker"):
            raise ValueError(
                f"config.strategy.labels is {config.strategy.labels!r}: it must be majority or checker."
            )
        check_least(config, {"drafts": 1, "probe": 2, "updates": 0, "learning_rate": 0, "kl_coef": 0})
        check_least(config, {"uncertainty": 0, "diversity": 0, "tool_bonus": 0})
        check_shares(config, "scaling")
        check_band(config)
        super().__init__(config, state, rewards=self.rewards)
        own = state or {"knobs": {}, "labels": {}, "probed": []}
        self._knobs, self._probed = dict(own["knobs"]), list(own["probed"])
        self._labels: dict[str, list] = dict(own["labels"])

    def rewards(self, group: Group) -> Sequence[float]:
        label = self._labels.get(group.task.id)
        if label is None or self._config.strategy.labels == "checker":
            return group.rewards
        return [float(t.stop == "done" and t.ending == label[0]) for t in group.valid]

    def compute_advantages(self, groups: Sequence[Group]) -> list[TrainingSample]:
        least = self._config.strategy.scaling

        def scaled(sample: TrainingSample) -> TrainingSample:
            label = self._labels.get(sample.trajectory.task_id)
            if label is None or sample.advantages is None:
                return sample
            weight = least + (1 - least) * min(max((label[1] - 0.3) / 0.5, 0.0), 1.0)
            return dataclasses.replace(sample, advantages=sample.advantages * weight)

        return [scaled(sample) for sample in super().compute_advantages(groups)]

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        found = super().observe(step, groups)
        rows = [*self._probed, *(agreement(g, step, "majority") for g in groups if g.valid)]
        self._probed = []
        alike = Counter[str]()
        for g in groups:
            agree = majority(g)[2]
            alike["majority_rollouts"] += len(agree)
            alike["majority_as_checker"] += sum(a == t.outcome.success for a, t in zip(agree, g.valid))
        return StepReport({**found.counts, **alike}, [*found.rows, *rows])

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        c, own = self._config, self._config.strategy
        if not evolves(c, step):
            return None
        if refused := full(c, lab):
            return refused
        rng, wanted, data = rng_for(c.seed, "evolve", step), c.evolution.tasks, c.data
        sizes = range(data.min_calls, data.max_calls + 1), range(1, data.max_turns + 1)
        policy = KnobPolicy(factors(lab.scenarios, *sizes), self._knobs)
        drawn = policy.sample(math.ceil(own.drafts * wanted), rng)
        drafts, made = propose(lab, drawn, "agent0", step=step, rng=rng)
        pairs = probed(lab, drawn, drafts, own.probe, step)
        known, rewards = [setting for setting, _ in pairs], earned([g for _, g in pairs], own)
        for _ in range(own.updates):
            policy.update(known, standardised(rewards), own.learning_rate, own.kl_coef)
        self._knobs = policy.to_json()
        groups = [g for _, g in pairs if g]
        self._probed = [agreement(g, step, "probe") for g in groups]
        told = {g.task.id: majority(g) for g in groups}
        low, high = own.band
        chosen = [g.task for g in groups if low <= told[g.task.id][0] <= high]
        solved = {g.task.id: p for g in groups if (p := solve_rate(g)) is not None}
        adopted = adopt_first(lab, chosen, wanted, kind="signal", solved=solved)
        held = {task.id for task in lab.tasks}
        self._labels |= {t.id: [told[t.id][1], told[t.id][0]] for t in chosen if t.id in held}
        return made.adopting(adopted, lab.tasks)

    def to_json(self) -> dict:
        own = {"knobs": self._knobs, "labels": self._labels, "probed": self._probed}
        return {**super().to_json(), **own}


make = Agent0


def agreement(group: Group, step: int, kind: str) -> dict:
    """A row of signals.jsonl: p_hat of a group, beside the share of its rollouts that the checker passes."""
    told = {"p_hat": majority(group)[0], "solved": solve_rate(group), "right": right(group)}
    return {"kind": kind, "task_id": group.task.id, "step": step, **told}


def right(group: Group) -> bool:
    """Whether the checker passes the majority's ending."""
    return any(agrees and t.outcome.success for agrees, t in zip(majority(group)[2], group.valid))


def earned(groups: Sequence[Group | None], own: ConfigDict) -> list[float]:
    """The proposer's reward for each of its settings. None stands for one that gave no draft.

    own: the strategy's settings.
    """
    alike = Counter(g.task.actions for g in groups if g)

    def reward(group: Group | None) -> float:
        if group is None:
            return -1.0
        p = majority(group)[0] if right(group) else 0.0
        p = p if p > LEAST else 0.0
        calls = min(len(group.task.calls), BONUS_CALLS)
        share = alike[group.task.actions] / len(groups)
        return own.uncertainty * min(p, 1 - p) - own.diversity * share + own.tool_bonus * calls

    return [reward(g) for g in groups]
