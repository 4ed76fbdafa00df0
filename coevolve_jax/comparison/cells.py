"""Runs cells side by side, each in a process of its own that goes on where it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from coevolve_jax import preemption
from coevolve_jax.comparison.plan import (
    Cell,
    changes,
    diverged,
    ended,
    finished,
    forget_divergence,
    start_config,
)
from coevolve_jax.records import checkpoint
from coevolve_jax.records import workdir as workdirs

MAIN = Path(__file__).parents[2] / "experiments" / "main.py"


class Failure(NamedTuple):
    """A run that ended without a summary. why: the last line of its log."""

    name: str
    why: str
    log: Path


def command(workdir: Path, *flags: str) -> list[str]:
    """What goes on with the run in `workdir`."""
    return [sys.executable, str(MAIN), f"--workdir={workdir}", *flags]


def begun(start: Path) -> bool:
    """Whether the beginning of a seed is there: a checkpoint of step 0."""
    return 0 in checkpoint.steps(start / "checkpoints")


def prepare(folder: Path, config: ConfigDict, cell: Cell) -> None:
    """Forks a cell from its beginning, unless it is there. ValueError where the arm does not fit the config."""
    if not cell.workdir(folder).exists():
        workdirs.fork(cell.start(folder), 0, cell.workdir(folder), changes(config, cell))


def run_all(
    folder: Path,
    config: ConfigDict,
    cells: Sequence[Cell],
    jobs: int,
    on_done: Callable[[Cell, Failure | None], object] = lambda cell, failure: None,
    retry: bool = False,
) -> list[Failure]:
    """Begins each seed, then runs its cells; `jobs` processes at once, which share the processor's cores evenly.

    Returns what failed; a cell whose beginning failed is not run and is among them. A cell that diverges has a result and
    is not among them; a run that is deterministic diverges again, so it is only run again with `retry`. Where this process is asked to end
    (`preemption.handle_signals`), so are the runs under way, and Preempted is raised when they have saved.
    """
    starts: dict[Path, list[Cell]] = {}
    for cell in cells:
        if retry and diverged(cell.workdir(folder)):
            forget_divergence(cell.workdir(folder))
        if not ended(cell.workdir(folder)):
            starts.setdefault(cell.start(folder), []).append(cell)
    failures: list[Failure] = []
    running: set[subprocess.Popen] = set()
    with ThreadPoolExecutor(
        jobs, initializer=_take_cores, initargs=(_shares(jobs), threading.Lock())
    ) as threads:

        def attempt(workdir: Path, make: Callable[[], object], *flags: str) -> Failure | None:
            try:
                make()
            except ValueError as error:
                return _failure(workdir, folder, str(error))
            return _run(workdir, folder, running, *flags)

        def begin(start: Path, config: ConfigDict) -> Failure | None:
            return (
                None if begun(start) else attempt(start, lambda: workdirs.claim(start, config), "--until=0")
            )

        def go_on(cell: Cell) -> Failure | None:
            return attempt(cell.workdir(folder), lambda: prepare(folder, config, cell))

        waiting: dict[Future, Path | Cell] = {
            threads.submit(begin, start, start_config(config, own[0])): start for start, own in starts.items()
        }
        try:
            while waiting:
                with preemption.interruptible():
                    future = next(as_completed(waiting))
                what, failure = waiting.pop(future), future.result()
                failures += [failure] if failure else []
                if isinstance(what, Cell):
                    on_done(what, failure)
                elif failure:
                    for cell in starts[what]:
                        on_done(cell, failure)
                else:
                    waiting |= {threads.submit(go_on, cell): cell for cell in starts[what]}
        except preemption.Preempted:
            threads.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                # SIGTERM may have been sent to all of them: a second would end a run at once.
                process.send_signal(signal.SIGUSR1)
            raise
    return failures


def _shares(jobs: int) -> list[set[int]]:
    """The cores of each of `jobs` processes: all where there are fewer cores than processes."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    each = len(cores) // jobs
    return [set(cores[i * each : (i + 1) * each] if each else cores) for i in range(jobs)]


def _take_cores(shares: list[set[int]], lock: threading.Lock) -> None:
    """Keeps this thread, and so the processes that it starts, on cores of their own."""
    with lock:
        mine = shares.pop()
    if mine:
        os.sched_setaffinity(0, mine)


def _run(workdir: Path, folder: Path, running: set[subprocess.Popen], *flags: str) -> Failure | None:
    """Runs a workdir to its end; once more where its process, and not this one, was killed or asked to end."""
    log = _log(workdir)
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str((folder / "compiled").absolute()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        **os.environ,  # which may name a folder that further programs share
    }
    status = -1
    for _ in range(2):
        with open(log, "ab") as output:
            process = subprocess.Popen(
                command(workdir, *flags), stdout=output, stderr=subprocess.STDOUT, env=environment
            )
            running.add(process)
            if preemption.asked():
                process.send_signal(signal.SIGUSR1)
            status = process.wait()
            running.remove(process)
        if preemption.asked() or (status >= 0 and status != preemption.STATUS):
            break
    if status == 0 and (begun(workdir) if flags else finished(workdir)):
        return None
    if not flags and diverged(workdir):
        return None
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    why = lines[-1] if lines else "its log is empty"
    return _failure(workdir, folder, f"exit status {status}: {why}")


def _log(workdir: Path) -> Path:
    return workdir.with_name(workdir.name + ".log")


def _failure(workdir: Path, folder: Path, why: str) -> Failure:
    return Failure(str(workdir.relative_to(folder)), why, _log(workdir))


def machine() -> str:
    """The processor and its cores that may be used, for the record."""
    model = "unknown processor"
    if Path("/proc/cpuinfo").exists():
        lines = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    return f"{len(os.sched_getaffinity(0))} cores of {model}"
