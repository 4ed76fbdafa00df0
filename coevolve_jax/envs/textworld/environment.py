"""One TextWorld game as a world: text in, text out, and the facts that hold in it."""

from __future__ import annotations

import functools
import json
import re

from coevolve_jax.envs.base import digest
from coevolve_jax.envs.textworld import games
from coevolve_jax.envs.textworld.commands import read
from coevolve_jax.envs.turns import Turns
from coevolve_jax.types import Call, Observation, Outcome, Task, Turn

MAX_SAID = 1000  # characters of an answer
DONE = " - succeeded]"  # marks an action that worked in the game's trace of actions
_END = re.compile(r"\*\*\* (?:The End|You lost!) \*\*\*")


class Game:
    """A game in progress.

    facts: the facts that hold, such as "in(apple: f, fridge: c)". won: whether its own goal was reached.
    """

    def __init__(self, name: games.Name):
        self._game = games.begin(name)
        self._state = self._game.reset()
        self.won = self.ended = False

    @property
    def facts(self) -> frozenset[str]:
        return frozenset(map(str, self._state.facts))

    @property
    def commands(self) -> list[str]:
        """The commands that the game accepts now."""
        return [] if self.ended else list(self._state.admissible_commands)

    def act(self, call: Call) -> Observation:
        """Executes a command. An invalid one, or one that the game refuses, gets an error observation."""
        try:
            command = read(call)
            if self.ended:
                raise ValueError("The game has ended.")
        except ValueError as error:
            return Observation(json.dumps({"error": str(error)}), error=True)
        self._state, _, self.ended = self._game.step(command)
        self.won = self.won or self._state.won
        said = clean(self._state.feedback)
        if DONE not in self._state.raw:
            return Observation(json.dumps({"error": said}), error=True)
        return Observation(said)

    def close(self) -> None:
        self._game.close()


def clean(feedback: str) -> str:
    """Returns the game's words in one line, without prompt, status line and the final count of turns."""
    said = feedback.rpartition("\n>")[0] or feedback
    end = _END.search(said)
    return " ".join((said[: end.end()] if end else said).split())[:MAX_SAID]


class Environment:
    """One rollout's world. The turn of a game's own quest, in its words, passes where the game is won.

    Another turn, also of a new task in a game with a quest, passes on two conditions. All facts that its
    reference calls gain hold. And each of their answers that came without a change of facts was also an
    answer to the agent.
    """

    def reset(self, task: Task) -> None:
        """Starts the game from its beginning. ValueError where the game was not made."""
        self._name = games.Name(**task.scenario)
        self._game = Game(self._name)
        self._reference: Game | None = None
        self._told: list[str] = []
        self._turns = Turns(task)

    def step(self, call: Call) -> Observation:
        observation = self._game.act(call)
        self._told.append(observation.text)
        return observation

    def options(self) -> list[Call]:
        """Returns the calls that the game accepts now."""
        return [Call("act", {"command": command}) for command in self._game.commands]

    def end_turn(self) -> None:
        """Grades the turn. ValueError when all turns have ended."""
        self._turns.end(self._grade)

    def _grade(self, turn: Turn) -> str:
        """Returns why the turn fails, "" where it passes."""
        if self._name.quest and turn.query == games.quest(self._name)[0]:
            return "" if self._game.won else "quest_not_won"
        if self._reference is None:
            self._reference = Game(self._name)
        gained, told = gains(self._reference, turn)
        if not gained <= self._game.facts:
            return "facts_missing"
        return "" if set(told) <= set(self._told) else "answer_missing"

    def score(self) -> Outcome:
        """Returns reward 1 where all turns ended and passed. ValueError for a bare scenario."""
        return self._turns.outcome()

    def fingerprint(self) -> str:
        return digest(sorted(self._game.facts))

    def close(self) -> None:
        self._game.close()
        if self._reference is not None:
            self._reference.close()


def gains(game: Game, turn: Turn) -> tuple[frozenset[str], list[str]]:
    """Plays a turn's reference calls.

    Returns the facts that hold after them and not before, and the answers of the calls that changed no fact.
    """
    before, told = game.facts, []
    for call in turn.calls:
        held, said = game.facts, game.act(call).text
        if game.facts == held:
            told.append(said)
    return game.facts - before, told


@functools.cache
def beginning(name: games.Name) -> str:
    """Digests the facts that hold when a game begins."""
    game = Game(name)
    game.close()
    return digest(sorted(game.facts))
