"""The server's words as an agent gets them: tools as function schemas, results as observations."""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coevolve_jax.envs.base import canonical
from coevolve_jax.types import Observation

MAX_TOOLS = 128
MAX_SAID = 1 << 16  # characters of an answer
MAX_DESCRIPTION = 4000  # characters, of a tool or a parameter
MAX_DEPTH = 16  # levels of a schema
MAX_PARTS = 2000  # of a schema, those that references repeat included
# Many servers report errors in an ordinary answer: "Error: ...", "Database error: ...".
_ERROR = re.compile(r"(\w+ )?error\b\s*[:(]", re.IGNORECASE)


class Unfit(Exception):
    """Raised where the tools of a server cannot be offered. The message is a sentence about the server."""


def schemas(tools: Sequence[Any], chosen: Sequence[str]) -> list[dict]:
    """Returns the tools of a server as function schemas. chosen: the names of those to offer; () is all.

    Unfit where there are none or too many, where two have one name, or where one is no tool.
    """
    named: dict[str, Mapping] = {}
    for tool in tools:
        name = tool.get("name") if isinstance(tool, Mapping) else None
        if not isinstance(name, str) or not name or not isinstance(tool.get("inputSchema"), Mapping):
            raise Unfit(f"lists what is no tool with a name and an inputSchema: {str(tool)[:100]}")
        if name in named:
            raise Unfit(f"lists two tools of the name {name!r}")
        named[name] = tool
    if missing := [name for name in chosen if name not in named]:
        raise Unfit(
            f"has no tool {missing[0]!r}, which config.environment.tools names: it has "
            f"{', '.join(sorted(named)) or 'none'}"
        )
    offered = [tool for name, tool in named.items() if not chosen or name in chosen]
    if not offered:
        raise Unfit("offers no tools")
    if len(offered) > MAX_TOOLS:
        raise Unfit(
            f"offers {len(offered)} tools, and no agent reads more than {MAX_TOOLS}: name those to use in "
            "config.environment.tools"
        )
    return [_function(tool) for tool in offered]


def _function(tool: Mapping) -> dict:
    schema = tool["inputSchema"]
    parameters = simple({**schema, "type": "object"}, schema)
    parameters.setdefault("properties", {})
    described = tool.get("description")
    return {
        "type": "function",
        "function": {
            "name": tool["name"],
            "description": described[:MAX_DESCRIPTION] if isinstance(described, str) else "",
            "parameters": parameters,
        },
    }


def simple(schema: Any, root: Mapping) -> dict:
    """Returns a JSON schema in the words that models know: one type each, no references, no titles.

    Of several types the first that is not null counts. root: the schema that references point into. One that
    refers to itself, and what is too deep or too much, becomes {}.
    """
    return _simple(schema, root, (), iter(range(MAX_PARTS)))


