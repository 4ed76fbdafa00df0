"""Strategies with one fault each, named by config.strategy.fault, for the suite to catch."""

import dataclasses

import numpy as np

from coevolve_jax.grpo.advantages import group_advantages
from coevolve_jax.strategies import base, static
from coevolve_jax.synthesis import signals
from coevolve_jax.synthesis.pipeline import SynthesisStats


def sample(trajectory, advantage):
    return base.TrainingSample(trajectory, np.full(len(trajectory.ids), advantage, np.float32))


def samples_of(trajectories, rewards):
    """The valid trajectories' samples, by the rewards in the order of the trajectories."""
    pairs = zip(trajectories, group_advantages(list(rewards)), strict=False)
    return [sample(t, a) for t, a in pairs if t.outcome.valid]


class Faulty(static.Static):
    """Static with one fault."""

    seen = set()  # by all of the class

    def __init__(self, config, state=None):
        super().__init__(config, state)
        self.asked, self.late = state["asked"] if state else 0, 0
        if config.strategy.fault.startswith("help"):
            self.help = self.give

    def give(self, task, rollout_index):
        self.asked += self._config.strategy.fault == "help counts"
        return "a word" if self._config.strategy.fault == "help in words" else None

    def collect(self, step, tasks, roll):
        groups, self.roll = super().collect(step, tasks, roll), roll
        fault = self._config.strategy.fault
        self.asked += fault == "collect counts"
        if fault == "unseeded":
            # So many that twins never draw alike.
            return roll(tasks.draw(8, np.random.default_rng()), 4)
        if fault == "twice":
            return groups + groups[:1]
        return groups

    def compute_advantages(self, groups):
        samples = super().compute_advantages(groups)
        match self._config.strategy.fault:
            case "baseline":  # an invalid rollout counts as a failure
                worth = lambda t: t.outcome.reward if t.outcome.valid else 0.0
                return [s for g in groups for s in samples_of(g.trajectories, map(worth, g.trajectories))]
            case "aligned":  # the rewards are those of Group.valid
                return [s for g in groups for s in samples_of(g.trajectories, g.rewards)]
            case "invalid":
                samples += [sample(t, 1.0) for t in base.trajectories_of(groups)]
            case "shape":
                samples += [base.TrainingSample(groups[0].valid[0], np.ones(3, np.float32))]
            case "nan":
                samples += [sample(groups[0].valid[0], np.nan)]
        return samples

    def observe(self, step, groups):
        if self._config.strategy.fault == "reads":
            assert self._config.evolution.contexts and self._config.evolution.tasks
        if self._config.strategy.fault == "heeds":
            self.asked += sum(s.error for t in base.trajectories_of(groups) for s in t.steps)
        steps = [s for g in groups for t in g.valid for s in t.steps]
        if self._config.strategy.fault == "texts":
            self.asked += sum(s.call.name == "tool_0" for s in steps)
        found = super().observe(step, groups)
        if self._config.strategy.fault == "later messages":
            self.late += sum(s.message > 0 for s in steps)
            return base.StepReport({"late": self.late})
        if self._config.strategy.fault == "of the class":
            self.seen.add(step)
            return base.StepReport({"steps": len(self.seen)})
        if self._config.strategy.fault == "rows":
            return base.StepReport(found.counts, [{"task": groups[0].task}])
        return found

    def evolve(self, step, lab):
        if self._config.strategy.fault == "late":
            self.roll(list(lab.tasks)[:2], 4)
        if self._config.strategy.fault == "uncounted":
            lab.synthesize_unguided(wanted=1, kind="random", step=step, rng=np.random.default_rng(step))
        if self._config.strategy.fault == "scores":
            assert all(record.last_score is None for record in lab.tasks.records.values()), "a score"
        if self._config.strategy.fault == "past the lab":
            first = next(iter(lab.tasks))
            lab.tasks.add([dataclasses.replace(first, id=f"own-{step}", turns=first.turns * (step + 2))])
            return SynthesisStats(proposed=1, accepted=1, added=1)
        return None

    def to_json(self):
        if self._config.strategy.fault == "forgets":
            return {**super().to_json(), "history": signals.History().to_json(), "asked": 0}
        return {**super().to_json(), "asked": self.asked}


make = Faulty
READS = static.READS
DEFAULTS = {"fault": ""}
