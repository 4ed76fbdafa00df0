"""Values for the parameters of tools, from the files that a world begins with: they help explorers."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from coevolve_jax.envs.mcp.spec import OWN

MOST = 12  # values of a parameter
MAX_TEXT = 40  # characters; a user would not type more
MAX_BYTES = 1 << 24  # of a file that is read
MAX_DEPTH = 8
LEAST_NAME = 2  # letters of a name that may be the end of another one


def of_template(template: Path, tools: Sequence[dict]) -> dict[str, list[Any]]:
    """Returns values by parameter: what stands under the same name in JSON files and databases.

    A parameter `order_id` also takes the values of `id`, where there is no `order_id`. The user's notes in
    coevolve.json are left out: its tasks may be those of an evaluation.
    """
    seen: dict[str, dict[Any, None]] = {}
    for path in sorted(set(template.rglob("*")) - {template / OWN}):
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_BYTES:
            for name, value in _pairs(path):
                known = seen.setdefault(_plain(name), {})
                if len(known) < MOST:
                    known[value] = None
    found = {}
    for tool in tools:
        for name, schema in tool["function"]["parameters"].get("properties", {}).items():
            fitting = [v for v in _known(_plain(name), seen) if _fits(v, schema.get("type"))]
            if fitting:
                found[name] = fitting
    return found


def _known(name: str, seen: dict[str, dict[Any, None]]) -> list[Any]:
    if name in seen:
        return list(seen[name])
    ends = [other for other in seen if len(other) >= LEAST_NAME and name.endswith(other)]
    return list(seen[max(ends, key=len)]) if ends else []


def _fits(value: Any, type_: Any) -> bool:
    if type_ == "string":
        return isinstance(value, str)
    whole = isinstance(value, int)
    return whole if type_ == "integer" else type_ == "number" and (whole or isinstance(value, float))


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _pairs(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (name, value) of the short texts and numbers in a file."""
    pairs: Iterator[tuple[str, Any]] = iter(())
    if path.suffix == ".json":
        with contextlib.suppress(ValueError, RecursionError):
            pairs = _in_json("", json.loads(path.read_bytes()))
    elif path.read_bytes()[:16] == b"SQLite format 3\0":
        pairs = _in_database(path)
    for name, value in pairs:
        short = isinstance(value, str) and 0 < len(value) <= MAX_TEXT
        if short or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield name, value


def _in_json(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and depth < MAX_DEPTH:
        for key, part in value.items():
            yield from _in_json(key, part, depth + 1)
    elif isinstance(value, list) and depth < MAX_DEPTH:
        for part in value:
            yield from _in_json(name, part, depth + 1)
    else:
        yield name, value


def _in_database(path: Path) -> Iterator[tuple[str, Any]]:
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path)) as database:
        for (table,) in list(database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")):
            yield "table_name", table
            quoted = table.replace('"', '""')
            rows = database.execute(f'SELECT * FROM "{quoted}" LIMIT {MOST}')
            for row in rows:
                yield from zip((column[0] for column in rows.description), row)
