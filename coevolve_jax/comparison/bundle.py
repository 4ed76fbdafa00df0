"""Bundles: the finished cells of a comparison in a folder small enough for git, and what joins another.

    bundle.json    the plan, its author's machine, date and commit, and each cell's files by their sha256
    files/         their contents, each once: gzip without a time, so that equal numbers are equal bytes

`write` makes one, `read` opens it, `join` moves its cells into a comparison's folder. There they count as
finished. `join`, and `check` for the leaderboard, check all that can be checked from the files: that they are
whole and agree with each other and with the plan. Nothing here can tell whether the numbers were really run.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax import shipped
from coevolve_jax.comparison import results
from coevolve_jax.comparison.arms import ARMS
from coevolve_jax.comparison.cell_files import RAN, diverged, ended, finished
from coevolve_jax.comparison.cells import begun
from coevolve_jax.comparison.consistency import MISSHAPEN, check_run, check_tries
from coevolve_jax.comparison.differences import METRICS
from coevolve_jax.comparison.plan import Cell, cell_config, start_config
from coevolve_jax.comparison.plan_file import JOINING
from coevolve_jax.comparison.quality import quality
from coevolve_jax.records.files import read_lines

FINISHED = (
    "config.json", "ledger.json", "held_out.jsonl", "tasks.jsonl", "evaluations.jsonl", "metrics.jsonl",
    "summary.json",  # last: its presence marks a finished run
)  # fmt: skip
DIVERGED = ("config.json", "failure.json")
# Bytes of one file, and of all cells' files: a few compressed bytes must fill neither memory nor disk.
MOST, WHOLE = 2**28, 2**31
LONGEST = 200  # bytes of a cell's name, which becomes that of a folder
KEYS = {"plan", "commit", "machine", "date", "cells", "digest"}
# Shapes (`_has`) of what is read of a plan. MORE: where it has some.
ASKED = {
    "config": dict, "arms": [str], "seeds": [int], "settings": [dict],
    "reads": str, "machine": str, "date": str, "command": str,
}  # fmt: skip
MORE = {
    "planned": [(str, str)],
    "planned_later": [{"date": str, "planned": [(str, str)]}],
    "extended": [{"date": str, "what": str}],
}
STARTS = {
    "initial_digest": "the tasks of D_0",
    "iid_digest": "the i.i.d. held-out tasks",
    "balanced_digest": "the balanced held-out tasks",
    "queries_digest": "the held-out queries",
    "model_digest": "the files of the base policy",
}
SHA = re.compile(r"[0-9a-f]{64}")


class Bundle(NamedTuple):
    """An opened bundle. cells: the files of each by name. told: its commit, machine and date."""

    name: str
    digest: str
    plan: dict[str, Any]
    told: dict[str, str]
    cells: dict[Cell, dict[str, bytes]]


def write(
    folder: Path, plan: Mapping[str, Any], cells: Iterable[Cell], target: Path, **told: str
) -> tuple[int, str]:
    """Writes a bundle of the cells that have a result. told: commit, machine, date.

    Returns their number and the digest. A bundle in `target` is replaced; what stays equal keeps its bytes.
    Raises ValueError where `target` holds something else, cannot be written, or no cell has a result.
    """
    check_target(target)
    contents: dict[str, bytes] = {}
    listed = []
    for cell in cells:
        workdir, files = cell.workdir(folder), {}
        if not ended(workdir):
            continue
        names = FINISHED if finished(workdir) else DIVERGED
        for name in (*names, *([RAN] if (workdir / RAN).exists() else [])):
            content = (workdir / name).read_bytes()
            files[name] = hashlib.sha256(content).hexdigest()
            contents[files[name]] = content
        listed.append({**cell._asdict(), "files": files})
    if not listed:
        raise ValueError(f"No cell of {folder} has a result yet: write the bundle when one is finished.")
    made = json.loads(json.dumps({"plan": plan, **told, "cells": listed}))
    made["digest"] = _digest(made)
    try:
        (target / "files").mkdir(parents=True, exist_ok=True)
        for sha, content in contents.items():
            (target / "files" / f"{sha}.gz").write_bytes(gzip.compress(content, 9, mtime=0))
        (target / "bundle.json").write_text(json.dumps(made, indent=1, sort_keys=True) + "\n")
        for path in (target / "files").glob("*.gz"):
            if path.stem not in contents:
                path.unlink()
    except OSError as error:
        raise ValueError(
            f"{target} cannot be a bundle ({error.strerror}: {error.filename}): choose another --bundle."
        ) from None
    return len(listed), made["digest"]


def check_target(target: Path) -> None:
    """Raises ValueError where no bundle can be written to the folder `target`."""
    configs.check_output("bundle", target, folder=True)
    if target.exists() and any(target.iterdir()) and not (target / "bundle.json").exists():
        raise ValueError(f"{target} is not empty and holds no bundle: choose another --bundle.")


def _digest(made: Mapping[str, Any]) -> str:
    """The sha256 over all of bundle.json but the digest; the files' own digests stand in there."""
    content = {key: value for key, value in made.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read(path: Path) -> Bundle:
    """Opens a bundle. Raises ValueError for one that is damaged or was changed by hand."""
    again = "ask its author for it once more, or leave it out of --join"
    try:
        made = json.loads((path / "bundle.json").read_text(encoding="utf-8"))
        if not isinstance(made, dict) or made.keys() != KEYS:
            raise ValueError(f"bundle.json must have the keys {', '.join(sorted(KEYS))}")
        _check_text(made)
        if (found := _digest(made)) != made["digest"]:
            raise ValueError(f"its digest is {made['digest']!r}, and its content has {found}")
        _check_asked(made["plan"])
        cells: dict[Cell, dict[str, bytes]] = {}
        folders, contents, size = set[Path](), dict[str, bytes](), 0
        for entry in made["cells"]:
            cell, files = _cell(entry), entry["files"]
            if {*files} - {RAN} not in (set(FINISHED), set(DIVERGED)) or cell.workdir(path) in folders:
                raise ValueError(f"{_named(cell)} has the files {', '.join(sorted(files))}, or stands twice")
            folders.add(cell.workdir(path))
            for name, sha in files.items():
                if sha not in contents:
                    contents[sha] = _content(path, name, sha)
                size += len(contents[sha])
                if size > WHOLE:
                    raise ValueError(f"the files of its cells have more than {WHOLE} bytes together")
            cells[cell] = {name: contents[sha] for name, sha in files.items()}
        told = {key: str(made[key]) for key in ("commit", "machine", "date")}
        return Bundle(path.resolve().name, str(made["digest"]), made["plan"], told, cells)
    except MISSHAPEN as error:
        raise ValueError(f"{path} is no whole bundle ({_said(error)}): {again}.") from None


def _said(error: Exception) -> str:
    """An error as a part of a sentence that a terminal may print: it may quote a file of others."""
    text = f"{error}" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
    return "".join(c if c.isprintable() else " " for c in text)


def _check_text(value: Any) -> None:
    """Raises ValueError for a text, at any depth, with characters that a terminal or a page would obey."""
    if isinstance(value, str) and not value.isprintable():
        raise ValueError(f"the text {value[:80]!r} cannot be printed")
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    for part in value if isinstance(value, list | tuple) else ():
        _check_text(part)


def _check_asked(asked: Mapping[str, Any]) -> None:
    """Raises ValueError where a plan lacks what is read of it, or has something else there."""
    there = {key: shape for key, shape in MORE.items() if asked.get(key, []) != []}
    for key, shape in {**ASKED, **there}.items():
        if not _has(asked.get(key), shape):
            raise ValueError(f"{key} of its plan is missing, or has another shape")
    if asked.get("primary") not in (None, *METRICS):
        raise ValueError(f"primary of its plan is {asked['primary']!r}")


def _has(value: Any, shape: Any) -> bool:
    """Whether a value of JSON has a shape.

    shape: a type; [a shape], of one value or more; (a shape, ...), of as many; {key: a shape}, with these
      keys and perhaps others.
    """
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(_has(value.get(key), own) for key, own in shape.items())
    if isinstance(shape, tuple):
        return isinstance(value, list) and len(value) == len(shape) and all(map(_has, value, shape))
    if isinstance(shape, list):
        return isinstance(value, list) and bool(value) and all(_has(part, shape[0]) for part in value)
    return type(value) is shape


def _cell(entry: Mapping[str, Any]) -> Cell:
    """A cell as bundle.json lists it. Its name becomes a folder's, so it must be a name, and not too long."""
    arm, seed = entry["arm"], entry["seed"]
    if not (isinstance(arm, str) and all(part.isidentifier() for part in arm.split("."))):
        raise ValueError(f"the arm {arm!r} is neither a name nor the dotted path of a module")
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise ValueError(f"the seed of {arm[:LONGEST]} is {seed!r:.30}")
    cell = Cell(arm, seed, _setting(entry["setting"]))
    if len(cell.column.encode()) > LONGEST:
        raise ValueError(f"the cell {cell.column[:30]!r}... has a name of more than {LONGEST} bytes")
    return cell


def _setting(items: Iterable[Sequence[Any]]) -> tuple[tuple[str, Any], ...]:
    """A cell's setting; lists of JSON become tuples."""
    return tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in items)


