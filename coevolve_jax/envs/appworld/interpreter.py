"""The process that runs an agent's code, as the engine sees it: nothing that comes from there is believed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from typing import Any

CODE_SECONDS = 20.0  # of processor time for one piece of code, its calls included
WALL_SECONDS = 300.0  # by the clock: far behind, for code that waits without computing
SOON = 0.05  # seconds
MAX_MESSAGE = 1 << 22  # bytes of what it may send at once


class Ended(Exception):
    """The agent's process has ended, or was ended: in one sentence for the agent."""


class Interpreter:
    """The agent's process, as the engine sees it: nothing that comes from there is believed."""

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
        """Ended: it took too long, died, or wrote what it should not."""
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
        """Returns what the process writes next. TimeoutError where `_computed` reaches `spent`, or the clock `until`. It has one thread, so
        that it cannot compute faster than the clock goes."""
        while (left := min(spent - self._computed(), until - _clock())) > 0:
            self._socket.settimeout(max(left, SOON))
            try:
                return self._read()
            except TimeoutError:
                continue
        raise TimeoutError

    def _computed(self) -> float:
        """Seconds of processor time that it and the engine, which performs its calls, have computed."""
        theirs = (~self._pid << 3) | 2  # the clock of a process, as clock_getcpuclockid(3) makes it
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
    return time.clock_gettime(time.CLOCK_MONOTONIC)  # time.monotonic is frozen with the rest
