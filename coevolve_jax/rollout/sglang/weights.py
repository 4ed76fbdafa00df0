"""A version of a model's weights for the servers: a folder, or arrays in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import jax
import numpy as np

from coevolve_jax.models import hf_io
from coevolve_jax.models.decoder import ModelConfig

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # safetensors' names -> numpy's and torch's
FILE = 5 * 10**8  # bytes of one file of a version; hf_io.WRITERS files are written at once
TEMPORARY, OWNER = "coevolve-weights-", "owner"  # prefix of temporary roots; the file that an owner locks
LISTED = 8  # the most differences that a message names


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


class Weights(Protocol):
    """A version of the weights.

    version: the policy's, or None for a model that was not pushed. folder: None for arrays in memory.
    """

    @property
    def version(self) -> int | None: ...

    @property
    def folder(self) -> Path | None: ...

    def tensors(self) -> dict[str, Tensor]:
        """Returns dtype and shape by Hugging Face name, without a tied lm_head. ValueError if unreadable."""
        ...

    def reader(self) -> contextlib.AbstractContextManager[Callable[[str], Any]]:
        """Opens a function from a name to the array, in the shape that `tensors` gives."""
        ...


@dataclasses.dataclass(frozen=True)
class FolderWeights:
    """A Hugging Face folder. Its headers are read each time, since others can write to it."""

    folder: Path
    version: int | None = None

    def tensors(self) -> dict[str, Tensor]:
        with self._slices() as slices:
            return {
                name: Tensor(DTYPES.get(t.get_dtype()) or str(t.get_dtype()), tuple(t.get_shape()))
                for name, t in slices.items()
            }

    @contextlib.contextmanager
    def reader(self) -> Iterator[Callable[[str], np.ndarray]]:
        with self._slices() as slices:
            yield lambda name: slices[name][:]

    @contextlib.contextmanager
    def _slices(self) -> Iterator[dict[str, Any]]:
        tied = hf_io.load_config(self.folder).tie_word_embeddings
        with contextlib.ExitStack() as stack:
            slices = hf_io.open_tensors(self.folder, stack)
            if tied and hf_io.HEAD in slices:
                head = slices.pop(hf_io.HEAD)
                slices.setdefault(hf_io.EMBEDDING, head)
            yield slices


@dataclasses.dataclass(frozen=True)
class ArrayWeights:
    """Views on a parameter tree, valid until its arrays are donated."""

    entries: Sequence[hf_io.Entry]
    dtype: str
    version: int | None = None
    folder: None = None

    def tensors(self) -> dict[str, Tensor]:
        return {name: Tensor(self.dtype, entry.tensor_shape) for name, (entry, _) in self._places.items()}

    @contextlib.contextmanager
    def reader(self) -> Iterator[Callable[[str], jax.Array]]:
        yield lambda name: self._rows(*self._places[name], 1)[0]

    def buckets(self, size: int) -> Iterator[tuple[list[str], Iterator[jax.Array]]]:
        """Yields the tensors, in the order of `tensors`, in groups of at most `size` bytes or of one tensor.

        A group is (names, blocks). The blocks hold its tensors one behind the other. Each block is read from
        the parameters in one piece, when it is asked for.
        """
        dtype = np.dtype(self.dtype)
        for group in hf_io.split(list(self.entries), dtype, size):
            blocks = hf_io.blocks(group, dtype)
            yield list(group), (self._rows(entry, index, len(names)) for entry, index, names in blocks)

    @functools.cached_property
    def _places(self) -> dict[str, tuple[hf_io.Entry, tuple[int, ...]]]:
        places = lambda entry: np.ndindex(entry.names.shape)
        return {str(e.names[index]): (e, index) for e in self.entries for index in places(e)}

    def _rows(self, entry: hf_io.Entry, index: tuple[int, ...], count: int) -> jax.Array:
        """Does what hf_io.rows does, contiguous and on one device."""
        block = hf_io.rows(entry, index, count, np.dtype(self.dtype))
        devices = block.devices() if isinstance(block, jax.Array) else jax.local_devices()
        return jax.device_put(block, min(devices, key=lambda device: device.id))


def from_params(config: ModelConfig, params: Any, version: int, dtype: str) -> ArrayWeights:
    """Views parameters as weights. Raises ValueError where this process does not hold all of them."""
    if not all(getattr(leaf, "is_fully_addressable", True) for leaf in jax.tree.leaves(params)):
        raise ValueError(
            "Parameters that lie on several processes cannot be broadcast to servers; set the "
            "transport to 'disk'."
        )
    return ArrayWeights(hf_io.entries_of(config, params), dtype, version)


def differences(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[str]:
    """Lists in words why our tensors cannot replace theirs; the vocabulary first."""
    faults = [f"{name} is missing" for name in sorted(theirs.keys() - ours.keys())]
    faults += [f"{name} is unknown there" for name in sorted(ours.keys() - theirs.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        for field, value, expected in zip(Tensor._fields, ours[name], theirs[name]):
            if value != expected:
                faults.append(f"{name} has {field} {value} instead of {expected}")
    shapes = [tensors[hf_io.EMBEDDING].shape for tensors in (ours, theirs) if hf_io.EMBEDDING in tensors]
    if len(shapes) == 2 and all(shapes) and shapes[0][0] != shapes[1][0]:
        faults.insert(0, f"the vocabulary has {shapes[0][0]} tokens instead of {shapes[1][0]}")
    if len(faults) > LISTED:
        faults[LISTED:] = [f"and {len(faults) - LISTED} more"]
    return faults


class Folders:
    """The versions of a run as folders root/version-N. All but the last two are deleted.

    root: None makes a temporary one, in memory where there is room; `close` deletes it. Another one belongs
    to one process from the first `write` to `close`. The next process deletes what a killed one left:
    half-written versions in its root, and temporary roots without an owner.
    """

    def __init__(self, root: str | os.PathLike | None = None):
        self._root = None if root is None else Path(root).absolute()
        self._temporary, self._swept = root is None, False
        self._owned: IO | None = None  # the root's lock

    def write(self, config: ModelConfig, params: Any, version: int, dtype: str) -> FolderWeights:
        """Writes a version, whole or not at all: a server never sees a half-written folder.

        Raises ValueError where another process writes to the root.
        """
        if self._root is None:
            count = sum(leaf.size for leaf in jax.tree.leaves(params))
            self._root, self._owned = _temporary_root(count * np.dtype(dtype).itemsize)
        elif self._owned is None:
            self._owned = _lock(self._root)
        if not self._swept:
            for left in (*self._root.glob(".version-*"), *self._root.glob(".old-*")):
                shutil.rmtree(left, ignore_errors=True)
        self._swept = True
        folder = self._root / f"version-{version}"
        self._remove(folder)
        hf_io.save(folder, config, params, dtype, FILE)
        versions = [path for path in self._root.iterdir() if re.fullmatch(r"version-\d+", path.name)]
        for old in sorted(versions, key=lambda path: path.stat().st_mtime_ns)[:-2]:
            self._remove(old)
        return FolderWeights(folder, version)

    def close(self) -> None:
        if self._temporary and self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = None
        if self._owned is not None:
            self._owned.close()
            self._owned = None

    def _remove(self, folder: Path) -> None:
        """Deletes a folder. Its name disappears in one step, before its contents."""
        if folder.exists():
            doomed = tempfile.mkdtemp(prefix=".old-", dir=self._root)
            os.replace(folder, doomed)
            shutil.rmtree(doomed)


def _lock(root: Path) -> IO:
    """Makes a root where there is none. Returns its file, which is locked while it is open.

    Where the file system has no locks it is not. ValueError where another process has locked it.
    """
    root.mkdir(parents=True, exist_ok=True)
    owner = open(root / OWNER, "w")
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner.close()
        raise ValueError(
            f"Another process writes its weights to {root}: name another folder in config.engine.push_folder."
        ) from None
    except OSError:
        pass
    return owner


def _temporary_root(size: int) -> tuple[Path, IO]:
    """Makes a temporary root. Returns it with a file that stays locked while it is open.

    size: bytes of one version. Three versions exist while one is written.
    """
    memory, disk = Path("/dev/shm"), Path(tempfile.gettempdir())
    for left in (*memory.glob(f"{TEMPORARY}*/{OWNER}"), *disk.glob(f"{TEMPORARY}*/{OWNER}")):
        with contextlib.suppress(OSError), left.open() as file:  # OSError: its owner lives, or another user's
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left.parent)
    roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 4 * size
    root = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=memory if roomy else disk))
    owner = open(root / f"{OWNER}-new", "w")
    fcntl.flock(owner, fcntl.LOCK_EX)
    os.replace(owner.name, root / OWNER)  # named last, so that nobody finds it before it is locked
    return root, owner
