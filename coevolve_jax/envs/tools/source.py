"""Reads a user's tools: a class in TRL's style, or a file of functions.

A source is "my_env:Shop", "folder/my_env.py:Shop", "my_tools.py" or "my_tools". `load` executes the file anew
for each world, so that worlds share nothing that the file defines: no class attributes and no globals. What
it imports is shared.

Workers import this file: it needs the standard library only.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.machinery
import importlib.util
import inspect
import io
import os
import re
import sys
import tokenize
import types
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from coevolve_jax import shipped
from coevolve_jax.envs.tools import data
from coevolve_jax.envs.tools.schema import Unfit, schema
from coevolve_jax.envs.tools.state import (
    NoState,
    attributes_of,
    plain,
)

# Public methods that are no tools. TRL has the first two; `state` is this project's.
RESERVED = ("reset", "get_reward", "state")
KEY = "config.environment.source"


class Late(BaseException):
    """Raised within code that takes too long. It is no Exception, so that the code does not catch it."""


class Refused(ValueError):
    """Raised where the user's code cannot be used. The message says where, why, and what to do."""


@dataclasses.dataclass(frozen=True)
class Tools:
    """The contents of a source, before anything of it has run but the file itself.

    name: the class's name, or the file's. tools: name -> the function, unbound where it is a method.
    make: makes the object whose methods the tools are; None for a file of functions.
    first: the data that the class and its file begin with, as JSON values by name.
    """

    source: str
    name: str
    module: types.ModuleType
    tools: Mapping[str, Callable]
    make: type | None
    first: Mapping[str, Any]

    def own(self, name: str) -> Any:
        """Returns what the class, or the file, defines under a name; None where it defines nothing."""
        return getattr(self.make or self.module, name, None)

    def schemas(self) -> list[dict]:
        """Returns the tools' function schemas. Raises Refused, which names the tool and its line."""
        found = []
        for name, function in self.tools.items():
            try:
                found.append(schema(function))
            except Unfit as why:
                raise Refused(f"{self.place(function)}: {self.name}.{name} {why}.") from None
            except Exception as error:
                raise Refused(
                    f"{self.place(function)}: {self.name}.{name} has no schema ({error})."
                ) from None
        return found

    def place(self, function: Callable | None = None) -> str:
        """Returns FILE:LINE of a function, or of the class or file."""
        code = getattr(inspect.unwrap(function), "__code__", None) if function else None
        file = shown(self.module.__file__ or self.source)
        if code:
            return f"{file}:{code.co_firstlineno}"
        if self.make:
            with_line = re.compile(rf"^\s*class\s+{self.make.__name__}\b")
            lines = read(self.module.__file__ or "").splitlines()
            return next((f"{file}:{n}" for n, line in enumerate(lines, 1) if with_line.match(line)), file)
        return f"{file}:1"


def load(source: str) -> Tools:
    """Executes a source's file anew and returns what it defines. Raises Refused."""
    where, _, name = source.partition(":")
    if not where:
        raise Refused(
            f'{KEY} is {source!r}: give a class, such as "my_env:Shop" or "my_env.py:Shop", or a file.'
        )
    path = find(where)
    module = _execute(path, source)
    kind = _class(module, name, source)
    found = _methods(kind) if kind else _functions(module)
    what = kind.__name__ if kind else module.__name__.rpartition(".")[2]
    first = data.first_seen(module, kind)
    tools = Tools(source, what, module, found, kind, first)
    if not found:
        how = "public methods" if kind else "public functions"
        raise Refused(
            f"{tools.place()}: {what} has no tools: its {how} other than {', '.join(RESERVED)} are the tools."
        )
    if kind and not callable(getattr(kind, "reset", None)):
        raise Refused(f"{tools.place()}: {what} has no method reset(self, ...): it begins each world.")
    _check_state(tools)
    return tools


def _check_state(tools: Tools) -> None:
    """Raises Refused for a `state` that is a property, or that is a tool: it has arguments."""
    state = inspect.getattr_static(tools.make, "state", None) if tools.make else None
    if isinstance(state, (property, functools.cached_property)):
        getter = state.fget if isinstance(state, property) else state.func
        raise Refused(
            f"{tools.place(getter)}: {tools.name}.state is a {type(state).__name__}: make it a method, "
            "def state(self), which returns what two worlds are compared by."
        )
    state = tools.own("state")
    if callable(state) and (needed := required(tools, "state")):
        raise Refused(
            f"{tools.place(state)}: {tools.name}.state needs {needed[0]}, and the name state is reserved for "
            "what two worlds are compared by: give the tool another name."
        )


