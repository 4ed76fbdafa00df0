"""Reads the cells of a comparison: every raw number as CSV, and what they say as comparison.json."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coevolve_jax.analysis import stats
from coevolve_jax.comparison.arms import PLANNED
from coevolve_jax.comparison.notes import HELD_OUT, notes
from coevolve_jax.comparison.plan import Cell
from coevolve_jax.comparison.quality import quality

OUTCOMES = ("arm", "seed", "set", "split", "step", "task", "scenario", "calls", "weak", "successes", "trials")
EFFECT = 0.03  # the difference that the sizing asks for


class Metric(NamedTuple):
    """What is compared: success of a held-out set after the last step. group: "weak": the mean over the weak tools
    of the success on the tasks that call them; "others": on those that call none; "all"."""

    name: str
    set: str
    group: str


METRICS = {
    "weak": Metric(
        "macro success on tasks with weak tools, tool-balanced set, last step", "balanced", "weak"
    ),
    "others": Metric(
        "success on tasks without weak tools, tool-balanced set, last step", "balanced", "others"
    ),
    "iid": Metric("success on the i.i.d. held-out set, last step", "iid", "all"),
}


def outcomes(folder: Path, cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """A row for each evaluation of each held-out task: OUTCOMES. calls, weak: names joined by ";"."""
    rows = []
    for cell in cells:
        workdir = cell.workdir(folder)
        tasks = {t["id"]: t for t in _lines(workdir / "held_out.jsonl")}
        called = {i: _tools(t) for i, t in tasks.items()}
        for row in _lines(workdir / "evaluations.jsonl"):
            weak = row.get("weak_tools", {})
            for task, (successes, trials) in row["by_task"].items():
                names = sorted(called[task])
                values = (
                    cell.column, cell.seed, row["set"], row["split"], row["step"], task, row["scenarios"][task],
                    ";".join(names), ";".join(n for n in names if n in weak), successes, trials,
                )  # fmt: skip
                rows.append(dict(zip(OUTCOMES, values, strict=True)))
    return rows


def budgets(folder: Path, cells: Iterable[Cell]) -> list[dict[str, Any]]:
    """A row for each cell: what it has cost and what the learner saw."""
    rows = []
    for cell in cells:
        workdir = cell.workdir(folder)
        summary, ledger = (
            json.loads((workdir / f"{name}.json").read_text()) for name in ("summary", "ledger")
        )
        metrics, tasks = _lines(workdir / "metrics.jsonl"), _lines(workdir / "tasks.jsonl")
        costs = ledger["costs"]
        total = lambda prefix, costs=costs: sum(n for key, n in costs.items() if key.startswith(prefix))
        new = [t for t in tasks if t["lineage"]["kind"] != "initial"]
        first = [t["record"]["first_score"] for t in new if t["record"]["first_score"] is not None]
        testbed = json.loads((workdir / "config.json").read_text()).get("testbed", {})
        weak = set(testbed.get("weak_tools", ()))
        visits = sum(t["record"]["trained"] for t in tasks)
        rows.append(
            {
                "arm": cell.column,
                "seed": cell.seed,
                "rollouts": total("rollouts/"),
                "sampled_tokens": total("sampled_tokens/"),
                "learned_trajectories": costs.get("learned_trajectories", 0),
                "learned_tokens": costs.get("learned_tokens", 0),
                "explorer_steps": total("environment_steps/"),
                "llm_tokens": ledger["llm_tokens"],
                "money": ledger.get("money", 0.0),
                "new_tasks": len(new),
                "new_tasks_with_a_weak_tool": sum(not weak.isdisjoint(_tools(t)) for t in new),
                "new_tasks_never_visited": sum(t["record"]["trained"] == 0 for t in new),
                "new_share_of_visits": sum(t["record"]["trained"] for t in new) / visits if visits else 0.0,
                "calls_per_new_task": _mean(sum(len(turn["calls"]) for turn in t["turns"]) for t in new),
                "live_groups": _mean(
                    row["groups"]["learned_from"] / row["groups"]["rolled_out"] for row in metrics
                ),
                "live_at_first_visit": _mean(0 < score < 1 for score in first),
                "failed_at_first_visit": _mean(1 - score for score in first),
                "initial_digest": _digest(t["id"] for t in tasks if t["lineage"]["kind"] == "initial"),
                **_held_out_digests(workdir),
                "seconds": sum(summary["seconds"].values()),
            }
        )
    return rows


class Counts(NamedTuple):
    """Of one run, by row (weak tool, or one for all) and scenario: successes and trials, [rows, scenarios]."""

    successes: np.ndarray
    trials: np.ndarray

    def value(self, weights: np.ndarray | None = None) -> np.ndarray | float:
        """Mean over the rows of their success rates; NaN where no row has a trial. weights: [B, scenarios], how often
        each scenario counts: [B]."""
        w = np.ones((1, self.trials.shape[1])) if weights is None else weights
        with np.errstate(invalid="ignore", divide="ignore"):
            rates = (w @ self.successes.T) / (w @ self.trials.T)
            known = np.isfinite(rates)
            means = np.where(known, rates, 0).sum(axis=1) / known.sum(axis=1)
        return float(means[0]) if weights is None else means


def counts(
    rows: Iterable[Mapping[str, Any]], metric: Metric, step: int | None = None
) -> dict[tuple[str, int], Counts]:
    """By (arm, seed). step: of the evaluation; None: the last of each run. Tasks without a valid rollout are left out."""
    rows = [r for r in rows if r["set"] == metric.set]
    last: dict[tuple[str, int], int] = {}
    for r in rows:
        key = (r["arm"], int(r["seed"]))
        last[key] = max(last.get(key, 0), int(r["step"]))
    scenarios = {s: i for i, s in enumerate(sorted({r["scenario"] for r in rows}))}
    tools = sorted({tool for r in rows for tool in r["weak"].split(";") if tool})
    names = tools if metric.group == "weak" else [metric.group]
    found: dict[tuple[str, int], Counts] = {}
    for r in rows:
        key = (r["arm"], int(r["seed"]))
        if int(r["step"]) != (last[key] if step is None else step):
            continue
        weak = [tool for tool in r["weak"].split(";") if tool]
        own = weak if metric.group == "weak" else [metric.group] if metric.group == "all" or not weak else []
        c = found.setdefault(key, Counts(*np.zeros((2, len(names), len(scenarios)))))
        for name in own:
            c.successes[names.index(name), scenarios[r["scenario"]]] += int(r["successes"])
            c.trials[names.index(name), scenarios[r["scenario"]]] += int(r["trials"])
    return found


def difference(found: Mapping[tuple[str, int], Counts], a: str, b: str, seed: int = 0) -> dict[str, Any]:
    """a - b, paired by seed: t interval and p value over seeds, and a bootstrap over seeds and scenarios, crossed. Seeds
    in which one of them has no value are left out."""
    known = {key for key, c in found.items() if np.isfinite(c.value())}
    seeds = sorted({s for arm, s in known if arm == a} & {s for arm, s in known if arm == b})
    mine, theirs = ([found[arm, s] for s in seeds] for arm in (a, b))
    ours, other = (np.array([c.value() for c in side]) for side in (mine, theirs))
    d = ours - other
    row: dict[str, Any] = {
        "a": a,
        "b": b,
        "n": len(seeds),
        "difference": float(np.mean(d)) if seeds else None,
    }
    if len(seeds) < 2:
        return row | {"note": "an interval needs 2 seeds"}
    t, rng = stats.over_seeds(d), np.random.default_rng(seed)
    size = 2000
    where = stats.resample(mine[0].trials.shape[1], rng, size)
    by_seed = np.stack([x.value(where) - y.value(where) for x, y in zip(mine, theirs)])  # [S, B]
    drawn = stats.resample(len(seeds), rng, size) / len(seeds)
    sampled = np.einsum("sb,bs->b", by_seed, drawn)
    low, high = np.nanquantile(sampled, [0.025, 0.975])  # a sample of scenarios may hold no such task
    sd = statistics.stdev(d.tolist())
    return row | {
        "low": t.low,
        "high": t.high,
        "boot_low": float(low),
        "boot_high": float(high),
        "p": stats.paired_p(d),
        "p_improvement": stats.probability_of_improvement(ours, other),
        "sd": sd,
        "seeds_for_effect": stats.seeds_needed(sd, EFFECT),
        "by_seed": dict(zip(map(str, seeds), d.tolist())),
    }


def compare(
    rows: Sequence[Mapping[str, Any]], metric: Metric, arms: Sequence[str], planned: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Each arm's mean, and the planned differences with Holm's correction over them."""
    found = counts(rows, metric)
    table = []
    for arm in arms:
        values = {s: float(c.value()) for (name, s), c in sorted(found.items()) if name == arm}
        values = {s: value for s, value in values.items() if np.isfinite(value)}
        entry: dict[str, Any] = {
            "arm": arm,
            "n": len(values),
            "values": {str(s): v for s, v in values.items()},
        }
        if values:
            entry |= {"mean": _mean(values.values()), "iqm": stats.interquartile_mean(list(values.values()))}
        if len(values) > 1:
            e = stats.over_seeds(list(values.values()))
            entry |= {"low": e.low, "high": e.high}
        table.append(entry)
    differences = [difference(found, a, b) for a, b in planned]
    tested = [d for d in differences if "p" in d]
    for d, p in zip(tested, stats.holm([d["p"] for d in tested]), strict=True):
        d["p_holm"] = p
    return {"metric": metric._asdict(), "arms": table, "planned": differences}


