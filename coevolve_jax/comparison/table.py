"""A comparison as text, for the terminal and for docs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def table(comparison: Mapping[str, Any]) -> str:
    """comparison.json as aligned text; rates in percent, differences in points."""
    if not comparison["arms"]:
        return "No run is finished yet."
    blocks = []
    for part in (comparison, *comparison["secondary"]):
        lines = [part["metric"]["name"], f"  {'arm':<24}{'seeds':>5}{'mean':>8}   95% interval over seeds"]
        for a in part["arms"]:
            span = f"   {a['low']:.1%} to {a['high']:.1%}" if "low" in a else ""
            mean = f"{a['mean']:.1%}" if "mean" in a else "-"
            lines.append(f"  {a['arm']:<24}{a['n']:>5}{mean:>8}{span}")
        for d in part["planned"]:
            lines.append("  " + _difference(d))
        blocks.append("\n".join(lines))
    if comparison.get("signals"):
        lines = [
            "signals: failed at first visit; of matched tasks (random's); gain on held-out tasks of their tools (random's)"
        ]
        share = lambda x: "   -  " if x is None else f"{x:6.1%}"
        for s in comparison["signals"]:
            pairs = [(s.get("matched_precision"), s["against_precision"]), (s["gain"], s["against_gain"])]
            beside = [f"{share(a)} ({share(b).strip()})" for a, b in pairs]
            shown = "   ".join([share(s["precision"]), *beside])
            lines.append(f"  {s['arm']:<24}{s['signal']:<12}{s['new_tasks']:>5} new tasks   {shown}")
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, "\n".join(comparison["notes"])])


def _difference(d: Mapping[str, Any]) -> str:
    name = f"{d['a']} - {d['b']}"
    if "p" not in d:
        return f"{name}: {d['n']} seeds in common" + (
            f", {100 * d['difference']:+.1f} points" if d["n"] else ""
        )
    return (
        f"{name}: {100 * d['difference']:+.1f} points, {d['n']} seeds, t interval {100 * d['low']:+.1f} to "
        f"{100 * d['high']:+.1f}, bootstrap {100 * d['boot_low']:+.1f} to {100 * d['boot_high']:+.1f}, "
        f"p {d['p']:.3f} (Holm {d['p_holm']:.3f}), P(better) {d['p_improvement']:.2f}; "
        f"3 points need {d['seeds_for_effect']} seeds"
    )
