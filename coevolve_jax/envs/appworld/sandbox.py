"""The processes that run agents' code, each locked down (envs/lockdown.py), and the launcher that forks them.

`python -P -m coevolve_jax.envs.appworld.sandbox FOLDER` is the launcher. It has imported the modules that
agents may use. It holds nothing else: no task, no ground truth, no environment variables. Its standard input
is a Unix socket. For each message it forks an interpreter, whose only open file comes with the message.

The interpreter and the engine exchange JSON lines over it:
    interpreter: [pid]
    engine: {"now", "apps"}
    engine: {"code"}
    interpreter: {"call": [app, api, arguments]}, any number of times
    engine: {"value"} or {"error"}, after each call
    interpreter: {"said", "error"}, which ends this piece of code
When nobody holds the launcher's socket any more, it deletes FOLDER and ends.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import datetime
import importlib
import io
import json
import linecache
import os
import random
import re
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from coevolve_jax.envs import lockdown

# Modules that agents may import: AppWorld's own list. os, pathlib and the like import, but every call fails.
MODULES = (
    "array", "bisect", "builtins", "calendar", "collections", "collections.abc", "contextlib", "copy", "csv",
    "datetime", "difflib", "enum", "fractions", "functools", "heapq", "itertools", "json", "math", "numbers",
    "operator", "os", "pathlib", "pendulum", "pprint", "random", "re", "string", "textwrap", "time", "typing",
    "unittest", "uuid", "yaml",
)  # fmt: skip
# The modules above import these on first use. The launcher does so before, while files can be opened.
_LATE = (
    "_strptime",
    "decimal",
    "encodings.idna",
    "locale",
    "statistics",
    "unicodedata",
    "freezegun",
    "zoneinfo",
)
PREAMBLE = """
import builtins, calendar, datetime, itertools, json, math, random, re
from collections import Counter, defaultdict
from collections.abc import Iterator
from copy import deepcopy
from functools import reduce
import pendulum
from pendulum import FRIDAY, MONDAY, SATURDAY, SUNDAY, THURSDAY, TUESDAY, WEDNESDAY, Date, DateTime, Time
"""
SILENT = "Execution successful."  # the output of code that prints nothing
MAX_SAID = 1 << 18  # characters of the output that are kept
EPOCH = datetime.datetime(2000, 1, 1)
Request = Callable[[str, str, Mapping[str, Any]], Any]


class Channel:
    """JSON lines over a file descriptor."""

    def __init__(self, descriptor: int):
        self._descriptor, self._buffer = descriptor, bytearray()

    def read(self) -> Any:
        """Returns the value of the next line. EOFError where the other side has ended."""
        while (end := self._buffer.find(b"\n")) < 0:
            if not (chunk := os.read(self._descriptor, 1 << 16)):
                raise EOFError
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return json.loads(line)

    def write(self, value: Any) -> None:
        data = memoryview(json.dumps(value).encode() + b"\n")
        while data:
            data = data[os.write(self._descriptor, data) :]


class Named:
    """A namespace whose things are attributes and items. missing: the error text for an unknown name."""

    def __init__(self, things: Mapping[str, Any], missing: str):
        self._things, self._missing = things, missing

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> Any:
        if name not in self._things:
            raise Exception(self._missing.format(name))
        return self._things[name]

    def __dir__(self) -> list[str]:
        return list(self._things)


def offer(apps: Mapping[str, list[str]], request: Request) -> Named:
    """Builds `apis`, whose functions apis.<app>.<api>(**arguments) each make a request."""

    def api(app: str, name: str) -> Callable[..., Any]:
        return lambda **arguments: request(app, name, arguments)

    missing = "No API named '{}' found in the %s app."
    by_app = {
        app: Named({name: api(app, name) for name in names}, missing % app) for app, names in apps.items()
    }
    return Named(by_app, "No app named '{}' found.")


class Interpreter:
    """Runs one piece of code after the other in one namespace."""

    def __init__(self, apps: Mapping[str, list[str]], request: Request):
        self._names: dict[str, Any] = {"__name__": "__main__"}
        exec(PREAMBLE, self._names)
        self._names |= {"apis": offer(apps, request), "print": _print, "input": _no_input}
        self._pieces = 0

    def run(self, code: str) -> tuple[str, bool]:
        """Runs code. Returns its output, or its failure in AppWorld's words, and whether it failed."""
        self._pieces += 1
        name = f"<python-input-{self._pieces}>"
        code = code.strip()
        if not code:
            return "No code available to execute.", True
        try:
            tree = ast.parse(code)
            refused = forbidden(tree)
            if refused:
                return f"Execution failed. Traceback:\n{refused}", True
            compiled = compile(tree, name, "exec")
        except SyntaxError as error:
            line = (error.text or "").rstrip()
            return f"Execution failed. Traceback:\nSyntax error in line:\n{line}\nMessage: {error.msg}", True
        except (ValueError, RecursionError, MemoryError) as error:
            return f"Execution failed. Traceback:\n{type(error).__name__}: {error}", True
        linecache.cache[name] = (len(code), None, f"{code}\n".splitlines(keepends=True), name)
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
                exec(compiled, self._names)
        except BaseException as error:  # SystemExit too: code must not end the interpreter
            return f"Execution failed. Traceback:\n{_trace(error)}", True
        said = printed.getvalue()
        return (said if said.strip() else SILENT), False


