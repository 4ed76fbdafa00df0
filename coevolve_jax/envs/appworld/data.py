"""AppWorld's data: the benchmark's tasks and the few of experiments/appworld_tasks.py.

Both have AppWorld's layout, data/{api_docs, base_dbs, datasets, tasks}, in AppWorld's virtual environment.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
from pathlib import Path

from coevolve_jax import shipped

OWN_PREFIX = "own"  # starts the ids and splits of tasks that are not the benchmark's
SPLITS = ("train", "dev", "test_normal", "test_challenge", "own_train", "own_development")


def root(name: str) -> Path:
    """Returns the folder that holds data/ for a split or a task id.

    APPWORLD_ROOT, where set, is the benchmark's folder.
    """
    if name.startswith(OWN_PREFIX):
        return Path(sys.prefix) / "own"
    return Path(os.environ.get("APPWORLD_ROOT", sys.prefix))


def ids(split: str) -> list[str]:
    """Returns the task ids of a split. ValueError for an unknown split, or where its data is missing."""
    if split not in SPLITS:
        raise ValueError(f"AppWorld has no split {split!r}: use one of {', '.join(SPLITS)}.")
    listed = root(split) / "data" / "datasets" / f"{split}.txt"
    if not listed.exists():
        if split.startswith(OWN_PREFIX):
            raise ValueError(
                f"The tasks of {split} are not there ({listed} is missing): run {sys.executable} -P "
                f"{shipped.ROOT / 'experiments' / 'appworld_tasks.py'}, which makes them."
            )
        raise ValueError(
            f"AppWorld's data is not there ({listed} is missing): in a checkout make appworld downloads it "
            "where there is internet; or set APPWORLD_ROOT to the folder that holds data/. "
            "The splits own_train and own_development need none."
        )
    return listed.read_text().split()


@functools.cache
def specs(task_id: str) -> dict:
    """Returns a task's specs.json: "instruction", "supervisor", "datetime". ValueError: no such task."""
    path = _folder(task_id) / "specs.json"
    with contextlib.suppress(OSError):
        return json.loads(path.read_text())
    raise ValueError(f"There is no task {task_id!r} of AppWorld: {path} is missing.")


def apis() -> list[str]:
    """Returns the documented APIs of all data that is there, such as "spotify.login"."""
    folders = [root(name) / "data" / "api_docs" / "standard" for name in (OWN_PREFIX, "")]
    documents = [path for folder in folders for path in folder.glob("*.json")]
    return sorted({f"{path.stem}.{name}" for path in documents for name in json.loads(path.read_text())})


@functools.cache
def beginning(task_id: str) -> str:
    """Digests a task's initial state: its changes to the base databases, and its time.

    The instruction does not count: the supervisor's table of tasks is left out.
    """
    found = hashlib.sha256(specs(task_id)["datetime"].encode())
    for path in sorted((_folder(task_id) / "dbs").glob("*.jsonl")):
        lines = path.read_text().splitlines()
        kept = [line for line in lines if path.stem != "supervisor" or "INTO tasks " not in line]
        found.update("\n".join([path.stem, *kept]).encode())
    return found.hexdigest()


def _folder(task_id: str) -> Path:
    return root(task_id) / "data" / "tasks" / task_id
