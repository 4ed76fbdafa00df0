"""A config as a run writes it down: config.json, what is compared when the run goes on, and the digest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax.config import keys
from coevolve_jax.config.loading import defaults


def to_json(config: ConfigDict) -> str:
    """The config as JSON text with sorted keys."""
    return json.dumps(config.to_dict(), sort_keys=True, indent=1)


def plain(config: ConfigDict) -> dict[str, Any]:
    """The config's values as config.json has them: tuples are lists."""
    return json.loads(to_json(config))


def of_run(workdir: str | os.PathLike) -> ConfigDict:
    """The config of a run that has begun.

    A key that is newer than the run gets its default here, so any run can be read, evaluated and forked. Such
    a run cannot be resumed: `records.workdir.claim` compares config.json itself, and names the missing key.

    Raises ValueError if there is no config.json, or if it has an unknown key.
    """
    if not (Path(workdir) / "config.json").exists():
        raise ValueError(
            f"{workdir} holds no run (no config.json): name the workdir of a run, or begin one with a "
            "--config."
        )
    return ConfigDict(filled(read(workdir)))


def read(workdir: str | os.PathLike) -> dict[str, Any]:
    """A run's config.json as plain values. Raises ValueError, which names the file, where it holds none."""
    path = Path(workdir) / "config.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): restore it, or choose another --workdir."
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no config: restore it, or choose another --workdir.")
    try:
        keys.check_names(found)
    except ValueError as error:
        raise ValueError(f"{path} is of another version. {error}") from None
    return found


def filled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values of a config, with the defaults of the keys that it lacks, as JSON has them."""
    named = {section: config.get(section, {}).get("name") for section in ("strategy", "explorer")}
    known = plain(defaults(**{section: name for section, name in named.items() if name}))
    sections = {
        name: {**part, **config.get(name, {})} for name, part in known.items() if isinstance(part, dict)
    }
    return {**known, **config, **sections}


def renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Plain values of a published comparison's config, with today's names of its keys."""
    found = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    for old, new in keys.RENAMED.items():
        section, _, name = old.partition(".")
        if name in found.get(section, {}):
            there, _, called = new.partition(".")
            found.setdefault(there, {})[called] = found[section].pop(name)
    # Plans without this key compared no calls.
    found.setdefault("data", {}).setdefault("leak_call_threshold", 0.0)
    return found


def numbers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config that determine a run's numbers: all keys but those of `keys.SERVING`."""
    found = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items()}
    for key in keys.SERVING:
        section, name = key.split(".")
        found.get(section, {}).pop(name, None)
    return found


def numbers_of(config: ConfigDict) -> dict[str, Any]:
    """The plain values of a config that determine a run's numbers."""
    return numbers(plain(config))


def digest(config: ConfigDict, seeded: bool = True) -> str:
    """16 hex digits that name everything in the config that a run's numbers depend on.

    seeded: False gives configs that differ in `seed` alone the same digits, those of seed 0.
    """
    found = numbers_of(config) if seeded else {**numbers_of(config), "seed": 0}
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def difference(theirs: Mapping, ours: Mapping, prefix: str = "config") -> str:
    """The first key in which two configs, as plain values, differ, with both values."""
    for key in sorted(theirs.keys() | ours.keys()):
        if key in theirs and key in ours and theirs[key] == ours[key]:
            continue
        a, b = theirs.get(key), ours.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            return difference(a, b, f"{prefix}.{key}")
        there, here = (repr(found[key]) if key in found else "missing" for found in (theirs, ours))
        return f"{prefix}.{key} is {there} there and {here} here"
    return "equal"
