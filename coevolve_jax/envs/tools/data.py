"""The data beside a world: what a user's class and file hold, and the modules in the file's folder.

Workers import this file: it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import sys
import types
from collections import deque
from collections.abc import Mapping, MutableSet
from typing import Any

from coevolve_jax.envs.tools.state import is_code, is_generator, is_of_users, plain, writable

# An attribute of the class, or a name in the file, that tells about the worlds, is checked, and is no state.
ABOUT = "scenarios"
# Another one, which is state once it has changed: it may be a user's store.
VALUES = "values"
# Beside a class, these are state whether they have changed or not; other data counts once it has.
MUTABLE = (Mapping, list, set, deque, bytearray, types.SimpleNamespace)
# Classes that hold data which JSON cannot write and whose items cannot be set.
STORES = (
    "queue.Queue", "_queue.SimpleQueue", "asyncio.queues.Queue", "multiprocessing.queues.Queue",
    "multiprocessing.queues.SimpleQueue", "sqlite3.Connection", "_io.StringIO", "_io.BytesIO",
    "_thread._local", "_contextvars.ContextVar",
)  # fmt: skip
# The data of modules beside the user's file, by the module's name, when this process first saw them.
_FIRST_SEEN: dict[str, dict[str, Any]] = {}


def first_seen(module: types.ModuleType, kind: type | None) -> dict[str, Any]:
    """Returns the data of a file that was just executed, as JSON values by name. kind: as for `shared_data`.

    And notes the data of the modules beside it that this process sees for the first time.
    """
    _imported(module)
    return writable({**_beside(module, kind), **_held(module, kind)})


def shared_data(module: types.ModuleType, kind: type | None, first: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the data that the class or the file holds and may change, as JSON values by name.

    Of a class's file, what is neither in `MUTABLE` nor of a class in the file counts once it has changed:
    constants are no state. So do attributes of the file's other classes and of its functions, what functions
    within functions keep, and all data of modules beside the file. A logger, a pattern or a lock that stands
    by itself is left out. Raises NoState for other data that JSON cannot write.

    kind: the class; None for a file of functions. first: of `first_seen`.
    """
    held, beside = _held(module, kind), _beside(module, kind)
    imported, seen = _imported(module)
    names, first = {**imported, **beside, **held}, {**seen, **first}
    own, absent = module.__name__, object()
    always = lambda value: not kind or isinstance(value, MUTABLE) or type(value).__module__ == own
    changed = lambda name, written: first.get(name, absent) != written
    found = writable(names)
    for name in sorted(names.keys() - found.keys()):
        if _is_data(names[name], own):
            found[name] = plain(names[name], name)
    counts = lambda k: k in held and k.rpartition(".")[2] != VALUES and always(held[k])
    return {k: v for k, v in sorted(found.items()) if counts(k) or changed(k, v)}


def _imported(module: types.ModuleType) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the data of the imported modules that lie in the file's folder or below it, by name.

    And, as JSON values, what they were when this process first saw them: worlds share these modules.
    """
    path = module.__file__ or ""
    up = module.__name__.count(".") + (os.path.basename(path) == "__init__.py")
    places = _places(os.path.dirname(path), up)
    found: dict[str, Any] = {}
    first: dict[str, Any] = {}
    for name in _below(tuple(sys.modules), places):
        each = sys.modules.get(name)
        if isinstance(each, types.ModuleType) and _is_beside(each, places):
            data = {**_beside(each, None), **vars(each)}
            own = {f"{name}.{k}": value for k, value in data.items() if not k.startswith("__")}
            found |= own
            if name not in _FIRST_SEEN:
                _FIRST_SEEN[name] = writable(own)
            first |= _FIRST_SEEN[name]
    return found, first


@functools.lru_cache(maxsize=8)
def _places(folder: str, up: int) -> tuple[str, ...]:
    """Returns the folder that many levels up, as it is written and without links."""
    for _ in range(up):
        folder = os.path.dirname(folder)
    return tuple(os.path.join(each, "") for each in (folder, os.path.realpath(folder)))


@functools.lru_cache(maxsize=8)
def _below(names: tuple[str, ...], places: tuple[str, ...]) -> list[str]:
    """Returns the modules whose files lie below one of these folders. names: all that are imported now.

    They are thousands, and each reading of a state asks for the few of a user.
    """
    files = {name: getattr(sys.modules.get(name), "__dict__", {}).get("__file__") for name in names}
    return [name for name, file in files.items() if str(file).startswith(places)]


def _is_beside(module: types.ModuleType, places: tuple[str, ...]) -> bool:
    """Tells whether an imported module is a user's and lies below one of these folders."""
    about = vars(module)
    path, top = about.get("__file__") or "", str(about.get("__name__")).partition(".")[0]
    if not path.startswith(places) or "-packages" in path:
        return False
    imported = getattr(about.get("__spec__"), "loader", None) is not None  # not executed here for a world
    apart = top in sys.stdlib_module_names or top in ("__main__", __name__.partition(".")[0])
    return imported and not apart


def _is_data(value: Any, own: str) -> bool:
    """Tells whether calls may change a value that stands by itself. own: the file's module."""
    kind = type(value)
    if any(f"{each.__module__}.{each.__qualname__}" in STORES for each in kind.__mro__):
        return True
    if is_code(value) or is_generator(value):
        return False
    settable = isinstance(value, (*MUTABLE, MutableSet)) or hasattr(kind, "__setitem__")  # such as an array
    return settable or kind.__module__ == own or is_of_users(kind)


def _held(module: types.ModuleType, kind: type | None) -> dict[str, Any]:
    """Returns what a file and its class hold by name, without `scenarios`."""
    names: dict[str, Any] = dict(vars(module))
    for each in reversed(kind.__mro__[:-1] if kind else ()):
        names.update({f"{each.__name__}.{k}": v for k, v in vars(each).items()})
    ends = {name: name.rpartition(".")[2] for name in names}
    return {k: v for k, v in names.items() if not ends[k].startswith("__") and ends[k] != ABOUT}


def _beside(module: types.ModuleType, kind: type | None) -> dict[str, Any]:
    """Returns the attributes, by name, of a file's functions and of its classes other than `kind`.

    And what its functions keep of the functions around them. Of two of one name, the second has a number.
    """
    found: dict[str, Any] = {}
    known = set(kind.__mro__ if kind else ())
    left, seen = [*vars(module).values()], set[int]()
    while left:
        each = _function(left.pop())
        of_the_file = isinstance(each, (type, types.FunctionType)) and each.__module__ == module.__name__
        if not of_the_file or isinstance(each, enum.EnumMeta) or id(each) in seen:
            continue
        seen.add(id(each))
        own = {k: v for k, v in vars(each).items() if not k.startswith("__")}
        kept = _kept(each) if isinstance(each, types.FunctionType) else {}
        left += [*own.values(), *kept.values()]
        for name, value in [*(own.items() if each not in known else ()), *kept.items()]:
            name, number = f"{each.__qualname__}.{name}", 1
            while (full := name if number == 1 else f"{name} ({number})") in found:
                number += 1
            found[full] = value
    return found


def _function(value: Any) -> Any:
    """Returns the function of a class method, a static method or a property, else the value."""
    if isinstance(value, (classmethod, staticmethod)):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def _kept(function: types.FunctionType) -> dict[str, Any]:
    """Returns the variables, by name, that a function keeps of the functions around it."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # not set yet
            found[name] = cell.cell_contents
    return found
