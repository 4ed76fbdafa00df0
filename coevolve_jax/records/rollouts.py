"""Whole groups of rollouts on disk, which are read back exactly as they were. It needs no jax.

With config.logging.rollouts_every, the groups of a training step:

    rollouts/step_00012.jsonl.gz    a line per group: {"task": ..., "trajectories": [...]}, without tokens
    rollouts/step_00012.npz         arrays over the T tokens of all n trajectories, one after the other:
                                    ids, mask, logprobs, versions [T]; offsets [n + 1] of each one's tokens;
                                    where experts are recorded also routed [n] and routing [T', A, K]

With config.logging.evaluations, the groups of an evaluation after so many steps:

    evaluations/step_00040.jsonl.gz    a line per held-out task and set, which "set" names; without tokens
                                       "greedy" is the set "iid" decoded greedily

Equal groups give equal bytes, so a step that is done again writes the same files.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coevolve_jax.records.files import write_bytes
from coevolve_jax.types import Group, Task, TrainingSample, Trajectory

ROLLOUTS, EVALUATIONS = "rollouts", "evaluations"  # folders of a workdir
STEP = re.compile(r"step_(\d+)\.(jsonl\.gz|npz)")
TOKENS = {"ids": np.int32, "mask": bool, "logprobs": np.float32, "versions": np.int32}


def mean_advantages(samples: Sequence[TrainingSample]) -> dict[int, float]:
    """By id() of its trajectory: each sample's mean advantage over the tokens that the policy sampled."""
    return {
        id(s.trajectory): float(np.mean(s.advantages[s.trajectory.mask], dtype=np.float64))
        for s in samples
        if s.advantages is not None and s.trajectory.mask.any()
    }


def write_rollouts(
    workdir: Path, step: int, groups: Sequence[Group], samples: Sequence[TrainingSample] = ()
) -> None:
    """Writes the groups of a step, with the mean advantage of each trajectory that `samples` learn from."""
    lines, learned, content = _path(workdir, ROLLOUTS, step), mean_advantages(samples), io.BytesIO()
    arrays: Any = _arrays([t for group in groups for t in group.trajectories])
    np.savez_compressed(content, **arrays)
    lines.parent.mkdir(exist_ok=True)
    lines.unlink(missing_ok=True)  # the lines come last: where they are, the arrays belong to them
    write_bytes(_arrays_of(lines), content.getvalue())
    more = lambda t: {"turn_starts": t.turn_starts, "advantage": learned.get(id(t))}
    _write(lines, [_row(group, more) for group in groups])


def read_rollouts(workdir: str | Path, step: int) -> list[Group]:
    """The groups of a step, their trajectories whole.

    Raises ValueError, in one sentence, if there are none or their files are damaged.
    """
    lines = _path(workdir, ROLLOUTS, step)
    rows, arrays = _read(lines), _arrays_of(lines)
    try:
        with np.load(arrays, allow_pickle=False) as found:
            tokens = _tokens(found)
        if len(tokens) != sum(len(row["trajectories"]) for row in rows):
            raise ValueError(f"it has {len(tokens)} trajectories, and {lines.name} has others")
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{arrays} cannot be read ({error!r}): restore it.") from None
    each = iter(tokens)
    return [_group(row, lambda t: {"turn_starts": tuple(t["turn_starts"]), **next(each)}) for row in rows]


def read_advantages(workdir: str | Path, step: int) -> list[list[float | None]]:
    """The mean advantage of each trajectory of each group; None where the learner did not use it."""
    return [[t["advantage"] for t in row["trajectories"]] for row in _read(_path(workdir, ROLLOUTS, step))]


def write_evaluation(workdir: Path, step: int, sets: Mapping[str, Sequence[Group]]) -> None:
    """Writes the groups of each set, without tokens."""
    lines = _path(workdir, EVALUATIONS, step)
    lines.parent.mkdir(exist_ok=True)
    _write(lines, [{"set": name, **_row(group)} for name, groups in sets.items() for group in groups])


