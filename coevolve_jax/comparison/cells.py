"""Runs cells in parallel, each in its own process. A killed cell resumes when it is run again."""

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
    """Returns the command that starts or resumes the run in `workdir`."""
    return [sys.executable, str(MAIN), f"--workdir={workdir}", *flags]


def begun(start: Path) -> bool:
    """Whether the start of a seed exists: a checkpoint of step 0."""
    return 0 in checkpoint.steps(start / "checkpoints")


def prepare(folder: Path, config: ConfigDict, cell: Cell) -> None:
    """Forks a cell from its start, unless it exists. Raises ValueError if the arm does not fit the config."""
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
    """Makes the start of each seed, then runs its cells: `jobs` processes at once, on equal shares of cores.

    on_done: called with each cell that ended and its failure, if any. It is called too for a cell whose start
    failed, which is not run.

    Returns the failures, one for a failed start. A diverged cell has a result and is no failure. A
    deterministic run would diverge again, so only `retry` runs such a cell again.

    If this process is asked to end (`preemption.handle_signals`), so are the runs under way. Raises Preempted
    when they have saved.
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
                # Not SIGTERM: the runs may have had one already, and a second would end them unsaved.
                process.send_signal(signal.SIGUSR1)
            raise
    return failures


def _shares(jobs: int) -> list[set[int]]:
    """The cores of each of `jobs` processes. With fewer cores than processes each gets all."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    each = len(cores) // jobs
    return [set(cores[i * each : (i + 1) * each] if each else cores) for i in range(jobs)]


def _take_cores(shares: list[set[int]], lock: threading.Lock) -> None:
    """Pins this thread to its own cores, and so the processes that it starts."""
    with lock:
        mine = shares.pop()
    if mine:
        os.sched_setaffinity(0, mine)


def _run(workdir: Path, folder: Path, running: set[subprocess.Popen], *flags: str) -> Failure | None:
    """Runs a workdir to its end. Tries once more if its process alone was killed or asked to end.

    Returns None for a run that finished or diverged.
    """
    log = _log(workdir)
    environment = {
        "JAX_COMPILATION_CACHE_DIR": str((folder / "compiled").absolute()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        **os.environ,  # comes last: it may name a folder that other programs share
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
    """Names the processor and counts the cores that this process may use, for the record."""
    model = "unknown processor"
    if Path("/proc/cpuinfo").exists():
        lines = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    return f"{len(os.sched_getaffinity(0))} cores of {model}"


def commit() -> str:
    """Names the commit of this code, with "-dirty" after it if files differ from it; else "unknown"."""
    asked = ["git", "-C", str(MAIN.parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
