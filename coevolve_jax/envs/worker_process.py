"""The parent's side of one worker: a child process under the family's interpreter, asked over pipes."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import IO

import coevolve_jax
from coevolve_jax import names, shipped
from coevolve_jax.envs.base import UNDER_WAY, allowance

KEPT = 1 << 16  # bytes of a worker's standard error, the last ones; they are shown where it dies
START_SECONDS = 120.0  # a worker imports its packages in 0.3 s on an idle core


# The limit of a call is its worker's processor time. By the clock it may take WALL_FACTOR times as long, and
# WALL_SECONDS more: this catches calls that wait without computing, and spares workers on a busy machine.
# Each time that it waits for a server (base.WAITS), it has that wait's own limit besides.
WALL_FACTOR, WALL_SECONDS = 10.0, 60.0


class Lost(Exception):
    """The worker hangs or is dead. The message becomes the reason in the world's outcome.

    settled: True where the op has used up its processor time, so that another attempt is useless. False where
    the machine may be to blame.
    """

    def __init__(self, reason: str, settled: bool = False):
        super().__init__(reason)
        self.settled = settled


class Gone(Exception):
    """The worker, or its machine, was dead before anything was asked. No call is to blame: ask again."""


class _Said:
    """Reads a worker's standard error, so that it never waits for a reader, and keeps the end of it."""

    def __init__(self, pipe: IO[bytes]):
        self._pipe, self._end = pipe, bytearray()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with self._pipe:
            while said := os.read(self._pipe.fileno(), KEPT):
                self._end += said
                del self._end[:-KEPT]

    def show(self) -> str:
        """Writes what a dead worker said last to this process's standard error.

        Returns what it was about, ", in ...", where it has said that. Its children may hold the pipe open.
        """
        self._thread.join(1.0)
        text = bytes(self._end).decode(errors="replace")
        self._end.clear()
        sys.stderr.write(re.sub(f"{UNDER_WAY}.*\n", "", text))
        under_way = re.findall(f"{UNDER_WAY}(.*)\n", text)
        return f", in {under_way[-1]}" if under_way and under_way[-1] else ""


class WorkerProcess:
    """A child process that can be restarted.

    live: ids of the worlds that it holds. busy: seconds that callers have waited for its answers.
    restarts: how often it was restarted. timeout: seconds of processor time that an op may take.
    """

    def __init__(self, family: str, python: str, timeout: float, memory_gib: float, worlds: bool = True):
        """memory_gib: address space, 0 for no limit. worlds: whether it will hold worlds, and so warms up.

        ValueError where the interpreter or the family does not exist.
        """
        self.family, self.python = family, python or sys.executable
        self.timeout, self.memory_gib, self.worlds = timeout, memory_gib, worlds
        self.lock = threading.Lock()
        self.busy, self.restarts = 0.0, 0
        self._environ, folder = _environ(family, python)
        if folder:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.start()

    def start(self) -> None:
        self.live: set[int] = set()
        self._buffer = bytearray()
        self._ready = False
        arguments = [self.family, str(self.memory_gib), *(["warm"] if self.worlds else [])]
        # exec, never fork alone: the parent has threads. Its own session keeps Ctrl-C away from the worker.
        try:
            self.process = subprocess.Popen(
                [self.python, "-P", "-m", "coevolve_jax.envs.worker", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=self._environ,
                start_new_session=True,
            )
        except OSError as error:
            raise ValueError(
                f"config.environment.python is {self.python!r}, which cannot be started ({error.strerror}): "
                f"name the Python interpreter that has the packages of the environment {self.family!r}"
                f"{shipped.made_by(self.family)}."
            ) from None
        assert self.process.stdin and self.process.stdout and self.process.stderr  # they are pipes
        self._said = _Said(self.process.stderr)
        self._questions, self._answers = self.process.stdin, self.process.stdout
        self._poll = select.poll()
        self._poll.register(self._answers, select.POLLIN)

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """Ends the process and what its tools have started in its group."""
        if self.process.returncode is None:  # its id is not another process's yet
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self._questions.close()
        self._answers.close()

    def restart(self) -> None:
        self.kill()
        self.restarts += 1
        self.start()

    def wait_until_ready(self) -> None:
        """Waits for the worker's imports. RuntimeError where it does not start."""
        if self._ready:
            return
        try:
            self._read_line(START_SECONDS)
            self._ready = True
        except Lost as lost:
            raise RuntimeError(
                f"A worker of the environment {self.family!r} did not start ({lost}): its own message stands "
                f"above, most often a package that the environment needs is not installed for {self.python}."
            ) from None

    def request(self, env_id: int, ops: Sequence[str], scale: float = 1.0) -> Iterator[list]:
        """Yields the answer to each op (JSON text).

        Raises Lost where an op takes more than its `allowance` of scale * timeout seconds of processor time,
        or far longer by the clock, or where the process ends in it. Raises Gone where the process had ended
        before.
        """
        if self.process.poll() is not None:
            raise Gone(f"the worker process ended with code {self.process.returncode}")
        seconds = scale * self.timeout
        wall_seconds = WALL_FACTOR * seconds + WALL_SECONDS
        try:
            data = memoryview(f"[{env_id},{seconds},{wall_seconds},[{','.join(ops)}]]\n".encode())
            while data:
                data = data[self._questions.write(data) :]
        except BrokenPipeError:
            raise Lost(self._death()) from None
        for op in ops:
            times = allowance(op.split('"', 2)[1], seconds)
            most = times * wall_seconds
            try:
                while (reply := json.loads(self._read_line(most)))[0] == "waits":
                    most = times * wall_seconds + reply[1]
                yield reply
            except Lost as lost:
                spent = self.process.poll() == -signal.SIGPROF
                reason = f"timeout: more than {times * seconds:g} s of processor time" if spent else str(lost)
                raise Lost(f"{reason} in {op[:120]}", settled=spent) from None

    def _death(self) -> str:
        """Says how the process ended, and shows its last words."""
        return f"crash: the worker process ended with code {self.process.wait()}{self._said.show()}"

    def _read_line(self, wall_seconds: float) -> bytes:
        deadline = time.monotonic() + wall_seconds
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if not self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise Lost(f"timeout: no answer within {wall_seconds:g} s by the clock")
            chunk = os.read(self._answers.fileno(), 1 << 20)
            if not chunk:
                raise Lost(self._death())
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line


def _environ(family: str, python: str) -> tuple[dict[str, str], str]:
    """Returns the environment variables of a worker, and a folder to delete after it ("" for none).

    They let the worker find this package and the family from any folder, order sets alike in every process,
    and start no accelerator and no threads. Another interpreter sees only links to these two packages: the
    other packages of this interpreter may have the wrong versions for it.
    """
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    sources = [pathlib.Path(coevolve_jax.__file__).resolve().parent, names.root(names.path("envs", family))]
    if python:
        folder = tempfile.mkdtemp(prefix="coevolve_worker_")
        for source in dict.fromkeys(sources):
            os.symlink(source, os.path.join(folder, source.name))
        paths = [folder]
        env.pop("PYTHONHOME", None)
    else:
        folder = ""
        paths = [*dict.fromkeys(str(s.parent) for s in sources), env.get("PYTHONPATH")]
    path = os.pathsep.join(p for p in paths if p)
    fixed = {"PYTHONPATH": path, "PYTHONHASHSEED": "0", "TZ": "UTC", "OPENBLAS_NUM_THREADS": "1"}
    return {**env, **fixed}, folder
