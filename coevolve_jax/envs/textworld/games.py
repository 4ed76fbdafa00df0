"""TextWorld's games by level and seed: generated, compiled by Inform 7, stored beside TextWorld itself."""

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

from coevolve_jax import shipped

if TYPE_CHECKING:  # only interpreters that make and play games have the package
    import textworld

# Games live in the virtual environment of their TextWorld: another version makes other games.
FOLDER = Path(sys.prefix) / "games"


class Name(NamedTuple):
    """The name of a game.

    level: from 1. It sets the number of rooms and objects and the length of the quest. seed: the generator's.
    quest: whether the game ends when its goal is reached. Without it, the same house has no goal and no end.
    """

    level: int
    seed: int
    quest: bool = False

    @property
    def path(self) -> Path:
        return FOLDER / f"level{self.level}_seed{self.seed}{'_quest' if self.quest else ''}.z8"


def make_missing(names: Iterable[Name]) -> None:
    """Makes the missing games, one per core at a time. Each takes a few seconds."""
    missing = [name for name in names if not name.path.exists()]
    if missing:
        FOLDER.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as processes:
            list(processes.map(make, missing))


def make(name: Name) -> None:
    """Makes one game: the program (.z8) and its description (.json).

    Both are moved into place whole, the program last: `make_missing` looks for it.
    """
    from textworld import generator

    options = _options(name)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        options.path = os.path.join(folder, "game.z8")
        generator.compile_game(house(name), options)
        for ending in (".json", ".z8"):
            os.replace(os.path.join(folder, f"game{ending}"), name.path.with_suffix(ending))


def house(name: Name) -> textworld.Game:
    """Generates the description of a game.

    It is the same in every process whose PYTHONHASHSEED is 0, which workers have.
    """
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
    """Opens the game; the caller resets it. ValueError where it was not made."""
    if not name.path.exists():
        raise ValueError(
            f"There is no game {name.path.name} in {FOLDER}: {shipped.command('synthesize')} "
            "--config=configs/textworld_tiny.py makes games, and so does asking the family for the "
            "scenarios of its split."
        )
    from textworld import EnvInfos, start

    game = start(str(name.path), EnvInfos(facts=True, admissible_commands=True))
    game.seed(0)
    return game


@functools.cache
def quest(name: Name) -> tuple[str, tuple[str, ...]]:
    """Returns the objective in the game's own words, and the commands that reach it."""
    from textworld import Game

    game = Game.load(str(name.path.with_suffix(".json")))
    return " ".join(game.objective.split()), tuple(game.walkthrough)
