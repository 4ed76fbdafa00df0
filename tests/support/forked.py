"""Starts programs without the seconds of their imports: forks a process that has imported them before.

That process, the zygote, has the environment of the starts and no JAX backend yet. Its starts equal fresh
ones, but they share Python's hash seed, and so the order of sets. A reference for a comparison bit by bit
must therefore come from a process of its own. Run as a program, this file is the zygote.
"""

import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # a zygote has no module of tests/ on its path
# A run of experiments/main.py imports these, at its start and later.
RUN = (
    "coevolve_jax.train",
    "coevolve_jax.explorers.scripted",
    "bfcl_eval",
    "scipy.stats",
    "tensorboardX",
    "transformers.models.auto.tokenization_auto",
)
OPTIMISES = "JAX_DISABLE_MOST_OPTIMIZATIONS"
LATE = (
    "XLA_FLAGS",
    "NPROC",
    OPTIMISES,
)  # variables that JAX reads when its backend starts: one zygote serves all their values


class Start:
    """subprocess.Popen for `python PROGRAM ARGUMENT...`; it keeps the output for `communicate`."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str], cwd: Path = ROOT):
        self.args, self.returncode = list(map(str, arguments)), None
        self._files = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self._told, theirs = socket.socketpair()
        with theirs:
            late = {name: env[name] for name in LATE if name in env}
            request = json.dumps([self.args, late, str(cwd)]).encode()
            files = [theirs.fileno(), *(file.fileno() for file in self._files)]
            channel, _ = _zygote(tuple(sorted((k, v) for k, v in env.items() if k not in LATE)))
            socket.send_fds(channel, [request], files)
        self.pid = self._next()

    def poll(self) -> int | None:
        return self._result(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._result(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        out, err = (file.seek(0) or file.read().decode() for file in self._files)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _result(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._told], [], [], timeout)[0]:
            self.returncode = self._next()
        return self.returncode

    def _next(self) -> int:
        told = self._told.recv(8)
        assert told, "The zygote is gone: its message stands above."
        return int.from_bytes(told, signed=True)


def run(arguments: Sequence[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    start = Start(arguments, env)
    try:
        out, err = start.communicate(600)
    finally:
        start.kill()
    return subprocess.CompletedProcess(start.args, start.wait(), out, err)


def run_after(
    statements: str, program: str, folder: Path, env: Mapping[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program of experiments/ after statements that replace a part of it, by a file in the folder."""
    path, first = str(ROOT / "experiments" / f"{program}.py"), folder / f"{program}_after.py"
    begin = f"import runpy, sys\nsys.argv[0] = {path!r}\n"
    first.write_text(f"{begin}{statements}\nrunpy.run_path({path!r}, run_name='__main__')\n")
    return run([str(first), *arguments], env)


@functools.cache
def _zygote(env: tuple[tuple[str, str], ...]) -> tuple[socket.socket, subprocess.Popen]:
    """Starts a zygote. It ends when this end of its socket closes, so at the latest with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        program = [sys.executable, __file__, str(theirs.fileno())]
        return ours, subprocess.Popen(program, env=dict(env), pass_fds=[theirs.fileno()])


def _serve(channel: socket.socket) -> None:
    del sys.path[0]  # this folder
    for module in RUN:
        importlib.import_module(module)
    gc.freeze()  # starts need not search (and so copy) the imported objects
    gc.set_threshold(20_000, 20, 20)  # as in conftest.py
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps ended starts; nobody waits for them here
    while True:
        request, files, _, _ = socket.recv_fds(channel, 2**16, 3)
        if not request:
            return
        if os.fork() == 0:
            channel.close()
            return _start(*json.loads(request), *files)
        for file in files:
            os.close(file)


def _start(arguments: list[str], late: dict[str, str], cwd: str, told: int, out: int, err: int) -> None:
    """Sends the start's process id and, when it has ended, its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        os.write(told, pid.to_bytes(8))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(told, code.to_bytes(8, signed=True))
        os._exit(0)
    os.close(told)
    os.dup2(out, 1)
    os.dup2(err, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where Ctrl-C is ignored
    os.environ.update(late)
    if OPTIMISES in late:  # JAX read this when it was imported
        sys.modules["jax"].config.update(OPTIMISES.lower(), late[OPTIMISES] == "1")
    os.chdir(cwd)
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
