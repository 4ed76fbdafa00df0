"""What a run writes about itself (and `load` reads) and what its user sees: logs, progress, final table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
import dataclasses
import datetime
import functools
import json
import math
import os
import pathlib
import re
import sys
from typing import Any, TextIO

import numpy as np
import tqdm

from coevolve_jax.analysis import stats

METRICS, SIGNALS = "metrics.jsonl", "signals.jsonl"
_TRAJECTORIES = re.compile(r"step_(\d+)\.jsonl")


class MetricsWriter:
    """Append-only JSONL logs of a workdir, and TensorBoard scalars under workdir/tensorboard.

    resume_sizes: what `sizes` returned when the checkpoint was saved; the logs are cut back to it, so that
    a resumed run writes the bytes that an unbroken one would have. None starts the logs anew.
    """

    def __init__(self, workdir: str | os.PathLike, resume_sizes: Mapping[str, int] | None = None):
        import tensorboardX  # it imports torch where there is one: seconds that reading a run should not cost

        self._dir = pathlib.Path(workdir)
        self._dir.mkdir(parents=True, exist_ok=True)
        sizes = {METRICS: 0, SIGNALS: 0, **(resume_sizes or {})}
        self._last = truncate(self._dir, sizes)
        self._begun = set(sizes)
        for name in sizes:
            (self._dir / name).touch()
        events = self._dir / "tensorboard"
        # purge_step hides what an interrupted run wrote after the checkpoint.
        purge = self._last + 1 if events.exists() else None
        self._events = tensorboardX.SummaryWriter(str(events), purge_step=purge, flush_secs=10)

    def write_step(self, row: Mapping[str, Any]) -> None:
        """Logs one GRPO step. Raises ValueError where row["step"] does not follow the last one."""
        if row["step"] <= self._last:
            raise ValueError(
                f"metrics.jsonl already holds step {self._last}, so step {row['step']} cannot be added; "
                "resume with the sizes of the checkpoint that the run starts from."
            )
        self.append(METRICS, [row])
        self._last = row["step"]
        for name, value in flatten(row):
            self._events.add_scalar(name, value, self._last)

    def append(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends JSON lines to workdir/name, one flush per line.

        A file that the checkpoint does not list was written after it, and starts empty.
        """
        path = self._dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab" if name in self._begun else "wb") as file:
            for row in rows:
                file.write(encode(row))
                file.flush()
        self._begun.add(name)

    def sizes(self) -> dict[str, int]:
        """Bytes of each log, for the checkpoint; synced to disk first, so that no file can be shorter later.

        trajectories/ is left out: its files belong to one step each, and `truncate` drops whole files.
        """
        sizes = {}
        for name in sorted(name for name in self._begun if "/" not in name):
            with open(self._dir / name, "ab") as file:
                os.fsync(file.fileno())
                sizes[name] = file.tell()
        return sizes

    def close(self) -> None:
        self._events.close()


def truncate(workdir: str | os.PathLike, sizes: Mapping[str, int]) -> int:
    """Cuts the logs of a workdir back to `sizes` (bytes by name) and returns the last step left, or -1.

    Files of trajectories/ that belong to later steps are deleted. Nothing is changed where a log is
    shorter than recorded: ValueError, since the run cannot be continued truthfully.
    """
    workdir = pathlib.Path(workdir)
    for name, size in sizes.items():
        path = workdir / name
        found = path.stat().st_size if path.exists() else 0
        if found < size:
            raise ValueError(
                f"{path} holds {found} bytes where the checkpoint recorded {size}: lines were lost after it "
                "was saved; restore the file, or start again in a new workdir."
            )
    for name, size in sizes.items():
        if (workdir / name).exists():
            os.truncate(workdir / name, size)
    last = -1
    if sizes.get(METRICS):
        last = json.loads((workdir / METRICS).read_bytes().splitlines()[-1])["step"]
    for path in (workdir / "trajectories").glob("step_*.jsonl"):
        match = _TRAJECTORIES.fullmatch(path.name)
        if match and int(match[1]) > last:
            path.unlink()
    return last


def encode(row: Mapping[str, Any]) -> bytes:
    """One JSON line. Floats are written with repr: reading gives the same bits. NaN and infinity are null."""
    return (json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) + "\n").encode()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def flatten(row: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, float]]:
    """Yields the numbers of a nested row, named like "seconds/update"; null, NaN and "step" stay out."""
    for key, value in _plain(row).items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and prefix + key != "step":
            yield prefix + key, float(value)


@dataclasses.dataclass(frozen=True)
class Run:
    """The files of a workdir; what is not there yet is empty. trajectories: (step, rows) in order of step."""

    config: dict
    summary: dict
    rows: list[dict]
    tasks: list[dict]
    signals: list[dict]
    trajectories: list[tuple[int, list[dict]]]
    written: datetime.datetime

    @functools.cached_property
    def seconds(self) -> dict[str, float]:
        """Seconds by phase; in the middle of a run by its steps, where "environment" is a part of rollout."""
        total = Counter()
        for row in self.rows:
            total.update({k: v for k, v in row["seconds"].items() if k not in ("environment", "step") and v})
        return self.summary.get("seconds") or dict(total)

    @functools.cached_property
    def fate(self) -> list[tuple[str, int]]:
        """What became of proposed tasks: (name, count) lines, reasons of refusal last, the frequent first."""
        evolutions = [row["evolution"] for row in self.rows if row["evolution"]]
        return fate(
            self.summary.get("tasks")
            or {
                **{k: sum(e[k] for e in evolutions) for k in ("proposed", "accepted", "retained")},
                "refused": sum((Counter(e["refused"]) for e in evolutions), Counter()),
            }
        )


