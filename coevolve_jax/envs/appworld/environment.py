"""One task of AppWorld as a world: code goes in, its output comes out, and the databases change."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from coevolve_jax.envs.appworld.calls import read
from coevolve_jax.envs.appworld.host import World
from coevolve_jax.envs.appworld.sandbox import SILENT
from coevolve_jax.envs.turns import Turns
from coevolve_jax.types import Call, Observation, Outcome, Task, Turn

WORDS = 4  # that may follow an answer, as in "There are 3 songs in your library."
COMPLETED = "supervisor.tasks"  # key of the task's status and answer in Engine.changes


class Environment:
    """One rollout's world. A benchmark turn, without reference calls, passes where all AppWorld's tests pass.

    A turn with reference calls passes on three conditions. The databases change as under these calls. The
    task is completed with the same answer, where they complete it. And the output of those that change
    nothing was printed to the agent too (`tells`): not by code that failed, and not as one of many guesses.
    """

    def reset(self, task: Task) -> None:
        """Opens the task's world. ValueError for an unknown task of AppWorld."""
        self._turns, self._task = Turns(task), task
        self._world = World(task.scenario["task"])
        self._reference: World | None = None
        self._said: list[str] = []
        self._instruct(0)

    def step(self, call: Call) -> Observation:
        try:
            code = read(call)
        except ValueError as error:
            return Observation(str(error), error=True)
        said, error, completed = self._world.ask("execute", code)
        if not error:
            self._said.append(said)
        return Observation(said, error, ends=completed)

    def options(self) -> list[Call]:
        """Returns calls of APIs with arguments from the answers so far."""
        return [Call("execute", {"code": code}) for code in self._world.ask("options")]

    def end_turn(self) -> None:
        """Grades the turn. ValueError when all turns have ended."""
        self._turns.end(self._grade)
        self._instruct(self._turns.ended)

    def _instruct(self, turn: int) -> None:
        """Gives the engine the instruction of a turn, where it differs from the benchmark's own.

        Agents can read it from the supervisor's app.
        """
        turns = self._task.turns[turn : turn + 1]
        if not self._task.turns or any(t.calls for t in turns):
            self._world.ask("instruct", turns[0].query if turns else "Look around.")

    def _grade(self, turn: Turn) -> str:
        """Returns why the turn fails, "" where it passes."""
        if not turn.calls:
            passed, tests = self._world.ask("evaluate")
            return "" if passed == tests else f"{passed}_of_{tests}_tests"
        if self._reference is None:
            self._reference = World(self._task.scenario["task"])
        told = perform(self._reference, turn)
        if not agree(self._world.ask("changes"), self._reference.ask("changes")):
            return "databases_differ"
        missing = [out for out in told if not any(tells(said, out, told) for said in self._said)]
        return "answer_missing" if missing else ""

    def score(self) -> Outcome:
        """Returns reward 1 where all turns ended and passed. ValueError for a bare scenario."""
        return self._turns.outcome()

    def fingerprint(self) -> str:
        return self._world.ask("fingerprint")

    def close(self) -> None:
        self._world.close()
        if self._reference is not None:
            self._reference.close()


def perform(world: World, turn: Turn) -> list[str]:
    """Runs a turn's reference calls. Returns the output of those that changed nothing."""
    told, before = [], world.ask("fingerprint")
    for call in turn.calls:
        said, error, _ = world.ask("execute", read(call))
        after = world.ask("fingerprint")
        if after == before and not error and said != SILENT:
            told.append(said.strip())
        before = after
    return told


def agree(changes: dict[str, Any], reference: dict[str, Any]) -> bool:
    """Says whether the databases changed alike. Completing the task counts if the reference does it."""
    if COMPLETED not in reference:
        changes = {table: rows for table, rows in changes.items() if table != COMPLETED}
    return changes == reference


def tells(said: str, output: str, told: Sequence[str]) -> bool:
    """Says whether a text tells an output, and not as a part of a longer word or number.

    After the last place of the output come other outputs of `told`, and beside these at most WORDS words
    without a digit, or no more characters than the output has. Text that lists all possible answers tells
    one of them.
    """
    *_, end = -1, *(m.end() for m in re.finditer(rf"(?<![\w.-]){re.escape(output)}(?!\w|[.-]\w)", said))
    if end < 0:
        return False
    after = said[end:].strip()
    for other in sorted(told, key=len, reverse=True):
        after = after.replace(other, " ")
    words = re.findall(r"\w+", after)
    plain = len(words) <= WORDS and not re.search(r"\d", after)
    return plain or len(after.strip()) <= len(output)
