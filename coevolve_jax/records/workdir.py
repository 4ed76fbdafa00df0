"""The folder of a run: claimed by one process at a time, and forked."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.records import checkpoint, logs, rollouts
from coevolve_jax.records.files import lock, write_lines, write_text

LOCK = "lock"
# A fork that changes one of these may ask another model.
ANSWERING = {f"explorer.{key}" for key in ("name", "model", "base_url")}
MODEL = "explorer.json"
# What a fork takes over was made by these keys, `model`, and all of config.environment but MECHANICAL.
MADE_BY = {
    "data": ("initial_file", "initial_tasks", "own_tasks"),  # D_0
    "evaluation": ("tasks", "balanced_tasks", "balanced_candidates", "queries", "seed"),  # held-out tasks
}
MECHANICAL = {
    "python", "backend", "workers", "call_timeout", "worker_memory", "server_timeout", "server_memory",
    "server_disk",
}  # fmt: skip
FORKED = "forked.json"  # of a fork: the run, step, config and strategy that it goes on from
WARM_START = "warm_start"  # the folder of the run's supervised warm start (loop/warm_start.py)
MADE = "made.json"  # in it: which tasks were refused, and what its explorer cost
BEGINNING = "beginning"  # a folder: with these files of another run, this one begins with that one's tasks
BEGUN = ("held_out.jsonl", "tasks.jsonl", "ledger.json")
# What a kill may leave before there is a run.
LEFT = (LOCK, "config.json.tmp", f"{MODEL}.tmp")
# Files that may exist before D_0.
STARTED = ("config.json", MODEL, "tensorboard", "wandb", "trackio", "weights", "sglang_*.log")


def checkpoints(config: ConfigDict, workdir: Path) -> epath.Path:
    """The folder of a run's checkpoints."""
    return epath.Path(config.checkpoint.folder or workdir / "checkpoints")


def claim(workdir: Path, config: ConfigDict) -> None:
    """Makes the workdir, or recognises it as this config's. Raises the errors of `claimed`."""
    with claimed(workdir, config):
        pass


@contextmanager
def claimed(workdir: Path, config: ConfigDict) -> Iterator[None]:
    """Does `claim`, and keeps other processes out while the block runs. The lock ends with the process.

    If a start failed before it made D_0 (a mistyped value), the next start may take the workdir. A serving
    setting that has changed is written down, so that a start by config.json alone keeps it.

    Raises ValueError if the workdir belongs to another run or another process is running in it. Also if the
    workdir or config.checkpoint.folder cannot be made, or if that folder lacks the run's checkpoints.
    """
    try:
        _begun(workdir, config)  # raises before anything is made
        workdir.mkdir(parents=True, exist_ok=True)
        file = open(workdir / LOCK, "a")
    except OSError as error:
        raise ValueError(
            f"{workdir} cannot be a workdir ({error.strerror}: {error.filename}): choose another --workdir."
        ) from None
    with file:
        there = f"Another process goes on with the run in {workdir}"
        if not lock(file, f"{there}: wait for its end, or choose another --workdir."):
            print(
                f"{workdir} lies on a file system without locks: start no second process that writes there.",
                file=sys.stderr,
            )
        begun = _begun(workdir, config)
        if begun:
            _check_moved(workdir, config)
        if (folder := config.checkpoint.folder) and "://" not in folder:  # fail now, not at the first save
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(
                    f"config.checkpoint.folder is {folder!r}, which cannot be made ({error.strerror}): "
                    "choose another."
                ) from None
        if not begun:
            (workdir / MODEL).unlink(missing_ok=True)  # from a start that failed
        if not begun or configs.read(workdir) != configs.plain(config):
            write_text(workdir / "config.json", configs.to_json(config))
        yield


def busy(workdir: Path) -> bool:
    """Whether a process keeps the workdir (`claimed`)."""
    if not (workdir / LOCK).exists():
        return False
    with open(workdir / LOCK, "a") as file:
        try:
            lock(file, "")
        except ValueError:
            return True
    return False


def recorded_model(workdir: Path) -> dict | None:
    """Reads the recorded server and model of the explorer (Roles.served).

    None if it is not recorded yet, or if the explorer asks no model.
    """
    path = workdir / MODEL
    try:
        return json.loads(path.read_text()) if path.exists() else None
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read ({error}): restore it, or choose another --workdir."
        ) from None


def record_model(workdir: Path, served: Mapping | None) -> None:
    """Records the explorer's server and model. served: Roles.served; None if the explorer asks no model."""
    if served is not None:
        write_text(workdir / MODEL, json.dumps(served, indent=1))


def _begun(workdir: Path, config: ConfigDict) -> bool:
    """Whether the workdir already belongs to this config. Raises ValueError if it belongs to another."""
    inside = workdir.iterdir() if workdir.exists() else ()
    there = [path for path in inside if path.name not in LEFT]
    if not (workdir / "config.json").exists():
        if there:
            raise ValueError(
                f"{workdir} is not empty and holds no run of ours (no config.json): choose another --workdir."
            )
        return False
    theirs, ours = configs.numbers(configs.read(workdir)), configs.numbers_of(config)
    if theirs == ours:
        return True
    if {"environment", "rollout", "learner"} <= theirs.keys() and all(
        any(map(p.match, STARTED)) for p in there
    ):
        return False
    raise ValueError(
        f"{workdir} holds a run of another config ({configs.difference(theirs, ours)}): "
        "choose another --workdir, or delete this one to start again."
    )


