"""The rollouts of an evaluation in a file as they end, so that an interrupted evaluation goes on from there.

The first line says what the scores depend on. A further line is a rollout, or tells that the evaluation went
on, and with how many of its tasks.

Going on keeps the tasks up to the first that lacks a rollout. To keep all that had ended would favour short
rollouts, where an engine draws anew those that were under way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from coevolve_jax.config.recorded import difference
from coevolve_jax.records.files import lock
from coevolve_jax.records.rollouts import encode
from coevolve_jax.types import Group, Task, Trajectory


class RolloutLog:
    """The file of one evaluation, for one process at a time.

    Attributes:
      groups: those of the first tasks, which need not be rolled out again. Their trajectories have no tokens.
      interruptions: how often the evaluation went on.
      slow_retries: messages that took too long and were sampled again, up to the last rollout of `groups`.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], tasks: Sequence[Task], num_rollouts: int):
        """Reads the file, or makes it. A last line that a kill cut off is dropped.

        about: all that the scores depend on, as JSON values.

        Raises ValueError if the file is of another evaluation, is damaged, or belongs to another process.
        """
        if len({task.id for task in tasks}) < len(tasks):
            raise ValueError(f"{path} tells tasks apart by their ids: leave out those that repeat one.")
        self._path, self._file = path, open(path, "a+b")
        try:
            self._claim()
            about = json.loads(json.dumps(about))
            begun_as, rows = self._lines()
            if begun_as not in (None, about):
                raise ValueError(
                    f"{path} holds rollouts of another evaluation: {difference(begun_as, about, 'its')}. "
                    "Finish that one by its own command, choose another output, or delete the file."
                )
            self.groups, self.slow_retries = self._ended(rows, tasks, num_rollouts)
            self.interruptions = 0 if begun_as is None else 1 + sum("kept" in row for row in rows)
            self._append(about if begun_as is None else {"kept": len(self.groups)})
        except BaseException:
            self._file.close()
            raise

    def add(self, trajectory: Trajectory, slow_retries: int) -> None:
        """Appends a rollout. Raises ValueError if that is not possible.

        slow_retries: those of the evaluation so far, its earlier processes included.
        """
        more = {"turn_starts": trajectory.turn_starts, "slow_retries": slow_retries}
        self._append(trajectory.to_json() | more)

    def close(self) -> None:
        """Leaves the file to the next process."""
        self._file.close()

    def remove(self) -> None:
        """Deletes the file: the evaluation has ended."""
        self._path.unlink()
        self.close()

    def _claim(self) -> None:
        refusal = f"Another process writes {self._path}: wait for its end, or choose another output."
        if lock(self._file, refusal) and not self._there():  # its owner removed it meanwhile
            raise ValueError(refusal)

    def _there(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        return False

    def _lines(self) -> tuple[dict | None, list[dict]]:
        """The first line, None in a new file, and the others."""
        self._file.seek(0)
        content = self._file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._file.truncate(len(whole))
        try:
            rows = [json.loads(line) for line in whole.split(b"\n")[:-1]]
            if not all(isinstance(row, dict) for row in rows):
                raise ValueError("a line is no object")
        except ValueError as error:
            raise self._damaged(error) from None
        return (rows[0] if rows else None), rows[1:]

    def _ended(
        self, rows: Iterable[Mapping], tasks: Sequence[Task], num_rollouts: int
    ) -> tuple[list[Group], int]:
        """The groups of the tasks before the first that lacks a rollout, and the retries up to them."""
        kept = dict[tuple[str, int], Mapping]()
        whole = lambda task: all((task.id, n) in kept for n in range(num_rollouts))
        try:
            for row in rows:
                if "kept" not in row:
                    kept[row["task_id"], row["rollout_index"]] = row
                else:  # what had ended beyond these tasks was rolled out again
                    first = {task.id for task in tasks[: row["kept"]]}
                    kept = {key: value for key, value in kept.items() if key[0] in first}
            ended = [
                (task, [kept[task.id, n] for n in range(num_rollouts)]) for task in takewhile(whole, tasks)
            ]
            groups = [Group(task, tuple(map(_trajectory, own))) for task, own in ended]
            retries = [row["slow_retries"] for _, own in ended for row in own]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise self._damaged(error) from None
        return groups, max(retries, default=0)

    def _damaged(self, error: Exception) -> ValueError:
        return ValueError(f"{self._path} is damaged ({error!r}): delete it to begin anew.")

    def _append(self, row: Mapping) -> None:
        try:
            self._file.write(encode(row))
            self._file.flush()
        except OSError as error:
            raise ValueError(
                f"{self._path} cannot be written ({error.strerror}): make room. The same command then goes "
                "on from the finished rollouts."
            ) from None


def _trajectory(row: Mapping) -> Trajectory:
    return dataclasses.replace(Trajectory.from_json(row), turn_starts=tuple(row["turn_starts"]))
