"""The description of a server and its world, as it stands in a task's scenario."""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from typing import Any

from coevolve_jax import shipped

WORLD, HERE = "{world}", "{here}"  # in the command: the world's folder, and the one where the run starts
SHOWN = "/world"  # what agents read in its place, since every world has a folder of its own
OWN = "coevolve.json"  # the file of a template that no world gets (templates.py)


@dataclasses.dataclass(frozen=True)
class Spec:
    """A server and its world.

    Attributes:
      command: the command line, with {world} for the world's folder and {here} for the one where the run
        starts. Assignments of variables may precede the program (NAME=VALUE).
      template: the folder of which each world is a copy.
      tools: names of the tools that agents may use; () is all.
      ignore: patterns of paths that are no part of the state.
      reuse_server: whether a server serves one world after the other; only for one that remembers nothing.
      network: whether the server may open sockets.
      freeze_time: the time that its clocks show, such as "2026-01-01T00:00:00"; "" lets them run.
      server_timeout: seconds that it may take to start or to answer. Time without a processor is not counted.
      server_memory: GiB of data of one process. server_disk: MiB of the world's folder.
    """

    command: str
    template: str
    tools: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    reuse_server: bool = False
    network: bool = False
    freeze_time: str = ""
    server_timeout: float = 20.0
    server_memory: float = 2.0
    server_disk: float = 256.0

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Spec:
        """Reads a scenario, or the section config.environment: other keys are not looked at."""
        names = [field.name for field in dataclasses.fields(cls) if field.name in found]
        named: dict[str, Any] = {name: found[name] for name in names}
        for lists in named.keys() & {"tools", "ignore"}:  # a flag without quotes gives one text: "a,b"
            named[lists] = tuple(one for text in named[lists] for one in text.split(","))
        return cls(**named)

    def scenario(self) -> dict[str, Any]:
        """Returns the JSON values of a scenario. Values that are the default are left out."""
        told = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                told[field.name] = list(value) if isinstance(value, tuple) else value
        return told

    @property
    def kind(self) -> Spec:
        """The worlds that a server which waits may serve: those of one template, or of all."""
        return dataclasses.replace(self, template="") if self.reuse_server else self

    def check(self) -> None:
        """Raises ValueError, in one sentence, for a command or a time that cannot be read."""
        self.seconds()
        self.words("")

    def seconds(self) -> int | None:
        """Returns freeze_time in seconds since 1970, or None. ValueError where it is no time."""
        if not self.freeze_time:
            return None
        try:
            found = datetime.datetime.fromisoformat(self.freeze_time)
        except ValueError:
            raise ValueError(
                f"config.environment.freeze_time is {self.freeze_time!r}: it must be a time such as "
                "2026-01-01T00:00:00, or empty."
            ) from None
        return int((found if found.tzinfo else found.replace(tzinfo=datetime.UTC)).timestamp())

    def words(self, world: str) -> tuple[list[str], dict[str, str]]:
        """Returns the program with its arguments, and the variables assigned before it.

        world: the path that replaces {world}. A word that names a file from here becomes its full path, since
        the server starts in its world's folder. The program is looked up beside this interpreter and on the
        PATH. ValueError where there is no such program.
        """
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            raise ValueError(f"config.environment.command is {self.command!r}: {error}.") from None
        variables = {}
        while words and re.match(r"[A-Za-z_]\w*=", words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = _located(value, world)
        path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
        program = shutil.which(words[0], path=path) if words else None
        if program is None:
            wrong = f"there is no program {words[0]!r}" if words else "it names no program"
            made = shipped.made_by(words[0]) if words else ""
            raise ValueError(
                f"config.environment.command is {self.command!r}, and {wrong} beside {sys.executable} or on "
                f"the PATH: install the server, and give its path{made}."
            )
        rest = [os.path.abspath(word) if os.path.isfile(word) else word for word in words[1:]]
        return [os.path.abspath(program), *(_located(word, world) for word in rest)], variables


def _located(word: str, world: str) -> str:
    return word.replace(WORLD, world).replace(HERE, os.getcwd())
