"""Function schemas of Python functions, from their type hints and Google docstrings.

They equal `transformers.utils.get_json_schema`, as far as that gives one. Two things are accepted besides: a
dataclass as an argument, and an argument that the docstring does not describe. Workers import this file: it
needs the standard library only.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
PLAIN: dict[Any, dict] = {
    **{kind: {"type": name} for kind, name in SCALARS.items()},
    list: {"type": "array"},
    tuple: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
SUPPORTED = (
    "str, int, float, bool, list, tuple, dict, Optional, Union, Literal, an Enum or a dataclass of these"
)
# These find what transformers finds, wherever it finds a schema.
_ARGUMENTS = re.compile(r"(?:^|\n)\s*Args:[ \t]*\n(.*?)(?=\s*(?:Returns:|Raises:|\Z))", re.DOTALL)
_SUMMARY = re.compile(r"(.*?)(?=\s*(?:Args:|Returns:|Raises:|\Z))", re.DOTALL)
_RETURNS = re.compile(r"\n\s*Returns:\n\s*(.*?)(?=\s*(?:Raises:|\Z))", re.DOTALL)
_CHOICES = re.compile(r"\s*\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


class Unfit(ValueError):
    """Raised for a function that cannot be a tool. The message names the argument and the remedy."""


def schema(function: Callable) -> dict:
    """Returns the schema of a function or a bound method.

    Raises Unfit where it has no docstring, where it yields, where an argument has no type hint or one that
    JSON cannot write, and where it takes *args, **kwargs or an argument by position only.
    """
    inside = inspect.unwrap(function)
    if inspect.isgeneratorfunction(inside) or inspect.isasyncgenfunction(inside):
        raise Unfit("yields its answer, which an agent reads as a whole: return a list")
    text = inspect.getdoc(function)
    if not text:
        raise Unfit("has no docstring: say in one what it does, or begin its name with _ if it is no tool")
    summary, described, returned = read_docstring(text.strip())
    parameters, hints = arguments_of(function), hints_of(function)
    properties = {name: _property(name, hints[name], described.get(name)) for name in parameters}
    required = [name for name, p in parameters.items() if p.default is p.empty]
    found = {
        "name": function.__name__,
        "description": summary,
        "parameters": {
            "type": "object",
            "properties": properties,
            **({"required": required} if required else {}),
        },
    }
    answer = _returned(hints, returned)
    return {"type": "function", "function": {**found, **({"return": answer} if answer is not None else {})}}


def arguments_of(function: Callable) -> dict[str, inspect.Parameter]:
    """Returns the arguments by name, without `self`. Raises Unfit for one that JSON cannot pass."""
    found = dict(inspect.signature(function).parameters)
    first = next(iter(found), "")
    inside = function.__qualname__.rpartition(".")[0] if hasattr(function, "__qualname__") else ""
    method = bool(inside) and not inside.endswith("<locals>")
    if first in ("self", "cls") and (method or found[first].annotation is inspect.Parameter.empty):
        del found[first]
    for name, parameter in found.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise Unfit(f"takes *{name}: name each argument instead")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise Unfit(f"takes {name} by position only: a call names its arguments")
        if parameter.annotation is parameter.empty:
            raise Unfit(f"has no type hint for {name}: write `{name}: str`, or what it is")
    return found


def hints_of(function: Callable) -> dict[str, Any]:
    """Returns the type hints by argument, with "return". Raises Unfit where they cannot be read."""
    try:
        return typing.get_type_hints(function)
    except Exception as error:
        raise Unfit(f"has type hints that cannot be read ({error}): import what they name") from None


def read_docstring(text: str) -> tuple[str, dict[str, str], str | None]:
    """Reads a Google docstring: its description, the description of each argument, and of the answer."""
    summary = _SUMMARY.match(text)
    block = _ARGUMENTS.search(text)
    returned = _RETURNS.search(text)
    lines = [line for line in block[1].split("\n") if line.strip()] if block else []
    described: dict[str, str] = {}
    depth = name = None
    for line in lines:
        indent = len(line) - len(line.lstrip())
        begins = re.match(r"[ \t]*(\w+)(?:\s*\([^()]*\))?:\s*(.*)", line)
        if begins and (depth is None or indent <= depth):
            depth, name = indent, begins[1]
            described[name] = begins[2].strip()
        elif name is not None:
            described[name] = f"{described[name]} {line.strip()}".strip()
    return summary[1].strip() if summary else "", described, returned[1].strip() if returned else None


def _property(name: str, hint: Any, described: str | None) -> dict:
    try:
        found = of_hint(hint)
    except Unfit as why:
        raise Unfit(f"has the argument {name}: {why}") from None
    except RecursionError:
        what = f"its type {_said(hint)} contains itself: let it hold names or numbers instead"
        raise Unfit(f"has the argument {name}: {what}") from None
    if described is None:
        return found
    choices = _CHOICES.search(described)
    if choices:
        try:
            values = json.loads(choices[1])
        except ValueError:
            raise Unfit(f"describes {name} with (choices: {choices[1]}), which is no JSON list") from None
        found = {**found, "enum": [v.strip() if isinstance(v, str) else v for v in values]}
        described = described[: choices.start()].strip()
    return {**found, "description": described}


def _returned(hints: Mapping[str, Any], described: str | None) -> dict | None:
    if "return" not in hints:
        return None
    try:
        found = of_hint(hints["return"])
    except (Unfit, RecursionError):
        return None
    return {**found, **({"description": described} if described is not None else {})}


def of_hint(hint: Any) -> dict:
    """Returns the JSON schema of a type hint. Raises Unfit where there is none."""
    while isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    origin, args = get_origin(hint), get_args(hint)
    if typing.is_typeddict(hint):
        raise Unfit(f"its type {_said(hint)} is a TypedDict: make it a dataclass")
    if origin in (typing.Annotated, typing.Required, typing.NotRequired):
        return of_hint(args[0])
    if not args and origin in (list, dict):  # typing.List without its elements
        return dict(PLAIN[origin])
    if origin is Literal:
        return _enumerated(list(args), "the Literal")
    if origin in (Union, types.UnionType):
        return _union(args)
    if origin is list:
        return {"type": "array", "items": of_hint(args[0])}
    if origin is tuple:
        if ... in args or len(args) == 1:
            raise Unfit(f"{_said(hint)} is a tuple of no fixed length above one: use list")
        return {"type": "array", "prefixItems": [of_hint(each) for each in args]}
    if origin is dict:
        if _is_made(args[0]):
            raise Unfit(f"its type has keys of {_said(args[0])}, and JSON's are text: use dict[str, ...]")
        return {"type": "object", "additionalProperties": of_hint(args[1])}
    if isinstance(hint, type) and origin is None:
        if issubclass(hint, enum.Enum):
            return _enumerated([member.value for member in hint], f"the Enum {hint.__name__}")
        if dataclasses.is_dataclass(hint):
            return _object(hint)
    if isinstance(hint, typing.Hashable) and hint in PLAIN:
        return dict(PLAIN[hint])
    raise Unfit(f"its type {_said(hint)} cannot be written as JSON: use {SUPPORTED}")


def _enumerated(values: list, what: str) -> dict:
    if not values or any(type(value) not in SCALARS for value in values):
        raise Unfit(f"{what} has values that JSON cannot write as text, number, true, false or null")
    names = list(dict.fromkeys(SCALARS[type(value)] for value in values))
    return {"type": names[0] if len(names) == 1 else names, "enum": values}


def _union(args: tuple) -> dict:
    able = [each for each in args if each is not type(None)]
    parts = [of_hint(each) for each in able]
    if len(parts) > 1 and (made := next(filter(_holds_made, able), None)):
        raise Unfit(
            f"a JSON value does not say whether it is {_said(made)} or another type of the union: give each "
            "an argument of its own"
        )
    if len(parts) == 1:
        found = parts[0]
    elif all(part.keys() == {"type"} and isinstance(part["type"], str) for part in parts):
        names = sorted({part["type"] for part in parts})
        found = {"type": names[0] if len(names) == 1 else names}
    else:
        found = {"anyOf": parts}
    return {**found, "nullable": True} if type(None) in args else found


def _object(kind: type) -> dict:
    hints = typing.get_type_hints(kind)
    fields = [field for field in dataclasses.fields(kind) if field.init]
    absent = dataclasses.MISSING
    required = [f.name for f in fields if f.default is absent and f.default_factory is absent]
    found: dict[str, Any] = {"type": "object", "properties": {f.name: of_hint(hints[f.name]) for f in fields}}
    return {**found, **({"required": required} if required else {})}


def convert(hint: Any, value: Any) -> Any:
    """Returns a JSON value as its type hint promises it: members of an Enum, dataclasses, tuples.

    5 and 5.0 are one number in JSON: it becomes a float or an int as the hint says. Other values pass as they
    are, also those of a wrong type, as TRL passes them. Raises ValueError for a value that is no member, or
    no fields of the dataclass.
    """
    while isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    if hint is float and type(value) is int and abs(value) < 2**53:
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        able = [each for each in args if each is not type(None)]
        return convert(able[0], value) if len(able) == 1 and value is not None else value
    if args and origin is list and isinstance(value, list):
        return [convert(args[0], each) for each in value]
    if args and origin is dict and isinstance(value, dict):
        return {key: convert(args[1], each) for key, each in value.items()}
    if (origin is tuple or hint is tuple) and isinstance(value, list):
        kinds = args if len(args) == len(value) else (Any,) * len(value)
        return tuple(convert(kind, each) for kind, each in zip(kinds, value))
    if isinstance(hint, type) and origin is None:
        if issubclass(hint, enum.Enum):
            return hint(value)
        if dataclasses.is_dataclass(hint) and isinstance(value, dict):
            hints = typing.get_type_hints(hint)
            if unknown := [key for key in value if key not in hints]:
                raise ValueError(f"{hint.__name__} has no field {unknown[0][:60]!r}.")
            return hint(**{key: convert(hints[key], each) for key, each in value.items()})
    return value


def _is_made(hint: Any) -> bool:
    """Tells whether `convert` makes an object of the user's from JSON."""
    return isinstance(hint, type) and (issubclass(hint, enum.Enum) or dataclasses.is_dataclass(hint))


def _holds_made(hint: Any) -> bool:
    """Tells whether `convert` makes such an object of a value or of a part of it."""
    return _is_made(hint) or any(map(_holds_made, get_args(hint)))


def _said(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")
