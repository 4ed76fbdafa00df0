"""Socratic-SWE (arXiv 2606.07412): failures become skills, skills become tasks, gradients choose among them.

Skill: (first call that a failed rollout misses, what it called instead, how that ended). Its count fades. Its
example is the task with the calls up to where the rollout leaves a success, or else the reference calls.

Tasks: skills are drawn by count and weight. A draft repeats an example's calls, and then has to call what was
missed. The influence of its rollouts on those of a trusted set, made in scenarios set apart, chooses the
drafts for D_t, the best of those above 0. A skill weighs 1, then 1 plus the mean influence of its last drafts
over the mean |influence| of their evolution. A language model, where one explores, words each skill once.

No code was found. Faithful: from traces to skills to validated tasks, and the gradient as judge. Missing: a
language model as generator that earns the influence; here it chooses drafts. At our sizes it hardly repeats
(docs/notes/influence.md), the plain cosine a bit better than that of Adam's direction.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.explorers.evidence import divergence
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies import questions
from coevolve_jax.strategies.base import SIGNALS, Lab, StepReport, check_least, check_shares, evolves
from coevolve_jax.strategies.blame import attempts
from coevolve_jax.strategies.groups import solve_rate
from coevolve_jax.strategies.growth import adopt_first, draft, full, goal_set, set_apart, unseen
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.types import Call, Context, Group, Step, Task

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
NEEDS = {"ask": "", "probe": "influence", "influence": "influence"}
FIDELITY = "P: skills are distilled by rules, and the gradient chooses drafts where it trains a generator."
DEFAULTS = {
    "memory": 0.95,  # decay of the skills' counts per GRPO step
    "drafts": 2.0,  # drafts for each place of an evolution
    "influence": True,  # the best aligned drafts above 0; False: the first, without probes or a trusted set
    "preconditioned": False,  # compare the plain gradient; True: the direction of Adam's step
    "probe": 4,  # rollouts of each draft, whose gradients are scored
    "goal": 24,  # tasks of the trusted set
    "goal_probe": 8,  # rollouts of each of them, at each evolution
}
EXAMPLES, FORGOTTEN = 8, 0.05  # examples kept of a skill; a count at which a skill is dropped
LEAST = 0.1  # weight of a skill


class Socratic(Static):
    """`Static` with another `observe` and `evolve` (strategies/base.py documents the methods).

    Its state, besides that of `Static`: the registry of skills and the trusted set. A skill, by its parts
    joined by "|", has a count, a weight, examples (task id, calls), and a model's words.
    """

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        check_least(config, {"drafts": 1, "probe": 2, "goal": 1, "goal_probe": 2})
        check_shares(config, "memory")
        super().__init__(config, state, needs_calls=True)
        self._skills = {k: dict(own) for k, own in (state["skills"] if state else {}).items()}
        self._goal = [Task.from_json(task) for task in state["goal"]] if state else []

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        found, lessons = super().observe(step, groups), [x for g in groups for x in lessons_of(g)]
        for own in self._skills.values():
            own["count"] *= self._config.strategy.memory
        for parts, task, calls in lessons:
            new = {"parts": list(parts), "count": 0.0, "weight": 1.0, "examples": []}
            own = self._skills.setdefault("|".join(parts), new)
            own["count"] += 1
            example = [task.id, [call.to_json() for call in calls]]
            own["examples"] = [*(e for e in own["examples"] if e != example), example][-EXAMPLES:]
        self._skills = {
            k: self._skills[k] for k in sorted(self._skills) if self._skills[k]["count"] > FORGOTTEN
        }
        return StepReport({**found.counts, "skills": len(self._skills), "lessons": len(lessons)}, found.rows)

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        c, own = self._config, self._config.strategy
        if not evolves(c, step):
            return None
        if refused := full(c, lab):
            return refused
        rng, wanted, total = rng_for(c.seed, "evolve", step), c.evolution.tasks, SynthesisStats()
        asked = self._worded(self._contexts(math.ceil(own.drafts * wanted), step, lab, rng), lab)
        drafts, made = draft(lab, [context for _, context in asked], step=step, rng=rng)
        if not own.influence or not len(drafts):
            return made.adopting(adopt_first(lab, list(drafts), wanted, kind="signal"), lab.tasks)
        if not self._goal:
            self._goal, total = goal_set(c, lab, own.goal, step)
        total.add(made)
        groups = lab.probe(list(drafts), own.probe, step)
        goal = lab.probe(self._goal, own.goal_probe, step)
        aligned = lab.influence(goal, groups, preconditioned=own.preconditioned)
        scores = {t.id: score for t, score in zip(drafts, aligned, strict=True)}
        self._reweigh({context.id: key for key, context in asked}, list(drafts), scores)
        trusted = lab.tasks.fresh()
        trusted.add(self._goal)
        ranked = unseen(trusted, sorted([t for t in drafts if scores[t.id] > 0], key=lambda t: -scores[t.id]))
        solved = {g.task.id: p for g in groups if (p := solve_rate(g)) is not None}
        return total.adopting(adopt_first(lab, ranked, wanted, kind="signal", solved=solved), lab.tasks)

    def _contexts(
        self, count: int, step: int, lab: Lab, rng: np.random.Generator
    ) -> list[tuple[str, Context]]:
        """Draws skills for drafts. Returns each skill's key with the draft's context; [] without skills.

        Examples in scenarios set apart, those of the trusted set, are left out.
        """
        others, apart = set_apart(self._config, lab)
        held = [s.scenario for s in apart if s not in others]
        usable: dict[str, dict] = {
            key: dict(own, examples=[e for e in own["examples"] if lab.tasks[e[0]].scenario not in held])
            for key, own in self._skills.items()
        }
        usable = {key: own for key, own in usable.items() if own["examples"]}
        keys, most, contexts = list(usable), self._config.data.max_calls, []
        odds = np.array([own["count"] * own["weight"] for own in usable.values()])
        for i, k in enumerate(rng.choice(len(keys), count, p=odds / odds.sum()) if keys else ()):
            skill = usable[keys[k]]
            missed, instead, how = skill["parts"]
            id, calls = skill["examples"][rng.integers(len(skill["examples"]))]
            words = f"{missed} is missed" + (f", and {instead} is called instead." if instead else ".")
            plan = (*map(Call.from_json, calls[: most - 1]), missed)
            context = Context(
                f"socratic/{step}/{i}/{missed}", "socratic", lab.tasks[id], words, how, instead,
                focus_pattern=(missed,), must=(missed,), plan=plan,
            )  # fmt: skip
            contexts.append((keys[k], context))
        return contexts

    def _worded(self, asked: Sequence[tuple[str, Context]], lab: Lab) -> list[tuple[str, Context]]:
        """Puts a language model's words for the skills into the contexts, where there are some."""
        own = self._skills
        new = {key: (own[key]["parts"], c) for key, c in asked if "words" not in own[key]}
        for key, words in questions.skills(lab, new).items():
            own[key]["words"] = words
        return [(key, dataclasses.replace(c, summary=own[key].get("words", c.summary))) for key, c in asked]

    def _reweigh(self, keys: Mapping[str, str], drafts: Sequence[Task], scores: Mapping[str, float]) -> None:
        """Sets the weights of skills by the scores of their drafts. keys: of skills, by the context's id."""
        scale = math.fsum(map(abs, scores.values())) / len(scores) or 1.0
        for key in sorted(set(keys.values())):
            own = [scores[t.id] for t in drafts if keys[t.lineage.context or ""] == key]
            if own:
                self._skills[key]["weight"] = max(LEAST, 1 + math.fsum(own) / len(own) / scale)

    def to_json(self) -> dict:
        skills = {key: dict(own) for key, own in self._skills.items()}  # `observe` changes its own ones
        return {**super().to_json(), "skills": skills, "goal": [task.to_json() for task in self._goal]}


make = Socratic


def lessons_of(group: Group) -> list[tuple[tuple[str, str, str], Task, list[Call]]]:
    """Tells what the failed rollouts of a group show: (parts of a skill, task, calls up to the failure).

    The parts are the first reference action that the rollout misses, the action where it leaves the best
    successful rollout ("" where it makes no more calls), and "error", "accepted" or the reason of its end.
    """
    found, wins = [], [t for t in group.valid if t.outcome.success]
    for t in group.valid:
        came = attempts(group.task, t)
        if t.outcome.success or not came or not came[-1][1]:
            continue
        reference = dataclasses.replace(
            t, steps=tuple(Step(0, "", call, "", False) for call in group.task.calls)
        )
        at, _, _ = divergence([*wins, reference], [t])
        made = [(s, s.call) for s in t.steps if s.call is not None]
        wrong = made[at][0] if at < len(made) else None
        how = t.stop if wrong is None else "error" if wrong.error else "accepted"
        parts = (came[-1][0], wrong.action if wrong else "", how)
        found.append((parts, group.task, [call for _, call in made[:at]]))
    return found