def _content(path: Path, name: str, sha: str) -> bytes:
    if not SHA.fullmatch(sha):
        raise ValueError(f"{name} has the sha256 {sha!r}")
    try:
        with gzip.open(path / "files" / f"{sha}.gz") as file:
            content = file.read(MOST + 1)
    except (EOFError, zlib.error) as error:
        raise ValueError(f"files/{sha}.gz cannot be decompressed: {error}") from None
    if len(content) > MOST or (found := hashlib.sha256(content).hexdigest()) != sha:
        found = f"more than {MOST} bytes" if len(content) > MOST else f"the sha256 {found}"
        raise ValueError(f"files/{sha}.gz, {name}, has {found}")
    return content


def expand(bundle: Bundle, folder: Path, made: Mapping[str, Any]) -> None:
    """Writes the cells into `folder` as a comparison has them.

    made: its plan, whose seeds and settings count. Raises ValueError, before it writes, for a cell of others.
    """
    for cell in bundle.cells:
        _check_asked_for(bundle, cell, made)
    for cell, files in bundle.cells.items():
        cell.workdir(folder).mkdir(parents=True)
        for name in sorted(files, key="summary.json".__eq__):  # summary.json comes last
            (cell.workdir(folder) / name).write_bytes(files[name])


def check(bundle: Bundle, folder: Path) -> None:
    """Expands the cells of a bundle into `folder` and checks them by its own plan.

    Raises ValueError as `join` does. Its plan must name modules of ours only: a bundle must not choose what
    is imported.
    """
    asked = bundle.plan
    try:
        for section in ("strategy", "explorer"):
            if "." in (name := asked["config"][section]["name"]):
                raise ValueError(f"config.{section}.name is {name!r}, which is none of ours")
        config = ConfigDict(configs.filled(configs.renamed(asked["config"])))
    except MISSHAPEN as error:
        raise ValueError(
            f"{bundle.name}: its plan cannot be read ({_said(error)}): take it into a comparison of your own "
            f"with {shipped.command('compare')} --join, and name that folder."
        ) from None
    expand(bundle, folder, asked)
    for cell in bundle.cells:
        _check_cell(bundle, cell, folder, config, ours=False)


