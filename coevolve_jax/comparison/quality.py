"""Quality of signals: do they point at tools that the policy fails with, and do their tasks improve it?

A query over the lineage of new tasks answers this. A signal points at its task's `focus`: the tools that its
context asked to explore. The comparison is with the arm of free exploration, at the same seed and setting.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coevolve_jax.analysis.stats import HELP
from coevolve_jax.comparison.differences import samples
from coevolve_jax.comparison.plan import Cell
from coevolve_jax.types import GIVEN

AGAINST = "random"


def quality(
    folder: Path, cells: Sequence[Cell], outcomes: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Returns a row for each arm and each kind of its signals.

    precision: mean of 1 - first score over tasks born of the signal, the failure rate at first visit.
    matched_precision: the same over the tasks that have a match. A match is a trained task of the arm
      AGAINST, at the same seed and setting, with the same step of birth and number of calls.
    against_precision: the same over these matches.
    gain: mean over new tasks and tools of their focus, on held-out tasks that call the tool. It is the
      success after the last step minus that at the latest evaluation up to the birth.
    against_gain: the same for equal tools and steps in the run of AGAINST.

    A mean over nothing is None.
    """
    rate = _by_tool(outcomes)
    new = {(c.column, c.seed): _new_tasks(c.workdir(folder)) for c in cells}
    free = {c.column: c._replace(arm=AGAINST).column for c in cells}
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    for (column, seed), tasks in new.items():
        other = new.get((free[column], seed), [])
        for task in tasks:
            kind = task["lineage"]["signal"]
            if kind is None or column == free[column]:
                continue
            row = found.setdefault(
                (column, kind),
                {"tasks": [], "failed": [], "matched": [], "theirs": [], "gain": [], "other": []},
            )
            row["tasks"].append(1.0)
            first = task["record"]["first_score"]
            matched = [
                1 - t["record"]["first_score"] for t in other if _alike(t, task) and t["record"]["trained"]
            ]
            if first is not None:
                row["failed"].append(1 - first)
            if first is not None and matched:
                row["matched"].append(1 - first)
                row["theirs"].append(statistics.fmean(matched))
            for tool in task["lineage"]["focus"]:
                gains = [
                    _gain(rate.get((arm, seed, tool), {}), task["lineage"]["step"])
                    for arm in (column, free[column])
                ]
                if None not in gains:
                    row["gain"].append(gains[0] or 0.0)
                    row["other"].append(gains[1] or 0.0)
    mean = lambda values: statistics.fmean(values) if values else None
    return [
        {
            "arm": column,
            "signal": kind,
            "new_tasks": len(row["tasks"]),
            "precision": mean(row["failed"]),
            "matched_precision": mean(row["matched"]),
            "against_precision": mean(row["theirs"]),
            "gain": mean(row["gain"]),
            "against_gain": mean(row["other"]),
        }
        for (column, kind), row in sorted(found.items())
    ]


def _new_tasks(workdir: Path) -> list[dict]:
    lines = (workdir / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
    return [t for t in map(json.loads, lines) if t["lineage"]["kind"] not in GIVEN]


def _calls(task: Mapping[str, Any]) -> int:
    return sum(len(turn["calls"]) for turn in task["turns"])


def _alike(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a["lineage"]["step"] == b["lineage"]["step"] and _calls(a) == _calls(b)


def _by_tool(outcomes: Iterable[Mapping[str, Any]]) -> dict[tuple[str, int, str], dict[int, float]]:
    """Maps (arm, seed, tool) to {evaluated step: success on held-out tasks that call the tool}.

    It covers the tasks of all held-out sets, without help. Lost trials are failures here.
    """
    outcomes, counts = [r for r in outcomes if not r["set"].endswith(HELP)], {}
    for r, asked in zip(outcomes, samples(outcomes), strict=True):
        for tool in r["calls"].split(";"):
            steps = counts.setdefault((r["arm"], int(r["seed"]), tool), {})
            c = steps.setdefault(int(r["step"]), [0, 0])
            c[0] += int(r["successes"])
            c[1] += asked
    return {key: {step: s / n for step, (s, n) in steps.items() if n} for key, steps in counts.items()}


def _gain(rates: Mapping[int, float], born: int) -> float | None:
    """Returns the gain in success since a task's birth; None without an evaluation on both sides of it.

    rates: by evaluated step. born: the GRPO step, from 0, after which the task joined.
    """
    before = [step for step in rates if step <= born + 1]
    return rates[max(rates)] - rates[max(before)] if before and max(rates) > max(before) else None
