"""My signal: the tools whose calls fail most often."""

from collections import Counter

from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import evolves
from coevolve_jax.strategies.growth import synthesize_for_tools
from coevolve_jax.strategies.static import Static


class Failing(Static):
    def __init__(self, config, state=None):
        super().__init__(config, state)
        self.config, self.failed = config, Counter(state["failed"] if state else {})

    def observe(self, step, groups):
        steps = [s for g in groups for t in g.valid for s in t.steps]
        self.failed.update(s.call.name for s in steps if s.call and s.error)
        return super().observe(step, groups)

    def evolve(self, step, lab):
        if not evolves(self.config, step):
            return None
        tools = sorted(self.failed, key=lambda tool: (-self.failed[tool], tool))[:6]
        rng, wanted = rng_for(self.config.seed, "evolve", step), self.config.evolution.tasks
        return synthesize_for_tools(lab, tools, "failing", wanted=wanted, kind="signal", step=step, rng=rng)

    def to_json(self):
        return {**super().to_json(), "failed": dict(self.failed)}


make = Failing
