"""The modules of a user's own that a config names. They decide as our source files do, so they are frozen.

Each file has a name, "modules/mine.lights/lights.py". The file of `environment.source`, whose path may have
slashes, is "modules/environment.source=my%2Fenv.py/env.py". What a module imports is not among them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote, unquote

from ml_collections import ConfigDict

from coevolve_jax import names
from coevolve_jax.config import methods
from coevolve_jax.envs import family
from coevolve_jax.envs.tools import source

FOLDER = "modules"  # in the names of files
SOURCE = "environment.source="  # begins the name of a user's own tools


def named(config: ConfigDict) -> list[str]:
    """The dotted paths of modules that a config names, and of its family's AUDIT, but for our own.

    A user's own tools are among them as SOURCE and the quoted path or dotted path of their file.
    """
    own = methods.own_modules(config)
    found = list(own.values())
    if environment := own.get("environment.name"):
        found.append(names.path("envs", getattr(family.module(environment), "AUDIT", environment)))
    if where := config.environment.get("source", "").partition(":")[0]:
        found.append(SOURCE + quote(where, safe=""))
    return [dotted for dotted in dict.fromkeys(found) if not dotted.startswith("coevolve_jax.")]


def files(dotted: str) -> dict[str, Path]:
    """Name -> path of a module's file, or of all that a package has. {} where there is none."""
    if dotted.startswith(SOURCE):
        return _of_source(dotted)
    place = names.location(dotted)
    if place is None:
        return {}
    if not place.is_dir():
        return {f"{FOLDER}/{dotted}/{place.name}": place}
    return {f"{FOLDER}/{dotted}/{p.relative_to(place)}": p for p in sorted(place.rglob("*.py"))}


def _of_source(named: str) -> dict[str, Path]:
    try:
        file = Path(source.find(unquote(named.removeprefix(SOURCE))))
    except source.Refused:
        return {}
    return {f"{FOLDER}/{named}/{file.name}": file}


def path(name: str) -> Path:
    """The file of a name that `files` gave. It does not exist where the module is gone."""
    return files(name.split("/")[1]).get(name, Path(name))


def code(modules: Iterable[str]) -> str:
    """Says the content of modules: two answers are equal only where it is."""
    found = [(name, path) for dotted in modules for name, path in files(dotted).items()]
    return "".join(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for name, path in found)
