"""Output of a run on the terminal: its progress, and the table at its end."""

from __future__ import annotations

import math
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any, TextIO

import tqdm

from coevolve_jax.analysis import stats
from coevolve_jax.analysis.costs import KEYS, by_role
from coevolve_jax.analysis.loading import fate, load_fired, load_forked
from coevolve_jax.types import SIGNAL_KINDS


class Progress:
    """Shows progress: a bar on a terminal; elsewhere (a log file, CI) some twenty lines."""

    def __init__(self, total: int, initial: int = 0, stream: TextIO | None = None):
        self._stream = stream or sys.stderr
        self._total, self._done, self._every = total, initial, max(1, math.ceil(total / 20))
        self._seconds = None
        self._bar = None
        if self._stream.isatty():
            self._bar = tqdm.tqdm(
                total=total,
                initial=initial,
                file=self._stream,
                unit="step",
                dynamic_ncols=True,
                bar_format="{n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}",
            )

    def update(self, row: Mapping[str, Any]) -> None:
        """Shows a row of metrics.jsonl."""
        seconds = row["seconds"]["step"]
        # Steps with evolution take longer, so show an average over about the last ten.
        self._seconds = seconds if self._seconds is None else 0.9 * self._seconds + 0.1 * seconds
        signals = sum(row["signals"].get(kind, 0) for kind in SIGNAL_KINDS)
        shown = (
            f"reward {_shown(row['reward'], '.2f')}, success {_shown(row['success'], '.0%')}, "
            f"signals {signals}, |D| {row['tasks']}, {self._seconds:.1f} s/step"
        )
        self.advance(shown)

    def advance(self, shown: str) -> None:
        """Shows that one more step is done, with this text behind it."""
        self._done += 1
        if self._bar is not None:
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update()
        elif self._done % self._every == 0 or self._done >= self._total:
            self.note(f"step {self._done:>{len(str(self._total))}}/{self._total}: {shown}")

    def note(self, text: str) -> None:
        """Writes a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def summary_table(summary: Mapping[str, Any], workdir: str | os.PathLike = "") -> str:
    """Returns the end-of-run table of a summary.json, as aligned plain text. workdir: of the run."""
    # A strategy also counts what is no signal, such as the skills that it keeps.
    kinds = {*SIGNAL_KINDS, *(row["kind"] for row in load_fired(workdir))} if workdir else SIGNAL_KINDS
    signals = {kind: n for kind, n in summary["signals"].items() if kind in kinds}
    forked, seconds = load_forked(workdir) if workdir else {}, summary["seconds"]
    total, fired = sum(seconds.values()), sum(signals.values())
    share = summary.get("evolution_share")
    blocks = [
        *([(fork_line(forked), [])] if forked else []),
        *([(warm_start_line(summary["warm_start"]), [])] if summary.get("warm_start") else []),
        (
            f"Held-out success ({summary['held_out_tasks']} {summary.get('held_out_split', '')} tasks)",
            held_out_lines(summary),
        ),
        ("Signals", [(kind, f"{n:>6}", _share(n, fired)) for kind, n in signals.items()]),
        ("Synthesised tasks", [(name, f"{n:>6}", "") for name, n in fate(summary["tasks"])]),
        *_cost_block(summary.get("explorer", {})),
        *_serving_block(summary.get("serving", {})),
        (
            f"Time ({summary['steps']} steps)",
            [(phase, f"{clock(s):>10}", _share(s, total)) for phase, s in seconds.items()]
            + [("total", f"{clock(total):>10}", "")]
            + ([("share of evolution", f"{share:>10.1%}", "")] if share is not None else []),
        ),
        (
            "Files",
            [
                (name, str(pathlib.Path(workdir) / name), "")
                for name in ("report.html", "summary.json", "tasks.jsonl")
            ],
        ),
    ]
    left = max(len(line[0]) for _, lines in blocks for line in lines) + 2
    middle = max(len(line[1]) for _, lines in blocks[:-1] for line in lines) + 3
    text = []
    for title, lines in blocks:
        text += [title, *(f"  {a:<{left}}{b:<{middle}}{c}".rstrip() for a, b, c in lines), ""]
    return "\n".join(text)


def fork_line(told: Mapping[str, Any]) -> str:
    """One line about the run that a fork goes on from. told: its forked.json."""
    run, digest = pathlib.PurePath(told["run"]).name, told["config_digest"]
    return (
        f"goes on from step {told['step']} of {run} (config {digest}), whose strategy was {told['strategy']}"
    )


def warm_start_line(told: Mapping[str, Any]) -> str:
    """One line about a warm start. told: its summary.json."""
    line = f"warm start: {told['demonstrations']} demonstrations, {told['steps']} steps"
    if loss := told["held_out_loss"]:
        line += f", held-out loss {loss['before']:.3f} -> {loss['after']:.3f}"
    if success := told["success"]:
        line += f", success {_shown(success['before'], '.1%')} -> {_shown(success['after'], '.1%')}"
    return line


def _cost_block(costs: Mapping[str, float]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Tokens and money of an explorer that is a model, by role; [] for any other."""
    roles = by_role(costs)
    if not roles:
        return []
    everything = {name: sum(own[name] for own in roles.values()) for name in KEYS}
    lines = [
        (role, f"{own['tokens_in'] + own['tokens_out']:>10,}", _paid(own))
        for role, own in {**roles, "total": everything}.items()
    ]
    unasked = costs.get("llm_faults/budget", 0)
    ended = [("budget spent", f"{unasked:>10,}", "questions not asked")] if unasked else []
    return [("Explorer (tokens)", lines + ended)]


