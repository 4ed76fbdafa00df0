"""One step, one atomic save: arrays (orbax) and everything else (JSON) are committed by a single rename.

checkpoints/step_00000040/arrays/        parameters, optimiser state, keys (orbax, OCDBT)
                          state.json     step, index of the arrays, task pool, signal history, ledger
                          manifest.json  sha256 of every other file
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.experimental import multihost_utils

_ARRAYS, _STATE, _MANIFEST = "arrays", "state.json", "manifest.json"
_TEMPORARY = ".tmp_"


def save(directory: str | os.PathLike, step: int, arrays: Any, state: Mapping, *, keep: int = 2) -> Path:
    """Saves one step and returns its folder; on return it is on disk, complete, and older ones are deleted.

    A process killed at any moment leaves either this checkpoint complete or
    the ones before it untouched. In a run of many processes all of them call
    this; they share the file system.

    Args:
      directory: folder of the checkpoints, made if it is missing.
      step: GRPO step, not negative.
      arrays: pytree of jax or numpy arrays, not empty; every dtype is kept bit for bit.
      state: JSON values; keys must be strings.
      keep: how many of the newest checkpoints stay, at least 1.

    Raises:
      ValueError: a bad step or keep, or a leaf that is no array.
      TypeError: state is not JSON.
      FileExistsError: an intact checkpoint of this or a later step is there; nothing is overwritten.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"Cannot save step {step} and keep {keep}; step must be >= 0 and keep >= 1.")
    directory = Path(directory).absolute()
    flat = _flatten(arrays)
    text = json.dumps({"step": step, "arrays": _index(flat), "state": state})
    passed_over = [f for s, f in _steps(directory) if s >= step]
    for folder in passed_over:
        if _damage(folder) is None:
            raise FileExistsError(
                f"{folder} holds an intact checkpoint and step {step} is not after it; "
                "restore it, or use another workdir."
            )

    temporary = directory / f"{_TEMPORARY}{name(step)}"
    if jax.process_index() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(leftover)
        temporary.mkdir()
    multihost_utils.sync_global_devices("checkpoint folder is ready")
    _checkpointer().save(temporary / _ARRAYS, args=ocp.args.PyTreeSave(flat))
    folder = directory / name(step)
    if jax.process_index() == 0:
        (temporary / _STATE).write_text(text)
        (temporary / _MANIFEST).write_text(json.dumps({"files": _digests(temporary)}, indent=1))
        for path in (*temporary.rglob("*"), temporary):
            _sync(path)
        for damaged in passed_over:
            _discard(damaged)
        os.rename(temporary, folder)
        _sync(directory)
        for _, old in _steps(directory)[:-keep]:
            _discard(old)
    multihost_utils.sync_global_devices("checkpoint is committed")
    return folder


def restore(
    directory: str | os.PathLike, like: Any, *, warn: Callable[[str], None] = logging.warning
) -> tuple[int, Any, dict] | None:
    """Newest intact checkpoint as (step, arrays, state), or None where nothing was ever saved.

    Args:
      directory: as given to `save`.
      like: pytree of arrays or jax.ShapeDtypeStruct with the structure, shapes
        and dtypes that were saved. A leaf comes back with the sharding of its
        counterpart (without one: on the first local device), and as numpy
        where the counterpart is numpy.
      warn: called with one sentence for every damaged checkpoint that is passed over.

    Raises:
      ValueError: every checkpoint is damaged, or `like` is not what was saved.
    """
    damaged = []
    for _, folder in reversed(_steps(Path(directory).absolute())):
        reason = _damage(folder)
        if reason is None:
            return _load(folder, like)
        damaged.append(f"{folder} ({reason})")
        warn(f"Checkpoint {damaged[-1]} is damaged and is passed over for the one before it.")
    if damaged:
        raise ValueError(
            f"No intact checkpoint is left: {', '.join(damaged)}; put one back from a copy, "
            "or start afresh in another workdir."
        )
    return None


def latest_step(directory: str | os.PathLike) -> int | None:
    """Step of the newest committed checkpoint, by name alone (`restore` verifies), or None."""
    steps = _steps(Path(directory))
    return steps[-1][0] if steps else None


def steps(directory: str | os.PathLike) -> list[int]:
    """Steps of the committed checkpoints, oldest first, by name alone."""
    return [step for step, _ in _steps(Path(directory))]


def _load(folder: Path, like: Any) -> tuple[int, Any, dict]:
    payload = json.loads((folder / _STATE).read_text())
    wanted = _flatten(like)
    _compare(folder, payload["arrays"], _index(wanted))
    first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    for name, leaf in wanted.items():
        if not isinstance(leaf, np.ndarray) and getattr(leaf, "sharding", None) is None:
            wanted[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=first_device)
    restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
    flat = _checkpointer().restore(
        folder / _ARRAYS, args=ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args)
    )
    leaves = [flat[name] for name in wanted]
    return payload["step"], jax.tree.unflatten(jax.tree.structure(like), leaves), payload["state"]


def _compare(folder: Path, stored: Mapping, wanted: Mapping) -> None:
    """Refuses to restore into another structure: orbax would cast and crop without a word."""
    for name in sorted(stored.keys() | wanted.keys()):
        here, there = stored.get(name, "nothing"), wanted.get(name, "nothing")
        if here != there:
            raise ValueError(
                f"Checkpoint {folder} does not fit the run: at {name!r} it holds {here} and the "
                f"run needs {there}; resume with the configuration that wrote it, or use "
                "another workdir."
            )


def _checkpointer() -> ocp.Checkpointer:
    # Weights hardly compress, and compressing them costs more than writing them.
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False))


def _flatten(tree: Any) -> dict[str, Any]:
    """Leaves by path: what is stored then depends on no container class of optax or flax."""
    flat = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ValueError(f"{name!r} is {leaf!r}, not an array; make it one, or put it into the state.")
        if name in flat:
            raise ValueError(f"Two arrays of the checkpoint are called {name!r}; rename one of their keys.")
        flat[name] = leaf
    return flat


def _index(flat: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in flat.items()}


def name(step: int) -> str:
    """Of the folder of a step's checkpoint."""
    return f"step_{step:08d}"


def _steps(directory: Path) -> list[tuple[int, Path]]:
    """Committed checkpoints, oldest first."""
    found = [(re.fullmatch(r"step_(\d{8,})", p.name), p) for p in directory.glob("step_*")]
    return sorted((int(match[1]), path) for match, path in found if match)


def _digests(folder: Path) -> dict[str, str]:
    """sha256 of every file below the folder but the manifest, by relative path."""
    digests = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / _MANIFEST):
        with open(path, "rb") as f:
            digests[path.relative_to(folder).as_posix()] = hashlib.file_digest(f, "sha256").hexdigest()
    return digests


def _damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None if every file is as it was saved."""
    try:
        recorded = dict(json.loads((folder / _MANIFEST).read_text())["files"])
        present = _digests(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{_MANIFEST} is missing or unreadable: {type(error).__name__}"
    for name in sorted(recorded.keys() | present.keys()):
        if name not in present:
            return f"{name} is missing"
        if recorded.get(name) != present[name]:
            return f"{name} is not as it was saved"
    return None


def _discard(folder: Path) -> None:
    """Deletes a checkpoint; renamed first, so that a kill on the way leaves no half of it under its name."""
    doomed = folder.with_name(f"{_TEMPORARY}old_{folder.name}")
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