def load(workdir: str | os.PathLike) -> Run:
    """Reads a workdir, also while a run writes to it.

    Raises FileNotFoundError where workdir is no folder and ValueError where a line of its files is no JSON.
    """
    workdir = pathlib.Path(workdir)
    if not workdir.is_dir():
        raise FileNotFoundError(f"{workdir} is not a folder; give the workdir of a run.")
    lines = {name: _lines(workdir / f"{name}.jsonl") for name in ("metrics", "tasks", "signals")}
    config, summary = (
        json.loads(path.read_bytes()) if path.exists() else {}
        for path in (workdir / "config.json", workdir / "summary.json")
    )
    files = sorted((workdir / "trajectories").glob("step_*.jsonl"))
    trajectories = [(int(m[1]), _lines(path)) for path in files if (m := _TRAJECTORIES.fullmatch(path.name))]
    stamps = [path.stat().st_mtime for path in workdir.glob("*.json*")]
    written = datetime.datetime.fromtimestamp(max(stamps, default=workdir.stat().st_mtime))
    return Run(config, summary, lines["metrics"], lines["tasks"], lines["signals"], trajectories, written)


def _lines(path: pathlib.Path) -> list[dict]:
    """Rows of a JSONL file; a last line without its newline is still being written and left out."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error}); remove the line.") from None
    return rows


def fate(tasks: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Lines of a summary's "tasks": counts by verdict, then refusals by reason, the most frequent first."""
    refused = sorted(tasks["refused"].items(), key=lambda item: (-item[1], item[0]))
    verdicts = [(name, tasks[name]) for name in ("proposed", "accepted", "retained")]
    return verdicts + [(f"refused: {reason}", n) for reason, n in refused]


class Progress:
    """A bar over the steps on a terminal; elsewhere (a log file, CI) one line every `every` steps."""

    def __init__(self, total: int, initial: int = 0, stream: TextIO | None = None, every: int | None = None):
        self._stream = stream or sys.stderr
        self._total, self._done, self._every = total, initial, every or max(1, math.ceil(total / 20))
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
        self._done += 1
        seconds = row["seconds"]["step"]
        # Evolution makes some steps longer than others: the mean of about the last ten is shown.
        self._seconds = seconds if self._seconds is None else 0.9 * self._seconds + 0.1 * seconds
        shown = (
            f"reward {_shown(row['reward'], '.2f')}, success {_shown(row['success'], '.0%')}, "
            f"signals {sum(row['signals'].values())}, |D| {row['tasks']}, {self._seconds:.1f} s/step"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update()
        elif self._done % self._every == 0 or self._done >= self._total:
            self.note(f"step {self._done:>{len(str(self._total))}}/{self._total}: {shown}")

    def note(self, text: str) -> None:
        """Writes a line above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def summary_table(summary: Mapping[str, Any], workdir: str | os.PathLike = "") -> str:
    """The end-of-run table of a summary.json, as aligned plain text. workdir prefixes the files to open."""
    signals, seconds = summary["signals"], summary["seconds"]
    total, fired = sum(seconds.values()), sum(signals.values())
    share = summary.get("evolution_share")
    blocks = [
        (f"Held-out success ({summary['held_out_tasks']} tasks)", _held_out_lines(summary)),
        ("Signals", [(kind, f"{n:>6}", _share(n, fired)) for kind, n in signals.items()]),
        ("Synthesised tasks", [(name, f"{n:>6}", "") for name, n in fate(summary["tasks"])]),
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


def _held_out_lines(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    result = stats.held_out(summary)
    if result is None:
        return [("not measured", "", "")]
    lines = [
        (when, f"{e.value:>6.1%}", f"95% interval {e.low:.1%} to {e.high:.1%}")
        for when, e in (("before", result.before), ("after", result.after))
    ]
    points = 100 * (result.after.value - result.before.value)
    if result.paired is None:
        return lines + [("gain", f"{points:>+5.1f} points", "no paired test: results by task not recorded")]
    d = result.paired.difference
    return lines + [
        ("gain", f"{points:>+5.1f} points", f"95% interval {100 * d.low:+.1f} to {100 * d.high:+.1f}"),
        ("paired permutation test", f" {p_value(result.paired.p)}", f"over {result.paired.tasks} tasks"),
    ]


def _shown(value: float | None, form: str) -> str:
    """A number as text; a batch without one valid rollout has none."""
    return "none" if value is None else format(value, form)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:>6.1%}" if whole else ""


def p_value(p: float) -> str:
    """Text of a p value; below 0.001 only the bound is shown."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def clock(seconds: float) -> str:
    """Text of a duration: 5.2 s, 3 min 05 s, 2 h 04 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