def curves(rows: Sequence[Mapping[str, Any]], metrics: Iterable[str]) -> dict[str, Any]:
    """Mean and t interval over seeds at each evaluated step: {metric: {arm: {step, mean, low, high}}}."""
    found: dict[str, Any] = {}
    steps = sorted({int(r["step"]) for r in rows})
    for name in metrics:
        for step in steps:
            values: dict[str, list[float]] = {}
            for (arm, _), c in counts(rows, METRICS[name], step).items():
                if np.isfinite(value := float(c.value())):
                    values.setdefault(arm, []).append(value)
            for arm, points in values.items():
                lone = stats.Estimate(*[points[0]] * 3)
                e = stats.over_seeds(points) if len(points) > 1 else lone
                line = found.setdefault(name, {}).setdefault(
                    arm, {k: [] for k in ("step", "mean", "low", "high")}
                )
                for key, value in zip(line, (step, e.value, e.low, e.high), strict=True):
                    line[key].append(value)
    return found


def no_values(rows: Sequence[Mapping[str, Any]], metrics: Iterable[str]) -> list[str]:
    """A sentence for each metric that is not known of a run: no task of it has a valid rollout."""
    said = []
    for name in metrics:
        lost = [key for key, c in sorted(counts(rows, METRICS[name]).items()) if not np.isfinite(c.value())]
        if lost:
            runs = ", ".join(f"{column}, seed {seed}" for column, seed in lost)
            said.append(f"Without a valid rollout of {METRICS[name].name}, and left out of it: {runs}.")
    return said


