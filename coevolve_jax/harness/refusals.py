"""Asks whether backtests are right: moves that they refuse are trained all the same, beside moves that pass.

    worse    success is below the start's by one standard error or more, or a run failed
    better   it is above the start's by one standard error or more
    alike    neither

A move is run under the same values of rollout.salt as the start, and its gain is the mean difference of runs
with the same salt. So a move without any effect has a gain of exactly 0, and the start's own luck counts once
for each salt. Of moves that differ by luck alone a sixth are worse and a sixth better where runs deviate by
config.harness.noise, and fewer where they deviate by less. docs/notes/harness.md has the shares of measured
runs.

experiments/check_backtests.py makes the runs, each an ordinary one of the start with one lever moved once.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict
from scipy.stats import fisher_exact

from coevolve_jax.harness import backtest, levers
from coevolve_jax.harness.backtest import Check
from coevolve_jax.harness.calibration import markdown, share
from coevolve_jax.harness.draws import Run
from coevolve_jax.records.files import write_text

KINDS = ("worse", "alike", "better")


class Tried(NamedTuple):
    """A move of the start, and what its backtest says.

    Attributes:
      by: the check that refuses it; "" if none does. why: its sentence, or "".
      unseen: the changed keys whose effect no check sees, at least in part.
    """

    lever: str
    move: str
    by: str
    why: str
    unseen: str

    @property
    def name(self) -> str:
        return f"{self.lever} {self.move}"


COLUMNS = ("start", *Tried._fields)  # of backtests.csv; start: the run of the store, as FOLDER/seed_N


class Trained(NamedTuple):
    """A move that was trained. gain: of success over the start's, by `judge`; None if a run failed."""

    tried: Tried
    gain: float | None
    kind: str


def moves(config: ConfigDict) -> Iterator[tuple[str, str, levers.Changes]]:
    """Yields (lever, move, changes) of every move that a campaign over `config` could propose first."""
    table = levers.table(config)
    for name, lever in table.items():
        for move in lever.moves(config):
            try:
                yield name, move, levers.move(table, config, name, move)
            except levers.Refused:
                continue  # it could not run, or would have no effect


def tried(
    config: ConfigDict,
    start: ConfigDict,
    runs: Sequence[Run],
    gradient: Callable[[ConfigDict], Mapping[str, Check]],
    known: Mapping[str, Tried],
) -> Iterator[Tried]:
    """Yields each move of the start with the word of its backtest; those that are known first.

    Args:
      config: of v000, with the section harness. start: without it.
      runs: the start's groups, of each run step by step.
      gradient: config of a move -> the checks of gradient.py.
    """
    yield from known.values()
    for lever, move, changes in moves(config):
        name = f"{lever} {move}"
        if name not in known:
            child = levers.changed(start, changes)
            told = backtest.backtest(start, child, runs, gradient=lambda c=child: gradient(c))
            yield Tried(lever, move, told.by, told.refused or "", " ".join(told.not_covered))


def drawn(rows: Sequence[Tried], refused: int, passed: int, rng: np.random.Generator) -> list[Tried]:
    """Draws so many of the refused moves and of those that passed, at most; refused and passed in turn."""
    order = [rows[i] for i in rng.permutation(len(rows))]
    sides = [r for r in order if r.by][:refused], [r for r in order if not r.by][:passed]
    longest = max(map(len, sides))
    return [side[i] for i in range(longest) for side in sides if i < len(side)]


def judge(gains: Sequence[float | None], noise: float) -> tuple[float | None, str]:
    """(gain, kind) of a move, from its gains under each salt; None for a run that failed.

    noise: standard deviation of one run's success, so that of the mean of n gains is noise * sqrt(2 / n).
    """
    known = [gain for gain in gains if gain is not None]
    if len(known) < len(gains):
        return None, "worse"
    gain, se = float(np.mean(known)), standard_error(noise, len(known))
    return gain, "worse" if gain <= -se else "better" if gain >= se else "alike"


def standard_error(noise: float, salts: int) -> float:
    """Returns that of the mean of so many gains, each of two runs."""
    return noise * math.sqrt(2 / salts)


def table(rows: Sequence[Tried], start: Sequence[float], trained: Sequence[Trained], noise: float) -> str:
    """Tells what was refused and how the trained moves fared, as Markdown; gains in points.

    start: its success under each salt.
    """
    by = Counter(r.by for r in rows if r.by)
    told = ", ".join(f"`{name}` {n}" for name, n in by.most_common()) or "none"
    told_start = ", ".join(f"{100 * success:.1f}%" for success in start)
    found = [
        f"Of {len(rows)} moves the backtest refuses {sum(by.values())}: {told}.",
        f"The start solves {told_start} (by salt). One standard error of a gain over it is "
        f"{100 * standard_error(noise, len(start)):.1f} points.",
        markdown(
            ("", "trained", *KINDS, "mean gain, without failed"),
            [_side(trained, True), _side(trained, False)],
        ),
    ]
    counts = {side: Counter(t.kind for t in trained if bool(t.tried.by) == side) for side in (True, False)}
    if all(n.total() for n in counts.values()):
        grid = [[n["worse"], n.total() - n["worse"]] for n in (counts[True], counts[False])]
        test: Any = fisher_exact(grid, alternative="greater")
        told = f"one-sided p {test.pvalue:.2g}"
        found.append(f"Refused moves are worse more often than those that passed: {told}.")
    if (refused := counts[True]).total():
        found.append(
            f"Worse: {share(refused['worse'], refused.total())} of the refused. Better, so refused at a "
            f"loss: {share(refused['better'], refused.total())}."
        )
    each = sorted(trained, key=lambda t: (t.tried.by == "", t.tried.by, -1.0 if t.gain is None else t.gain))
    lines = [(f"`{t.tried.name}`", t.tried.by or "passed", _points(t.gain), t.kind) for t in each]
    return "\n\n".join([*found, markdown(("move", "refused by", "gain", ""), lines)])


def write(path: Path, start: str, rows: Iterable[Tried]) -> None:
    """Writes the moves as CSV, a line for each. start: names the run that they were backtested on."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *((start, *row) for row in rows)])
    write_text(path, text.getvalue())


def read(path: Path) -> tuple[str, dict[str, Tried]]:
    """The run that moves were backtested on, and name -> what `write` wrote; "" and {} without a file.

    Raises ValueError for a file that is none of these.
    """
    if not path.exists():
        return "", {}
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path} has other columns than {', '.join(COLUMNS)}: move that file away.")
        rows = list(reader)
    if len(starts := {row["start"] for row in rows}) > 1:
        raise ValueError(f"{path} has backtests on {' and '.join(sorted(starts))}: move that file away.")
    found = (Tried(**{key: row[key] for key in Tried._fields}) for row in rows)
    return next(iter(starts), ""), {row.name: row for row in found}


def _side(trained: Sequence[Trained], refused: bool) -> tuple:
    own = [t for t in trained if bool(t.tried.by) == refused]
    kinds, gains = Counter(t.kind for t in own), [t.gain for t in own if t.gain is not None]
    mean = _points(float(np.mean(gains))) if gains else ""
    return "refused" if refused else "passed", len(own), *(kinds[k] for k in KINDS), mean


def _points(gain: float | None) -> str:
    return "failed" if gain is None else f"{100 * gain:+.1f}"
