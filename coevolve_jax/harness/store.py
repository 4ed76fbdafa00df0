"""The runs of campaigns, each an ordinary workdir, found by what determines it.

    STORE/starts/DIGEST/seed_0/    D_0, the held-out tasks and the policy before RL: versions fork it
    STORE/DIGEST/seed_0/           the run of one config and seed

DIGEST names the config, the code with the modules that the config names, and the cores of a run. So a run
that another campaign has made is not made again. It is charged to both.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.comparison.cell_files import finished
from coevolve_jax.config import keys
from coevolve_jax.harness import campaign, modules
from coevolve_jax.records.files import write_text
from coevolve_jax.types import Task, Trajectory

MACHINE = ("workers", "call_timeout", "worker_memory", "python")  # of config.environment: they make no tasks


class Job(NamedTuple):
    """A run to make or resume.

    start: the workdir that it forks; None: it is a start itself. until: GRPO steps after which it stops;
    None: it is done to its end.
    """

    workdir: Path
    config: ConfigDict
    start: Path | None = None
    until: int | None = None


class Question(NamedTuple):
    """An evaluation of a policy on the held-out tasks of a workdir, within the limits of its evaluations.

    flags: further ones of experiments/evaluate.py. output: the JSON file that it writes.
    """

    workdir: Path
    model: Path
    flags: tuple[str, ...]
    output: Path


class Comparison(NamedTuple):
    """The gradients of a run's config and of another one, at the end of the run.

    folder: its config.json is the other config, and checks.json is written into it.
    """

    workdir: Path
    folder: Path


class Programs(NamedTuple):
    """Runs for a store. The first three tell, of each thing that was not done, why.

    launch: makes or resumes runs, so many side by side. evaluate: answers questions about policies. compare:
    writes the checks of gradient.py. audit: says why each of some rollouts is no success, "" where it is one.
    """

    launch: Callable[[Sequence[Job], int], Mapping[Path, str]]
    evaluate: Callable[[Sequence[Question], int], Mapping[Path, str]]
    compare: Callable[[Comparison], str]
    audit: Callable[[Sequence[tuple[Task, Trajectory]]], list[str]]


class Store:
    """Runs of one campaign.

    Args:
      folder: may be shared by campaigns.
      config: of v000, with any seed.
      jobs: runs side by side, which share the cores.
      cores: of each run, as they name it; 0: those that it would have here. A campaign keeps those that it
        was begun with, so that another machine finds its runs.

    Attributes:
      folder: as given.
      asks: whether evaluations and gradients that are not on disk are made. A replay sets it to False.
    """

    def __init__(self, folder: Path, config: ConfigDict, programs: Programs, jobs: int, cores: int = 0):
        self.folder, self._programs, self._jobs = folder, programs, jobs
        self.audit = programs.audit
        self._start = configs.override(config, {"strategy.name": "static", "rollout.salt": 0})
        self._code, self._cores = campaign.code()[:8], cores or cores_of_a_run(jobs)
        self.asks = True

    def start(self, seed: int) -> Path:
        """Workdir of a seed's start."""
        return self.folder / "starts" / self._name(self._start) / f"seed_{seed}"

    def workdir(self, config: ConfigDict, seed: int) -> Path:
        """Workdir of the run of a config and seed. config.seed has no effect."""
        return self.folder / self._name(config) / f"seed_{seed}"

    def _name(self, config: ConfigDict) -> str:
        code = self._code
        if own := modules.named(config):
            code = hashlib.sha256(f"{code}\n{modules.code(own)}".encode()).hexdigest()[:8]
        return f"{config_id(config)}-{code}-{self._cores}"

    def begin(self, seeds: Sequence[int]) -> dict[int, str]:
        """Makes the starts that are missing. Returns why, for each seed whose start failed."""
        jobs = {s: Job(self.start(s), configs.override(self._start, {"seed": s})) for s in seeds}
        return self._make(jobs, begun)

    def train(self, config: ConfigDict, seeds: Sequence[int], until: int | None = None) -> dict[int, str]:
        """Makes or resumes the runs that are missing. Returns why, for each seed whose run failed.

        until: GRPO steps after which they stop; None: they are done to their ends.
        """
        failed = self.train_all([(config, s) for s in seeds], until)
        return {seeds[i]: why for i, why in failed.items()}

    def train_all(self, runs: Sequence[tuple[ConfigDict, int]], until: int | None = None) -> dict[int, str]:
        """`train` for runs of several configs, each with its seed. Returns why, for each that failed."""
        jobs = {
            i: Job(self.workdir(config, s), configs.override(config, {"seed": s}), self.start(s), until)
            for i, (config, s) in enumerate(runs)
        }
        return self._make(jobs, finished)

    def held_out(self, seed: int, split: str) -> Path:
        """Workdir of a start whose held-out tasks are of this split, made with this evaluation seed."""
        config = self.held_out_config(seed, split)
        workdir = self.folder / "held_out" / self._name(config)
        if not begun(workdir) and (failed := self._programs.launch([Job(workdir, config)], 1)):
            raise ValueError(f"The {split} tasks cannot be made: {failed[workdir]}")
        check_config(workdir)
        return workdir

    def held_out_config(self, seed: int, split: str) -> ConfigDict:
        """The config of `held_out`."""
        return configs.override(
            self._start, {"environment.eval_split": split, "evaluation.seed": seed, "seed": 0}
        )

    def openings(self, seed: int, split: str) -> Path:
        """Folder for notes on who has opened such held-out tasks, whatever the code.

        Its name tells the environment, the seed, and whether the tasks are the environment's own. Tasks that
        differ by their number or their limits alone are the same test: they overlap.
        """
        config = self.held_out_config(seed, split)
        where = {key: value for key, value in config.environment.to_dict().items() if key not in MACHINE}
        told = json.dumps([where, config.data.own_tasks, seed], sort_keys=True, default=str)
        return self.folder / "openings" / hashlib.sha256(told.encode()).hexdigest()[:16]

    def answers(self, questions: Sequence[Question]) -> list[dict[str, list[int]]]:
        """task id -> [successes, trials], for each question; what is on disk is not asked again.

        Raises ValueError where an evaluation fails, and in a replay for what is not on disk; Tampered as
        `check_config`.
        """
        missing = [q for q in questions if not q.output.exists()]
        if missing:
            self._check_asks(missing[0].output)
        for q in missing:
            check_config(q.workdir)
            q.output.parent.mkdir(parents=True, exist_ok=True)
        if missing and (failed := self._programs.evaluate(missing, self._jobs)):
            raise ValueError(f"An evaluation failed: {next(iter(failed.values()))}")
        return [answer(q.output) for q in questions]

    def gradients(self, workdir: Path, config: ConfigDict, folder: Path) -> dict[str, list]:
        """Compares a run's gradient with that under another config; what is on disk is not compared again.

        Returns name -> (value, bound, whether it holds), of gradient.py. Raises ValueError where it fails,
        and in a replay for what is not on disk; Tampered as `check_config`.
        """
        output = folder / "checks.json"
        if not output.exists():
            self._check_asks(output)
            check_config(workdir)
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / "config.json", configs.to_json(config))
            if why := self._programs.compare(Comparison(workdir, folder)):
                raise ValueError(f"The gradients cannot be compared: {why}")
        return json.loads(output.read_text())

    def _check_asks(self, output: Path) -> None:
        if not self.asks:
            raise ValueError(f"{output} is gone, and a replay asks for nothing: restore it.")

    def _make(self, jobs: Mapping[int, Job], done: Callable[[Path], bool]) -> dict[int, str]:
        for job in jobs.values():
            if (job.workdir / "config.json").exists():
                check_config(job.workdir)
        due = [job for job in jobs.values() if not done(job.workdir)]
        failed = self._programs.launch(due, self._jobs) if due else {}
        return {s: failed[job.workdir] for s, job in jobs.items() if job.workdir in failed}


