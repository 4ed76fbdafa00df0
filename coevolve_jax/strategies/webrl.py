"""WebRL (arXiv 2411.02337): failures seed tasks, a critic keeps those within reach, successes are replayed.

Source: the paper and the authors' code. At each evolution,

* tasks whose last visit mostly failed are varied into drafts;
* the critic's value, the chance to succeed, must lie in a band; drafts nearest its middle come first.

The critic is a logistic regression on a task's number of calls, its turns and its actions. Each evolution
fits it anew to the first visit to each task, by stochastic gradient descent. Later visits would flatter it.

Replay: the latest successes, one of each task, whose mean token probability (geometric) lies in a band. So
the policy neither knows them by heart nor finds them strange. They enter as cross-entropy. A task leaves when
a visit has successes above the band and none within.

Faithful: growth from failures, the critic's band, the filter of replay.

Missing: its loss, (beta log(pi / pi_ref) - A)^2, is not used. A language model words the drafts there, and
one judges success; here the environment's exact check does. Probabilities are those at sampling time.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import SIGNALS, Lab, StepReport, check_least, evolves, must_be
from coevolve_jax.strategies.groups import solve_rate
from coevolve_jax.strategies.growth import adopt_first, draft, full, variants
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.variants import OPERATORS
from coevolve_jax.types import SUCCESS, Group, Task, TrainingSample, Trajectory

PASSES = 20  # over the first visits, when the critic is fitted
KNOWN = (0.5, 0.95)  # mean token probability of a replayed rollout: above the first, at most the second

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
FIDELITY = "P: GRPO with replay as cross-entropy stands in for its loss, operators for its writer of tasks."
DEFAULTS = {
    "least": 0.05,  # of the critic's value, for a draft to be kept
    "most": 0.75,
    "drafts": 2.0,  # drafts per task wanted
    "critic_rate": 0.3,  # step size of the critic
    "replay": 32,  # kept successes; a step replays at most one for two of its own rollouts
    "replay_weight": 0.05,  # of their cross-entropy
}


class WebRL(Static):
    """`Static` with another `evolve`, and replay. Its state: each task's first share solved, the replay."""

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        own = config.strategy
        must_be(config, "least", 0 <= own.least < own.most, f"within 0 and config.strategy.most ({own.most})")
        must_be(config, "critic_rate", own.critic_rate > 0, "above 0")
        check_least(config, {"drafts": 1, "replay": 0, "replay_weight": 0})
        if own.replay and config.learner.replay_routing:
            rule = "0 with config.learner.replay_routing, since replayed rollouts keep no routing"
            must_be(config, "replay", False, rule)
        super().__init__(config, state, needs_calls=True)
        self._first: dict[str, float] = dict(state.get("first", {})) if state else {}
        self._kept = [_from_json(row) for row in state["kept"]] if state else []

    def compute_advantages(self, groups: Sequence[Group]) -> list[TrainingSample]:
        own, weight = super().compute_advantages(groups), self._config.strategy.replay_weight
        count = min(len(self._kept), len(own) // 2)
        return own + [
            TrainingSample(t, None, ce_weights=np.where(t.mask, weight, 0).astype(np.float32))
            for t in self._kept[len(self._kept) - count :]
        ]

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        kept, in_band = {t.task_id: t for t in self._kept}, 0
        for group in groups:
            if (p := solve_rate(group)) is not None:
                self._first.setdefault(group.task.id, p)
            won = [(t, probability(t)) for t in group.valid if t.outcome.success]
            within = [t for t, p in won if KNOWN[0] < p <= KNOWN[1]]
            in_band += len(within)
            if within or any(p > KNOWN[1] for _, p in won):
                kept.pop(group.task.id, None)  # known by heart by now, or the latest come last
            if within:
                kept[group.task.id] = _from_json(_to_json(within[0]))
        size = self._config.strategy.replay
        self._kept = list(kept.values())[-size:] if size else []
        found = super().observe(step, groups)
        return StepReport({**found.counts, "replay": len(self._kept), "in_band": in_band}, found.rows)

    def _features(self, task: Task) -> dict[str, float]:
        most = self._config.data.max_calls
        sizes = {"bias": 1.0, "calls": len(task.calls) / most, "turns": len(task.turns) / most}
        return {**sizes, **{f"action {action}": 1.0 for action in task.actions}}

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        c, own = self._config, self._config.strategy
        if not evolves(c, step):
            return None
        rng, first = rng_for(c.seed, "evolve", step), dict(self._first)  # steps beside it visit more tasks
        if refused := full(c, lab):
            return refused
        rows = lab.tasks.rows
        failed = [task for task, p in zip(lab.tasks, rows["last_score"], strict=True) if p < SUCCESS]
        order = [failed[i] for i in rng.permutation(len(failed))]
        contexts = variants(c, lab, order, OPERATORS, step=step, rng=rng)
        drafts, made = draft(lab, contexts[: int(own.drafts * c.evolution.tasks)], step=step, rng=rng)
        seen = [(self._features(task), first[task.id]) for task in lab.tasks if task.id in first]
        critic = fitted(seen, own.critic_rate)
        values = {task.id: value(critic, self._features(task)) for task in drafts}
        middle = (own.least + own.most) / 2
        within = [task for task in drafts if own.least <= values[task.id] <= own.most]
        best = sorted(within, key=lambda task: abs(values[task.id] - middle))
        return made.adopting(adopt_first(lab, best, c.evolution.tasks, kind="signal"), lab.tasks)

    def to_json(self) -> dict:
        return {**super().to_json(), "first": dict(self._first), "kept": [_to_json(t) for t in self._kept]}


make = WebRL


def value(critic: Mapping[str, float], features: Mapping[str, float]) -> float:
    """The chance of success that the critic gives a task, within [0, 1]."""
    logit = math.fsum(critic.get(name, 0.0) * x for name, x in features.items())
    return 1 / (1 + math.exp(-max(-500.0, min(500.0, logit))))


def fitted(visits: Sequence[tuple[Mapping[str, float], float]], rate: float) -> dict[str, float]:
    """The critic after PASSES over visits, each the features of a task and the share that solved it."""
    critic: dict[str, float] = {}
    for features, solved in itertools.chain.from_iterable(itertools.repeat(visits, PASSES)):
        fit(critic, features, solved, rate)
    return critic


def fit(critic: dict[str, float], features: Mapping[str, float], solved: float, rate: float) -> None:
    """Takes a gradient step on the critic's cross-entropy with the share of rollouts that solved a task."""
    miss = solved - value(critic, features)
    for name, x in features.items():
        critic[name] = critic.get(name, 0.0) + rate * miss * x


def probability(t: Trajectory) -> float:
    """The geometric mean of the sampled tokens' probabilities; 0 without any."""
    return float(np.exp(np.mean(t.logprobs[t.mask], dtype=np.float64))) if t.mask.any() else 0.0


def _to_json(t: Trajectory) -> dict:
    return {**t.to_json(), "steps": [], "ids": t.ids.tolist(), "mask": t.mask.tolist()}


def _from_json(row: Mapping) -> Trajectory:
    """The trajectory with its tokens, without the log-probabilities, which cross-entropy does not need."""
    ids, mask = np.asarray(row["ids"], np.int32), np.asarray(row["mask"], bool)
    zeros = np.zeros(len(ids), np.float32)
    bare = Trajectory.from_json({k: v for k, v in row.items() if k not in ("ids", "mask")})
    return dataclasses.replace(
        bare, ids=ids, mask=mask, logprobs=zeros, versions=np.zeros(len(ids), np.int32)
    )
