"""The engine's side of the process that runs an agent's code. It trusts nothing that the process sends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from typing import Any

CODE_SECONDS = 20.0  # of processor time for one piece of code, its calls included
WALL_SECONDS = 300.0  # by the clock: far later, for code that waits without computing
SOON = 0.05  # seconds: the least wait before the processor time is read again
MAX_MESSAGE = 1 << 22  # bytes that the process may send at once


class Ended(Exception):
    """The agent's process has ended or was killed. The message tells the agent in one sentence."""


class Interpreter:
    """The agent's process. Nothing that it sends is trusted."""

    def __init__(self, launcher: socket.socket, now: str, apis: list[tuple[str, str]]):
        self._socket, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(launcher, [b"+"], [theirs.fileno()])
        self._socket.settimeout(WALL_SECONDS)
        self._buffer = bytearray()
        (self._pid,) = self._read()
        apps: dict[str, list[str]] = {}
        for app, name in apis:
            apps.setdefault(app, []).append(name)
        self._write({"now": now, "apps": apps})

    def run(self, code: str, request: Any) -> tuple[str, bool]:
        """Runs code and answers its API calls with `request`. Returns its output and whether it failed.

        Raises Ended where the process takes too long, dies, or sends an invalid message.
        """
        try:
            spent, until = self._computed() + CODE_SECONDS, _clock() + WALL_SECONDS
            self._write({"code": code})
            while True:
                message = self._answer(spent, until)
                if "call" not in message:
                    return str(message["said"]), bool(message["error"])
                app, name, arguments = message["call"]
                self._write(request(str(app), str(name), dict(arguments)))
        except TimeoutError:
            why = f"Execution timed out after {CODE_SECONDS:g} seconds."
        except (OSError, EOFError):
            why = "The Python process has ended."
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            why = "The Python process has ended: it wrote what is no call."
        self._end()
        raise Ended(f"{why} All variables are lost.")

    def _answer(self, spent: float, until: float) -> Any:
        """Returns the next message of the process.

        TimeoutError where `_computed` reaches `spent`, or the clock `until`. The process has one thread and
        computes no faster than the clock: waiting for the time left cannot overshoot.
        """
        while (left := min(spent - self._computed(), until - _clock())) > 0:
            self._socket.settimeout(max(left, SOON))
            try:
                return self._read()
            except TimeoutError:
                continue
        raise TimeoutError

    def _computed(self) -> float:
        """Returns the processor time in seconds of the process and the engine, which performs its calls."""
        theirs = (~self._pid << 3) | 2  # the clock id of a process, as clock_getcpuclockid(3) computes it
        return time.clock_gettime(theirs) + time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._socket.close()

    def _read(self) -> Any:
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > MAX_MESSAGE:
                raise ValueError("too long")
            if not (chunk := self._socket.recv(1 << 16)):
                raise EOFError
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return json.loads(line)

    def _write(self, value: Any) -> None:
        self._socket.sendall(json.dumps(value).encode() + b"\n")


def _clock() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)  # AppWorld's engine freezes time.monotonic
