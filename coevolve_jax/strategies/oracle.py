"""The upper bound: evolution explores the tools that are known to be weak.

A testbed plants weaknesses, so it knows them (config.testbed.weak_tools). The gain of this arm over random
exploration bounds the gain from knowing where the policy is weak. If this arm gains nothing, no signal can
show a gain.
"""

from __future__ import annotations

from collections.abc import Mapping

from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import SIGNALS, Lab, evolves
from coevolve_jax.strategies.growth import solvable, synthesize_for_tools
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.pipeline import SynthesisStats

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
DEFAULTS = {
    "probe": 0,  # admit only tasks that this many rollouts solve sometimes, not always; 0: every valid task
}


def make(config: ConfigDict, state: Mapping | None = None) -> Static:
    if not config.get("testbed", {}).get("weak_tools"):
        raise ValueError(
            "config.strategy.name is 'oracle', but config.testbed.weak_tools names no tools: "
            "it needs a testbed whose weak tools are known, such as configs/bfcl_headroom.py."
        )
    return Static(config, state, evolve)


def evolve(config: ConfigDict, step: int, lab: Lab) -> SynthesisStats | None:
    c = config
    if not evolves(c, step):
        return None
    rng = rng_for(c.seed, "evolve", step)
    # One shuffled list of the weak tools after the other: each tool comes equally often.
    orders = [rng.permutation(c.testbed.weak_tools).tolist() for _ in range(c.evolution.tasks)]
    tools = [tool for order in orders for tool in order][: c.evolution.tasks]
    return synthesize_for_tools(
        lab, tools, "oracle", wanted=c.evolution.tasks, kind="oracle", step=step, rng=rng,
        admit=solvable(lab, step, c.strategy.probe),
    )  # fmt: skip
