"""The content of a folder, as grading compares it.

A SQLite database counts by the rows of its tables, in any order; a JSON file by its values; git's index by
its entries; every other file by its bytes. Floats of rows and of JSON are rounded, as `envs.base.rounded`
says. The path of the folder itself reads as /world in all of them.
Agents write these files, so reading them has a budget. A file beyond it counts by its bytes as they are.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import itertools
import json
import os
import sqlite3
import struct
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from coevolve_jax.envs.base import canonical, rounded
from coevolve_jax.envs.mcp.spec import SHOWN

SQLITE = b"SQLite format 3\0"
BESIDE = ("-wal", "-shm", "-journal")  # endings of the files that SQLite keeps beside a database
LOCKED = 5.0  # seconds to wait for the databases that their server has locked
MAX_FILES = 20_000
MAX_PATH = 1000  # characters
# What reading a folder may cost; no bound depends on the machine's speed.
MAX_BYTES = 1 << 29
MAX_PARSED = 1 << 25  # bytes of the files that count by rows, values or entries; and text of rows
MAX_VALUES = 200_000  # of rows, JSON files and indices
MAX_NESTED = 200  # lists and objects within each other in a JSON file, whatever depth Python reads
A_FILE, A_TABLE = 4, 20  # values in whose time a file or a table is opened
SCHEMA_STEPS, MAX_STEPS = 200_000, 2_000_000  # of SQLite's machine: the time of a schema grows by its square
TOO_LARGE = "too large"


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


class _Budget:
    """Counts what it may still cost to read a folder."""

    def __init__(self):
        self.bytes, self.parsed, self.text, self.values = MAX_BYTES, MAX_PARSED, MAX_PARSED, MAX_VALUES
        self.until = time.monotonic() + LOCKED

    def spend(self, **cost: int) -> None:
        """Raises TooLarge where less is left."""
        for name, count in cost.items():
            left = getattr(self, name) - count
            if left < 0:
                raise TooLarge(f"takes too many {name} to read")
            setattr(self, name, left)


def content(folder: str, ignore: Sequence[str] = ()) -> dict[str, str]:
    """Returns a digest of each file of a folder by its path. Others get a word, such as "folder".

    ignore: patterns of paths that are left out.
    """
    found, budget = {}, _Budget()
    for parent, folders, files in os.walk(folder):
        if len(found) > MAX_FILES:
            return found | {".": TOO_LARGE}
        folders.sort()
        names = [os.path.relpath(os.path.join(parent, name), folder) for name in (*folders, *sorted(files))]
        databases = {name for name in names if _is_database(os.path.join(folder, name))}
        for name in names:
            beside = any(name.endswith(end) and name.removesuffix(end) in databases for end in BESIDE)
            if not beside and not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore):
                try:
                    found[name] = _of(os.path.join(folder, name), folder, name in databases, budget)
                except OSError as error:
                    found[name] = f"unreadable: {error.strerror}"
    return found


def too_large(found: Mapping[str, str]) -> set[str]:
    """Returns the paths of a content that were beyond the budget."""
    return {name for name, value in found.items() if value.startswith(TOO_LARGE)}


def _is_database(path: str) -> bool:
    if os.path.islink(path) or not os.path.isfile(path):
        return False
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return file.read(len(SQLITE)) == SQLITE
    return False


def _of(path: str, folder: str, database: bool, budget: _Budget) -> str:
    if os.path.islink(path):
        return f"-> {os.readlink(path).replace(folder, SHOWN)}"
    if os.path.isdir(path):
        return "folder"
    if not os.path.isfile(path):
        return "no file"
    with contextlib.suppress(TooLarge, RecursionError, MemoryError, ValueError):
        budget.spend(values=A_FILE)
        if not database:
            return _digest(_read(path, folder, budget))
        try:
            return _digest(_rows(path, budget).replace(folder, SHOWN).encode())
        except sqlite3.Error:
            return _digest_of_file(path, budget)
    try:
        return f"{TOO_LARGE}, sha256 {_digest_of_file(path, budget)}"
    except TooLarge:
        return f"{TOO_LARGE}, {os.path.getsize(path)} bytes"


def _read(path: str, folder: str, budget: _Budget) -> bytes:
    """Returns what counts of a file that is no database."""
    size = os.path.getsize(path)
    parsed = path.endswith((".json", ".jsonl", "/.git/index"))
    budget.spend(parsed=size if parsed else 0, bytes=size)
    with open(path, "rb") as file:
        data = file.read(size).replace(folder.encode(), SHOWN.encode())
    values = None
    if path.endswith("/.git/index"):
        budget.spend(values=size // 16)
        values = _entries(data)
    elif parsed:
        budget.spend(values=sum(map(data.count, (b"[", b"{", b",", b"\n", b"\r"))))
        values = _values(data)
    return data if values is None else canonical(values).encode()


def _digest_of_file(path: str, budget: _Budget) -> str:
    """Digests the bytes of a file as they are, and those of SQLite's log beside it."""
    digest = hashlib.sha256()
    for part in _with_log(path):
        budget.spend(bytes=os.path.getsize(part))
        with open(part, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _with_log(path: str) -> list[str]:
    log = f"{path}{BESIDE[0]}"
    return [path, log] if os.path.isfile(log) and not os.path.islink(log) else [path]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _rows(path: str, budget: _Budget) -> str:
    """Returns the schema and the rows of a database as text. sqlite3.Error where it is damaged.

    Columns that SQLite computes at each reading are left out: the schema has their formulas.
    """
    size = sum(map(os.path.getsize, _with_log(path)))
    budget.spend(parsed=size, bytes=size)
    uri = f"file:{urllib.parse.quote(os.fsencode(path))}?mode=ro"
    wait = max(0.0, budget.until - time.monotonic())
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=wait)) as database:
        database.text_factory = lambda data: data.decode(errors="surrogateescape")
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_PARSED)
        _allow(database, SCHEMA_STEPS)
        database.execute("PRAGMA trusted_schema = OFF")
        found = []
        own = "name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
        schema = f"SELECT type, CAST(name AS TEXT), sql FROM sqlite_master WHERE {own}"
        entries = sorted(_read_rows(database, schema, budget), key=str)
        _allow(database, MAX_STEPS)
        for kind, name, sql in entries:
            found.append(_row([kind, name, sql]))
            if kind == "table":
                budget.spend(values=A_TABLE)
                quoted = _quoted(name)
                columns = database.execute(f"PRAGMA table_xinfo({quoted})")
                stored = ", ".join(_quoted(column) for _, column, *_, hidden in columns if hidden in (0, 3))
                rows = _read_rows(database, f"SELECT {stored} FROM {quoted}", budget)
                found += sorted(map(_row, rows))
    return "\n".join(found)


