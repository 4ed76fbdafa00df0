"""Caveats for the reader of a comparison's tables, as sentences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coevolve_jax.analysis.stats import LOST, SETS
from coevolve_jax.comparison.arms import arm

FEW = 5  # seeds; with fewer, the spread between them is not known
EQUAL = 0.01  # relative difference up to which budgets count as equal
HELD_OUT = tuple(sorted(SETS))  # names of the held-out sets in evaluations
# Columns of cells.csv in which arms should not differ. The others may.
BOUND = ("steps", "rollouts", "new_tasks", "new_share_of_visits", "calls_per_new_task", "llm_tokens", "money")
OF_ALL = ("steps", "rollouts")  # of these, columns in which static arms should not differ from others either
# Columns of cells.csv that should have one value -> what is said where they have several.
OF_ONE = {
    "model_digest": "THE FILES OF THE BASE POLICY CHANGED BETWEEN RUNS, by their digests",
    "explorer_model": "SEVERAL MODELS ANSWERED THE EXPLORERS, and what is compared differs in them too",
}

BySeed = Mapping[Any, Sequence[Mapping[str, Any]]]  # seed -> rows of cells.csv


def notes(plan: Mapping[str, Any], budget: Sequence[Mapping[str, Any]], missing: Sequence[str]) -> list[str]:
    """Returns caveats about the design and the budgets of a comparison.

    budget: rows of cells.csv. missing: names of cells without a result.
    """
    rest = [r for r in budget if r.get("diverged") is None]
    by_seed = {seed: [r for r in rest if r["seed"] == seed] for seed in sorted({r["seed"] for r in rest})}
    return [
        f"Read on the {plan['reads']} set.",
        *_planned_later(plan),
        *_joined(plan),
        *_missing(missing),
        *_diverged(budget),
        *_tried_again(budget),
        *commits(budget),
        *_few_seeds(rest),
        *_unequal_budgets(by_seed),
        *_other_starts(rest, by_seed),
        *_other_held_out(by_seed),
        *(note for column, said in OF_ONE.items() for note in _several(rest, column, said)),
        *_other_files(rest),
        *_lost_in_training(rest),
    ]


def _missing(names: Sequence[str]) -> list[str]:
    """Says which cells have no result."""
    if not names:
        return []
    return [f"{len(names)} cells are not finished: {', '.join(names[:5])}{' ...' if names[5:] else ''}."]


def _diverged(budget: Sequence[Mapping[str, Any]]) -> list[str]:
    """Says which runs diverged, and how they count."""
    ended = [r for r in budget if r.get("diverged") is not None]
    if not ended:
        return []
    runs = ", ".join(f"{r['arm']}, seed {r['seed']} (step {r['diverged']:g})" for r in ended)
    return [
        f'Diverged, which is a result: {runs}. The means leave these runs out; the rows "diverged as 0" '
        "count each as success 0, and an arm's lost trials as failures where they are many. They are not "
        "run again, for they would end alike; --retry_diverged runs them."
    ]


def _tried_again(budget: Sequence[Mapping[str, Any]]) -> list[str]:
    """Says which runs were tried again because they had diverged."""
    again = [r for r in budget if r.get("diverged_before")]
    if not again:
        return []
    steps = lambda r: r["diverged_before"].replace("+", ", then ")
    runs = ", ".join(f"{r['arm']}, seed {r['seed']} (step {steps(r)})" for r in again)
    return [
        f"Tried again after they had diverged (--retry_diverged), {len(again)} of {len(budget)}: {runs}. "
        "Their last tries stand in the tables, so a result decided how often these were run."
    ]


def _few_seeds(budget: Sequence[Mapping[str, Any]]) -> list[str]:
    """Warns of intervals from too few seeds."""
    by_arm = Counter(arm for arm, _ in {(r["arm"], r["seed"]): None for r in budget})
    fewest, seeds = min(by_arm.items(), key=lambda item: item[1], default=("no arm", 0))
    if seeds >= FEW:
        return []
    which = f" ({fewest})" if len(set(by_arm.values())) > 1 else ""
    return [
        f"{seeds} seeds{which}: how far seeds differ is itself a guess, and with it the t intervals and "
        "p. Few that happen to agree give a narrow interval, and two give no p; "
        f"{FEW} or more are needed."
    ]


def _unequal_budgets(by_seed: BySeed) -> list[str]:
    """Says in which budgets the arms differ, with the seed that has the largest difference of each."""
    said = []
    for key in BOUND:
        found = {seed: _ends(rows, key) for seed, rows in by_seed.items()}
        ends = {seed: pair for seed, pair in found.items() if pair}
        if ends:
            most = max(ends, key=lambda seed: ends[seed][1][key] - ends[seed][0][key])
            low, high = ends[most]
            said.append(
                f"The arms are not equal in {key.replace('_', ' ')} in {_seeds(ends)}: in seed {most} from "
                f"{low[key]:.4g} ({low['arm']}) to {high[key]:.4g} ({high['arm']})."
            )
    return said


def _ends(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
    """The rows of a seed with the least and the most of a budget; None where these are equal."""
    bound = [r for r in rows if r.get(key) is not None and (key in OF_ALL or not _static(r["arm"]))]
    low, high = (end(bound, key=lambda r: r[key], default={key: 0}) for end in (min, max))
    apart = high[key] - low[key] > EQUAL * max(abs(high[key]), abs(low[key]))
    return (low, high) if apart else None


def _other_starts(budget: Sequence[Mapping[str, Any]], by_seed: BySeed) -> list[str]:
    """Says in which seeds arms of one setting begin with other tasks."""
    said = []
    for setting in dict.fromkeys(r["arm"].partition("+")[2] for r in budget):
        own = {
            s: {r.get("initial_digest") for r in rows if r["arm"].partition("+")[2] == setting}
            for s, rows in by_seed.items()
        }
        if apart := [seed for seed, digests in own.items() if len(digests) > 1]:
            where = f" with {setting}" if setting else ""
            said.append(f"The arms{where} do not start from the same D_0 in {_seeds(apart)}.")
    return said


def _other_held_out(by_seed: BySeed) -> list[str]:
    """Says in which seeds arms were evaluated on other tasks."""
    said = []
    for name in HELD_OUT:
        key = f"{name}_digest"
        groups = {s: {r[key]: r["arm"] for r in reversed(rows) if r.get(key)} for s, rows in by_seed.items()}
        if apart := [seed for seed, first in groups.items() if len(first) > 1]:
            a, b, *_ = reversed(groups[apart[0]].values())
            said.append(
                f"The {name} held-out tasks are not the same in {_seeds(apart)}: those of {a} and {b} "
                "differ, for one, and what is compared between them differs in its tasks too."
            )
    return said


def _several(budget: Sequence[Mapping[str, Any]], column: str, said: str) -> list[str]:
    """Says which runs have which value in a column of cells.csv, where the values differ."""
    of: dict[str, list[str]] = {}
    for r in budget:
        if r.get(column):
            of.setdefault(str(r[column]), []).append(f"{r['arm']}, seed {r['seed']}")
    if len(of) < 2:
        return []
    told = "; ".join(f"{value} ({', '.join(runs)})" for value, runs in of.items())
    return [f"{said}: {told}."]


def _other_files(budget: Sequence[Mapping[str, Any]]) -> list[str]:
    """Says which arms were run with several contents of a user's own files."""
    said = "THE FILES OF {} CHANGED BETWEEN ITS RUNS (its own modules, tools or template), by their digest"
    own = {name: [r for r in budget if r["arm"] == name] for name in dict.fromkeys(r["arm"] for r in budget)}
    return [note for name, rows in own.items() for note in _several(rows, "files_digest", said.format(name))]


