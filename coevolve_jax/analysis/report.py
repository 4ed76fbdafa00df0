"""Builds workdir/report.html from the files of a run alone: one self-contained page, at any time.

python -m coevolve_jax.analysis.report WORKDIR
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Mapping

from coevolve_jax.analysis import charts, stats
from coevolve_jax.analysis.loading import Run, asked_for, load_run
from coevolve_jax.analysis.style import COLOURS, CSS, GREY, esc, grid
from coevolve_jax.analysis.summary import clock, p_value
from coevolve_jax.types import SIGNAL_KINDS


def write_report(workdir: str | os.PathLike) -> pathlib.Path:
    """Writes workdir/report.html and returns its path; raises what `load_run` raises."""
    path = pathlib.Path(workdir) / "report.html"
    path.write_text(render(load_run(workdir)), encoding="utf-8")
    return path


def render(run: Run) -> str:
    """The whole page."""
    sections = [
        f(run) for f in (_header, charts.learning, charts.evolution, _tasks, _trajectories, charts.machinery)
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>CoEvolve run</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{CSS}</style></head>'
        f"<body><main>{''.join(sections)}</main></body></html>"
    )


def _header(run: Run) -> str:
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
            d, p = result.paired.difference, p_value(result.paired.p)
            test = f"95% interval {100 * d.low:+.1f} to {100 * d.high:+.1f}; {p}, paired over tasks"
        gain = (f"{100 * (after.value - before.value):+.1f} points", test)
    new = sum(asked_for(task) != "initial" for task in run.tasks)
    total = sum(seconds.values())
    share = summary.get("evolution_share", seconds.get("evolution", 0) / total if total else 0)
    cards = [
        ("Held-out success", *success),
        ("Gain", *gain),
        ("Training set", len(run.tasks), f"{len(run.tasks) - new} initial tasks, {new} from evolution"),
        ("Time on evolution", f"{share:.1%}", f"of {clock(total)} in all"),
    ]
    return (
        "<h1>An agent and its training set, evolving together</h1>"
        f'<p class="soft">{esc(" · ".join(facts))}</p><p class="lead">{esc(lead)}</p>'
        + grid(
            *(
                f'<div class="card"><h3 class="soft">{esc(title)}</h3><div class="big">{esc(value)}</div>'
                f'<p class="read">{esc(note)}</p></div>'
                for title, value, note in cards
            ),
            kind="cards",
        )
    )


def _clip(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text) - limit} more characters)"


def _call(call: Mapping) -> str:
    arguments = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in call["arguments"].items())
    return f"{call['name']}({arguments})"


def _tasks(run: Run) -> str:
    """The earliest and the latest task of each kind."""
    cards = []
    for kind in (*SIGNAL_KINDS, "random", "initial"):
        tasks = [task for task in run.tasks if asked_for(task) == kind]
        cards += [_task(run, task) for task in tasks[:1] + tasks[1:][-1:]]
    intro = "The earliest and the latest task of each kind, what led to it and the calls that solve it."
    body = grid(*cards) if cards else '<div class="missing">tasks.jsonl is not there yet.</div>'
    return f'<h2>Tasks to read</h2><p class="read">{intro}</p>{body}'


def _task(run: Run, task: Mapping) -> str:
    born, kind = task["lineage"], asked_for(task)
    parent = next((t for t in run.tasks if t["id"] == born["parent"]), None)
    fired = [
        s
        for s in run.signals
        if (s.get("kind"), s.get("task_id")) == (born["signal"], born["parent"]) and s["step"] <= born["step"]
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


def _trajectories(run: Run) -> str:
    """One success and one failure of the first and of the last file."""
    cards, files = [], [(step, rows) for step, rows in run.trajectories if rows]
    for step, rows in files[:1] + files[1:][-1:]:
        for success in (True, False):
            found = [row for row in rows if row["success"] == success and row["valid"]]
            # The fullest one that is still short enough to read.
            found.sort(key=lambda row: min(len(row["steps"]), 8), reverse=True)
            cards += [_trajectory(step, row) for row in found[:1]]
    body = grid(*cards) if cards else '<div class="missing">trajectories/ holds no file yet.</div>'
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


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m coevolve_jax.analysis.report WORKDIR")
    try:
        sys.stdout.write(f"{write_report(sys.argv[1])}\n")
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
