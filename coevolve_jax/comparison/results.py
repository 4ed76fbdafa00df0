"""Reads the cells of a comparison: all raw numbers as CSV, and their statistics as comparison.json."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coevolve_jax.analysis.stats import HELP, lost_trials
from coevolve_jax.comparison.arms import PLANNED
from coevolve_jax.comparison.cell_files import diverged, ended, finished, ran
from coevolve_jax.comparison.differences import (
    METRICS,
    compare,
    correct,
    counts,
    curves,
    lost_by_evaluation,
    no_values,
)
from coevolve_jax.comparison.notes import HELD_OUT, lost_notes, notes, worst_notes
from coevolve_jax.comparison.plan import Cell
from coevolve_jax.comparison.quality import quality
from coevolve_jax.records.costs import ROLLOUTS, SAMPLED, STEPS, total
from coevolve_jax.records.files import read_lines, write_text
from coevolve_jax.types import GIVEN, mixed

OUTCOMES = (
    "arm", "seed", "set", "split", "step", "task", "scenario", "calls", "weak", "successes", "trials",
    "samples",
)  # fmt: skip


def outcomes(folder: Path, cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """Returns a row with the keys OUTCOMES for each evaluation of each held-out task.

    calls, weak: names of tools, joined by ";". samples: trials asked for. trials: those that were not lost.
    """
    rows = []
    for cell in cells:
        workdir = cell.workdir(folder)
        tasks = {t["id"]: t for t in read_lines(workdir / "held_out.jsonl")}
        called = {i: _tools(t) for i, t in tasks.items()}
        for row in read_lines(workdir / "evaluations.jsonl"):
            weak = row.get("weak_tools", {})
            for task, (successes, trials) in row["by_task"].items():
                names = sorted(called[task])
                values = (
                    cell.column, cell.seed, row["set"], row["split"], row["step"], task,
                    row["scenarios"][task], ";".join(names), ";".join(n for n in names if n in weak),
                    successes, trials, row.get("samples", ""),
                )  # fmt: skip
                rows.append(dict(zip(OUTCOMES, values, strict=True)))
    return rows


def budgets(folder: Path, cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """Returns a row for each cell: its costs and the data that the learner saw.

    The row of a diverged cell holds only the steps where it diverged. diverged_before: those after which it
    was tried again, joined by "+"; None for a cell that never was.
    """
    rows = []
    for cell in cells:
        workdir, name = cell.workdir(folder), {"arm": cell.column, "seed": cell.seed}
        if finished(workdir):
            rows.append({**name, "diverged": None, **_costs(workdir), **_before(workdir)})
        else:
            failure = diverged(workdir) or {}
            rows.append({**name, "diverged": failure.get("step"), **_before(workdir)})
    return rows


def _before(workdir: Path) -> dict[str, str | None]:
    steps = [str(entry["diverged"]["step"]) for entry in ran(workdir) if "diverged" in entry]
    return {"diverged_before": "+".join(steps) or None}


def _costs(workdir: Path) -> dict[str, Any]:
    summary, ledger, config = (
        json.loads((workdir / f"{name}.json").read_text()) for name in ("summary", "ledger", "config")
    )
    metrics, tasks = (list(read_lines(workdir / f"{name}.jsonl")) for name in ("metrics", "tasks"))
    costs = ledger["costs"]
    new = [t for t in tasks if t["lineage"]["kind"] not in GIVEN]
    first = [t["record"]["first_score"] for t in new if t["record"]["first_score"] is not None]
    weak = set(config.get("testbed", {}).get("weak_tools", ()))
    visits = sum(t["record"]["trained"] for t in tasks)
    return {
        "steps": summary.get("steps"),
        "rollouts": total(costs, ROLLOUTS),
        **{f"rollouts_{role}": costs.get(ROLLOUTS + role, 0) for role in ("policy", "probe", "branch")},
        "gradients": costs.get("gradients/influence", 0),
        **_lost(workdir, metrics),
        "sampled_tokens": total(costs, SAMPLED),
        "learned_trajectories": costs.get("learned_trajectories", 0),
        "learned_tokens": costs.get("learned_tokens", 0),
        "explorer_steps": total(costs, STEPS),
        "llm_tokens": ledger["llm_tokens"],
        "money": ledger.get("money", 0.0),
        **({"explorer_model": summary["explorer_model"]} if "explorer_model" in summary else {}),
        "new_tasks": len(new),
        "new_tasks_with_a_weak_tool": sum(not weak.isdisjoint(_tools(t)) for t in new),
        "new_tasks_never_visited": sum(t["record"]["trained"] == 0 for t in new),
        "new_share_of_visits": sum(t["record"]["trained"] for t in new) / visits if visits else 0.0,
        "calls_per_new_task": _mean(sum(len(turn["calls"]) for turn in t["turns"]) for t in new),
        "live_groups": _mean(row["groups"]["learned_from"] / row["groups"]["rolled_out"] for row in metrics),
        "live_at_first_visit": _mean(mixed(score, 1) for score in first),
        "failed_at_first_visit": _mean(1 - score for score in first),
        **start_digests(workdir),
        **_own_files(summary.get("versions", {})),
        "seconds": sum(summary["seconds"].values()),
        **_origin(workdir),
    }


def _own_files(versions: Mapping[str, str]) -> dict[str, str]:
    """Returns one digest of a user's modules, tools and template (`loop.inputs`); {} for a run with none.

    The base policy and the file of D_0 are not among them: they have columns of their own.
    """
    rest = {"config.model", "config.data.initial_file"}
    own = sorted(key for key in versions if key.startswith("config.") and key not in rest)
    return {"files_digest": _digest(f"{key} {versions[key]}" for key in own)} if own else {}


def _origin(workdir: Path) -> dict[str, str | None]:
    """Commits and dates under which a cell ran, by its RAN; None for a cell without it."""
    told = ran(workdir)  # an older cell that diverged has an entry without an origin
    join = lambda key: "+".join(dict.fromkeys(str(entry[key]) for entry in told if key in entry)) or None
    return {key: join(key) for key in ("commit", "date")}


def _lost(workdir: Path, metrics: Sequence[Mapping]) -> dict[str, Any]:
    """Returns the share of invalid training rollouts, and the trials of the last evaluation: lost and asked.

    The trials are by held-out set, None for a set that the run does not have. Sets with help are named only
    where the run has them.
    """
    groups = [row["groups"]["rolled_out"] for row in metrics]
    lost = sum(n * (1 - row.get("valid", 1.0)) for n, row in zip(groups, metrics, strict=True))
    found: dict[str, Any] = {"rollouts_lost_share": lost / sum(groups) if sum(groups) else 0.0}
    last = {row["set"]: row for row in read_lines(workdir / "evaluations.jsonl")}
    for name in (*HELD_OUT, *sorted(last.keys() - set(HELD_OUT))):
        trials = lost_trials(last[name]) if name in last else (None, None)
        found |= {f"{name}_trials_lost": trials[0], f"{name}_trials_asked": trials[1]}
    return found


def read(folder: Path, plan: Mapping[str, Any], cells: Sequence[Cell], keep: bool = False) -> dict[str, Any]:
    """Makes comparison.json from the cells that finished or diverged.

    keep: whether to write comparison.json, outcomes.csv and cells.csv into the folder.
    """
    cells = list(dict.fromkeys(cells))  # none counts twice
    done = [c for c in cells if finished(c.workdir(folder))]
    over = [c for c in cells if ended(c.workdir(folder))]
    rows, budget = outcomes(folder, done), budgets(folder, over)
    missing = [f"{c.column}, seed {c.seed}" for c in cells if c not in over]
    result = {**summarise(rows, budget, plan, missing), "signals": quality(folder, done, rows)}
    if keep:
        for name, table in (("outcomes", rows), ("cells", budget)):
            _write_csv(folder / f"{name}.csv", table)
        write_text(folder / "comparison.json", json.dumps(result, indent=1))
    return result


def summarise(
    rows: Sequence[Mapping[str, Any]],
    budget: Sequence[Mapping[str, Any]],
    plan: Mapping[str, Any],
    missing: Sequence[str] = (),
) -> dict[str, Any]:
    """Makes comparison.json from the raw numbers and the plan alone.

    rows, budget: tables from `outcomes` and `budgets`, or as text from `read_csv`.
    missing: names of cells without a result.

    Holm's correction has two families: planned differences of the primary metric, and those of all others.
    """
    budget = [{key: number(key, value) for key, value in r.items()} for r in budget]
    columns = list(dict.fromkeys(r["arm"] for r in budget))
    lost = [(r["arm"], int(r["seed"])) for r in budget if r.get("diverged") is not None]
    rows = [r for r in rows if (r["arm"], int(r["seed"])) not in lost]
    planned, later = _planned(plan, columns)
    said = notes(plan, budget, missing)
    if len(columns) > 1 and not (planned or later):
        said.append(
            "No difference is tested: name those to test with --planned, before the results are seen."
        )
    metrics = _metrics(rows, plan.get("primary")) or ([plan.get("primary", "iid")] if lost else [])
    asked = [*planned, *(p for p in later if p not in planned)]
    tables = [compare(rows, METRICS[name], columns, _told(rows, name, asked), lost) for name in metrics]
    primary, *others = tables or [{"metric": None, "arms": [], "planned": []}]
    for family in (primary["planned"], [d for table in others for d in table["planned"]]):
        _correct(family, later)
    for entry in primary["arms"]:
        entry["budgets"] = _budgets([r for r in budget if r["arm"] == entry["arm"]])
    return {
        **primary,
        "secondary": others,
        "curves": curves(rows, metrics),
        "notes": [
            *said,
            *lost_notes(lost_by_evaluation(rows)),
            *worst_notes(tables),
            *no_values(rows, metrics),
        ],
        "plan": {k: plan[k] for k in ("arms", "seeds", "reads", "machine", "date", "command")},
    }


def _planned(
    plan: Mapping[str, Any], columns: Sequence[str]
) -> tuple[list[tuple[str, str]], dict[tuple[str, str], str]]:
    """Returns the differences planned before the run, and those planned later with their dates.

    A plan without any has the usual ones (PLANNED) of its columns.
    """
    usual = [(a, b) for a, b in PLANNED if a in columns and b in columns]
    later = {
        tuple(pair): entry["date"] for entry in plan.get("planned_later", ()) for pair in entry["planned"]
    }
    chosen = [tuple(pair) for pair in plan.get("planned") or ()]
    return chosen if chosen or later else usual, later  # later alone: all are of arms that were run elsewhere


def _told(
    rows: Sequence[Mapping[str, Any]], name: str, pairs: Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
    """The differences to compute of a metric: with help, those of an arm that has some."""
    helped = {r["arm"] for r in rows if r["set"] == METRICS[name].set}
    return [pair for pair in pairs if not name.endswith(HELP) or helped & set(pair)]


def _correct(family: Sequence[dict[str, Any]], later: Mapping[tuple[str, str], str]) -> None:
    """Applies Holm's correction: over the first plan alone for its differences, over all for later ones."""
    first = [d for d in family if (d["a"], d["b"]) not in later]
    after = [d for d in family if (d["a"], d["b"]) in later]
    for d in after:
        d["planned_later"] = later[d["a"], d["b"]]
    correct(first)
    correct(family, after)