def _lost_in_training(budget: Sequence[Mapping[str, Any]]) -> list[str]:
    """Says which arms lost more than LOST of their training rollouts, in the mean of their runs."""
    lost: dict[str, list[float]] = {r["arm"]: [] for r in budget}
    for r in budget:
        if r.get("rollouts_lost_share") is not None:
            lost[r["arm"]].append(r["rollouts_lost_share"])
    means = {name: sum(shares) / len(shares) for name, shares in lost.items() if shares}
    return [
        f"{name} lost {mean:.1%} of its training rollouts: nothing is learned from these."
        for name, mean in means.items()
        if mean > LOST
    ]


def lost_notes(lost: Mapping[str, Mapping[str, Mapping[int, tuple[int, int]]]]) -> list[str]:
    """Returns a sentence for each held-out set with lost trials. lost: from `lost_by_evaluation`."""
    said = []
    for name, arms in lost.items():
        told = []
        for column, steps in arms.items():
            own = [
                f"{n} of {of} ({n / of:.1%}) at step {step}" for step, (n, of) in sorted(steps.items()) if n
            ]
            told += [f"{column} {', '.join(own)}"] if own else []
        none = [column for column, steps in arms.items() if not any(n for n, _ in steps.values())]
        told += [f"{', '.join(none)} none"] if told and none else []
        if told:
            said.append(
                f"Lost trials of the {name} held-out set, neither success nor failure: {'; '.join(told)}."
            )
    return said


