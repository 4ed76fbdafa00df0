"""plan.json: the plan that a command makes, what is left of an earlier one, and what a later one may add."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.comparison.plan import cell_config, cells, primary
from coevolve_jax.records.files import lock, write_text

RUNS = ("seeds", "arms", "settings")  # keys that say which runs there are
TOLD = ("date", "machine", "command", "commit")  # keys that stay those of the first command
# Begins the name of a folder in which cells are checked before they move in (bundle.join).
JOINING = ".join-"
LOCK = "lock_"  # begins the name of a part's lock
LEFT = (JOINING, LOCK, "plan.json.tmp")  # what a kill or a refusal may leave in a folder without a plan


def made(
    config: ConfigDict,
    arms: Sequence[str],
    seeds: Sequence[int],
    settings: Sequence[Mapping[str, Any]],
    planned: Sequence[tuple[str, str]],
    **about: str,
) -> dict[str, Any]:
    """Returns a command's plan in plain JSON values. about: its machine, date, commit and words."""
    strategies = {c.column: cell_config(config, c).strategy.to_dict() for c in cells(arms, seeds, settings)}
    plan = {
        "config": configs.numbers(config.to_dict()),
        "arms": arms,
        "seeds": seeds,
        "settings": settings,
        "strategies": strategies,
        "planned": planned,
        "primary": primary(config),
        "reads": config.environment.eval_split,
        **about,
    }
    return json.loads(json.dumps(plan))  # tuples are lists, as in the file


def continued(
    folder: Path, theirs: Mapping[str, Any] | None, made: dict[str, Any], asked: bool, joined: Collection[str]
) -> dict[str, Any]:
    """Returns the plan of a command that runs. Arguments, errors: those of `check_whole` and `fixed`."""
    check_whole(folder, theirs, made)
    return {**made, **fixed(theirs, made, asked, joined), **extended(theirs, made)}


def as_read(
    theirs: Mapping[str, Any] | None, made: dict[str, Any], asked: bool, joined: Collection[str]
) -> tuple[dict[str, Any], bool]:
    """Returns the plan of a command that only reads, and whether it names the whole comparison.

    Arguments and errors are those of `fixed`. The plan tells of the first command, as `extended` does.
    """
    plan = {**made, **fixed(theirs, made, asked, joined)}
    if not theirs:
        return plan, True
    told = {key: theirs[key] for key in (*TOLD, "extended") if key in theirs}
    # Keys of a setting in another order are other columns.
    return {**plan, **told}, all(json.dumps(theirs[key]) == json.dumps(made[key]) for key in RUNS)


