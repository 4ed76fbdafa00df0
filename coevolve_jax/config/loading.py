"""Makes configs: the defaults, a config file with its argument, and values that replace others."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax import shipped
from coevolve_jax.config import keys, methods
from coevolve_jax.config.kinds import Key


def defaults(strategy: str = keys.STRATEGY["name"], explorer: str = keys.EXPLORER["name"]) -> ConfigDict:
    """A config with every key of keys.py at its default, and this strategy's and explorer's own settings."""
    config = ConfigDict(_values(keys.TOP))
    for section, specified in keys.SECTIONS.items():
        config[section] = ConfigDict(_values(specified))
    config.strategy, config.explorer = methods.strategy(strategy), methods.explorer(explorer)
    return config


def harness() -> ConfigDict:
    """The section of a campaign, `config.harness`, with every key at its default."""
    return ConfigDict(_values(keys.HARNESS))


def harness_model() -> ConfigDict:
    """The section of a model that proposes, `config.harness_model`, with every key at its default."""
    return ConfigDict(_values(keys.HARNESS_MODEL))


def server() -> ConfigDict:
    """The keys of `config.environment` for families whose worlds start servers, each at its default."""
    return ConfigDict(_values(keys.FAMILIES["mcp"]))


def own_source(environment: ConfigDict) -> dict[str, Any]:
    """Returns the settings that name a user's own tools; {} for other families."""
    own = keys.FAMILIES[environment.name] if environment.name in keys.USERS_OWN else ()
    return {key: environment[key] for key in own if key in environment}


def _values(specified: Mapping[str, Any]) -> dict[str, Any]:
    return {name: key.default if isinstance(key, Key) else key for name, key in specified.items()}


def parse_arg(arg: str, **defaults) -> ConfigDict:
    """Parses "key=value,key=value" (what follows the colon of --config=file.py:...) by the defaults' types.

    Raises ValueError for a key without a default or a value that is not of its type.
    """
    values = ConfigDict(defaults)
    for item in filter(None, arg.split(",")):
        key, given, text = item.partition("=")
        if key not in defaults:
            raise ValueError(f"Config argument {key!r} is unknown: use {', '.join(sorted(defaults))}.")
        if not given:
            raise ValueError(f"Config argument {key!r} has no value: write {key}=VALUE.")
        kind = type(defaults[key])
        try:
            values[key] = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
        except (KeyError, ValueError):
            raise ValueError(f"Config argument {key}={text!r} is not of type {kind.__name__}.") from None
    return values


def load_file(path: str | os.PathLike, arg: str = "") -> ConfigDict:
    """The config of a config file, as --config=PATH:ARG gives it. path: also the name of a shipped one.

    Raises ValueError, with the file and for errors of its own code the line, where it gives no config.
    """
    path = shipped.config_file(path)
    loader = importlib.machinery.SourceFileLoader(f"config_{path.stem}", str(path.absolute()))
    spec = importlib.util.spec_from_file_location(loader.name, loader.path, loader=loader)
    if spec is None or not path.is_file():
        near = shipped.like(path.stem)
        meant = f"did you mean {near}" if near else "give one of configs/, or your own"
        raise ValueError(f"{path} is no Python file: {meant}.")
    loaded = sys.modules[loader.name] = importlib.util.module_from_spec(spec)  # where dataclasses look
    try:
        loader.exec_module(loaded)
        get_config = getattr(loaded, "get_config", None)
        if not callable(get_config):
            raise ValueError(f"{path} defines no function get_config: name a file that does.")
        inputs = () if not arg and _takes(get_config) else (arg,)
        if not _takes(get_config, *inputs):
            raise ValueError(
                f"get_config of {path} cannot be called with {arg!r}: let get_config take an argument."
            )
        found = get_config(*inputs)
    except (SyntaxError, ImportError) as error:
        raise ValueError(f"{path} cannot be loaded ({error}): mend it, or name another file.") from None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        raised_in = Path(frames[-1].filename).resolve()
        if isinstance(error, ValueError) and raised_in.is_relative_to(shipped.PACKAGE):
            raise  # a sentence of ours
        lines = [f":{frame.lineno}" for frame in frames if frame.filename == loader.path]
        inner = next(iter(error.args), None)  # ml_collections wraps its KeyErrors
        why = " ".join(str(inner.args[0] if isinstance(inner, KeyError) else error).split())
        if not isinstance(error, ValueError):
            why = f"{type(error).__name__}: {why}: mend it, or name another file."
        raise ValueError(f"{path}{''.join(lines[-1:])}: {why}") from error
    if not isinstance(found, ConfigDict):
        raise ValueError(
            f"get_config of {path} returns a value of type {type(found).__name__}, not a ConfigDict: let it "
            "return the config."
        )
    return found


def _takes(function: Callable, *inputs: str) -> bool:
    """Says whether a function can be called with these inputs."""
    try:
        inspect.signature(function).bind(*inputs)
    except TypeError:
        return False
    return True


def inherit(file: str, name: str, arg: str) -> ConfigDict:
    """The config of the file `name` beside the config file `file`, which changes some of its values."""
    return load_file(Path(file).with_name(name), arg)


def override(config: ConfigDict, values: Mapping[str, Any]) -> ConfigDict:
    """Returns a copy with some values replaced.

    values: by dotted key. Another strategy.name or explorer.name brings that one's settings. Raises
    ValueError for a key that is not there or a value of another type.
    """
    copied, values = ConfigDict(config.to_dict()), dict(values)
    if "strategy.name" in values:
        copied.strategy = methods.strategy(values.pop("strategy.name"))
    if "explorer.name" in values:
        copied.explorer = methods.explorer(values.pop("explorer.name"))
    for key, value in values.items():
        find(copied, key)
        section, _, name = key.rpartition(".")
        try:
            (copied[section] if section else copied)[name] = value
        except TypeError as error:
            raise ValueError(f"config.{key} cannot be {value!r}: {error}.") from None
    return copied


def find(config: ConfigDict, key: str) -> Any:
    """The value of a dotted key. Raises ValueError, with the nearest key, where the config has none."""
    present: Any = config
    for part in key.split("."):
        if not isinstance(present, ConfigDict) or part not in present:
            raise ValueError(keys.unknown(key, keys.names(config)))
        present = present[part]
    return present