def worst_notes(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns sentences on the effect of lost trials, and on bootstrap samples that are left out.

    They give the means and planned differences with each lost trial counted as a failure.
    """
    said = []
    for table in tables:
        name = table["metric"]["name"]
        for a in table["arms"]:
            whole = f", of {a['lost_tasks']} tasks all" if a["lost_tasks"] else ""
            if worst := a.get("if_lost_failed"):
                said.append(
                    f"{a['arm']} lost {a['lost_share']:.1%} of the trials of {name}{whole}: {_rate(a)} "
                    f"without them, {_rate(worst)} if all of them are failures."
                )
            elif whole:
                said.append(f"{a['arm']} lost {a['lost']} trials of {name}{whole}.")
        for d in table["planned"]:
            if (worst := d.get("if_lost_failed")) and worst["n"]:
                said.append(
                    f"{d['a']} - {d['b']}, {name}: {_points(d)} without the lost trials, {_points(worst)} if "
                    f"all of them are failures{_verdict(d, worst)}."
                )
            if d.get("boot_empty", 0) > LOST:
                said.append(
                    f"{d['a']} - {d['b']}, {name}: {d['boot_empty']:.1%} of the bootstrap samples hold no "
                    "task of it and are left out."
                )
    return said


def _verdict(d: Mapping[str, Any], worst: Mapping[str, Any]) -> str:
    """Text on how the answer changes if lost trials count as failures; "" if it does not."""
    if d["difference"] is None:
        return ""
    if d["difference"] * worst["difference"] < 0:
        return ": THE SIGN CHANGES"
    if _clear(d) == _clear(worst):
        return ""
    return ": the interval then holds 0" if _clear(d) else ": THE INTERVAL IS THEN CLEAR OF 0"


def _clear(d: Mapping[str, Any]) -> bool:
    """Whether the t interval excludes 0."""
    return d.get("low") is not None and d["low"] * d["high"] > 0


def _rate(arm: Mapping[str, Any]) -> str:
    return f"{arm['mean']:.1%}" if "mean" in arm else "no value"


def _points(d: Mapping[str, Any]) -> str:
    return "no value" if d["difference"] is None else f"{100 * d['difference']:+.1f} points"


def added(plan: Mapping[str, Any]) -> list[str]:
    """Says which arms, seeds and settings joined the plan after the run began."""
    return [f"Added after the run began, on {e['date']}: {e['what']}." for e in plan.get("extended", ())]


def commits(budget: Iterable[Mapping[str, Any]]) -> list[str]:
    """Says which commits the cells are of, where that is more than one, or where files differed from it."""
    of: dict[str, list[str]] = {}
    for row in budget:
        if row.get("commit"):
            short = re.sub(r"\b([0-9a-f]{7})[0-9a-f]{33}\b", r"\1", str(row["commit"]))
            of.setdefault(short, []).append(row["arm"])
    if len(of) < 2 and "-dirty" not in "".join(of):
        return []
    told = [f"{name} ({len(arms)}: {', '.join(dict.fromkeys(arms))})" for name, arms in of.items()]
    dirty = ' Files differed from a commit that is "-dirty".' if "-dirty" in "".join(of) else ""
    return [f"Cells by commit: {'; '.join(told)}.{dirty}"]


def _planned_later(plan: Mapping[str, Any]) -> list[str]:
    warning = "Who adds seeds after having read the result stops where it pleases, and p does not know that."
    return [f"{line} {warning}" for line in added(plan)] + [
        f"Planned after the run began, on {entry['date']}: "
        f"{', '.join(f'{a} - {b}' for a, b in entry['planned'])}. Holm's "
        "correction of these is over those planned before as well."
        for entry in plan.get("planned_later", ())
    ]


def _joined(plan: Mapping[str, Any]) -> list[str]:
    """Says of each bundle what was taken from it, and what nobody can check."""
    said = []
    for entry in plan.get("joined", ()):
        seeds: dict[str, list[int]] = {}
        for cell in entry["cells"]:
            name = "+".join([cell["arm"], *(f"{key}={value}" for key, value in cell["setting"])])
            seeds.setdefault(name, []).append(cell["seed"])
        what = [f"{name} ({_seeds(sorted(own))})" for name, own in seeds.items()]
        what += [f"{entry['taken']} cells of this comparison's own arms"] if entry["taken"] else []
        whence = ", ".join(str(entry[key]) for key in ("date", "machine")) + f", commit {entry['commit']}"
        again = (
            f" Of {entry['repeated']} cells that were run in both places, {entry['alike']} have the same "
            "counts; those of here stand."
        )
        said.append(
            f"From the bundle {entry['bundle']} (digest {entry['digest'][:12]}, {whence}): "
            f"{', '.join(what) or 'nothing new'}. Its files agree with each other and with this plan. That "
            f"its numbers were really run cannot be checked from them.{again if entry['repeated'] else ''}"
        )
    return said


def _static(column: str) -> bool:
    """Whether a column's arm never adds tasks: its strategy is static."""
    return arm(column.partition("+")[0]).changes["strategy.name"] == "static"


def _seeds(seeds: Iterable[int]) -> str:
    found = list(map(str, seeds))
    return f"seed{'s' if found[1:] else ''} {', '.join(found)}"
