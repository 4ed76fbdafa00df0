"""Tells a person how a version's training goes, from the files that its runs write."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from coevolve_jax import config as configs
from coevolve_jax.diagnosis import trends
from coevolve_jax.harness.campaign import START, Campaign
from coevolve_jax.harness.records import Expectation
from coevolve_jax.harness.smoke import FIRST

EVERY = 60.0  # seconds between two sentences


class Training(NamedTuple):
    """A version whose runs are under way.

    Attributes:
      done: seed -> GRPO steps done. steps: of each, in all.
      success: of the last step's rollouts, the mean over the seeds that have one.
      expects: of the hypothesis. before: the parent's value of it. now: that of the steps so far.
      hours: until its runs have trained, about. all_hours: until the campaign has, at most. Neither counts
        evaluations. None before a step has been timed.
    """

    version: str
    done: Mapping[int, int]
    steps: int
    success: float | None
    expects: Expectation | None
    before: float | None
    now: float | None
    hours: float | None
    all_hours: float | None


def training(campaign: Campaign) -> Training | None:
    """The version whose runs are due, as far as they have come; None where no run is."""
    due, plan = campaign.next(), campaign.plan()
    if due is None or due[1] not in ("smoke", "evidence") or not (runs := campaign.runs(due[0])):
        return None
    version, part = due
    first, proposal = part == "smoke", campaign.read(version, "proposal")
    rows = {seed: _steps(run) for seed, run in runs.items()}
    whole, every = plan["config"]["steps"], len(plan["config"]["harness"]["seeds"])
    steps, seeds = (FIRST, 1) if first else (whole, every)
    expects = proposal.get("expects") and Expectation(**proposal["expects"])
    parent = (campaign.read(proposal["parent"], "evidence") or {}) if version != START else {}
    name = expects.diagnostic if expects else ""
    now = lambda seed: trends.trend(configs.of_run(runs[seed]), rows[seed]).get(name)
    second = trends.mean(r["seconds"].get("step") for own in rows.values() for r in own if "seconds" in r)
    jobs, done = (plan.get("told") or {}).get("jobs") or 1, sum(map(len, rows.values()))
    hours = lambda n, runs: None if second is None else max(n, 0) * second / min(jobs, runs) / 3600
    versions = campaign.left() + (version == START)  # with this one
    return Training(
        version,
        {seed: len(own) for seed, own in rows.items()},
        steps,
        trends.mean(own[-1].get("success") for own in rows.values() if own),
        expects,
        parent.get("row", {}).get(name),
        trends.mean(now(seed) for seed in runs if rows[seed]),
        hours(seeds * steps - done, seeds),
        hours(versions * every * whole - done, every),
    )


def sentence(t: Training | None) -> str:
    """Puts it into words; "" for None."""
    if t is None:
        return ""
    done = ", ".join(f"seed {seed} at step {n} of {t.steps}" for seed, n in t.done.items())
    parts = [done if t.success is None else f"{done}, success {t.success:.0%}"]
    if aim := t.expects:
        was, now = (f"{v:.4g}" if v is not None else "unknown" for v in (t.before, t.now))
        parts.append(f"{aim.diagnostic} is {now} so far, {was} in its parent, expected {aim.direction}")
    if t.hours is not None and t.all_hours is not None:
        parts.append(f"{_time(t.hours)} are left of it, {_time(t.all_hours)} of the campaign at most")
    return f"{t.version}: {'; '.join(parts)}."


def _time(hours: float) -> str:
    return f"{60 * hours:.0f} minutes" if hours < 1 else f"{hours:.1f} hours"


class Counted:
    """Says how many runs of a number are done, and the minutes until all are.

    done: how many are there to begin with, which tell nothing of the time of one.
    """

    def __init__(self, of: int, done: int):
        self._of, self._first, self._began = of, done, time.monotonic()

    def __call__(self, done: int) -> str:
        told = f"{done} of {self._of} runs"
        if done <= self._first:
            return told
        each = (time.monotonic() - self._began) / 60 / (done - self._first)
        return f"{told}, {(self._of - done) * each:.0f} minutes left"


@contextmanager
def said(say: Callable[[str], object], told: Callable[[], str], every: float = EVERY) -> Iterator[None]:
    """Says what `told` gives, now and then while the block runs, if it is something new."""
    ended, last = threading.Event(), [""]

    def go_on() -> None:
        while not ended.wait(every):
            try:
                text = told()
            except (OSError, ValueError, KeyError):  # a run is writing a file
                continue
            if text and text != last[0]:
                last[0] = text
                say(text)

    thread = threading.Thread(target=go_on, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _steps(run: Path) -> Sequence[dict[str, Any]]:
    """The rows of metrics.jsonl so far. Half a line, which is being written, is left out."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
