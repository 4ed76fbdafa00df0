"""The leaderboard as a page, a table and plots: Markdown, CSV and SVG, from `leaderboard.board` alone."""

from __future__ import annotations

import csv
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coevolve_jax.comparison.differences import METRICS
from coevolve_jax.comparison.leaderboard import (
    COLUMNS,
    CONTROLS,
    FEW,
    FLIPPED,
    ORACLE,
    PROBE,
    RANDOM,
    Board,
    System,
    fidelity,
    planned,
    primary,
    systems,
)

MARKS = (
    "F: the key idea is faithful with a scripted explorer. P: a named part is missing. N: another method "
    "unless a language model plays the role. L: needs `explorer=llm`."
)
# The colours of the reports, which hold on white and on black (analysis/viewer/style.css).
INK, SOFT, LINE = "#1f2428", "#656d76", "#e4e6e9"
COLOURS = {RANDOM: "#b57bb0", PROBE: "#e0702a", ORACLE: "#1c9e78"}
METHOD, CONTROL = "#2b83c6", "#8c9196"
LEFT, RIGHT, TOP, STEP = 190, 30, 44, 24  # pixels of a plot


def write(boards: Sequence[Board], folder: Path) -> Path:
    """Writes leaderboard.md, and leaderboard/ with the CSV and a plot per testbed. Returns the page."""
    data = folder / "leaderboard"
    data.mkdir(parents=True, exist_ok=True)
    with open(data / "leaderboard.csv", "w", encoding="utf-8", newline="") as f:
        writer = csv.DictWriter(f, list[str](COLUMNS), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: _cell(v) for k, v in row.items()} for b in boards for row in b.rows)
    for b in boards:
        (data / f"{b.testbed.name}.svg").write_text(plot(b), encoding="utf-8")
    path = folder / "leaderboard.md"
    path.write_text(page(boards, systems()), encoding="utf-8")
    return path


def _cell(value: Any) -> Any:
    """A value of the CSV: rates with six decimals, "" for None."""
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value


def page(boards: Sequence[Board], literature: Sequence[System]) -> str:
    """The Markdown page: for each testbed a plot, the tables and what is missing; then the other systems."""
    parts = [
        "# Leaderboard",
        "Which method's idea is worth points over free exploration at equal rollouts? All rows have the same "
        "base policy, first tasks, validator, leak control, learner, budget and held-out tasks. "
        "[How to enter](../guides/enter_the_arena.md). [All columns](leaderboard/leaderboard.csv).",
        MARKS,
    ]
    for b in boards:
        parts += _testbed(b)
    return "\n\n".join([*parts, *_literature(literature, boards)]) + "\n"


def _testbed(b: Board) -> list[str]:
    plan, config = b.testbed.plan, b.testbed.plan["config"]
    seeds = sorted({s for own in b.by_seed.values() for s in own})
    evaluation = config["evaluation"]
    samples = evaluation.get("last_rollouts") or evaluation["num_rollouts"]
    rollouts = config.get("budget", {}).get("rollouts")
    budget = f"{rollouts:,} training rollouts" if rollouts else f"{config['steps']} steps"
    reads, day, commit = map(
        _plain, (plan["reads"], plan.get("date", "an unknown day"), plan.get("commit") or "unknown")
    )
    metric = METRICS[primary(b.testbed)].name
    title = f"{b.testbed.name}: each arm's mean, with its interval against random"
    count = sum(r["method"].partition("+")[0] not in CONTROLS and r["lo"] is not None for r in b.rows)
    error = f"{100 * b.sd:.1f} points ({b.df} degrees of freedom)" if b.df > 0 else "not known"
    return [
        f"## {b.testbed.name}",
        f"Budget: {budget} a run. {len(seeds)} seeds ({', '.join(map(str, seeds))}), {reads} split, "
        f"{samples} rollouts per held-out task at the end. Measure: {metric}. Error of a run, pooled over "
        f"arms: {error}. Planned on {day}, commit {commit}.",
        f"![{title}](leaderboard/{b.testbed.name}.svg)",
        _table(
            ["rank", "method", "mark", "macro success" if "macro" in metric else "success",
             "against random", "p", "against random_probe", "p (Holm)", "alike", "P(best)", "headroom"],
            [_result(r) for r in b.rows],
        ),
        *_under(b),
        f"Points are of 100. Intervals of methods against random, {count} here, hold together in 95% of such "
        "comparisons. The wider of Dunnett's and of sign flips within seeds counts, and p is the larger; "
        f"below {FLIPPED} seeds Dunnett's stands alone. Intervals of controls hold each by itself. Only "
        "methods whose interval lies above 0 and whose p is at most 0.05, also with lost trials as failures "
        "and diverged runs as 0, are compared with random_probe; these intervals are not adjusted, their p "
        "is. With few seeds an interval may lie above 0 beside a larger p: it flips the signs of differences "
        "around their mean, and p flips the differences themselves. Ranks are 95% intervals "
        f"over resampled seeds and scenarios, from {FEW} seeds on. Arms that share a letter cannot be told "
        "apart. Headroom is the share of what the oracle gains over random, where its interval lies above 0.",
        "### Costs",
        _table(
            ["method", "updates", "rollouts", "of batches", "of probes", "of branches", "gradients",
             "new tasks", "with a weak tool", "failed at first sight", "explorer steps", "LLM tokens",
             "minutes"],
            [_cost(r) for r in b.rows],
        ),
        "Means over seeds. Gradients are those that a method compares. Minutes hold the start that the arms "
        "of a seed share. They depend on the machine and on what ran beside it.",
        "### How near to the papers",
        "\n".join(
            f"* {_name(r['method'])}: {_plain(why)}"
            for r in b.rows
            if (why := fidelity(r["method"], b.testbed.modules)[1])
        ) or "* Only controls.",
        "### Seeds",
        _table(
            ["method", *map(str, seeds)],
            [[_name(r["method"]), *(_percent(b.by_seed[r["method"]].get(s)) for s in seeds)] for r in b.rows],
        ),
        "### Still to come, and caveats",
        "\n".join(f"* {line}" for line in [*map(_plain, b.said), *_joined(plan)]) or "* Nothing.",
    ]  # fmt: skip


