"""A testbed of the leaderboard: the raw numbers of comparisons' folders and bundles of one plan."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coevolve_jax import config as configs
from coevolve_jax import shipped
from coevolve_jax.comparison import bundle, cell_files, plan_file, results


class Testbed(NamedTuple):
    """The raw numbers of a testbed. rows: of outcomes.csv. costs: of cells.csv. plan: the first source's.

    modules: those of methods from elsewhere that may be imported.
    """

    name: str
    plan: dict[str, Any]
    rows: list[dict[str, Any]]
    costs: list[dict[str, Any]]
    modules: Sequence[str] = ()


def load(name: str, paths: Sequence[Path], modules: Sequence[str] = ()) -> Testbed:
    """Reads comparisons' folders and bundles of one testbed. The plan's "joined" lists all but the first.

    Raises ValueError for a folder that is neither, for one of another plan or split, for a bundle whose
    numbers do not add up, and for a cell that two of them have with different counts.
    """
    first: dict[str, Any] | None = None
    rows: list[dict[str, Any]] = []
    costs: list[dict[str, Any]] = []
    for path in paths:
        theirs, own_rows, own_costs, told = _read(path)
        config = configs.numbers(configs.filled(configs.renamed(theirs["config"])))
        if first is not None and config != first["config"]:
            raise ValueError(
                f"{path} is of another plan than {paths[0]} ({configs.difference(config, first['config'])}): "
                "name one testbed for each plan."
            )
        _check_starts(path, [*costs, *own_costs])
        repeated = _repeated(path, (rows, costs), (own_rows, own_costs))
        new = lambda r, repeated=repeated: _run(r) not in repeated
        come = [{"arm": r["arm"], "seed": int(r["seed"]), "setting": []} for r in filter(new, own_costs)]
        count = {"cells": come, "repeated": len(repeated), "alike": len(repeated)}
        if first is None:
            first = {**theirs, "config": config, "joined": list(theirs.get("joined", ()))}
        else:
            first["joined"] += [*theirs.get("joined", ()), {**told, **count}]
        rows += filter(new, own_rows)
        costs += filter(new, own_costs)
    if first is None or not any(r.get("diverged") is None for r in costs):
        raise ValueError(f"The testbed {name} has no finished run: name a folder or a bundle that has some.")
    return Testbed(name, first, rows, costs, modules)


def _run(row: Mapping[str, Any]) -> tuple[str, int]:
    return row["arm"], int(row["seed"])


Tables = tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]  # of outcomes.csv and cells.csv


def _repeated(path: Path, before: Tables, own: Tables) -> set[tuple[str, int]]:
    """The runs that are in both. Raises ValueError for one whose counts differ, or the step of divergence."""
    both = {_run(r) for r in before[1]} & {_run(r) for r in own[1]}
    there, here = (_evaluated(rows, costs, both) for rows, costs in (before, own))
    for arm, seed in sorted(both):
        if there[arm, seed] != here[arm, seed]:
            raise ValueError(
                f"{path}: {arm}, seed {seed}, has other counts than the cell of that name in a source before "
                "it: leave one of the two out."
            )
    return both


def _evaluated(
    rows: Iterable[Mapping[str, Any]], costs: Iterable[Mapping[str, Any]], runs: set[tuple[str, int]]
) -> dict[tuple[str, int], set]:
    """Returns what was counted in each of these runs."""
    found: dict[tuple[str, int], set] = {_run(r): {r.get("diverged")} for r in costs if _run(r) in runs}
    for r in rows:
        if _run(r) in runs:
            counted = tuple(int(r[key]) for key in ("step", "successes", "trials"))
            found[_run(r)].add((r["set"], r["task"], *counted))
    return found


def _check_starts(path: Path, costs: Iterable[Mapping[str, Any]]) -> None:
    """Raises ValueError unless the runs of a seed began with the same policy, D_0 and held-out tasks."""
    known: dict[tuple[int, str], Any] = {}
    for r in costs:
        for name in (key for key in r if key.endswith("_digest") and r[key]):
            if known.setdefault((int(r["seed"]), name), r[name]) != r[name]:
                what = "another base policy" if name == "model_digest" else "other tasks"
                raise ValueError(
                    f"{path}: {r['arm']}, seed {r['seed']}, has {what} ({name} {r[name]}) than another "
                    "arm of this seed: leave it out."
                )


def _check_whole(path: Path, rows: Iterable[Mapping[str, Any]], costs: Iterable[Mapping[str, Any]]) -> None:
    """Raises ValueError where the last evaluations of outcomes.csv lack trials that cells.csv tells of."""
    last: dict[tuple[str, str, str], list[int]] = {}  # arm, seed, set -> step, trials asked for
    for r in rows:
        if r.get("samples"):
            found = last.setdefault((r["arm"], r["seed"], r["set"]), [-1, 0])
            if int(r["step"]) > found[0]:
                found[:] = int(r["step"]), 0
            found[1] += int(r["samples"]) * (int(r["step"]) == found[0])
    for r in costs:
        for key, told in r.items():
            name = key.removesuffix("_trials_asked")
            there = last.get((r["arm"], r["seed"], name))
            if name != key and told and there and there[1] != int(float(told)):
                raise ValueError(
                    f"{path}: outcomes.csv has {there[1]} trials of {r['arm']}, seed {r['seed']} ({name}), "
                    f"where cells.csv tells of {int(float(told))}: run {shipped.command('compare')} again."
                )


def _read(path: Path) -> tuple[dict[str, Any], list[dict], list[dict], dict[str, str]]:
    """The plan, the two tables and the origin of a source. A bundle is checked as `--join` checks it."""
    if (path / "bundle.json").exists():
        opened = bundle.read(path)
        with tempfile.TemporaryDirectory() as folder:
            bundle.check(opened, Path(folder))
            done = [c for c in opened.cells if cell_files.finished(c.workdir(Path(folder)))]
            rows = results.outcomes(Path(folder), done)
            costs = results.budgets(Path(folder), list(opened.cells))
        told = {"bundle": opened.name, "digest": opened.digest, **opened.told}
        return {**opened.plan, "joined": []}, rows, costs, told
    found = plan_file.read(path)
    tables = [
        next((p for p in (path / n, path / f"{n}.gz") if p.exists()), None)
        for n in ("outcomes.csv", "cells.csv")
    ]
    if found is None or None in tables:
        raise ValueError(
            f"{path} holds neither a comparison's tables nor a bundle: "
            f"run {shipped.command('compare')} there first."
        )
    rows, costs = (results.read_csv(table) for table in tables if table)
    _check_whole(path, rows, costs)
    costs = [{key: results.number(key, value) for key, value in r.items()} for r in costs]
    told = {"bundle": path.name, "digest": ""} | {key: found.get(key, "") for key in ("commit", "date")}
    return found, rows, costs, told
