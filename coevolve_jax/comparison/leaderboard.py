"""The leaderboard: methods against free exploration on a testbed, from comparisons' folders or bundles alone.

Two families of tests are planned. First every method against `random`: Dunnett's intervals and those of sign
flips, of which the wider counts. Then the methods that pass against `random_probe`, by Holm. Controls have
plain intervals, and the oracle is a reference without a rank. leaderboard_page.py writes the page.
"""

from __future__ import annotations

import csv
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coevolve_jax import config as configs
from coevolve_jax import names, shipped
from coevolve_jax.analysis import stats
from coevolve_jax.comparison import bundle, many_to_one, plan, results
from coevolve_jax.comparison.arms import arm
from coevolve_jax.comparison.differences import METRICS, Counts, counts

RANDOM, PROBE, ORACLE = "random", "random_probe", "oracle"
CONTROLS = (
    "static", "placebo", RANDOM, PROBE, "even", "prioritised", "weakest", "random_dev", "blame", ORACLE,
)  # fmt: skip
RESAMPLES = 2000
COLUMNS = (
    "testbed", "base", "split", "method", "paper", "fidelity", "seeds", "metric", "mean", "sd",
    "diff_random", "lo", "hi", "p", "diff_probe", "probe_lo", "probe_hi", "probe_p", "rank_lo", "rank_hi",
    "p_best", "letters", "headroom_share", "others", "iid", "weak_tasks", "failed_first_sight", "new_tasks",
    "rollouts_policy", "rollouts_probe", "rollouts_branch", "gradients", "updates", "explorer_steps",
    "llm_tokens", "seconds", "commit", "date",
)  # fmt: skip
COSTS = {  # column -> column of cells.csv
    "weak_tasks": "new_tasks_with_a_weak_tool", "failed_first_sight": "failed_at_first_visit",
    "new_tasks": "new_tasks", "rollouts_policy": "rollouts_policy", "rollouts_probe": "rollouts_probe",
    "rollouts_branch": "rollouts_branch", "gradients": "gradients", "updates": "steps",
    "explorer_steps": "explorer_steps", "llm_tokens": "llm_tokens", "seconds": "seconds",
}  # fmt: skip


class System(NamedTuple):
    """A system of the literature. verdict: "in", "part" or "out". arm: its row's name; paper: arXiv id."""

    name: str
    what: str
    verdict: str
    why: str
    arm: str
    paper: str


class Testbed(NamedTuple):
    """The raw numbers of a testbed. rows: of outcomes.csv. costs: of cells.csv. plan: the first source's."""

    name: str
    plan: dict[str, Any]
    rows: list[dict[str, Any]]
    costs: list[dict[str, Any]]


class Board(NamedTuple):
    """A testbed's results. rows: by COLUMNS, best first. by_seed: arm -> {seed: value of the first metric}.

    sd: the error pooled over arms, with df degrees of freedom. said: caveats, as sentences.
    """

    testbed: Testbed
    rows: list[dict[str, Any]]
    by_seed: dict[str, dict[int, float]]
    sd: float
    df: int
    said: list[str]


def systems() -> list[System]:
    """All systems of the list, in its order (systems.csv)."""
    text = resources.files("coevolve_jax.comparison").joinpath("systems.csv").read_text(encoding="utf-8")
    return [System(**row) for row in csv.DictReader(text.splitlines())]


def load(name: str, paths: Sequence[Path]) -> Testbed:
    """Reads comparisons' folders and bundles of one testbed. A cell that several have is the first's.

    Raises ValueError for a folder that is neither, and for one of another plan or split.
    """
    first: dict[str, Any] | None = None
    rows: list[dict[str, Any]] = []
    costs: list[dict[str, Any]] = []
    for path in paths:
        theirs, own_rows, own_costs = _read(path)
        config = configs.numbers(configs.filled(configs.renamed(theirs["config"])))
        if first is None:
            first = {**theirs, "config": config, "joined": list(theirs.get("joined", ()))}
        elif config != first["config"]:
            raise ValueError(
                f"{path} is of another plan than {paths[0]} ({configs.difference(config, first['config'])}): "
                "name one testbed for each plan."
            )
        else:
            first["joined"] += theirs.get("joined", ())
        known = {(r["arm"], int(r["seed"])) for r in costs}
        new = lambda r, known=known: (r["arm"], int(r["seed"])) not in known
        rows += filter(new, own_rows)
        costs += filter(new, own_costs)
    if first is None or not any(r.get("diverged") is None for r in costs):
        raise ValueError(f"The testbed {name} has no finished run: name a folder or a bundle that has some.")
    return Testbed(name, first, rows, costs)