def plan_of(bundles: Sequence[Bundle], made: Mapping[str, Any]) -> dict[str, Any] | None:
    """The plan of the first bundle of this very comparison: no arm, seed or setting that it lacks.

    A comparison whose folder is lost goes on with this plan: its date and its planned differences. made: of
    `plan_file.made`, in plain JSON values.
    """
    for bundle in bundles:
        if all(value in made[key] for key in ("arms", "seeds", "settings") for value in bundle.plan[key]):
            return {**bundle.plan, "joined": []}  # what joined it there is in other bundles
    return None


def joined(plan: Mapping[str, Any] | None) -> list[Cell]:
    """Cells of arms that are run elsewhere and joined this comparison, each once, also if a bundle grew."""
    found = (_cell(entry) for bundle in (plan or {}).get("joined", ()) for entry in bundle["cells"])
    return list(dict.fromkeys(found))


def join(
    folder: Path,
    bundles: Sequence[Bundle],
    config: ConfigDict,
    made: Mapping[str, Any],
    chosen: Sequence[Cell],
    keep: Callable[[list[dict[str, Any]]], object] = lambda entries: None,
) -> list[dict[str, Any]]:
    """Checks bundles and moves their cells into the comparison in `folder`. Nothing moves unless all are fit.

    made: the comparison's plan. chosen: the cells that this comparison runs itself; a bundle's own numbers of
    these are taken where it has none yet. Cells of other arms join it. keep: called with the result before
    anything moves, to write the plan: the same command then goes on with a comparison that is killed here.

    Returns for each bundle an entry of the plan's "joined". "taken" counts the cells that this comparison
    would have run, "repeated" those that it has already, "alike" those of them with the same counts.
    Raises ValueError, in one sentence with the bundle, the cell, the value and the remedy.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries, moves, known, coming = [], {}, {}, dict[Cell, Path]()
    here = [(c, c.workdir(folder), f"{_named(c)} in {folder}") for c in (*chosen, *joined(made))]
    here = [run for run in here if finished(run[1])]
    here += [(c, c.start(folder), f"{c.start(folder)}") for c in chosen if begun(c.start(folder))]
    with tempfile.TemporaryDirectory(prefix=JOINING, dir=folder) as beside:
        for place, bundle in enumerate(bundles):
            there = Path(beside) / f"{place}"
            _check_plan(bundle, made)
            expand(bundle, there, made)
            for cell in bundle.cells:
                _check_cell(bundle, cell, there, config, cell in chosen)
            theirs = [(c, c.workdir(there), _named(c)) for c in bundle.cells if finished(c.workdir(there))]
            _check_starts(bundle, [*here, *theirs], known)
            taken, repeated, alike, others = 0, 0, 0, []
            for cell in bundle.cells:
                mine, new = cell.workdir(folder), cell.workdir(there)
                have = mine if ended(mine) else coming.get(cell)  # here, or in a bundle before this one
                if mine.exists() and not ended(mine):
                    raise ValueError(
                        f"{bundle.name}: {_named(cell)} is being run in {mine}: let it end and leave it out, "
                        "or delete that folder."
                    )
                own = cell in chosen
                same = have is not None and _evaluated(have) == _evaluated(new)
                if not own and have is not None and not same:
                    raise ValueError(
                        f"{bundle.name}: {_named(cell)} has other counts than the cell of that name that "
                        f"joined before: leave one of the two out, and delete {mine} to replace it."
                    )
                if have is None:
                    moves[new], coming[cell] = mine, new
                taken += own and have is None
                repeated += own and have is not None
                alike += own and same
                others += [] if own else [cell._asdict()]
            entries.append(
                {
                    "bundle": bundle.name, "digest": bundle.digest, **bundle.told, "cells": others,
                    "taken": taken, "repeated": repeated, "alike": alike,
                }
            )  # fmt: skip
        entries = json.loads(json.dumps(entries))
        keep(entries)
        for new, mine in moves.items():
            mine.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(new, mine)
    return entries


def merged(before: Iterable[Mapping[str, Any]], new: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The plan's "joined" with new entries. A bundle that joins again keeps its first entry."""
    found = {entry["digest"]: dict(entry) for entry in (*new, *before)}
    order = dict.fromkeys(entry["digest"] for entry in (*before, *new))
    return [found[digest] for digest in order]


