"""Measures how many tool calls in isolated worlds the worker processes answer per second.

    make bench, or GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python benchmarks/workers.py --workers=2

The calls are the references of BFCL's 200 base tasks, each task in a world of its own. There are three ways:
a user turn at a time (replays), a call at a time for all worlds at once (rollouts), and with a fingerprint of
the state after every call (exploration and shortening).
"""

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from coevolve_jax.envs.bfcl import benchmark
from coevolve_jax.envs.worker_pool import ProcessPool

_WORKERS = flags.DEFINE_integer(
    "workers", 2, "Processes, on each node where the backend is ray.", lower_bound=1
)
_BACKEND = flags.DEFINE_enum("backend", "local", ("local", "ray"), "As config.environment.backend.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "Timed rounds of each way.", lower_bound=1)


def processors(pids: Sequence[int]) -> float:
    """CPU seconds of these processes."""
    words = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(w[11]) + int(w[12]) for w in words) / os.sysconf("SC_CLK_TCK")


def by_turn(pool: ProcessPool, tasks) -> None:
    env_ids = pool.reset(tasks)
    for turn in range(max(len(task.turns) for task in tasks)):
        on = [i for i, task in enumerate(tasks) if turn < len(task.turns)]
        pool.step([env_ids[i] for i in on], [tasks[i].turns[turn].calls for i in on])
    pool.close(env_ids)


def by_call(pool: ProcessPool, tasks) -> None:
    env_ids = pool.reset(tasks)
    for n in range(max(len(task.calls) for task in tasks)):
        on = [i for i, task in enumerate(tasks) if n < len(task.calls)]
        pool.step([env_ids[i] for i in on], [[tasks[i].calls[n]] for i in on])
    pool.close(env_ids)


def with_fingerprints(pool: ProcessPool, tasks) -> None:
    pool.execute([(task, task.calls) for task in tasks])


def main(argv) -> None:
    tasks = benchmark.load()
    calls = sum(len(task.calls) for task in tasks)
    print(
        f"{len(tasks)} worlds, {calls} calls, {_WORKERS.value} workers, {_BACKEND.value}; medians of "
        f"{_REPEATS.value}"
    )
    with ProcessPool("bfcl", workers=_WORKERS.value, timeout=60.0, backend=_BACKEND.value) as pool:
        for way in (by_turn, by_call, with_fingerprints):
            way(pool, tasks)  # not timed
            pids = [os.getpid(), *(pool.pids if _BACKEND.value == "local" else [])]
            seconds, computed = [], processors(pids)
            for _ in range(_REPEATS.value):
                start = time.perf_counter()
                way(pool, tasks)
                seconds.append(time.perf_counter() - start)
            computed = (processors(pids) - computed) / _REPEATS.value
            print(
                f"{way.__name__:>18} {calls / statistics.median(seconds):8,.0f} calls/s, "
                f"{calls / computed:8,.0f} for "
                "each second that a processor computed; worlds made and freed included"
            )


if __name__ == "__main__":
    app.run(main)
