"""Evolving-RL (arXiv 2605.10663): an extractor of skills is paid by what they do on other tasks.

Source: a task with a successful rollout. The extractor makes skills of it, one for each rollout of a group,
and each becomes a hint for the tasks nearest to the source. Rollout m of all these tasks reads skill m. The
extractor earns the mean success of a skill's rollouts, standardised over the source's skills. The solver's
groups mix skills, so GRPO compares them too. The source itself is not trained on.

Here the extractor is a softmax over what of the success to tell (synthesis/knobs.py): its last one, two or
three actions, the one where failures leave it, all of them out of order, or nothing. Tasks are near if their
actions overlap. Each takes the place of a task that was drawn, an evolved one that of an evolved one. At
evaluation nobody knows the actions, so the words of the queries decide, and the extractor takes its likeliest
skill.

A language model, where one explores, words some new successes at each evolution. Its sentence is one more
skill, and is chosen and paid like the others. A success without one has "none" in its place.

Read against the authors' code. Faithful: rewards on other tasks, groups of different skills, one baseline for
each source. Missing: the extractor is not what writes, shares no weights with the solver, and has no entropy
bonus. The clip has no effect at one update per batch. The growth of D_t is that of `random`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ml_collections import ConfigDict

from coevolve_jax.config import schedule
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies import hints
from coevolve_jax.strategies.base import (
    SIGNALS,
    Lab,
    Roll,
    StepReport,
    check_least,
    check_rolled_once,
    evolves,
)
from coevolve_jax.strategies.batches import keeping_share, sampling_weights
from coevolve_jax.strategies.episodes import SKILLS, Episode, episode_of, skills_of, told, worded
from coevolve_jax.strategies.growth import synthesize_freely
from coevolve_jax.strategies.static import Static
from coevolve_jax.synthesis.knobs import KnobPolicy, standardised
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Group, Hint, Task

READS = (*schedule.KEYS, "evolution.tasks", *SIGNALS)
NEEDS = frozenset({"fresh", "help", "ask"})
FIDELITY = "P: skills are chosen among the actions of a success, and no text of an extractor is trained."
DEFAULTS = {
    "near": 4,  # tasks that a source's skills are tried on
    "crossed": True,  # on other tasks; False: on the source itself
    "learning_rate": 0.2,  # of the extractor, whose weight in the paper's loss is 0.2 to the solver's 1
    "kl_coef": 0.01,  # of the extractor, towards the uniform distribution
    "characters": 200,  # of a hint
    "worded": 16,  # successes that a language model words at an evolution
}


class EvolvingRL(Static):
    """`Static` with another `collect`, and with hints (strategies/base.py documents the methods).

    Its state, besides that of `Static`: the extractor's logits, and the episode of each task's last success.
    What `collect` hands out is for `observe` of the same step alone.
    """

    def __init__(self, config: ConfigDict, state: Mapping | None = None):
        check_least(config, {"near": 1, "learning_rate": 0, "kl_coef": 0, "characters": 0, "worded": 0})
        check_rolled_once(config)
        super().__init__(config, state, synthesize_freely)
        own = state or {"knobs": {}, "episodes": {}}
        self._episodes: dict[str, Episode] = dict(own["episodes"])
        self._extractor = self._choosing(own["knobs"])
        self._sources: dict[str, str] = {}  # id of a task -> that of the source whose skills it tries
        self._skills: dict[str, list[str]] = {}  # id of a source -> the skill of each rollout

    def collect(self, step: int, tasks: TaskPool, roll: Roll) -> list[Group]:
        c, own, rng = self._config, self._config.strategy, rng_for(self._config.seed, "sample", step)
        size, each = c.rollout.tasks_per_step, own.near if own.crossed else 1
        odds = lambda rows: sampling_weights(c, rows)
        drawn = {
            t.id: t for t in tasks.draw(size, rng, min_evolved_share=c.data.min_evolved_share, weights=odds)
        }
        places, chosen = list(drawn.values()), dict[str, Task]()
        self._sources, self._skills = {}, {}
        sources = [t for t in places if t.id in self._episodes][: math.ceil(size / each)]
        apart = {t.id for t in sources if own.crossed}
        usable = [
            t for t, weight in zip(tasks, odds(tasks.rows), strict=True) if weight and t.id not in apart
        ]
        for i, source in enumerate(sources):
            others = [t for t in usable if t.id not in chosen]
            order = sorted(others, key=lambda t: (-hints.overlap(t.actions, source.actions), rng.random()))
            near = keeping_share(order, places[i * each : (i + 1) * each])
            tried = near if own.crossed else [source]
            chosen |= {t.id: t for t in tried}
            self._sources |= dict.fromkeys([t.id for t in tried], source.id)
            skills = self._extractor.sample(c.rollout.group_size, rng)
            has = skills_of(self._episodes[source.id])
            self._skills[source.id] = [d["skill"] if d["skill"] in has else "none" for d in skills]
        rest = sorted((t for id, t in drawn.items() if id not in chosen), key=lambda t: t.id in apart)
        batch = keeping_share([*chosen.values(), *rest], places)  # a source only where others are too few
        return roll(batch, c.rollout.group_size, hints=self._trial)

    def _trial(self, task: Task, rollout_index: int) -> Hint | None:
        source = self._sources.get(task.id)
        return self._hint(self._episodes[source], self._skills[source][rollout_index]) if source else None

    def help(self, task: Task, rollout_index: int) -> Hint | None:
        """The likeliest skill of the episode whose query has most words in common with the task's."""
        asked, shares = hints.words(task.turns[0].query), self._shares()
        near = {id: hints.overlap(own["words"], asked) for id, own in self._episodes.items()}
        best = max(near, key=lambda id: near[id], default=None)
        if not best or not near[best]:
            return None
        known = skills_of(self._episodes[best])
        return self._hint(self._episodes[best], max(known, key=lambda skill: shares.get(skill, 0.0)))

    def _hint(self, episode: Episode, skill: str) -> Hint | None:
        line = told(episode, skill, self._config.strategy.characters)
        return Hint(before_task=line) if line else None

    def evolve(self, step: int, lab: Lab) -> SynthesisStats | None:
        own, rng = self._config.strategy, rng_for(self._config.seed, "distil", step)
        if evolves(self._config, step):
            self._episodes = worded(lab, self._episodes, rng, count=own.worded, most=own.characters)
            self._extractor = self._choosing(self._extractor.to_json())
        return super().evolve(step, lab)

    def _choosing(self, logits: Mapping) -> KnobPolicy:
        """An extractor that chooses among the skills of all episodes, and those that it knows."""
        known = [skill for skill, _ in logits.get("skill", ())]
        has = [skill for episode in self._episodes.values() for skill in skills_of(episode)]
        return KnobPolicy({"skill": tuple(dict.fromkeys([*SKILLS, *known, *has]))}, logits)

    def _shares(self) -> dict[str, float]:
        shares = self._extractor.shares("skill").tolist()
        return dict(zip(self._extractor.factors["skill"], shares, strict=True))

    def observe(self, step: int, groups: Sequence[Group]) -> StepReport:
        found, own = super().observe(step, groups), self._config.strategy
        drawn, advantages = [], []
        for source, skills in self._skills.items():
            tried = [g for g in groups if self._sources.get(g.task.id) == source]
            rewards = {m: gain for m in range(len(skills)) if (gain := earned(tried, m)) is not None}
            drawn += [{"skill": skills[m]} for m in rewards]
            advantages += standardised(list(rewards.values())).tolist()
        self._extractor.update(drawn, advantages, own.learning_rate, own.kl_coef)
        for group in groups:
            if any(t.outcome.success for t in group.valid):
                self._episodes[group.task.id] = episode_of(group, self._episodes.get(group.task.id))
        hinted = sum(bool(t.hints) for g in groups for t in g.trajectories)
        rows = [*found.rows, {"kind": "extractor", "step": step, "shares": self._shares()}]
        return StepReport({**found.counts, "hinted": hinted, "skills": len(drawn)}, rows)

    def to_json(self) -> dict:
        own = {"knobs": self._extractor.to_json(), "episodes": dict(self._episodes)}
        return {**super().to_json(), **own}


make = EvolvingRL


def earned(groups: Sequence[Group], rollout_index: int) -> float | None:
    """The extractor's reward for the skill of this rollout of each group; None if none of these is valid."""
    won = [t.outcome.success for g in groups for t in g.valid if t.rollout_index == rollout_index]
    return sum(won) / len(won) if won else None