def forbidden(tree: ast.AST) -> str:
    """Returns a sentence on the forbidden modules that code imports, "" where there are none."""
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module or "." for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    wrong = sorted(imported - set(MODULES))
    if not wrong:
        return ""
    return f"Usage of the following module{'s' * (len(wrong) > 1)} is not allowed: {', '.join(wrong)}."


def _print(*values: Any, **options: Any) -> None:
    """Prints like AppWorld: lists and dictionaries as JSON."""
    if not options and len(values) == 1 and isinstance(values[0], list | tuple | dict):
        text = json.dumps(values[0])
        values = (json.dumps(values[0], indent=1) if len(text) >= 100 else text,)
    builtins.print(*values, **options)


def _no_input(*_: Any, **__: Any) -> None:
    raise Exception("input(..) is not allowed. All decisions must be made autonomously.")


def _trace(error: BaseException) -> str:
    """Formats the error with the frames of the agent's own code."""
    try:
        frames = [
            f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith("<python-input")
        ]
        lines = [*traceback.format_list(frames), *traceback.format_exception_only(error)]
        return re.sub(r'  File "<python-input-\d+>"', 'File "<python-input>"', "".join(lines)).strip()
    except BaseException:  # formatting may run the agent's code, such as __str__ of its exception
        return type(error).__name__


def serve(descriptor: int) -> None:
    """Serves as one interpreter. It locks itself down before it reads any code."""
    channel = Channel(descriptor)
    channel.write([os.getpid()])
    told = channel.read()
    import freezegun

    freezegun.freeze_time(datetime.datetime.fromisoformat(told["now"])).start()
    random.seed(100)  # as AppWorld's engine does
    time.sleep = lambda seconds: None

    def request(app: str, api: str, arguments: Mapping[str, Any]) -> Any:
        channel.write({"call": [app, api, arguments]})
        answer = channel.read()
        if "error" in answer:
            raise Exception(answer["error"])
        return answer["value"]

    interpreter = Interpreter(told["apps"], request)
    lockdown.shut_in()
    while True:
        said, error = interpreter.run(channel.read()["code"])
        channel.write({"said": said[:MAX_SAID], "error": error})


def launch(folder: str) -> None:
    """Runs the launcher's loop. folder: deleted at the end."""
    lockdown.check()
    for name in (*MODULES, *_LATE):
        importlib.import_module(name)
    import freezegun
    import pendulum

    pendulum.now()  # reads the local time zone from its file while files can be opened
    with freezegun.freeze_time(EPOCH):
        pass  # freezegun now knows all modules to freeze; forked interpreters inherit that
    requests = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    lockdown.ignore_endings()
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
        if not message:
            break
        if not os.fork():
            lockdown.die_with_parent(signal.SIGKILL)
            lockdown.heed_endings()
            os.dup2(descriptors[0], 0)
            os.closerange(1, 1 << 16)
            with contextlib.suppress(BaseException):
                serve(0)
            os._exit(0)
        os.close(descriptors[0])
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    launch(sys.argv[1])