def read(folder: Path, plan: Mapping[str, Any], cells: Sequence[Cell], keep: bool = False) -> dict[str, Any]:
    """comparison.json of the cells that are finished. keep: write it, and outcomes.csv and cells.csv."""
    done = [c for c in cells if (c.workdir(folder) / "summary.json").exists()]
    rows, budget = outcomes(folder, done), budgets(folder, done)
    missing = [f"{c.column}, seed {c.seed}" for c in cells if c not in done]
    result = {**summarise(rows, budget, plan, missing), "signals": quality(folder, done, rows)}
    if keep:
        for name, table in (("outcomes", rows), ("cells", budget)):
            _write_csv(folder / f"{name}.csv", table)
        (folder / "comparison.json").write_text(json.dumps(result, indent=1))
    return result


def summarise(
    rows: Sequence[Mapping[str, Any]],
    budget: Sequence[Mapping[str, Any]],
    plan: Mapping[str, Any],
    missing: Sequence[str] = (),
) -> dict[str, Any]:
    """comparison.json from the raw numbers and the plan alone."""
    columns = list(dict.fromkeys(r["arm"] for r in budget))
    chosen = [tuple(p) for p in plan.get("planned") or PLANNED]
    planned = [(a, b) for a, b in chosen if a in columns and b in columns]
    said = notes(plan, budget, missing)
    if len(columns) > 1 and not planned:
        said.append(
            "No difference is tested: name those to test with --planned, before the results are seen."
        )
    metrics = [
        name for name, m in METRICS.items() if any(np.isfinite(c.value()) for c in counts(rows, m).values())
    ]
    if not any(r["weak"] for r in rows):
        metrics = [name for name in metrics if name not in ("weak", "others")]
    tables = [compare(rows, METRICS[name], columns, planned) for name in metrics]
    primary, *others = tables or [{"metric": None, "arms": [], "planned": []}]
    for entry in primary["arms"]:
        own = [r for r in budget if r["arm"] == entry["arm"]]
        entry["budgets"] = {
            key: _mean(r[key] for r in own if r[key] is not None)
            for key in (own[0] if own else {})
            if key not in ("arm", "seed") and not key.endswith("_digest")
        }
    return {
        **primary,
        "secondary": others,
        "curves": curves(rows, metrics),
        "notes": [*said, *no_values(rows, metrics)],
        "plan": {k: plan[k] for k in ("arms", "seeds", "reads", "machine", "date", "command")},
    }


def read_csv(path: Path) -> list[dict[str, Any]]:
    """Rows of outcomes.csv or cells.csv, also of one that gzip made smaller; all values are text."""
    read = gzip.open if path.suffix == ".gz" else open
    with read(path, "rt", encoding="utf-8", newline="") as f:
        return list(csv.DictReader(f))


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as f:
        writer = csv.DictWriter(f, list(rows[0]) if rows else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _tools(task: Mapping) -> set[str]:
    """Names of the tools that a row of tasks.jsonl calls."""
    return {call["name"] for turn in task["turns"] for call in turn["calls"]}


def _held_out_digests(workdir: Path) -> dict[str, str]:
    """Of the content of each held-out set; "" where a run has none of that name."""
    tasks = {
        t["id"]: json.dumps([t["scenario"], t["turns"]], sort_keys=True)
        for t in _lines(workdir / "held_out.jsonl")
    }
    sets = {row["set"]: sorted(row["by_task"]) for row in _lines(workdir / "evaluations.jsonl")}
    return {
        f"{name}_digest": _digest(tasks[i] for i in sets[name]) if name in sets else "" for name in HELD_OUT
    }


def _mean(values: Iterable[Any]) -> float | None:
    found = [float(v) for v in values]
    return statistics.fmean(found) if found else None


def _digest(ids: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(ids).encode()).hexdigest()[:12]