def _metrics(rows: Sequence[Mapping[str, Any]], primary: str | None) -> list[str]:
    """Names of the metrics that any run has. The primary one comes first, even if no run has it.

    The list is empty where no run has any.
    """
    names = [
        name
        for name, m in METRICS.items()
        if any(np.isfinite(c.value()) or c.tally[0] for c in counts(rows, m).values())
    ]
    if not any(r["weak"] for r in rows):
        names = [name for name in names if METRICS[name].group == "all"]
    return [primary, *(name for name in names if name != primary)] if primary and names else names


def _budgets(own: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Means over an arm's runs, of the budgets that they have."""
    keys = [k for k in dict.fromkeys(k for r in own for k in r) if k not in ("seed", "diverged")]
    return {key: _mean(r[key] for r in own if r.get(key) is not None) for key in keys if not _is_text(key)}


def _is_text(key: str) -> bool:
    """Whether a column of cells.csv holds words."""
    return key in ("arm", "commit", "date", "diverged_before", "explorer_model") or key.endswith("_digest")


def number(key: str, value: Any) -> Any:
    """Parses a value of cells.csv. A value that is no text stays as it is."""
    if not isinstance(value, str) or _is_text(key):
        return value
    return None if value == "" else int(value) if key == "seed" else float(value)


def read_csv(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of outcomes.csv or cells.csv, also compressed (.gz). All values are text."""
    read = gzip.open if path.suffix == ".gz" else open
    with read(path, "rt", encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f))


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    names = dict.fromkeys(name for row in rows for name in row)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def _tools(task: Mapping) -> set[str]:
    """Names of the tools that a task calls. task: a row of tasks.jsonl or held_out.jsonl."""
    return {call["name"] for turn in task["turns"] for call in turn["calls"]}


def _content(task: Mapping) -> str:
    """Returns the content of a task as text, without its name."""
    return json.dumps([task.get("scenario"), task["turns"]], sort_keys=True)


def start_digests(workdir: Path) -> dict[str, str]:
    """Digests of the content of D_0, of each held-out set and of the base policy's files.

    "" for a set that the run does not have, and for the policy where summary.json does not tell.
    """
    initial = [t for t in read_lines(workdir / "tasks.jsonl") if t["lineage"]["kind"] == "initial"]
    path = workdir / "summary.json"
    summary = json.loads(path.read_text()) if path.exists() else {}
    return {
        "initial_digest": _digest(map(_content, initial)),
        **_held_out_digests(workdir),
        "model_digest": summary.get("versions", {}).get("config.model", ""),
    }


def _held_out_digests(workdir: Path) -> dict[str, str]:
    tasks = {t["id"]: _content(t) for t in read_lines(workdir / "held_out.jsonl")}
    sets = {row["set"]: sorted(row["by_task"]) for row in read_lines(workdir / "evaluations.jsonl")}
    return {
        f"{name}_digest": _digest(tasks[i] for i in sets[name]) if name in sets else "" for name in HELD_OUT
    }


def _mean(values: Iterable[Any]) -> float | None:
    found = [float(v) for v in values]
    return statistics.fmean(found) if found else None


def _digest(texts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]
