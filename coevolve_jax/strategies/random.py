"""The control at equal numbers: as many new tasks as CoEvolve asks for, explored freely, without signals."""

from __future__ import annotations

import json
from collections.abc import Mapping

from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.strategies.base import SIGNALS, Lab, evolves
from coevolve_jax.strategies.growth import solvable, synthesize_freely
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.pipeline import SynthesisStats

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
DEFAULTS = {
    "scenarios": "train",  # "train": explores all of the training split; "known": scenarios of tasks in D_t
    "probe": 0,  # admit only tasks that this many rollouts solve sometimes, not always; 0: every valid task
}


def make(config: ConfigDict, state: Mapping | None = None) -> Static:
    if config.strategy.scenarios not in ("train", "known"):
        raise ValueError(
            f"config.strategy.scenarios is {config.strategy.scenarios!r}: it must be train or known."
        )
    return Static(config, state, evolve)


def evolve(config: ConfigDict, step: int, lab: Lab) -> SynthesisStats | None:
    if not evolves(config, step):
        return None  # before the lab is used, which says that the strategy evolves (loop/evolve.py)
    c = config.strategy
    known = {json.dumps(t.scenario, sort_keys=True): t for t in lab.tasks}
    return synthesize_freely(
        config, step, lab,
        scenarios=list(known.values()) if c.scenarios == "known" else None,
        admit=solvable(lab, step, c.probe) if c.probe else None,
    )  # fmt: skip
