"""Keeps count of a task's user turns, for worlds that grade turn by turn."""

from __future__ import annotations

from collections.abc import Callable

from coevolve_jax.types import Outcome, Task, Turn


class Turns:
    """The user turns of one task. ended: how many have ended. Turns after a failed one are not graded."""

    def __init__(self, task: Task):
        self._task = task
        self._failure = ""
        self._passed = self.ended = 0

    def end(self, grade: Callable[[Turn], str]) -> None:
        """Ends a turn. grade: returns why a turn fails, or "". ValueError when all turns have ended."""
        if self.ended == len(self._task.turns):
            raise ValueError(f"Task {self._task.id!r} has only {self.ended} turns: all have ended.")
        if not self._failure:
            self._failure = grade(self._task.turns[self.ended])
            self._passed += not self._failure
        self.ended += 1

    def outcome(self) -> Outcome:
        """Returns reward 1 where all turns ended and passed.

        ValueError for a bare scenario, which has no reference.
        """
        turns = len(self._task.turns)
        if not turns:
            raise ValueError(f"Task {self._task.id!r} has no turns: a bare scenario cannot be scored.")
        success = self._passed == turns
        reason = self._failure or ("passed" if success else "turns not finished")
        return Outcome(float(success), success, progress=self._passed / turns, reason=reason)