def _serving_block(told: Mapping[str, float]) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Tokens that the engine computed; [] where it does not count them."""
    lines = [(n, f"{told[f'{n}_tokens']:>10,}", "") for n in ("prefill", "decode") if f"{n}_tokens" in told]
    if retries := told.get("slow_retries"):
        share = f"{retries / told['messages']:.1%}"
        lines.append(("slow messages", f"{retries:>10,}", f"sampled anew, {share} of those asked for"))
    return [("Rollouts (tokens)", lines)] if lines else []


def _paid(own: Mapping[str, float]) -> str:
    money = f", money {own['money']:.4g}" if own["money"] else ""
    return f"{own['tokens_in']:,} in, {own['tokens_out']:,} out{money}"


def held_out_lines(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Held-out success of a summary.json, line by line: what it is, its value, and its interval or a note."""
    result, worst = stats.held_out(summary), stats.held_out_at_worst(summary)
    lines = [*_result_lines(result), *_caveat_lines(result)] if result else [("not measured", "", "")]
    if worst:
        lines += [(f"{name}, lost as failures", value, note) for name, value, note in _result_lines(worst)]
    lines += _help_lines(summary)
    asked = summary.get("queries")
    told = asked and stats.before_and_after(asked["before"], asked["after"])
    for name, value, note in [*_result_lines(told), *_caveat_lines(told)] if told else []:
        lines.append((f"queries, {name}", value, note))
    sets = [
        (f"lost {when}, {name} set", row)
        for name, key in (("i.i.d.", "held_out"), ("balanced", "balanced"), ("queries", "queries"))
        for when, row in (summary.get(key) or {}).items()
    ]
    for name, row in summary.get("help", {}).items():
        sets.append((f"lost with help, {name.removesuffix(stats.HELP).replace('iid', 'i.i.d.')} set", row))
    for name, row in sets:
        if (lost := stats.lost_trials(row))[0]:
            lines.append((name, f"{lost[0]:>6}", lost_text(row)))
    return lines


def _help_lines(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Success with the strategy's hints after training, and what they gain; [] without hints."""
    helped = summary.get("help", {}).get(f"iid{stats.HELP}")
    if not helped:
        return []
    sides = summary["held_out"]["after"], helped
    if (told := stats.before_and_after(*sides)) is None:
        return []
    found = [("", told)]
    if worst := stats.at_worst(*sides):
        found.append((", lost as failures", worst))
    return [
        line
        for name, told in found
        for line in (
            (f"after, with help{name}", f"{told.after.value:>6.1%}", interval(told.after, "{:.1%}")),
            (f"gain of the help{name}", *_gain(told.paired)),
        )
    ]


def _gain(paired: stats.Paired) -> tuple[str, str]:
    """The mean difference per task in points, and its interval.

    Where trials are lost it is not the difference of the two rates, which are over all trials.
    """
    points = 100 * paired.difference.value
    return f"{points:>+5.1f} points", interval(paired.difference, "{:+.1f}", 100)


def _result_lines(result: stats.HeldOut) -> list[tuple[str, str, str]]:
    lines = [
        (when, f"{e.value:>6.1%}", interval(e, "{:.1%}"))
        for when, e in (("before", result.before), ("after", result.after))
    ]
    return lines + [
        ("gain", *_gain(result.paired)),
        (
            "paired permutation test",
            f" {p_value(result.paired.p)}",
            stats.units(result.paired),
        ),
    ]


def _caveat_lines(result: stats.HeldOut) -> list[tuple[str, str, str]]:
    caveat = stats.caveat(result.paired)
    return [("few scenarios", "", caveat)] if caveat else []


def interval(e: stats.Estimate, form: str, scale: float = 1) -> str:
    """Text of an estimate's interval, also where it has none."""
    if e.low is None or e.high is None:
        return "no interval: all tasks alike"
    return f"95% interval {form.format(scale * e.low)} to {form.format(scale * e.high)}"


def lost_text(row: Mapping[str, Any]) -> str:
    """Text that follows the number of lost trials: all trials, and the share that was lost.

    Above stats.LOST, also the success with lost trials counted as failures.
    """
    lost, asked = stats.lost_trials(row)
    text = f"of {asked} trials ({lost / asked:.1%})"
    if lost <= stats.LOST * asked:
        return text
    solved = sum(s for s, _ in row["by_task"].values())
    return f"{text}; success {solved / asked:.1%} if all of them are failures"


def _shown(value: float | None, form: str) -> str:
    """Text of a number; "none" for a batch without a valid rollout."""
    return "none" if value is None else format(value, form)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:>6.1%}" if whole else ""


def p_value(p: float) -> str:
    """Text of a p value. Below 0.001 it shows only the bound."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def clock(seconds: float) -> str:
    """Text of a duration: 5.2 s, 3 min 05 s, 2 h 04 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
