"""Runs the cells of a comparison in parallel. A killed cell resumes when it is run again."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ml_collections import ConfigDict

import coevolve_jax
from coevolve_jax import shipped
from coevolve_jax.comparison.cell_files import RAN, diverged, ended, finished, forget_divergence, ran
from coevolve_jax.comparison.plan import Cell, changes, start_config
from coevolve_jax.comparison.side_by_side import Failure, Work, run_side_by_side
from coevolve_jax.records import checkpoint
from coevolve_jax.records import workdir as workdirs
from coevolve_jax.records.files import write_bytes, write_text

MAIN = shipped.ROOT / "experiments" / "main.py"


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


def note_origin(workdir: Path) -> None:
    """Adds this commit, machine and date to the cell's RAN, unless it names them already."""
    before = ran(workdir)
    now = {"commit": commit(), "machine": machine(), "date": f"{datetime.date.today()}"}
    if now not in before:
        write_text(workdir / RAN, json.dumps([*before, now]) + "\n")


def run_all(
    folder: Path,
    config: ConfigDict,
    cells: Sequence[Cell],
    jobs: int,
    on_done: Callable[[Cell, Failure | None], object] = lambda cell, failure: None,
    retry: bool = False,
    others: Sequence[Cell] = (),
) -> list[Failure]:
    """Makes the start of each seed, then runs its cells: `jobs` processes at once, on equal shares of cores.

    others: cells that are not run now. Where one of a seed is finished, as one from a bundle is, a new
    start of that seed begins with its tasks (`_tasks_of`).

    on_done: called with each cell that ended and its failure, if any. It is called too for a cell whose start
    failed, which is not run.

    Returns the failures, one for a failed start. A diverged cell has a result and is no failure. A
    deterministic run would diverge again, so only `retry` runs such a cell again.

    If this process is asked to end (`preemption.handle_signals`), so are the runs under way. Raises Preempted
    when they have saved.
    """
    starts: dict[Path, list[Cell]] = {}
    for cell in cells:
        again = retry and diverged(cell.workdir(folder))
        if again or not ended(cell.workdir(folder)):
            starts.setdefault(cell.start(folder), []).append(cell)
    works, of = [], {}
    for start, own in starts.items():
        then = [_work(folder, config, cell) for cell in own]
        of |= {work.name: cell for work, cell in zip(then, own)}
        if not begun(start):
            like = [c.workdir(folder) for c in (*cells, *others) if c.start(folder) == start]
            like = [workdir for workdir in like if finished(workdir)][:1]
            then = [_beginning(folder, start, start_config(config, own[0]), then, *like)]
        works += then
    compiled = {
        "JAX_COMPILATION_CACHE_DIR": str((folder / "compiled").absolute()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    told = lambda work, failure: work.name in of and on_done(of[work.name], failure)
    return run_side_by_side(works, jobs, compiled, told)


def _work(folder: Path, config: ConfigDict, cell: Cell) -> Work:
    """Runs a cell to its end. One that diverges is done too. One that has diverged begins anew."""
    workdir = cell.workdir(folder)
    done = lambda status: (status == 0 and finished(workdir)) or bool(diverged(workdir))

    def prepared() -> None:
        prepare(folder, config, cell)
        forget_divergence(workdir)
        note_origin(workdir)

    return Work(_name(workdir, folder), command(workdir), _log(workdir), done, prepared)


def _beginning(
    folder: Path, start: Path, config: ConfigDict, then: Sequence[Work], like: Path | None = None
) -> Work:
    """Makes the start of a seed. like: a finished run that it begins like."""
    done = lambda status: status == 0 and begun(start)

    def prepared() -> None:
        workdirs.claim(start, config)
        if like:
            _tasks_of(like, start, config)

    return Work(_name(start, folder), command(start, "--until=0"), _log(start), done, prepared, then)


def _tasks_of(run: Path, start: Path, config: ConfigDict) -> None:
    """Lets a start begin with the held-out tasks and D_0 of a finished run, whatever its code would explore.

    So an arm can join others that ran with earlier code. Only where D_0 is explored and costs nothing, since
    the run's ledger does not tell what of its costs was D_0's.
    """
    given = config.data.own_tasks or config.data.initial_file or config.warm_start.steps
    if given or config.explorer.name != "scripted":
        return
    (start / workdirs.BEGINNING).mkdir(exist_ok=True)
    for name in workdirs.BEGUN:  # the last of them tells that all are there
        write_bytes(start / workdirs.BEGINNING / name, (run / name).read_bytes())


def _name(workdir: Path, folder: Path) -> str:
    return str(workdir.relative_to(folder))


def _log(workdir: Path) -> Path:
    return workdir.with_name(workdir.name + ".log")


def machine() -> str:
    """Names the processor, the cores that this process may use and the NVIDIA GPUs, for the record.

    Not the GPUs where JAX_PLATFORMS is cpu.
    """
    models = _values([Path("/proc/cpuinfo")], "model name")
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    gpus = _values(cards, "Model") if os.environ.get("JAX_PLATFORMS") != "cpu" else []
    count = len(os.sched_getaffinity(0))
    cores = f"{count} core{'s' if count > 1 else ''} of {models[0] if models else 'unknown processor'}"
    return ", ".join([cores, *gpus])


def _values(files: Sequence[Path], key: str) -> list[str]:
    """The values of the lines `key : value`."""
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith(key)]


def commit() -> str:
    """Names the commit of this code, with "-dirty" after it if files differ from it; else "unknown".

    An installed wheel has no commit: its version stands for it.
    """
    if shipped.IN_WHEEL:
        return f"version {coevolve_jax.__version__}"
    asked = ["git", "-C", str(MAIN.parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
