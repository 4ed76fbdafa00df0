"""The leaderboard: methods against free exploration on a testbed, from comparisons' folders or bundles alone.

Two families of tests are planned. First every method against `random`: Dunnett's intervals and those of sign
flips, of which the wider counts. Then the methods that pass against `random_probe`, by Holm. Controls have
plain intervals, and the oracle is a reference without a rank. leaderboard_page.py writes the page.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from coevolve_jax import names
from coevolve_jax.analysis import stats
from coevolve_jax.comparison import many_to_one, notes
from coevolve_jax.comparison.arms import ARMS, arm
from coevolve_jax.comparison.differences import METRICS, Counts, counts, lost_counts
from coevolve_jax.comparison.testbed import Testbed

RANDOM, PROBE, ORACLE = "random", "random_probe", "oracle"
CONTROLS = (
    "static", "placebo", RANDOM, PROBE, "random_known", "random_prioritised", "even", "prioritised",
    "weakest", "random_dev", "blame", ORACLE, "oracle_probe",
)  # fmt: skip
ORACLES = (ORACLE, "oracle_probe")  # they know the weak tools, and have no rank
FEW = 5  # an arm with fewer seeds has no rank
FLIPPED = 6  # with fewer seeds even the best of all sign flips has p above 0.05, and Dunnett's stands alone
RESAMPLES = 2000
OVER = 0.02  # of the budget: rollouts beyond it that need no caveat
COLUMNS = (
    "testbed", "base", "split", "method", "paper", "fidelity", "seeds", "metric", "mean", "mean_raw", "sd",
    "diff_random", "lo", "hi", "p", "diff_probe", "probe_lo", "probe_hi", "probe_p", "rank_lo", "rank_hi",
    "p_best", "letters", "headroom_share", "others", "iid", "weak_tasks", "failed_first_sight", "new_tasks",
    "rollouts", "rollouts_policy", "rollouts_probe", "rollouts_branch", "gradients", "updates",
    "explorer_steps", "llm_tokens", "seconds", "commit", "date",
)  # fmt: skip
COSTS = {  # column -> column of cells.csv
    "weak_tasks": "new_tasks_with_a_weak_tool", "failed_first_sight": "failed_at_first_visit",
    "new_tasks": "new_tasks", "rollouts": "rollouts", "rollouts_policy": "rollouts_policy",
    "rollouts_probe": "rollouts_probe", "rollouts_branch": "rollouts_branch", "gradients": "gradients",
    "updates": "steps", "explorer_steps": "explorer_steps", "llm_tokens": "llm_tokens", "seconds": "seconds",
}  # fmt: skip


class System(NamedTuple):
    """A system of the literature. verdict: "in", "part" or "out". arm: its row's name; paper: arXiv id."""

    name: str
    what: str
    verdict: str
    why: str
    arm: str
    paper: str


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


def board(testbed: Testbed) -> Board:
    """Computes the rows of a testbed. Raises ValueError where `random` has no run, the control of all."""
    metric = METRICS[primary(testbed)]
    found = counts(testbed.rows, metric)
    every = _by_seed(found)
    if RANDOM not in every:
        raise ValueError(
            f"{testbed.name} has no finished run of {RANDOM}, which all are compared with: run it."
        )
    by_seed = _beside_random(every)
    fitted = many_to_one.fit(by_seed)
    means = _means_of(fitted)
    methods = [a for a in by_seed if a.partition("+")[0] not in CONTROLS]
    first = against_random(fitted, by_seed, methods)
    others = [a for a in by_seed if a not in methods and a != RANDOM]
    first |= {c.a: c for c in many_to_one.pooled(fitted, others, RANDOM)}
    worst = worst_case(testbed, found, by_seed)
    worst_fit = many_to_one.fit(worst)
    at_worst = first if worst == by_seed else against_random(worst_fit, worst, methods)
    passed = [a for a in methods if _better(first[a]) and _better(at_worst[a])]
    second = against_probe(fitted, passed)
    order = sorted(means, key=lambda a: -means[a])
    ranked = [a for a in order if a not in ORACLES]
    ranks = rank_intervals(
        {
            (a, s): c
            for (a, s), c in found.items()
            if a in ranked and s in by_seed[a] and len(by_seed[a]) >= FEW
        }
    )
    letters = many_to_one.letters(ranked, many_to_one.apart(fitted, ranked))
    kept = [r for r in testbed.rows if r["arm"] in by_seed]
    secondary = {name: _means(kept, METRICS[name]) for name in ("others", "iid")}
    gap = means[ORACLE] - means[RANDOM] if ORACLE in means and (first[ORACLE].low or 0) > 0 else 0.0
    papers = {s.arm: s.paper for s in systems() if s.arm}
    rows = []
    for a in order:
        told = {
            "paper": papers.get(a.partition("+")[0], ""),
            "mean": means[a],
            "letters": letters.get(a),
            "headroom_share": (means[a] - means[RANDOM]) / gap if gap > 0 else None,
            **{name: values.get(a) for name, values in secondary.items()},
        }
        own = list(by_seed[a].values())
        rows.append(_row(testbed, a, own, first.get(a), second.get(a), ranks.get(a), told))
    said = _said(testbed, by_seed)
    said += [f"{a} shares no seed with {RANDOM} and stands in no table." for a in every if a not in by_seed]
    said += _lost_said(found, means, _means_of(worst_fit), order)
    said += notes.added(testbed.plan)
    return Board(testbed, rows, by_seed, fitted.sd, fitted.df, said)


