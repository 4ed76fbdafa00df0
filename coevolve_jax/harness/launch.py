"""Makes the runs of a store, and what is read from them: processes of experiments/, some side by side."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.comparison import cells
from coevolve_jax.comparison.cell_files import finished
from coevolve_jax.comparison.side_by_side import Work, run_side_by_side
from coevolve_jax.envs import family
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.harness.audit import replay
from coevolve_jax.harness.store import Comparison, Job, Programs, Question, begun, config_changes, log
from coevolve_jax.records import checkpoint
from coevolve_jax.records import workdir as workdirs
from coevolve_jax.types import Task, Trajectory


def programs(config: ConfigDict, compiled: Path) -> Programs:
    """Returns what makes real runs.

    config: of the start. compiled: folder of compiled programs, which all processes share.
    """
    defaults = {
        "JAX_COMPILATION_CACHE_DIR": str(compiled.absolute()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def run(works: Sequence[Work], side_by_side: int) -> Mapping[Path, str]:
        failures = run_side_by_side(works, side_by_side, defaults)
        return {Path(failure.name): f"{failure.why} (log: {failure.log})" for failure in failures}

    def compare(asked: Comparison) -> str:
        return next(iter(run([_comparison(asked)], 1).values()), "")

    return Programs(
        lambda jobs, side_by_side: run([_work(job) for job in jobs], side_by_side),
        lambda questions, side_by_side: run([_evaluation(q) for q in questions], side_by_side),
        compare,
        auditor(config),
    )


def auditor(config: ConfigDict) -> Callable[[Sequence[tuple[Task, Trajectory]]], list[str]]:
    """Returns the verifier of a config's environment: workers of the family, or of the one in its `AUDIT`."""
    c = config.environment
    audited = getattr(family.module(c.name), "AUDIT", c.name)

    def verify(rollouts: Sequence[tuple[Task, Trajectory]]) -> list[str]:
        if not rollouts:
            return []
        with ProcessPool(audited, c.workers, c.call_timeout, c.worker_memory, c.python) as pool:
            return replay(pool, rollouts)

    return verify


def _comparison(asked: Comparison) -> Work:
    program = cells.MAIN.with_name("compare_gradients.py")
    command = [sys.executable, str(program), f"--workdir={asked.workdir}", f"--folder={asked.folder}"]
    return Work(str(asked.folder), command, asked.folder / "comparison.log")


def _evaluation(q: Question) -> Work:
    half = q.output.with_suffix(".half")  # a kill leaves no half of an answer
    command = [
        sys.executable, str(cells.MAIN.with_name("evaluate.py")), "--benchmark=held_out",
        f"--workdir={q.workdir}", f"--model={q.model}", f"--output={half}", *q.flags,
    ]  # fmt: skip

    def done(status: int) -> bool:
        if status == 0:
            half.replace(q.output)
        return status == 0

    return Work(
        str(q.output),
        command,
        q.output.with_suffix(".log"),
        done,
        prepare=lambda: half.unlink(missing_ok=True),
    )


def _work(job: Job) -> Work:
    output = log(job.workdir)
    output.parent.mkdir(parents=True, exist_ok=True)
    until = 0 if job.start is None else job.until
    return Work(
        str(job.workdir),
        cells.command(job.workdir, *([] if until is None else [f"--until={until}"])),
        output,
        done=lambda status: status == 0 and _there(job),
        prepare=lambda: _prepare(job),
        elsewhere=lambda: workdirs.busy(job.workdir),
    )


def _there(job: Job) -> bool:
    """Whether a run has come as far as its job asks."""
    if job.start is None:
        return begun(job.workdir)
    there = checkpoint.steps(workdirs.checkpoints(job.config, job.workdir)) if job.until else ()
    return finished(job.workdir) or any(step >= job.until for step in there if job.until)


def _prepare(job: Job) -> None:
    """Claims a start's folder, or forks a run from its start, unless it exists."""
    if job.start is None:
        workdirs.claim(job.workdir, job.config)
    elif not job.workdir.exists():
        changes = config_changes(configs.of_run(job.start), job.config)
        try:
            workdirs.fork(job.start, 0, job.workdir, changes)
        except OSError:
            if not job.workdir.exists():  # else another campaign was faster
                raise
