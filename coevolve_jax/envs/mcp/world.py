"""A world: a copy of a template folder, and a server process of its own that works on it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
from collections.abc import Collection, Mapping
from typing import Any

from coevolve_jax.envs.mcp import answers, state
from coevolve_jax.envs.mcp.client import Client, Failed, Refused
from coevolve_jax.envs.mcp.launcher import delete
from coevolve_jax.envs.mcp.servers import launcher
from coevolve_jax.envs.mcp.spec import OWN, SHOWN, Spec
from coevolve_jax.types import Observation

MAX_PROCESSES = 64  # of one server
_SHOWN = re.compile(rf"(?<![\w./:-]){SHOWN}(?![\w.-])")


class World:
    """A copy of spec.template with a server. The server starts at once; `begin` waits for it."""

    def __init__(self, spec: Spec):
        """ValueError where the template or the program is not there."""
        self.spec, self._base = spec, launcher().folder()
        self.folder, self.home = (os.path.join(self._base, name) for name in ("world", "home"))
        self.begun, self._lost, self._closed = False, False, False  # begun: whether the server has started
        for folder in (self.folder, self.home):
            os.mkdir(folder)
        try:
            self._copy()
        except OSError as error:
            told = f"The template {spec.template} cannot be copied: {str(error)[:200]}."
            raise ValueError(told) from None
        argv, variables = spec.words(self.folder)
        server = {
            "argv": argv,
            "env": {**_environ(spec, self.home, argv[0]), **variables},
            "folder": self.folder,
            "writable": [self.folder, self.home],
            "network": spec.network,
            "memory": int(spec.server_memory * 2**30),
            "disk": int(spec.server_disk * 2**20),
        }
        self._pid, pipes = launcher().start(server)
        self._processes = frozenset([self._pid])
        code = lambda: launcher().code(self._pid)
        starved = lambda: _starved(self._processes)
        self._client = Client(pipes, spec.server_timeout, self._watch, code, starved)

    def begin(self) -> None:
        """Waits until the server has started. Failed where it does not."""
        if self.begun:
            return
        try:
            self._client.begin()
        except Refused as refused:
            raise Failed(f"refuses to start: {refused}") from None
        self.begun, self._processes = True, _processes(self._pid)

    def empty(self) -> None:
        """Deletes all files, so that no other world's server finds them. OSError where it cannot."""
        for folder in (self.folder, self.home):
            for entry in os.scandir(folder):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry)

    def restore(self, spec: Spec) -> None:
        """Makes this a fresh world of another template, or of the same one, with the server that runs.

        OSError where its files cannot be deleted, or where the server makes new ones meanwhile.
        """
        self.empty()
        self.spec = spec
        self._copy()

    @property
    def can_be_restored(self) -> bool:
        """Whether the server runs, and nothing that a call has started besides."""
        return self.begun and not self._lost and not self._closed and _processes(self._pid) == self._processes

    def _copy(self) -> None:
        target = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            _copy(self.spec.template, target, {OWN})
        finally:
            os.close(target)

    def tools(self) -> list[dict]:
        """Returns the tools on offer as function schemas. Failed, or answers.Unfit, where there are none."""
        try:
            return answers.schemas(self._client.tools(), self.spec.tools)
        except Refused as refused:
            raise Failed(f"does not list its tools: {refused}") from None

    def call(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        """Calls a tool. Failed where the server is lost in it, or does what it may not."""
        parameters = {"name": name, "arguments": self._located(dict(arguments))}
        try:
            result = self._client.request("tools/call", parameters)
            self._watch()
        except Refused as refused:
            return answers.error(self._shown(str(refused)))
        except Failed as failed:
            self._lost = True
            raise Failed(self._shown(str(failed))) from None
        told = answers.observation(result)
        return Observation(self._shown(told.text), told.error)

    def state(self) -> dict[str, str]:
        """Returns the content of the folder (state.py), as far as it counts."""
        return state.content(self.folder, self.spec.ignore)

    def close(self) -> None:
        """Ends the server and deletes the folder. Closing once more does nothing."""
        if self._closed:
            return
        self._closed = True
        launcher().end(self._pid)
        self._client.close()
        delete(self._base)

    def _shown(self, text: str) -> str:
        """Puts paths that are alike in all worlds for those of this one."""
        return text.replace(self.folder, SHOWN).replace(self._base, "")

    def _located(self, value: Any) -> Any:
        """Puts the folder's real path for the one that agents read."""
        if isinstance(value, str):
            return _SHOWN.sub(lambda _: self.folder, value)
        if isinstance(value, list):
            return [self._located(part) for part in value]
        return {k: self._located(v) for k, v in value.items()} if isinstance(value, dict) else value

    def _check_size(self) -> None:
        for folder in (self.folder, self.home):
            try:
                state.size(folder, self.spec.server_disk)
            except state.TooLarge as error:
                raise Failed(f"has made a folder that {error}") from None

    def _watch(self) -> None:
        self._check_size()
        if (count := len(_processes(self._pid))) > MAX_PROCESSES:
            raise Failed(f"runs {count} processes, and {MAX_PROCESSES} are allowed")


def _copy(source: str, target: int, left_out: Collection[str] = ()) -> None:
    """Copies what is in a folder into another one, an open file, in which a server may be at work.

    It follows no link that the server puts there. OSError where a name is taken, or a file is no plain one.
    """
    for entry in list(os.scandir(source)):
        if entry.name in left_out:
            continue
        told = entry.stat(follow_symlinks=False)
        if entry.is_symlink():
            os.symlink(os.readlink(entry), entry.name, dir_fd=target)
            continue
        if entry.is_dir():
            os.mkdir(entry.name, dir_fd=target)
            made = os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=target)
        elif entry.is_file():
            made = os.open(entry.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, dir_fd=target)
        else:
            raise OSError(f"{entry.path} is neither a file nor a folder nor a link")
        try:
            if entry.is_dir():
                _copy(entry.path, made)
            else:
                with open(entry.path, "rb") as file, open(made, "wb", closefd=False) as copy:
                    shutil.copyfileobj(file, copy)
            os.fchmod(made, stat.S_IMODE(told.st_mode))
            os.utime(made, ns=(told.st_atime_ns, told.st_mtime_ns))
        finally:
            os.close(made)


