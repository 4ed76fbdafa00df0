"""The modules of a user's own that a config names. They decide as our source files do, so they are frozen.

Each file has a name, "modules/mine.lights/lights.py". The file of `environment.source`, whose path may have
slashes, is "modules/environment.source=my%2Fenv.py/env.py". What a module imports is not among them.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote, unquote

from ml_collections import ConfigDict

from coevolve_jax import names
from coevolve_jax.envs import family
from coevolve_jax.envs.tools import source

FOLDER = "modules"  # in the names of files
SOURCE = "environment.source="  # begins the name of a user's own tools
KEYS = {  # of a config that may name one -> the package of ours that a short name is of
    "strategy.name": "strategies", "explorer.name": "explorers", "environment.name": "envs",
    "harness.proposer": "harness.proposers",
}  # fmt: skip


def named(config: ConfigDict) -> list[str]:
    """The dotted paths of modules that a config names, and of its family's AUDIT, but for our own.

    A user's own tools are among them as SOURCE and the quoted path or dotted path of their file.
    """
    found = []
    for key, package in KEYS.items():
        section, _, own = key.partition(".")
        if section in config:
            found.append(names.path(package, config[section][own]))
    environment = config.environment.name
    if _outside(environment):
        found.append(names.path("envs", getattr(family.module(environment), "AUDIT", environment)))
    if where := config.environment.get("source", "").partition(":")[0]:
        found.append(SOURCE + quote(where, safe=""))
    return [dotted for dotted in dict.fromkeys(found) if _outside(dotted)]


def _outside(dotted: str) -> bool:
    return "." in dotted and not dotted.startswith("coevolve_jax.")


def files(dotted: str) -> dict[str, Path]:
    """Name -> path of a module's file, or of all that a package has. {} where there is none."""
    if dotted.startswith(SOURCE):
        return _of_source(dotted)
    try:
        spec = importlib.util.find_spec(dotted)
    except (ImportError, ValueError):
        return {}
    if spec is None:
        return {}
    if spec.submodule_search_locations is None:
        file = Path(spec.origin or "")
        return {f"{FOLDER}/{dotted}/{file.name}": file}
    folders = map(Path, spec.submodule_search_locations)
    paths = {f"{path.relative_to(folder)}": path for folder in folders for path in folder.rglob("*.py")}
    return {f"{FOLDER}/{dotted}/{name}": path for name, path in sorted(paths.items())}


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
