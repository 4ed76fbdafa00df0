"""Reads the runs of a version: its row, for proposers, and its selection, for the verdict.

The row is of training alone: metrics.jsonl, whose rollouts are of train-split scenarios. The selection is the
success on the held-out tasks of the development split (evaluations.jsonl). They share no task.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from coevolve_jax.diagnosis import trends
from coevolve_jax.records.files import read_lines


class Selection(NamedTuple):
    """Success of one run on the selection set.

    by_task: task id -> [successes, trials]. scenarios: task id -> scenario, of which tasks may share one.
    """

    by_task: Mapping[str, Sequence[int]]
    scenarios: Mapping[str, str]

    @property
    def success(self) -> float:
        """Successes over trials; nan where no trial is valid."""
        solved, trials = (sum(count[i] for count in self.by_task.values()) for i in (0, 1))
        return solved / trials if trials else math.nan


def row(config: ConfigDict, runs: Sequence[Path]) -> dict[str, float | None]:
    """The row of a version: the mean over its runs of each value of their trends (diagnosis/trends.py)."""
    found = [trends.trend(config, list(read_lines(run / "metrics.jsonl"))) for run in runs]
    return {name: trends.mean(r[name] for r in found) for name in trends.MEANINGS}


def selection(run: Path) -> Selection:
    """The last evaluation of a run on its selection set: "balanced" where the run has one, else "iid"."""
    rows = {r["set"]: r for r in map(json.loads, (run / "evaluations.jsonl").read_text().splitlines())}
    last = rows.get("balanced", rows["iid"])
    return Selection(last["by_task"], last["scenarios"])
