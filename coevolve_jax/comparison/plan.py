"""What a comparison runs: a cell for each arm, setting and seed, and the beginning that the arms of a seed share."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.comparison.arms import arm


class Cell(NamedTuple):
    """One run. setting: values of the config that a grid or a search varies, the same in its beginning."""

    arm: str
    seed: int
    setting: tuple[tuple[str, Any], ...] = ()

    @property
    def column(self) -> str:
        """What is averaged over seeds: the arm with its setting."""
        return "+".join([self.arm, *(f"{key}={value}" for key, value in self.setting)])

    def workdir(self, folder: Path) -> Path:
        return folder / "cells" / self.column.replace("/", "_") / f"seed_{self.seed}"

    def start(self, folder: Path) -> Path:
        """Workdir of the beginning that it shares with the other arms."""
        setting = "+".join(f"{key}={value}" for key, value in self.setting) or "common"
        return folder / "starts" / setting.replace("/", "_") / f"seed_{self.seed}"


def cells(
    arms: Sequence[str], seeds: Sequence[int], settings: Sequence[Mapping[str, Any]] = ({},)
) -> list[Cell]:
    """All of them, seed by seed, so that whole comparisons are there as early as can be."""
    for name in arms:
        arm(name)
    repeated = len({*arms}) < len(arms) or len({*seeds}) < len(seeds)
    if repeated or not arms or not seeds or min(seeds) < 0:
        raise ValueError(
            f"--arms={','.join(arms)} and --seeds={','.join(map(str, seeds))} must each name at least one, "
            "none twice, and seeds from 0 on."
        )
    return [
        Cell(name, seed, setting)
        for seed in seeds
        for setting in dict.fromkeys(tuple(s.items()) for s in settings)  # a search may round to the same
        for name in arms
    ]


def check_planned(planned: Sequence[Sequence[str]], columns: Sequence[str]) -> None:
    """Raises ValueError for a difference that is none of two columns."""
    for pair in planned:
        if len(pair) != 2 or not {*pair} <= {*columns}:
            raise ValueError(
                f"--planned={'-'.join(pair)} is no difference of two columns, such as oracle-random: there are "
                f"{', '.join(columns)}."
            )


def check_strategy(config: ConfigDict, keys: Iterable[str]) -> None:
    """Arms bring their strategy with its settings: raises ValueError for others, in the config or among these keys."""
    own = configs.strategy(config.strategy.name)
    named = [key for key in keys if key.startswith("strategy.")]
    named += [f"strategy.{key}" for key, value in config.strategy.items() if own.get(key) != value]
    if named:
        raise ValueError(
            f"config.{named[0]} would be the arms' own again, which bring their strategy with its settings: name an arm "
            "that has it (--arms=help), or the dotted path of a strategy's module with such DEFAULTS."
        )


def parse_seeds(text: str) -> list[int]:
    """ "0:5" or "0,3,7"."""
    try:
        if ":" in text:
            first, last = text.split(":")
            return list(range(int(first), int(last)))
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--seeds={text!r} is neither a range such as 0:5 nor a list such as 0,3,7."
        ) from None


def parse_shard(text: str) -> tuple[int, int]:
    """ "0/4" is the first of four parts. Raises ValueError where it is no such part."""
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise ValueError(f"--shard={text!r} is no part such as 0/4, 1/4, 2/4 or 3/4.")
    return int(index), int(count)


def parse_value(config: ConfigDict, key: str, text: str) -> Any:
    """A value from its text, of the type that config.<key> has. Raises ValueError where it is none."""
    present: Any = config
    for part in key.split("."):
        if not isinstance(present, ConfigDict) or part not in present:
            raise ValueError(
                f"The config has no key {key!r}: the keys and their meaning stand in the config file."
            )
        present = present[part]
    try:
        if isinstance(present, bool):
            return {"true": True, "false": False}[text.lower()]
        if isinstance(present, (tuple, list)):
            return tuple(_number(part) for part in text.split("+") if part)
        return type(present)(text)
    except (KeyError, ValueError, TypeError):
        raise ValueError(f"config.{key} cannot be {text!r}: it is a {type(present).__name__}.") from None


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def grid(config: ConfigDict, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Settings from "evolution.every=2,5,10", ...: all combinations."""
    axes = []
    for text in texts:
        key, _, values = text.partition("=")
        axes.append([(key, parse_value(config, key, value)) for value in values.split(",")])
    return [dict(point) for point in itertools.product(*axes)]


def search(config: ConfigDict, texts: Sequence[str], samples: int, seed: int) -> list[dict[str, Any]]:
    """`samples` settings spread over ranges, by a Latin hypercube. texts: "learner.learning_rate=1e-4:1e-3:log", ...;
    without :log the values are spread evenly, and rounded where the config has an integer."""
    import numpy as np
    from scipy.stats import qmc

    axes = []
    for text in texts:
        key, _, span = text.partition("=")
        try:
            low, high, *how = span.split(":")
            axes.append((key, float(low), float(high), how == ["log"]))
            if how == ["log"] and float(low) <= 0:
                raise ValueError
        except ValueError:
            raise ValueError(
                f"--search={text!r} is no range such as learner.learning_rate=1e-4:1e-3:log (from above 0)."
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
    return settings


def start_config(config: ConfigDict, cell: Cell) -> ConfigDict:
    """Of the beginning: no arm's own. ValueError where all would share one folder of checkpoints."""
    if folder := config.checkpoint.get("folder"):
        raise ValueError(
            f"config.checkpoint.folder is {folder!r}, of one run: leave it empty where several are compared."
        )
    return configs.override(config, {**dict(cell.setting), "seed": cell.seed, "strategy.name": "static"})


def cell_config(config: ConfigDict, cell: Cell) -> ConfigDict:
    """Of a cell, as it is forked from its beginning."""
    return configs.override(start_config(config, cell), arm(cell.arm).changes)


def check_cells(folder: Path, config: ConfigDict, cells: Sequence[Cell]) -> None:
    """Raises ValueError where a cell is there with another config, such as that of an arm as it was before."""
    for cell in cells:
        if (path := cell.workdir(folder) / "config.json").exists():
            theirs = configs.numbers(json.loads(path.read_text()))
            ours = configs.numbers(json.loads(configs.to_json(cell_config(config, cell))))
            if theirs != ours:
                raise ValueError(
                    f"{path.parent} is a run of another config ({configs.difference(theirs, ours)}): delete it, or choose "
                    "another --workdir."
                )


def write(folder: Path, plan: Mapping[str, Any], replace: bool = True) -> None:
    """Writes plan.json, and first checks that the folder's is of the same config: ValueError where it is not. replace:
    whether one that is there makes room."""
    path, plan = folder / "plan.json", json.loads(json.dumps(plan))  # as it is read back
    if path.exists():
        theirs = configs.numbers(json.loads(path.read_text())["config"])
        if theirs != plan["config"]:
            raise ValueError(
                f"{folder} holds a comparison of another config ({configs.difference(theirs, plan['config'])}): "
                "choose another --workdir."
            )
    elif folder.exists() and any(folder.iterdir()):
        raise ValueError(
            f"{folder} is not empty and holds no comparison (no plan.json): choose another --workdir."
        )
    folder.mkdir(parents=True, exist_ok=True)
    if replace or not path.exists():
        path.write_text(json.dumps(plan, indent=1))