def read_evaluation(workdir: str | Path, step: int) -> dict[str, list[Group]]:
    """The groups of each set, their trajectories `without_tokens`. Raises ValueError as `read_rollouts`."""
    found: dict[str, list[Group]] = {}
    for row in _read(_path(workdir, EVALUATIONS, step)):
        found.setdefault(row["set"], []).append(_group(row))
    return found


def encode(row: Mapping[str, Any]) -> bytes:
    """A JSON line. It is Python's own JSON, infinity included: what a policy wrote comes back as it was."""
    return (json.dumps(row, default=lambda value: value.tolist()) + "\n").encode()


def steps(workdir: str | Path, folder: str) -> list[int]:
    """The steps of which a folder (ROLLOUTS or EVALUATIONS) holds groups, in order."""
    names = (path.name for path in (Path(workdir) / folder).glob("*.jsonl.gz"))
    return sorted(int(match[1]) for match in map(STEP.fullmatch, names) if match)


def from_step(first: int) -> Callable[[Any, list[str]], list[str]]:
    """Returns an argument `ignore` of shutil.copytree: it leaves out files of step `first` and later ones."""
    before = lambda name: (match := STEP.fullmatch(name)) and int(match[1]) < first
    return lambda folder, names: [name for name in names if not before(name)]


def _path(workdir: str | Path, folder: str, step: int) -> Path:
    return Path(workdir) / folder / f"step_{step:05d}.jsonl.gz"


def _arrays_of(lines: Path) -> Path:
    return lines.with_name(lines.name.removesuffix(".jsonl.gz") + ".npz")


def _arrays(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    arrays = {
        name: np.concatenate([np.zeros(0, kind), *(getattr(t, name) for t in trajectories)])
        for name, kind in TOKENS.items()
    }
    arrays["offsets"] = np.cumsum([0, *(len(t.ids) for t in trajectories)])
    if recorded := [t.routing for t in trajectories if t.routing is not None]:
        arrays["routed"] = np.asarray([t.routing is not None for t in trajectories])
        arrays["routing"] = np.concatenate(recorded)
    return arrays


def _tokens(arrays: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """The fields of each trajectory that have values for each token."""
    offsets, flat = arrays["offsets"], {name: arrays[name] for name in TOKENS}
    cut = lambda values, ends: [values[a:b] for a, b in zip(ends, ends[1:])]
    found = [dict(zip(flat, own)) for own in zip(*(cut(values, offsets) for values in flat.values()))]
    if "routed" in arrays:
        routed = arrays["routed"]
        ends = np.cumsum([0, *np.diff(offsets)[routed]])
        for n, routing in zip(np.flatnonzero(routed), cut(arrays["routing"], ends), strict=True):
            found[n]["routing"] = routing
    return found


def _row(group: Group, more: Callable[[Trajectory], dict] = lambda t: {}) -> dict:
    return {
        "task": group.task.to_json(),
        "trajectories": [{**t.to_json(), **more(t)} for t in group.trajectories],
    }


def _group(row: Mapping[str, Any], more: Callable[[Mapping], dict] = lambda t: {}) -> Group:
    trajectories = (dataclasses.replace(Trajectory.from_json(t), **more(t)) for t in row["trajectories"])
    return Group(Task.from_json(row["task"]), tuple(trajectories))


def _write(path: Path, rows: Sequence[dict]) -> None:
    write_bytes(path, gzip.compress(b"".join(map(encode, rows)), 6, mtime=0))


def _read(path: Path) -> list[dict]:
    try:
        if not (content := path.read_bytes()):
            raise ValueError("it is empty")
        return [json.loads(line) for line in gzip.decompress(content).splitlines()]
    except FileNotFoundError:
        there = ", ".join(map(str, steps(path.parents[1], path.parent.name))) or "none"
        raise ValueError(
            f"{path} does not exist (there are those of steps {there}): name one of these, or let a run "
            "write them by config.logging.rollouts_every and config.logging.evaluations."
        ) from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read ({error!r}): restore it.") from None
