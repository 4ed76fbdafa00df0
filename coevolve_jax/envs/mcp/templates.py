"""Template folders: which there are in each split, and what a user has written about them (coevolve.json)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coevolve_jax import shipped
from coevolve_jax.envs.base import digest
from coevolve_jax.envs.mcp import state
from coevolve_jax.envs.mcp.spec import OWN

SPLITS = ("train", "development", "test")


def root(settings: Mapping[str, Any]) -> Path:
    """Returns the folder of config.environment.template. ValueError where there is none."""
    path = Path(settings.get("template", ""))
    if not settings.get("template") or not path.is_dir():
        raise ValueError(
            f"config.environment.template is {settings.get('template', '')!r}, which is no folder here: name "
            "one with the files that a world begins with, or with the folders train, development and test"
            f"{shipped.made_by(settings.get('template', ''))}."
        )
    return path


def split_folders(path: Path) -> bool:
    """Says whether a folder holds the splits, and nothing else that is visible, instead of being a world."""
    names = {entry.name for entry in path.iterdir() if not entry.name.startswith(".")}
    return "train" in names and names <= {*SPLITS, OWN}


def of_split(settings: Mapping[str, Any], split: str, apart_from: str = "") -> list[Path]:
    """Returns the template folders of a split. ValueError for an unknown split, or one without a folder.

    apart_from: a split whose templates are left out, by their content. A single template is in all splits.
    """
    path = root(settings)
    if split not in SPLITS:
        raise ValueError(f"There is no split {split!r}: use one of {', '.join(SPLITS)}.")
    if not split_folders(path):
        return [path]
    found = _folders(path / split)
    if not found:
        raise ValueError(
            f"{path / split} holds no folder: give each starting world of the split {split!r} a folder "
            "there, or choose another split by config.environment.eval_split."
        )
    seen = {digest(content(other)) for other in _folders(path / apart_from)} if apart_from else set()
    return [one for one in found if digest(content(one)) not in seen]


def _folders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir()) if path.is_dir() else []


def check_size(template: Path, most: float) -> None:
    """Raises ValueError for a template of more than `most` MiB, which no world could hold."""
    try:
        state.size(str(template), most)
    except state.TooLarge as error:
        raise ValueError(
            f"{template} {error}, and config.environment.server_disk allows no more: raise it, or name "
            "another folder."
        ) from None


def content(template: Path) -> dict[str, str]:
    """Returns the content of a template as a world gets it (state.content)."""
    return {name: value for name, value in state.content(str(template)).items() if name != OWN}


def _is_task(told: Any) -> bool:
    """Says whether an entry of coevolve.json's tasks is one turn, or has a list of turns."""
    if not isinstance(told, dict):
        return False
    turns = told.get("turns", [told])
    return isinstance(turns, list) and bool(turns) and all(map(_is_turn, turns))


def _is_turn(told: Any) -> bool:
    if not isinstance(told, dict) or not isinstance(told.get("query"), str):
        return False
    calls = told.get("calls")
    return isinstance(calls, list) and all(
        isinstance(call, dict)
        and isinstance(call.get("name"), str)
        and isinstance(call.get("arguments"), dict)
        for call in calls
    )


def notes(template: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Reads coevolve.json of a template, and that of the folder of the splits, which counts for all.

    Returns {"values": values by parameter, "tasks": tasks of the user's}. ValueError for another shape.
    """
    above = root(settings)
    merged: dict[str, Any] = {"values": {}, "tasks": []}
    for path in dict.fromkeys((above / OWN, template / OWN)):
        if not path.exists():
            continue
        try:
            found = json.loads(path.read_text())
            values, tasks = found.get("values", {}), found.get("tasks", [])
            lists = all(isinstance(value, list) for value in values.values())
            if set(found) - {"values", "tasks"} or not lists or not isinstance(tasks, list):
                raise ValueError("it may hold values, lists by parameter, and tasks, a list")
            if wrong := [task for task in tasks if not _is_task(task)]:
                raise ValueError(
                    f"a task is {json.dumps(wrong[0])[:200]}, and each turn has a query, a text, and calls "
                    "with a name and arguments by parameter"
                )
        except (OSError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} cannot be used ({error}): mend it, or delete it.") from None
        merged["values"] |= values
        merged["tasks"] += tasks
    return merged