def _environ(spec: Spec, home: str, program: str) -> dict[str, str]:
    """Returns the environment variables of a server: none of the user's, which may hold secrets."""
    path = os.pathsep.join((os.path.dirname(program), os.environ.get("PATH", os.defpath)))
    found = {
        "PATH": path,
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",  # files that nobody asked for would be part of the state
    }
    if (seconds := spec.seconds()) is not None:
        found |= {"LD_PRELOAD": launcher().frozen_clock, "COEVOLVE_NOW": str(seconds)}
    return found


def _processes(group: int) -> frozenset[int]:
    """Returns the ids of the processes of a group."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[2]) == group:
                    found.add(int(name))
    return frozenset(found)


def _starved(processes: Collection[int]) -> float:
    """Returns the seconds that the threads of these processes have waited for a processor, all together.

    Linux counts them in /proc/PID/task/TID/schedstat. Where it does not they are 0.
    """
    waited = 0
    for process in processes:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task"):
                with contextlib.suppress(OSError), open(f"/proc/{process}/task/{thread}/schedstat") as file:
                    waited += int(file.read().split()[1])
    return waited / 1e9


_LISTED: dict[Spec, list[dict]] = {}


def listed(spec: Spec, world: World | None = None) -> list[dict]:
    """Returns the tools of a server. What it lists when this process first asks it counts from then on.

    world: one that has begun, to ask; None: another is started for that. Failed where it does not start,
    answers.Unfit where its tools cannot be offered.
    """
    if spec not in _LISTED:
        asked = world or World(spec)
        try:
            if world is None:
                asked.begin()
            _LISTED[spec] = asked.tools()
        finally:
            if world is None:
                asked.close()
    return _LISTED[spec]
