"""eva (arXiv 2411.00062): tasks whose rollouts leave most to gain are evolved into harder and wider ones.

Source: the paper and the authors' code. A task's informativeness is the gap between its best rollout and the
others. Min-max-normalised over the tasks visited since the last evolution, it gives the odds, without
replacement, of being a parent. Each parent gets up to four variants: those that config.data allows, and
another scene only where one offers the tools of its calls. Batches mix new tasks with old ones.

Faithful: the gap, the choice of parents, up to four variants of each.

Missing: a language model rewrites the parents in the paper. Here they get one call more, other arguments,
another scene or another turn, and the explorer's words. The solver learns by GRPO instead of DPO.

Departs: the code's gap, max - min, is 1 for every mixed group of a binary reward, hence "max_mean".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import SIGNALS, Lab, StepReport, check_shares, evolves, must_be
from coevolve_jax.strategies.growth import synthesize_in_turn, variants
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.types import Group

OPERATORS = ("add_call", "other_arguments", "other_scene", "new_turn")  # two deeper, two wider
GAPS = {"max_mean": lambda r: max(r) - np.mean(r), "max_min": lambda r: max(r) - min(r), "variance": np.var}

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
IGNORES = {"data.min_evolved_share": ""}
FIDELITY = "P: operators on reference calls evolve a task, where the paper has a language model rewrite it."
DEFAULTS = {
    "gap": "max_mean",  # informativeness: "max_mean", "max_min" (the code's default) or "variance"
    "min_evolved_share": 0.5,  # least share of new tasks in a batch; the paper mixes 0.8 new to 0.2 old
}


class Eva(Static):
    """`Static` with another `evolve`. Its state: the step and the informativeness of each last visit."""

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        must_be(config, "gap", config.strategy.gap in GAPS, f"one of {', '.join(GAPS)}")
        check_shares(config, "min_evolved_share")
        share = config.strategy.min_evolved_share
        super().__init__(config, state, min_evolved_share=share, needs_calls=True)
        self._visits = {id: tuple(v) for id, v in state["visits"].items()} if state else {}

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        gap = GAPS[self._config.strategy.gap]  # of equal rewards it may round to other than 0
        self._visits |= {
            g.task.id: (step, float(gap(g.rewards)) if g.spread else 0.0) for g in groups if g.valid
        }
        return super().observe(step, groups)

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        c = self._config
        if not evolves(c, step):
            return None
        rng = rng_for(c.seed, "evolve", step)
        recent = {id: gap for id, (at, gap) in self._visits.items() if at > step - c.evolution.every}
        chosen = [lab.tasks[id] for id in parents(recent, rng)]
        contexts, wanted = variants(c, lab, chosen, OPERATORS, step=step, rng=rng), c.evolution.tasks
        return synthesize_in_turn(lab, contexts, wanted=wanted, kind="signal", step=step, rng=rng)

    def to_json(self) -> dict:
        return {**super().to_json(), "visits": {id: list(v) for id, v in self._visits.items()}}


make = Eva


def parents(gaps: Mapping[str, float], rng: np.random.Generator) -> list[str]:
    """Orders tasks for being parents: drawn without replacement by min-max-normalised gap.

    The tasks of the least gap are left out. Where all gaps are equal and above 0, so are the odds.
    """
    names = sorted(gaps)
    values = np.array([gaps[name] for name in names])
    if not values.any():
        return []
    odds = values - values.min() if np.ptp(values) else values
    able = np.flatnonzero(odds)
    order = rng.choice(able, len(able), replace=False, p=odds[able] / odds[able].sum())
    return [names[i] for i in order]
