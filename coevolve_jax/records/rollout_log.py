"""The rollouts of an evaluation in a file as they end, so that an interrupted evaluation goes on from there.

The first line says what the scores depend on. Each further line is one valid rollout, without its tokens.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coevolve_jax.config.recorded import difference
from coevolve_jax.records.files import write_bytes
from coevolve_jax.types import Group, Task, Trajectory


class RolloutLog:
    """A file of rollouts of one evaluation.

    Attributes:
      slow_retries: messages that had been sampled again, for taking too long, when its last rollout ended.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]):
        """Reads the file, or makes it. It drops a last line that a kill cut off.

        about: all that the scores depend on, as JSON values.

        Raises ValueError if the file is of another evaluation, or is damaged.
        """
        about, self._path = json.loads(json.dumps(about)), path
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        try:
            rows = [json.loads(line) for line in whole.splitlines()]
            begun_as = rows.pop(0) if rows else about
            self._kept = {(row["task_id"], row["rollout_index"]): _trajectory(row) for row in rows}
            self.slow_retries: int = rows[-1]["slow_retries"] if rows else 0
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({error!r}): delete it to begin anew.") from None
        if begun_as != about:
            raise ValueError(
                f"{path} holds rollouts of another evaluation: {difference(begun_as, about, 'its')}. Finish "
                "that one by its own command, choose another output, or delete the file."
            )
        write_bytes(path, whole or _line(about))

    def groups(self, tasks: Sequence[Task], num_rollouts: int) -> dict[str, Group]:
        """Task id -> its group, for the tasks that have all their `num_rollouts` rollouts here."""
        found = defaultdict[str, list[Trajectory]](list)
        for (task_id, rollout_index), trajectory in sorted(self._kept.items()):
            if rollout_index < num_rollouts:
                found[task_id].append(trajectory)
        return {t.id: Group(t, tuple(found[t.id])) for t in tasks if len(found[t.id]) == num_rollouts}

    def add(self, trajectory: Trajectory, slow_retries: int) -> None:
        """Appends a rollout, unless it is invalid: then it is to be done again.

        slow_retries: those of the evaluation so far, its earlier processes included.
        """
        if trajectory.outcome.valid:
            with open(self._path, "ab") as file:
                more = {"turn_starts": trajectory.turn_starts, "slow_retries": slow_retries}
                file.write(_line(trajectory.to_json() | more))

    def remove(self) -> None:
        """Deletes the file: the evaluation has ended."""
        self._path.unlink()


def _trajectory(row: Mapping) -> Trajectory:
    return dataclasses.replace(Trajectory.from_json(row), turn_starts=tuple(row["turn_starts"]))


def _line(row: Mapping) -> bytes:
    # Python's own JSON, infinity included: what a policy wrote comes back as it was.
    return (json.dumps(row, default=lambda value: value.tolist()) + "\n").encode()
