"""Atomic checkpoints of one step: first the arrays (orbax), then the JSON state, then the manifest as commit.

    checkpoints/step_00000040/arrays/        parameters, optimiser state, keys (orbax, OCDBT)
                              state.json     step, index of the arrays, task pool, signal history, ledger
                              manifest.json  sha256 of every other file; a later state, where there is one

A folder without a manifest is no checkpoint: its save was cut short, and the next save deletes it. No folder
is renamed, since an object store would have to copy it. So checkpoints may lie wherever etils.epath and orbax
can write (gs://BUCKET/FOLDER).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from jax.experimental import multihost_utils

DIGEST = "digest"  # the key of a state that names the config of its run
INPUTS = "inputs"  # the key of a state that names the files that its run reads (loop/inputs.py)
_ARRAYS, _STATE, _MANIFEST = "arrays", "state.json", "manifest.json"
_HALF = f"{_MANIFEST}.tmp"  # a manifest that is being written
_PATIENCE = 6 * 3600  # seconds that writing the arrays may take
_READERS = 16  # threads that hash files; hashing releases the GIL
_BLOCK = 2**24  # bytes that each thread reads at a time


class Writer:
    """Saves one step after the other in the background, while training continues.

    With several processes, each has a Writer and all make the same calls. They share the file system.
    """

    def __init__(self):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future | None = None

    def save(
        self, directory: epath.PathLike, step: int, arrays: Any, state: Mapping, *, keep: int = 2
    ) -> None:
        """Waits for the previous save, then starts this one.

        On return the arrays are copied off the devices, so the next update may overwrite them. Older
        checkpoints are deleted once this one is complete on disk. A process killed at any moment leaves
        either this checkpoint complete or the earlier ones untouched.

        Args:
          directory: folder of the checkpoints, made if it is missing.
          step: GRPO step, not negative.
          arrays: pytree of jax or numpy arrays, not empty; every dtype is kept bit for bit.
          state: JSON values; keys must be strings.
          keep: how many of the newest checkpoints stay, at least 1.

        Raises:
          ValueError: a bad step or keep, or a leaf that is no array.
          TypeError: state is not JSON.
          FileExistsError: an intact checkpoint of this or a later step exists; nothing is overwritten.
          Exception: the error of the previous save.
        """
        self.wait()
        if step < 0 or keep < 1:
            raise ValueError(f"Cannot save step {step} and keep {keep}; step must be >= 0 and keep >= 1.")
        directory = absolute(directory)
        flat = {path: _own(leaf) for path, leaf in _flatten(arrays).items()}
        text = json.dumps({"step": step, "arrays": _index(flat), "state": state})
        for later, folder in _folders(directory):
            if later >= step and _damage(folder) is None:
                raise FileExistsError(
                    f"{folder} holds an intact checkpoint and step {step} is not after it; "
                    "restore it, or use another workdir."
                )
        folder = directory / name(step)
        if jax.process_index() == 0:
            for later, other in _folders(directory):
                if later >= step or not _finished(other):
                    _discard(other)
            folder.mkdir(parents=True)
        multihost_utils.sync_global_devices("checkpoint folder is ready")
        # Weights hardly compress, and compressing them costs more than writing them.
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_compression=False)
        writing = ocp.AsyncCheckpointer(handler, timeout_secs=_PATIENCE)
        writing.save(folder / _ARRAYS, args=ocp.args.PyTreeSave(flat))

        def finish() -> None:
            writing.close()  # waits for the parts of all processes
            if jax.process_index() == 0:
                _commit(folder, text, keep)

        self._under_way = self._thread.submit(finish)

    def save_state(self, directory: epath.PathLike, step: int, state: Mapping) -> None:
        """Gives the checkpoint of `step`, whose arrays still hold, another state. Process 0 alone calls it.

        A process killed at any moment leaves the old state or the new one.

        Raises:
          FileNotFoundError: there is no checkpoint of this step.
          TypeError: state is not JSON.
          Exception: the error of the previous save.
        """
        self.wait()
        _replace_state(absolute(directory) / name(step), lambda _: state)

    def wait(self) -> None:
        """Waits until the last step is saved. Raises the error of its save."""
        under_way, self._under_way = self._under_way, None
        if under_way:
            under_way.result()

    def close(self) -> None:
        """Waits as `wait` does, then ends the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()


