"""What a reader must know before believing the tables of a comparison, as sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from coevolve_jax.comparison.arms import arm

FEW = 5  # seeds, below which the spread between them is not known
EQUAL = 0.01  # budgets that differ by no more count as equal
HELD_OUT = ("balanced", "iid")  # sets, by the names that evaluations have
# What arms should not differ in, of cells.csv; the rest is what they differ by.
BOUND = ("rollouts", "new_tasks", "new_share_of_visits", "calls_per_new_task", "llm_tokens", "money")


def notes(plan: Mapping[str, Any], budget: Sequence[Mapping[str, Any]], missing: Sequence[str]) -> list[str]:
    """What a reader must know before believing the table."""
    said = [f"Read on the {plan['reads']} set."]
    if missing:
        said.append(
            f"{len(missing)} cells are not finished: {', '.join(missing[:5])}{' ...' if missing[5:] else ''}."
        )
    seeds = len({r["seed"] for r in budget})
    if seeds < FEW:
        said.append(
            f"{seeds} seeds: how far seeds differ is itself a guess, and with it the t intervals and p. Two that happen to agree "
            f"give a narrow interval and a small p; {FEW} or more are needed."
        )
    by_seed = {seed: [r for r in budget if r["seed"] == seed] for seed in sorted({r["seed"] for r in budget})}
    for key in BOUND:
        ends = {}  # by seed: the rows with the least and the most of it, where these differ
        for seed, rows in by_seed.items():
            bound = [r for r in rows if r[key] is not None and (key == "rollouts" or not _static(r["arm"]))]
            low, high = (end(bound, key=lambda r: r[key], default={key: 0}) for end in (min, max))
            if high[key] - low[key] > EQUAL * max(abs(high[key]), abs(low[key])):
                ends[seed] = low, high
        if ends:
            most = max(ends, key=lambda seed: ends[seed][1][key] - ends[seed][0][key])
            low, high = ends[most]
            said.append(
                f"The arms are not equal in {key.replace('_', ' ')} in {_seeds(ends)}: in seed {most} from "
                f"{low[key]:.4g} ({low['arm']}) to {high[key]:.4g} ({high['arm']})."
            )
    for setting in dict.fromkeys(r["arm"].partition("+")[2] for r in budget):
        own = {
            s: {r["initial_digest"] for r in rows if r["arm"].partition("+")[2] == setting}
            for s, rows in by_seed.items()
        }
        if apart := [seed for seed, digests in own.items() if len(digests) > 1]:
            where = f" with {setting}" if setting else ""
            said.append(f"The arms{where} do not start from the same D_0 in {_seeds(apart)}.")
    for name in HELD_OUT:
        key = f"{name}_digest"
        groups = {s: {r[key]: r["arm"] for r in reversed(rows) if r.get(key)} for s, rows in by_seed.items()}
        if apart := [seed for seed, first in groups.items() if len(first) > 1]:
            a, b, *_ = reversed(groups[apart[0]].values())
            said.append(
                f"The {name} held-out tasks are not the same in {_seeds(apart)}: those of {a} and {b} differ, "
                "for one, and what is compared between them differs in its tasks too."
            )
    return said


def _static(column: str) -> bool:
    """Whether an arm has no new tasks by what it is."""
    return arm(column.partition("+")[0]).changes["strategy.name"] == "static"


def _seeds(seeds: Iterable[int]) -> str:
    found = list(map(str, seeds))
    return f"seed{'s' if found[1:] else ''} {', '.join(found)}"
