"""EvolveR (arXiv 2510.16079): principles are distilled from rollouts, scored by use, and read before a task.

Principle: where a failed rollout of a task leaves a successful one, the action of the success is a guiding
principle, and that of the failure a cautionary one. It keeps the words of the query that they answer. A share
of a step's groups is distilled.

Use: before a task stands a line of the principles whose words overlap most with those of its query. Each
rollout that read a principle is a use of it, and a success if it succeeds. The score is

    (successes + 1) / (uses + 2), a half at the start.

Every few steps the principles that score too low are pruned. A new one is merged into an earlier one of the
same task and kind with an action that is alike.

A language model, where one explores, words new principles at the next evolution, and judges whether one that
is alike says the same as an earlier one of the task and kind.

Read against the authors' code. Faithful: score, pruning, both kinds, the best three. Its further rewards have
weight 0, so the reward is the outcome. Missing: training the policy to distil. With rules alone it is another
method. Retrieval is no action of the policy's, and always comes. The growth of D_t is that of `random`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.explorers.evidence import divergence
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies import hints, questions
from coevolve_jax.strategies.base import SIGNALS, Lab, StepReport, check_least, check_shares, evolves, must_be
from coevolve_jax.strategies.growth import synthesize_freely
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.types import Group, Hint, Task

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
NEEDS = frozenset({"help", "ask"})
FIDELITY = "N: rules distil and merge the principles, where the idea is that the policy writes its own."
DEFAULTS = {
    "distilled": 0.25,  # share of a step's groups that give principles
    "read": 3,  # principles before a task
    "prune_below": 0.3,  # the score; 0: no principle is pruned
    "prune_every": 10,  # GRPO steps
    "merge_from": 0.85,  # how alike two actions of a task are that are one principle
    "characters": 200,  # of a hint
}

# do: guiding or cautionary; action, words, task: its source; uses, successes; text: a model's sentence;
# shown: what a model is asked about, until the next evolution; also: actions of merged ones.
Principle = Mapping


class EvolveR(Static):
    """`Static` with hints from a store of principles: its state, besides that of `Static`, oldest first."""

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        check_least(config, {"read": 0, "prune_below": 0, "prune_every": 1, "characters": 0})
        check_shares(config, "distilled")
        must_be(config, "merge_from", 0 < config.strategy.merge_from <= 1, "above 0, at most 1")
        super().__init__(config, state, synthesize_freely, hints=self.help)
        self._store: list[Principle] = list(state["store"]) if state else []

    def help(self, task: Task, rollout_index: int) -> Hint | None:
        line, _ = self._read(task)
        return Hint(before_task=line) if line else None

    def _read(self, task: Task) -> tuple[str, list[int]]:
        """The line of a task's principles, and their places. What has no room as a sentence is an action."""
        found, most, told = self._retrieved(task), self._config.strategy.characters, dict[int, str]()
        for i in found:
            text = f" {self._store[i].get('text', '')}"
            if len("Hint:" + "".join(told.values()) + text) <= most and text != " ":
                told[i] = text
        bare, room = [i for i in found if i not in told], most - len("".join(told.values()))
        advice = lambda do: [self._store[i]["action"] for i in bare if self._store[i]["do"] is do]
        said = hints.said(advice(True), advice(False), room)
        held = [i for i in bare if self._store[i]["action"] in said[not self._store[i]["do"]]]
        line = (hints.line(*said, room) or "Hint:") + "".join(told.values())
        return (line, [*held, *told]) if held or told else ("", [])

    def _retrieved(self, task: Task) -> list[int]:
        """Places in the store of the principles for a task: most words in common first, then the score."""
        asked = hints.words(task.turns[0].query)
        near = [(hints.overlap(p["words"], asked), score(p), -i) for i, p in enumerate(self._store)]
        best = sorted((x for x in near if x[0] > 0), reverse=True)
        return [-i for _, _, i in best[: self._config.strategy.read]]

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        found, own = super().observe(step, groups), self._config.strategy
        self._count_uses(groups)  # by the store that `collect` read
        new = 0
        for principle in [p for group in self._drawn(step, groups) for p in distil(group)]:
            if not any(self._same(principle, p) for p in self._store):
                self._store, new = [*self._store, principle], new + 1
        before = len(self._store)
        if (step + 1) % own.prune_every == 0:
            self._store = [p for p in self._store if score(p) >= own.prune_below]
        pruned, hinted = before - len(self._store), sum(bool(t.hints) for g in groups for t in g.trajectories)
        counts = {"hinted": hinted, "principles": new, "pruned": pruned}
        return StepReport({**found.counts, **counts}, found.rows)

    def _count_uses(self, groups: Sequence[Group]) -> None:
        store = [dict(p) for p in self._store]
        for group in groups:
            for i in self._read(group.task)[1]:
                store[i]["uses"] += len(group.valid)
                store[i]["successes"] += sum(t.outcome.success for t in group.valid)
        self._store = list(store)

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        if evolves(self._config, step):
            self._reword(lab)
        return super().evolve(step, lab)

    def _reword(self, lab: Lab) -> None:
        """Has a language model word the new principles, and drops those that it merges into earlier ones."""
        store = [dict(p) for p in self._store]
        new = {f"{i}/{p['action']}": p for i, p in enumerate(store) if "shown" in p}
        shown = {name: {"do": p["do"], **p.pop("shown")} for name, p in new.items()}
        for name, text in questions.principles(lab, shown, self._config.strategy.characters // 2).items():
            new[name]["text"] = text
        twins = {}
        for name, p in ((name, p) for name, p in new.items() if "text" in p):
            for q in (q for q in store[: int(name.split("/")[0])] if "text" in q):
                if (p["task"], p["do"]) == (q["task"], q["do"]) and self._alike(p["text"], q["text"]):
                    twins.setdefault(name, q)
        pairs = {name: (q["text"], new[name]["text"]) for name, q in twins.items()}
        for name in sorted(questions.same(lab, pairs)):
            twins[name]["also"] = [*twins[name].get("also", []), new[name]["action"]]
            store = [p for p in store if p is not new[name]]
        self._store = list(store)

    def _drawn(self, step: int, groups: Sequence[Group]) -> list[Group]:
        """The groups to distil, of those with both outcomes."""
        mixed, most = [g for g in groups if g.mixed], math.ceil(self._config.strategy.distilled * len(groups))
        order = rng_for(self._config.seed, "distil", step).permutation(len(mixed))
        return [mixed[i] for i in order[:most]]

    def _same(self, a: Principle, b: Principle) -> bool:
        alike = any(self._alike(a["action"], x) for x in (b["action"], *b.get("also", ())))
        return (a["task"], a["do"]) == (b["task"], b["do"]) and alike

    def _alike(self, a: str, b: str) -> bool:
        return hints.alike(a, b) >= self._config.strategy.merge_from

    def to_json(self) -> dict:
        return {**super().to_json(), "store": self._store}


make = EvolveR


def score(principle: Principle) -> float:
    """The share of successes among the uses, with one of each added."""
    return (principle["successes"] + 1) / (principle["uses"] + 2)


def distil(group: Group) -> list[Principle]:
    """Returns the principles that a group of both outcomes shows, the guiding one first.

    An action that both sides take, with other arguments, is no mistake by itself: nothing warns of it.
    """
    won = [t for t in group.valid if t.outcome.success]
    lost = [t for t in group.valid if not t.outcome.success]
    _, good, bad = divergence(won, lost)
    told = [(do, s) for do, s in ((True, good), (False, bad)) if s and s.action]
    if len(told) == 2 and told[0][1].action == told[1][1].action:
        told = told[:1]
    query = lambda s: group.task.turns[s.turn].query
    calls = {name: s and s.call and s.call.to_json() for name, s in (("good", good), ("bad", bad))}
    fresh = {"task": group.task.id, "uses": 0, "successes": 0}
    said = lambda s: {"words": sorted(hints.words(query(s))), "shown": {"request": query(s), **calls}}
    return [{"do": do, "action": s.action, **said(s), **fresh} for do, s in told]
