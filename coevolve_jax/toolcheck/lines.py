"""Reads a user's Python file without executing it: where its tools stand, and what in it may not repeat."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator

from coevolve_jax.envs.tools.source import RESERVED, Refused, read, shown

# What a dotted name gives is another each time, or each day.
CLOCK = {
    "time.time", "time.time_ns", "time.monotonic", "time.perf_counter", "time.localtime", "time.gmtime",
    "time.strftime", "time.ctime", "datetime.now", "datetime.utcnow", "datetime.today", "date.today",
}  # fmt: skip
CHANCE = {
    "uuid.uuid1", "uuid.uuid4", "uuid1", "uuid4", "os.urandom", "random.SystemRandom", "SystemRandom",
    "np.random.default_rng", "numpy.random.default_rng",
}  # fmt: skip
MADE = ("list", "dict", "set", "deque", "defaultdict", "Counter", "OrderedDict", "bytearray")
NO_TOOLS = ("classmethod", "property", "cached_property", "lru_cache", "cache", "partialmethod")
NETWORK = ("requests", "httpx", "urllib", "urllib3", "socket", "http", "aiohttp", "ftplib", "smtplib")


@dataclasses.dataclass(frozen=True)
class Suspect:
    """A line whose result may differ from call to call.

    kind: "clock", "chance", "network", "default" or "cached".
    """

    line: int
    kind: str
    code: str


class Lines:
    """The user's file. path: "" where the environment is no Python file; then nothing is found."""

    def __init__(self, path: str, name: str = ""):
        """name: of the class whose methods are the tools; "" for functions."""
        self.path = shown(path) if path else ""
        text = read(path) if path else ""
        try:
            self._tree = ast.parse(text)
        except SyntaxError as error:
            raise Refused(f"{self.path}:{error.lineno or 1}: the file is no Python ({error.msg}).") from None
        self._text = text.splitlines()
        classes = {node.name: node for node in ast.walk(self._tree) if isinstance(node, ast.ClassDef)}
        self._top: ast.AST = classes.get(name, self._tree)
        self._functions = {}
        for node in ast.walk(self._tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._functions.setdefault(node.name, node.lineno)
        for node in ast.iter_child_nodes(self._top):  # the class's own come before others of the name
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._functions[node.name] = node.lineno

    def of(self, *functions: str) -> str:
        """Returns FILE:LINE of the first of these functions that is there, else of the class.

        "" without a file.
        """
        if not self.path:
            return ""
        there = [self._functions[name] for name in functions if name in self._functions]
        line = there[0] if there else getattr(self._top, "lineno", 1)
        return f"{self.path}:{line}"

    def at(self, line: int) -> str:
        return f"{self.path}:{line}"

    def left_out(self) -> Iterator[tuple[int, str, str]]:
        """Yields line, name and kind of what is public and no plain function, and so no tool."""
        seen: set[str] = set(RESERVED)
        for node in ast.iter_child_nodes(self._top):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                kinds, name = [_dotted(_called(each)) for each in node.decorator_list], node.name
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                kinds, name = [_dotted(_called(node.value))], node.targets[0].id
            else:
                continue
            kind = next((last for each in kinds if (last := each.rpartition(".")[2]) in NO_TOOLS), None)
            if kind and name not in seen and not name.startswith("_"):
                seen.add(name)
                yield node.lineno, name, kind

    def suspects(self) -> Iterator[Suspect]:
        """Yields the lines whose outcome may not repeat.

        They ask a clock, draw from unseeded chance, import what reaches a network, give an argument a default
        that calls can change, or keep in the state what a look computes.
        """
        for node in ast.walk(self._tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for default in (*node.args.defaults, *node.args.kw_defaults):
                    if default and _can_change(default):
                        yield self._suspect(default.lineno, "default")
                kinds = [_dotted(_called(each)).rpartition(".")[2] for each in node.decorator_list]
                if "cached_property" in kinds and "state" not in self._functions:
                    yield self._suspect(node.lineno, "cached")
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                if any(name.split(".")[0] in NETWORK for name in names):
                    yield self._suspect(node.lineno, "network")
            if not isinstance(node, ast.Call):
                continue
            dotted = _dotted(node.func)
            for kind, known in (("clock", CLOCK), ("chance", CHANCE)):
                ends = any(dotted == name or dotted.endswith(f".{name}") for name in known)
                seeded = dotted.endswith("default_rng") and bool(node.args or node.keywords)
                if ends and not seeded:
                    yield self._suspect(node.lineno, kind)
            if dotted.startswith("secrets."):
                yield self._suspect(node.lineno, "chance")
            if dotted == "random.Random" and not node.args:
                yield self._suspect(node.lineno, "chance")

    def _suspect(self, line: int, kind: str) -> Suspect:
        return Suspect(line, kind, self._text[line - 1].strip()[:100])


def _can_change(value: ast.AST) -> bool:
    """Tells whether a default is a list, a mapping or a set."""
    made = isinstance(value, ast.Call) and _dotted(value.func).rpartition(".")[2] in MADE
    return made or isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp))


def _called(node: ast.AST) -> ast.AST:
    """Returns what is called, where a node is a call, else the node."""
    return node.func if isinstance(node, ast.Call) else node


def _dotted(node: ast.AST) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([*([node.id] if isinstance(node, ast.Name) else []), *reversed(parts)])