def as_before(theirs: Mapping[str, Any] | None, settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Settings with their keys in the order of an earlier command, which names of columns and folders keep.

    theirs: the plan in the folder; None: there is none.
    """
    known = (theirs or {}).get("settings", ())
    alike = lambda setting: (k for k in known if k == json.loads(json.dumps(setting)))
    return [{key: s[key] for key in next(alike(s), s)} for s in settings]


def check_whole(folder: Path, theirs: Mapping[str, Any] | None, made: Mapping[str, Any]) -> None:
    """Raises ValueError where a command leaves out arms, seeds or settings of the comparison in the folder.

    Its plan and its tables would lose them, and a later command would seem to add them.

    theirs: the plan in the folder; None: there is none. made: the new command's plan.
    """
    keys = ("arms", "seeds", "settings")
    lost = {key: [x for x in (theirs or {}).get(key, ()) if x not in made[key]] for key in keys}
    if said := ", ".join(f"{key} {' '.join(map(str, values))}" for key, values in lost.items() if values):
        raise ValueError(
            f"{folder} holds a comparison that also has {said}: name these too (--run says which arms run "
            "now), or use another --workdir."
        )


def extended(theirs: Mapping[str, Any] | None, made: Mapping[str, Any]) -> dict[str, Any]:
    """Records additions of later commands to the arms, seeds and settings of the first command.

    theirs: the plan in the folder; None: there is none. made: the new command's plan.

    Returns entries for the plan. "extended" lists each addition with its date and command. The date, machine,
    command and commit stay those of the first command.
    """
    if theirs is None or not theirs.keys() >= {*RUNS, "date", "machine", "command"}:
        return {"extended": []}
    told = {key: theirs[key] for key in TOLD if key in theirs}
    new = {key: [value for value in made[key] if value not in theirs[key]] for key in RUNS}
    what = ", ".join(f"{name} {' '.join(map(str, values))}" for name, values in new.items() if values)
    entry = {"what": what, "arms": new["arms"]}
    entry |= {key: made[key] for key in ("date", "command", "commit") if key in made}
    return {**told, "extended": [*theirs.get("extended", ()), *([entry] if what else [])]}


def fixed(
    theirs: Mapping[str, Any] | None, made: Mapping[str, Any], asked: bool, joined: Collection[str] = ()
) -> dict[str, Any]:
    """Keeps the planned differences of the first command, and records those that came later.

    theirs: the plan in the folder; None: there is none. made: the new command's plan. asked: whether that
    command names differences itself. If not, it adds only the usual ones of new columns. joined: columns of
    cells that were run elsewhere. Their numbers exist already, so their differences always come later.

    Returns entries for the plan: "planned", and "planned_later" with the date and command of each change.
    ValueError for the reverse of a difference that is planned.
    """
    pairs = [list(pair) for pair in made["planned"]]
    if theirs is None or "planned" not in theirs:
        late = [pair for pair in pairs if not set(pair).isdisjoint(joined)]
        entry = {"planned": late, "date": made["date"], "command": made["command"]}
        first = [pair for pair in pairs if pair not in late]
        return {"planned": first, "planned_later": [entry] if late else []}
    later = list(theirs.get("planned_later", ()))
    known = [list(pair) for entry in (theirs, *later) for pair in entry["planned"]]
    columns = {c.column for c in cells(theirs["arms"], [0], theirs["settings"])}
    for b, a in pairs if asked else ():
        if [a, b] in known:
            raise ValueError(
                f"--planned names {b} - {a}, and {a} - {b} is planned already: name a difference once, in "
                "one direction, since each counts in Holm's correction."
            )
    known += [pair[::-1] for pair in known]
    new = [pair for pair in pairs if pair not in known and (asked or not columns.issuperset(pair))]
    if new:
        later.append({"planned": new, "date": made["date"], "command": made["command"]})
    return {"planned": theirs["planned"], "planned_later": later}


def read(folder: Path) -> dict[str, Any] | None:
    """The plan in a folder as it stands there; None where there is none.

    Raises ValueError, which names the file, where it holds no plan.
    """
    path = folder / "plan.json"
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}): restore it, or name another folder.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no plan: restore it, or name another folder.")
    return found


def written(folder: Path, plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """Reads the plan in a folder; None for a folder that is new or empty.

    Raises ValueError for a plan of another config, and for files without a plan.
    """
    if (theirs := read(folder)) is not None:
        if "config" not in theirs:
            raise ValueError(f"{folder / 'plan.json'} names no config: choose another --workdir.")
        theirs["config"] = configs.numbers(configs.filled(configs.renamed(theirs["config"])))
        if theirs["config"] != plan["config"]:
            raise ValueError(
                f"{folder} holds a comparison of another config "
                f"({configs.difference(theirs['config'], plan['config'])}): "
                "choose another --workdir."
            )
        return theirs
    if folder.is_dir() and any(not entry.name.startswith(LEFT) for entry in folder.iterdir()):
        raise ValueError(
            f"{folder} is not empty and holds no comparison (no plan.json): choose another --workdir."
        )
    return None


def write(folder: Path, plan: Mapping[str, Any]) -> None:
    """Writes plan.json into the folder. Raises ValueError where that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "plan.json", json.dumps(plan, indent=1))
    except OSError as error:
        raise _no_workdir(folder, error) from None


@contextmanager
def claimed(folder: Path, index: int, count: int) -> Iterator[None]:
    """Keeps other processes out of a part of the comparison while the block runs (`parse_shard`).

    Raises ValueError where another process has the part, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / f"{LOCK}{index}_{count}", "w")
    except OSError as error:
        raise _no_workdir(folder, error) from None
    with file:
        there = f"Another process runs the comparison in {folder}"
        lock(file, f"{there}: wait for its end, or choose another --workdir.")
        yield


def _no_workdir(folder: Path, error: OSError) -> ValueError:
    return ValueError(
        f"{folder} cannot be a workdir ({error.strerror}: {error.filename}): choose another --workdir."
    )
