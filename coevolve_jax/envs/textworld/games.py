"""TextWorld's games by level and seed: made by its generator, compiled by Inform 7, kept where its packages are."""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the packages are there where games are made and played
    import textworld

# In the virtual environment that has TextWorld: another version of it makes other games.
FOLDER = Path(sys.prefix) / "games"


class Name(NamedTuple):
    """A game. level: from 1; how large the house is, how full, and how long the way to the quest's goal. seed: the
    generator's. quest: whether it ends when that goal is reached; otherwise the same house has no goal and no end."""

    level: int
    seed: int
    quest: bool = False

    @property
    def path(self) -> Path:
        return FOLDER / f"level{self.level}_seed{self.seed}{'_quest' if self.quest else ''}.z8"


def make_missing(names: Iterable[Name]) -> None:
    """Makes the games that are not there yet, as many at once as there are cores: a few seconds each."""
    missing = [name for name in names if not name.path.exists()]
    if missing:
        FOLDER.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as processes:
            list(processes.map(make, missing))


def make(name: Name) -> None:
    """One game: what plays (.z8) and what it is made of (.json). Whoever looks finds it whole or not at all."""
    from textworld import generator

    options = _options(name)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        options.path = os.path.join(folder, "game.z8")
        generator.compile_game(house(name), options)
        for ending in (".json", ".z8"):
            os.replace(os.path.join(folder, f"game{ending}"), name.path.with_suffix(ending))


def house(name: Name) -> textworld.Game:
    """What a game is made of, by the generator: the same in every process whose PYTHONHASHSEED is 0, as a worker's is."""
    from textworld import generator

    game = generator.make_game(_options(name))
    if not name.quest:
        game.quests = []
    return game


def _options(name: Name) -> textworld.GameOptions:
    from textworld import GameOptions

    options = GameOptions()
    options.seeds = name.seed
    options.nb_rooms = 2 * name.level
    options.nb_objects = 3 + 3 * name.level
    options.quest_length = 1 + name.level
    return options


def begin(name: Name) -> textworld.Environment:
    """The game, to be reset. ValueError where it was not made."""
    if not name.path.exists():
        raise ValueError(
            f"There is no game {name.path.name} in {FOLDER}: make textworld makes games, and so does asking the family for "
            "the scenarios of its split."
        )
    from textworld import EnvInfos, start

    game = start(str(name.path), EnvInfos(facts=True, admissible_commands=True))
    game.seed(0)
    return game


@functools.cache
def quest(name: Name) -> tuple[str, tuple[str, ...]]:
    """The objective in the game's own words, and the commands that reach it."""
    from textworld import Game

    game = Game.load(str(name.path.with_suffix(".json")))
    return " ".join(game.objective.split()), tuple(game.walkthrough)
