"""Files that are replaced whole: a reader, or a kill, leaves either the old or the new content."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path


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