def _read(path: Path) -> tuple[dict[str, Any], list[dict], list[dict]]:
    if (path / "bundle.json").exists():
        opened = bundle.read(path)
        with tempfile.TemporaryDirectory() as folder:
            bundle.expand(opened, Path(folder))
            done = [c for c in opened.cells if plan.finished(c.workdir(Path(folder)))]
            rows = results.outcomes(Path(folder), done)
            return {**opened.plan, "joined": []}, rows, results.budgets(Path(folder), list(opened.cells))
    found = plan.read(path)
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
    return found, rows, [{key: results.number(key, value) for key, value in r.items()} for r in costs]


def board(testbed: Testbed) -> Board:
    """Computes the rows of a testbed. Raises ValueError where `random` has no run, the control of all."""
    metric = METRICS[primary(testbed)]
    found = counts(testbed.rows, metric)
    by_seed = _by_seed(found)
    if RANDOM not in by_seed:
        raise ValueError(
            f"{testbed.name} has no finished run of {RANDOM}, which all are compared with: run it."
        )
    fitted = many_to_one.fit(by_seed)
    means = dict(zip(fitted.arms, fitted.means.tolist(), strict=True))
    methods = [a for a in by_seed if a.partition("+")[0] not in CONTROLS]
    first = against_random(fitted, by_seed, methods)
    others = [a for a in by_seed if a not in methods and a != RANDOM]
    first |= {c.a: c for c in many_to_one.pooled(fitted, others, RANDOM)}
    second = against_probe(fitted, [a for a in methods if (first[a].low or 0) > 0])
    order = sorted(means, key=lambda a: -means[a])
    ranked = [a for a in order if a != ORACLE]
    ranks = rank_intervals({key: c for key, c in found.items() if key[0] in ranked})
    letters = many_to_one.letters(ranked, many_to_one.apart(fitted, ranked))
    secondary = {name: _means(testbed.rows, METRICS[name]) for name in ("others", "iid")}
    gap = means[ORACLE] - means[RANDOM] if ORACLE in means else 0.0
    papers = {s.arm: s.paper for s in systems() if s.arm}
    config, rows = testbed.plan["config"], []
    for a in order:
        own = list(by_seed[a].values())
        versus = first.get(a)
        row: dict[str, Any] = {
            "testbed": testbed.name,
            "base": Path(config["model"]).name,
            "split": testbed.plan["reads"],
            "method": a,
            "paper": papers.get(a.partition("+")[0], ""),
            "fidelity": fidelity(a)[0],
            "seeds": len(own),
            "metric": primary(testbed),
            "mean": means[a],
            "sd": statistics.stdev(own) if own[1:] else None,
            "letters": letters.get(a),
            "headroom_share": (means[a] - means[RANDOM]) / gap if gap > 0 else None,
            **{name: values.get(a) for name, values in secondary.items()},
            **_costs(a, testbed.costs),
            **_origin(a, testbed.plan),
        }
        if versus:
            row |= {"diff_random": versus.difference, "lo": versus.low, "hi": versus.high, "p": versus.p}
        if probe := second.get(a):
            row |= {
                "diff_probe": probe.difference,
                "probe_lo": probe.low,
                "probe_hi": probe.high,
                "probe_p": probe.p,
            }
        if a in ranks:
            row |= dict(zip(("rank_lo", "rank_hi", "p_best"), ranks[a], strict=True))
        rows.append({column: row.get(column) for column in COLUMNS})
    return Board(testbed, rows, by_seed, fitted.sd, fitted.df, _said(testbed, by_seed))


def primary(testbed: Testbed) -> str:
    """Name of the metric that ranks: the plan's. Plans before it had one: "weak" where tools are known."""
    return testbed.plan.get("primary") or ("weak" if any(r["weak"] for r in testbed.rows) else "iid")


def against_random(
    fitted: many_to_one.Fit, by_seed: many_to_one.Values, methods: Sequence[str]
) -> dict[str, many_to_one.Contrast]:
    """The first family: methods against free exploration, by the wider of two simultaneous intervals."""
    pooled = many_to_one.dunnett(fitted, methods, RANDOM)
    flipped = many_to_one.max_t(by_seed, methods, RANDOM)
    return {a.a: many_to_one.wider(a, b) for a, b in zip(pooled, flipped, strict=True)}


def against_probe(fitted: many_to_one.Fit, passed: Sequence[str]) -> dict[str, many_to_one.Contrast]:
    """The second family, of methods that passed the first: against free exploration with a probe, by Holm."""
    if PROBE not in fitted.arms:
        return {}
    found = many_to_one.pooled(fitted, passed, PROBE)
    adjusted = stats.holm([c.p for c in found])
    return {c.a: c._replace(p=p) for c, p in zip(found, adjusted, strict=True)}


