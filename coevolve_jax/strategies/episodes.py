"""Episodes of success, and the skills that Evolving-RL tells of them: actions, or a model's words."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from coevolve_jax.explorers.evidence import divergence
from coevolve_jax.strategies import hints, questions
from coevolve_jax.strategies.base import Lab
from coevolve_jax.types import Group

# Of a success: actions, in order; parting: the one where failures leave it, or ""; words, of the query;
# shown: what a model is asked about, until it was; text: its sentence.
Episode = Mapping

SKILLS = ("none", "last", "last two", "last three", "parting", "all")
SENTENCE = "sentence"  # the skill in a model's words, of an episode that has some


def episode_of(group: Group, before: Episode | None = None) -> Episode:
    """Records what a group's shortest success did, and where its failures leave it.

    before: the last episode of the task. One with the same actions keeps its sentence, and is not asked about
    again.
    """
    won = sorted((t for t in group.valid if t.outcome.success), key=lambda t: len(t.steps))
    _, left, _ = divergence(won[:1], [t for t in group.valid if not t.outcome.success])
    good = [s for s in won[0].steps if s.action and not s.error]
    parting = next((s.action for s in good if s is left), "")
    actions, query = [s.action for s in good], group.task.turns[0].query
    kept = {"shown": {"request": query, "calls": [s.call.to_json() for s in good if s.call]}}
    if before and before["actions"] == actions:
        kept = {key: before[key] for key in ("shown", "text") if key in before}
    return {"actions": actions, "parting": parting, "words": sorted(hints.words(query)), **kept}


def skills_of(episode: Episode) -> tuple[str, ...]:
    """Returns the skills that can be told of an episode."""
    return (*SKILLS, SENTENCE) if "text" in episode else SKILLS


def told(episode: Episode, skill: str, most: int) -> str:
    """Returns the line that tells a skill, at most `most` characters long; "" for none.

    "all" are the actions in alphabetical order.
    """
    actions = episode["actions"]
    return f"Hint: {episode['text']}" if skill == SENTENCE else hints.line({
        "none": [], "last": actions[-1:], "last two": actions[-2:], "last three": actions[-3:],
        "parting": [episode["parting"]] if episode["parting"] else [], "all": sorted(actions),
    }[skill], most=most)  # fmt: skip


def worded(
    lab: Lab, episodes: Mapping[str, Episode], rng: np.random.Generator, *, count: int, most: int
) -> dict[str, Episode]:
    """Has a language model word `count` of the episodes that were not asked about, drawn at random.

    Returns all episodes. None is asked about later. most: characters of a line.
    """
    new = [id for id, episode in episodes.items() if "shown" in episode]
    drawn = [new[i] for i in sorted(rng.permutation(len(new))[:count])]
    said = questions.successes(lab, {id: episodes[id]["shown"] for id in drawn}, most - len("Hint: "))
    bare = {id: {key: x for key, x in e.items() if key != "shown"} for id, e in episodes.items()}
    return {id: {**e, "text": said[id]} if id in said else e for id, e in bare.items()}
