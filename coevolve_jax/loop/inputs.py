"""Digests of the files that a run's numbers depend on and that its config names by a path."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from ml_collections import ConfigDict

from coevolve_jax import shipped
from coevolve_jax.envs.tools import source

WHOLE = 1 << 30  # bytes of a file above which its size and both its ends stand for it
END = 1 << 26  # bytes of an end


def digests(config: ConfigDict) -> dict[str, str]:
    """Returns 16 hex digits by key, such as "config.model": those of the files at that path.

    Of a user's own tools it is the file itself, and not what that imports. A key is absent where its value is
    empty or no path here.
    """
    own = config.environment
    paths = {
        "model": shipped.folder(config.model),
        "environment.source": _of_source(own.get("source", "")),
        "environment.template": own.get("template", ""),
        "data.initial_file": config.data.initial_file,
    }
    there = {key: Path(path) for key, path in paths.items() if path and os.path.exists(path)}
    return {f"config.{key}": digest(path) for key, path in there.items()}


def digest(path: Path) -> str:
    """Returns 16 hex digits of a file, or of the names and the content of all files of a folder."""
    found = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            named = f"{file.relative_to(path)}\0{file.stat().st_size}\0"
            found.update(named.encode("utf-8", "surrogateescape"))
            for part in _parts(file):
                found.update(part)
    return found.hexdigest()[:16]


def _parts(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with open(file, "rb") as stream:
        if size <= WHOLE:
            while part := stream.read(1 << 20):
                yield part
            return
        yield stream.read(END)
        stream.seek(size - END)
        yield stream.read(END)


def _of_source(named: str) -> str:
    """Returns the path of the file of `environment.source`; "" for none."""
    where = named.partition(":")[0]
    return source.find(where) if where else ""
