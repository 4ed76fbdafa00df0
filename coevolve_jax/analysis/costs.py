"""Costs of an explorer that is a model, by role. They come from its ledger or from rows of costs.jsonl."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

KEYS = {
    "requests": "llm_requests",
    "tokens_in": "llm_tokens_in",
    "tokens_out": "llm_tokens_out",
    "money": "money",
}


def by_role(costs: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Returns {role: {"requests", "tokens_in", "tokens_out", "money"}}, in the order of the work."""
    order = ("reflect", "explore", "abstract", "word", "judge", "solve")
    found = {key.partition("/")[2] for key in costs if key.startswith("llm_requests/")}
    roles = sorted(found, key=lambda role: (order.index(role) if role in order else len(order), role))
    return {role: {name: costs.get(f"{key}/{role}", 0) for name, key in KEYS.items()} for role in roles}


def cost_view(rows: Sequence[Mapping], config: Mapping) -> dict:
    """Prepares rows of costs.jsonl for the page: {"roles", "rows", "budget", "ended"}.

    "unasked" in a row: questions that the budget forbade. "ended": the step of the first such question. It is
    None before the first step, and missing where all questions were asked.
    """
    explorer = config.get("explorer", {})
    shown = [
        {
            "step": row["step"],
            "roles": by_role(row["costs"]),
            "tokens": row["costs"].get("llm_tokens", 0),
            "money": row["costs"].get("money", 0),
            "unasked": row["costs"].get("llm_faults/budget", 0),
        }
        for row in rows
    ]
    budget = {name: explorer.get(f"budget_{name}") or None for name in ("tokens", "money")}
    ended = [row["step"] for row in shown if row["unasked"]][:1]
    roles = list(by_role(sum((Counter(row["costs"]) for row in rows), Counter())))
    return {"roles": roles, "rows": shown, "budget": budget, **({"ended": ended[0]} if ended else {})}
