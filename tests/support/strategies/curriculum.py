"""A curriculum by difficulty (SEC, arXiv 2505.14970): draws most from the sizes that teach most.

Arms are numbers of calls. Q <- (1 - a) Q + a * mean |advantage|, which is 2 sqrt(p (1 - p)) for a binary
reward of mean p. A batch's slots are drawn from softmax(Q / tau). New tasks come from free exploration and
are probed first.
"""

import numpy as np

from coevolve_jax.grpo.filter import FilterState
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import StepReport, evolves, grpo_samples

DEFAULTS = {"rate": 0.5, "tau": 0.4}


class Curriculum:
    def __init__(self, config, state=None):
        self._config = config
        self._values = {int(k): v for k, v in state["values"].items()} if state else {}

    def collect(self, step, tasks, roll):
        c, rng, arms = self._config, rng_for(self._config.seed, "sample", step), {}
        for task in tasks:
            arms.setdefault(len(task.calls), []).append(task)
        batch = []
        for _ in range(min(c.rollout.tasks_per_step, len(tasks))):
            sizes = sorted(size for size in arms if arms[size])
            weights = np.exp([self._values.get(size, 0.0) / c.strategy.tau for size in sizes])
            arm = arms[sizes[rng.choice(len(sizes), p=weights / weights.sum())]]
            batch.append(arm.pop(rng.integers(len(arm))))
        return roll(batch, c.rollout.group_size)

    def compute_advantages(self, groups):
        return grpo_samples(self._config, groups, FilterState())[0]

    def observe(self, step, groups):
        gains, rate = {}, self._config.strategy.rate
        for g in (g for g in groups if g.valid):
            p = np.mean([t.outcome.success for t in g.valid])
            gains.setdefault(len(g.task.calls), []).append(2 * (p * (1 - p)) ** 0.5)
        for size, gain in gains.items():
            self._values[size] = float((1 - rate) * self._values.get(size, 0.0) + rate * np.mean(gain))
        return StepReport()

    def evolve(self, step, lab):
        c, rng = self._config.evolution, rng_for(self._config.seed, "evolve", step)
        if not evolves(self._config, step):
            return None
        grown = lab.synthesize_unguided(wanted=c.tasks, kind="random", step=step, rng=rng)
        new = [t for t in lab.tasks if (t.lineage.kind, t.lineage.step) == ("random", step)]
        self.observe(step, lab.probe(new, 2, step))
        return grown

    def to_json(self):
        return {"values": self._values}


make = Curriculum
