"""SOAR (arXiv 2601.18778): a teacher is paid by what a copy of the student gains on hard tasks.

Hard tasks: the policy fails each in all of `attempts` rollouts when the training set first evolves. They are
made in the scenarios of D_0, and nobody trains on them.

Reward: at each evolution the teacher draws a few settings, and each gives a set of drafts. A copy of the
policy trains on the set for a few GRPO updates and is dropped (`lab.branch`). The set earns the copy's greedy
success on the hard tasks less the policy's own. Nothing about difficulty enters. The teacher learns by the
leave-one-out baseline (RLOO). D_t takes the best set where the mean reward of the last evolutions is large.

No code was found. Faithful: the grounded reward and the rule of promotion. Missing: the teacher is a softmax
over settings of a context (synthesis/knobs.py), not a language model. Promotion hands over the tasks; in the
paper the trained copy becomes the student. The copy trains by the config's GRPO, the paper's by RLOO.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import SIGNALS, Lab, check_least, evolves
from coevolve_jax.strategies.groups import solve_rate
from coevolve_jax.strategies.growth import adopt_first, full, propose, unseen
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.knobs import KnobPolicy, factors
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.types import Task

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
NEEDS = frozenset({"probe", "branch"})
FIDELITY = "P: the teacher is a softmax over settings, and promotion hands over tasks where it was weights."
DEFAULTS = {
    "hard": 32,  # hard tasks at most; the paper's 64
    "candidates": 64,  # tasks that are tried for them
    "attempts": 16,  # rollouts that all fail; the paper's 128
    "sets": 4,  # sets of an evolution
    "size": 12,  # drafts of a set; the paper's 64
    "updates": 6,  # of the copy, on each set; the paper's 10
    "batch": 8,  # drafts of an update
    "branch_rollouts": 4,  # of each draft of an update
    "promotion": 0.01,  # D_t takes a set where the mean reward is above it
    "window": 3,  # evolutions that this mean is over
    "learning_rate": 10.0,  # of the teacher, whose rewards are of the order of 0.1
    "kl_coef": 0.0,  # of the teacher, towards the uniform distribution
}
SCREENING = 4  # first rollouts of each candidate; only those that all fail get the others


class Soar(Static):
    """`Static` with another `evolve` (strategies/base.py documents the methods).

    Its state, besides that of `Static`: the teacher's logits, the mean rewards of the last evolutions, and
    the hard tasks.
    """

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        least = {"hard": 1, "candidates": 1, "attempts": 1, "sets": 2, "size": 1, "updates": 1, "batch": 1}
        check_least(config, {**least, "branch_rollouts": 2, "window": 1, "learning_rate": 0, "kl_coef": 0})
        super().__init__(config, state)
        own = state or {"knobs": {}, "gains": [], "hard": []}
        self._knobs, self._gains = dict(own["knobs"]), list(own["gains"])
        self._hard = [Task.from_json(task) for task in own["hard"]]

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        c, own, data = self._config, self._config.strategy, self._config.data
        if not evolves(c, step):
            return None
        if refused := full(c, lab):
            return refused
        rng, total = rng_for(c.seed, "evolve", step), SynthesisStats()
        if not self._hard:
            total = self._find_hard(lab, step)
        sizes = range(data.min_calls, data.max_calls + 1), range(1, data.max_turns + 1)
        policy = KnobPolicy(factors(lab.scenarios, *sizes), self._knobs)
        drawn = policy.sample(own.sets, rng)
        calls = lambda d: int(rng.integers(data.min_calls, d["calls"] + 1))  # sizes vary within a set
        asked = [{**d, "calls": calls(d)} for d in drawn for _ in range(own.size)]
        drafts, made = propose(lab, asked, "soar", step=step, rng=rng)
        total.add(made)
        hard = lab.tasks.fresh()
        hard.add(self._hard)
        rows = [drafts[i : i + own.size] for i in range(0, len(drafts), own.size)]
        sets = [unseen(hard, [t for t in row if t]) for row in rows]
        rewards = [self._gain(lab, tasks, step) for tasks in sets]
        policy.update(drawn, leave_one_out(rewards), own.learning_rate, own.kl_coef)
        self._knobs = policy.to_json()
        if self._hard:  # without hard tasks nothing was measured
            self._gains = [*self._gains, float(np.mean(rewards))][-own.window :]
        gained = bool(self._hard) and np.mean(self._gains) > own.promotion
        promoted = sets[int(np.argmax(rewards))] if gained else []
        adopted = adopt_first(lab, promoted, c.evolution.tasks, kind="signal")
        return total.adopting(adopted, lab.tasks)

    def _find_hard(self, lab: Lab, step: int) -> SynthesisStats:
        """Makes tasks in the scenarios of D_0, and keeps those that the policy always fails."""
        own, made = self._config.strategy, lab.tasks.fresh()
        places = [t for t in lab.tasks if t.lineage.kind == "initial"]
        stats = lab.synthesize_unguided(
            wanted=own.candidates, kind="hard", step=step, rng=rng_for(self._config.seed, "hard", step),
            scenarios=places, into=made,
        )  # fmt: skip
        failed, first = unseen(lab.tasks, list(made)), min(SCREENING, own.attempts)
        for k in (first, own.attempts - first):
            if k and failed:
                failed = [g.task for g in lab.probe(failed, k, step) if solve_rate(g) == 0]
        self._hard = failed[: own.hard]
        return stats

    def _gain(self, lab: Lab, tasks: Sequence[Task], step: int) -> float:
        """Mean gain of a copy of the policy on the hard tasks after training on these."""
        own = self._config.strategy
        if not tasks or not self._hard:
            return 0.0
        branch = lab.branch(
            tasks, self._hard, updates=own.updates, batch=own.batch, k=own.branch_rollouts, step=step
        )
        pairs = [(solve_rate(a), solve_rate(b)) for a, b in zip(branch.before, branch.after, strict=True)]
        gains = [after - before for before, after in pairs if before is not None and after is not None]
        return sum(gains) / len(gains) if gains else 0.0

    def to_json(self) -> dict:
        own = {"knobs": self._knobs, "gains": self._gains, "hard": [task.to_json() for task in self._hard]}
        return {**super().to_json(), **own}


make = Soar


def leave_one_out(rewards: Sequence[float]) -> np.ndarray:
    """Each reward less the mean of the others [n], n at least 2."""
    rows = np.asarray(rewards, np.float64)
    return (rows - rows.mean()) * len(rows) / (len(rows) - 1)
