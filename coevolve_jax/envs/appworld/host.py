"""What a worker keeps for its worlds, and the process that each world is: AppWorld's engine holds one world at a time."""

from __future__ import annotations

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
from typing import Any

from coevolve_jax.envs.appworld import data, lockdown
from coevolve_jax.envs.appworld.engine import Engine
from coevolve_jax.envs.appworld.sandbox import Channel
from coevolve_jax.envs.base import digest


class Host:
    """What a worker keeps for its worlds: AppWorld imported, a launcher of interpreters, a folder for what AppWorld writes,
    which the launcher deletes once all processes that hold it have ended, however they did."""

    def __init__(self):
        self._outputs = tempfile.mkdtemp(prefix="coevolve_appworld_")
        self.launcher, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # No secret may be in the memory of what runs agents' code: nothing of this process's environment.
        environ = {k: os.environ[k] for k in ("PYTHONPATH", "PYTHONHASHSEED", "TZ") if k in os.environ}
        command = [sys.executable, "-P", "-m", "coevolve_jax.envs.appworld.sandbox", self._outputs]
        with theirs:
            subprocess.Popen(command, stdin=theirs.fileno(), env=environ, start_new_session=True)

        _import_apps()
        self._rehearsed = False

    def outputs(self, task_id: str) -> str:
        """The folder under which AppWorld finds the data of a task."""
        home = data.root(task_id) / "data"
        folder = os.path.join(self._outputs, digest(str(home))[:8])
        if not os.path.exists(folder):
            os.mkdir(folder)
            os.symlink(home, os.path.join(folder, "data"))
        return folder

    def open(self, task_id: str) -> Engine:
        return Engine(task_id, self.outputs(task_id), self.launcher)

    def rehearse(self, task_id: str) -> None:
        """Once: a world that is opened and closed here. It fills caches that forked processes then have."""
        if not self._rehearsed:
            self.open(task_id).close()
            gc.freeze()
            self._rehearsed = True


host = functools.cache(Host)


def _import_apps() -> None:
    """Imports AppWorld and its apps: 3 s, which the processes that are forked from here do not take again."""
    gc.disable()  # 5 s otherwise
    warnings.simplefilter("ignore")  # of its packages on each other
    import appworld.environment  # noqa: F401
    from appworld.apps import get_all_apps
    from appworld.common.utils import import_apis_module, import_models_module
    from appworld.requester import _get_api_name_to_doc

    for app in get_all_apps():
        import_models_module(app)
        import_apis_module(app)
        _get_api_name_to_doc(app, include_private_apis=True)
    gc.enable()


class Process:
    """An Engine in a forked process, asked by its methods' names."""

    def __init__(self, task_id: str):
        host().rehearse(task_id)
        self._socket, theirs = socket.socketpair()
        self._pid = os.fork()
        if not self._pid:
            try:
                _serve(task_id, theirs)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        theirs.close()
        self._channel = Channel(self._socket.fileno())

    def ask(self, method: str, *arguments: Any) -> Any:
        """RuntimeError where the engine fails: its own message stands above."""
        try:
            self._channel.write([method, *arguments])
            return self._channel.read()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"AppWorld's engine has ended in {method}") from error

    def close(self) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._socket.close()


def _serve(task_id: str, questions: socket.socket) -> None:
    lockdown.die_with_parent(signal.SIGKILL)
    engine, channel = host().open(task_id), Channel(questions.fileno())
    while True:
        method, *arguments = channel.read()
        channel.write(getattr(engine, method)(*arguments))