def cores_of_a_run(jobs: int) -> int:
    """The cores that each of `jobs` runs gets on this machine."""
    return len(os.sched_getaffinity(0)) // jobs or 1


def cores_of_starts(folder: Path, jobs: int) -> int:
    """The cores of the runs that a store's starts name, the fewest of several; those here where it has none.

    Those that each of `jobs` runs gets on this machine come first, where a start has them.
    """
    here = cores_of_a_run(jobs)
    told = {path.name.rpartition("-")[2] for path in (folder / "starts").glob("*-*-*")}
    begun = {int(cores) for cores in told if cores.isdecimal()}
    return here if here in begun else min(begun, default=here)


def other_cores(begun: int, jobs: int) -> str:
    """A sentence where runs were begun with other cores than each of `jobs` gets on this machine; else ""."""
    here = cores_of_a_run(jobs)
    if begun == here:
        return ""
    return f"It was begun with {begun} cores a run. Runs made here have {here}, so other last digits."


def answer(output: Path) -> dict[str, list[int]]:
    """task id -> [successes, trials], from a file of experiments/evaluate.py."""
    return json.loads(output.read_text())["environment"]["by_task"]


def config_id(config: ConfigDict) -> str:
    """16 hex digits that name a config but for its seed; the folder of its runs begins with them."""
    return configs.digest(config, seeded=False)