def rank_intervals(
    found: Mapping[tuple[str, int], Counts], seed: int = 0
) -> dict[str, tuple[int, int, float]]:
    """The 95% rank interval and P(best) of each arm, by a bootstrap that crosses seeds and scenarios.

    Samples without any value of an arm are left out of its interval; it cannot be the best in them. Equal
    bests share the point.
    """
    there = np.any([c.there for c in found.values()], axis=0)
    rng = np.random.default_rng(seed)
    where = stats.resample(int(there.sum()), rng, RESAMPLES)
    own: dict[str, dict[int, np.ndarray]] = {}
    for (a, s), c in found.items():
        own.setdefault(a, {})[s] = np.asarray(c.of_scenarios(there).value(where))
    seeds = {s for values in own.values() for s in values}
    means = many_to_one.bootstrap_means(own, stats.resample(len(seeds), rng, RESAMPLES))
    ranks = many_to_one.ranks(np.nan_to_num(means, nan=-1.0))
    best = (ranks == 1) / (ranks == 1).sum(axis=1, keepdims=True)
    result = {}
    for i, a in enumerate(own):
        mine = ranks[np.isfinite(means[:, i]), i]
        low, high = np.quantile(mine, [0.025, 0.975], method="inverted_cdf")
        result[a] = (int(low), int(high), float(best[:, i].mean()))
    return result


def fidelity(column: str) -> tuple[str, str]:
    """FIDELITY of a strategy's module: its mark and its sentence. ("control", "") for controls.

    The module is a pair, or a text that begins with the mark. ("?", why) where it says nothing or is not
    installed here, as a method that joined by a bundle.
    """
    name = column.partition("+")[0]
    if name in CONTROLS:
        return "control", ""
    strategy = arm(name).changes["strategy.name"]
    try:
        told = getattr(names.module("strategies", strategy, "strategy.name"), "FIDELITY", "")
    except ValueError:
        return "?", "its module is not installed here"
    if not told:
        return "?", "its module does not say"
    mark, sentence = told.partition(" ")[::2] if isinstance(told, str) else (str(told[0]), str(told[-1]))
    return mark.rstrip(":.,"), sentence.strip(" :")


def _by_seed(found: Mapping[tuple[str, int], Counts]) -> dict[str, dict[int, float]]:
    values: dict[str, dict[int, float]] = {}
    for (a, s), c in sorted(found.items(), key=lambda item: item[0][1]):
        if np.isfinite(value := float(c.value())):
            values.setdefault(a, {})[s] = value
    return values


def _means(rows: Sequence[Mapping[str, Any]], metric: Any) -> dict[str, float]:
    """Adjusted means of a secondary metric by arm; {} where no run has it."""
    values = _by_seed(counts(rows, metric))
    fitted = many_to_one.fit(values) if values else None
    return dict(zip(fitted.arms, fitted.means.tolist(), strict=True)) if fitted else {}


def _costs(column: str, costs: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """Means over the arm's finished runs, of what their tables have."""
    own = [r for r in costs if r["arm"] == column and r.get("diverged") is None]
    found = {}
    for name, key in COSTS.items():
        values = [float(r[key]) for r in own if r.get(key) is not None]
        found[name] = statistics.fmean(values) if values else None
    return found


def _origin(column: str, asked: Mapping[str, Any]) -> dict[str, str]:
    """Commit and date of an arm's runs: the plan's, or its bundle's where it was run elsewhere."""
    for entry in asked.get("joined", ()):
        if any(cell["arm"] == column.partition("+")[0] for cell in entry["cells"]):
            return {"commit": entry["commit"], "date": entry["date"]}
    return {"commit": asked.get("commit", ""), "date": asked.get("date", "")}


def _said(testbed: Testbed, by_seed: Mapping[str, Mapping[int, float]]) -> list[str]:
    """Caveats: unequal seeds, diverged runs, what is missing."""
    asked = testbed.plan
    seeds = sorted({s for own in by_seed.values() for s in own} | set(asked.get("seeds", ())))
    said = []
    for a in dict.fromkeys((*by_seed, *asked.get("arms", ()))):
        own = by_seed.get(a, {})
        if not own and any(column.partition("+")[0] == a for column in by_seed):
            continue
        ended = sorted(
            int(r["seed"]) for r in testbed.costs if r["arm"] == a and r.get("diverged") is not None
        )
        lacking = [s for s in seeds if s not in own and s not in ended]
        if ended:
            said.append(f"{a} diverged in seeds {', '.join(map(str, ended))}, which its mean leaves out.")
        if lacking and own:
            missing = ", ".join(map(str, lacking))
            said.append(
                f"{a} has {len(own)} of {len(seeds)} seeds; missing: {missing}. Its mean is adjusted for the "
                "seeds that it lacks."
            )
        elif lacking:
            said.append(f"{a} is planned and not run yet.")
    done = {column.partition("+")[0] for column in by_seed} | set(asked.get("arms", ()))
    waiting = [s.arm for s in systems() if s.arm and s.arm not in (*done, *CONTROLS)]
    if waiting:
        said.append(f"Methods of the literature with a row to come: {', '.join(waiting)}.")
    return said