def _allow(database: sqlite3.Connection, steps: int) -> None:
    """Lets SQLite's machine take so many steps more. Then a query ends with sqlite3.Error."""
    left = iter(range(steps // 1000))
    database.set_progress_handler(lambda: next(left, None) is None, 1000)


def _read_rows(database: sqlite3.Connection, query: str, budget: _Budget) -> Iterator[tuple]:
    for row in database.execute(query):
        length = sum(len(value) for value in row if isinstance(value, str | bytes))
        budget.spend(values=1 + len(row), text=length)
        yield row


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _row(row: Sequence[Any]) -> str:
    return canonical([_cell(value) for value in row])


def _cell(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    return rounded(value) if isinstance(value, float) else value


def _values(data: bytes) -> Any:
    """Returns the values of a JSON file, or those of its lines; None where it is neither."""
    one = functools.partial(json.loads, parse_float=lambda text: rounded(float(text)))
    for read in (one, lambda text: [one(line) for line in text.splitlines() if line.strip()]):
        with contextlib.suppress(ValueError):
            values = read(data)
            if _nests(values):
                raise TooLarge(f"nests more than {MAX_NESTED} values")
            return {"values": values}
    return None


def _nests(value: Any) -> bool:
    """Returns True where lists and objects are more than MAX_NESTED deep."""
    level = [value]
    for _ in range(MAX_NESTED):
        inner = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
        level = list(itertools.chain.from_iterable(inner))
        if not level:
            return False
    return any(isinstance(v, dict | list) for v in level)


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
