"""Harnesses that a campaign's selected one is compared with at the end: tuned by hand, or of other campaigns.

    configs/bfcl_harness.py:start=textbook    a config file with its argument
    runs/placebo                              the folder of another campaign, for what it selected

A reference may differ from the start of the campaign in the keys of levers, and in any setting of a strategy
or of evolution. With other tasks, another policy or another way to evaluate its runs could not be compared.
All get as many rollouts at most: the batches have one size, and the budget is that of the start. A reference
that may spend more ends sooner. Where the start has no budget and asks for probes, these have no bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.config import methods
from coevolve_jax.harness import campaign, levers, start, store
from coevolve_jax.harness.versions import Versions

OPEN = ("strategy.", "evolution.")


def changes(given: str, config: ConfigDict, runs: store.Store) -> levers.Changes:
    """Returns what a reference changes of the campaign's start.

    given: as the user names it. config: of v000, with the section `harness`. runs: the campaign's.

    Raises ValueError where it cannot be read or run, is the start itself, differs in a key of no lever, or
    has batches of another size; Tampered where a file of another campaign was changed.
    """
    first, other = start.without_harness(config), _config(given, config, runs)
    found = store.config_changes(first, other)
    found.pop("budget.rollouts", None)  # the start's
    if key := frozen(found):
        raise ValueError(
            f"--reference={given} differs from the campaign's start in config.{key}, which is no lever: "
            "a reference may differ in levers, strategy and evolution alone."
        )
    if not found:
        raise ValueError(f"--reference={given} is the campaign's start itself, which is read in any case.")
    size = lambda c: c.rollout.tasks_per_step * c.rollout.group_size
    if size(other) != size(first):
        raise ValueError(
            f"--reference={given} has {size(other)} rollouts a step, and the campaign's start {size(first)}: "
            "a reference gets as many."
        )
    probes = _asks_for_rollouts(other) and not _asks_for_rollouts(first)
    if probes or other.learner.dynamic_sampling > first.learner.dynamic_sampling:
        found["budget.rollouts"] = first.budget.rollouts or levers.most_rollouts(first)
    levers.changed(first, found)
    return found


def _asks_for_rollouts(config: ConfigDict) -> bool:
    """Whether the strategy may spend rollouts besides its batches. One of somebody's own may always."""
    own = config.strategy
    asked = methods.needs(config) & {"probe", "influence", "branch"}
    return "." in own.name or own.get("probe", 0) > 0 or bool(asked)


def frozen(changes: levers.Changes) -> str:
    """The first of the changed keys that a reference may not change; "" if there is none."""
    plain = configs.defaults()
    plain.harness = configs.harness()  # with all levers
    movable = {key for lever in levers.table(plain).values() for key in lever.keys}
    return next((key for key in changes if not key.startswith(OPEN) and key not in movable), "")


def _config(given: str, config: ConfigDict, runs: store.Store) -> ConfigDict:
    """The config of a reference's runs, evaluated and recorded as the campaign's are."""
    if Path(given).is_dir() and not (Path(given) / "campaign.json").exists():
        raise ValueError(f"--reference={given} holds no campaign.json: name a campaign, or a config file.")
    if not Path(given).is_dir():
        path, _, arg = given.partition(":")
        return start.settled_as(configs.load_file(path, arg), config)
    other = campaign.Campaign(Path(given))
    if other.next() is not None:
        raise ValueError(f"--reference={given} is a campaign that is not over: run it to its end first.")
    other.check(code=False)  # which may be that of another day
    own = ConfigDict(_tuples(other.plan()["config"]))
    return start.settled_as(Versions(other, own, runs).config(other.selected()), config)


def _tuples(plain: Any) -> Any:
    """Plain values of a config.json with the tuples that JSON has as lists."""
    if isinstance(plain, Mapping):
        return {key: _tuples(value) for key, value in plain.items()}
    return tuple(plain) if isinstance(plain, list) else plain
