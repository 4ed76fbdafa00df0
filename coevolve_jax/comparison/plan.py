"""The runs of a comparison: a cell for each arm, setting and seed. The arms of a seed share a start."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax import names
from coevolve_jax.comparison.arms import PLANNED, arm
from coevolve_jax.config import idle, keys


class Cell(NamedTuple):
    """One run of a comparison. setting: config values that a grid or a search varies."""

    arm: str
    seed: int
    setting: tuple[tuple[str, Any], ...] = ()

    @property
    def column(self) -> str:
        """Name of the arm with its setting. Results are averaged over the seeds of a column."""
        return "+".join([self.arm, *(f"{key}={_text(value)}" for key, value in self.setting)])

    def workdir(self, folder: Path) -> Path:
        return folder / "cells" / self.column.replace("/", "_") / f"seed_{self.seed}"

    @property
    def shared(self) -> dict[str, Any]:
        """The part of the setting that holds for the start too: all but values of the later strategy."""
        return {key: value for key, value in self.setting if not key.startswith("strategy.")}

    def start(self, folder: Path) -> Path:
        """Workdir of the start that the cell shares with the other arms."""
        setting = "+".join(f"{key}={_text(value)}" for key, value in self.shared.items()) or "common"
        return folder / "starts" / setting.replace("/", "_") / f"seed_{self.seed}"


# Keys that change no result: how a run is served, and sections that say what it writes down.
SERVING = (*keys.SERVING, "environment.workers")
RECORDING = ("logging", "health", "checkpoint")


def _text(value: Any) -> str:
    """Writes a value as the command line does."""
    return "+".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def cells(
    arms: Sequence[str], seeds: Sequence[int], settings: Sequence[Mapping[str, Any]] = ({},)
) -> list[Cell]:
    """Lists all cells, seed by seed, so that whole comparisons are done as early as possible.

    Raises ValueError for no arm or seed, an unknown arm, or an arm that is named twice.
    """
    for name in arms:
        arm(name)
    repeated = sorted({name for name in arms if list(arms).count(name) > 1})
    if repeated or not arms or not seeds:
        raise ValueError(
            f"--arms={','.join(arms)} and --seeds={','.join(map(str, seeds))} must each name at least one, "
            "and none twice."
        )
    return [
        Cell(name, seed, tuple(setting.items())) for seed in seeds for setting in settings for name in arms
    ]


def parse_seeds(text: str, flag: str = "seeds") -> list[int]:
    """Parses "0:5" (0 to 4) or "0,3,7". Raises ValueError for anything else, and for a repeated seed.

    flag: the one that has the text, for the error.
    """
    try:
        if ":" in text:
            first, last = text.split(":")
            seeds = list(range(int(first), int(last)))
        else:
            seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--{flag}={text!r} is neither a range such as 0:5 nor a list such as 0,3,7."
        ) from None
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise ValueError(f"--{flag}={text!r} must name at least one seed, none below 0 and none twice.")
    return seeds


def parse_shard(text: str) -> tuple[int, int]:
    """Parses "0/4", the first of four parts, into (0, 4). Raises ValueError for anything else."""
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise ValueError(f"--shard={text!r} is no part such as 0/4, 1/4, 2/4 or 3/4.")
    return int(index), int(count)


def pairs(texts: Sequence[str], cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """Lists the pairs of columns to compare; without texts those of PLANNED.

    A text such as "oracle-random" names two columns, or two arms that are paired within each setting. Raises
    ValueError for a text that names no two, and for a difference that is named twice.
    """
    arms, settings = (list(dict.fromkeys(values)) for values in zip(*((c.arm, c.setting) for c in cells)))
    within = lambda a, b: [(Cell(a, 0, setting).column, Cell(b, 0, setting).column) for setting in settings]
    if not texts:
        return [pair for a, b in PLANNED if a in arms and b in arms for pair in within(a, b)]
    columns, found = list(dict.fromkeys(c.column for c in cells)), []
    for text in texts:
        named = [pair for pair in itertools.permutations(columns, 2) if "-".join(pair) == text]
        of_arms = [within(*pair) for pair in itertools.permutations(arms, 2) if "-".join(pair) == text]
        if not (named or of_arms):
            raise ValueError(
                f"--planned={text!r} names no two columns of this comparison: join two of "
                f"{', '.join(columns)} with a hyphen."
            )
        found += named or of_arms[0]
    for a, b in found:
        if (b, a) in found or found.count((a, b)) > 1:
            raise ValueError(
                f"--planned names {a} and {b} twice: name a difference once, in one direction, since each "
                "counts in Holm's correction."
            )
    return found


def primary(config: ConfigDict) -> str:
    """Name of the primary metric (differences.METRICS). The config fixes it before any run."""
    if config.evaluation.queries:
        return "queries"
    known = bool(config.get("testbed", {}).get("weak_tools", ())) and config.evaluation.balanced_tasks > 0
    return "weak" if known else "iid"


def start_config(config: ConfigDict, cell: Cell) -> ConfigDict:
    """Returns the config of a cell's start, which no arm changes.

    Raises ValueError where all runs would share one folder of checkpoints or of weights.
    """
    configs.check_several_runs(config)
    return configs.override(config, {**cell.shared, "seed": cell.seed, "strategy.name": "static"})


def changes(config: ConfigDict, cell: Cell) -> dict[str, Any]:
    """Returns the changes that a cell makes to the config of its start.

    First the arm's strategy, then its settings in the config and in the cell. The arm's own changes come
    last, so that they win.
    """
    own = arm(cell.arm).changes
    known = configs.strategy(own["strategy.name"])
    given = {f"strategy.{key}": value for key, value in _strategy_settings(config).items() if key in known}
    varied = {key: value for key, value in cell.setting if key not in cell.shared}
    return {"strategy.name": own["strategy.name"], **given, **varied, **own}


def cell_config(config: ConfigDict, cell: Cell) -> ConfigDict:
    """Returns the whole config of a cell."""
    return configs.override(start_config(config, cell), changes(config, cell))


def check_configs(config: ConfigDict, cells: Sequence[Cell], given: Collection[str] = ()) -> None:
    """Checks the configs of all cells before any runs. given: keys set for all cells (--set).

    Raises ValueError for a bad value, and for an evolving arm whose training set would never grow. Raises it
    too for a key, set or varied, that has no effect in any arm of a setting. That would compare equal runs.
    An effect in one arm is enough, since the other arms are what it is compared with. A varied key must
    change more than how a run is served or what it writes down. Signals count as more, though some arms only
    record them.
    """
    for key in {key: None for c in cells for key, _ in c.setting}:
        if key in SERVING or key.partition(".")[0] in RECORDING:
            raise ValueError(
                f"config.{key} only serves or records a run, so runs with all its values would be equal: set "
                "it for all cells with --set."
            )
    once = {(c.arm, c.setting): c for c in reversed(cells)}  # no check depends on the seed
    without: dict[tuple, list[dict[str, str]]] = {}
    for c in reversed(once.values()):
        made = cell_config(config, c)
        try:
            configs.check(made)
            configs.check_evolution(made)
            names.module("strategies", made.strategy.name, "strategy.name").make(made)
        except ValueError as error:
            raise ValueError(f"{c.column} cannot run: {error}") from None
        without.setdefault(c.setting, []).append(idle.idle(made))
    for setting, arms in without.items():
        for key in (*given, *dict(setting)):
            if all(key in without_effect for without_effect in arms):
                at = ", ".join(f"{k}={_text(v)}" for k, v in setting if k != key)
                raise ValueError(
                    f"config.{key} has no effect in any arm{' at ' + at if at else ''} ({arms[0][key]}), so "
                    "runs with and without it would be equal: leave it out, or set what it needs."
                )


def _strategy_settings(config: ConfigDict) -> dict[str, Any]:
    """The settings of the config's strategy that differ from that strategy's defaults."""
    defaults = configs.strategy(config.strategy.name)
    return {key: value for key, value in config.strategy.items() if value != defaults.get(key)}


def check(folder: Path, config: ConfigDict, cells: Sequence[Cell]) -> None:
    """Checks that each setting reaches a cell, and that existing runs have the same config.

    Raises ValueError for a strategy's setting that no arm has, and for an existing run of another config.
    Raises it too for a varied key that an arm sets itself or lacks.
    """
    strategies = {c.arm: configs.strategy(arm(c.arm).changes["strategy.name"]) for c in cells}
    for key, value in _strategy_settings(config).items():
        if not any(key in own for own in strategies.values()):
            raise ValueError(
                f"config.strategy.{key} is {value!r}, which none of the arms {', '.join(strategies)} has: "
                "leave it out, or name an arm whose strategy has it."
            )
    for name, own in strategies.items():
        for key in {key for c in cells if c.arm == name for key, _ in c.setting}:
            section, _, setting = key.partition(".")
            if key in arm(name).changes or (section == "strategy" and setting not in own):
                raise ValueError(
                    f"The arm {name!r} sets {key} itself, or has none: leave the arm or the key out of the "
                    "grid."
                )
    runs = {c.start(folder): start_config(config, c) for c in cells}
    runs |= {c.workdir(folder): cell_config(config, c) for c in cells}
    for workdir, asked in runs.items():
        if (workdir / "config.json").exists():
            theirs = configs.numbers(configs.filled(configs.read(workdir)))
            ours = configs.numbers(json.loads(configs.to_json(asked)))
            if theirs != ours:
                raise ValueError(
                    f"{workdir} holds a run of another config ({configs.difference(theirs, ours)}): choose "
                    "another --workdir, or delete this run to repeat it."
                )
