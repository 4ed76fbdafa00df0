"""Strategies with one fault each, named by config.strategy.fault, for the suite to catch."""

import numpy as np

from coevolve_jax.strategies import base, static
from coevolve_jax.synthesis import signals


class Faulty(static.Static):
    """Static with one fault."""

    def __init__(self, config, state=None):
        super().__init__(config, state)
        self.asked = state["asked"] if state else 0
        if config.strategy.fault.startswith("help"):
            self.help = self.give

    def give(self, task, rollout_index):
        self.asked += self._config.strategy.fault == "help counts"
        return "a word" if self._config.strategy.fault == "help in words" else None

    def collect(self, step, tasks, roll):
        groups, self.roll = super().collect(step, tasks, roll), roll
        fault = self._config.strategy.fault
        if fault == "unseeded":
            return roll(tasks.draw(2, np.random.default_rng()), 4)
        if fault == "twice":
            return groups + groups[:1]
        return groups

    def compute_advantages(self, groups):
        samples = super().compute_advantages(groups)
        match self._config.strategy.fault:
            case "invalid":
                samples += [
                    base.TrainingSample(t, np.ones(12, np.float32)) for t in base.trajectories_of(groups)
                ]
            case "shape":
                samples += [base.TrainingSample(groups[0].valid[0], np.ones(3, np.float32))]
            case "nan":
                samples += [base.TrainingSample(groups[0].valid[0], np.full(12, np.nan, np.float32))]
        return samples

    def observe(self, step, groups):
        if self._config.strategy.fault == "reads":
            assert self._config.evolution.contexts
        if self._config.strategy.fault == "heeds":
            self.asked += sum(s.error for t in base.trajectories_of(groups) for s in t.steps)
        found = super().observe(step, groups)
        if self._config.strategy.fault == "rows":
            return base.StepReport(found.counts, [{"task": groups[0].task}])
        return found

    def evolve(self, step, lab):
        if self._config.strategy.fault == "late":
            self.roll(list(lab.tasks)[:2], 4)
        if self._config.strategy.fault == "uncounted":
            lab.synthesize_unguided(wanted=1, kind="random", step=step, rng=np.random.default_rng(step))
        return None

    def to_json(self):
        if self._config.strategy.fault == "forgets":
            return {**super().to_json(), "history": signals.History().to_json(), "asked": 0}
        return {**super().to_json(), "asked": self.asked}


make = Faulty
READS = static.READS
DEFAULTS = {"fault": ""}
