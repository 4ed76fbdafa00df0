"""D_t, the training set: it grows by validated tasks, never shrinks, and says which tasks come next."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from coevolve_jax.envs.base import task_key
from coevolve_jax.types import Task


@dataclasses.dataclass(frozen=True)
class Record:
    """Training history of a task. born: GRPO step. trained: steps that scored it. Scores are mean rewards."""

    born: int
    trained: int = 0
    first_score: float | None = None
    last_score: float | None = None

    def scored(self, score: float) -> Record:
        first = score if self.first_score is None else self.first_score
        return dataclasses.replace(self, trained=self.trained + 1, first_score=first, last_score=score)


class TaskPool:
    """The tasks in order of birth, their records, and where the sampler stands.

    max_size: bound on growth, None for none. It is configuration and thus not
    part of the saved state; lowering it below the present size only stops growth.
    key: tasks of equal keys are the same task (the environment family's task_key).
    """

    def __init__(self, max_size: int | None = None, key: Callable[[Task], str] = task_key):
        if max_size is not None and max_size < 1:
            raise ValueError(f"max_size of the task pool is {max_size}; use 1 or more, or None for no bound.")
        self.max_size, self._key = max_size, key
        self._tasks: dict[str, Task] = {}
        self._records: dict[str, Record] = {}
        self._keys: set[str] = set()
        # Ids drawn in the present epoch over all tasks, and over those of the latest evolution.
        self._drawn: set[str] = set()
        self._drawn_new: set[str] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks.values())

    def __getitem__(self, task_id: str) -> Task:
        return self._tasks[task_id]

    @property
    def records(self) -> Mapping[str, Record]:
        """Training history by task id."""
        return self._records

    @property
    def newest(self) -> tuple[Task, ...]:
        """The tasks born at the latest evolution (of D_0: all)."""
        latest = max((r.born for r in self._records.values()), default=0)
        return tuple(t for t in self if self._records[t.id].born == latest)

    def add(self, tasks: Sequence[Task]) -> list[str | None]:
        """Appends tasks; returns one verdict per task: None if added, else why not.

        "duplicate": a task of the same key is there already: by default one with the same scenario and
        the same reference calls per turn, whatever its wording. "pool_full": max_size is reached.

        Raises:
          ValueError: a task without turns (it cannot be scored), or an id that another task has. Nothing is added then.
        """
        self._check_ids(tasks)
        verdicts: list[str | None] = []
        for task in tasks:
            key = self._key(task)
            if key in self._keys:
                verdicts.append("duplicate")
            elif self.max_size is not None and len(self) >= self.max_size:
                verdicts.append("pool_full")
            else:
                self._keys.add(key)
                self._tasks[task.id] = task
                self._records[task.id] = Record(born=task.lineage.step)
                verdicts.append(None)
        return verdicts

    def sample(self, n: int, rng: np.random.Generator, *, new_share: float = 0.0) -> list[Task]:
        """The next batch: n tasks, shuffled, without replacement within an epoch.

        new_share: at least this fraction of the batch comes from the tasks of
        the latest evolution, in epochs of their own; 0 is uniform over all
        tasks. A task is visited again only when all the others have been, and
        stands in a batch once, unless the pool holds fewer than n tasks: then
        every task comes floor(n / size) times and the rest is sampled.

        Raises:
          ValueError: empty pool, n < 1, or new_share outside [0, 1].
        """
        if not self._tasks:
            raise ValueError("The task pool is empty; add validated tasks before sampling a batch.")
        if n < 1 or not 0 <= new_share <= 1:
            raise ValueError(
                f"Cannot sample a batch of {n} tasks with new_share {new_share}; "
                "the size must be at least 1 and the share between 0 and 1."
            )
        rounds, rest = divmod(n, len(self))
        batch = list(self._tasks) * rounds
        newest = [t.id for t in self.newest]
        reserved = min(round(new_share * rest), len(newest))
        self._drawn_new.intersection_update(newest)
        picked = _draw(newest, self._drawn_new, reserved, rng, ())
        self._drawn.update(picked)
        others = _draw(list(self._tasks), self._drawn, rest - reserved, rng, picked)
        self._drawn_new.update(set(others) & set(newest))
        batch += picked + others
        return [self._tasks[batch[i]] for i in rng.permutation(n)]

    def fork(self) -> TaskPool:
        """A copy to draw from; the draws count here once `commit` is given it."""
        fork = TaskPool(self.max_size, self._key)
        fork._tasks, fork._records, fork._keys = dict(self._tasks), dict(self._records), set(self._keys)
        fork._drawn, fork._drawn_new = set(self._drawn), set(self._drawn_new)
        return fork

    def commit(self, fork: TaskPool) -> None:
        """Takes over what was drawn from a fork; tasks and records stay as they are here."""
        self._drawn, self._drawn_new = set(fork._drawn), set(fork._drawn_new)

    def record(self, scores: Mapping[str, float]) -> None:
        """Notes the mean rewards of one step (signals.task_scores) by task id. KeyError: unknown task."""
        for task_id, score in scores.items():
            self._records[task_id] = self._records[task_id].scored(score)

    def to_json(self) -> dict:
        """The whole state as JSON values; `from_json` continues exactly here."""
        return {
            "tasks": [t.to_json() for t in self],
            "records": {i: dataclasses.asdict(r) for i, r in self._records.items()},
            "drawn": sorted(self._drawn),
            "drawn_new": sorted(self._drawn_new),
        }

    @classmethod
    def from_json(
        cls, data: Mapping, max_size: int | None = None, key: Callable[[Task], str] = task_key
    ) -> TaskPool:
        pool = cls(max_size, key)
        tasks = [Task.from_json(t) for t in data["tasks"]]
        pool._tasks = {t.id: t for t in tasks}
        pool._records = {i: Record(**r) for i, r in data["records"].items()}
        pool._keys = {key(t) for t in tasks}
        pool._drawn, pool._drawn_new = set(data["drawn"]), set(data["drawn_new"])
        return pool

    def write(self, path: str | os.PathLike) -> None:
        """Writes D_t as JSON lines (a task with its lineage, and its "record"), replacing the file."""
        temporary = f"{os.fspath(path)}.tmp"
        with open(temporary, "w", encoding="utf-8") as f:
            f.writelines(self._line(t) for t in self)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)

    def append(self, path: str | os.PathLike, tasks: Iterable[Task]) -> None:
        """Appends the lines of newly added tasks to a file made by `write`.

        After a resume call `write` first: the file may hold tasks that are
        younger than the checkpoint.
        """
        with open(path, "a", encoding="utf-8") as f:
            f.writelines(self._line(t) for t in tasks)

    def _line(self, task: Task) -> str:
        return json.dumps({**task.to_json(), "record": dataclasses.asdict(self._records[task.id])}) + "\n"

    def _check_ids(self, tasks: Sequence[Task]) -> None:
        ids = set(self._tasks)
        for task in tasks:
            if not task.turns:
                raise ValueError(
                    f"Task {task.id} is a bare scenario (no user turns, no reference calls), so it cannot be scored; "
                    "give it turns before adding it to the pool."
                )
            if task.id in ids and (task.id not in self._tasks or self._key(task) != self._key(self[task.id])):
                raise ValueError(f"Two different tasks have the id {task.id}; give every task its own.")
            ids.add(task.id)


def _draw(
    ids: Sequence[str], drawn: set[str], n: int, rng: np.random.Generator, taken: Iterable[str]
) -> list[str]:
    """n distinct ids outside `taken`, those not yet `drawn` first; a new epoch starts when they run out.

    Updates `drawn`.
    """
    taken = set(taken)
    picked: list[str] = []
    while len(picked) < n:
        fresh = [i for i in ids if i not in drawn and i not in taken]
        if not fresh:
            drawn.difference_update(ids)
            taken.update(picked)
            continue
        chosen = rng.permutation(len(fresh))[: n - len(picked)]
        picked += [fresh[i] for i in chosen]
        drawn.update(fresh[i] for i in chosen)
    return picked
