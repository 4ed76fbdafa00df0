"""TextWorld (arXiv 1806.11532): text adventures that are generated, by seed and level of difficulty, as an environment
family of free text.

commands.py has the one tool, environment.py the worlds and their grading, games.py makes the games; the last two need
TextWorld, which has a virtual environment of its own (`make textworld`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coevolve_jax.envs import base
from coevolve_jax.envs.base import Environment
from coevolve_jax.envs.textworld.commands import ACT, verb
from coevolve_jax.envs.textworld.commands import wording as wording
from coevolve_jax.types import Call, Group, Task, Turn

PACKAGES = ("textworld", "jericho")
FIRST_SEED = {"train": 0, "development": 1_000_000, "test": 2_000_000}  # of the generator, by split
MAX_GAMES = 100_000  # of a split at one level
MAX_LEVEL = 8
DEFAULTS = {"games": 6, "difficulty": (1, 1)}


def scenarios(split: str, settings: Mapping[str, Any] | None = None, apart_from: str = "") -> list[Task]:
    """The games of one side of a split, from the easiest; those that were never made are made. settings: "difficulty",
    the lowest and the highest level; "games", how many of each. apart_from: less those that begin as one of that
    split."""
    from coevolve_jax.envs.textworld import environment, games

    names = [games.Name(*name) for name in _names(split, settings)]
    others = [games.Name(*name) for name in _names(apart_from, settings)] if apart_from else []
    games.make_missing([*names, *others])
    seen = set(map(environment.beginning, others))
    return [
        Task(f"{split}_{name.level}_{name.seed}", "textworld", {"level": name.level, "seed": name.seed})
        for name in names
        if not seen or environment.beginning(name) not in seen
    ]


def tasks(split: str, settings: Mapping[str, Any] | None = None) -> list[Task]:
    """The quest that the generator put into each game, in its own words; the reference is its own walkthrough."""
    from coevolve_jax.envs.textworld import games

    made = []
    names = [games.Name(*name, quest=True) for name in _names(split, settings)]
    games.make_missing(names)
    for name in names:
        objective, commands = games.quest(name)
        turn = Turn(objective, tuple(Call("act", {"command": command}) for command in commands))
        id = f"quest_{split}_{name.level}_{name.seed}"
        made.append(Task(id, "textworld", name._asdict(), (turn,)))
    return made


def _names(split: str, settings: Mapping[str, Any] | None) -> list[tuple[int, int]]:
    """(level, seed) of the games of a split. ValueError for settings that make no sense."""
    settings = {**DEFAULTS, **(settings or {})}
    if split not in FIRST_SEED:
        raise ValueError(f"TextWorld has no split {split!r}: use one of {', '.join(FIRST_SEED)}.")
    levels, count, first = settings["difficulty"], settings["games"], FIRST_SEED[split]
    if len(levels) != 2 or not 1 <= levels[0] <= levels[1] <= MAX_LEVEL:
        raise ValueError(
            f"config.environment.difficulty is {tuple(levels)}: give the lowest and the highest level, from 1 to "
            f"{MAX_LEVEL}, such as (1, 3)."
        )
    if not 1 <= count <= MAX_GAMES:
        raise ValueError(f"config.environment.games is {count}: it must be from 1 to {MAX_GAMES}.")
    return [(level, first + n) for level in range(levels[0], levels[1] + 1) for n in range(count)]


def tools(task: Task) -> list[dict]:
    return [ACT]


def make() -> Environment:
    from coevolve_jax.envs.textworld import environment

    return environment.Environment()


def warm_up() -> None:
    """Imports TextWorld, so that no call waits for it."""
    import textworld  # noqa: F401


def report(groups: Sequence[Group], judge) -> dict:
    """The share of games that are won, by level too."""
    return {
        **base.report(groups, judge),
        "benchmark": "TextWorld quests",
        "scoring": "the game's own condition for being won",
        "by_level": base.success_by("level", groups),
    }


action_pattern = verb