def restore(
    directory: epath.PathLike, like: Any, *, warn: Callable[[str], None] = logging.warning
) -> tuple[int, Any, dict] | None:
    """Restores the newest intact checkpoint as (step, arrays, state). Returns None if nothing was ever saved.

    Args:
      directory: as given to `Writer.save`; no save may be running.
      like: pytree of arrays or jax.ShapeDtypeStruct with the structure, shapes
        and dtypes that were saved. A leaf comes back with the sharding of its
        counterpart (without one: on the first local device), and as numpy
        where the counterpart is numpy.
      warn: called with one sentence for every checkpoint that is skipped as damaged or never finished.

    Raises:
      ValueError: every checkpoint is damaged, or `like` is not what was saved.
    """
    damaged = []
    for _, folder in reversed(_folders(absolute(directory))):
        reason = _damage(folder)
        if reason is None:
            return _load(folder, like)
        if _finished(folder):
            damaged.append(f"{folder} ({reason})")
        warn(f"Checkpoint {folder} is damaged ({reason}) and is passed over for the one before it.")
    if damaged:
        raise ValueError(
            f"No intact checkpoint is left: {', '.join(damaged)}; put one back from a copy, "
            "or start afresh in another workdir."
        )
    return None


def copy(directory: epath.PathLike, step: int, target: epath.PathLike) -> dict:
    """Copies a checkpoint into another folder of checkpoints, its manifest last. Returns the copy's state.

    It may be for a run of another config, which begins with the files as they are then. So the copy's state
    has no DIGEST and no INPUTS.
    """
    source, copied = (epath.Path(folder) / name(step) for folder in (directory, target))
    for path in (*_files(source), source / _MANIFEST):
        place = copied / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.copy(place)
    own = (DIGEST, INPUTS)
    return _replace_state(copied, lambda state: {k: value for k, value in state.items() if k not in own})


def steps(directory: epath.PathLike) -> list[int]:
    """Steps of the committed checkpoints, oldest first. They may be damaged: only `restore` verifies."""
    return [step for step, _ in _committed(epath.Path(directory))]


def begun(directory: epath.PathLike) -> bool:
    """Whether a save was begun there, finished or not."""
    return bool(_folders(epath.Path(directory)))


def absolute(path: epath.PathLike) -> epath.Path:
    """Makes a path absolute; leaves the name of an object store (gs://...) as it is."""
    path = epath.Path(path)
    return path if path.is_absolute() else path.absolute()


def _commit(folder: epath.Path, text: str, keep: int) -> None:
    """Turns a folder that holds the arrays into a checkpoint. text: content of state.json."""
    (folder / _STATE).write_text(text)
    digests = _digests(folder)
    for path in {x for file in _files(folder) for x in (file, file.parent)}:
        _sync(path)
    _write_manifest(folder, {"files": digests})
    for _, old in _committed(folder.parent)[:-keep]:
        _discard(old)


def _write_manifest(folder: epath.Path, manifest: Mapping) -> None:
    """Writes or replaces the manifest at once. Its "state", if any, stands in for state.json."""
    half = folder / _HALF
    half.write_text(json.dumps(manifest, indent=1))
    _sync(half)
    half.replace(folder / _MANIFEST)
    for path in (folder, folder.parent):
        _sync(path)


def _replace_state(folder: epath.Path, change: Callable[[Mapping], Mapping]) -> dict:
    """Replaces the state of a checkpoint at once. Returns the new one."""
    manifest = json.loads((folder / _MANIFEST).read_text())
    payload = json.loads(_state_text(folder, manifest))
    state = dict(change(payload["state"]))
    text = json.dumps({**payload, "state": state})
    files = manifest["files"] | {_STATE: hashlib.sha256(text.encode()).hexdigest()}
    _write_manifest(folder, {"files": files, "state": text})
    return state


def _state_text(folder: epath.Path, manifest: Mapping) -> str:
    return manifest["state"] if "state" in manifest else (folder / _STATE).read_text()


