"""Makes configs: the defaults, a config file with its argument, and values that replace others."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax import shipped
from coevolve_jax.config import keys, methods
from coevolve_jax.config.kinds import Key

NO_CONFIG = "get_config of {} returns a value of type {}, not a ConfigDict: let it return the config."


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
        key, _, text = item.partition("=")
        if key not in defaults:
            raise ValueError(f"Config argument {key!r} is unknown: use {', '.join(sorted(defaults))}.")
        try:
            values[key] = type(defaults[key])(text)
        except ValueError:
            raise ValueError(
                f"Config argument {key}={text!r} is not of type {type(defaults[key]).__name__}."
            ) from None
    return values


def load_file(path: str | os.PathLike, arg: str = "") -> ConfigDict:
    """The config of a config file, as --config=PATH:ARG gives it. path: also the name of a shipped one.

    Raises ValueError, which names the file, where it is no Python, lacks a package, or gives no config.
    Other errors of its own code stay as they are.
    """
    path = shipped.config_file(path)
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise ValueError(f"{path} is no Python file: name one that defines get_config.")
    loaded = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(loaded)
        if not hasattr(loaded, "get_config"):
            raise ValueError(f"{path} defines no function get_config: name a file that does.")
        found = loaded.get_config(arg)
    except (SyntaxError, ImportError) as error:
        raise ValueError(f"{path} cannot be loaded ({error}): mend it, or name another file.") from None
    return checked(path, found)


def checked(path: str | os.PathLike, found: Any) -> ConfigDict:
    """Returns what a config file's get_config gave. Raises ValueError, with the file, if it is no config."""
    if not isinstance(found, ConfigDict):
        raise ValueError(NO_CONFIG.format(path, type(found).__name__))
    return found


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
