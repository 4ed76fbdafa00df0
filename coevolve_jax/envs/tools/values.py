"""Values that a tool's text arguments may take, read off a world's first state: they help explorers.

An argument takes the names and texts that stand under its own name ("customer": the keys of `customers`, or
each "customer" in a record). Where nothing has its name, it takes all of them that no other argument claims.
Where something has it that is empty yet, it takes none: answers will show some.
Arguments that list their values, and those whose words are free, get none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MOST = 60  # values of an argument
MAX_TEXT = 40  # characters; a user would not type more
_LISTED = re.compile(r"\b(?:one of|options|either)\b|'[\w.-]+'|\bnew\b|YY", re.IGNORECASE)
_FREE = {"message", "content", "text", "title", "description", "note", "comment", "body", "query", "reason"}


def of_state(state: Any, tools: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Returns values by TOOL.ARGUMENT. state: as in `plain`. tools: the function schemas."""
    found = list(_texts(state, ()))
    arguments = {(tool["function"]["name"], name) for tool in tools for name in open_arguments(tool)}
    claimed = {
        name: list(dict.fromkeys(text for text, words in found if _words(name) & words))
        for _, name in arguments
    }
    taken = {text for texts in claimed.values() for text in texts}
    rest = [text for text in dict.fromkeys(text for text, _ in found) if text not in taken]
    known = set().union(*map(_words, _keys(state)))
    values = {
        f"{tool}.{name}": (claimed[name] or ([] if _words(name) & known else rest))[:MOST]
        for tool, name in sorted(arguments)
    }
    return {argument: texts for argument, texts in values.items() if texts}


def open_arguments(tool: Mapping[str, Any]) -> list[str]:
    """Returns the arguments of a tool, and the fields within them, that take some text of the world."""
    found = _opened(tool["function"]["parameters"].get("properties", {}))
    return list(dict.fromkeys(found))


def _opened(properties: Mapping[str, Any]) -> Iterator[str]:
    for name, schema in properties.items():
        if isinstance(items := schema.get("items"), Mapping) and "description" in schema:
            items = {"description": schema["description"], **items}
        if _open(name, schema) or (isinstance(items, Mapping) and _open(name, items)):
            yield name
        for inner in (schema, items):
            if isinstance(inner, Mapping) and isinstance(fields := inner.get("properties"), Mapping):
                yield from _opened(fields)


def _open(name: str, schema: Mapping[str, Any]) -> bool:
    """Tells whether an argument takes some text that exists in the world."""
    free = _words(name) & _FREE
    return schema.get("type") == "string" and "enum" not in schema and not free and not _LISTED.search(
        schema.get("description", "")
    )  # fmt: skip


def _words(name: str) -> set[str]:
    """Returns a name's words in the singular. "id" and "name" say nothing of what they name."""
    words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower())
    return {re.sub(r"(?<=\w\w)(?:ies|s)$", lambda end: "y" if end[0] == "ies" else "", w) for w in words} - {
        "id", "name", "number", "code", "key",
    }  # fmt: skip


def _keys(value: Any) -> Iterator[str]:
    """Yields the keys of all mappings in a state."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    if isinstance(value, Mapping):
        yield from value
    for part in parts:
        yield from _keys(part)


def _texts(value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, set[str]]]:
    """Yields each name and short text in a state, with the words of the two names above it."""
    above = set().union(*map(_words, path[-2:])) if path else set()
    if isinstance(value, Mapping):
        # A mapping that stands in an attribute, or holds records, maps names. Another is a record.
        holds_records = bool(value) and all(isinstance(part, Mapping) for part in value.values())
        named = len(path) == 1 or (len(path) > 1 and holds_records)
        for key, part in value.items():
            if named and 0 < len(key) <= MAX_TEXT:
                yield key, above
            if key != "(class)":
                yield from _texts(part, (*path, "" if named else key))
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part, (*path, "") if isinstance(part, Mapping) else path)
    elif isinstance(value, str) and 0 < len(value) <= MAX_TEXT:
        yield value, above
