"""An environment family by its name: a module, and its heavy functions asked under its own interpreter."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pathlib
import pkgutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from coevolve_jax.envs import base
from coevolve_jax.types import Call, Task

NEEDED = ("scenarios", "tasks", "tools", "make")  # the rest has defaults in base.py


@dataclasses.dataclass(frozen=True)
class Family:
    """What a run asks of its environment family, wherever the family's packages are. `make` and `judge` belong to
    the workers (worker_pool.ProcessPool).

    scenarios(split, settings, apart_from=""): bare scenarios; apart_from: a split of which no initial state may
    come back. settings: the section config.environment.
    tasks(split, settings): the benchmark's own tasks. tools(task): function schemas, which depend on
    task.environment and task.scenario only; do not change them.
    report(tasks, trajectories, samples, judge): the official score; judge: ProcessPool.judge.
    action_pattern, task_key, features: see envs/base.py.
    """

    name: str
    python: str
    scenarios: Callable[..., list[Task]]
    tasks: Callable[[str, Mapping[str, Any]], list[Task]]
    tools: Callable[[Task], list[dict]]
    report: Callable[..., dict]
    action_pattern: Callable[[Call], str]
    task_key: Callable[[Task], str]
    features: Callable[[Task], Counter[str]]


@functools.cache
def load(name: str, python: str = "") -> Family:
    """The family `name`: coevolve_jax.envs.<name>, or the module at a dotted path.

    python: the interpreter that has its packages; "" is this one. ValueError, in one sentence, for an unknown name,
    a family that lacks a function, and one whose module needs packages that this interpreter does not have.
    """
    family = module(name)
    heavy = {k: getattr(family, k) for k in ("scenarios", "tasks", "tools")}
    if python:
        from coevolve_jax.envs.remote import Remote  # here: it starts processes, and workers import this file

        heavy = Remote(name, python).functions()
    light = {k: function(family, k) for k in ("report", "action_pattern", "task_key", "features")}
    return Family(name, python, **heavy, **light)


def module_name(name: str) -> str:
    return name if "." in name else f"coevolve_jax.envs.{name}"


def module(name: str) -> ModuleType:
    """The module of a family. ValueError as `load`."""
    path = module_name(name)
    try:
        found = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise ValueError(
                f"The environment {name!r} imports {error.name}, which {sys.executable} does not have: install it, or "
                "import it inside the functions and name the interpreter that has it in config.environment.python."
            ) from None
        here = importlib.import_module("coevolve_jax.envs").__path__
        known = ", ".join(m.name for m in pkgutil.iter_modules(here) if m.ispkg)
        raise ValueError(
            f"config.environment.name is {name!r}, but there is no module {error.name}: use {known}, or the dotted "
            "path of a module of your own that Python can import."
        ) from None
    missing = [k for k in NEEDED if not callable(getattr(found, k, None))]
    if missing:
        raise ValueError(
            f"The environment {name!r} has no function {missing[0]}: docs/add_environment.md lists them."
        )
    return found


def function(family: ModuleType, name: str) -> Callable:
    """A function of the family, or the default of envs/base.py."""
    return getattr(family, name, None) or getattr(base, name)


def root(path: str) -> pathlib.Path:
    """The folder or the file of the top-level package that holds a module which can be imported."""
    top = importlib.import_module(path.partition(".")[0])
    return pathlib.Path(top.__file__ if not hasattr(top, "__path__") else list(top.__path__)[0]).resolve()


def ask_here(family: ModuleType, kind: str, *args: Any) -> Any:
    """One of a family's functions with JSON arguments and a JSON answer, in the process of a worker."""
    if kind in ("scenarios", "tasks"):
        return [task.to_json() for task in getattr(family, kind)(*args)]
    if kind in ("tools", "task_key", "features"):
        return function(family, kind)(Task.from_json(args[0]))
    if kind == "action_pattern":
        return function(family, kind)(Call.from_json(args[0]))
    if kind == "imported":
        return [name for name in args if name in sys.modules]
    raise ValueError(f"A worker cannot be asked for {kind!r}.")