def _row(
    testbed: Testbed,
    column: str,
    values: Sequence[float],
    versus: many_to_one.Contrast | None,
    probe: many_to_one.Contrast | None,
    rank: tuple[int, int, float] | None,
    told: Mapping[str, Any],
) -> dict[str, Any]:
    """An arm's row by COLUMNS, None where there is no value.

    values: of its seeds. versus, probe: its differences from RANDOM and from PROBE. rank: its interval and
    P(best). told: further columns.
    """
    row = {
        "testbed": testbed.name,
        "base": Path(testbed.plan["config"]["model"]).name,
        "split": testbed.plan["reads"],
        "method": column,
        "fidelity": fidelity(column, testbed.modules)[0],
        "seeds": len(values),
        "metric": primary(testbed),
        "mean_raw": statistics.fmean(values),
        "sd": statistics.stdev(values) if values[1:] else None,
        **told,
        **_costs(column, testbed.costs),
        **_origin(column, testbed),
        **_compared(("diff_random", "lo", "hi", "p"), versus),
        **_compared(("diff_probe", "probe_lo", "probe_hi", "probe_p"), probe),
        **dict(zip(("rank_lo", "rank_hi", "p_best"), rank or ())),
    }
    return {name: row.get(name) for name in COLUMNS}


def _compared(columns: Sequence[str], found: many_to_one.Contrast | None) -> dict[str, float | None]:
    numbers = (found.difference, found.low, found.high, found.p) if found else ()
    return dict(zip(columns, numbers))


def _lost_said(
    found: Mapping[tuple[str, int], Counts],
    means: Mapping[str, float],
    worst: Mapping[str, float],
    arms: Iterable[str],
) -> list[str]:
    """Says of the arms that lost many trials or whose means these move, what the worst case is."""
    said = []
    for a in arms:
        least = worst[a] - worst[RANDOM]
        lost = lost_counts(c for (arm, _), c in found.items() if arm == a)["lost_share"]
        if abs(least - (means[a] - means[RANDOM])) > stats.LOST or lost > stats.LOST:
            said.append(
                f"{a} lost {lost:.1%} of its trials. With lost trials as failures and diverged runs as 0 its "
                f"mean is {100 * worst[a]:.1f}, {100 * least:+.1f} against {RANDOM}."
            )
    return said


def _better(found: many_to_one.Contrast) -> bool:
    """Whether both the interval and p say so. With few seeds one of them may say it alone."""
    return (found.low or 0) > 0 and found.p is not None and found.p <= 1 - many_to_one.LEVEL


def planned(testbed: Testbed, by_seed: Mapping[str, Any]) -> tuple[int, int]:
    """Counts the methods of the first plan that have run, and all of them."""
    asked = [a for a in testbed.plan.get("arms", ()) if a not in CONTROLS]
    there = {column.partition("+")[0] for column in by_seed}
    return sum(a in there for a in asked), len(asked)


