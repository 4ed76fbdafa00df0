"""Checks the calls that models write to environments: plain JSON values, a known tool, its parameters."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from coevolve_jax.types import Call

MAX_DEPTH = 32  # levels of nesting in a call's arguments
MAX_BYTES = 1 << 20  # length of a call's arguments as JSON text
NOT_PLAIN = "The arguments are no acceptable JSON object: "


class Signature(Protocol):
    """The names of a tool's parameters and of its required ones. more: whether it takes any others too."""

    @property
    def parameters(self) -> Collection[str]: ...

    @property
    def required(self) -> Collection[str]: ...

    @property
    def more(self) -> bool: ...


@dataclasses.dataclass(frozen=True)
class _Documented:
    parameters: Collection[str]
    required: Collection[str]
    more: bool


def signatures(docs: Sequence[Mapping]) -> dict[str, Signature]:
    """Signatures by tool name, from the function schemas that a family's `tools` returns."""
    found = {doc["function"]["name"]: doc["function"]["parameters"] for doc in docs}
    return {
        name: _Documented(
            tuple(p.get("properties", ())),
            tuple(p.get("required", ())),
            p.get("additionalProperties", False) is not False,
        )
        for name, p in found.items()
    }


def defaults(docs: Sequence[Mapping]) -> dict[str, dict[str, Any]]:
    """Values that tools take for parameters left out, by tool and parameter, from the schemas of `tools`."""
    found: dict[str, dict[str, Any]] = {}
    for function in (doc.get("function", doc) for doc in docs):  # a benchmark may write documents of its own
        takes = function.get("parameters", {})
        properties, required = takes.get("properties", {}), takes.get("required", ())
        said = {k: p for k, p in properties.items() if isinstance(p, Mapping) and "default" in p}
        found[function["name"]] = {k: p["default"] for k, p in said.items() if k not in required}
    return found


def bind(call: Call, allowed: Mapping[str, Signature]) -> dict:
    """Returns a call's arguments as plain JSON values. ValueError says in a sentence what is wrong."""
    name = call.name if isinstance(call.name, str) else ""
    tool = allowed.get(name)
    if tool is None:
        raise ValueError(f"There is no tool named {short(name)}.")
    arguments = plain(call.arguments)
    for parameter in arguments:
        if parameter not in tool.parameters and not tool.more:
            raise ValueError(f"{name} has no parameter {short(parameter)}.")
    for parameter in tool.required:
        if parameter not in arguments:
            raise ValueError(f"{name} needs the parameter {parameter!r}.")
    return arguments


def plain(arguments: Any) -> dict:
    """Copies the arguments as plain JSON values.

    Raises ValueError, with a text that starts with NOT_PLAIN, for anything else. Examples: no object, NaN,
    integers of thousands of digits, more than MAX_DEPTH levels, more than MAX_BYTES.
    """
    if not isinstance(arguments, Mapping):
        what = arguments[:200] if isinstance(arguments, str) else f"a {type(arguments).__name__}"
        raise ValueError(f"{NOT_PLAIN}{what}")
    try:
        text = json.dumps(dict(arguments), allow_nan=False)
        if len(text) > MAX_BYTES:
            raise ValueError(f"{len(text)} bytes long, at most {MAX_BYTES} are allowed")
        copied = json.loads(text)
    except (TypeError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{NOT_PLAIN}{str(error)[:200]}") from None
    level = [copied]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for value in level
            if isinstance(value, (list, dict))
            for child in (value.values() if isinstance(value, dict) else value)
        ]
    if level:
        raise ValueError(f"{NOT_PLAIN}more than {MAX_DEPTH} levels deep")
    return copied


def to_json(call: Call) -> dict:
    """Encodes a call for a worker.

    Arguments that JSON cannot carry are replaced by a text that says why; `bind` refuses it in the worker.
    """
    try:
        arguments = plain(call.arguments)
    except ValueError as error:
        arguments = str(error).removeprefix(NOT_PLAIN)
    return {"name": call.name[:200] if isinstance(call.name, str) else "", "arguments": arguments}


def short(text: str) -> str:
    return repr(text[:60])
