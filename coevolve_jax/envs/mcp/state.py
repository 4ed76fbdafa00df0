"""The content of a folder, as grading compares it.

A SQLite database counts by the rows of its tables, in any order; a JSON file by its values; git's index by
its entries; every other file by its bytes. The path of the folder itself reads as /world in all of them.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import sqlite3
import struct
import urllib.parse
from collections.abc import Sequence
from typing import Any

from coevolve_jax.envs.base import canonical
from coevolve_jax.envs.mcp.spec import SHOWN

SQLITE = b"SQLite format 3\0"
BESIDE = ("-wal", "-shm", "-journal")  # endings of the files that SQLite keeps beside a database
LOCKED = 5.0  # seconds to wait for a database that its server has locked
MAX_FILES = 20_000
MAX_PATH = 1000  # characters


class TooLarge(Exception):
    """Raised where a folder holds more than it may. The message goes on from "its world"."""


def size(folder: str, most: float) -> None:
    """Raises TooLarge where the files of a folder have more than `most` MiB, or are too many or too deep."""
    total = count = 0
    for parent, folders, files in os.walk(folder):
        count += len(folders) + len(files)
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
        if total > most * 2**20:
            raise TooLarge(f"holds more than {most:g} MiB")
        if count > MAX_FILES:
            raise TooLarge(f"holds more than {MAX_FILES} files and folders")
        if len(parent) - len(folder) > MAX_PATH:
            raise TooLarge(f"holds a path of more than {MAX_PATH} characters")


def content(folder: str, ignore: Sequence[str] = ()) -> dict[str, str]:
    """Returns a digest of each file of a folder by its path. Others get a word, such as "folder".

    ignore: patterns of paths that are left out.
    """
    found = {}
    for parent, folders, files in os.walk(folder):
        folders.sort()
        names = [os.path.relpath(os.path.join(parent, name), folder) for name in (*folders, *files)]
        databases = {name for name in names if _is_database(os.path.join(folder, name))}
        for name in names:
            beside = any(name.endswith(end) and name.removesuffix(end) in databases for end in BESIDE)
            if not beside and not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore):
                try:
                    found[name] = _of(os.path.join(folder, name), folder, name in databases)
                except OSError as error:
                    found[name] = f"unreadable: {error.strerror}"
    return found


def _is_database(path: str) -> bool:
    if os.path.islink(path) or not os.path.isfile(path):
        return False
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(len(SQLITE)) == SQLITE
    return False


def _of(path: str, folder: str, database: bool) -> str:
    if os.path.islink(path):
        return f"-> {os.readlink(path).replace(folder, SHOWN)}"
    if os.path.isdir(path):
        return "folder"
    if not os.path.isfile(path):
        return "no file"
    if database:
        with contextlib.suppress(sqlite3.Error):
            return _digest(_rows(path).replace(folder, SHOWN).encode())
    with open(path, "rb") as file:
        data = file.read().replace(folder.encode(), SHOWN.encode())
    values = None
    if path.endswith((".json", ".jsonl")):
        values = _values(data)
    elif path.endswith("/.git/index"):
        values = _entries(data)
    return _digest(data if values is None else canonical(values).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _rows(path: str) -> str:
    """Returns the schema and the rows of a database as text. sqlite3.Error where it is damaged."""
    uri = f"file:{urllib.parse.quote(path)}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=LOCKED)) as database:
        database.text_factory = lambda data: data.decode(errors="surrogateescape")
        database.execute("PRAGMA trusted_schema = OFF")
        found = []
        schema = "SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
        for kind, name, sql in sorted(database.execute(schema), key=str):
            found.append(canonical([kind, name, sql]))
            if kind == "table":
                quoted = name.replace('"', '""')
                found += sorted(map(_row, database.execute(f'SELECT * FROM "{quoted}"')))
    return "\n".join(found)


def _row(row: Sequence[Any]) -> str:
    return canonical([{"bytes": value.hex()} if isinstance(value, bytes) else value for value in row])


def _values(data: bytes) -> Any:
    """Returns the values of a JSON file, or those of its lines; None where it is neither."""
    for read in (json.loads, lambda text: [json.loads(line) for line in text.splitlines() if line.strip()]):
        with contextlib.suppress(ValueError, RecursionError):
            return {"values": read(data)}
    return None


def _entries(data: bytes) -> list | None:
    """Returns [mode, object, stage, path] of each entry of git's index; None for a format unknown here.

    The index also holds times and numbers of the files, which differ in every copy.
    """
    with contextlib.suppress(struct.error, ValueError):
        mark, version, count = struct.unpack_from(">4sII", data)
        if mark != b"DIRC" or version not in (2, 3):
            return None
        found, at = [], 12
        for _ in range(count):
            (mode,), (flags,) = (
                struct.unpack_from(">I", data, at + 24),
                struct.unpack_from(">H", data, at + 60),
            )
            start = at + (64 if flags & 0x4000 else 62)
            end = data.index(b"\0", start)
            found.append([mode, data[at + 40 : at + 60].hex(), flags >> 12 & 3, data[start:end].hex()])
            at += ((end - at) // 8 + 1) * 8
        return found
    return None
