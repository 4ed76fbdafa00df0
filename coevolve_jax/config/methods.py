"""The modules that a config names: strategy, explorer and trackers, with their own settings.

Those of a user's own decide as our source files do: `own_modules` tells them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from ml_collections import ConfigDict

from coevolve_jax import names
from coevolve_jax.config import schedule

# The remedy where a module that a config names imports a package that is not installed.
REMEDY = (
    "install it (what explorer=llm and explorer=policy import comes with pip install 'coevolve_jax[llm]')"
)

# Keys that may name a module of a user's own, or a function as MODULE.FUNCTION.
MODULES = ("strategy.name", "explorer.name", "environment.name", "harness.proposer")
FUNCTIONS = ("learner.surrogate", "data.leak_embedding")

# What a strategy may need besides rollouts and new tasks (strategies/base.py).
SERVICES = ("fresh", "probe", "endings", "help", "macros", "ask", "influence", "branch", "queries")

# The parts that an explorer with these keys can leave to the scripted one. "initial": D_0 and the held-out
# tasks.
PARTS = ("reflector", "explorer", "abstractor", "validator", "initial")


def own_modules(config: ConfigDict) -> dict[str, str]:
    """Key -> dotted path of the module that a config names there, where it is none of ours.

    A user's own tools (environment.source) and trackers are not among them.
    """
    found = {}
    for key in MODULES + FUNCTIONS:
        section, _, name = key.partition(".")
        named = config.get(section, {}).get(name, "")
        if "." in named and not named.startswith("coevolve_jax."):
            found[key] = named if key in MODULES else named.rpartition(".")[0]
    return found


def strategy(name: str) -> ConfigDict:
    """The `strategy` section for a strategy: its name and its own settings, DEFAULTS of its module."""
    return _section("strategies", name, "strategy.name")


def explorer(name: str) -> ConfigDict:
    """The `explorer` section, likewise."""
    return _section("explorers", name, "explorer.name")


def reads(config: ConfigDict) -> frozenset[str] | None:
    """The keys of `strategies.base.SHARED` in READS of the strategy's module; None where it has no READS."""
    module = names.module("strategies", config.strategy.name, "strategy.name", ["make"], remedy=REMEDY)
    told = getattr(module, "READS", None)
    return None if told is None else frozenset(told)


def ignores(config: ConfigDict) -> frozenset[str]:
    """The keys in IGNORES of the strategy's module that have no effect (strategies/base.py)."""
    module = names.module("strategies", config.strategy.name, "strategy.name", ["make"], remedy=REMEDY)
    told = getattr(module, "IGNORES", {})
    return _in_use(told, config)


def needs(config: ConfigDict) -> frozenset[str]:
    """NEEDS of the strategy's module: the services that it cannot work without (strategies/base.py).

    Raises ValueError for one that there is not.
    """
    module = names.module("strategies", config.strategy.name, "strategy.name", ["make"], remedy=REMEDY)
    told = getattr(module, "NEEDS", ())
    if unknown := sorted(set(told) - set(SERVICES)):
        raise ValueError(
            f"NEEDS of {module.__name__} names {unknown[0]!r}: the services are {', '.join(SERVICES)}."
        )
    return _in_use(told, config) if isinstance(told, Mapping) else frozenset(told)


def scenario_keys(config: ConfigDict) -> dict[str, list[str]]:
    """The keys of scenarios that settings of the strategy name: setting -> keys (strategies/base.py)."""
    module = names.module("strategies", config.strategy.name, "strategy.name", ["make"], remedy=REMEDY)
    return {
        setting: [key for key in config.strategy[setting].split(",") if key and key not in others]
        for setting, others in getattr(module, "SCENARIO_KEYS", {}).items()
    }


def _in_use(told: Mapping[str, str], config: ConfigDict) -> frozenset[str]:
    """The names whose setting of the strategy is on, and those whose setting is ""."""
    return frozenset(name for name, setting in told.items() if not setting or config.strategy[setting])


def scheduled(config: ConfigDict) -> bool:
    """Whether the strategy says that it evolves after the steps of `schedule.evolutions`, and no others."""
    return set(schedule.KEYS) <= (reads(config) or set())


def asks_policy(config: ConfigDict) -> bool:
    """Whether the explorer, or the player that words its queries, asks the policy that is trained.

    ASKS_POLICY of a module says so. The policy answers through the run's engine.
    """
    keys = ["name", "wording"] if words_by_model(config) else ["name"]
    modules = [
        names.module("explorers", config.explorer[key], f"explorer.{key}", ["make"], remedy=REMEDY)
        for key in keys
    ]
    return any(getattr(module, "ASKS_POLICY", False) for module in modules)


def words_by_model(config: ConfigDict) -> bool:
    """Whether a model rewords the queries of rules (explorers/wording.py)."""
    return config.explorer.get("wording", "rules") == "policy"


def trackers(config: ConfigDict) -> list[ModuleType]:
    """The modules that config.logging.trackers names, separated by commas."""
    how = lambda name: "" if "." in name else f" (pip install 'coevolve_jax[{name}]')"
    return [
        names.module(
            "records.trackers", name, "logging.trackers", ["make"], f"install it{how(name)}, or leave it out"
        )
        for name in filter(None, config.logging.trackers.split(","))
    ]


def _section(package: str, name: str, key: str) -> ConfigDict:
    module = names.module(package, name, key, ["make"], remedy=REMEDY)
    return ConfigDict({"name": name, **getattr(module, "DEFAULTS", {})})
