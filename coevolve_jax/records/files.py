"""Files that are replaced whole, so that a reader or a kill meets the old or the new content, and locks."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO


def read_lines(path: Path) -> Iterator[dict]:
    with open(path, encoding="utf-8") as file:
        yield from map(json.loads, file)


def write_lines(path: Path, rows: Sequence[dict]) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces a file atomically. Its folder must exist."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def lock(file: IO, refusal: str) -> bool:
    """Locks an open file until it is closed or the process ends. False if its file system has no locks.

    Raises ValueError with the refusal if another process has locked it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(refusal) from None
    except OSError:
        return False
    return True