def _named(cell: Cell) -> str:
    return f"{cell.column}, seed {cell.seed}"


def _evaluated(workdir: Path) -> Any:
    """The counts of all evaluations; for a run that diverged the step where it did."""
    if failure := diverged(workdir):
        return failure["step"]
    rows = read_lines(workdir / "evaluations.jsonl")
    return [(row["step"], row["set"], row["by_task"]) for row in rows]


def _check_plan(bundle: Bundle, made: Mapping[str, Any]) -> None:
    ours = json.loads(json.dumps(made["config"]))
    try:
        theirs = _filled(configs.renamed(bundle.plan["config"]), ours)
    except MISSHAPEN as error:
        raise ValueError(
            f"{bundle.name}: its plan has no config that fits here ({_said(error)}): leave it out of --join."
        ) from None
    if theirs != ours:
        raise ValueError(
            f"{bundle.name} is of another plan ({configs.difference(theirs, ours)}): run its arms with this "
            "--config and these --set, or leave it out of --join."
        )


def _filled(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a bundle's config, with the defaults of keys that it lacks.

    Raises ValueError where it names another module than `ours`: a bundle must not choose what is imported.
    """
    for section in ("strategy", "explorer"):
        found, wanted = theirs[section]["name"], ours[section]["name"]
        if found != wanted:
            raise ValueError(f"config.{section}.name is {found!r} there and {wanted!r} here")
    return configs.numbers(configs.filled(theirs))


def _check_asked_for(bundle: Bundle, cell: Cell, made: Mapping[str, Any]) -> None:
    """Checks that a plan has the cell's seed and setting, and that its arm is one. made: as in `expand`."""
    where, seeds = f"{bundle.name}: {_named(cell)}", made["seeds"]
    if cell.arm not in ARMS and "." not in cell.arm:
        raise ValueError(
            f"{where}: there is no arm {cell.arm!r}: an arm of one's own has the dotted path of its module."
        )
    if cell.seed not in seeds:
        raise ValueError(
            f"{where}: the seeds of this comparison are {', '.join(map(str, seeds))}: name the seed in "
            "--seeds, or ask for a bundle without it."
        )
    if cell.setting not in [_setting(setting.items()) for setting in made["settings"]]:
        raise ValueError(f"{where}: its setting is none of this comparison's: name it in --grid.")


def _check_cell(bundle: Bundle, cell: Cell, there: Path, config: ConfigDict, ours: bool) -> None:
    """Checks one cell, expanded in the folder `there`. ours: this comparison runs the same cell."""
    where, workdir = f"{bundle.name}: {_named(cell)}", cell.workdir(there)
    try:
        theirs, asked = configs.read(workdir), start_config(config, cell)
        if ours or cell.arm in ARMS:
            asked = cell_config(config, cell)
        elif (name := theirs["strategy"]["name"]) == cell.arm:
            theirs["strategy"] = {"name": "static"}  # its own, and perhaps not installed here
        else:
            raise ValueError(f"config.strategy.name is {name!r}, which is not the arm's name")
        wanted = configs.numbers_of(asked)
        if (found := _filled(theirs, wanted)) != wanted:
            raise ValueError(configs.difference(found, wanted))
    except MISSHAPEN as error:
        raise ValueError(
            f"{where}: its config is not the plan's ({_said(error)}): an arm may change its own strategy and "
            "nothing else, so run it again under this plan."
        ) from None
    try:
        check_tries(workdir)
        if finished(workdir):
            check_run(workdir)
            rows = results.outcomes(there, [cell])
            _check_text([rows, quality(there, [cell], rows)])
        _check_text(results.budgets(there, [cell]))
    except MISSHAPEN as error:
        raise ValueError(
            f"{where}: its numbers do not add up ({_said(error)}): ask for the bundle that "
            f"{shipped.command('compare')} --bundle wrote, or leave it out of --join."
        ) from None


def _check_starts(
    bundle: Bundle, runs: Iterable[tuple[Cell, Path, str]], known: dict[tuple, tuple[str, dict[str, str]]]
) -> None:
    """Checks that all runs of a seed and setting begin with the same policy, D_0 and held-out tasks.

    runs: each cell with a folder of its beginning, and its name. known: what the first of them began with;
    grows.
    """
    for cell, workdir, name in runs:
        digests = results.start_digests(workdir)
        first, theirs = known.setdefault((cell.seed, tuple(cell.shared.items())), (name, digests))
        if not theirs["model_digest"]:  # that run does not tell
            theirs["model_digest"] = digests["model_digest"]
        for what, digest in digests.items():
            if digest != theirs[what] and (digest or what != "model_digest"):
                raise ValueError(
                    f"{bundle.name}: {_named(cell)}: {STARTS[what]} have the digest {digest!r}, and "
                    f"those of {first} {theirs[what]!r}: all runs of a seed begin alike, so run the "
                    "arm again with this config, these seeds and this version of the code."
                )
