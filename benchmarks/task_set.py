"""Measures a step's cost with a large D_t: draws, signals, scores, appends, forks; and the cost of writing
it.

    python benchmarks/task_set.py --tasks=100000

Tasks, their histories and rollouts are made up; drawing and scoring are the real code. It prints CPU
milliseconds, which other work on the machine changes less than the clock's.
The median over --steps comes first, the slowest in brackets.
"""

import os
import tempfile
import time

import numpy as np
from absl import app, flags
from ml_collections import ConfigDict

from coevolve_jax.strategies.batches import collect_batch
from coevolve_jax.synthesis.signals import History, extract, task_scores
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.testing.strategy import made_up_rollout
from coevolve_jax.types import Call, Group, Lineage, Task, Turn

_TASKS = flags.DEFINE_integer("tasks", 100_000, "Size of D_t.", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 20, "Steps to time.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 16, "Tasks drawn, and tasks appended, in a step.", lower_bound=1)
_GROUP = flags.DEFINE_integer("group", 8, "Rollouts per task.", lower_bound=1)
_VISITS = flags.DEFINE_integer("visits", 3, "Times that each task was trained on before.", lower_bound=0)
_SCENARIO = flags.DEFINE_integer("scenario", 500, "Characters of a scenario; BFCL's have about as many.")


def task(number: int) -> Task:
    """A task of two calls; evolution made every second one."""
    calls = (Call("cd", {"folder": f"folder {number}"}), Call("ls", {"a": True}))
    turns = (Turn(f"Go to folder {number} and show me what is in it.", calls),)
    lineage = Lineage("signal" if number % 2 else "initial", "boundary", "t0", "boundary/9/t0")
    return Task(f"t{number}", "made_up", {"text": "x" * _SCENARIO.value}, turns, lineage=lineage)


def settings(sampling: str, retire_after: int) -> ConfigDict:
    """The settings that `collect_batch` reads; a quarter of a batch comes from evolution."""
    data = dict(min_evolved_share=0.25, sampling=sampling, sampling_floor=0.1, retire_after=retire_after)
    rollout = dict(tasks_per_step=_BATCH.value, group_size=_GROUP.value)
    learner, reward = dict(dynamic_sampling=0), dict(terms=())
    return ConfigDict(dict(seed=0, data=data, rollout=rollout, learner=learner, reward=reward))


WAYS = {
    "draw, uniformly": ("uniform", 0),
    "draw, by variance": ("variance", 0),
    "draw, by variance, without settled tasks": ("variance", 2),
}


class Times:
    """CPU seconds of each piece, call by call."""

    def __init__(self):
        self.of: dict[str, list[float]] = {}

    def __call__(self, name: str, act):
        start = time.process_time()
        result = act()
        self.of.setdefault(name, []).append(time.process_time() - start)
        return result


def main(_) -> None:
    count, batch, rng, times = _TASKS.value, _BATCH.value, np.random.default_rng(0), Times()
    pool = TaskPool()
    pool.add([task(i) for i in range(count)])
    past = rng.integers(_GROUP.value + 1, size=(_VISITS.value, count)) / _GROUP.value
    for scores in past.tolist():
        pool.record({f"t{i}": score for i, score in enumerate(scores)})
    remembered = {f"t{i}": tuple(scores) for i, scores in enumerate(past.T.tolist())}
    history = History(remembered, {f"tool_{i}": 1000 for i in range(60)})
    ways = {name: settings(*way) for name, way in WAYS.items()}

    def roll(tasks, k, **_) -> list[Group]:
        return [Group(t, ()) for t in tasks]  # its time is not D_t's

    for step in range(_STEPS.value):
        drawn = [times(name, lambda: collect_batch(c, step, pool, roll)) for name, c in ways.items()]
        groups = [
            Group(g.task, tuple(made_up_rollout(rng, g.task, m, step) for m in range(_GROUP.value)))
            for g in drawn[0]
        ]
        _, history = times("signals", lambda: extract(history, groups, step, window=10, theta=1))
        times("note the scores", lambda: pool.record(task_scores(groups)))
        new = [task(count + step * batch + i) for i in range(batch)]
        times("append, one after the other", lambda: [pool.add([t]) for t in new[: batch // 2]])
        times("fork", pool.fork)
        times("append, the first time after a fork", lambda: [pool.add([t]) for t in new[batch // 2 :]])

    print(
        f"{len(pool)} tasks; steps of {batch} tasks drawn, {batch} appended, {_GROUP.value} rollouts a task"
    )
    for name, seconds in times.of.items():
        print(f"{name:<44}{1e3 * np.median(seconds):9.2f} ms  ({1e3 * max(seconds):.2f})")
    with tempfile.TemporaryDirectory() as folder:
        path, start = os.path.join(folder, "tasks.jsonl"), time.perf_counter()
        times("write", lambda: pool.write(path))
        print(
            f"write tasks.jsonl: {os.path.getsize(path) / 1e6:.0f} MB, {times.of['write'][0]:.1f} s of the "
            f"processor's, {time.perf_counter() - start:.1f} s by the clock"
        )


if __name__ == "__main__":
    app.run(main)
