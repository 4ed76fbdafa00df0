"""What the page shows of a comparison of arms over seeds, as JSON values."""

from __future__ import annotations

from typing import Any

from coevolve_jax.analysis.loading import Comparison


def comparison_view(comparison: Comparison) -> dict:
    """All that the page knows of a comparison; its numbers are those of comparison.json."""
    plan, result = comparison.plan, comparison.result
    return {
        "kind": "comparison",
        "name": comparison.name,
        "headline": headline(comparison),
        "metric": _metric(comparison),
        "arms": result.get("arms") or [{"arm": arm} for arm in plan.get("arms") or ()],
        "planned": result.get("planned") or [],
        "curves": result.get("curves") or {},
        "cells": [
            {"arm": arm, "seed": seed, "finished": bool(summary), "success": _success(summary)}
            for (arm, seed), summary in comparison.summaries.items()
        ],
        "notes": notes(comparison),
        "trajectories": {},
    }


def notes(comparison: Comparison) -> list[str]:
    """What a reader must know before believing the numbers."""
    found = [str(note) for note in comparison.result.get("notes") or ()]
    if comparison.plan.get("reads") == "test" and not any("test" in note for note in found):
        found.insert(0, "The numbers were read on the test split.")
    return found


def headline(comparison: Comparison) -> dict:
    """A sentence, and cards (title, value, note)."""
    plan, result, cells = comparison.plan, comparison.result, comparison.summaries
    finished = sum(bool(summary) for summary in cells.values())
    arms, seeds = plan.get("arms") or [], plan.get("seeds") or []
    facts = [f"{name} {plan[name]}" for name in ("config", "baseline", "machine", "date") if plan.get(name)]
    lead = (
        f"{len(arms)} arms over {len(seeds)} seeds, compared by {_metric(comparison)}."
        if result
        else f"The comparison is not finished: {finished} of {len(arms) * len(seeds)} cells are."
    )
    cards: list[tuple[str, Any, str]] = []
    ranked = [arm for arm in result.get("arms") or () if arm.get("mean") is not None]
    if ranked:
        best = max(ranked, key=lambda arm: arm["mean"])
        cards.append(("Highest mean", best["arm"], f"{best['mean']:.1%} over {best.get('n', '?')} seeds"))
    strongest = [row for row in result.get("planned") or () if row.get("difference") is not None][:1]
    for row in strongest:
        low, high = (f"{100 * row[end]:+.1f}" if row.get(end) is not None else "—" for end in ("low", "high"))
        note = f"{row['a']} − {row['b']}, 95% interval {low} to {high}"
        cards.append(("First planned difference", f"{100 * row['difference']:+.1f} points", note))
    cards.append(("Cells", f"{finished} of {len(arms) * len(seeds)}", "runs that have finished"))
    return {"lead": lead, "facts": " · ".join(facts), "cards": cards}


def _metric(comparison: Comparison) -> str:
    return str((comparison.result.get("metric") or {}).get("name", "held-out success, final step"))


def _success(summary: dict) -> float | None:
    return summary.get("held_out_success_after")
