"""D_t, the training set: it grows by validated tasks, never shrinks, and says which tasks come next."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence

import numpy as np

from coevolve_jax.envs.base import task_key
from coevolve_jax.types import Task


@dataclasses.dataclass(frozen=True)
class Record:
    """Training history of a task. born: GRPO step. trained: steps that scored it. Scores are mean rewards.

    settled: the latest visits in a row in which all rollouts failed, or all succeeded, alike.
    """

    born: int
    trained: int = 0
    first_score: float | None = None
    last_score: float | None = None
    settled: int = 0

    def scored(self, score: float) -> Record:
        first = score if self.first_score is None else self.first_score
        again = self.settled if score == self.last_score else 0
        settled = again + 1 if score in (0.0, 1.0) else 0
        return Record(self.born, self.trained + 1, first, score, settled)


class TaskPool:
    """The tasks in order of birth, and their records.

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
    def room(self) -> float:
        """How many more tasks `add` takes; infinite without a bound."""
        return float("inf") if self.max_size is None else max(self.max_size - len(self), 0)

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

    def sample(
        self,
        n: int,
        rng: np.random.Generator,
        *,
        new_share: float = 0.0,
        weight: Callable[[Record], float] = lambda record: 1.0,
        apart_from: Container[str] = (),
    ) -> list[Task]:
        """A batch: n different tasks, drawn independently of all earlier batches.

        A pool of fewer than n tasks gives every one floor(n / size) times and a sample of the rest; fewer than n
        come only where apart_from leaves no more.

        new_share: at least this fraction of the batch is tasks that evolution made, as far as there are so many.
        weight: of a task by its record; the chance to be drawn next is in proportion to it, and a task of weight 0
        comes only where no others are left. By default all are alike. apart_from: ids of tasks that are not drawn.

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
        ids = [i for i in self._tasks if i not in apart_from]
        rounds, rest = (0, min(n, len(ids))) if apart_from else divmod(n, len(ids))
        # The smallest of exponential times come first (Efraimidis and Spirakis, 2006): a draw without replacement.
        weights = np.array([weight(self._records[i]) for i in ids])
        noise = rng.exponential(size=len(ids))
        with np.errstate(divide="ignore"):
            order = [ids[i] for i in np.lexsort((noise, noise / weights))]
        reserved = [i for i in order if self._tasks[i].lineage.kind != "initial"][: round(new_share * rest)]
        others = [i for i in order if i not in set(reserved)]
        batch = ids * rounds + reserved + others[: rest - len(reserved)]
        return [self._tasks[batch[i]] for i in rng.permutation(len(batch))]

    def fork(self) -> TaskPool:
        """A copy, to draw from while this one grows."""
        fork = TaskPool(self.max_size, self._key)
        fork._tasks, fork._records, fork._keys = dict(self._tasks), dict(self._records), set(self._keys)
        return fork

    def record(self, scores: Mapping[str, float]) -> None:
        """Notes the mean rewards of one step (signals.task_scores) by task id. KeyError: unknown task."""
        for task_id, score in scores.items():
            self._records[task_id] = self._records[task_id].scored(score)

    def to_json(self) -> dict:
        """The whole state as JSON values; `from_json` continues exactly here."""
        return {
            "tasks": [t.to_json() for t in self],
            "records": {i: dataclasses.asdict(r) for i, r in self._records.items()},
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
        return pool

    def write(self, path: str | os.PathLike) -> None:
        """Writes D_t as JSON lines (a task with its lineage, and its "record"), replacing the file."""
        temporary = f"{os.fspath(path)}.tmp"
        with open(temporary, "w", encoding="utf-8") as f:
            f.writelines(self._line(t) for t in self)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)

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
