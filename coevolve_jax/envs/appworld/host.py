"""The processes of AppWorld's worlds: its engine holds one world at a time, so each has its own process."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from coevolve_jax.envs import lockdown
from coevolve_jax.envs.appworld import data
from coevolve_jax.envs.appworld.engine import Engine
from coevolve_jax.envs.appworld.sandbox import Channel
from coevolve_jax.envs.base import digest

TEMPLATES = 4  # tasks whose initial world a worker keeps in memory
HANGS = 120.0  # seconds of processor time after which a request has hung
WALL_HANGS = 1200.0  # seconds by the clock, in case nobody waits for the request any more


class Host:
    """A worker's state for its worlds: AppWorld's imports, a launcher of interpreters, an output folder.

    The launcher deletes the folder when all processes that could ask it have ended, in whatever way.
    """

    def __init__(self):
        self._outputs = tempfile.mkdtemp(prefix="coevolve_appworld_")
        self.launcher, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The process that runs agents' code must hold no secrets: it gets no other environment variables.
        environ = {k: os.environ[k] for k in ("PYTHONPATH", "PYTHONHASHSEED", "TZ") if k in os.environ}
        command = [sys.executable, "-P", "-m", "coevolve_jax.envs.appworld.sandbox", self._outputs]
        with theirs:
            subprocess.Popen(command, stdin=theirs.fileno(), env=environ, start_new_session=True)

        _import_apps()
        self._rehearsed = False
        self._templates: dict[str, Template] = {}

    def outputs(self, task_id: str) -> str:
        """Returns the folder under which AppWorld finds the data of a task."""
        home = data.root(task_id) / "data"
        folder = os.path.join(self._outputs, digest(str(home))[:8])
        if not os.path.exists(folder):
            os.mkdir(folder)
            os.symlink(home, os.path.join(folder, "data"))
        return folder

    def open(self, task_id: str) -> Engine:
        return Engine(task_id, self.outputs(task_id), self.launcher)

    def template(self, task_id: str) -> Template:
        if task_id not in self._templates:
            if (
                not self._rehearsed
            ):  # opening and closing a world here fills caches, which the forked templates inherit
                self.open(task_id).close()
                gc.freeze()
                self._rehearsed = True
            while len(self._templates) >= TEMPLATES:
                self._templates.pop(next(iter(self._templates))).close()
            self._templates[task_id] = Template(task_id)
        return self._templates[task_id]


host = functools.cache(Host)


def _import_apps() -> None:
    """Imports AppWorld and its apps, which takes 3 s. Processes forked from here inherit the imports."""
    gc.disable()  # with the collector on, the imports take 5 s
    warnings.simplefilter("ignore")  # AppWorld's packages warn about each other
    import appworld.environment  # noqa: F401
    from appworld.apps import get_all_apps
    from appworld.common.utils import import_apis_module, import_models_module
    from appworld.requester import _get_api_name_to_doc

    for app in get_all_apps():
        import_models_module(app)
        import_apis_module(app)
        _get_api_name_to_doc(app, include_private_apis=True)
    gc.enable()


class Template:
    """A forked process that holds a task's initial world. It forks the worlds, and ends with the worker.

    It takes 0.15 s to make, each world 0.03 s.
    """

    def __init__(self, task_id: str):
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if not self._pid:
            _run(_serve_forks, task_id, theirs)
        theirs.close()

    def close(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self.requests.close()


class World:
    """An Engine in a process of its own. `ask` calls its methods by name."""

    def __init__(self, task_id: str):
        """Forks the world of a task. ValueError for an unknown task of AppWorld."""
        data.specs(task_id)
        self._socket, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(host().template(task_id).requests, [b"+"], [theirs.fileno()])
        self._channel = Channel(self._socket.fileno())

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the engine. RuntimeError where the engine fails: its own message stands above."""
        try:
            self._channel.write([method, *arguments])
            return self._channel.read()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"AppWorld's engine has ended in {method}") from error

    def close(self) -> None:
        self._socket.close()  # the world's process ends when nobody can ask it any more


def _serve_forks(task_id: str, requests: socket.socket) -> None:
    lockdown.die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    kept = {0, 1, 2, requests.fileno(), host().launcher.fileno()}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor not in kept:  # inherited sockets would keep other worlds alive
            with contextlib.suppress(OSError):
                os.close(descriptor)
    engine = host().open(task_id)
    engine.pause()
    while (received := socket.recv_fds(requests, 1, 1))[0]:
        (descriptor,) = received[1]
        if not os.fork():
            requests.close()
            _run(_serve, engine, descriptor)
        os.close(descriptor)


def _serve(engine: Engine, descriptor: int) -> None:
    engine.resume()
    channel = Channel(descriptor)
    while True:
        _limit(0, 0)
        try:
            method, *arguments = channel.read()
        except EOFError:
            return
        _limit(HANGS, WALL_HANGS)
        channel.write(getattr(engine, method)(*arguments))


def _limit(processor_seconds: float, wall_seconds: float) -> None:
    """Sets the timers whose default action ends the process; 0 disables them."""
    signal.setitimer(signal.ITIMER_PROF, processor_seconds)
    signal.setitimer(signal.ITIMER_REAL, wall_seconds)


def _run(serve: Callable[..., None], *arguments: Any) -> NoReturn:
    """Runs `serve` in a forked process, then exits without the parent's clean-up."""
    try:
        serve(*arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
