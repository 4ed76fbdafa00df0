"""The page's data on a comparison of arms over seeds, as JSON values."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from coevolve_jax.analysis.loading import Comparison


def comparison_view(comparison: Comparison) -> dict:
    """Returns all data of the page. Its numbers are those of comparison.json."""
    plan, result = comparison.plan, comparison.result
    tables = [result, *result.get("secondary", ())] if result else []
    return {
        "kind": "comparison",
        "name": comparison.name,
        "headline": headline(comparison),
        "tables": [
            {"metric": _metric(table), "arms": table.get("arms") or [], "planned": table.get("planned") or []}
            for table in tables
        ],
        "curves": result.get("curves") or {},
        "cells": [
            {
                "arm": arm,
                "seed": seed,
                "success": summary.get("held_out_success_after"),
                "done": bool(summary),
                "report": (arm, seed) in comparison.reports,
                "diverged": comparison.failures.get((arm, seed), {}).get("step"),
            }
            for (arm, seed), summary in comparison.summaries.items()
        ],
        "notes": notes(plan, result),
        "trajectories": {},
    }


def notes(plan: Mapping[str, Any], result: Mapping[str, Any]) -> list[str]:
    """Caveats that a reader must know before believing the numbers."""
    found = [str(note) for note in result.get("notes") or ()]
    if plan.get("reads") == "test" and not any("test" in note for note in found):
        found.insert(0, "Read on the test set.")
    return found


def headline(comparison: Comparison) -> dict:
    """Returns a sentence, facts, and cards (title, value, note)."""
    plan, result, cells = comparison.plan, comparison.result, comparison.summaries
    finished = sum(bool(summary) for summary in cells.values())
    arms, seeds = result.get("arms") or plan.get("arms") or [], plan.get("seeds") or []
    wanted = _wanted(plan)
    facts = [f"{name}: {plan[name]}" for name in ("date", "machine", "command") if plan.get(name)]
    lead = f"{len(arms)} arms over {len(seeds)} seeds, compared by {_metric(result)}."
    if finished + len(comparison.failures) < wanted:
        so_far = f" So far {len(result['arms'])} arms have runs." if result else ""
        lead = f"The comparison is not finished: {finished} of {wanted} runs are.{so_far}"
    ended = f", {len(comparison.failures)} diverged" if comparison.failures else ""
    cards = [("Runs", f"{finished} of {max(len(cells), wanted)}", f"have finished{ended}")]
    for row in [row for row in result.get("planned") or () if row.get("difference") is not None][:3]:
        cards.append((f"{row['a']} − {row['b']}", f"{100 * row['difference']:+.1f} points", _spread(row)))
    return {"lead": lead, "facts": " · ".join(facts), "cards": cards}


def _wanted(plan: Mapping[str, Any]) -> int:
    """The number of cells of a plan: of its own arms, and of those that were run elsewhere and joined it."""
    own = itertools.product(plan.get("arms") or (), plan.get("seeds") or (), plan.get("settings") or [{}])
    joined = (
        (cell["arm"], cell["seed"], dict(cell["setting"]))
        for bundle in plan.get("joined") or ()
        for cell in bundle["cells"]
    )
    return len({json.dumps(cell, sort_keys=True) for cell in (*own, *joined)})


def _spread(row: Mapping[str, Any]) -> str:
    """Text under a difference: its interval, and its value with lost trials or diverged seeds as failures."""
    text = "one seed: no interval" if row["n"] == 1 else f"{row['n']} seeds, all alike: no interval"
    if row.get("low") is not None:
        text = f"95% interval {100 * row['low']:+.1f} to {100 * row['high']:+.1f}, {row['n']} seeds"
    for key, name in (("if_lost_failed", "lost trials"), ("if_diverged_failed", "diverged seeds")):
        worst = row.get(key) or {}
        if worst.get("difference") is not None:
            text += f"; {100 * worst['difference']:+.1f} with {name} as failures"
    return text


def _metric(table: Mapping[str, Any]) -> str:
    return str((table.get("metric") or {}).get("name", "held-out success, last step"))
