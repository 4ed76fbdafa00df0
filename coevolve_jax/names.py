"""Resolves names in the config to modules: one of ours in its package, or any module by its dotted path.

It needs the standard library only.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pathlib
import pkgutil
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType


def path(package: str, name: str) -> str:
    """The dotted path that `name` stands for: coevolve_jax.PACKAGE.NAME, or `name` itself if it has a dot."""
    return name if "." in name else f"coevolve_jax.{package}.{name}"


def module(
    package: str,
    name: str,
    key: str,
    needs: Sequence[str] = (),
    remedy: str = "install it",
    takes: Sequence[str] = (),
) -> ModuleType:
    """The module that config.<key> names.

    Args:
      package: the package of our own modules: "strategies", "explorers", "envs", "records.trackers" or
        "harness.proposers".
      needs: functions that it must define.
      remedy: for the error if it imports a package that this interpreter lacks.
      takes: the arguments that each of these functions must take, by place.

    Raises:
      ValueError: there is no such module, it cannot be executed here, or it lacks a function that takes
        these. In one sentence.
    """
    wanted = path(package, name)
    try:
        found = importlib.import_module(wanted)
    except Exception as error:  # a user's own code may raise anything
        lacking = error.name if isinstance(error, ModuleNotFoundError) else None
        if not lacking and all(part.isidentifier() for part in wanted.split(".")):
            raise ValueError(f"config.{key} is {name!r}, which fails: {_why(error)}.") from None
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
            f"or the dotted path of a module that Python can import{_beside(wanted)}."
        ) from None
    for function in needs:
        if not callable(getattr(found, function, None)):
            raise ValueError(
                f"config.{key} is {name!r}, and {found.__name__} must define the function {function}."
            )
        try:
            if takes:
                inspect.signature(getattr(found, function)).bind(*takes)
        except TypeError:
            raise ValueError(
                f"config.{key} is {name!r}, and {found.__name__}.{function} must take ({', '.join(takes)})."
            ) from None
    return found


def _why(error: Exception) -> str:
    """Where a module stopped, and why."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}: {error.msg}"
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{at.filename}:{at.lineno}: {type(error).__name__}: {error}"


def _beside(dotted: str) -> str:
    """A remedy where the module lies in this folder, which Python does not look into."""
    file = pathlib.Path(f"{dotted.replace('.', '/')}.py")
    return f" ({file} is here: start with PYTHONPATH=.)" if file.is_file() else ""


def function(name: str, key: str) -> Callable:
    """The function at the dotted path MODULE.FUNCTION that config.<key> names.

    Raises ValueError, in one sentence, if the module cannot be imported here or has no such function.
    """
    wanted, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(wanted), attribute, None)
    except Exception as error:
        raise ValueError(
            f"config.{key} is {name!r}, which cannot be imported ({error}): "
            f"it must be the dotted path of a function{_beside(wanted)}."
        ) from None
    if not callable(found):
        raise ValueError(f"config.{key} is {name!r}, and {wanted} defines no function {attribute}.")
    return found


def location(dotted: str) -> pathlib.Path | None:
    """The file of the module `dotted`, or the folder of a package; None where Python finds neither.

    It imports the packages that contain the module, and not the module itself.
    """
    try:
        spec = importlib.util.find_spec(dotted)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    return pathlib.Path(folders[0] if folders else spec.origin or "")


def root(dotted: str) -> pathlib.Path:
    """The folder (or file) of the top-level package that contains the module `dotted`."""
    top = importlib.import_module(dotted.partition(".")[0])
    return pathlib.Path(list(top.__path__)[0] if hasattr(top, "__path__") else str(top.__file__)).resolve()
