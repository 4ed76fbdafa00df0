"""What a run writes about itself while it goes on: JSON lines that a resumed run continues, and numbers for trackers."""

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
    """Append-only JSONL logs of a workdir, and the numbers of each step for trackers, which it closes.

    resume_sizes: what `sizes` returned when the checkpoint was saved; the logs are cut back to it, so that
    a resumed run writes the bytes that an unbroken one would have. None starts the logs anew.
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

    def write_step(self, row: Mapping[str, Any]) -> None:
        """Logs one GRPO step. Raises ValueError where row["step"] does not follow the last one."""
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

        A file that the checkpoint does not list was written after it, and starts empty.
        """
        path = self._dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab" if name in self._begun else "wb") as file:
            for row in rows:
                file.write(encode(row))
                file.flush()
        self._begun.add(name)

    def sizes(self) -> dict[str, int]:
        """Bytes of each log, for the checkpoint; synced to disk first, so that no file can be shorter later.

        trajectories/ is left out: its files belong to one step each, and `truncate` drops whole files.
        """
        sizes = {}
        for name in sorted(name for name in self._begun if "/" not in name):
            with open(self._dir / name, "ab") as file:
                os.fsync(file.fileno())
                sizes[name] = file.tell()
        return sizes

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def truncate(workdir: str | os.PathLike, sizes: Mapping[str, int]) -> int:
    """Cuts the logs of a workdir back to `sizes` (bytes by name) and returns the last step left, or -1.

    Files of trajectories/ that belong to later steps are deleted. Nothing is changed where a log is
    shorter than recorded: ValueError, since the run cannot be continued truthfully.
    """
    workdir = pathlib.Path(workdir)
    for name, size in sizes.items():
        path = workdir / name
        found = path.stat().st_size if path.exists() else 0
        if found < size:
            raise ValueError(
                f"{path} holds {found} bytes where the checkpoint recorded {size}: lines were lost after it "
                "was saved; restore the file, or start again in a new workdir."
            )
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


def encode(row: Mapping[str, Any]) -> bytes:
    """One JSON line. Floats are written with repr: reading gives the same bits. NaN and infinity are null."""
    return (json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) + "\n").encode(
        errors="backslashreplace"  # half a pair of surrogates, as a policy may write it, stays JSON's own escape
    )


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int)):  # most are
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
    """Yields the numbers of a nested row, named like "seconds/update"; null, NaN and "step" stay out."""
    for key, value in _plain(row).items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and prefix + key != "step":
            yield prefix + key, float(value)
