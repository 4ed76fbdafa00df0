"""Logs of a run: JSON lines files that a resumed run continues, and numbers for trackers."""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from coevolve_jax.records.trackers.base import Tracker

METRICS, SIGNALS, EXPLORATIONS = "metrics.jsonl", "signals.jsonl", "explorations.jsonl"
LLM_CALLS, COSTS = "llm_calls.jsonl", "costs.jsonl"  # only where the explorer is a model
TRAJECTORIES = re.compile(r"step_(\d+)\.jsonl")  # names of the files in trajectories/


class MetricsWriter:
    """Appends to the JSONL logs of a workdir, and passes each step's numbers to trackers.

    resume_sizes: the result of `sizes` when the checkpoint was saved. The logs are cut back to it, so a
    resumed run writes the same bytes as an uninterrupted one. None starts new logs.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        resume_sizes: Mapping[str, int] | None = None,
        trackers: Sequence[Tracker] = (),
    ):
        self._dir, self._trackers = pathlib.Path(workdir), trackers
        self._dir.mkdir(parents=True, exist_ok=True)
        sizes = {METRICS: 0, SIGNALS: 0, EXPLORATIONS: 0, **(resume_sizes or {})}
        self._last = truncate(self._dir, sizes)
        self._begun = set(sizes)
        for name in sizes:
            (self._dir / name).touch()
        for name in {LLM_CALLS, COSTS} - sizes.keys():  # written after the checkpoint, here or before a fork
            (self._dir / name).unlink(missing_ok=True)

    def write_step(self, row: Mapping[str, Any]) -> None:
        """Logs one GRPO step. Raises ValueError if row["step"] is not after the last one."""
        if row["step"] <= self._last:
            raise ValueError(
                f"metrics.jsonl already holds step {self._last}, so step {row['step']} cannot be added; "
                "resume with the sizes of the checkpoint that the run starts from."
            )
        self.append(METRICS, [row])
        self._last = row["step"]
        for tracker in self._trackers:
            tracker.log(self._last, dict(flatten(row)))

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends JSON lines to workdir/name, one flush per line.

        A file that the checkpoint does not list was written after it: its first append here overwrites it.
        """
        path = self._dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab" if name in self._begun else "wb") as file:
            for row in rows:
                file.write(encode(row))
                file.flush()
        self._begun.add(name)

    def sizes(self) -> dict[str, int]:
        """Bytes of each log, for the checkpoint. Syncs the logs to disk first, so no crash can shorten them.

        Leaves out trajectories/: each of its files belongs to one step, and `truncate` deletes whole files.
        """
        sizes = {}
        for name in sorted(name for name in self._begun if "/" not in name):
            with open(self._dir / name, "ab") as file:
                os.fsync(file.fileno())
                sizes[name] = file.tell()
        return sizes

    def close(self) -> None:
        """Closes the trackers."""
        for tracker in self._trackers:
            tracker.close()


def truncate(workdir: str | os.PathLike, sizes: Mapping[str, int]) -> int:
    """Cuts the logs of a workdir back to `sizes` (bytes by name) and returns the last step left, or -1.

    Deletes files of trajectories/ that belong to later steps. Raises ValueError, and changes nothing, if a
    log is shorter than recorded: its lost lines cannot be recovered.
    """
    workdir = pathlib.Path(workdir)
    check(workdir, sizes)
    for name, size in sizes.items():
        if (workdir / name).exists():
            os.truncate(workdir / name, size)
    last = -1
    if sizes.get(METRICS):
        last = json.loads((workdir / METRICS).read_bytes().splitlines()[-1])["step"]
    for path in (workdir / "trajectories").glob("step_*.jsonl"):
        match = TRAJECTORIES.fullmatch(path.name)
        if match and int(match[1]) > last:
            path.unlink()
    return last


def check(workdir: pathlib.Path, sizes: Mapping[str, int]) -> None:
    """Raises ValueError if a log of the workdir is shorter than in `sizes`."""
    for name, size in sizes.items():
        path = workdir / name
        found = path.stat().st_size if path.exists() else 0
        if found < size:
            raise ValueError(
                f"{path} holds {found} bytes where the checkpoint recorded {size}: lines were lost after it "
                "was saved; restore the file, or start again in a new workdir."
            )


def encode(row: Mapping[str, Any]) -> bytes:
    """One JSON line. Floats are written with repr: reading gives the same bits. NaN and infinity are null."""
    return (json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) + "\n").encode(
        errors="backslashreplace"  # a policy may write lone surrogates, which have no UTF-8: keep the escapes
    )


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int)):  # the most frequent types first
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def flatten(row: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, float]]:
    """Yields the numbers of a nested row, named like "seconds/update". Skips null, NaN and "step"."""
    for key, value in _plain(row).items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and prefix + key != "step":
            yield prefix + key, float(value)
