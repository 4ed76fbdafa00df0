"""Reads the runs of a version: its row, for proposers, and its selection, for the verdict.

The row is of training alone: metrics.jsonl, whose rollouts are of train-split scenarios. The selection is the
success on the held-out tasks of the development split (evaluations.jsonl). They share no task.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.diagnosis import trends
from coevolve_jax.diagnosis.features import Row, correlation, step_row
from coevolve_jax.diagnosis.rewards import rewards_of
from coevolve_jax.harness import backtest
from coevolve_jax.records.files import read_lines
from coevolve_jax.records.rollouts import EVALUATIONS, ROLLOUTS, read_evaluation, read_rollouts, steps
from coevolve_jax.types import Group, Task, Trajectory

FILES = ("evaluations.jsonl", "metrics.jsonl", "ledger.json", "config.json")  # of a run that is judged


def files(run: Path) -> list[str]:
    """The names of a run's files by which it is judged.

    They are FILES, its recorded rollouts and evaluations, and the policy that canary and test read.
    """
    found = sorted(p for folder in (ROLLOUTS, EVALUATIONS) for p in (run / folder).glob("step_*"))
    found += sorted(p for p in (run / "policy").rglob("*") if p.is_file())
    return [*FILES, *(str(p.relative_to(run)) for p in found)]


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

    @property
    def most(self) -> int:
        """The most valid trials of a task."""
        return max((trials for _, trials in self.by_task.values()), default=0)

    def lost(self, most: int) -> int:
        """The trials that are not valid, of `most` for each task."""
        return len(self.by_task) * most - sum(trials for _, trials in self.by_task.values())

    def worst(self, most: int) -> float:
        """Success with the lost trials as failures; nan where there is no trial at all."""
        solved, trials = sum(s for s, _ in self.by_task.values()), len(self.by_task) * most
        return solved / trials if trials else math.nan


class Half(NamedTuple):
    """The first half of a run, and what came of it.

    Attributes:
      steps: rows of the recorded steps of the first half (diagnosis/features.py), in order.
      gain: success in training over the last quarter of the steps minus that over the third. So no step is on
        both sides. None where it is unknown.
    """

    steps: Sequence[Row]
    gain: float | None


@functools.lru_cache(maxsize=4)
def groups(run: Path) -> list[list[Group]]:
    """The whole groups of each recorded step of a finished run (config.logging.rollouts_every).

    The last few runs stay in memory: several parts of a version read the same.
    """
    return [read_rollouts(run, step) for step in steps(run, ROLLOUTS)]


def row(config: ConfigDict, runs: Sequence[Path]) -> dict[str, float | None]:
    """The row of a version: the mean over its runs of each value of their trends (diagnosis/trends.py).

    A value is None where any run lacks it: the mean of the others would be of other seeds than the parent's.
    """
    found = [trends.trend(config, _steps(config, run)) for run in runs]
    values = {name: [r[name] for r in found] for name in trends.MEANINGS}
    return {name: None if None in own else trends.mean(own) for name, own in values.items()}


def _steps(config: ConfigDict, run: Path) -> list[dict]:
    """The rows of metrics.jsonl, with what the learner was paid for where the groups are on disk.

    shaped: mean reward with its terms. length_paid: correlation of tokens with advantage over the samples.
    """
    rows, there = list(read_lines(run / "metrics.jsonl")), groups(run)
    by_step = {found["step"]: found for found in rows}
    paid = backtest.credit_by_step(config, there)
    for step, each, (advantage, reward, taught) in zip(steps(run, ROLLOUTS), there, paid, strict=True):
        found = by_step[step]
        tokens = np.array([len(t.ids) for g in each for t in g.valid], float)
        found["shaped"] = float(reward.mean()) if len(reward) else None
        found["length_paid"] = correlation(tokens[taught], advantage[taught])
    return rows


def half(config: ConfigDict, run: Path) -> Half:
    """The first half of a finished run, and its later gain."""
    rows = {found["step"]: found for found in read_lines(run / "metrics.jsonl")}
    middle, quarter = len(rows) // 2, max(1, len(rows) // 4)
    told = [rows[step]["success"] for step in sorted(rows)][middle:]
    third, last = (trends.mean(part) for part in (told[:-quarter], told[-quarter:]))
    recorded, rewards = zip(steps(run, ROLLOUTS), groups(run), strict=True), rewards_of(config)
    first = [(step, own) for step, own in recorded if step < middle]
    samples = backtest.samples_by_step(config, [own for _, own in first])
    read = [
        step_row(own, taught, metrics=rows[step], rewards=rewards, step=step)
        for (step, own), taught in zip(first, samples, strict=True)
    ]
    return Half(read, None if third is None or last is None else last - third)


def spent(config: ConfigDict, run: Path, steps: int | None = None) -> int:
    """Training rollouts of a run so far, finished or not, or of its first steps alone."""
    return spent_by_step(config, run, steps)[-1]


def spent_by_step(config: ConfigDict, run: Path, steps: int | None = None) -> list[int]:
    """Training rollouts of a run before its first step, and after each."""
    path = run / "metrics.jsonl"
    rows = itertools.islice(read_lines(path), steps) if path.exists() else ()
    each = (row["groups"]["rolled_out"] * config.rollout.group_size for row in rows)
    return [*itertools.accumulate(each, initial=0)]


def successes(run: Path) -> list[tuple[Task, Trajectory]]:
    """The successes of a run's last evaluation on its selection set, without tokens, if it kept them."""
    return [(g.task, t) for g in _selected_on(run) for t in g.valid if t.outcome.success]


def _selected_on(run: Path) -> Sequence[Group]:
    """The rollouts of a run's last evaluation on its selection set; () where none were kept."""
    last = steps(run, EVALUATIONS)[-1:]
    sets = read_evaluation(run, last[0]) if last else {}
    return sets.get("balanced", sets.get("iid", ()))


def contradictions(run: Path) -> list[str]:
    """Says where the tables of a run that decide differ from its rollouts on disk."""
    told, kept, found = selection(run), _selected_on(run), []
    name = f"{run.parent.name}/{run.name}"
    counts = {g.task.id: [sum(t.outcome.success for t in g.valid), len(g.valid)] for g in kept}
    scenarios = {g.task.id: g.task.lineage.parent for g in kept}
    if told != (counts, scenarios):
        found.append(f"{name}/evaluations.jsonl differs from the rollouts of its last evaluation.")
    rows = {row["step"]: row["success"] for row in read_lines(run / "metrics.jsonl")}
    for step, own in zip(steps(run, ROLLOUTS), groups(run), strict=True):
        solved = [t.outcome.success for g in own if not g.task.is_query for t in g.valid]
        if rows[step] != (float(np.mean(solved)) if solved else None):
            found.append(f"{name}/metrics.jsonl differs from the rollouts of step {step} in success.")
    return found


def check_valid(run: Path, whose: str) -> None:
    """Raises ValueError where no trial of a run on its selection set is valid. whose: names the run."""
    if math.isnan(selection(run).success):
        raise ValueError(
            f"Every trial of {whose} on the selection set was lost: mend what lost them, take "
            f"{run.resolve()} away and give the same command again."
        )


def selection(run: Path) -> Selection:
    """The last evaluation of a run on its selection set: "balanced" where the run has one, else "iid"."""
    rows = {r["set"]: r for r in map(json.loads, (run / "evaluations.jsonl").read_text().splitlines())}
    last = rows.get("balanced", rows["iid"])
    return Selection(last["by_task"], last["scenarios"])