def worst_case(
    testbed: Testbed, found: Mapping[tuple[str, int], Counts], by_seed: Mapping[str, Mapping[int, float]]
) -> dict[str, dict[int, float]]:
    """The values by arm and seed with lost trials as failures, and diverged runs as 0."""
    worst = _by_seed({key: c.lost_as_failures() for key, c in found.items() if key[0] in by_seed})
    for r in testbed.costs:
        if r.get("diverged") is not None and r["arm"] in worst:
            worst[r["arm"]][int(r["seed"])] = 0.0
    return worst


def primary(testbed: Testbed) -> str:
    """Name of the metric that ranks: the plan's. Plans before it had one: "weak" where tools are known."""
    return testbed.plan.get("primary") or ("weak" if any(r["weak"] for r in testbed.rows) else "iid")


def against_random(
    fitted: many_to_one.Fit, by_seed: many_to_one.Values, methods: Sequence[str]
) -> dict[str, many_to_one.Contrast]:
    """The first family: methods against free exploration, by the wider of two simultaneous intervals.

    Sign flips take the arms with FLIPPED seeds or more: one with fewer would set a floor to the p of all.
    The others have Dunnett's alone, and none at all below three seeds.
    """
    base = by_seed[RANDOM]
    common = {a: [x - base[s] for s, x in by_seed[a].items() if s in base] for a in methods}
    few = {a for a, d in common.items() if 2 < len(d) < FLIPPED and not stats.alike(d)}
    flipped = {c.a: c for c in many_to_one.max_t(by_seed, [a for a in methods if a not in few], RANDOM)}
    return {
        c.a: c if c.a in few else many_to_one.wider(c, flipped[c.a])
        for c in many_to_one.dunnett(fitted, methods, RANDOM)
    }


def against_probe(fitted: many_to_one.Fit, passed: Sequence[str]) -> dict[str, many_to_one.Contrast]:
    """The second family, of methods that passed the first: against free exploration with a probe, by Holm."""
    if PROBE not in fitted.arms:
        return {}
    found = many_to_one.pooled(fitted, passed, PROBE)
    adjusted = stats.holm([c.p for c in found])
    return {c.a: c._replace(p=p) for c, p in zip(found, adjusted, strict=True)}


def rank_intervals(found: Mapping[tuple[str, int], Counts]) -> dict[str, tuple[int, int, float]]:
    """The 95% rank interval and P(best) of each arm, by a bootstrap that crosses seeds and scenarios.

    Samples without any value of an arm are left out of its interval; it cannot be the best in them. Those
    without a value of any arm are left out altogether. Equal bests share the point.
    """
    if not found:
        return {}
    there = np.any([c.there for c in found.values()], axis=0)
    rng = np.random.default_rng(0)
    where = stats.resample(int(there.sum()), rng, RESAMPLES)
    own: dict[str, dict[int, np.ndarray]] = {}
    for (a, s), c in found.items():
        own.setdefault(a, {})[s] = np.asarray(c.of_scenarios(there).value(where))
    seeds = {s for values in own.values() for s in values}
    means = many_to_one.bootstrap_means(own, stats.resample(len(seeds), rng, RESAMPLES))
    means = means[np.isfinite(means).any(axis=1)]
    ranks = many_to_one.ranks(np.nan_to_num(means, nan=-1.0))
    best = (ranks == 1) / (ranks == 1).sum(axis=1, keepdims=True)
    result = {}
    for i, a in enumerate(own):
        mine = ranks[np.isfinite(means[:, i]), i]
        low, high = np.quantile(mine, [0.025, 0.975], method="inverted_cdf")
        result[a] = (int(low), int(high), float(best[:, i].mean()))
    return result


def fidelity(column: str, modules: Sequence[str] = ()) -> tuple[str, str]:
    """FIDELITY of a strategy's module: its mark and its sentence. ("control", "") for controls.

    The module is a pair, or a text that begins with the mark. ("?", why) where it says nothing or is not
    installed here, as a method that joined by a bundle. A bundle must not choose what is imported: only what
    ships and `modules` are read; the mark of others is "".
    """
    name = column.partition("+")[0]
    if name in CONTROLS:
        return "control", ""
    if name not in (*ARMS, *modules):
        return "", "its module was not read; --modules names those that are"
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


def _beside_random(values: many_to_one.Values) -> dict[str, dict[int, float]]:
    """The values of RANDOM and of the arms that share a seed with it, which alone can be compared."""
    base = values.get(RANDOM, {})
    return {a: dict(own) for a, own in values.items() if own.keys() & base.keys()}


