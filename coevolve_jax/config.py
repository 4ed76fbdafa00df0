"""Config files' arguments, checks that need the whole config, and its digest."""
from __future__ import annotations

import hashlib
import json

from ml_collections import ConfigDict

MODES = ("coevolve", "random", "static")


def parse_arg(arg: str, **defaults) -> ConfigDict:
    """Parses "key=value,key=value" (what follows the colon of --config=file.py:...) by the defaults' types.

    Raises ValueError for a key without a default or a value that is not of its type.
    """
    values = ConfigDict(defaults)
    for item in filter(None, arg.split(",")):
        key, _, text = item.partition("=")
        if key not in defaults:
            raise ValueError(f"Config argument {key!r} is unknown: use {', '.join(sorted(defaults))}.")
        try:
            values[key] = type(defaults[key])(text)
        except ValueError:
            raise ValueError(f"Config argument {key}={text!r} is not of type {type(defaults[key]).__name__}.") from None
    return values


def check(config: ConfigDict) -> None:
    """Raises ValueError, in one sentence, for values that cannot work together."""

    def require(ok: bool, key: str, rule: str):
        if not ok:
            section, _, name = key.rpartition(".")
            value = (config[section] if section else config)[name]
            raise ValueError(f"config.{key} is {value!r}: it must be {rule}.")

    require(config.evolution.mode in MODES, "evolution.mode", f"one of {', '.join(MODES)}")
    require(config.engine.name in ("native",), "engine.name", "'native'")
    require(0 <= config.data.new_share <= 1, "data.new_share", "a share between 0 and 1")
    require(config.rollout.group_size >= 2, "rollout.group_size", "at least 2, for a group to have a spread")
    require(config.rollout.temperature > 0, "rollout.temperature", "above 0: greedy rollouts have no spread")
    require(
        config.learner.row_length >= config.rollout.max_length,
        "learner.row_length",
        f"at least config.rollout.max_length ({config.rollout.max_length})",
    )
    require(config.evolution.every >= 1, "evolution.every", "at least 1")
    require(config.checkpoint.every >= 1, "checkpoint.every", "at least 1")
    require(config.checkpoint.keep >= 2, "checkpoint.keep", "at least 2, so that a damaged one has a predecessor")
    require(config.steps >= 1, "steps", "at least 1")


def to_json(config: ConfigDict) -> str:
    """The config as JSON text with sorted keys."""
    return json.dumps(config.to_dict(), sort_keys=True, indent=1)


def digest(config: ConfigDict) -> str:
    """16 hex digits that name everything in the config that a run's numbers depend on."""
    return hashlib.sha256(to_json(config).encode()).hexdigest()[:16]