def _simple(
    schema: Any, root: Mapping, within: tuple[str, ...], parts: Iterator[int], depth: int = 0
) -> dict:
    """Does the work of `simple`. within: the references that lead here. parts: as many as may still come."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH or next(parts, None) is None:
        return {}
    inner = lambda part, *more: _simple(part, root, (*within, *more), parts, depth + 1)
    if isinstance(reference := schema.get("$ref"), str) and (reference + "/").startswith("#/"):
        pointed = {} if reference in within else inner(_target(root, reference), reference)
        return {**pointed, **inner(_without(schema, "$ref"))}
    for several in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(several), list):
            some = [inner(option) for option in options if option != {"type": "null"}]
            return {**_first_of(some), **inner(_without(schema, several))}
    if isinstance(every := schema.get("allOf"), list):
        return functools.reduce(_both, [inner(_without(schema, "allOf")), *map(inner, every)])
    found = {}
    for key, value in schema.items():
        if key == "type" and isinstance(value, list):
            value = next((one for one in value if one != "null"), "string")
        elif key == "properties":
            some = value if isinstance(value, Mapping) else {}
            value = {str(name): inner(part) for name, part in some.items()}
        elif key == "items" or (key == "additionalProperties" and isinstance(value, Mapping)):
            value = inner(value)
        elif key == "prefixItems":
            value = [inner(part) for part in value] if isinstance(value, list) else []
        elif key == "required":
            value = [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
        elif key == "description":
            value = value[:MAX_DESCRIPTION] if isinstance(value, str) else ""
        if key not in ("title", "$schema", "$defs", "definitions"):
            found[key] = value
    return found


def _target(root: Mapping, reference: str) -> Any:
    """Returns the part of a schema that a JSON pointer leads to; None where it leads nowhere."""
    target: Any = root
    for part in reference.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list):
            target = target[int(part)] if part.isdecimal() and int(part) < len(target) else None
        else:
            target = target.get(part) if isinstance(target, Mapping) else None
    return target


def _first_of(options: Sequence[dict]) -> dict:
    """Returns one schema for several of which one must hold: the first, without what others do not require.

    Constants become a choice of them.
    """
    if not options:
        return {}
    first = options[0]
    if len(options) > 1 and all("const" in option for option in options):
        alike = all(option.get("type") == first.get("type") for option in options)
        found = _without(first if alike else _without(first, "type"), "const")
        return {**found, "enum": [option["const"] for option in options]}
    everywhere = [n for n in first.get("required", ()) if all(n in o.get("required", ()) for o in options)]
    return {**_without(first, "required"), **({"required": everywhere} if everywhere else {})}


def _both(one: Mapping, other: Mapping) -> dict:
    """Returns a schema that asks for what two ask for; where they differ, for what the first does."""
    found = {**other, **one}
    if "properties" in one and "properties" in other:
        found["properties"] = {**other["properties"], **one["properties"]}
    if "required" in one and "required" in other:
        found["required"] = list(dict.fromkeys([*one["required"], *other["required"]]))
    return found


def _without(schema: Mapping, key: str) -> dict:
    return {name: value for name, value in schema.items() if name != key}


def observation(result: Mapping[str, Any]) -> Observation:
    """Returns what an agent reads of a call's result.

    An answer is an error where the server marks it so, where it begins with "Error:" or the like, and where
    it is a JSON object with an "error".
    """
    content = result.get("content")
    parts = [_text(part) for part in content] if isinstance(content, list) else []
    if not any(parts) and isinstance(result.get("structuredContent"), Mapping):
        try:
            parts = [canonical(result["structuredContent"])]
        except RecursionError:
            return error("the answer is nested too deeply")
    said = "\n".join(parts)
    if result.get("isError") is True:
        return error(said)
    return Observation(said[:MAX_SAID], error=bool(_ERROR.match(said)) or _has_error(said))


def error(said: str) -> Observation:
    return Observation(json.dumps({"error": said[:MAX_SAID]}), error=True)


def _has_error(said: str) -> bool:
    if not said.startswith("{"):
        return False
    try:
        value = json.loads(said)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and bool(value.get("error"))


def _text(part: Any) -> str:
    """Returns a part of an answer as text. What is no text is named by its type and digest."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text":
        return str(part.get("text", ""))
    if kind == "resource_link":
        return f"[{part.get('uri', '')}]"
    if kind == "resource" and isinstance(resource := part.get("resource"), Mapping):
        if isinstance(text := resource.get("text"), str):
            return text
        return _named(resource.get("mimeType"), resource.get("blob"))
    if kind in ("image", "audio"):
        return _named(part.get("mimeType"), part.get("data"))
    return f"[{str(kind)[:40]}]"


def _named(kind: Any, data: Any) -> str:
    text = data if isinstance(data, str) else ""
    try:
        binary = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        binary = text.encode(errors="replace")
    return f"[{str(kind)[:40]}, {len(binary)} bytes, sha256 {hashlib.sha256(binary).hexdigest()[:12]}]"
