"""Builds workdir/report.html from the files of a run alone: one self-contained page, at any time.

python -m coevolve_jax.analysis.report WORKDIR
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import html
import io
import json
import os
import pathlib
import re
import sys
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
import numpy as np

from coevolve_jax import metrics
from coevolve_jax.analysis import stats
from coevolve_jax.types import SIGNAL_KINDS

# Okabe and Ito's colour-blind safe hues, lightened where needed to hold on white and on black.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#2b83c6", "#e0702a", "#1c9e78", "#b57bb0", "#8c9196"
COLOURS = {"initial": GREY, "random": PURPLE, "forgetting": ORANGE, "boundary": BLUE, "rare": GREEN}
INK = "#7f7f7e"  # stands for the page's text colour; replaced by currentColor in the SVG
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "coevolve",
    "font.size": 9,
    "text.parse_math": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": INK,
    "grid.alpha": 0.18,
    "grid.linewidth": 0.6,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.8,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}
CSS = """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--ink:#24282c;--soft:#666d75;--line:#e3e5e8;
--bad:#c2410c;--good:#12805c;--tint:#f3f5f7}
@media (prefers-color-scheme:dark){:root{--bg:#15181b;--card:#1d2125;--ink:#e4e7ea;--soft:#9aa2aa;
--line:#31373d;--bad:#f0894f;--good:#45c39a;--tint:#262b30}}*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);overflow-wrap:anywhere;
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1100px;margin:auto;padding:28px 18px 60px}h1{font-size:27px;line-height:1.25;margin:0 0 6px}
h2{font-size:20px;margin:44px 0 4px}h3{font-size:15px;margin:0}p{margin:4px 0}
.lead{font-size:17px;max-width:52em;margin:10px 0 18px}.soft,.read{color:var(--soft)}.read{font-size:13px}
.grid{display:grid;gap:14px;margin-top:12px;grid-template-columns:
repeat(auto-fit,minmax(min(100%,var(--width,430px)),1fr))}.three{--width:290px}.cards{--width:215px}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px;min-width:0}
.card{break-inside:avoid}.card svg{display:block;width:100%;height:auto;margin:8px 0 2px;color:var(--soft)}
svg text{font-family:inherit!important}.big{font-size:26px;font-weight:650;line-height:1.3}
.missing{border:1px dashed var(--line);border-radius:8px;padding:22px;text-align:center;color:var(--soft)}
.badge{display:inline-block;border-radius:99px;padding:1px 9px;font-size:12px;font-weight:600;color:#fff;
print-color-adjust:exact;-webkit-print-color-adjust:exact}
.chain{padding:0 0 0 16px;margin:8px 0 10px;font-size:13px;color:var(--soft)}.chain b{color:var(--ink)}
.user{background:var(--tint);border-radius:12px 12px 12px 3px;padding:7px 12px;margin:10px 0 6px}
code,pre{font:12.5px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre-wrap;margin:0}
.call{display:block;margin:6px 0 0 14px;padding-left:10px;border-left:3px solid #2b83c6}
.answer{display:block;margin-left:14px;padding:1px 0 3px 10px;border-left:3px solid var(--line)}
.answer{color:var(--soft)}.error{border-color:var(--bad);color:var(--bad)}.good{color:var(--good)}
.bad{color:var(--bad)}summary{cursor:pointer;font-size:13px;color:var(--soft);margin-top:8px}
table{border-collapse:collapse;font-size:13.5px;width:100%;margin-top:6px}td:last-child{text-align:right}
td{padding:3px 0;border-top:1px solid var(--line)}@media print{main{padding:0}h2{break-after:avoid}}
"""


def write(workdir: str | os.PathLike) -> pathlib.Path:
    """Writes workdir/report.html and returns its path; raises what `metrics.load` raises."""
    path = pathlib.Path(workdir) / "report.html"
    path.write_text(render(metrics.load(workdir)), encoding="utf-8")
    return path


def render(run: metrics.Run) -> str:
    """The whole page."""
    sections = [f(run) for f in (_header, _learning, _evolution, _tasks, _trajectories, _machinery)]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>CoEvolve run</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{CSS}</style></head>'
        f"<body><main>{''.join(sections)}</main></body></html>"
    )


def _header(run: metrics.Run) -> str:
    summary, seconds, result = run.summary, run.seconds, stats.held_out(run.summary)
    strategy = summary.get("strategy") or run.config.get("strategy", {}).get("name", "unknown")
    facts = [
        f"strategy {strategy}",
        f"seed {summary.get('seed', run.config.get('seed', 'unknown'))}",
        f"{summary.get('steps', len(run.rows))} steps",
        f"files of {run.written:%Y-%m-%d %H:%M}",
        f"config {summary.get('config_digest', 'digest not recorded yet')}",
        *(f"{name} {version}" for name, version in summary.get("versions", {}).items()),
    ]
    lead = "The run is not finished: what is here is what its files hold so far."
    success = gain = ("—", "known at the end of the run")
    if result:
        before, after = result.before, result.after
        lead = (
            f"Success on {summary['held_out_tasks']} held-out tasks, never trained on, went from "
            f"{before.value:.1%} to {after.value:.1%} in {summary['steps']} GRPO steps."
        )
        spans = [f"{e.low:.0%} to {e.high:.0%}" for e in (before, after)]
        success = (f"{before.value:.0%} → {after.value:.0%}", f"95% intervals {spans[0]} and {spans[1]}")
        test = "no paired test: results by task not recorded"
        if result.paired:
            d, p = result.paired.difference, metrics.p_value(result.paired.p)
            test = f"95% interval {100 * d.low:+.1f} to {100 * d.high:+.1f}; {p}, paired over tasks"
        gain = (f"{100 * (after.value - before.value):+.1f} points", test)
    new = sum(_kind(task) != "initial" for task in run.tasks)
    total = sum(seconds.values())
    share = summary.get("evolution_share", seconds.get("evolution", 0) / total if total else 0)
    cards = [
        ("Held-out success", *success),
        ("Gain", *gain),
        ("Training set", len(run.tasks), f"{len(run.tasks) - new} initial tasks, {new} from evolution"),
        ("Time on evolution", f"{share:.1%}", f"of {metrics.clock(total)} in all"),
    ]
    return (
        "<h1>An agent and its training set, evolving together</h1>"
        f'<p class="soft">{esc(" · ".join(facts))}</p><p class="lead">{esc(lead)}</p>'
        + _grid(
            *(
                f'<div class="card"><h3 class="soft">{esc(title)}</h3><div class="big">{esc(value)}</div>'
                f'<p class="read">{esc(note)}</p></div>'
                for title, value, note in cards
            ),
            kind="cards",
        )
    )


def _grid(*cards: str, kind: str = "") -> str:
    return f'<div class="grid {kind}">{"".join(cards)}</div>'


def _kind(task: Mapping) -> str:
    """What asked for a task: a kind of signal, "random", "initial" or "benchmark"."""
    return task["lineage"]["signal"] or task["lineage"]["kind"]


def chart(
    title: str,
    reading: str,
    data: Any,
    draw: Callable[[Axes], None],
    without: str,
    size: tuple[float, float] = (5.4, 2.7),
) -> str:
    """A card with a chart and how to read it; `without` is shown where data is empty."""
    body = f'<div class="missing">{esc(without)}</div>'
    if data:
        body = f'{_svg(draw, size, title)}<p class="read">{esc(reading)}</p>'
    return f'<div class="card"><h3>{esc(title)}</h3>{body}</div>'


def _svg(draw: Callable[[Axes], None], size: tuple[float, float], title: str) -> str:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        ax = figure.subplots()
        draw(ax)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(
                loc="lower left",
                bbox_to_anchor=(-0.02, 1),
                ncols=4,
                borderpad=0,
                columnspacing=1.2,
                handlelength=1.2,
            )
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S)
    text = re.sub(r' (xmlns|xmlns:xlink|version)="[^"]*"', "", text).replace(INK, "currentColor")
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # ids of groups repeat from chart to chart
    return text.replace("<svg", f'<svg role="img" aria-label="{esc(title)}"', 1)


def _column(rows: Sequence[Mapping], key: str) -> np.ndarray:
    """Values [T] of one metric; null is NaN."""
    return np.array([np.nan if row.get(key) is None else row[key] for row in rows], np.float64)


def _curve(ax: Axes, rows: Sequence[Mapping], key: str, label: str | None, colour: str) -> None:
    steps, values = _column(rows, "step"), _column(rows, key)
    ax.plot(steps, values, color=colour, alpha=0.3, linewidth=0.9)
    ax.plot(steps, stats.moving_average(values, max(3, len(rows) // 8)), color=colour, label=label)
    ax.set_xlabel("GRPO step")


def _percent(ax: Axes) -> None:
    ax.set_ylim(0, 1)
    ax.set_yticks(np.linspace(0, 1, 6), [f"{p:.0%}" for p in np.linspace(0, 1, 6)])


def _whiskers(estimates: Sequence[stats.Estimate]) -> list[list[float]]:
    return [[e.value - e.low for e in estimates], [e.high - e.value for e in estimates]]


def _learning(run: metrics.Run) -> str:
    rows, result = run.rows, stats.held_out(run.summary)
    details = run.summary.get("held_out") or {}
    calls = {when: (details.get(when) or {}).get("by_calls", {}) for when in ("before", "after")}
    numbers = sorted({n for counts in calls.values() for n, (_, trials) in counts.items() if trials}, key=int)

    def curves(ax):
        _curve(ax, rows, "success", "success", BLUE)
        _curve(ax, rows, "reward", "reward", ORANGE)
        ax.plot(_column(rows, "step"), _column(rows, "held_out"), "D", color=GREEN, markersize=4)
        if result:
            ends, values = (rows[0]["step"] - 1, rows[-1]["step"]), (result.before, result.after)
            ax.errorbar(
                ends,
                [e.value for e in values],
                _whiskers(values),
                fmt="o",
                color=GREEN,
                markersize=5,
                capsize=3,
                linewidth=1.2,
                label="held-out success",
            )
        _percent(ax)

    def bars(ax):
        for shift, when, colour in ((-0.2, "before", GREY), (0.2, "after", BLUE)):
            known = {x: calls[when][n] for x, n in enumerate(numbers) if calls[when].get(n, [0, 0])[1]}
            rates = [stats.wilson(*counts) for counts in known.values()]
            ax.bar(
                [x + shift for x in known],
                [e.value for e in rates],
                0.38,
                color=colour,
                label=when,
                yerr=_whiskers(rates),
                error_kw={"ecolor": INK, "elinewidth": 1, "capsize": 2},
            )
        ax.set_xticks(range(len(numbers)), numbers)
        ax.set_xlabel("calls in the reference solution")
        ax.grid(axis="x", visible=False)
        _percent(ax)

    return "<h2>Learning</h2>" + _grid(
        chart(
            "Reward and success in training",
            "Thin lines are steps, thick lines their moving average; "
            "green marks are held-out success, with 95% intervals before and after training.",
            rows,
            curves,
            "metrics.jsonl holds no step yet.",
        ),
        chart(
            "Held-out success by number of calls",
            "Blue above grey is a gain; whiskers are 95% Wilson intervals over samples.",
            numbers,
            bars,
            "summary.json with the two held-out evaluations is written at the end of the run.",
        ),
    )


def _evolution(run: metrics.Run) -> str:
    rows, evolved = run.rows, [row for row in run.rows if row["evolution"]]

    def signals(ax):
        bins = np.array_split(np.arange(len(rows)), min(len(rows), 120))  # a longer run is averaged
        steps, base = [rows[b[0]]["step"] for b in bins], np.zeros(len(bins))
        for kind in SIGNAL_KINDS:
            counts = np.array([np.mean([rows[i]["signals"].get(kind, 0) for i in b]) for b in bins])
            ax.bar(steps, counts, 0.85 * len(rows) / len(bins), base, color=COLOURS[kind], label=kind)
            base += counts
        ax.set(xlabel="GRPO step", ylabel="signals per step")

    def growth(ax):
        births = {kind: [t["lineage"]["step"] for t in run.tasks if _kind(t) == kind] for kind in COLOURS}
        births = {kind: steps for kind, steps in births.items() if steps}
        # One step more than the last, so that what it added is seen.
        length = 2 + max([row["step"] for row in rows[-1:]] + [t["lineage"]["step"] for t in run.tasks])
        sizes = [np.cumsum(np.bincount(steps, minlength=length)) for steps in births.values()]
        ax.stackplot(
            np.arange(length),
            sizes,
            step="post",
            colors=[COLOURS[k] for k in births],
            labels=births,
            alpha=0.85,
            linewidth=0,
        )
        ax.set(xlabel="GRPO step", ylabel="tasks", ylim=(0, None))

    def generations(ax):
        _curve(ax, rows, "success_initial", "initial tasks", GREY)
        _curve(ax, rows, "success_new", "synthesised tasks", PURPLE)
        _percent(ax)

    def passes(ax):
        rates = _column([row["evolution"] for row in evolved], "pass_rate")
        ax.plot(_column(evolved, "step"), rates, "o-", color=GREEN)
        ax.set_xlabel("GRPO step")
        _percent(ax)

    def similarity(ax):
        groups = [
            [t["lineage"]["similarity"] for t in run.tasks if (_kind(t) == "initial") == old]
            for old in (True, False)
        ]
        ax.hist(groups, np.linspace(0, 1, 41), stacked=True, color=[GREY, PURPLE], label=["initial", "new"])
        threshold = run.config.get("data", {}).get("leak_threshold")
        if threshold is not None:
            ax.axvline(threshold, color=ORANGE, linestyle="--", label=f"refused from {threshold:g}")
        ax.set(xlabel="cosine to the nearest evaluation task", ylabel="tasks", xlim=(0, 1))

    fired, no_tasks = any(any(row["signals"].values()) for row in rows), "tasks.jsonl is not there yet."
    lines = "".join(f"<tr><td>{esc(name)}</td><td>{esc(n)}</td></tr>" for name, n in run.fate)
    return "<h2>Co-evolution</h2>" + _grid(
        chart(
            "Weakness signals by kind",
            "Height is the number of signals in a step: fewer over time means "
            "steadier behaviour on the tasks at hand.",
            fired,
            signals,
            "No signal has fired.",
        ),
        chart(
            "Growth of the training set",
            "Each step up is an evolution; the colour says what asked for the tasks it added.",
            run.tasks,
            growth,
            no_tasks,
        ),
        chart(
            "Success on initial and synthesised tasks",
            "Both should rise; purple below grey means that the new tasks are the harder ones.",
            rows,
            generations,
            "metrics.jsonl holds no step.",
        ),
        chart(
            "Validation pass rate",
            "Share of proposed tasks that ran well in a fresh environment, one point per evolution.",
            evolved,
            passes,
            "The training set has not evolved.",
        ),
        chart(
            "Similarity to evaluation tasks",
            "The further left, the less of the evaluation leaks; "
            "what would lie right of a dashed line was refused.",
            run.tasks,
            similarity,
            no_tasks,
        ),
        f'<div class="card"><h3>What became of the proposed tasks</h3><table>{lines}</table></div>',
    )


def esc(value: Any) -> str:
    """HTML-safe text; everything that a model, a task or a file says goes through here."""
    return html.escape(str(value), quote=True)


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit} more characters)"


def _call(call: Mapping) -> str:
    arguments = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in call["arguments"].items())
    return f"{call['name']}({arguments})"


def _tasks(run: metrics.Run) -> str:
    """The earliest and the latest task of each kind."""
    cards = []
    for kind in (*SIGNAL_KINDS, "random", "initial"):
        tasks = [task for task in run.tasks if _kind(task) == kind]
        cards += [_task(run, task) for task in tasks[:1] + tasks[1:][-1:]]
    intro = "The earliest and the latest task of each kind, what led to it and the calls that solve it."
    body = _grid(*cards) if cards else '<div class="missing">tasks.jsonl is not there yet.</div>'
    return f'<h2>Tasks to read</h2><p class="read">{intro}</p>{body}'


def _task(run: metrics.Run, task: Mapping) -> str:
    born, kind = task["lineage"], _kind(task)
    parent = next((t for t in run.tasks if t["id"] == born["parent"]), None)
    fired = [
        s
        for s in run.signals
        if (s["kind"], s["task_id"]) == (born["signal"], born["parent"]) and s["step"] <= born["step"]
    ]
    where = f" in rollout {fired[-1]['rollout_index']} of step {fired[-1]['step']}" if fired else ""
    pattern = f", rare action {fired[-1]['pattern']}" if fired and fired[-1]["pattern"] else ""
    query = f": “{_clip(parent['turns'][0]['query'], 160)}”" if parent else ""
    steps = f"steps {', '.join(map(str, born['triplets']))} of the {born['explorer']} explorer"
    chain = [
        ("signal", born["signal"] and born["signal"] + where + pattern),
        ("parent task" if parent else "scenario", born["parent"] and born["parent"] + query),
        ("reflection", born["context"]),
        ("exploration", born["triplets"] and steps),
        ("verdict", born["verdict"] and ", ".join(filter(None, (born["verdict"], born["reason"])))),
        ("nearest evaluation", born["nearest"] and f"{born['nearest']}, cosine {born['similarity']:.2f}"),
    ]
    items = "".join(f"<li><b>{esc(name)}</b> {esc(text)}</li>" for name, text in chain if text)
    turns = "".join(
        f'<div class="user">{esc(turn["query"])}</div>'
        + "".join(f'<code class="call">{esc(_call(call))}</code>' for call in turn["calls"])
        for turn in task["turns"]
    )
    badge = f'<span class="badge" style="background:{COLOURS.get(kind, GREY)}">{esc(kind)}</span>'
    return (
        f'<div class="card"><h3>{badge} {esc(task["id"])} '
        f'<span class="soft">step {esc(born["step"])}</span></h3>'
        f'<ul class="chain">{items}</ul>{turns}</div>'
    )


def _trajectories(run: metrics.Run) -> str:
    """One success and one failure of the first and of the last file."""
    cards, files = [], [(step, rows) for step, rows in run.trajectories if rows]
    for step, rows in files[:1] + files[1:][-1:]:
        for success in (True, False):
            found = [row for row in rows if row["success"] == success and row["valid"]]
            # The fullest one that is still short enough to read.
            found.sort(key=lambda row: min(len(row["steps"]), 8), reverse=True)
            cards += [_trajectory(step, row) for row in found[:1]]
    body = _grid(*cards) if cards else '<div class="missing">trajectories/ holds no file yet.</div>'
    intro = "A success and a failure, early and late: user shaded, policy blue, tools grey, errors orange."
    return f'<h2>Trajectories to read</h2><p class="read">{intro}</p>{body}'


def _trajectory(step: int, row: Mapping) -> str:
    word, colour = ("success", "good") if row["success"] else ("failure", "bad")
    parts = []
    for turn, query in enumerate(row["queries"]):
        parts.append(f'<div class="user">{esc(_clip(query, 1500))}</div>')
        for action in (s for s in row["steps"] if s["turn"] == turn):
            call = action["call"]
            said = _call(call) if call else f"not a call: {action['text']}"
            pair = ("call", not call, said), ("answer", action["error"], action["observation"])
            for css, wrong, text in pair:
                parts.append(f'<code class="{css}{" error" * wrong}">{esc(_clip(text, 700))}</code>')
    facts = (
        f"rollout {row['rollout_index']}, reward {row['reward']:.2f}, {row['policy_tokens']} tokens, "
        f"stop: {row['stop']}"
    )
    return (
        f'<div class="card"><h3>Step {esc(step)}: <span class="{colour}">{word}</span> '
        f'<span class="soft">on {esc(row["task_id"])}</span></h3><p class="read">{esc(facts)}</p>'
        f"{''.join(parts)}<details><summary>The exact text, prompt and template included</summary><pre>"
        f"{esc(_clip(row['text'], 12_000))}</pre></details></div>"
    )


_GAUGES = (
    ("loss", "Loss", "Policy loss plus KL penalty: near zero, since a group's advantages add up to zero."),
    ("kl", "KL to the reference", "A slow rise from the frozen reference is learning, a jump is trouble."),
    ("grad_norm", "Gradient norm", "Before clipping; spikes mark batches that pull hard."),
    ("entropy", "Entropy", "Spread of the policy's choices in nats: towards zero it stops exploring."),
    ("mismatch_mean", "Mismatch", "Learner against sampler log-probability: should be rounding error."),
    ("mixed_groups", "Mixed groups", "Share of groups with both outcomes: GRPO learns from these."),
)


def _machinery(run: metrics.Run) -> str:
    def gauge(key, title, reading):
        known = np.isfinite(_column(run.rows, key)).any()
        draw = lambda ax: _curve(ax, run.rows, key, None, BLUE)  # noqa: E731
        return chart(title, reading, known, draw, "Not measured.", (3.5, 2))

    seconds = run.seconds
    phases, total = sorted(seconds, key=seconds.get), sum(seconds.values()) or 1

    def time(ax):
        bars = ax.barh(phases, [seconds[p] for p in phases], color=BLUE, height=0.7)
        labels = [f"{seconds[p] / total:.1%}, {metrics.clock(seconds[p])}" for p in phases]
        ax.bar_label(bars, labels, padding=4)
        ax.set(xlabel="seconds", xlim=(0, 1.3 * max(seconds.values())))
        ax.grid(axis="y", visible=False)

    return (
        "<h2>Optimisation and time</h2>"
        + _grid(*(gauge(*g) for g in _GAUGES), kind="three")
        + _grid(
            chart(
                "Time by phase",
                "Long bars are where the run spends its time.",
                seconds,
                time,
                "No step is finished yet.",
                (7.2, 1.9),
            )
        )
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m coevolve_jax.analysis.report WORKDIR")
    try:
        sys.stdout.write(f"{write(sys.argv[1])}\n")
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
