"""Inputs of a run's numbers: versions of the software, and digests of the files that its config names."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from collections import ChainMap
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from ml_collections import ConfigDict

import coevolve_jax
from coevolve_jax import names, shipped
from coevolve_jax.config import methods
from coevolve_jax.envs.tools import source

WHOLE = 1 << 30  # bytes of a file above which its size and both its ends stand for it
END = 1 << 26  # bytes of an end
INITIAL = "config.data.initial_file"  # read once; all others to the run's end
# Endings of the files that weights, tokenizer and chat template are read from.
MODEL = (".json", ".safetensors", ".jinja", ".model", ".txt")


def digests(config: ConfigDict) -> dict[str, str]:
    """Returns 16 hex digits by key, such as "config.model": those of the files at that path.

    Of a user's own tools and modules (`methods.own_modules`) it is the file itself, or a package's .py files,
    and not what these import. Of a model's folder only the files of MODEL count: a download leaves a README
    and its date beside them. A key is absent where its value is empty or no path here.
    """
    endings = {"config.model": MODEL} | {f"config.{key}": (".py",) for key in methods.own_modules(config)}
    return {
        key: digest(Path(path), endings.get(key, ()))
        for key, path in _paths(config).items()
        if path and os.path.exists(path)
    }


def versions(*others: Mapping[str, str]) -> dict[str, str]:
    """Versions of the software that a score depends on.

    They are this interpreter's packages and what `others` name: environment family, servers, `digests`. If
    both name a package, this interpreter's version is returned.
    """
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "numpy")
    found = {"coevolve_jax": coevolve_jax.__version__, "python": platform.python_version()}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return dict(ChainMap(found, *map(dict, others)))


def begun_with(config: ConfigDict, found: Mapping[str, str], recorded: Mapping[str, str]) -> dict[str, str]:
    """Returns the digests that a run goes on with: those that it began with, else those of today.

    Args:
      found: `digests` of today.
      recorded: those that the run began with; {} if it begins now.

    Raises ValueError, which names the path, where one has another content than at the beginning. The file of
    D_0 may have: D_0 is made once.
    """
    for key, path in _paths(config).items():
        began = recorded.get(key) if key != INITIAL else None
        # Older runs recorded a digest of all files in a model's folder.
        if key in found and began and began != found[key] and began != digest(Path(path)):
            raise ValueError(
                f"{path} ({key}) has another content than when this run began: restore it, or "
                "go on in a fork, which takes it as it is."
            )
    return {**found, **recorded}


def _paths(config: ConfigDict) -> dict[str, str | os.PathLike]:
    own = config.environment
    return {
        "config.model": shipped.folder(config.model),
        "config.environment.source": _of_source(own.get("source", "")),
        "config.environment.template": own.get("template", ""),
        INITIAL: config.data.initial_file,
        **{f"config.{k}": names.location(dotted) or "" for k, dotted in methods.own_modules(config).items()},
    }


def digest(path: Path, endings: tuple[str, ...] = ()) -> str:
    """Returns 16 hex digits of a file, or of the names and the content of all files of a folder.

    endings: if given, a folder's files with another ending, and what is hidden, do not count.
    """
    found = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and (file == path or not endings or _counts(file.relative_to(path), endings)):
            named = f"{file.relative_to(path)}\0{file.stat().st_size}\0"
            found.update(named.encode("utf-8", "surrogateescape"))
            for part in _parts(file):
                found.update(part)
    return found.hexdigest()[:16]


def _counts(name: Path, endings: tuple[str, ...]) -> bool:
    return name.name.endswith(endings) and not any(part.startswith(".") for part in name.parts)


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
