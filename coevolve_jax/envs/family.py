"""Loads an environment family by name. Functions that need its packages run under its own interpreter."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from types import ModuleType
from typing import Any

from coevolve_jax import names, shipped
from coevolve_jax.envs import base
from coevolve_jax.types import Call, Task

NEEDED = ("scenarios", "tasks", "tools", "make")  # the rest has defaults in base.py


@dataclasses.dataclass(frozen=True)
class Family:
    """The functions of an environment family that a run uses, wherever the family's packages are installed.

    scenarios(split, settings, apart_from=""): bare scenarios. settings: the section config.environment.
        apart_from: a split whose initial states are left out.
    tasks(split, settings): the benchmark's own tasks.
    tools(task): function schemas, shared (do not change them). They depend on task.environment and
        task.scenario only.
    report(groups, judge): the official score. judge: ProcessPool.judge.
    action_pattern, wording, task_key, features, categories, protocols: see envs/base.py. A family may list
        its `actions`; action_pattern then answers "" for all others.
    versions(): versions of PACKAGES, as far as the family's interpreter has them.

    Only workers call `make` and `judge` (worker_pool.ProcessPool).
    """

    name: str
    python: str
    scenarios: Callable[..., list[Task]]
    tasks: Callable[[str, Mapping[str, Any]], list[Task]]
    tools: Callable[[Task], list[dict]]
    report: Callable[..., dict]
    action_pattern: Callable[[Call], str]
    wording: Callable[[Call], str]
    task_key: Callable[[Task], str]
    features: Callable[[Task], Counter[str]]
    categories: Sequence[str]
    protocols: Mapping[str, Mapping[str, Any]]
    versions: Callable[[], dict[str, str]]

    def settings(self, categories: Sequence[str] = (), protocol: str = "") -> dict:
        """Returns settings for `tasks`.

        categories: parts of the benchmark; empty leaves the choice to the family. protocol: its name, or ""
        to play as in training. ValueError for a name that the family does not have.
        """
        asked = {
            "category": (categories, self.categories),
            "protocol": ([protocol] if protocol else [], self.protocols),
        }
        for kind, (wanted, known) in asked.items():
            if unknown := [name for name in wanted if name not in known]:
                has = ", ".join(known) or "none"
                raise ValueError(f"{self.name} has no {kind} {unknown[0]!r}: it has {has}.")
        return {"categories": list(categories), "protocol": protocol}


@functools.cache
def load(name: str, python: str = "") -> Family:
    """Loads the family `name`: coevolve_jax.envs.<name>, or the module at a dotted path.

    python: the interpreter that has its packages; "" is this one. The family's functions run in a process of
    their own where it is named, or where the family says APART. Raises ValueError, in one sentence, for an
    unknown name, a missing function, and a module that needs packages which this interpreter lacks. So do the
    functions where they need such packages.
    """
    family = module(name)
    heavy: dict[str, Callable] = {
        k: _with_its_packages(getattr(family, k), name)
        for k in ("scenarios", "tasks", "tools", "actions")
        if hasattr(family, k)
    }
    heavy["versions"] = functools.partial(versions, family)
    if python or getattr(family, "APART", base.APART):
        from coevolve_jax.envs.remote import Remote  # here: it starts processes, and workers import this file

        heavy = Remote(name, python).functions()
    light = {k: function(family, k) for k in ("report", "action_pattern", "wording", "task_key", "features")}
    actions = heavy.pop("actions", None)
    if actions is not None and hasattr(family, "actions"):
        light["action_pattern"] = functools.partial(
            _listed, light["action_pattern"], functools.cache(actions)
        )
    told = [getattr(family, k, getattr(base, k)) for k in ("CATEGORIES", "PROTOCOLS")]
    return Family(name, python, **heavy, **light, categories=told[0], protocols=told[1])


def module(name: str) -> ModuleType:
    """Imports the module of a family. Raises ValueError like `load`."""
    remedy = "install it, or import it inside the functions and name the interpreter that has it in "
    return names.module("envs", name, "environment.name", NEEDED, remedy + "config.environment.python")


def _listed(pattern: Callable[[Call], str], actions: Callable[[], Sequence[str]], call: Call) -> str:
    """Returns the action of a call, "" where the family does not list it."""
    return found if (found := pattern(call)) in actions() else ""


def _with_its_packages(function: Callable, name: str) -> Callable:
    """Returns a family's function, whose ValueError says how to install a package that is missing."""

    @functools.wraps(function)
    def call(*args: Any, **settings: Any) -> Any:
        try:
            return function(*args, **settings)
        except ModuleNotFoundError as error:
            ours = (shipped.ROOT / "requirements" / f"{name}.txt").is_file()
            remedy = f"{shipped.command('setup')} {name} installs it" if ours else "install it"
            if name in shipped.APART:
                remedy += f" for .{name}/bin/python, the interpreter to name in config.environment.python"
            raise ValueError(f"The environment {name!r} lacks a package ({error}): {remedy}.") from error

    return call


def function(family: ModuleType, name: str) -> Callable:
    """Returns a function of the family, or its default in envs/base.py."""
    return getattr(family, name, None) or getattr(base, name)


def versions(family: ModuleType) -> dict[str, str]:
    """Returns the versions of the family's PACKAGES, as far as this interpreter has them."""
    found = {}
    for name in getattr(family, "PACKAGES", base.PACKAGES):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def ask_here(family: ModuleType, kind: str, *args: Any) -> Any:
    """Calls one of a family's functions in a worker process, with JSON arguments and a JSON answer."""
    if kind in ("scenarios", "tasks"):
        return [task.to_json() for task in getattr(family, kind)(*args)]
    if kind in ("tools", "task_key", "features"):
        return function(family, kind)(Task.from_json(args[0]))
    if kind == "action_pattern":
        return function(family, kind)(Call.from_json(args[0]))
    if kind == "actions":
        return family.actions()
    if kind == "versions":
        return versions(family)
    if kind == "imported":
        return [name for name in args if name in sys.modules]
    raise ValueError(f"A worker cannot be asked for {kind!r}.")
