"""The page's data on one run, as JSON values. Statistics are computed here; viewer/ draws them."""

from __future__ import annotations

import bisect
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from coevolve_jax.analysis import stats
from coevolve_jax.analysis.costs import cost_view
from coevolve_jax.analysis.loading import Run, asked_for, is_query
from coevolve_jax.analysis.origins import by_task, refused
from coevolve_jax.analysis.summary import clock, fork_line, interval, lost_text, p_value
from coevolve_jax.envs import base, family
from coevolve_jax.records.health import RULES
from coevolve_jax.records.logs import flatten
from coevolve_jax.types import GIVEN, Task

LISTED = 160  # characters of a query in lists
UNKNOWN = "known at the end of the run"


def run_view(run: Run, behind: Sequence[Mapping]) -> dict:
    """Returns the page's data, but for full trajectories and the origins of tasks. behind: from `origins`."""
    tasks, evaluation_tasks, share = task_map(run)
    places = by_task([*run.tasks, *run.held_out], behind)
    for task in (*tasks, *evaluation_tasks):
        place = task["row"] = places.get(task["id"])
        task["asked"] = len(behind[place]["llm_calls"]) if place is not None else 0
    result = stats.held_out(run.summary)
    return {
        "kind": "run",
        "name": run.name,
        "headline": headline(run, result),
        "metrics": columns(run.rows),
        "alerts": alerts(run),
        "signal_kinds": sorted({row["kind"] for row in run.fired}),
        "held_out": held_out(run, result),
        "evaluations": evaluations(run.evaluations),
        "leak_thresholds": leak_thresholds(run.config.get("data", {})),
        "tasks": tasks,
        "evaluation_tasks": evaluation_tasks,
        "refused": refused(behind, places),
        "costs": cost_view(run.costs, run.config),
        "map_share": _rounded(share),
        "fate": run.fate,
        "seconds": sorted(run.seconds.items(), key=lambda item: -item[1]),
        "trajectories": trajectories(run),
    }


def headline(run: Run, result: stats.HeldOut | None) -> dict:
    """Returns the answers for a newcomer: a sentence, facts, and four cards (title, value, note)."""
    cards = [
        ("Held-out success", *_success_card(run.summary, result)),
        ("Gain", *_gain_card(run.summary, result)),
        ("Training set", *_growth_card(run.tasks)),
        ("Time", *_time_card(run)),
    ]
    return {"lead": _lead(run, result), "facts": " · ".join(_facts(run)), "cards": cards}


def _lead(run: Run, result: stats.HeldOut | None) -> str:
    summary, wanted = run.summary, run.config.get("steps")
    if result:
        kind = " ".join(filter(None, ("held-out", summary.get("held_out_split"))))
        tasks = summary.get("held_out_tasks", result.paired.tasks)
        return (
            f"Success on {tasks} {kind} tasks, never trained on, went from {result.before.value:.1%} to "
            f"{result.after.value:.1%} in {summary['steps']} GRPO steps."
        )
    if run.failure and not summary:
        return f"The run diverged at step {run.failure.get('step')}. {run.failure.get('why')}"
    lead = "The run is not finished: what is here is what its files hold so far"
    return lead + (f" ({len(run.rows)} of {wanted} steps)." if wanted else ".")


def _facts(run: Run) -> list[str]:
    summary, config = run.summary, run.config
    return [
        f"strategy {summary.get('strategy') or config.get('strategy', {}).get('name', 'unknown')}",
        f"seed {summary.get('seed', config.get('seed', 'unknown'))}",
        f"{summary.get('steps', len(run.rows))} steps",
        *([fork_line(run.forked)] if run.forked else []),
        f"files of {run.written:%Y-%m-%d %H:%M}",
        f"config {summary.get('config_digest', 'digest not recorded yet')}",
        *(f"{name} {version}" for name, version in summary.get("versions", {}).items()),
    ]


def _success_card(summary: Mapping, result: stats.HeldOut | None) -> tuple[str, str]:
    lost = lost_sides(summary)
    if not result:
        return "—", "; ".join(lost) or UNKNOWN
    before, after = result.before, result.after
    spans = [f"{e.low:.0%} to {e.high:.0%}" for e in (before, after)]
    note = "; ".join([f"95% intervals {spans[0]} and {spans[1]}", *lost])
    return f"{before.value:.0%} → {after.value:.0%}", note


