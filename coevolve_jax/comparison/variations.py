"""Variations of a config: the values of --set, --grid and --search, read by the types of its keys."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax import config as configs


def by_key(flag: str, texts: Iterable[str]) -> dict[str, str]:
    """Splits texts KEY=VALUE of a flag. Raises ValueError for a key that is named twice."""
    found: dict[str, str] = {}
    for key, _, value in (text.partition("=") for text in texts):
        if key in found:
            raise ValueError(f"--{flag} names {key} twice ({found[key]!r} and {value!r}): name a key once.")
        found[key] = value
    return found


def with_values(config: ConfigDict, texts: Iterable[str]) -> ConfigDict:
    """The config with the values of --set=KEY=VALUE. Raises ValueError as `by_key` and `parse_value`."""
    changes = by_key("set", texts).items()
    return configs.override(config, {key: parse_value(config, key, value) for key, value in changes})


def parse_value(config: ConfigDict, key: str, text: str) -> Any:
    """Parses a value of the type of config.<key>. Raises ValueError for an unknown key or a bad value."""
    if key in ("seed", "strategy.name"):
        flag = "--seeds" if key == "seed" else "--arms"
        raise ValueError(f"config.{key} is what {flag} varies: name {text!r} there.")
    present = configs.find(config, key)
    if isinstance(present, ConfigDict):
        raise ValueError(
            f"config.{key} is a section and cannot be {text!r}: name one of its keys ({', '.join(present)})."
        )
    try:
        if isinstance(present, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(present, (tuple, list)):
            words = all(isinstance(part, str) for part in present) and len(present) > 0
            return tuple(part if words else _literal(part) for part in text.split("+") if part)
        return type(present)(text)
    except (KeyError, ValueError, TypeError):
        raise ValueError(f"config.{key} cannot be {text!r}: give {_kind(present)}.") from None


def _kind(value: Any) -> str:
    """Says what takes the place of a value."""
    known = {bool: "true or false", int: "a whole number", float: "a number"}
    return known.get(type(value), "values joined by +")


def _literal(text: str) -> Any:
    """Parses a Python literal, such as a number. Other text is returned as it is."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def grid(config: ConfigDict, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Makes settings from texts such as "evolution.every=2,5,10": all combinations of their values.

    Raises ValueError for a key that is named twice, and as `parse_value`.
    """
    axes = [
        [(key, parse_value(config, key, value)) for value in values.split(",")]
        for key, values in by_key("grid", texts).items()
    ]
    return _distinct(dict(point) for point in itertools.product(*axes))


def _distinct(settings: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Removes repeated settings: their cells would share a workdir."""
    return list({tuple(setting.items()): setting for setting in settings}.values())


def search(config: ConfigDict, texts: Sequence[str], samples: int, seed: int) -> list[dict[str, Any]]:
    """Spreads `samples` settings over ranges by a Latin hypercube. Rounding may merge some.

    texts: such as "learner.learning_rate=1e-4:1e-3:log". Values are spread evenly, with :log in the
    logarithm. They are rounded to 4 significant digits, or to an integer where the config has one. Raises
    ValueError for a text that is no such range, and for a key that is named twice.
    """
    import numpy as np
    from scipy.stats import qmc

    axes = []
    for key, span in by_key("search", texts).items():
        try:
            low, high, *how = span.split(":")
            axes.append((key, float(low), float(high), how == ["log"]))
            least = 0 if how else -math.inf
            if how not in ([], ["log"]) or not least < float(low) < float(high) < math.inf:
                raise ValueError("no such range")
        except ValueError:
            raise ValueError(
                f"--search={f'{key}={span}'!r} is no range such as learner.learning_rate=1e-4:1e-3:log, the "
                "lower end first, and above 0 with :log."
            ) from None
    points = qmc.LatinHypercube(len(axes), rng=np.random.default_rng(seed)).random(samples)
    settings = []
    for point in points:
        setting = {}
        for (key, low, high, log), share in zip(axes, point.tolist()):
            value = (
                math.exp(math.log(low) + share * math.log(high / low)) if log else low + share * (high - low)
            )
            whole = isinstance(parse_value(config, key, "1"), int)
            setting[key] = round(value) if whole else float(f"{value:.4g}")
        settings.append(setting)
    return _distinct(settings)
