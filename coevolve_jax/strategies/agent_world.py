"""Agent-World (arXiv 2604.18292): an arena of unseen tasks shows what is weak, and tool chains start there.

Source: the paper; no code was found. Each evolution has three parts.

* Arena: fresh tasks in scenarios set apart, never trained on, are rolled out.
* Diagnosis: each action's rate of missed calls there, shrunk towards that of its toolset. A toolset is the
  tools that the same scenarios offer. Chains start at the weakest actions, in proportion to their rates.
* Synthesis: a chain walks over the graph of tools and becomes the plan of a draft. An edge weighs 3 if an
  answer of one tool fed an argument of the other, 2 within a toolset, else 1. A draft is kept if some of its
  probing rollouts solve it.

Faithful: the arena, the diagnosis on unseen tasks, the weighted walk, the check by several runs.

Missing: the paper also makes new environments, half of its contribution. Its guidelines are a language
model's, and so they are here where one explores; else they are the action, its rate and the commonest
mistakes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.explorers.evidence import mistakes
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies import questions
from coevolve_jax.strategies.base import SIGNALS, Lab, StepReport, evolves, must_be
from coevolve_jax.strategies.blame import attempts, tool_weights
from coevolve_jax.strategies.groups import solve_rate
from coevolve_jax.strategies.growth import (
    actions_on_offer,
    adopt_first,
    draft,
    full,
    offering,
    set_apart,
    unseen,
)
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.tool_graph import fed, walk
from coevolve_jax.types import Context, Group

FED, SAME_SET, ANY = 3.0, 2.0, 1.0  # weights of the edges of the graph of tools

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
NEEDS = frozenset({"probe"})
FIDELITY = "P: the arena, the diagnosis and the walk are there; new environments are not made."
DEFAULTS = {
    "arena": 24,  # unseen tasks of an evolution
    "arena_rollouts": 4,  # of each of them
    "drafts": 2.0,  # drafts per task wanted
    "chain": 3,  # actions of a walk
    "runs": 5,  # rollouts of each draft
    "agree": 2,  # of these that solve it, for a draft to be kept
    "shuffled": False,  # placebo: the rates of missed calls, dealt to actions at random
}


class AgentWorld(Static):
    """`Static` with another `evolve`. Its state: which action's answers fed which other."""

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        own = config.strategy
        for name in ("arena", "arena_rollouts", "drafts", "chain"):
            must_be(config, name, own[name] >= 1, "1 or more")
        must_be(config, "agree", 0 <= own.agree <= own.runs, f"0 to config.strategy.runs ({own.runs})")
        super().__init__(config, state)
        self._fed: set[tuple[str, str]] = {(a, b) for a, b in state["fed"]} if state else set()

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        self._fed |= fed(groups)
        return super().observe(step, groups)

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        c, own = self._config, self._config.strategy
        if not evolves(c, step):
            return None
        if refused := full(c, lab):
            return refused
        rng, (scenarios, apart) = rng_for(c.seed, "evolve", step), set_apart(c, lab)
        probe = lambda pool, k: lab.probe(list(pool), k, step) if len(pool) else []
        made = lab.synthesize_unguided(
            wanted=own.arena,
            kind="arena",
            step=step,
            rng=rng,
            scenarios=apart,
            into=(arena := lab.tasks.fresh()),
        )
        groups = probe(unseen(lab.tasks, list(arena)), own.arena_rollouts)
        self._fed |= fed(groups)
        drafts, proposed = draft(lab, self._chains(step, lab, groups, scenarios, rng), step=step, rng=rng)
        made.add(proposed)
        probed = probe(drafts, own.runs)
        kept = [g.task for g in probed if sum(t.outcome.success for t in g.valid) >= own.agree]
        solved = {g.task.id: p for g in probed if (p := solve_rate(g)) is not None}
        adopted = adopt_first(lab, unseen(arena, kept), c.evolution.tasks, kind="signal", solved=solved)
        return made.adopting(adopted, lab.tasks)

    def _chains(self, step: int, lab: Lab, groups: Sequence[Group], scenarios, rng) -> list[Context]:
        """The contexts of the drafts: each has a chain from a weak action as its plan."""
        own, wanted, tried = self._config.strategy, self._config.evolution.tasks, diagnose(groups)
        places = offering(lab, sorted({*actions_on_offer(lab), *tried}), scenarios)
        sets = {action: frozenset(s.id for s in place) for action, place in places.items() if place}
        rates = weakness(tried, sets)
        if own.shuffled:
            rates = dict(zip(rates, rng.permutation(list(rates.values())).tolist(), strict=True))
        weakest = sorted(rates, key=lambda action: -rates[action])[: max(1, wanted // 2)]
        odds = np.array([rates[action] for action in weakest]) + 1e-9  # alike where nothing was missed
        related = lambda a, b: (
            FED if {(a, b), (b, a)} & self._fed else SAME_SET if sets[a] == sets[b] else ANY
        )
        told: dict[str, dict[str, Any]] = {
            action: {
                "attempts": tried[action][0],
                "misses": tried[action][1],
                "mistakes": mistaken(groups, action),
                "others": [a for a in sets if a != action and sets[a] == sets[action]],
            }
            for action in weakest
        }
        words = {
            a: f"{a} is missed in {x['misses']} of {x['attempts']} attempts at unseen tasks."
            for a, x in told.items()
        }
        words |= questions.guidelines(lab, told)
        contexts = []
        for i in range(int(own.drafts * wanted) if weakest else 0):
            start = weakest[rng.choice(len(weakest), p=odds / odds.sum())]
            place = places[start][rng.integers(len(places[start]))]
            chain = walk(start, [a for a in sets if place.id in sets[a]], related, own.chain, rng)
            contexts.append(
                Context(
                    f"agent_world/{step}/{i}/{start}", "agent_world", place, words[start],
                    "; ".join(told[start]["mistakes"]), focus_pattern=chain, must=(start,), plan=chain,
                )
            )  # fmt: skip
        return contexts

    def to_json(self) -> dict:
        return {**super().to_json(), "fed": [list(edge) for edge in sorted(self._fed)]}


make = AgentWorld


def diagnose(groups: Sequence[Group]) -> dict[str, tuple[int, int]]:
    """(attempts, misses) of each action that the rollouts had to make (strategies/blame.py: attempts)."""
    tried = [attempt for g in groups for t in g.valid for attempt in attempts(g.task, t)]
    n, missed = Counter(action for action, _ in tried), Counter(action for action, miss in tried if miss)
    return {action: (n[action], missed[action]) for action in sorted(n)}


def weakness(tried: Mapping[str, tuple[int, int]], sets: Mapping[str, frozenset]) -> dict[str, float]:
    """Rate of missed calls of each tried action, shrunk towards the rate of its toolset.

    sets: action -> its toolset; actions without one are left out.
    """
    of_set: dict[frozenset, dict] = {}
    for action in sorted(tried.keys() & sets.keys()):
        of_set.setdefault(sets[action], {})[action] = tried[action]
    return {a: rate for own in of_set.values() for a, rate in tool_weights(own, chasing=True).items()}


def mistaken(groups: Sequence[Group], action: str) -> list[str]:
    """The two commonest mistakes of the rollouts that miss an action."""
    failed = [t for g in groups for t in g.valid if (action, True) in attempts(g.task, t)]
    return [line for line, _ in Counter(x for t in failed for x in mistakes(t)).most_common(2)]
