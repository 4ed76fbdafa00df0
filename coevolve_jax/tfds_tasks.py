"""Tasks as TensorFlow Datasets (TFDS): the training set of a run, or a benchmark's own tasks by split.

The data sets have random access and need no TensorFlow. A row is a task. Its column `task` holds the whole
task as JSON; for a run's set it is the line of tasks.jsonl. The other columns serve as filters.

Any program reads the data sets without this package:

    tfds.data_source("coevolve_tasks", split="train", data_dir=FOLDER)
    tfds.data_source("bfcl_tasks", split="development+test", data_dir=FOLDER)
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from coevolve_jax.analysis.loading import load_run
from coevolve_jax.exports import tables
from coevolve_jax.types import Task

try:
    import tensorflow_datasets as tfds
except ImportError as error:
    raise ImportError(
        f"The data set of tasks needs tensorflow-datasets ({error}): pip install coevolve_jax[tfds]."
    ) from error

NAME, VERSION = "coevolve_tasks", "1.0.0"
_TOOLS = tfds.features.Sequence(tfds.features.Text(), doc="that it calls, in order of the first call")
FEATURES = tfds.features.FeaturesDict(
    {
        "task": tfds.features.Text(doc="JSON: the task, its lineage and its record, as in tasks.jsonl"),
        "id": tfds.features.Text(),
        "asked_for": tfds.features.Text(doc="kind of signal; or random, initial, benchmark"),
        "parent": tfds.features.Text(
            doc="id of the task whose rollout carried the signal; else of the scenario"
        ),
        "born": tfds.features.Scalar(np.int32, doc=tables.TASKS["born"].about),
        "tools": _TOOLS,
        "calls": tfds.features.Scalar(np.int32, doc="reference calls of all turns"),
        "visits": tfds.features.Scalar(np.int32, doc="steps that rolled it out and scored it"),
        **{
            name: tfds.features.Scalar(np.float32, doc=tables.TASKS[name].about.replace("null", "NaN"))
            for name in ("first_score", "last_score")
        },
    }
)
BENCHMARK_FEATURES = tfds.features.FeaturesDict(
    {
        "task": tfds.features.Text(doc="JSON: scenario, user turns and reference calls"),
        "id": tfds.features.Text(),
        "category": tfds.features.Text(doc="part of the benchmark"),
        "tools": _TOOLS,
        "turns": tfds.features.Scalar(np.int32, doc="of the user"),
        "calls": tfds.features.Scalar(np.int32, doc="reference calls of all turns"),
    }
)


def write(workdir: str | os.PathLike, folder: str | os.PathLike) -> Path:
    """Writes D_t of a run as a data set, and returns its folder, FOLDER/coevolve_tasks/1.0.0.

    The run may still be running. Tasks stay in order of birth. An existing data set is replaced. The metadata
    hold the run's name and config.

    Raises:
      FileNotFoundError: workdir is no folder.
      ValueError: workdir holds no training set.
    """
    run = load_run(workdir)
    if not run.tasks:
        raise ValueError(
            f"{workdir} holds no training set (no tasks.jsonl): give the workdir of a run that has begun."
        )
    about = "The evolved training set of a CoEvolve run (arXiv 2604.15840)."
    rows = {"train": [columns(line) for line in run.tasks]}
    return _prepare(NAME, about, FEATURES, rows, {"run": run.name, "config": run.config}, folder)


def write_benchmark(
    name: str, splits: Mapping[str, Mapping[str, Sequence[Task]]], folder: str | os.PathLike
) -> Path:
    """Writes a benchmark's own tasks as a data set, and returns its folder, FOLDER/<name>_tasks/1.0.0.

    splits: split -> category -> tasks. A task in two splits is stored twice. An existing data set is
    replaced.
    """
    rows = {
        split: [benchmark_columns(category, task) for category, tasks in parts.items() for task in tasks]
        for split, parts in splits.items()
    }
    about = f"The tasks of the benchmark {name}, with reference calls."
    return _prepare(f"{name}_tasks", about, BENCHMARK_FEATURES, rows, {"benchmark": name}, folder)


def _prepare(
    name: str,
    description: str,
    features: tfds.features.FeaturesDict,
    rows: Mapping[str, Sequence[Mapping[str, Any]]],
    metadata: Mapping[str, Any],
    folder: str | os.PathLike,
) -> Path:
    kind = type(name, (_Builder,), {"name": name}, skip_registration=True)
    builder = kind(description, features, rows, metadata, folder)
    again = tfds.download.DownloadConfig(download_mode=tfds.GenerateMode.REUSE_CACHE_IF_EXISTS)
    tfds.disable_progress_bar()
    with contextlib.redirect_stdout(io.StringIO()):  # hides messages about downloads
        builder.download_and_prepare(download_config=again)
    return Path(builder.data_dir)


def read(folder: str | os.PathLike, name: str = NAME, split: str = "train") -> Sequence[Mapping[str, Any]]:
    """Reads the rows of a data set, as dicts by column. Rows are read on access; text is UTF-8 bytes.

    name: of the data set. Raises ValueError if the folder has no such data set, or only other versions of it.
    """
    versions = sorted(path.name for path in (Path(folder) / name).glob("*.*.*"))
    if not versions:
        raise ValueError(f"{folder} holds no data set (no {name}/): name the folder that it was written to.")
    if VERSION not in versions:
        raise ValueError(
            f"{folder} holds version {', '.join(versions)} of the data set "
            f"and this code reads {VERSION}: write it again."
        )
    rows = tfds.data_source(f"{name}:{VERSION}", split=split, data_dir=folder)
    return cast(Sequence[Mapping[str, Any]], rows)


def columns(line: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a row of FEATURES from a line of tasks.jsonl."""
    row = tables.task_row(line)
    return {name: np.nan if row[name] is None else row[name] for name in FEATURES.keys()}


def benchmark_columns(category: str, task: Task) -> dict[str, Any]:
    """Makes a row of BENCHMARK_FEATURES."""
    return {
        "task": json.dumps(task.to_json()),
        "id": task.id,
        "category": category,
        "tools": list(dict.fromkeys(call.name for call in task.calls)),
        "turns": len(task.turns),
        "calls": len(task.calls),
    }


def task(row: Mapping[str, Any]) -> Task:
    """The task of a row from `read`, equal to the one that was written."""
    return Task.from_json(json.loads(row["task"]))


class _Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Builds a data set from rows. Its subclass bears the data set's name; it is not registered with TFDS."""

    VERSION = tfds.core.Version(VERSION)

    def __init__(self, description: str, features, rows, metadata, folder: str | os.PathLike):
        self._told = {"description": description, "features": features}
        self._rows, self._about = rows, dict(metadata)
        super().__init__(data_dir=folder, file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        about = tfds.core.MetadataDict(self._about)
        return tfds.core.DatasetInfo(builder=self, **self._told, disable_shuffling=True, metadata=about)

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
        return {split: self._generate_examples(split) for split in self._rows}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
        return enumerate(self._rows[split])