def required(tools: Tools, name: str) -> list[str]:
    """Returns the parameters, without self, that a function of the class or file needs."""
    found = [
        p.name
        for p in inspect.signature(tools.own(name)).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    method = tools.make and inspect.isfunction(inspect.getattr_static(tools.make, name))
    return found[1:] if method else found


def find(where: str) -> str:
    """Returns the path of the file that a source names. Raises Refused where there is none."""
    if where.endswith(".py") or os.sep in where:
        path = where if where.endswith(".py") else f"{where}.py"
        path = shipped.file(path)
        if not os.path.isfile(path):
            raise Refused(f"{KEY} names the file {where}, which does not exist in {os.getcwd()}.")
        return os.path.abspath(path)
    folders = [os.getcwd(), *sys.path]
    *packages, last = where.split(".")
    for folder in folders:
        base = os.path.join(folder, *packages, last)
        for path in (f"{base}.py", os.path.join(base, "__init__.py")):
            if os.path.isfile(path):
                return os.path.abspath(path)
    raise Refused(
        f"{KEY} names the module {where}, which is neither in {os.getcwd()} nor installed: "
        "give the file's path, or run from its folder."
    )


def shown(path: str) -> str:
    """Returns a path as messages show it: relative, where it lies below the current folder."""
    relative = os.path.relpath(path)
    return os.path.abspath(path) if relative.startswith("..") else relative


def read(path: str) -> str:
    """Returns the text of a Python file, which may declare its encoding. Raises Refused with the line."""
    with open(path, "rb") as file:
        data = file.read()
    try:
        encoding = tokenize.detect_encoding(io.BytesIO(data).readline)[0]
    except SyntaxError:  # neither UTF-8 nor a known encoding in the first two lines
        encoding = "utf-8"
    try:
        text, wrong = data.decode(encoding), data.find(b"\0")
    except UnicodeDecodeError as error:
        text, wrong = "", error.start
    if wrong >= 0:
        line = data[:wrong].count(b"\n") + 1
        raise Refused(
            f"{shown(path)}:{line}: the byte 0x{data[wrong]:02x} is no {encoding} text: save the file "
            "as UTF-8."
        )
    return text


@functools.lru_cache(maxsize=8)
def _compiled(path: str, changed: float) -> types.CodeType:
    return compile(read(path), path, "exec", dont_inherit=True)


def _execute(path: str, source: str) -> types.ModuleType:
    """Executes a file as a module that is registered under its name while it is the latest."""
    folder, name = os.path.dirname(path), os.path.splitext(os.path.basename(path))[0]
    package = []
    if name == "__init__":
        folder, name = os.path.split(folder)
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        folder, part = os.path.split(folder)
        package.insert(0, part)
    if folder not in sys.path:
        sys.path.append(folder)  # last: a file of the user's must not stand for one of Python's own
    full = ".".join([*package, name])
    if full in sys.stdlib_module_names:
        raise Refused(f"{KEY} names the file {path}, and Python has a module {full} of its own: rename it.")
    module = types.ModuleType(full)
    module.__file__, module.__package__ = path, ".".join(package)
    module.__spec__ = importlib.machinery.ModuleSpec(full, None, origin=path)
    if os.path.basename(path) == "__init__.py":
        module.__package__, module.__path__ = full, [os.path.dirname(path)]
    sys.modules[full] = module  # dataclasses and type hints look their module up
    try:
        exec(_compiled(path, os.stat(path).st_mtime), module.__dict__)
    except Refused:
        raise
    except (Exception, SystemExit) as error:
        lines = [f.tb_lineno for f in _frames(error.__traceback__) if f.tb_frame.f_code.co_filename == path]
        line = lines[-1] if lines else getattr(error, "lineno", None) or 1
        raise Refused(f"{shown(path)}:{line}: {KEY}={source} cannot be executed ({said(error)}).") from None
    return module


def _frames(traceback: types.TracebackType | None) -> list[types.TracebackType]:
    found = []
    while traceback is not None:
        found.append(traceback)
        traceback = traceback.tb_next
    return found


def _class(module: types.ModuleType, name: str, source: str) -> type | None:
    """Returns the class that the source names, or the file's only class with a reset; None for functions."""
    own = {n: v for n, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__}
    if name:
        found = getattr(module, name, None)
        if not isinstance(found, type):
            has = ", ".join(own) or "no class"
            raise Refused(f"{KEY} is {source!r}, and {module.__file__} has no class {name}: it has {has}.")
        return found
    able = [kind for kind in own.values() if callable(getattr(kind, "reset", None))]
    if len(able) > 1:
        names = ", ".join(kind.__name__ for kind in able)
        raise Refused(
            f"{KEY} is {source!r}, and the file has several classes ({names}): name one, FILE:CLASS."
        )
    return able[0] if able else None


def _methods(kind: type) -> dict[str, Callable]:
    """Returns the tools of a class as TRL 1.16 finds them: its public functions, by name."""
    found = {
        name: function
        for name, function in inspect.getmembers(kind, inspect.isfunction)
        if name not in RESERVED and not name.startswith("_")
    }
    _refuse_twins(found, kind.__name__)
    return found


def _functions(module: types.ModuleType) -> dict[str, Callable]:
    """Returns the public functions that the file itself defines, by name."""
    found = {
        name: function
        for name, function in sorted(vars(module).items())
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and name not in RESERVED
        and not name.startswith("_")
    }
    _refuse_twins(found, module.__name__)
    return found


def _refuse_twins(found: Mapping[str, Callable], where: str) -> None:
    for name, function in found.items():
        if function.__name__ != name:
            if hasattr(function, "_partialmethod") or hasattr(function, "__partialmethod__"):
                raise Refused(
                    f"{where}.{name} is a functools.partialmethod, which has no schema of its own: write a "
                    "method that calls the other one."
                )
            code = inspect.unwrap(function).__code__
            place = f"{shown(code.co_filename)}:{code.co_firstlineno}: "
            raise Refused(
                f"{place}{where} has two names for one tool, {name} and {function.__name__}: a schema has "
                "the function's own name. Begin one of them with _, or use functools.wraps in the decorator."
            )


def begin(tools: Tools, reset: Mapping[str, Any]) -> tuple[Any, str]:
    """Makes a world's object and resets it. Returns the object (the module, for functions) and reset's text.

    Raises Refused where the user's code raises, or where reset returns anything but text or None.
    """
    try:
        world = tools.make() if tools.make else tools.module
    except (Exception, SystemExit) as error:
        raise Refused(f"{tools.place()}: {tools.name}() raises {said(error)}.") from None
    function = getattr(world, "reset", None)
    if function is None:
        return world, ""
    try:
        text = run(function, reset)
    except (Exception, SystemExit) as error:
        given = ", ".join(f"{k}={v!r}"[:60] for k, v in reset.items())
        raise Refused(f"{tools.place(function)}: {tools.name}.reset({given}) raises {said(error)}.") from None
    if text is not None and not isinstance(text, str):
        raise Refused(
            f"{tools.place(function)}: {tools.name}.reset returns a {type(text).__name__}: return text, "
            "which the agent reads before its task, or None."
        )
    return world, text or ""


def run(function: Callable, arguments: Mapping[str, Any]) -> Any:
    """Calls a function, also an async one."""
    try:
        found = function(**arguments)
        if inspect.isawaitable(found):
            import asyncio  # here: most tools are not async, and workers start faster without it

            return asyncio.run(_awaited(found))
        return found
    except BaseException as error:
        if isinstance(error, (Exception, SystemExit, KeyboardInterrupt, Late)):
            raise
        raise RuntimeError(said(error)) from None  # such as asyncio.CancelledError: it would end the worker


async def _awaited(found: Awaitable) -> Any:
    return await found


def state_of(tools: Tools, world: Any) -> Any:
    """Returns a world's state as JSON values.

    It is `state()`, where the source defines that. Else it is the object's attributes, with the data of its
    class and of the file, which methods may change too. Raises Refused for an attribute, or for data that may
    change, which JSON cannot write.
    """
    try:
        if callable(tools.own("state")):
            return plain(run(world.state, {}), f"{tools.name}.state()")
        attributes = attributes_of(world) if tools.make else {}
        inside = {k: plain(v, f"{tools.name}.{k}") for k, v in sorted(attributes.items())}
        # A name of the file may also be an attribute's: both are state.
        beside = {
            f"{tools.module.__name__}.{k}" if k in inside else k: v
            for k, v in data.shared_data(tools.module, tools.make, tools.first).items()
        }
        return {**beside, **inside}
    except NoState as why:
        raise Refused(
            f"{tools.place()}: {why}, which cannot be written as JSON: hold plain data there, or define "
            f"state({'self' if tools.make else ''}), which returns what two worlds are compared by."
        ) from None
    except (Exception, SystemExit) as error:
        raise Refused(f"{tools.place()}: {tools.name}.state raises {said(error)}.") from None


def clean(text: str) -> str:
    """Returns a text with question marks for lone surrogates, which no file and no pipe takes."""
    return text.encode("utf-8", "replace").decode()


def text_of(error: BaseException) -> str:
    """Returns what an exception says, "" where it cannot say it."""
    try:
        return clean(str(error))
    except (Exception, SystemExit):
        return ""


def said(error: BaseException) -> str:
    """Returns an exception's class and what it says."""
    return f"{type(error).__name__}: {text_of(error)[:200]}".strip(": ")
