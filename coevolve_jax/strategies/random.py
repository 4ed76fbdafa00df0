"""The control at equal numbers: as many new tasks as CoEvolve makes, by free exploration, without signals."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies import static
from coevolve_jax.strategies.base import Findings, Lab, Roll, evolves
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Group, Sample

DEFAULTS = {
    "scenarios": "train",  # where it explores: all of the training split, or "known": those of tasks in D_t
}


class Random:
    """Static, but for `evolve`. See strategies/base.py."""

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        if config.strategy.scenarios not in ("train", "known"):
            raise ValueError(
                f"config.strategy.scenarios is {config.strategy.scenarios!r}: it must be train or known."
            )
        self._config = config
        self._grpo = static.Static(config, state)

    def collect(self, step: int, tasks: TaskPool, roll: Roll) -> list[Group]:
        return self._grpo.collect(step, tasks, roll)

    def credit(self, groups: Sequence[Group]) -> list[Sample]:
        return self._grpo.credit(groups)

    def observe(self, step: int, groups: Sequence[Group]) -> Findings:
        return self._grpo.observe(step, groups)

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        c = self._config
        if not evolves(c, step):
            return None
        known = {json.dumps(t.scenario, sort_keys=True): t for t in lab.tasks}
        scenarios = list(known.values()) if c.strategy.scenarios == "known" else None
        rng = rng_for(c.seed, "evolve", step)
        return lab.grow_unguided(
            wanted=c.evolution.tasks, kind="random", step=step, rng=rng, scenarios=scenarios
        )

    def to_json(self) -> dict:
        return self._grpo.to_json()


make = Random
