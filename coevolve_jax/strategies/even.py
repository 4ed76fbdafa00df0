"""The control for evenness: new tasks for all actions in turn, wherever the policy is weak or strong.

A method that aims also spreads its tasks over actions. This arm spreads them and aims at nothing, so what it
gains over `random` is gained by evenness alone.

Every action on offer comes once, in a random order, before any comes again. The turn goes on over evolutions.
Where the actions are a family's own patterns, their list grows with D_t, and a longer list is a new order.
"""

from __future__ import annotations

from collections.abc import Mapping

from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import SIGNALS, Lab, evolves
from coevolve_jax.strategies.growth import actions_on_offer, synthesize_for_tools
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.pipeline import SynthesisStats

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)


def make(config: ConfigDict, state: Mapping | None = None) -> Static:
    return Static(config, state, evolve)


def evolve(config: ConfigDict, step: int, lab: Lab) -> SynthesisStats | None:
    c = config
    if not evolves(c, step):
        return None
    actions, wanted = actions_on_offer(lab), c.evolution.tasks
    asked = schedule.evolutions(c).index(step) * wanted  # actions of the evolutions before
    places = [divmod(n, len(actions)) for n in range(asked, asked + wanted)]
    orders = {turn: rng_for(c.seed, "even", turn).permutation(len(actions)) for turn, _ in places}
    tools = [actions[orders[turn][place]] for turn, place in places]
    rng = rng_for(c.seed, "evolve", step)
    return synthesize_for_tools(lab, tools, "even", wanted=wanted, kind="even", step=step, rng=rng)
