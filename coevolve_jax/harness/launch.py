"""Makes the runs of a store: each a process of experiments/main.py, some side by side."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.comparison import cells
from coevolve_jax.comparison.side_by_side import Failure, Work, run_side_by_side
from coevolve_jax.envs import family
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.harness.audit import replay
from coevolve_jax.harness.store import (
    Evaluate,
    Job,
    Launch,
    Question,
    Verify,
    begun,
    difference,
    finished,
)
from coevolve_jax.records import workdir as workdirs
from coevolve_jax.types import Task, Trajectory


def launcher(
    compiled: Path, on_done: Callable[[str, Failure | None], object] = lambda name, why: None
) -> Launch:
    """Returns the launch of real runs.

    compiled: folder of compiled programs, which all runs share. on_done: called with each run that ended.
    """
    defaults = _environment(compiled)

    def launch(jobs: Sequence[Job], side_by_side: int) -> Mapping[Path, str]:
        works = {str(job.workdir): _work(job) for job in jobs}
        failures = run_side_by_side(
            list(works.values()), side_by_side, defaults, lambda work, failure: on_done(work.name, failure)
        )
        return {Path(failure.name): f"{failure.why} (log: {failure.log})" for failure in failures}

    return launch


def evaluator(compiled: Path) -> Evaluate:
    """Returns what evaluates policies: processes of experiments/evaluate.py."""

    def evaluate(questions: Sequence[Question], side_by_side: int) -> Mapping[Path, str]:
        works = [_evaluation(q) for q in questions]
        failures = run_side_by_side(works, side_by_side, _environment(compiled))
        return {Path(failure.name): f"{failure.why} (log: {failure.log})" for failure in failures}

    return evaluate


def auditor(config: ConfigDict) -> Verify:
    """Returns the verifier of a config's environment: workers of the family, or of the one in its `AUDIT`."""
    c = config.environment
    audited = getattr(family.module(c.name), "AUDIT", c.name)

    def verify(rollouts: Sequence[tuple[Task, Trajectory]]) -> list[str]:
        if not rollouts:
            return []
        with ProcessPool(audited, c.workers, c.call_timeout, c.worker_memory, c.python) as pool:
            return replay(pool, rollouts)

    return verify


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


def _environment(compiled: Path) -> dict[str, str]:
    return {
        "JAX_COMPILATION_CACHE_DIR": str(compiled.absolute()),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def _work(job: Job) -> Work:
    log = job.workdir.with_name(job.workdir.name + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    there = begun if job.start is None else finished
    flags = ["--until=0"] if job.start is None else []
    return Work(
        str(job.workdir),
        cells.command(job.workdir, *flags),
        log,
        done=lambda status: status == 0 and there(job.workdir),
        prepare=lambda: _prepare(job),
    )


def _prepare(job: Job) -> None:
    """Claims a start's folder, or forks a run from its start, unless it exists."""
    if job.start is None:
        workdirs.claim(job.workdir, job.config)
    elif not job.workdir.exists():
        changes = difference(configs.of_run(job.start), job.config)
        workdirs.fork(job.start, 0, job.workdir, changes)
