"""AppWorld's engine on one task. It needs its own process, for which it patches time and databases.

The agent's code runs in another process (sandbox.py). It sends API calls as JSON, which are checked here.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import re
import socket
from collections import Counter
from collections.abc import Mapping
from typing import Any

from coevolve_jax.envs.appworld import data
from coevolve_jax.envs.appworld.draw import Draw
from coevolve_jax.envs.appworld.interpreter import Ended, Interpreter
from coevolve_jax.envs.base import digest

MAX_CALLS = 1000  # in one piece of code
TASKS = ("supervisor", "tasks")  # the table with the task's status and answer
_IN_PATH = re.compile(r"{(\w+)}")  # parameters in the path of a request
_UNSAFE = re.compile(r"[/\\?#%]|^\.*$")  # values that would change the path
_CHANGED = re.compile(r'(?:INSERT(?: OR \w+)? INTO|UPDATE|DELETE FROM)\s+"?(\w+)', re.IGNORECASE)


class Engine:
    """A task's world.

    outputs: a folder for AppWorld's output, with a link to its data. launcher: the socket of sandbox.py.
    """

    def __init__(self, task_id: str, outputs: str, launcher: socket.socket):
        from appworld.common.path_store import path_store
        from appworld.environment import AppWorld

        path_store.update_root(outputs)
        with contextlib.redirect_stdout(io.StringIO()):
            self._world = AppWorld(task_id, experiment_name=f"process_{os.getpid()}")
        # Open the initial databases, which `_changed` compares with the present ones.
        self._world.task.model_collection.reset_db_home_path()
        self._world.models.reset_db_home_path()
        self._task_id, self._launcher = task_id, launcher
        self._docs = {
            (app, name): doc for app, apis in self._world.task.api_docs.items() for name, doc in apis.items()
        }
        self._draw = Draw(list(self._docs.values()))
        self._begun = {app: len(self._tracked(app)) for app in self._apps}
        self._changes: dict[str, tuple[int, dict[str, Any]]] = {}  # app -> (statements then, changes)
        self._code: Interpreter | None = None

    def instruct(self, instruction: str) -> None:
        """Replaces the task's own instruction."""
        (task,) = self._world.models.supervisor.Task.all()
        task.instruction = instruction
        task.save()

    def execute(self, code: str) -> tuple[str, bool, bool]:
        """Runs a piece of code. Returns its output, whether it failed, and whether it completed the task."""
        if self._code is None:
            self._code = Interpreter(self._launcher, self._world.task.datetime.isoformat(), list(self._docs))
        self._completed = self._called = 0
        try:
            said, error = self._code.run(code, self._request)
        except Ended as end:
            self._code = None
            return f"Execution failed. Traceback:\n{end}", True, bool(self._completed)
        if not error:
            self._draw.ran(code)
        return said, error, bool(self._completed)

    def options(self) -> list[str]:
        """Returns pieces of code, each of one API, that could run now."""
        return self._draw.options()

    def _request(self, app: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Calls one API. Returns {"value"}, or {"error"} in AppWorld's words."""
        self._called += 1
        if self._called > MAX_CALLS:
            return {"error": f"Number of requests exceeded the limit of {MAX_CALLS}."}
        doc = self._docs.get((app, name))
        if doc is None:
            return {"error": f"No API named '{name}' found in the {app} app."}
        known = {p["name"] for p in doc["parameters"]}
        arguments = {k: v for k, v in arguments.items() if k in known}  # AppWorld ignores the others too
        for parameter in _IN_PATH.findall(doc["path"]):
            if _UNSAFE.search(str(arguments.get(parameter, "-"))):
                return {"error": "API not found or some of the passed parameters are invalid."}
        try:
            value = self._world.apis[app][name](**arguments)
            json.dumps(value)
        except Exception as error:
            return {"error": str(error)[:2000]}
        self._completed += (app, name) == ("supervisor", "complete_task")
        self._draw.answered(value)
        return {"value": value}

    def changes(self) -> dict[str, Any]:
        """Returns the differences between the present and the initial databases.

        Each changed table has two lists of [row, count]: rows added and rows removed since the beginning.
        The table TASKS has the task's status and its answer, as AppWorld compares them.
        """
        found: dict[str, Any] = {}
        for app in self._apps:
            statements = self._tracked(app)
            seen, _ = self._changes.get(app, (self._begun[app], {}))
            if len(statements) > seen:
                self._changes[app] = len(statements), self._changed(app)
            found |= self._changes.get(app, (0, {}))[1]
        return found

    def _changed(self, app: str) -> dict[str, Any]:
        """Computes `changes` of one app. Only tables that later statements name can differ."""
        from appworld.common.utils import answer_to_text

        found: dict[str, Any] = {}
        since = self._tracked(app)[self._begun[app] :]
        tables = {t for s, *_ in since for t in _CHANGED.findall(s) if not t.endswith("_fts")}
        for table in sorted(tables):
            if (app, table) == TASKS:
                task = self._world.models.supervisor.Task.first()
                if task.status is not None:
                    found[".".join(TASKS)] = [task.status, answer_to_text(json.loads(task.answer))]
                continue
            after = self._rows(app, table, self._world.models)
            before = self._rows(app, table, self._world.task.model_collection)
            if after != before:
                found[f"{app}.{table}"] = [
                    sorted((a - b).items()) for a, b in ((after, before), (before, after))
                ]
        return found

    def fingerprint(self) -> str:
        """Digests the content of the databases."""
        return digest([data.beginning(self._task_id), self.changes()])

    def evaluate(self) -> tuple[int, int]:
        """Runs AppWorld's evaluation. Returns the number of the task's tests that pass, and of all."""
        with contextlib.redirect_stdout(io.StringIO()):
            # AppWorld saves after each piece of code; here the evaluation alone needs it.
            self._world._save_state(self._world.output_db_home_path_on_disk)
            verdict = self._world.evaluate(suppress_errors=True)
        self._world.models.reset_db_home_path()  # the evaluation has pointed the engine at other databases
        return verdict.pass_count, verdict.num_tests

    @property
    def _apps(self) -> list[str]:
        return self._world.models.app_names

    def _tracked(self, app: str) -> list:
        return self._world.models[app].SQLModel.db.tracker.changes

    def _rows(self, app: str, table: str, models: Any) -> Counter[str]:
        """Counts the rows of a table, as JSON without the column that AppWorld derives from the others."""
        from appworld.apps.model_lib import CachedDBHandler, db_home_to_app_path

        databases, _ = CachedDBHandler.get(db_home_to_app_path(models.to_db_home_path, app))
        cursor = databases.raw_connection().connection.execute(f'SELECT * FROM "{table}"')
        names = [column[0] for column in cursor.description]
        rows = ({n: v for n, v in zip(names, row) if n != "record_hash"} for row in cursor)
        return Counter(json.dumps(row, default=str) for row in rows)

    def pause(self) -> None:
        """Ends the thread that the apps run in: a process with threads must not fork.

        Each app gets one request first, so that its lazy initialisation is done before the fork.
        """
        for app in self._apps:
            self._world.requester.client.get(f"/{app}/")
        gc.freeze()
        self._world.requester.client.__exit__(None, None, None)

    def resume(self) -> None:
        """Starts the thread again."""
        self._world.requester.client.__enter__()

    def close(self) -> None:
        """Restores the process's time and closes all files."""
        from appworld.apps.model_lib import get_direct_cached_sqlite3_connection

        self._world.close_all()
        get_direct_cached_sqlite3_connection.cache_clear()
