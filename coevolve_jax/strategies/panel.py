"""Panel: unseen tasks of each skill are the thermometer that aims growth (a method of ours, no paper).

The panel holds a task for each skill, made in scenarios set apart. It is never trained on, and each evolution
rolls it out. So p of a skill is measured on tasks that the policy cannot know by heart, which its success in
training is not.

Learning progress: the gain g of a skill is the change of its p between two rounds, per visit that its tasks
had meanwhile. Few visits tell little, so g is drawn to the mean of all.

Aim: a skill is worth p (1 - p) (1 + kappa max(0, g) / mean |g|). Places are given as in `frontier`, with
returns that diminish. Tasks of D_t that call only mastered skills are drawn seldom.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import SIGNALS, Lab, Roll, StepReport, check_least, evolves, must_be
from coevolve_jax.strategies.batches import by_variance, collect_batch, sampling_weights
from coevolve_jax.strategies.frontier import counted, on_offer, synthesize_for_skills
from coevolve_jax.strategies.growth import unseen
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.skills import Counts, allocate, beta, skills_of, unsettled, variance_of
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.synthesis.validate import Verdict
from coevolve_jax.types import Group, Task

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
NEEDS = frozenset({"fresh", "probe"})
SCENARIO_KEYS = {"level": ()}
IGNORES = {"data.sampling": "odds"}
FIDELITY = "F: a method of ours, whose whole definition is this file."
DEFAULTS = {
    "apart": 0.25,  # share of the scenarios that the panel is made in, and no other task of an evolution
    "probe": 4,  # rollouts of each task of the panel, at each evolution
    "prior": 4.0,  # pseudo-attempts at the success rate of all skills
    "kappa": 1.0,  # weight of learning progress; 0: p (1 - p) alone
    "trust": 8.0,  # visits between two rounds at which a skill's gain counts half of its own
    "diminishing": 3.0,  # n0: so many tasks give half of a skill's worth; 0: returns do not diminish
    "odds": True,  # draw batches by p (1 - p); False: by config.data.sampling
    "floor": 0.02,  # worth of a skill that failed all of 12 attempts or more; 0: as p says
    "mastered": 0.9,  # tasks whose skills all have p above it weigh a fifth; 1: none does
    "level": "",  # key of a scenario that tells the level; "": a skill is a pattern alone
}
MASTERED = 0.2  # weight of tasks of mastered skills


class Panel(Static):
    """`Static` with another `collect`, `observe` and `evolve` (strategies/base.py documents the methods).

    Its state, besides that of `Static`: the panel, (attempts, misses) of its last two rounds, and how often
    each skill was visited in training since the last.
    """

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        must_be(config, "apart", 0 < config.strategy.apart < 1, "above 0 and below 1")
        check_least(config, {"probe": 1, "prior": 0, "kappa": 0, "trust": 0, "diminishing": 0})
        super().__init__(config, state)
        tasks, rounds = (state["panel"], state["rounds"]) if state else ([], [])
        self._panel = [Task.from_json(task) for task in tasks]
        self._rounds: list[Counts] = [{a: tuple(n) for a, n in own.items()} for own in rounds]
        self._visits = Counter(state["visits"]) if state else Counter()

    def collect(self, step: int, tasks: TaskPool, roll: Roll) -> list[Group]:
        c, own = self._config, self._config.strategy
        rates = means(pooled(self._rounds), own.prior)
        known = {a for a, p in rates.items() if p > own.mastered}

        def weights(tasks: TaskPool) -> np.ndarray:
            odds = by_variance(c)(tasks) if own.odds else sampling_weights(c, tasks.rows)
            called = [skills_of([t], own.level) for t in tasks]
            return odds * [MASTERED if skills and skills <= known else 1.0 for skills in called]

        return collect_batch(c, step, tasks, roll, weights=weights)

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        level = self._config.strategy.level
        self._visits.update(a for g in groups if g.valid for a in sorted(skills_of([g.task], level)))
        return super().observe(step, groups)

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        c, own = self._config, self._config.strategy
        if not evolves(c, step):
            return None
        rng, wanted = rng_for(c.seed, "evolve", step), c.evolution.tasks
        order = [lab.scenarios[i] for i in rng_for(c.seed, "panel").permutation(len(lab.scenarios))]
        cut, how = math.ceil(own.apart * len(order)), dict(key=own.level, step=step, rng=rng)
        total = SynthesisStats()
        if not self._panel:
            made = lab.tasks.fresh()
            wished = sorted(on_offer(lab, own.level))
            total = synthesize_for_skills(
                lab, wished, "panel", scenarios=order[:cut], kind="panel", into=made, **how
            ).adopting(SynthesisStats(), lab.tasks)
            self._panel = unseen(lab.tasks, list(made))
        groups = lab.probe(self._panel, own.probe, step)
        self._rounds = [*self._rounds[-1:], counted({}, groups, own.level)]
        counts = pooled(self._rounds)
        rates = means(counts, own.prior, skills_of(self._panel, own.level))
        factor = progress(self._rounds, self._visits, own.prior, own.trust, own.kappa)
        self._visits = Counter()
        failed = {a: n for a, (n, missed) in counts.items() if n == missed}
        worth = {a: w * factor.get(a, 1.0) for a, w in variance_of(rates, failed, own.floor).items()}
        skills = allocate(lambda: worth, unsettled(lab.tasks, own.level), wanted, own.diminishing)
        places = order[cut:] or order  # of one scenario alone both are made: then none of the panel's
        never = lab.tasks.fresh()
        never.add(self._panel)
        admit = lambda made: [Verdict(r if r == "duplicate" else None) for r in never.fork().add(made)]
        how |= dict(scenarios=places, kind="signal", admit=admit)
        total.add(synthesize_for_skills(lab, skills, "panel", **how))
        return total

    def to_json(self) -> dict:
        return {
            **super().to_json(),
            "panel": [task.to_json() for task in self._panel],
            "rounds": [{a: list(own[a]) for a in sorted(own)} for own in self._rounds],
            "visits": dict(self._visits),
        }


make = Panel


def pooled(rounds: Sequence[Counts]) -> Counts:
    """Adds the counts of all rounds."""
    total: dict[str, tuple[float, float]] = {}
    for own in rounds:
        for name, (n, missed) in own.items():
            tried, misses = total.get(name, (0.0, 0.0))
            total[name] = (tried + n, misses + missed)
    return total


def means(counts: Counts, prior: float, skills: Iterable[str] = ()) -> dict[str, float]:
    """The posterior mean of each skill's success rate (skills.beta)."""
    return {name: a / (a + b) for name, (a, b) in beta(counts, prior, skills).items()}


