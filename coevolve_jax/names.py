"""Resolves names in the config to modules: one of ours in its package, or any module by its dotted path.

It needs the standard library only.
"""

from __future__ import annotations

import importlib
import pathlib
import pkgutil
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def path(package: str, name: str) -> str:
    """The dotted path that `name` stands for: coevolve_jax.PACKAGE.NAME, or `name` itself if it has a dot."""
    return name if "." in name else f"coevolve_jax.{package}.{name}"


def module(
    package: str, name: str, key: str, needs: Sequence[str] = (), remedy: str = "install it"
) -> ModuleType:
    """The module that config.<key> names.

    Args:
      package: the package of our own modules: "strategies", "explorers", "envs", "records.trackers" or
        "harness.proposers".
      needs: functions that it must define.
      remedy: for the error if it imports a package that this interpreter lacks.

    Raises:
      ValueError: there is no such module, it cannot be imported here, or it lacks a function. In one
        sentence.
    """
    wanted = path(package, name)
    try:
        found = importlib.import_module(wanted)
    except (ModuleNotFoundError, TypeError, ValueError) as error:
        lacking = getattr(error, "name", None)
        if lacking and not f"{wanted}.".startswith(f"{lacking}."):
            raise ValueError(
                f"config.{key} is {name!r}, which imports {lacking}, "
                f"and {sys.executable} does not have that: {remedy}."
            ) from None
        ours = importlib.import_module(f"coevolve_jax.{package}")
        shared = getattr(ours, "SHARED", ("base",))
        files = {m.name: m.ispkg for m in pkgutil.iter_modules(ours.__path__) if m.name not in shared}
        # In a package whose implementations are folders, the files beside these are shared code.
        known = sorted(n for n, folder in files.items() if folder or not any(files.values()))
        raise ValueError(
            f"config.{key} is {name!r}: it must be one of {', '.join(known)}, "
            "or the dotted path of a module that Python can import."
        ) from None
    for function in needs:
        if not callable(getattr(found, function, None)):
            raise ValueError(
                f"config.{key} is {name!r}, and {found.__name__} must define the function {function}."
            )
    return found


def function(name: str, key: str) -> Callable:
    """The function at the dotted path MODULE.FUNCTION that config.<key> names.

    Raises ValueError, in one sentence, if the module cannot be imported here or has no such function.
    """
    wanted, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(wanted), attribute, None)
    except (ImportError, TypeError, ValueError) as error:
        raise ValueError(
            f"config.{key} is {name!r}, which cannot be imported ({error}): "
            "it must be the dotted path of a function."
        ) from None
    if not callable(found):
        raise ValueError(f"config.{key} is {name!r}, and {wanted} defines no function {attribute}.")
    return found


def root(dotted: str) -> pathlib.Path:
    """The folder (or file) of the top-level package that contains the module `dotted`."""
    top = importlib.import_module(dotted.partition(".")[0])
    return pathlib.Path(list(top.__path__)[0] if hasattr(top, "__path__") else str(top.__file__)).resolve()
