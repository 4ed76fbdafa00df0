"""The client's side of the Model Context Protocol over pipes: newline-delimited JSON-RPC 2.0.

Nothing that a server sends is trusted. Each way to fail becomes one sentence (`Failed`).
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from coevolve_jax.envs.base import WAITS

VERSION = "2025-06-18"  # of the protocol; a server may answer with another one
MAX_SENT = 1 << 23  # bytes that a server may send until its answer is whole
MAX_PAGES = 100  # of the list of tools
KEPT = 2000  # bytes of the server's standard error, the last ones
WATCH = 0.25  # seconds between looks at what the server does while an answer is awaited, at least
LOOKS = 20  # times as long as a look takes: its processor time counts as the call's
FAR = 10  # times the timeout: longer than this no answer may take, however busy the machine is
NOT_OFFERED = {"code": -32601, "message": "This client offers nothing to servers."}


class Failed(Exception):
    """Raised where a server died, is silent or does what it may not. The message goes on from "it"."""


class Refused(Exception):
    """Raised where the server answers a request with an error."""


class Pipes(NamedTuple):
    """Our ends of a server's standard streams."""

    input: int
    output: int
    errors: int


class Client:
    """One server's connection.

    timeout: seconds that an answer may take. Those in which the server waits for a processor do not count.
    watch: called while an answer is awaited; raises Failed to stop waiting. code: called where the server has
    ended; returns its exit code, negative for a signal, or None where it is not known. starved: returns the
    seconds that the server has waited for a processor so far.
    """

    def __init__(
        self,
        pipes: Pipes,
        timeout: float,
        watch: Callable[[], None],
        code: Callable[[], int | None] = lambda: None,
        starved: Callable[[], float] = lambda: 0.0,
    ):
        self._pipes, self._timeout, self._watch, self._code = pipes, timeout, watch, code
        self._starved = starved
        self._other = ""  # the number of an answer to another request than the open one
        self._sent, self._unsent = 0, bytearray()
        self._buffer, self._searched, self._received = bytearray(), 0, 0
        self._errors, self._stray, self._watched, self._pause = bytearray(), b"", 0.0, WATCH
        self._read_from = [pipes.output, pipes.errors]
        for descriptor in pipes:
            os.set_blocking(descriptor, False)
        me = {"name": "coevolve_jax", "version": "1"}
        self._begun = self._send(
            "initialize", {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": me}
        )

    def begin(self) -> None:
        """Waits until the server has started."""
        self._answer(self._begun)
        self._post({"jsonrpc": "2.0", "method": "notifications/initialized"})

    def tools(self) -> list[Any]:
        """Returns the server's list of tools, all pages of it."""
        found, cursor = [], None
        for _ in range(MAX_PAGES):
            page = self.request("tools/list", {} if cursor is None else {"cursor": cursor})
            if not isinstance(page.get("tools"), list):
                raise Failed("answers tools/list without a list")
            found += page["tools"]
            cursor = page.get("nextCursor")
            if not cursor:  # some servers end with ""
                return found
        raise Failed(f"has more than {MAX_PAGES} pages of tools")

    def request(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """Returns the result of a request. Refused where the server answers with an error."""
        return self._answer(self._send(method, parameters))

    def close(self) -> None:
        for descriptor in self._pipes:
            os.close(descriptor)

    def _send(self, method: str, parameters: dict[str, Any]) -> int:
        self._sent += 1
        self._post({"jsonrpc": "2.0", "id": self._sent, "method": method, "params": parameters})
        return self._sent

    def _post(self, message: dict[str, Any]) -> None:
        self._unsent += json.dumps(message).encode() + b"\n"

    def _answer(self, number: int) -> dict[str, Any]:
        self._asked = self._watched = time.monotonic()
        self._starved_before: float | None = None  # as of the first look: short answers need none
        self._late, self._received, self._other = False, 0, ""
        WAITS.get()(FAR * self._timeout)
        while True:
            message = self._message()
            if "method" in message:
                if "id" in message:  # a request of the server's: sampling, roots, elicitation
                    reply = {"result": {}} if message["method"] == "ping" else {"error": NOT_OFFERED}
                    self._post({"jsonrpc": "2.0", "id": message["id"], **reply})
            elif _answers(message, number):
                if isinstance(error := message.get("error"), dict):
                    raise Refused(str(error.get("message", "")))
                if not isinstance(message.get("result"), dict):
                    raise Failed("answers without a result")
                return message["result"]
            elif message.get("id") is not None:
                self._other = f"{str(message['id'])[:40]}, not {number}"

    def _message(self) -> dict[str, Any]:
        """Returns the next JSON object. Other lines are no messages: some servers print."""
        while True:
            end = self._buffer.find(b"\n", self._searched)
            if end < 0:
                self._searched = len(self._buffer)
                self._exchange()
                continue
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._searched = 0
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if isinstance(message, dict):
                return message
            self._stray = line[:160] or self._stray

    def _left(self, now: float) -> float:
        """Returns the seconds that the answer may still take."""
        left = self._asked + self._timeout - now
        if left > 0 or self._starved_before is None:
            return left
        return left + min(self._starved() - self._starved_before, (FAR - 1) * self._timeout)

    def _exchange(self) -> None:
        """Waits until the pipes are ready, and reads and writes what they take."""
        now = time.monotonic()
        if (left := self._left(now)) <= 0:
            if self._late:
                self._watch()  # it may know why
                raise Failed(f"gave no answer within {self._timeout:g} s{self._told()}")
            self._late = True  # one look more: the answer may be there, and this process have been starved
        if now - self._watched >= self._pause:
            self._watched = now
            self._watch()
            if self._starved_before is None:
                self._starved_before = self._starved()
            self._pause = max(WATCH, LOOKS * (time.monotonic() - now))
        poll = select.poll()
        for descriptor in self._read_from:
            poll.register(descriptor, select.POLLIN)
        if self._unsent:
            poll.register(self._pipes.input, select.POLLOUT)
        ready = [descriptor for descriptor, _ in poll.poll(1000 * min(max(left, 0.0), self._pause))]
        if self._pipes.errors in ready:
            if not (said := _read(self._pipes.errors)):
                self._read_from.remove(self._pipes.errors)
            self._errors += said
            del self._errors[:-KEPT]
        if self._pipes.input in ready:
            try:
                del self._unsent[: os.write(self._pipes.input, self._unsent)]
            except BrokenPipeError:
                self._unsent.clear()  # what it said before it ended may still be there to read
        if self._pipes.output in ready:
            chunk = _read(self._pipes.output)
            if not chunk:
                self._errors += _read(self._pipes.errors)
                code = self._code()
                how = "" if not code else f" with code {code}" if code > 0 else f" by signal {-code}"
                raise Failed(f"ended{how}{self._told()}")
            self._buffer += chunk
            self._received += len(chunk)
            if self._received > MAX_SENT:
                raise Failed(f"sent more than {MAX_SENT >> 20} MiB at once")

    def _told(self) -> str:
        """Returns what the server said last that was no answer."""
        lines = bytes(self._errors).decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if last:
            return f" (its last words: {last[:160]})"
        if self._other:
            return f" (an answer came with the id {self._other})"
        stray = self._stray.decode(errors="replace")
        return f" (its last line that is no message: {stray!r})" if stray else ""


def _answers(message: dict[str, Any], number: int) -> bool:
    """Tells whether a message answers the open request, of which there is one.

    Some servers write its number as text. Of an error that comes before the number could be read it is null.
    """
    said = message.get("id")
    return str(said) == str(number) or (said is None and isinstance(message.get("error"), dict))


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""
