"""Calls the functions of a family in a process of another interpreter, which has the family's packages."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from coevolve_jax.envs.worker_process import Gone, Lost, WorkerProcess
from coevolve_jax.types import Task

ASK_SECONDS = 600.0  # of processor time: a family may read a large data set before it lists its scenarios


class Remote:
    """One process, started by the first question. Several threads may ask at once."""

    def __init__(self, name: str, python: str):
        self.name, self.python = name, python
        self._lock = threading.Lock()
        self._process: WorkerProcess | None = None
        self._ids = itertools.count()
        self._tools: dict[str, list[dict]] = {}

    def functions(self) -> dict[str, Callable]:
        return {
            "scenarios": self.scenarios,
            "tasks": self.tasks,
            "tools": self.tools,
            "actions": lambda: self.ask("actions"),
            "versions": lambda: self.ask("versions"),
        }

    def scenarios(self, split: str, settings: Mapping[str, Any], apart_from: str = "") -> list[Task]:
        return self._tasks("scenarios", split, dict(settings), apart_from)

    def tasks(self, split: str, settings: Mapping[str, Any]) -> list[Task]:
        return self._tasks("tasks", split, dict(settings))

    def _tasks(self, *question: Any) -> list[Task]:
        found = [Task.from_json(task) for task in self.ask(*question)]
        self._tools = {}  # a file that they are made of may have changed, and its tools with it
        return found

    def tools(self, task: Task) -> list[dict]:
        """Returns a task's tools. An equal scenario gets the same list again, without another question.

        So it is until the scenarios or tasks of a split are asked for again.
        """
        key, known = json.dumps([task.environment, task.scenario]), self._tools
        if key not in known:
            known[key] = self.ask("tools", task.to_json())
        return known[key]

    def ask(self, *question: Any) -> Any:
        """Returns family.ask_here(*question). ValueError where the family refuses or its process fails."""
        with self._lock:
            if self._process is None:
                self._process = WorkerProcess(self.name, self.python, ASK_SECONDS, memory_gib=0, worlds=False)
                weakref.finalize(self, self._process.kill)
            reply = self._reply(self._process, question)
        if reply[0] == "refused":
            raise ValueError(reply[1])
        return reply[1]

    def _reply(self, process: WorkerProcess, question: tuple) -> list:
        while True:
            try:
                process.wait_until_ready()
                (reply,) = process.request(next(self._ids), [json.dumps(["ask", *question])])
                return reply
            except Gone:  # it had ended before it was asked
                process.restart()
            except (Lost, RuntimeError) as error:
                process.restart()
                why = str(error).partition(" in [")[0][:300]
                raise ValueError(
                    f"The environment {self.name!r} could not be asked for its {question[0]} "
                    f"under {self.python or sys.executable}: {why}; its own message stands above, if it left "
                    "one."
                ) from None
            except BaseException:  # Ctrl-C: a pending answer must not be read as that of the next question
                process.kill()
                self._process = None
                raise
