"""Dr. Zero (arXiv 2601.07055): a proposer is paid for hard questions, compared among those of equal hops.

Of n probing rollouts k solve a draft. The proposer earns (n - k) / (n - 1) where 0 < k < n, else 0, and half
a point for a valid draft. One draft is made of each prompt. Its advantage is standardised among the drafts of
equally many hops (HRPO): more hops are harder, and one baseline for all would pay for them alone.

Hops are the number of calls. They are drawn 4:3:2:1, as in the paper, and not chosen by the proposer. D_t
takes the drafts that are solved sometimes, in each number of hops the hardest first.

Read against the authors' code. Faithful: reward, baseline by hops, GRPO of the solver. Missing: the proposer
is a softmax over settings of a context (synthesis/knobs.py), not a language model that is trained.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import SIGNALS, Lab, check_least, evolves, must_be
from coevolve_jax.strategies.groups import solve_rate
from coevolve_jax.strategies.growth import adopt_first, full, probed, propose
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.knobs import KnobPolicy, factors, standardised
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.types import Group, Task

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
NEEDS = frozenset({"probe"})
FIDELITY = "P: the proposer is a softmax over settings of a scripted explorer, and its texts are not trained."
DEFAULTS = {
    "hops": (2, 3, 4, 5),  # numbers of calls; the paper's are 1 to 4
    "hop_shares": (4, 3, 2, 1),  # how often each is asked for
    "drafts": 2.0,  # drafts for each place of an evolution
    "probe": 5,  # rollouts of each draft
    "format_reward": 0.5,  # for a valid draft
    "baseline": "hop",  # "batch": one mean and deviation for drafts of all hops
    "learning_rate": 1.0,  # of the proposer
    "kl_coef": 0.0,  # of the proposer, towards the uniform distribution
}


class DrZero(Static):
    """`Static` with another `evolve` (strategies/base.py documents the methods).

    Its state, besides that of `Static`: the proposer's logits.
    """

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        check_least(config, {"drafts": 1, "probe": 2, "learning_rate": 0, "kl_coef": 0})
        own = config.strategy
        if own.baseline not in ("hop", "batch"):
            raise ValueError(f"config.strategy.baseline is {own.baseline!r}: it must be hop or batch.")
        if len(own.hops) != len(own.hop_shares):
            raise ValueError(
                f"config.strategy.hop_shares has {len(own.hop_shares)} values: "
                f"give one for each of the {len(own.hops)} hops."
            )
        must_be(config, "hops", len(own.hops) > 0, "one number of calls or more")
        must_be(config, "hop_shares", min(own.hop_shares) >= 0 < sum(own.hop_shares), "0 or more, not all 0")
        least, most = config.data.min_calls, config.data.max_calls
        if not all(least <= hops <= most for hops in own.hops):
            raise ValueError(
                f"config.strategy.hops is {tuple(own.hops)}: hops are calls, so each must lie between "
                f"config.data.min_calls ({least}) and config.data.max_calls ({most})."
            )
        super().__init__(config, state)
        self._knobs = dict(state["knobs"]) if state else {}

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        c, own = self._config, self._config.strategy
        if not evolves(c, step):
            return None
        if refused := full(c, lab):
            return refused
        rng, wanted = rng_for(c.seed, "evolve", step), c.evolution.tasks
        policy = KnobPolicy(factors(lab.scenarios, turns=range(1, c.data.max_turns + 1)), self._knobs)
        shares = np.array(own.hop_shares) / sum(own.hop_shares)
        hops = rng.choice(own.hops, size=math.ceil(own.drafts * wanted), p=shares).tolist()
        drawn = policy.sample(len(hops), rng)
        asked = [{**d, "calls": h} for d, h in zip(drawn, hops, strict=True)]
        drafts, made = propose(lab, asked, "dr_zero", step=step, rng=rng)
        pairs = probed(lab, asked, drafts, own.probe, step)
        known, rewards = [d for d, _ in pairs], [earned(g, own.format_reward) if g else 0.0 for _, g in pairs]
        kinds = [d["calls"] if own.baseline == "hop" else 0 for d in known]
        policy.update(known, advantages(rewards, kinds), own.learning_rate, own.kl_coef)
        self._knobs = policy.to_json()
        solved = {g.task.id: p for _, g in pairs if g and (p := solve_rate(g)) is not None}
        mixed = [(d["calls"], g.task) for d, g in pairs if g and 0 < solved[g.task.id] < 1]
        adopted = adopt_first(lab, hardest(mixed, solved), wanted, kind="signal", solved=solved)
        return made.adopting(adopted, lab.tasks)

    def to_json(self) -> dict:
        return {**super().to_json(), "knobs": self._knobs}


make = DrZero


def earned(group: Group, format_reward: float) -> float:
    """The proposer's reward for a valid draft with this probe."""
    solved, n = sum(t.outcome.success for t in group.valid), len(group.valid)
    return format_reward + ((n - solved) / (n - 1) if 0 < solved < n else 0.0)


def advantages(rewards: Sequence[float], kinds: Sequence[int]) -> np.ndarray:
    """Standardises each reward among those of its kind [n]. One that is alone in its kind stays as it is."""
    rows, of, size = np.asarray(rewards, np.float64), np.asarray(kinds), Counter(kinds)
    result = rows.copy()
    for kind in [kind for kind, n in size.items() if n > 1]:
        result[of == kind] = standardised(rows[of == kind].tolist())
    return result


def hardest(drafts: Sequence[tuple[int, Task]], solved: Mapping[str, float]) -> list[Task]:
    """Orders drafts, each with its hops: the hardest of every number of hops first, then the next of each."""
    place: Counter[int] = Counter()
    ranked = []
    for hops, task in sorted(drafts, key=lambda own: solved[own[1].id]):
        ranked.append((place[hops], hops, task))
        place[hops] += 1
    return [task for _, _, task in sorted(ranked, key=lambda own: own[:2])]