def _check_moved(workdir: Path, config: ConfigDict) -> None:
    """Raises ValueError if config.checkpoint.folder has changed to one without the run's checkpoints."""
    before, now = checkpoints(configs.of_run(workdir), workdir), checkpoints(config, workdir)
    if now != before and not checkpoint.steps(now) and checkpoint.steps(before):
        raise ValueError(
            f"config.checkpoint.folder is {config.checkpoint.folder!r} and holds no checkpoint of this run, "
            f"whose checkpoints are in {before}: name that folder, or move them first."
        )


def _made_by(config: ConfigDict) -> dict[str, Any]:
    """The values, by dotted key, that made what a fork takes over: tasks, worlds and the policy before RL."""
    plain = configs.plain(config)
    keys = {**MADE_BY, "environment": plain["environment"].keys() - MECHANICAL}
    found = {f"{section}.{key}": plain[section][key] for section in keys for key in sorted(keys[section])}
    return {**found, "model": plain["model"]}


def fork(
    run: str | os.PathLike, step: int, workdir: str | os.PathLike, overrides: Mapping[str, Any] | None = None
) -> ConfigDict:
    """Makes a new run that continues from another run's checkpoint. `train(fork(...), workdir)` runs it.

    Args:
      run: workdir of the other run, which is only read.
      step: the checkpoint's step, in GRPO steps done.
      workdir: folder of the new run; it must be empty or not exist.
      overrides: config values that differ, by dotted key, e.g. {"strategy.name": "random"}. Another strategy
        starts with an empty state of its own; D_t, policy and optimiser are those of the checkpoint.

    Returns:
      the new run's config.

    Raises:
      ValueError: the run, step or key does not exist, or workdir is not empty. Also where a key is of the
        warm start, or made the tasks, their worlds or the policy before RL, which a fork takes over, and
        where the run has lost lines of a log that the checkpoint counts.
    """
    run, workdir = Path(run), Path(workdir).absolute()
    if workdir.exists() and any(workdir.iterdir()):
        raise ValueError(
            f"{workdir} is not empty: name a folder for the fork that is, or that does not exist."
        )
    if not (run / "config.json").is_file():
        raise ValueError(f"{run} holds no run (no config.json): name the workdir of a run.")
    config = theirs = configs.of_run(run)
    folder = checkpoints(theirs, run)
    if step not in (there := checkpoint.steps(folder)):
        steps = ", ".join(map(str, there)) or "none"
        raise ValueError(
            f"{run} has no checkpoint of step {step} (it has {steps}): name one of these, or keep more with "
            "config.checkpoint.keep."
        )
    if late := [key for key in overrides or () if key.startswith("warm_start.")]:
        raise ValueError(
            f"config.{late[0]} cannot differ in a fork, which begins after the warm start of {run}: begin a "
            "new run to change it."
        )
    config = configs.override(config, {"checkpoint.folder": "", **(overrides or {})})
    before = _made_by(theirs)
    if changed := [key for key, value in _made_by(config).items() if value != before[key]]:
        raise ValueError(
            f"config.{changed[0]} cannot differ in a fork, whose first tasks, held-out tasks and base policy "
            f"are those of {run}: begin a new run to change it."
        )
    configs.check(config)
    # With the same strategy the run's past evolutions count for the fork; with another, only those to come
    # do.
    configs.check_evolution(config, 0 if config.strategy.name == theirs.strategy.name else step)
    # Make it in a temporary folder and rename: a half-copied fork would start at step 0 without a word.
    workdir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{workdir.name}-", dir=workdir.parent) as beside:
        half = Path(beside) / workdir.name
        claim(half, config)
        state = checkpoint.copy(folder, step, checkpoints(config, half))
        logs.check(run, state["sizes"])
        told = {"run": str(run.absolute()), "step": step, "config_digest": configs.digest(theirs)}
        write_text(half / FORKED, json.dumps({**told, "strategy": theirs.strategy.name}))
        for path in run.glob("*.jsonl"):
            shutil.copyfile(path, half / path.name)
        if (served := recorded_model(run)) and not ANSWERING & set(overrides or {}):
            record_model(half, served)
        if (run / "trajectories").is_dir():
            shutil.copytree(run / "trajectories", half / "trajectories")
        _cut(half, state)
        for name, first in ((rollouts.ROLLOUTS, step), (rollouts.EVALUATIONS, step + 1)):
            if (run / name).is_dir():  # of the steps before the fork's own
                ignore = rollouts.from_step(first)
                shutil.copytree(run / name, half / name, copy_function=_link, ignore=ignore)
        if (run / WARM_START).is_dir():
            shutil.copytree(run / WARM_START, half / WARM_START, copy_function=_link)
        os.replace(half, workdir)
    return config


def _cut(workdir: Path, state: Mapping[str, Any]) -> None:
    """Takes out of copied files what the other run did after its checkpoint, as a resumed run does.

    state: of the checkpoint.
    """
    logs.MetricsWriter(workdir, state["sizes"]).close()
    tasks, records = state["tasks"]["tasks"], state["tasks"]["records"]
    write_lines(workdir / "tasks.jsonl", [{**task, "record": records[task["id"]]} for task in tasks])
    write_lines(workdir / "evaluations.jsonl", state["evaluations"])


def _link(source: str, target: str) -> None:
    """Makes a hard link, or a copy where the file system has none. No finished file changes in place."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
