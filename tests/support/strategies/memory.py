"""Hints from memory: half of the later rollouts see what a tool last answered to a wrong call."""

from coevolve_jax.grpo.filter import FilterState
from coevolve_jax.strategies.base import StepReport, grpo_samples, trajectories_of
from coevolve_jax.strategies.batches import collect_batch
from coevolve_jax.types import Hint

NEEDS = frozenset({"help"})


class Memory:
    def __init__(self, config, state=None):
        self._config = config
        self._lessons = dict(state["lessons"]) if state else {}

    def collect(self, step, tasks, roll):
        return collect_batch(self._config, step, tasks, roll, hints=self.help)

    def help(self, task, rollout_index):
        lessons = [self._lessons[name] for name in sorted(self._lessons)]
        if rollout_index % 2 or not lessons:
            return None
        return Hint(
            before_task=f"Note: {lessons[0]}",
            before_step=lambda steps: "Try again." if steps[-1].error else "",
        )

    def compute_advantages(self, groups):
        return grpo_samples(self._config, groups, FilterState())[0]

    def observe(self, step, groups):
        for t in trajectories_of(groups):
            for s in t.steps:
                if t.outcome.valid and s.call and s.error:
                    self._lessons[s.call.name] = f"{s.call.name} said {s.observation[:60]}"
        hinted = sum(bool(t.hints) for t in trajectories_of(groups))
        return StepReport(
            {"hinted": hinted}, [{"step": step, "tool": tool} for tool in sorted(self._lessons)]
        )

    def evolve(self, step, lab):
        return None

    def to_json(self):
        return {"lessons": self._lessons}


make = Memory
