"""Reads the files of a workdir or of a comparison, as plain values."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
import pathlib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from coevolve_jax.records.logs import TRAJECTORIES
from coevolve_jax.types import QUERY

SIGNAL = {"kind", "task_id", "rollout_index", "step"}  # keys of a Signal; "pattern" may be left out


@dataclasses.dataclass(frozen=True)
class Run:
    """The files of a workdir. A file that does not exist yet gives an empty value.

    failure: the step and the reason of a divergence.
    forked: the run that a fork goes on from (records/workdir.py).
    rows: of metrics.jsonl.
    trajectories: (step, rows), by step.
    llm_calls: packed as in the file (records/llm_calls.py).
    written: the time of the newest file.
    """

    name: str
    config: dict
    summary: dict
    failure: dict
    forked: dict
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
    def fired(self) -> list[dict]:
        """The rows of signals.jsonl that are signals."""
        return fired(self.signals)

    @functools.cached_property
    def queries(self) -> set[str]:
        """Ids of the tasks of D_t that are held-out queries, whose answers are not told in training."""
        return {task["id"] for task in self.tasks if is_query(task)}

    @functools.cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase: the summary's, or sums over the steps so far.

        The sums leave out "environment", which is a part of rollout.
        """
        total = Counter()
        for row in self.rows:
            total.update({k: v for k, v in row["seconds"].items() if k not in ("environment", "step") and v})
        return self.summary.get("seconds") or dict(total)

    @functools.cached_property
    def fate(self) -> list[tuple[str, int]]:
        """Counts of proposed tasks by their fate, as the function `fate` orders them."""
        evolutions = [row["evolution"] for row in self.rows if row["evolution"]]
        return fate(
            self.summary.get("tasks")
            or {
                **{k: sum(e[k] for e in evolutions) for k in ("proposed", "accepted", "retained", "added")},
                "refused": sum((Counter(e["refused"]) for e in evolutions), Counter()),
            }
        )


def load_run(workdir: str | os.PathLike) -> Run:
    """Reads a workdir. A run may be writing to it.

    Raises FileNotFoundError where workdir is no folder, and ValueError where a file or a line is no JSON.
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
        forked=load_forked(workdir),
        rows=_lines(workdir / "metrics.jsonl"),
        trajectories=trajectories,
        written=written,
        **lines,
    )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The files of a comparison's folder.

    plan, result: plan.json, comparison.json.
    summaries: summary.json by (arm, seed) of the cell; {} for an unfinished cell.
    failures: failure.json by (arm, seed) of cells that diverged.
    reports: (arm, seed) of the cells that have a report.
    written: the time of the newest JSON file in the folder itself.
    """

    name: str
    plan: dict
    result: dict
    summaries: dict[tuple[str, str], dict]
    failures: dict[tuple[str, str], dict]
    reports: set[tuple[str, str]]
    written: datetime.datetime


def load_comparison(folder: str | os.PathLike) -> Comparison:
    """Reads a folder with plan.json or comparison.json. Its cells may be running.

    Raises ValueError where a file is no JSON.
    """
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
        reports={_cell(path) for path in cells if (path / "report.html").is_file()},
        written=datetime.datetime.fromtimestamp(written),
    )


def _cell(workdir: pathlib.Path) -> tuple[str, str]:
    return workdir.parent.name, workdir.name.removeprefix("seed_")


def load_forked(workdir: str | os.PathLike) -> dict:
    """Reads what a fork says of the run that it goes on from; {} where the workdir is no fork's."""
    return _values(pathlib.Path(workdir) / "forked.json")


def load_fired(workdir: str | os.PathLike) -> list[dict]:
    """Reads the signals of a run."""
    return fired(_lines(pathlib.Path(workdir) / "signals.jsonl"))


def fired(rows: Iterable[dict]) -> list[dict]:
    """Returns the rows with a Signal's keys. A strategy may log others, in its own format."""
    return [row for row in rows if SIGNAL <= row.keys()]


def is_comparison(folder: str | os.PathLike) -> bool:
    """Whether the folder is a comparison's, not a run's."""
    return any((pathlib.Path(folder) / name).is_file() for name in ("plan.json", "comparison.json"))


def is_campaign(folder: str | os.PathLike) -> bool:
    """Whether the folder is a campaign's (harness/campaign.py)."""
    return (pathlib.Path(folder) / "campaign.json").is_file()


def is_run(folder: str | os.PathLike) -> bool:
    """Whether a run has begun in the folder."""
    return any((pathlib.Path(folder) / name).is_file() for name in ("config.json", "metrics.jsonl"))


def _values(path: pathlib.Path) -> dict:
    """Reads a JSON file; {} where there is none. Raises ValueError where it is no JSON."""
    try:
        return json.loads(path.read_bytes()) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); restore it, or remove it.") from None


def _lines(path: pathlib.Path) -> list[dict]:
    """Reads the rows of a JSONL file. A last line without a newline is left out: it is still being written.

    Raises ValueError where a line is no JSON.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error}); remove the line.") from None
    return rows


def fate(tasks: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Turns a summary's "tasks" into (name, count). Proposed are as many as added and refused together.

    The refusals come last, the most frequent first. Tasks that were not proposed, since D_t had no room for
    them, stand apart. "passed execution" and "passed in part" are shares of the proposed, added or not.
    """
    refused, proposed = Counter(tasks["refused"]), tasks["proposed"]
    # A summary does not tell; where a strategy drafts tasks, a proposal may meet a full pool too.
    added = tasks.get("added", proposed - refused.total() + refused["pool_full"])
    never = max(0, added + refused.total() - proposed)
    refused["pool_full"] -= never
    return [
        ("proposed", proposed),
        ("passed execution", tasks["accepted"]),
        ("passed in part", tasks["retained"]),
        ("added", added),
        *((f"refused: {reason}", n) for reason, n in sorted((+refused).items(), key=lambda i: (-i[1], i[0]))),
        *([("not proposed: pool_full", never)] if never else []),
    ]


def is_query(task: Mapping) -> bool:
    """Whether a row of tasks.jsonl is a held-out query, whose answer is not told in training."""
    return task["lineage"]["kind"] == QUERY


def asked_for(task: Mapping) -> str:
    """The origin of a row of tasks.jsonl: a kind of signal, "random", "initial" or "benchmark"."""
    return task["lineage"]["signal"] or task["lineage"]["kind"]
