"""The report's charts, as SVG in the page: learning, co-evolution, optimisation and time."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from coevolve_jax.analysis import stats
from coevolve_jax.analysis.loading import Run, asked_for
from coevolve_jax.analysis.style import BLUE, COLOURS, GREEN, GREY, INK, ORANGE, PURPLE, STYLE, esc, grid
from coevolve_jax.analysis.summary import clock
from coevolve_jax.types import SIGNAL_KINDS


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
    with matplotlib.rc_context(dict(STYLE)):
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
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
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


def learning(run: Run) -> str:
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
            rates = [stats.Estimate(*[s / n] * 3) for s, n in known.values()]
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

    return "<h2>Learning</h2>" + grid(
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


def evolution(run: Run) -> str:
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
        births = {kind: [t["lineage"]["step"] for t in run.tasks if asked_for(t) == kind] for kind in COLOURS}
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
            [t["lineage"]["similarity"] for t in run.tasks if (asked_for(t) == "initial") == old]
            for old in (True, False)
        ]
        ax.hist(groups, np.linspace(0, 1, 41), stacked=True, color=[GREY, PURPLE], label=["initial", "new"])
        threshold = run.config.get("data", {}).get("leak_threshold")
        if threshold is not None:
            ax.axvline(threshold, color=ORANGE, linestyle="--", label=f"refused from {threshold:g}")
        ax.set(xlabel="cosine to the nearest evaluation task", ylabel="tasks", xlim=(0, 1))

    fired, no_tasks = any(any(row["signals"].values()) for row in rows), "tasks.jsonl is not there yet."
    lines = "".join(f"<tr><td>{esc(name)}</td><td>{esc(n)}</td></tr>" for name, n in run.fate)
    return "<h2>Co-evolution</h2>" + grid(
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


_GAUGES = (
    ("loss", "Loss", "Policy loss plus KL penalty: near zero, since a group's advantages add up to zero."),
    ("kl", "KL to the reference", "A slow rise from the frozen reference is learning, a jump is trouble."),
    ("grad_norm", "Gradient norm", "Before clipping; spikes mark batches that pull hard."),
    ("entropy", "Entropy", "Spread of the policy's choices in nats: towards zero it stops exploring."),
    ("mismatch_mean", "Mismatch", "Learner against sampler log-probability: should be rounding error."),
    ("mixed_groups", "Mixed groups", "Share of groups with both outcomes: GRPO learns from these."),
)


def machinery(run: Run) -> str:
    def gauge(key, title, reading):
        known = np.isfinite(_column(run.rows, key)).any()
        draw = lambda ax: _curve(ax, run.rows, key, None, BLUE)
        return chart(title, reading, known, draw, "Not measured.", (3.5, 2))

    seconds = run.seconds
    phases, total = sorted(seconds, key=lambda phase: seconds[phase]), sum(seconds.values()) or 1

    def time(ax):
        bars = ax.barh(phases, [seconds[p] for p in phases], color=BLUE, height=0.7)
        labels = [f"{seconds[p] / total:.1%}, {clock(seconds[p])}" for p in phases]
        ax.bar_label(bars, labels, padding=4)
        ax.set(xlabel="seconds", xlim=(0, 1.3 * max(seconds.values())))
        ax.grid(axis="y", visible=False)

    return (
        "<h2>Optimisation and time</h2>"
        + grid(*(gauge(*g) for g in _GAUGES), kind="three")
        + grid(
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
