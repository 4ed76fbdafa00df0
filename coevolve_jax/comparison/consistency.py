"""Whether the files of a finished run agree with each other: what a bundle must pass before it is counted."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.analysis.stats import HELP, SETS
from coevolve_jax.comparison.cell_files import RAN, diverged, ran
from coevolve_jax.records.costs import ROLLOUTS, total, under
from coevolve_jax.records.files import read_lines

# Raised by the reading of a file whose content has another shape than the one that is expected.
MISSHAPEN = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
LAST = "last_rollouts"
POLICY = f"{ROLLOUTS}policy"
# Of the budget: what the last step may take beside its batch. It is meant for the probes of one evolution;
# those of random_probe took 4 to 5% on the first leaderboard.
SPARE = 0.1


def check_run(workdir: Path) -> None:
    """Checks a finished run's counts, steps, tasks and digests against each other.

    Raises ValueError, as a part of a sentence, for the first that does not fit. A file of another shape
    raises one of MISSHAPEN.
    """
    values = lambda name: json.loads((workdir / f"{name}.json").read_text(encoding="utf-8"))
    lines = lambda name: list(read_lines(workdir / f"{name}.jsonl"))
    config, summary, ledger = values("config"), values("summary"), values("ledger")
    held_out = {task["id"]: task for task in lines("held_out")}
    _fits("config_digest of summary.json", summary["config_digest"], configs.digest(ConfigDict(config)))
    _fits("seed of summary.json", summary["seed"], config["seed"])
    metrics = lines("metrics")
    _fits("steps in metrics.jsonl", [row["step"] for row in metrics], list(range(summary["steps"])))
    _fits("tasks.final of summary.json", summary["tasks"]["final"], len(lines("tasks")))
    for name, cost in (*ledger["costs"].items(), *summary["seconds"].items()):
        if not (isinstance(cost, int | float) and math.isfinite(cost) and cost >= 0):
            raise ValueError(f"the cost {name} is {cost!r}")
    _check_end(config, summary["steps"], ledger["costs"])
    _check_rollouts(config, [row["groups"]["rolled_out"] for row in metrics], ledger["costs"])
    _check_evaluations(lines("evaluations"), config, summary, held_out)


def _check_end(config: Mapping[str, Any], steps: int, costs: Mapping[str, float]) -> None:
    """Checks that training ended where the config says: by its steps, or by its budget of rollouts.

    A run ends after the step that spends its budget, so it is over it by less than one step.
    """
    budget = config.get("budget", {}).get("rollouts", 0)
    spent = total(costs, ROLLOUTS)
    batch = config["rollout"]["tasks_per_step"] * config["rollout"]["group_size"]
    most = (1 + SPARE) * budget + batch
    if budget and spent > most:
        raise ValueError(f"it spent {spent} rollouts of a budget of {budget}, and {most:.0f} are the most")
    if steps != config["steps"] and not 0 < budget <= spent:
        raise ValueError(
            f"it ended after {steps} of {config['steps']} steps with {spent} of {budget} rollouts spent"
        )


def _check_rollouts(config: Mapping[str, Any], groups: Sequence[int], costs: Mapping[str, float]) -> None:
    """Checks the ledger's rollouts against the groups of each step, as metrics.jsonl counts them.

    Our methods return all groups that they roll out, of rollout.group_size each. A method from elsewhere may
    return fewer, or roll others out: then a group stands for one rollout or more.
    """
    if not all(type(count) is int and count > 0 for count in groups):
        raise ValueError("groups.rolled_out in metrics.jsonl is no whole number above 0 in each step")
    if "." not in config["strategy"]["name"]:
        rolled = sum(groups) * config["rollout"]["group_size"]
        _fits(f"{POLICY} in ledger.json", costs.get(POLICY, 0), rolled)
    elif (spent := under(costs, ROLLOUTS).total()) < sum(groups):
        raise ValueError(f"{spent} rollouts in ledger.json, and {sum(groups)} groups in metrics.jsonl")


def check_tries(workdir: Path) -> None:
    """Checks what a run, finished or diverged, tells of its origin and of the steps where it diverged.

    Raises as `check_run`.
    """
    entries = ran(workdir)
    for entry in entries:
        for key, value in entry.items():
            if key != "diverged" and not isinstance(value, str):
                raise ValueError(f"{key} in {RAN} is {value!r}, which is no text")
    tries = [entry["diverged"] for entry in entries if "diverged" in entry]
    for failure in [*tries, *filter(None, [diverged(workdir)])]:
        if type(failure["step"]) is not int:
            raise ValueError(f"it diverged at step {failure['step']!r}, which is no whole number")


def _check_evaluations(
    rows: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    held_out: Mapping[str, Mapping[str, Any]],
) -> None:
    c, steps = config["evaluation"], summary["steps"]
    weak = sorted(config.get("testbed", {}).get("weak_tools", ()))
    sets: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        where = f"of set {row['set']} after step {row['step']}"
        sets.setdefault(row["set"], []).append(row)
        asked = c["num_rollouts"]
        if row["step"] == steps:
            asked = c.get(LAST) or asked
        _fits(f"samples {where}", row["samples"], asked)
        _fits(f"split {where}", row["split"], config["environment"]["eval_split"])
        _fits(f"weak tools {where}", sorted(row.get("weak_tools", {})), weak)
        for task, (successes, trials) in row["by_task"].items():
            whole = type(successes) is int and type(trials) is int
            if not (whole and 0 <= successes <= trials <= asked):
                raise ValueError(
                    f"{task} {where} has {successes!r} successes in {trials!r} of {asked} trials"
                )
            _fits(f"scenario of {task} {where}", row["scenarios"][task], held_out[task]["lineage"]["parent"])
        successes, trials = (sum(counts[i] for counts in row["by_task"].values()) for i in (0, 1))
        _fits(f"invalid rollouts {where}", row["invalid"], asked * len(row["by_task"]) - trials)
        if row["success"] != (share := successes / trials if trials else None) and not math.isclose(
            row["success"] or 0.0, share or 0.0, rel_tol=1e-9
        ):
            raise ValueError(f"success {where} is {row['success']}, and its tasks give {share}")
    kinds = {row["lineage"]["kind"] for row in held_out.values()}
    there = [name for name, kind in SETS.items() if kind in kinds]
    _fits("held-out sets of its evaluations", [name for name in SETS if name in sets], there)
    for name, own in sets.items():
        plain = name.removesuffix(HELP)
        ids = sorted(task for task, row in held_out.items() if row["lineage"]["kind"] == SETS[plain])
        found = [row["step"] for row in own]
        if name != plain:  # a method has no memory before training
            _fits(f"steps of set {name}", found, [row["step"] for row in sets[plain][1:]])
        elif found != sorted(set(found)) or (found[0], found[-1]) != (0, steps):
            raise ValueError(f"the set {name} was evaluated after the steps {found}, of {steps}")
        for row in own:
            _fits(f"tasks of set {name} after step {row['step']}", sorted(row["by_task"]), ids)
    for when, place in (("before", 0), ("after", -1)):
        for name in filter(sets.__contains__, SETS):
            row = summary["held_out" if name == "iid" else name][when]
            _fits(f"set {name} {when} training, in summary.json", row, sets[name][place])
    helped = {name: own[-1] for name, own in sets.items() if name.endswith(HELP)}
    _fits("sets with help, in summary.json", summary.get("help", {}), helped)


def _fits(what: str, found: Any, wanted: Any) -> None:
    if found != wanted:
        shown = [
            text if len(text := json.dumps(value)) < 80 else f"{text[:80]}..." for value in (found, wanted)
        ]
        raise ValueError(f"{what}: {shown[0]}, where its other files have {shown[1]}")