def _result(r: Mapping[str, Any]) -> list[str]:
    low, high = r["rank_lo"], r["rank_hi"]
    rank = "" if low is None else f"{low}" if low == high else f"{low} to {high}"
    share = "" if r["headroom_share"] is None else f"{100 * r['headroom_share']:.0f}%"
    best = "" if r["p_best"] is None else f"{r['p_best']:.2f}"
    mean = _percent(r["mean"]) + "\\*" * _adjusted(r)
    return [
        rank, _name(r["method"]), r["fidelity"], mean, _span(r, "diff_random", "lo", "hi"), _p(r["p"]),
        _span(r, "diff_probe", "probe_lo", "probe_hi"), _p(r["probe_p"]), r["letters"] or "", best,
        share,
    ]  # fmt: skip


def _under(b: Board) -> list[str]:
    """Says what a reader of the table must know first: what has not run, and who stands apart."""
    ran, asked = planned(b.testbed, b.by_seed)
    come = "" if ran == asked else "; intervals and p widen as the others come"
    said = [f"**{ran} of {asked} planned methods {'has' if ran == 1 else 'have'} run{come}.**"] * bool(asked)
    few = [f"{_name(r['method'])} ({r['seeds']})" for r in b.rows if r["seeds"] < FEW]
    if few:
        said.append(f"Ranks and P(best) are without arms of fewer than {FEW} seeds: {', '.join(few)}.")
    if any(map(_adjusted, b.rows)):
        said.append(
            "Means with \\* are adjusted for the seeds that an arm lacks, by what others did in them. They "
            "move with the others' numbers; mean_raw of the CSV is the plain mean."
        )
    return [" ".join(said)] if said else []


def _adjusted(r: Mapping[str, Any]) -> bool:
    return abs(r["mean"] - r["mean_raw"]) > 1e-9


def _cost(r: Mapping[str, Any]) -> list[str]:
    keys = (
        "updates", "rollouts", "rollouts_policy", "rollouts_probe", "rollouts_branch", "gradients",
        "new_tasks", "weak_tasks",
    )  # fmt: skip
    whole = lambda value: "" if value is None else f"{value:,.0f}"
    minutes = None if r["seconds"] is None else r["seconds"] / 60
    return [
        _name(r["method"]), *(whole(r[key]) for key in keys), _percent(r["failed_first_sight"]),
        *(whole(value) for value in (r["explorer_steps"], r["llm_tokens"], minutes)),
    ]  # fmt: skip