def _gain_card(summary: Mapping, result: stats.HeldOut | None) -> tuple[str, str]:
    if not result:
        return "—", UNKNOWN
    paired = result.paired
    span, p = interval(paired.difference, "{:+.1f}", 100), p_value(paired.p)
    note = f"{span}; {p}, paired {stats.units(paired)}"
    if worst := stats.held_out_at_worst(summary):
        moved = worst.paired.difference.value
        note += f"; {100 * moved:+.1f} points if lost trials are failures"
    if caveat := stats.caveat(paired):
        note += f". {caveat}"
    return f"{100 * paired.difference.value:+.1f} points", note


def _growth_card(tasks: Sequence[Mapping]) -> tuple[str, str]:
    origins = Counter(asked_for(task) for task in tasks)
    new = {kind: n for kind, n in origins.most_common() if kind not in GIVEN}
    asked = f"{origins['query']} held-out queries without answers, " if origins["query"] else ""
    note = f"{origins['initial']} initial tasks, {asked}{sum(new.values())} from evolution"
    grown = ", ".join(f"{n} {kind}" for kind, n in new.items())
    return f"{origins['initial']} → {len(tasks)} tasks", note + (f": {grown}" if grown else "")


def _time_card(run: Run) -> tuple[str, str]:
    total = sum(run.seconds.values())
    own = run.seconds.get("evolution", 0) / total if total else 0
    share = run.summary.get("evolution_share", own)
    return clock(total), f"{share:.1%} of it on evolution"


def lost_sides(summary: Mapping) -> list[str]:
    """Says how many trials the held-out evaluations before and after training lost, if any."""
    sides = (summary.get("held_out") or {}).items()
    return [
        f"{n} lost {when} {lost_text(row)}" for when, row in sides if row and (n := stats.lost_trials(row)[0])
    ]


def columns(rows: Sequence[Mapping]) -> dict[str, list]:
    """Turns metrics.jsonl into columns {"step": [T], "seconds/update": [T], ...}. None: no number."""
    flat = [dict(flatten(row)) for row in rows]
    names = sorted({name for row in flat for name in row})
    return {
        "step": [row["step"] for row in rows],
        **{name: [_rounded(row.get(name)) for row in flat] for name in names},
    }


def alerts(run: Run) -> list[dict]:
    """Lists the measures that passed a threshold of config.health, the longest-lasting first.

    Each is {"name", "meaning", "steps", "longest", "last", "lasting"}. "steps" is the number of steps,
    "longest" the most in a row, "last" the last step. "lasting": whether "longest" reaches
    config.health.patience.
    """
    steps = defaultdict(list)
    for place, row in enumerate(run.rows):
        for name in row.get("alerts") or ():
            steps[name].append(place)
    patience = run.config.get("health", {}).get("patience", 1)
    found = []
    for name, places in steps.items():
        in_a_row = Counter(place - i for i, place in enumerate(places))
        found.append(
            {
                "name": name,
                "meaning": RULES[name][2] if name in RULES else "",
                "steps": len(places),
                "longest": max(in_a_row.values()),
                "last": run.rows[places[-1]]["step"],
                "lasting": max(in_a_row.values()) >= patience,
            }
        )
    return sorted(found, key=lambda alert: -alert["longest"])


def held_out(run: Run, result: stats.HeldOut | None) -> dict | None:
    """Success before and after with 95% intervals, in all and by number of reference calls.

    None where it was not measured.
    """
    if result is None:
        return None
    details = run.summary.get("held_out") or {}
    sides = {when: details.get(when) or {} for when in ("before", "after")}
    calls = {task["id"]: sum(len(turn["calls"]) for turn in task["turns"]) for task in run.held_out}
    numbers = sorted({calls[i] for side in sides.values() for i in side.get("by_task", ()) if i in calls})
    by_calls = {
        when: [_success(side, lambda task, n=n: calls.get(task) == n) for n in numbers]
        for when, side in sides.items()
    }
    return {
        "before": _estimate(result.before),
        "after": _estimate(result.after),
        "calls": numbers,
        "by_calls": by_calls,
    }


