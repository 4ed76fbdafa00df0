"""D_t, the training set: it grows by validated tasks, never shrinks, and draws the batches."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from coevolve_jax.envs.base import task_key
from coevolve_jax.types import GIVEN, Task, mixed


@dataclasses.dataclass(frozen=True)
class Record:
    """Training history of a task.

    Attributes:
      born: GRPO step of birth.
      trained: number of steps that scored the task.
      first_score, last_score: mean rewards; None before the first visit.
      saturated_visits: latest consecutive visits with the same score, 0 or 1. Rewards lie in [0, 1],
        so their mean is 0 or 1 only if all rollouts got that reward: all failed, or all succeeded.
    """

    born: int
    trained: int = 0
    first_score: float | None = None
    last_score: float | None = None
    saturated_visits: int = 0

    def scored(self, score: float) -> Record:
        first = score if self.first_score is None else self.first_score
        again = self.saturated_visits if score == self.last_score else 0
        saturated_visits = 0 if mixed(score, 1) else again + 1
        return Record(self.born, self.trained + 1, first, score, saturated_visits)


# A record as a row: whether evolution made the task, then the fields of Record. A score of None is NaN.
ROW = np.dtype(
    [
        ("evolved", bool),
        ("born", int),
        ("trained", int),
        ("first_score", float),
        ("last_score", float),
        ("saturated_visits", int),
    ],
    align=True,
)


class TaskPool:
    """The tasks in order of birth, and their records.

    Args:
      max_size: bound on growth; None for no bound. It is configuration, so the saved state leaves it out. A
        bound below the current size only stops growth.
      key: tasks of equal keys are the same task (the environment family's task_key).
    """

    def __init__(self, max_size: int | None = None, key: Callable[[Task], str] = task_key):
        if max_size is not None and max_size < 1:
            raise ValueError(f"max_size of the task pool is {max_size}; use 1 or more, or None for no bound.")
        self.max_size, self._key = max_size, key
        # Copy-on-write: forks share these three append-only containers. Only the first _size tasks belong to
        # this pool; those beyond belong to a fork.
        self._tasks: list[Task] = []
        self._places: dict[str, int] = {}  # task id -> position in _tasks
        self._keys: dict[str, int] = {}  # task key -> position in _tasks
        self._size = 0
        self._rows = np.zeros(0, ROW)  # one per task, then unused rows for growth

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Task]:
        return itertools.islice(self._tasks, self._size)

    def __getitem__(self, task_id: str) -> Task:
        return self._tasks[self._place(task_id)]

    @property
    def records(self) -> Mapping[str, Record]:
        """Training history by task id: a live view."""
        return _Records(self)

    @property
    def rows(self) -> np.ndarray:
        """The records as an array [N] of ROW in order of birth; do not modify it."""
        return self._rows[: len(self)]

    @property
    def remaining_capacity(self) -> float:
        """How many more tasks `add` takes; infinity without a bound."""
        return float("inf") if self.max_size is None else max(self.max_size - len(self), 0)

    def add(self, tasks: Sequence[Task]) -> list[str | None]:
        """Appends tasks. Returns one verdict per task: None if added, else why not.

            duplicate   the pool has a task of the same key: by default, one with the same scenario and
                        reference calls per turn, whatever its wording
            pool_full   max_size is reached

        Raises:
          ValueError: a task without turns, which cannot be scored, or an id that another task has. Nothing is
            added.
        """
        self._check_ids(tasks)
        verdicts: list[str | None] = []
        for task in tasks:
            key = self._key(task)
            if self._keys.get(key, self._size) < self._size:
                verdicts.append("duplicate")
            elif self.max_size is not None and len(self) >= self.max_size:
                verdicts.append("pool_full")
            else:
                self._append(task, key, Record(born=task.lineage.step))
                verdicts.append(None)
        return verdicts

    def draw(
        self,
        n: int,
        rng: np.random.Generator,
        *,
        min_evolved_share: float = 0.0,
        weights: Callable[[np.ndarray], np.ndarray] | None = None,
        apart_from: Collection[str] = (),
    ) -> list[Task]:
        """Draws a batch of n different tasks, independently of all earlier batches.

        A pool of fewer than n tasks gives every task floor(n / size) times and draws the rest at random.

        Args:
          n: size of the batch. With apart_from the batch may be smaller: each task comes at most once.
          min_evolved_share: least fraction of the batch that evolution made, as far as there are enough such
            tasks.
          weights: `rows` [N] -> weights [N]. The chance to be drawn next is in proportion to the weight. A
            task of weight 0 comes only if no others are left. None: all weights are equal.
          apart_from: ids of tasks that are not drawn.

        Raises:
          ValueError: empty pool, n < 1, min_evolved_share outside [0, 1], or a weight that is none.
        """
        if not self._size:
            raise ValueError("The task pool is empty; add validated tasks before drawing a batch.")
        if n < 1 or not 0 <= min_evolved_share <= 1:
            raise ValueError(
                f"Cannot draw a batch of {n} tasks with min_evolved_share {min_evolved_share}; "
                "the size must be at least 1 and the share between 0 and 1."
            )
        free = np.ones(len(self), bool)
        free[[self._place(i) for i in apart_from if self._has(i)]] = False
        places = np.flatnonzero(free)
        # With apart_from the batch replaces groups of the same step, so no task may come twice.
        rounds, rest = (0, min(n, len(places))) if apart_from else divmod(n, len(places))
        # Weighted draw without replacement (Efraimidis and Spirakis, 2006): the smallest exponential times
        # win.
        noise = rng.exponential(size=len(places))
        with np.errstate(divide="ignore"):
            times = noise / self._weights(weights)[places] if weights else noise
        # A weight of 0 gives an infinite time. No place is reserved for such a task.
        drawn = np.isfinite(times)
        evolved = np.flatnonzero(self.rows["evolved"][places] & drawn)
        least = math.ceil(round(min_evolved_share * rest, 9))  # rounded, as 0.1 * 30 is a little above 3
        reserved = evolved[_first(least, times[evolved], noise[evolved])]
        others = _first(rest, times, noise)
        others = others[~np.isin(others, reserved)][: rest - len(reserved)]
        # Shuffle the batch: otherwise evolved tasks would always come first.
        batch = np.concatenate([np.tile(places, rounds), places[reserved], places[others]])
        return [self._tasks[i] for i in batch[rng.permutation(len(batch))]]

    def _weights(self, weights: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Returns the weight of each task, [N]. Raises ValueError unless all are finite and 0 or more."""
        found = np.asarray(weights(self.rows), float)
        if found.shape != (len(self),):
            raise ValueError(f"{len(self)} tasks have weights of shape {found.shape}: give each one.")
        wrong = np.flatnonzero(~((found >= 0) & (found < np.inf)))
        if len(wrong):
            name, weight = self._tasks[wrong[0]].id, found[wrong[0]]
            raise ValueError(f"The weight of task {name} is {weight}: it must be finite, and 0 or more.")
        return found

    def fresh(self) -> TaskPool:
        """Returns an empty pool without a bound, for tasks of the same environment."""
        return TaskPool(key=self._key)

    def fork(self, records: Mapping[str, Mapping] | None = None) -> TaskPool:
        """Returns a copy to draw from while this pool grows.

        Only the records are copied now. The second of the two pools to add tasks copies the task list then.

        records: replaces records, by task id, in the form of `to_json`.
        """
        fork = copy.copy(self)
        fork._rows = self.rows.copy()
        for task_id, record in (records or {}).items():
            fork._set(fork._place(task_id), Record(**record))
        return fork

    def record(self, scores: Mapping[str, float]) -> None:
        """Records a step's mean rewards by task id (signals.task_scores). Raises KeyError for unknown ids."""
        records = self.records
        for task_id, score in scores.items():
            self._set(self._place(task_id), records[task_id].scored(score))

    def to_json(self) -> dict:
        """The whole state as JSON values, from which `from_json` continues exactly here."""
        return {
            "tasks": [t.to_json() for t in self],
            "records": {i: dict(vars(r)) for i, r in self.records.items()},
        }

    @classmethod
    def from_json(
        cls, data: Mapping, max_size: int | None = None, key: Callable[[Task], str] = task_key
    ) -> TaskPool:
        pool = cls(max_size, key)
        for task in map(Task.from_json, data["tasks"]):
            pool._append(task, key(task), Record(**data["records"][task.id]))
        return pool

    def write(self, path: str | os.PathLike) -> None:
        """Writes D_t as JSON lines, a task with its lineage and its "record" per line. Replaces the file."""
        # Renamed at the end: until then a reader gets the whole old file.
        temporary = f"{os.fspath(path)}.tmp"
        with open(temporary, "w", encoding="utf-8") as f:
            f.writelines(self._line(t) for t in self)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)

    @classmethod
    def read(
        cls, path: str | os.PathLike, max_size: int | None = None, key: Callable[[Task], str] = task_key
    ) -> TaskPool:
        """Reads a file of `write`, records included.

        With the same max_size and key the pool behaves exactly as the one that was written.

        Raises:
          OSError: the file cannot be read.
          ValueError: a line is no task, no UTF-8 even, or repeats an id. A task without a record begins with
            an empty one.
        """
        pool = cls(max_size, key)
        with open(path, "rb") as f:
            for number, line in enumerate(f, 1):
                try:
                    data = json.loads(line.decode())
                    task, record = Task.from_json(data), Record(**data.get("record", {"born": 0}))
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(
                        f"Line {number} of {os.fspath(path)} is no task ({type(error).__name__}: {error}): "
                        "give it id, environment, scenario and turns, as a run's tasks.jsonl has them."
                    ) from None
                if pool._has(task.id):
                    raise ValueError(
                        f"Line {number} of {os.fspath(path)} has the id {task.id} of an earlier line."
                    )
                pool._append(task, key(task), record)
        return pool

    def _line(self, task: Task) -> str:
        return json.dumps({**task.to_json(), "record": vars(self.records[task.id])}) + "\n"

    def _has(self, task_id: str) -> bool:
        return self._places.get(task_id, self._size) < self._size

    def _place(self, task_id: str) -> int:
        if not self._has(task_id):
            raise KeyError(task_id)
        return self._places[task_id]

    def _append(self, task: Task, key: str, record: Record) -> None:
        size = self._size
        # A fork has added tasks to the shared containers: from here on this pool has its own.
        if size < len(self._tasks):
            self._tasks = self._tasks[:size]
            self._places = {i: place for i, place in self._places.items() if place < size}
            self._keys = {k: place for k, place in self._keys.items() if place < size}
        if size == len(self._rows):
            # Double the capacity, so that appends take amortised constant time.
            self._rows = np.resize(self._rows, 2 * size + 16)
        self._tasks.append(task)
        self._places[task.id] = self._keys[key] = size
        self._set(size, record)
        self._size += 1

    def _set(self, place: int, record: Record) -> None:
        evolved = self._tasks[place].lineage.kind not in GIVEN
        self._rows[place] = (evolved, *vars(record).values())

    def _check_ids(self, tasks: Sequence[Task]) -> None:
        new = set()
        for task in tasks:
            if not task.turns:
                raise ValueError(
                    f"Task {task.id} is a bare scenario (no user turns, no reference calls), "
                    "so it cannot be scored; give it turns before adding it to the pool."
                )
            known = self._has(task.id)
            if task.id in new or (known and self._key(task) != self._key(self[task.id])):
                raise ValueError(f"Two different tasks have the id {task.id}; give every task its own.")
            if not known:
                new.add(task.id)


class _Records(Mapping[str, Record]):
    """TaskPool.records: a view of the pool's rows."""

    def __init__(self, pool: TaskPool):
        self._pool = pool

    def __len__(self) -> int:
        return len(self._pool)

    def __iter__(self) -> Iterator[str]:
        return (task.id for task in self._pool)

    def __getitem__(self, task_id: str) -> Record:
        _, born, trained, first, last, saturated_visits = self._pool._rows[self._pool._place(task_id)].item()
        first, last = (None if math.isnan(score) else score for score in (first, last))
        return Record(born, trained, first, last, saturated_visits)


def _first(count: int, times: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Positions of the `count` smallest of times [N], in order. Ties go by noise [N], then by position.

    Equal to np.lexsort((noise, times))[:count], but sorts only the candidates.
    """
    near = np.arange(len(times))
    if count < len(times):
        bound = np.partition(times, count)[count]
        near = np.flatnonzero(~(times > bound))  # includes ties with the bound, and NaN
    return near[np.lexsort((noise[near], times[near]))[:count]]
