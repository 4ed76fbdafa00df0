"""The training set of a run as a TensorFlow Datasets (TFDS) data set, with random access and without TensorFlow.

A row is a task. Its column `task` holds the whole line of tasks.jsonl, so nothing is lost; the other columns are to
filter by. Any program reads it without this package:

    tfds.data_source("coevolve_tasks", split="train", data_dir=FOLDER)
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

from coevolve_jax.analysis.loading import Run, asked_for, load_run
from coevolve_jax.types import Task

try:
    import tensorflow_datasets as tfds
except ImportError as error:
    raise ImportError(
        f"The data set of tasks needs tensorflow-datasets ({error}): pip install -e .[tfds]."
    ) from error

NAME, VERSION = "coevolve_tasks", "1.0.0"
FEATURES = tfds.features.FeaturesDict(
    {
        "task": tfds.features.Text(doc="JSON: the task, its lineage and its record, as in tasks.jsonl"),
        "id": tfds.features.Text(),
        "asked_for": tfds.features.Text(doc="kind of signal; or random, initial, benchmark"),
        "parent": tfds.features.Text(
            doc="id of the task whose trajectory carried the signal; empty for none"
        ),
        "born": tfds.features.Scalar(np.int32, doc="GRPO step"),
        "tools": tfds.features.Sequence(
            tfds.features.Text(), doc="that it calls, in order of the first call"
        ),
        "calls": tfds.features.Scalar(np.int32, doc="reference calls of all turns"),
        "visits": tfds.features.Scalar(np.int32, doc="steps that trained on it"),
        "first_score": tfds.features.Scalar(np.float32, doc="mean reward at the first visit; NaN before it"),
        "last_score": tfds.features.Scalar(np.float32, doc="mean reward at the last visit; NaN before it"),
    }
)


def write(workdir: str | os.PathLike, folder: str | os.PathLike) -> Path:
    """Writes D_t of a run, also while it is going on, and returns the folder of the data set, FOLDER/coevolve_tasks/1.0.0.

    Tasks stay in order of birth. One that stands there already is replaced. The data set's metadata have the run's name and config.
    Raises FileNotFoundError where workdir is no folder and ValueError where no run in it has a training set.
    """
    run = load_run(workdir)
    if not run.tasks:
        raise ValueError(
            f"{workdir} holds no training set (no tasks.jsonl): give the workdir of a run that has begun."
        )
    builder = _Builder(run, folder)
    again = tfds.download.DownloadConfig(download_mode=tfds.GenerateMode.REUSE_CACHE_IF_EXISTS)
    tfds.disable_progress_bar()
    with contextlib.redirect_stdout(io.StringIO()):  # what it says of downloads
        builder.download_and_prepare(download_config=again)
    return Path(builder.data_dir)


def read(folder: str | os.PathLike) -> Sequence[Mapping[str, Any]]:
    """The rows that `write` put into a folder, by the columns of FEATURES; each is read when it is asked for.

    Text comes as UTF-8 bytes. Raises ValueError where there is none, or one of another version.
    """
    versions = sorted(path.name for path in (Path(folder) / NAME).glob("*.*.*"))
    if not versions:
        raise ValueError(f"{folder} holds no data set (no {NAME}/): name the folder that it was written to.")
    if VERSION not in versions:
        raise ValueError(
            f"{folder} holds version {', '.join(versions)} of the data set and this code reads {VERSION}: write it again."
        )
    rows = tfds.data_source(f"{NAME}:{VERSION}", split="train", data_dir=folder)
    return cast(Sequence[Mapping[str, Any]], rows)


def columns(line: Mapping[str, Any]) -> dict[str, Any]:
    """A row of FEATURES from a line of tasks.jsonl."""
    lineage, record = line["lineage"], line["record"]
    calls = [call["name"] for turn in line["turns"] for call in turn["calls"]]
    score = lambda value: np.nan if value is None else value
    return {
        "task": json.dumps(line),
        "id": _text(line["id"]),
        "asked_for": _text(asked_for(line)),
        "parent": _text(lineage["parent"] or ""),
        "born": record["born"],
        "tools": [_text(name) for name in dict.fromkeys(calls)],
        "calls": len(calls),
        "visits": record["trained"],
        "first_score": score(record["first_score"]),
        "last_score": score(record["last_score"]),
    }


def task(row: Mapping[str, Any]) -> Task:
    """The task of a row that was read, equal to the one that was written."""
    return Task.from_json(json.loads(row["task"]))


def _text(value: str) -> bytes:
    """What a model wrote may hold half a pair of surrogates, which UTF-8 cannot."""
    return value.encode("utf-8", "backslashreplace")


class _Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """`tfds.load` does not know it: it is made from a run."""

    name = NAME
    VERSION = tfds.core.Version(VERSION)

    def __init__(self, run: Run, folder: str | os.PathLike):
        self._run = run
        super().__init__(data_dir=folder, file_format="array_record")

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="The evolved training set of a CoEvolve run (arXiv 2604.15840).",
            features=FEATURES,
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict({"run": self._run.name, "config": self._run.config}),
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        return enumerate(map(columns, self._run.tasks))