def progress(
    rounds: Sequence[Counts], visits: Mapping[str, int], prior: float, trust: float, kappa: float
) -> dict[str, float]:
    """The factor 1 + kappa max(0, g) / mean |g| of each skill that both rounds measured; {} before two.

    g is the gain per visit. Both rounds are shrunk to one rate, that of both together, so that a rise of all
    skills is no gain of each. The weight of g against the mean of all skills, and in that mean, is
    visits / (visits + trust): a skill that nothing trained tells no gain.
    """
    if len(rounds) < 2:
        return {}
    p = means({f"{i} {a}": n for i, own in enumerate(rounds) for a, n in own.items()}, prior)
    both = sorted(rounds[0].keys() & rounds[1].keys())
    gains = {a: (p[f"1 {a}"] - p[f"0 {a}"]) / max(1, visits.get(a, 0)) for a in both}
    share = {a: n / (n + trust) if (n := visits.get(a, 0)) else 0.0 for a in gains}
    total = math.fsum(share.values())
    mean = math.fsum(share[a] * g for a, g in gains.items()) / total if total else 0.0
    drawn = {a: mean + share[a] * (g - mean) for a, g in gains.items()}
    scale = math.fsum(map(abs, drawn.values())) / max(1, len(drawn))
    return {a: 1 + kappa * max(0.0, g) / scale if scale else 1.0 for a, g in drawn.items()}
