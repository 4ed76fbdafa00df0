"""The upper bound: evolution explores the tools that are known to be weak.

Where a testbed plants weaknesses it knows them (config.testbed.weak_tools). What this arm gains over random exploration
is what there is to gain by knowing where the policy is weak; without such a gain no method can show one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies import static
from coevolve_jax.strategies.base import Findings, Lab, Roll, evolves, solvable, tool_context
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Group, Sample

DEFAULTS = {
    "probe": 0,  # admit only tasks that so many rollouts of the policy solve sometimes; 0 admits all that are valid
}


class Oracle:
    """Static, but for `evolve`. See strategies/base.py."""

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        if not config.get("testbed", {}).get("weak_tools"):
            raise ValueError(
                "config.strategy.name is 'oracle', but config.testbed.weak_tools names no tools: it needs a testbed "
                "whose weak tools are known, such as configs/bfcl_headroom.py."
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
        rng = rng_for(c.seed, "evolve", step)
        # Every weak tool as often as any other, in an order of chance.
        tools = [rng.permutation(c.testbed.weak_tools).tolist() for _ in range(c.evolution.contexts)]
        wanted = [tool for order in tools for tool in order][: c.evolution.contexts]
        ids = [f"oracle/{step}/{i}/{tool}" for i, tool in enumerate(wanted)]
        contexts = [tool_context(lab, tool, "oracle", id, rng) for tool, id in zip(wanted, ids, strict=True)]
        admit = solvable(c, lab, step, c.strategy.probe)
        return lab.grow(
            [context for context in contexts if context is not None],
            wanted=c.evolution.tasks, kind="oracle", step=step, rng=rng, admit=admit,
        )  # fmt: skip

    def to_json(self) -> dict:
        return self._grpo.to_json()


make = Oracle