def evaluations(rows: Iterable[Mapping]) -> list[dict]:
    """Returns a curve {"name", "points"} of evaluations.jsonl for each set and split.

    A point is {"step", "value", "low", "high"} with a 95% interval that resamples scenarios. Where trials
    were lost it also has "lost" and "asked". If more than stats.LOST were, a second curve counts them as
    failures. A third shows weak tools, where the evaluation has them.
    """
    curves = defaultdict(dict)
    for row in rows:
        name = ", ".join(filter(None, (row["set"], row.get("split"))))
        bare = {"value": _rounded(row["success"]), "low": None, "high": None}
        lost, asked = stats.lost_trials(row)
        told = {"lost": lost, "asked": asked} if lost else {}
        if row["success"] is not None or lost:
            curves[name][row["step"]] = {"step": row["step"], **(_success(row) or bare), **told}
        if lost > stats.LOST * asked:
            worst = _success(stats.lost_as_failures(row)) or bare
            curves[f"{name}: lost trials as failures"][row["step"]] = {"step": row["step"], **worst}
        weak = row.get("macro_weak", row.get("weak_success"))
        if weak is not None:
            curves[f"{name}: weak tools"][row["step"]] = {
                **bare,
                "step": row["step"],
                "value": _rounded(weak),
            }
    return [
        {"name": name, "points": [points[step] for step in sorted(points)]} for name, points in curves.items()
    ]


def _success(row: Mapping, chosen: Callable[[str], bool] = lambda task: True) -> dict | None:
    """Success of an evaluation on the tasks chosen by id, with its interval. None: no trial of them."""
    counts = {task: c for task, c in (row.get("by_task") or {}).items() if c[1] and chosen(task)}
    if not counts:
        return None
    successes, trials = zip(*counts.values())
    where = row.get("scenarios") or {}
    return _estimate(stats.share(successes, trials, [where.get(task, task) for task in counts]))


def task_map(run: Run) -> tuple[list[dict], list[dict], float]:
    """Returns rows of D_t and of the evaluation tasks, for lists, lineage and map.

    The last result is the share of their squared distances that the map shows (0 to 1).
    """
    from coevolve_jax.analysis.task_map import coordinates  # scipy's sparse matrices: not at a run's start

    # A query that is learned from lies in both files: it is one row, with its record and its reference calls.
    held_out, trained = {task["id"]: task for task in run.held_out}, {task["id"] for task in run.tasks}
    rows = [{**task, **held_out.get(task["id"], {})} for task in run.tasks]
    rows += [task for task in run.held_out if task["id"] not in trained]
    features = _features(run.config)
    points, share = coordinates([features(Task.from_json(_known(row))) for row in rows])
    fired = defaultdict(list)
    for signal in run.fired:
        fired[signal["kind"], signal["task_id"]].append(signal)
    made = {p["task"]: row for row in run.explorations for p in row["proposals"] if p["task"]}
    thresholds = leak_thresholds(run.config.get("data", {}))
    result = [
        {**_task(row, point, fired, made.get(row["id"])), "leak": _leak(row["lineage"], thresholds)}
        for row, point in zip(rows, points.tolist())
    ]
    by_task = {when: _results(run.summary, when) for when in ("before", "after")}
    for task in result:
        if task["id"] in held_out:
            task["results"] = {when: counts.get(task["id"]) for when, counts in by_task.items()}
    for task in result[len(run.tasks) :]:
        task["origin"] = "evaluation"
    for task, step in zip(result, _joined(run)):
        task["joined"] = step
    return result[: len(run.tasks)], result[len(run.tasks) :], share


def _results(summary: Mapping, when: str) -> dict[str, list]:
    """Returns [successes, trials] by id of the tasks of all held-out sets, before or after training."""
    sides = [(summary.get(name) or {}).get(when) or {} for name in ("held_out", "balanced", "queries")]
    return {task: counts for side in sides for task, counts in (side.get("by_task") or {}).items()}


def _joined(run: Run) -> list[int | None]:
    """The step after which each task joined D_t; None for those of D_0.

    D_t only grows, and tasks.jsonl is in the order of its growth.
    """
    sizes = [row["tasks"] for row in run.rows]
    steps = [*(row["step"] for row in run.rows), None]
    joined = (steps[bisect.bisect_right(sizes, place)] for place in range(len(run.tasks)))
    return [
        None if (born := task["lineage"])["kind"] in GIVEN else born["step"] if step is None else step
        for task, step in zip(run.tasks, joined)
    ]