def _joined(plan: Mapping[str, Any]) -> list[str]:
    """Says of each source that joined what came from it, and what nobody can check."""
    said = []
    for entry in plan.get("joined", ()):
        digest = f" (digest {entry['digest'][:12]})" if entry["digest"] else ""
        again = (
            f" Of {entry['repeated']} cells that are in another source too, {entry['alike']} have the same "
            "counts."
            if entry["repeated"]
            else ""
        )
        if arms := ", ".join(dict.fromkeys(_name(cell["arm"]) for cell in entry["cells"])):
            again = f"{arms}. That its numbers were really run cannot be checked from files.{again}"
        if again:
            said.append(
                f"From {'the bundle ' * bool(digest)}{_plain(entry['bundle'])}{digest}: {again.strip()}"
            )
    return said


def _literature(literature: Sequence[System], boards: Sequence[Board]) -> list[str]:
    there = {r["method"].partition("+")[0] for b in boards for r in b.rows}
    lines = [
        f"* **{s.name}**{f' ([{s.paper}](https://arxiv.org/abs/{s.paper}))' if s.paper else ''}. {s.what} "
        f"{s.verdict.capitalize()}: {s.why}.{f' Row: `{s.arm}`.' if s.arm in there else ''}"
        for s in literature
    ]
    kinds = [sum(s.verdict == verdict for s in literature) for verdict in ("in", "part", "out")]
    return [
        "## Systems of the literature",
        f"{len(literature)} systems. In ({kinds[0]}): a text or tool agent, which a strategy can host. Part "
        f"({kinds[1]}): another modality or domain, of which one mechanism carries over. Out ({kinds[2]}): "
        "hosting it would say nothing. A system without a row was not run.",
        "\n".join(lines),
    ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    line = lambda cells: f"| {' | '.join(cells)} |"
    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])


def _name(method: str) -> str:
    return f"`{method}`"


def _plain(text: str) -> str:
    """Text of others as Markdown that is no markup."""
    return html.escape(" ".join(str(text).split()), quote=False).replace("|", "&#124;").replace("[", "&#91;")


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def _p(value: float | None) -> str:
    return "" if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _span(r: Mapping[str, Any], key: str, low: str, high: str) -> str:
    if r[key] is None:
        return ""
    if r[low] is None:
        return f"{100 * r[key]:+.1f}, no interval"
    return f"{100 * r[key]:+.1f} ({100 * r[low]:+.1f} to {100 * r[high]:+.1f})"


def plot(b: Board) -> str:
    """A dot plot as SVG: each arm's mean with its interval against random, and lines for the references."""
    means = {r["method"]: r["mean"] for r in b.rows}
    ends = [means[RANDOM] + r[key] for r in b.rows for key in ("lo", "hi") if r[key] is not None] + list(
        means.values()
    )
    low, high = math.floor(20 * min(ends)) / 20, math.ceil(20 * max(ends)) / 20
    width, height = 760, TOP + STEP * len(b.rows) + 36
    x = lambda value: LEFT + (width - LEFT - RIGHT) * (value - low) / ((high - low) or 1)
    bottom = height - 36
    text = lambda at, y, words, anchor="middle", fill=INK, size=12: (
        f'<text x="{at:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">'
        f"{html.escape(words)}</text>"
    )
    stroke = lambda a, y, c, z, colour, more="": (
        f'<line x1="{a:.1f}" y1="{y:.1f}" x2="{c:.1f}" y2="{z:.1f}" stroke="{colour}" {more}/>'
    )
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" role="img">',
        f"<title>{html.escape(b.testbed.name)}: mean of each arm, with its interval against random</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    marks = round((high - low) / 0.05)
    for i in range(marks + 1):
        value = low + 0.05 * i
        drawn.append(stroke(x(value), TOP, x(value), bottom, LINE))
        drawn.append(text(x(value), bottom + 16, f"{100 * value:.0f}%", fill=SOFT))
    for place, (name, colour) in enumerate(COLOURS.items()):
        if name in means:
            at = x(means[name])
            drawn.append(stroke(at, TOP, at, bottom, colour, 'stroke-width="1.5" stroke-dasharray="4 3"'))
            drawn.append(text(at, 14 + 12 * (place % 3), name, fill=colour, size=11))
    for i, r in enumerate(b.rows):
        y = TOP + STEP * (i + 0.5)
        colour = COLOURS.get(r["method"], CONTROL if r["fidelity"] == "control" else METHOD)
        drawn.append(text(LEFT - 10, y + 4, r["method"], anchor="end"))
        if r["lo"] is not None:
            a, c = (x(means[RANDOM] + r[key]) for key in ("lo", "hi"))
            drawn.append(stroke(a, y, c, y, colour, 'stroke-width="2"'))
        drawn.append(f'<circle cx="{x(r["mean"]):.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')
    return "\n".join([*drawn, "</svg>"]) + "\n"
