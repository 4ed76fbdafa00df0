"""The files of a cell by which its run is known to have ended, and how: finished, diverged, tried again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from coevolve_jax.records.files import write_text

# The commits, machines and dates under which a cell ran (cells.note_origin). "diverged" of an
# entry is the record of a divergence after which the cell was tried again.
RAN = "ran.json"


def finished(workdir: Path) -> bool:
    return (workdir / "summary.json").exists()


def diverged(workdir: Path) -> dict[str, Any] | None:
    """The record of a run that diverged: the step and the reason (loop/run.py).

    None where it did not diverge, or where it has finished since.
    """
    path = workdir / "failure.json"
    return json.loads(path.read_text()) if path.exists() and not finished(workdir) else None


def ran(workdir: Path) -> list[dict[str, Any]]:
    """The entries of a cell's RAN; [] for a cell without it."""
    path = workdir / RAN
    return json.loads(path.read_text()) if path.exists() else []


def forget_divergence(workdir: Path) -> None:
    """Takes the record of a divergence away, so that the run can be tried again. RAN keeps it.

    For a run is tried again because of its result, which readers must be told.
    """
    if failure := diverged(workdir):
        *before, last = ran(workdir) or [{}]
        write_text(workdir / RAN, json.dumps([*before, {**last, "diverged": failure}]) + "\n")
        (workdir / "failure.json").unlink()


def ended(workdir: Path) -> bool:
    """Whether a run has a result: it is finished, or has diverged."""
    return finished(workdir) or diverged(workdir) is not None
