"""Runs processes in parallel, on equal shares of a machine. A killed one goes on when it is run again."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from coevolve_jax import preemption

PAUSE = 1.0  # seconds between two looks at a process elsewhere


class Work(NamedTuple):
    """A process to run to its end.

    name: for its failure.
    command: starts it, and goes on with it after a kill.
    log: the file that its output is appended to.
    done: exit status -> whether the work is done.
    prepare: called in a thread before the process starts. A ValueError is a failure.
    then: works that begin when this one is done.
    elsewhere: whether another process is at it, which was left behind or belongs to another program. It is
      waited for, and `done(0)` asked then.
    """

    name: str
    command: Sequence[str]
    log: Path
    done: Callable[[int], bool] = lambda status: status == 0
    prepare: Callable[[], object] = lambda: None
    then: Sequence[Work] = ()
    elsewhere: Callable[[], bool] | None = None


class Failure(NamedTuple):
    """A work that was not done. why: the last line of its log, or the error of its preparation."""

    name: str
    why: str
    log: Path


def run_side_by_side(
    works: Sequence[Work],
    jobs: int,
    defaults: Mapping[str, str] | None = None,
    on_done: Callable[[Work, Failure | None], object] = lambda work, failure: None,
) -> list[Failure]:
    """Runs works: `jobs` processes at once, on equal shares of cores and GPU memory. Returns the failures.

    defaults: environment variables, where this process has none of that name.
    on_done: called in this thread with each work that ended and its failure, if any. Works that should follow
      a failed one are not run; it is called for them with the same failure.

    A process that was killed, or asked to end by another, is started once more.

    If this process is asked to end (`preemption.handle_signals`) or interrupted (Ctrl-C), so are the
    processes under way, and no other begins. Raises Preempted or KeyboardInterrupt when they have saved.
    """
    failures: list[Failure] = []
    running, ended = set[subprocess.Popen](), threading.Event()
    environment = {**_gpu_memory(jobs), **(defaults or {}), **os.environ}
    with ThreadPoolExecutor(
        jobs, initializer=_take_cores, initargs=(_shares(jobs), threading.Lock())
    ) as threads:
        begin = lambda works: {
            threads.submit(_run, work, environment, running, ended): work for work in works
        }
        waiting: dict[Future[Failure | None], Work] = begin(works)
        try:
            while waiting:
                with preemption.interruptible():
                    future = next(as_completed(waiting))
                work, failure = waiting.pop(future), future.result()
                failures += [failure] if failure else []
                for each in [work, *(_after(work) if failure else [])]:
                    on_done(each, failure)
                waiting |= begin([] if failure else work.then)
        except (preemption.Preempted, KeyboardInterrupt):
            ended.set()
            threads.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                # Not SIGTERM: the runs may have had one already, and a second would end them unsaved.
                process.send_signal(signal.SIGUSR1)
            raise
    return failures


def _after(work: Work) -> Iterator[Work]:
    """All works that follow one, directly or not."""
    for later in work.then:
        yield later
        yield from _after(later)


def _shares(jobs: int) -> list[set[int]]:
    """The cores of each of `jobs` processes. With fewer cores than processes each gets all."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    each = len(cores) // jobs
    return [set(cores[i * each : (i + 1) * each] if each else cores) for i in range(jobs)]


def _gpu_memory(jobs: int) -> dict[str, str]:
    """JAX's share of a GPU's memory for each of several processes: it would reserve 75% for the first."""
    return {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / jobs:.3f}"} if jobs > 1 else {}


def _take_cores(shares: list[set[int]], lock: threading.Lock) -> None:
    """Pins this thread to its own cores, and so the processes that it starts."""
    with lock:
        mine = shares.pop()
    if mine:
        os.sched_setaffinity(0, mine)


def _run(
    work: Work,
    environment: Mapping[str, str],
    running: set[subprocess.Popen],
    ended: threading.Event,
) -> Failure | None:
    """Runs a work to its end, or waits for a process that does."""
    status, asked = -1, lambda: ended.is_set() or preemption.asked()
    while not asked():
        if work.elsewhere and work.elsewhere():
            while work.elsewhere() and not asked():
                time.sleep(PAUSE)
            if work.done(0):
                return None
        try:
            work.prepare()
        except ValueError as error:
            return Failure(work.name, str(error), work.log)
        status = _process(work, environment, running, asked)
        if work.done(status) or (work.elsewhere and work.done(0)):  # another one may have been faster
            return None
        if not (work.elsewhere and work.elsewhere()):
            break
    lines = work.log.read_text(errors="replace").splitlines() if work.log.exists() else []
    lines = [line for line in lines if line.strip()]
    why = lines[-1] if lines else "its log is empty"
    return Failure(work.name, f"exit status {status}: {why}", work.log)


def _process(
    work: Work,
    environment: Mapping[str, str],
    running: set[subprocess.Popen],
    asked: Callable[[], bool],
) -> int:
    """The exit status of a work's process. One that alone was killed or asked to end is tried once more."""
    status = -1
    for _ in range(2):
        with open(work.log, "ab") as output:
            process = subprocess.Popen(work.command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            running.add(process)
            if asked():
                process.send_signal(signal.SIGUSR1)
            status = process.wait()
            running.remove(process)
        if asked() or (status >= 0 and status != preemption.STATUS):
            break
    return status
