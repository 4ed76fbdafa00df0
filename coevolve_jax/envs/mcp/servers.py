"""Our side of the launcher process (launcher.py), which starts the servers of this process."""

from __future__ import annotations

import functools
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import coevolve_jax
from coevolve_jax.envs import lockdown
from coevolve_jax.envs.mcp.client import Pipes


class Launcher:
    """Our side of the launcher process (launcher.py). home: the folder that it deletes at its end."""

    def __init__(self):
        try:
            lockdown.check()
        except RuntimeError:
            raise ValueError(
                f"MCP servers are run on Linux only, which confines them; this is {sys.platform}."
            ) from None
        self.home = os.path.realpath(tempfile.mkdtemp(prefix="coevolve_mcp_"))
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        source = str(Path(coevolve_jax.__file__).resolve().parents[1])
        with theirs:
            subprocess.Popen(
                [sys.executable, "-P", "-m", "coevolve_jax.envs.mcp.launcher", self.home],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={"PYTHONPATH": source, "PATH": os.environ.get("PATH", os.defpath)},
                start_new_session=True,
            )

    def folder(self) -> str:
        """Makes a new folder. All names have the same length, as paths in answers then have too."""
        path = os.path.join(self.home, f"{next(self._numbers):08d}")
        os.mkdir(path)
        return path

    def start(self, server: Mapping[str, Any]) -> tuple[int, Pipes]:
        """Starts a server (see launcher.py). Returns its process id and our ends of its streams."""
        (theirs0, input), (output, theirs1), (errors, theirs2) = (os.pipe() for _ in range(3))
        theirs = [theirs0, theirs1, theirs2]
        pid = self._ask({"start": dict(server)}, theirs)
        for descriptor in theirs:
            os.close(descriptor)
        return pid, Pipes(input, output, errors)

    def code(self, pid: int) -> int | None:
        """Returns the exit code of a server that has ended; None where it runs."""
        return self._ask({"code": pid}, [])

    def end(self, pid: int) -> None:
        self._ask({"end": pid}, [])

    def _ask(self, request: Mapping[str, Any], descriptors: list[int]) -> Any:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            return json.loads(self._socket.recv(100))

    @functools.cached_property
    def frozen_clock(self) -> str:
        """The library that freezes clocks (freeze.c), compiled. ValueError where there is no compiler."""
        source, library = Path(__file__).with_name("freeze.c"), os.path.join(self.home, "freeze.so")
        command = ["cc", "-shared", "-fPIC", "-O1", "-o", library, str(source)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ValueError(
                f"A clock that stands still needs a C compiler, and cc failed ({error}): install gcc, or "
                "leave config.environment.freeze_time empty, which folder_tools cannot."
            ) from None
        return library


launcher = functools.cache(Launcher)