def _means(rows: Sequence[Mapping[str, Any]], metric: Any) -> dict[str, float]:
    """Adjusted means of a secondary metric, of the arms that share a seed with RANDOM in it."""
    values = _beside_random(_by_seed(counts(rows, metric)))
    return _means_of(many_to_one.fit(values)) if values else {}


def _means_of(fitted: many_to_one.Fit) -> dict[str, float]:
    return dict(zip(fitted.arms, fitted.means.tolist(), strict=True))


def _costs(column: str, costs: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """Means over the arm's finished runs, of what their tables have."""
    own = [r for r in costs if r["arm"] == column and r.get("diverged") is None]
    found = {}
    for name, key in COSTS.items():
        values = [float(r[key]) for r in own if r.get(key) is not None]
        found[name] = statistics.fmean(values) if values else None
    return found


def _origin(column: str, testbed: Testbed) -> dict[str, str]:
    """Commits and dates of an arm's runs, joined by "+".

    Runs that do not tell have those of the plan, or of their bundle where the arm was run elsewhere.
    """
    asked = testbed.plan
    own = [r for r in testbed.costs if r["arm"] == column]
    if own and all(r.get("commit") for r in own):
        told = lambda key: [part for r in own for part in str(r[key]).split("+")]
        dates = sorted(told("date"))
        between = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        return {"commit": "+".join(dict.fromkeys(told("commit"))), "date": between}
    for entry in asked.get("joined", ()):
        if any(cell["arm"] == column.partition("+")[0] for cell in entry["cells"]):
            return {"commit": entry["commit"], "date": entry["date"]}
    for entry in asked.get("extended", ()):
        if column.partition("+")[0] in entry.get("arms", ()):
            return {"commit": entry.get("commit", ""), "date": entry["date"]}
    return {"commit": asked.get("commit", ""), "date": asked.get("date", "")}


def _said(testbed: Testbed, by_seed: Mapping[str, Mapping[int, float]]) -> list[str]:
    """Caveats: unequal seeds, diverged runs, what is missing."""
    asked = testbed.plan
    seeds = sorted({s for own in by_seed.values() for s in own} | set(asked.get("seeds", ())))
    said, lacks, unrun = [], defaultdict(list), []
    ran = (r["arm"] for r in testbed.costs)  # also arms that joined and diverged in all seeds
    for a in dict.fromkeys((*by_seed, *asked.get("arms", ()), *ran)):
        own = by_seed.get(a, {})
        if not own and any(column.partition("+")[0] == a for column in by_seed):
            continue
        ended = sorted(
            int(r["seed"]) for r in testbed.costs if r["arm"] == a and r.get("diverged") is not None
        )
        lacking = [s for s in seeds if s not in own and s not in ended]
        if ended:
            said.append(f"{a} diverged in seeds {', '.join(map(str, ended))}, which its mean leaves out.")
        if lacking:
            (lacks[tuple(lacking)] if own else unrun).append(a)
    for lacking, arms in lacks.items():
        missing, count = ", ".join(map(str, lacking)), len(seeds) - len(lacking)
        said.append(f"{', '.join(arms)}: {count} of {len(seeds)} seeds were run; missing: {missing}.")
    if len({frozenset(own) for own in by_seed.values()}) > 1:
        said.append("Means are adjusted for the seeds that an arm lacks.")
    if any(len(own) < FEW for own in by_seed.values()):
        said.append(
            f"With fewer than {FEW} seeds how far runs differ is itself a guess, and so are intervals."
        )
    budget = asked["config"].get("budget", {}).get("rollouts", 0)
    for a in by_seed if budget else ():
        spent = max((r["rollouts"] for r in testbed.costs if r["arm"] == a and r.get("rollouts")), default=0)
        if spent > (1 + OVER) * budget:
            said.append(
                f"{a} spent up to {spent:,.0f} rollouts in a run, {spent / budget - 1:.0%} above the budget."
            )
    said += notes.commits(testbed.costs)
    if unrun:
        said.append(f"Planned and not run yet: {', '.join(unrun)}.")
    done = {column.partition("+")[0] for column in by_seed} | set(asked.get("arms", ()))
    waiting = [s.arm for s in systems() if s.arm and s.arm not in (*done, *CONTROLS)]
    if waiting:
        said.append(f"Methods of the literature with a row to come: {', '.join(waiting)}.")
    return said
