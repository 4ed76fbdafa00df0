"""The state of a user's object as plain JSON values, so that two worlds can be compared.

Workers import this file: it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import enum
import fractions
import math
import pathlib
import random
import re
import sys
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

from coevolve_jax.envs.base import rounded

MAX_DEPTH = 64  # levels; deeper ones contain themselves, or nearly
MAX_BITS = 10_000  # of an integer that is written as a number: Python writes no more than 4300 digits
_DECIMAL = decimal.Context(prec=60, traps=[])
# Generators of random numbers are no state: one draw more or less is no difference that a user sees.
GENERATORS = (random.Random,)
_AS_TEXT = (
    datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal, fractions.Fraction,
    pathlib.PurePath, uuid.UUID, complex, range, slice, re.Pattern,
)  # fmt: skip
# A defaultdict of these begins an entry with their empty value, also where a tool only looks it up.
_EMPTY = (
    bool, int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset, deque, Counter, OrderedDict,
)  # fmt: skip


class NoState(ValueError):
    """Raised for an object that has no JSON form. The message names it."""


def is_generator(value: Any) -> bool:
    """Tells whether a value draws random numbers: of the standard library, or of NumPy."""
    return isinstance(value, GENERATORS) or type(value).__module__.startswith("numpy.random")


def is_code(value: Any) -> bool:
    """Tells whether a value that stands by itself is a part of the program: a function, module or pattern."""
    apart = not is_of_users(type(value))
    return isinstance(value, (type, types.ModuleType, re.Pattern)) or (callable(value) and apart)


def is_of_users(kind: type) -> bool:
    """Tells whether a class comes neither with Python nor with an installed package."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or "-packages"
    return kind.__module__.partition(".")[0] not in sys.stdlib_module_names and "-packages" not in file


def plain(value: Any, where: str, depth: int = 0) -> Any:
    """Returns a value as JSON values that are equal for equal values.

    Sets and mappings have no order. Floats are rounded, and a Decimal's zeros at the end do not count. An
    entry of a defaultdict that is as empty as a new one does not count. A member of an Enum is its value, as
    in calls, or its name where JSON has no such value. An object of a user's class is written by its
    attributes, with its class's name. Modules, classes, and functions of a file's top level are their names.
    where: the value's name, for NoState, which is raised for what has no such form: open files, locks,
    functions within functions, connections, and values that contain themselves.
    """
    if isinstance(value, enum.Enum):
        inside = value.value
        return plain(inside, where, depth) if isinstance(inside, (str, int, float)) else value.name
    if value is None or isinstance(value, (bool, str)):
        return str(value) if isinstance(value, str) else value
    if isinstance(value, int):
        return value if value.bit_length() <= MAX_BITS else hex(value)
    if isinstance(value, float):
        return rounded(value) if math.isfinite(value) else repr(float(value))
    if (name := _name(value)) is not None:
        return name
    if depth == MAX_DEPTH:
        raise NoState(f"{where[:200]} is more than {MAX_DEPTH} levels deep, or contains itself")
    content = _content(value, where, depth + 1)
    if content is None:
        found = sorted(_attributes(value, where).items())
        inside = {k: plain(v, f"{where}.{k}", depth + 1) for k, v in found}
        return {"(class)": type(value).__name__, **inside}
    beside = {} if _is_foreign(value) else writable(getattr(value, "__dict__", {}), where, depth + 1)
    return {"(class)": type(value).__name__, "(value)": content, **beside} if beside else content


def writable(data: Mapping[str, Any], where: str = "", depth: int = 0) -> dict[str, Any]:
    """Returns the values that JSON can write, as JSON values: no functions, no generators, no open files."""
    found = {}
    for name, value in sorted(data.items()):
        with contextlib.suppress(Exception):  # NoState, or what an object raises that is looked at
            if not (is_generator(value) or is_code(value)):
                found[name] = plain(value, f"{where}.{name}".lstrip("."), depth)
    return found


def _content(value: Any, where: str, below: int) -> Any:
    """Returns what a collection holds, or the text of a value that has one; None for other objects."""
    if isinstance(value, defaultdict) and value.default_factory in _EMPTY:
        value = {k: v for k, v in value.items() if type(v) is not value.default_factory or v}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {str(k): plain(v, f"{where}[{k!r}]", below) for k, v in sorted(value.items())}
        key = f"a key of {where}"
        pairs = [[plain(k, key, below), plain(v, f"{where}[{k!r}]", below)] for k, v in value.items()]
        return sorted(pairs, key=repr)
    if isinstance(value, (list, tuple, deque)):
        return [plain(each, f"{where}[{i}]", below) for i, each in enumerate(value)]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(each, f"an element of {where}", below) for each in value), key=repr)
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    if isinstance(value, decimal.Decimal) and value.is_finite():
        short = _DECIMAL.normalize(value)
        return f"{short:f}" if abs(short.adjusted()) < _DECIMAL.prec else str(short)
    if isinstance(value, _AS_TEXT):
        return str(value)
    return type(value).__name__ if is_generator(value) else None


def _name(value: Any) -> str | None:
    """Returns the name of a module, or of a class or function that no function makes; else None."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    built_in = isinstance(value, types.BuiltinFunctionType) and isinstance(value.__self__, types.ModuleType)
    if (built_in or isinstance(value, (type, types.FunctionType))) and "<locals>" not in value.__qualname__:
        return f"{value.__module__}.{value.__qualname__}"
    return None


def _is_foreign(value: Any) -> bool:
    """Tells whether a value's class comes with Python."""
    return type(value).__module__.partition(".")[0] in sys.stdlib_module_names


def _attributes(value: Any, where: str) -> dict[str, Any]:
    """Returns the attributes of an object of a class that a user defines. Raises NoState for others."""
    kind = type(value)
    slotted = any(getattr(each, "__slots__", ()) for each in kind.__mro__)
    if isinstance(value, types.SimpleNamespace):
        return vars(value)
    if isinstance(value, type) or _is_foreign(value) or not (hasattr(value, "__dict__") or slotted):
        raise NoState(f"{where[:200]} is a {kind.__module__}.{kind.__name__}".replace("builtins.", ""))
    return attributes_of(value)


def attributes_of(value: Any) -> dict[str, Any]:
    """Returns the attributes of an object, also those in slots."""
    named = {}
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            private = slot.startswith("__") and not slot.endswith("__")
            name = f"_{kind.__name__.lstrip('_')}{slot}" if private else slot
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                named[name] = getattr(value, name)
    return {**named, **getattr(value, "__dict__", {})}
