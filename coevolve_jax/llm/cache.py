"""Answers on disk by the digest of their request. Nothing is asked twice; a run can be replayed offline."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coevolve_jax.llm.served import digest

TABLES = (
    "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, request TEXT NOT NULL, reply TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS servers (key TEXT PRIMARY KEY, address TEXT NOT NULL, model TEXT NOT NULL)",
)


class Cache:
    """A SQLite file that several runs may share.

    It holds requests and replies as JSON text, and the servers that answered: digests of addresses and ids of
    models. It holds no API key and no address.
    """

    def __init__(self, path: str, section: str):
        """Opens or makes the file. Raises ValueError for one that is no such cache, or cannot be made.

        section: of the config, whose key `cache` names the file.
        """
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            # Statements commit at once. The event loop's thread uses the file too, under the lock.
            self._file = sqlite3.connect(path, timeout=10.0, isolation_level=None, check_same_thread=False)
            self._file.execute("PRAGMA journal_mode=WAL")  # other runs may read while one writes
            for table in TABLES:
                self._file.execute(table)
        except (sqlite3.Error, OSError) as error:
            raise ValueError(
                f"config.{section}.cache is {path!r}, which cannot be used ({error}): name another file, or "
                "'' for none."
            ) from None
        self._lock = threading.Lock()

    def servers(self) -> list[tuple[str, str, str]]:
        """Returns (Served.key, digest of the address, model) of each server and model known, by key."""
        with self._lock:
            return self._file.execute("SELECT key, address, model FROM servers ORDER BY key").fetchall()

    def remember(self, key: str, server: str, model: str) -> None:
        """Adds a server that answers. key: Served.key. server: its address, kept as a digest."""
        with self._lock:
            row = (key, digest(server), model)
            self._file.execute("INSERT OR IGNORE INTO servers VALUES (?, ?, ?)", row)

    def get(self, key: str) -> dict | None:
        with self._lock:
            row = self._file.execute("SELECT reply FROM answers WHERE key = ?", (key,)).fetchone()
        return json.loads(row[0]) if row else None

    def put(self, key: str, request: Mapping[str, Any], reply: Mapping[str, Any]) -> dict | None:
        """Stores the reply to a request. Returns the first one, which stays: so all runs read the same."""
        row = (key, json.dumps(request, sort_keys=True), json.dumps(reply, sort_keys=True))
        with self._lock:
            self._file.execute("INSERT OR IGNORE INTO answers VALUES (?, ?, ?)", row)
        return self.get(key)