def leak_thresholds(data: Mapping) -> dict[str, float]:
    """Returns the cosine from which each measure of leak control refuses, without measures that are off."""
    keys = {
        "features": "leak_threshold",
        "arguments": "leak_call_threshold",
        "ngrams": "leak_query_threshold",
        "embedding": "leak_embedding_threshold",
    }
    return {measure: data[key] for measure, key in keys.items() if data.get(key)}


def _leak(born: Mapping, thresholds: Mapping[str, float]) -> float | None:
    """Returns how near a task came to a refusal as a leak: its cosine over the threshold of its measure."""
    threshold = thresholds.get(born.get("measure", "features"))
    return _rounded(born["similarity"] / threshold) if threshold else None


def _features(config: Mapping):
    """Features that the run's leak control compares. The default, if the family cannot be imported here."""
    try:
        return family.function(family.module(config["environment"]["name"]), "features")
    except (KeyError, ValueError):
        return base.features


def _known(row: Mapping) -> dict:
    return {key: value for key, value in row.items() if key != "record"}


def _task(row: Mapping, point: Sequence[float], fired: Mapping, explored: Mapping | None) -> dict:
    """A task's row of the page. explored: the row of explorations.jsonl that the task was made from."""
    born, record = row["lineage"], row.get("record") or {}
    told = not is_query(row)  # the scores of a query are none: its answer is not told
    signals = [s for s in fired.get((born["signal"], born["parent"]), ()) if s["step"] <= born["step"]]
    # The signal that the reflection names; else the last of its kind on the parent before the task's birth.
    named = [s for s in signals if (born["context"] or "").startswith(_signal_name(s))] or signals
    return {
        "id": row["id"],
        "origin": asked_for(row),
        "step": born["step"],
        "description": row.get("description", ""),
        "turns": [
            {"query": turn["query"], "calls": [call_text(call) for call in turn["calls"]]}
            for turn in row["turns"]
        ],
        "lineage": born,
        "fired": named[-1] if named else None,
        "reflection": explored and explored["context"],
        "explored": explored and [_explored(explored["triplets"][i]) for i in born["triplets"]],
        "visits": record.get("visits", record.get("trained")),
        "first_score": _rounded(record.get("first_score")) if told else None,
        "last_score": _rounded(record.get("last_score")) if told else None,
        "x": _rounded(point[0]),
        "y": _rounded(point[1]),
    }


def _explored(triplet: Mapping) -> dict:
    return {**triplet, "call": call_text(triplet["call"])}


def _signal_name(signal: Mapping) -> str:
    """The start of the id of a context that reflects on the signal (explorers.evidence.context_id)."""
    return "/".join(str(signal[name]) for name in ("kind", "step", "task_id", "rollout_index"))


def trajectories(run: Run) -> dict[str, list]:
    """Columns for lists and filters, with one entry per logged trajectory.

    Of a held-out query, success and reward are None: its answer is not told.
    """
    fired = defaultdict(list)
    for s in run.fired:
        kind = f"{s['kind']}: {s['pattern']}" if s.get("pattern") else s["kind"]
        fired[s["step"], s["task_id"], s["rollout_index"]].append(kind)
    index = defaultdict(list)
    for step, rows in run.trajectories:
        for row in rows:
            index["step"].append(step)
            index["task"].append(row["task_id"])
            index["rollout"].append(row["rollout_index"])
            told = row["task_id"] not in run.queries
            index["success"].append(bool(row["success"]) if told else None)
            index["valid"].append(bool(row["valid"]))
            index["reward"].append(_rounded(row["reward"]) if told else None)
            index["stop"].append(row["stop"])
            index["tokens"].append(row["policy_tokens"])
            index["calls"].append(len(row["steps"]))
            index["signals"].append(fired.get((step, row["task_id"], row["rollout_index"]), []))
            index["query"].append(row["queries"][0][:LISTED] if row["queries"] else "")
    return index


def call_text(call: Mapping) -> str:
    arguments = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in call["arguments"].items())
    return f"{call['name']}({arguments})"


def _estimate(estimate: stats.Estimate) -> dict[str, Any]:
    return {name: _rounded(getattr(estimate, name)) for name in ("value", "low", "high")}


def _rounded(value: float | None) -> float | None:
    """Rounds to 5 significant digits; a chart shows no more. None where it is no finite number."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() else float(f"{value:.5g}")
