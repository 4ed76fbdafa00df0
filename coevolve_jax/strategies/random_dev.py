"""The control for methods that measure on a goal set: random growth, and the goal set joins the training set.

The goal set has one task for each action. The first evolution of a D_t without one makes it, in scenarios set
apart, and D_t takes it beside the tasks of `random`. What such a method gains over this arm is not gained by
the extra tasks.
"""

from __future__ import annotations

from collections.abc import Mapping

from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.strategies.base import SIGNALS, Lab, evolves, must_be
from coevolve_jax.strategies.growth import (
    goal_actions,
    set_apart,
    synthesize_for_tools,
    synthesize_freely,
)
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.pipeline import SynthesisStats

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
DEFAULTS = {
    "goals": 0,  # size of the goal set, of actions drawn at random; 0: one task for each action
}


def make(config: ConfigDict, state: Mapping | None = None) -> Static:
    must_be(config, "goals", config.strategy.goals >= 0, "0 or more")
    return Static(config, state, evolve)


def evolve(config: ConfigDict, step: int, lab: Lab) -> SynthesisStats | None:
    if not evolves(config, step):
        return None
    lacks = all(task.lineage.kind != "goal" for task in lab.tasks)
    chosen, rng = goal_actions(config, lab, config.strategy.goals, step)  # before D_t grows
    grown = synthesize_freely(config, step, lab)
    if grown and lacks:
        grown.add(
            synthesize_for_tools(
                lab, chosen, "goal", scenarios=set_apart(config, lab)[1], wanted=len(chosen), kind="goal",
                step=step, rng=rng,
            )
        )  # fmt: skip
    return grown