def _load(folder: epath.Path, like: Any) -> tuple[int, Any, dict]:
    payload = json.loads(_state_text(folder, json.loads((folder / _MANIFEST).read_text())))
    wanted = _flatten(like)
    _compare(folder, payload["arrays"], _index(wanted))
    first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    for name, leaf in wanted.items():
        if not isinstance(leaf, np.ndarray) and getattr(leaf, "sharding", None) is None:
            wanted[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=first_device)
    restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
    reader = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True))
    arguments = ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args)
    flat = reader.restore(folder / _ARRAYS, args=arguments)
    leaves = [flat[name] for name in wanted]
    return payload["step"], jax.tree.unflatten(jax.tree.structure(like), leaves), payload["state"]


def _compare(folder: epath.Path, stored: Mapping, wanted: Mapping) -> None:
    """Raises ValueError if the structures differ: orbax would silently cast and crop."""
    for name in sorted(stored.keys() | wanted.keys()):
        here, there = stored.get(name, "nothing"), wanted.get(name, "nothing")
        if here != there:
            raise ValueError(
                f"Checkpoint {folder} does not fit the run: at {name!r} it holds {here} and the "
                f"run needs {there}; resume with the configuration that wrote it, or use "
                "another workdir."
            )


def _flatten(tree: Any) -> dict[str, Any]:
    """Leaves by path, so that the stored form does not depend on container classes of optax or flax."""
    flat = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            raise ValueError(f"{name!r} is {leaf!r}, not an array; make it one, or put it into the state.")
        if name in flat:
            raise ValueError(f"Two arrays of the checkpoint are called {name!r}; rename one of their keys.")
        flat[name] = leaf
    return flat


def _own(leaf: Any) -> Any:
    """Copies a leaf in pinned host memory: the next update overwrites it there while orbax still writes."""
    if getattr(getattr(leaf, "sharding", None), "memory_kind", None) != "pinned_host":
        return leaf
    return jax.device_put(leaf, leaf.sharding, may_alias=False)


def _index(flat: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in flat.items()}


def name(step: int) -> str:
    """Folder name of a step's checkpoint."""
    return f"step_{step:08d}"


def _folders(directory: epath.Path) -> list[tuple[int, epath.Path]]:
    """Steps and their folders, oldest first, with or without a manifest."""
    inside = directory.iterdir() if directory.is_dir() else ()
    found = [(re.fullmatch(r"step_(\d{8,})", path.name), path) for path in inside]
    return sorted((int(match[1]), path) for match, path in found if match)


def _finished(folder: epath.Path) -> bool:
    return (folder / _MANIFEST).exists()


def _committed(directory: epath.Path) -> list[tuple[int, epath.Path]]:
    return [(step, folder) for step, folder in _folders(directory) if _finished(folder)]


def _files(folder: epath.Path) -> list[epath.Path]:
    """Every file below the folder but the manifest."""
    found = (path / name for path, _, names in folder.walk() for name in names)
    return sorted(path for path in found if path not in (folder / _MANIFEST, folder / _HALF))


def _digests(folder: epath.Path) -> dict[str, str]:
    """sha256 of every file below the folder but the manifest, by relative path."""
    paths = _files(folder)
    with ThreadPoolExecutor(_READERS) as threads:
        return dict(zip((p.relative_to(folder).as_posix() for p in paths), threads.map(_digest, paths)))


def _digest(path: epath.Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _damage(folder: epath.Path) -> str | None:
    """Returns what is wrong with a checkpoint, or None if every file is as it was saved."""
    if not _finished(folder):
        return f"it has no {_MANIFEST}: its save was cut short, or the file was lost"
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        recorded, present = dict(manifest["files"]), _digests(folder)
        if "state" in manifest:
            present[_STATE] = hashlib.sha256(manifest["state"].encode()).hexdigest()
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{_MANIFEST} is unreadable: {type(error).__name__}"
    for name in sorted(recorded.keys() | present.keys()):
        if name not in present:
            return f"{name} is missing"
        if recorded.get(name) != present[name]:
            return f"{name} is not as it was saved"
    return None


def _discard(folder: epath.Path) -> None:
    """Deletes a checkpoint, manifest first: if killed halfway, the rest does not look like a checkpoint."""
    (folder / _MANIFEST).unlink(missing_ok=True)
    folder.rmtree()


def _sync(path: epath.Path) -> None:
    """Syncs a file or folder to disk. Object stores need no sync: a finished write is durable."""
    if "://" in str(path):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