def twin(config: ConfigDict, others: Mapping[str, ConfigDict]) -> str:
    """The first of the versions that has this very config but for its seed; "" if none has.

    Such a version would get the same finished runs, which are no evidence of their own.
    """
    name = config_id(config)
    return next((version for version, other in others.items() if config_id(other) == name), "")


def is_run(workdir: Path, config: ConfigDict, seed: int) -> bool:
    """Whether a folder is named as the run of a config and seed, whatever the code."""
    return workdir.parent.name.startswith(f"{config_id(config)}-") and workdir.name == f"seed_{seed}"


def altered(workdir: Path) -> str:
    """A sentence where the config.json of a store's folder is not the config that its name tells; else "".

    A run resumes by that file, and evaluations take environment and limits from it. workdir: may be a link.
    """
    folder = workdir.resolve()
    seeded = folder.name.startswith("seed_")  # held-out tasks lie one level higher, with the seed 0
    named = (folder.parent if seeded else folder).name.partition("-")[0]
    try:
        own = configs.of_run(folder)
        same = config_id(own) == named and str(own.seed) == (folder.name[5:] if seeded else "0")
    except campaign.UNREADABLE as error:
        return f"{folder}/config.json cannot be read ({campaign.reason(error)}): restore it."
    return "" if same else f"{folder}/config.json is not the config that the folder is named by: restore it."


def check_config(workdir: Path) -> None:
    """Raises Tampered where a config.json of the store is `altered`."""
    if why := altered(workdir):
        raise campaign.Tampered(why)


def log(workdir: Path) -> Path:
    """The file that the processes of a run append to."""
    return workdir.with_name(workdir.name + ".log")


def begun(workdir: Path) -> bool:
    """Whether a start exists: its held-out tasks and a whole checkpoint of step 0.

    It says what comparison/cells.begun does, without JAX: config files import this module.
    """
    return (workdir / "checkpoints" / "step_00000000" / "manifest.json").exists()


def config_changes(ours: ConfigDict, theirs: ConfigDict) -> dict[str, Any]:
    """The values of `theirs` that differ from `ours`, by dotted key, for `configs.override`."""
    a, b = ours.to_dict(), theirs.to_dict()
    value = lambda d, key: (
        d.get(key) if "." not in key else d.get(key.split(".")[0], {}).get(key.split(".")[1])
    )
    named = [f"{part}.name" for part in ("strategy", "explorer")]
    found = {k: value(b, k) for k in keys.names(b) if k in named or value(a, k) != value(b, k)}
    return {k: v for k, v in found.items() if k not in named or value(a, k) != v}
