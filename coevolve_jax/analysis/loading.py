"""What runs have written, read back: the files of a workdir, and of a comparison, as plain values."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
import pathlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from coevolve_jax.records.logs import TRAJECTORIES


@dataclasses.dataclass(frozen=True)
class Run:
    """The files of a workdir; what is not there yet is empty. failure: where and why the run diverged. rows: of
    metrics.jsonl. trajectories: (step, rows) in order of step. llm_calls: as the file packs them (records/llm_calls.py)."""

    name: str
    config: dict
    summary: dict
    failure: dict
    rows: list[dict]
    tasks: list[dict]
    held_out: list[dict]
    signals: list[dict]
    evaluations: list[dict]
    explorations: list[dict]
    llm_calls: list[dict]
    costs: list[dict]
    trajectories: list[tuple[int, list[dict]]]
    written: datetime.datetime

    @functools.cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase; in the middle of a run by its steps, where "environment" is a part of rollout."""
        total = Counter()
        for row in self.rows:
            total.update({k: v for k, v in row["seconds"].items() if k not in ("environment", "step") and v})
        return self.summary.get("seconds") or dict(total)

    @functools.cached_property
    def fate(self) -> list[tuple[str, int]]:
        """What became of proposed tasks: (name, count) lines, reasons of refusal last, the frequent first."""
        evolutions = [row["evolution"] for row in self.rows if row["evolution"]]
        return fate(
            self.summary.get("tasks")
            or {
                **{k: sum(e[k] for e in evolutions) for k in ("proposed", "accepted", "retained")},
                "refused": sum((Counter(e["refused"]) for e in evolutions), Counter()),
            }
        )


def load_run(workdir: str | os.PathLike) -> Run:
    """Reads a workdir, also while a run writes to it.

    Raises FileNotFoundError where workdir is no folder and ValueError where a line of its files is no JSON.
    """
    workdir = pathlib.Path(workdir)
    if not workdir.is_dir():
        raise FileNotFoundError(f"{workdir} is not a folder; give the workdir of a run.")
    logs = ("tasks", "held_out", "signals", "evaluations", "explorations", "llm_calls", "costs")
    lines = {name: _lines(workdir / f"{name}.jsonl") for name in logs}
    files = sorted((workdir / "trajectories").glob("step_*.jsonl"))
    trajectories = [(int(m[1]), _lines(path)) for path in files if (m := TRAJECTORIES.fullmatch(path.name))]
    stamps = [path.stat().st_mtime for path in workdir.glob("*.json*")]
    written = datetime.datetime.fromtimestamp(max(stamps, default=workdir.stat().st_mtime))
    return Run(
        name=workdir.absolute().name,
        config=_values(workdir / "config.json"),
        summary=_values(workdir / "summary.json"),
        failure=_values(workdir / "failure.json"),
        rows=_lines(workdir / "metrics.jsonl"),
        trajectories=trajectories,
        written=written,
        **lines,
    )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The files of a comparison's folder. plan, result: plan.json, comparison.json. summaries: summary.json by (arm, seed) of its cells; a cell that has not
    finished has {}. failures: failure.json of those that diverged."""

    name: str
    plan: dict
    result: dict
    summaries: dict[tuple[str, str], dict]
    failures: dict[tuple[str, str], dict]
    written: datetime.datetime


def load_comparison(folder: str | os.PathLike) -> Comparison:
    """Reads a folder that holds plan.json or comparison.json, also while its cells run. Raises what `load_run` does."""
    folder = pathlib.Path(folder)
    cells = [path for path in sorted((folder / "cells").glob("*/seed_*")) if path.is_dir()]
    written = max(path.stat().st_mtime for path in folder.glob("*.json"))
    return Comparison(
        name=folder.absolute().name,
        plan=_values(folder / "plan.json"),
        result=_values(folder / "comparison.json"),
        summaries={_cell(path): _values(path / "summary.json") for path in cells},
        failures={
            _cell(path): failure
            for path in cells
            if (failure := _values(path / "failure.json")) and not (path / "summary.json").exists()
        },
        written=datetime.datetime.fromtimestamp(written),
    )


def _cell(workdir: pathlib.Path) -> tuple[str, str]:
    return workdir.parent.name, workdir.name.removeprefix("seed_")


def is_comparison(folder: str | os.PathLike) -> bool:
    """Whether a folder is a comparison's, rather than one run's."""
    return any((pathlib.Path(folder) / name).is_file() for name in ("plan.json", "comparison.json"))


def is_run(folder: str | os.PathLike) -> bool:
    """Whether a run has begun in a folder."""
    return any((pathlib.Path(folder) / name).is_file() for name in ("config.json", "metrics.jsonl"))


def _values(path: pathlib.Path) -> dict:
    """A JSON file; {} where there is none."""
    try:
        return json.loads(path.read_bytes()) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); restore it, or remove it.") from None


def _lines(path: pathlib.Path) -> list[dict]:
    """Rows of a JSONL file; a last line without its newline is still being written and left out."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error}); remove the line.") from None
    return rows


def fate(tasks: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Lines of a summary's "tasks": counts by verdict, then refusals by reason, the most frequent first."""
    refused = sorted(tasks["refused"].items(), key=lambda item: (-item[1], item[0]))
    verdicts = [(name, tasks[name]) for name in ("proposed", "accepted", "retained")]
    return verdicts + [(f"refused: {reason}", n) for reason, n in refused]


def asked_for(task: Mapping) -> str:
    """What asked for a row of tasks.jsonl: a kind of signal, "random", "initial" or "benchmark"."""
    return task["lineage"]["signal"] or task["lineage"]["kind"]
