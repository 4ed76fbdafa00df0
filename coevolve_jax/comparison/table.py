"""A comparison as text, for the terminal and for docs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coevolve_jax.analysis.stats import LOST


def table(comparison: Mapping[str, Any]) -> str:
    """Formats comparison.json as aligned text. Rates are in percent, differences in points."""
    if not comparison["arms"]:
        return "No run is finished yet."
    blocks = []
    for part in (comparison, *comparison["secondary"]):
        name = (part["metric"] or {}).get("name", "no metric has a value")
        lines = [name, f"  {'arm':<24}{'seeds':>5}{'mean':>8}   95% interval over seeds"]
        for a in part["arms"]:
            lines += [_arm(a["arm"], a), *_arm_at_worst(a)]
        for d in part["planned"]:
            lines += ["  " + _difference(d), *_difference_at_worst(d)]
        blocks.append("\n".join(lines))
    if comparison.get("signals"):
        lines = [
            "signals: failed at first visit; of matched tasks (random's); gain on held-out tasks of their "
            "tools (random's)"
        ]
        share = lambda x: "   -  " if x is None else f"{x:6.1%}"
        for s in comparison["signals"]:
            pairs = [(s.get("matched_precision"), s["against_precision"]), (s["gain"], s["against_gain"])]
            beside = [f"{share(a)} ({share(b).strip()})" for a, b in pairs]
            shown = "   ".join([share(s["precision"]), *beside])
            lines.append(f"  {s['arm']:<24}{s['signal']:<12}{s['new_tasks']:>5} new tasks   {shown}")
        blocks.append("\n".join(lines))
    return "\n\n".join([*blocks, "\n".join(comparison["notes"])])


def _arm(name: str, a: Mapping[str, Any]) -> str:
    mean = f"{a['mean']:.1%}" if "mean" in a else "-"
    return f"  {name:<24}{a['n']:>5}{mean:>8}{'   ' + _span(a, '{:.1%}', 1) if 'low' in a else ''}"


def _arm_at_worst(a: Mapping[str, Any]) -> list[str]:
    """Lines on the trials and runs that an arm's mean leaves out, and the means with them."""
    lines = []
    if a.get("lost"):
        whole = f", all of {a['lost_tasks']} tasks" if a["lost_tasks"] else ""
        lines.append(f"    lost {a['lost']:,} trials ({a['lost_share']:.1%}{whole})")
    if "if_lost_failed" in a:
        lines.append(_arm("  lost as failures", a["if_lost_failed"]))
    if "if_diverged_failed" in a:
        lines.append(f"    diverged: seeds {', '.join(map(str, a['diverged']))}")
        lines.append(_arm("  diverged as 0", a["if_diverged_failed"]))
    return lines


def _difference_at_worst(d: Mapping[str, Any]) -> list[str]:
    lines = []
    if d.get("lost"):
        lines.append(f"    lost {d['lost']:,} trials of both ({d['lost_share']:.1%})")
    if d.get("boot_empty", 0) > LOST:
        lines.append(f"    {d['boot_empty']:.1%} of the bootstrap samples hold no such task and are left out")
    for key, name in (("if_lost_failed", "lost trials as failures"), ("if_diverged_failed", "diverged as 0")):
        if key in d:
            lines.append(f"    {name}: {_difference(d[key])}")
    return lines


def _span(row: Mapping[str, Any], form: str, scale: float, low: str = "low", high: str = "high") -> str:
    ends = row[low], row[high]
    if None in ends:
        return "none (all alike)"
    return " to ".join(form.format(scale * x) for x in ends)


def _p(p: float | None) -> str:
    return "not testable" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def _difference(d: Mapping[str, Any]) -> str:
    name = f"{d['a']} - {d['b']}"
    late = f"; planned on {d['planned_later']}, after the run began" if "planned_later" in d else ""
    if "p" not in d:
        points = f", {100 * d['difference']:+.1f} points" if d["n"] else ""
        return f"{name}: {d['n']} seeds in common{points}{late}"
    p = _p(d["p"]) if d["p"] is None else f"{_p(d['p'])} (Holm {_p(d['p_holm'])})"
    needed = d["seeds_for_effect"]
    return (
        f"{name}: {100 * d['difference']:+.1f} points, {d['n']} seeds, "
        f"t interval {_span(d, '{:+.1f}', 100)}, "
        f"bootstrap {_span(d, '{:+.1f}', 100, 'boot_low', 'boot_high')}, p {p}, "
        f"P(better) {d['p_improvement']:.2f}; "
        + (f"3 points need {needed} seeds" if needed else "seeds for 3 points not known")
        + late
    )
