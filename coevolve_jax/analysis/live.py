"""Serves a report on this machine. It is written again whenever the files that it shows have changed."""

from __future__ import annotations

import http.server
import pathlib
import re
import sys
import threading
import urllib.parse
from collections.abc import Callable

# Files that may be requested: a report, its data, and the reports of a comparison's cells that it links to.
# A cell's folder may have any name (comparison.plan.Cell), but for those that lead elsewhere.
_FILE = re.compile(r"/((?:cells/(?!\.\.?/)[^/]+/seed_\d+/)?(?:report\.html|report_data/part_\d+\.js))")
_SHOWN = ("*.json", "*.jsonl", "trajectories/*.jsonl", "cells/*/*/summary.json",
          "cells/*/*/failure.json", "cells/*/*/report.html", "final/*.json",
          "versions/*/runs/*/metrics.jsonl")  # fmt: skip


def serve(folder: pathlib.Path, write: Callable[[], pathlib.Path], port: int) -> None:
    """Serves the page that `write` writes in `folder` until it is interrupted.

    Raises ValueError where the port is taken.
    """
    try:
        with server(folder, write, port) as found:
            sys.stdout.write(
                f"http://127.0.0.1:{found.server_address[1]}/ follows the run; Ctrl-C ends it.\n"
            )
            sys.stdout.flush()
            found.serve_forever()
    except (OSError, OverflowError) as error:  # the port is taken, or is no port
        raise ValueError(f"Port {port} cannot be served ({error}): choose another one with --port.") from None


def server(
    folder: pathlib.Path, write: Callable[[], pathlib.Path], port: int
) -> http.server.ThreadingHTTPServer:
    """Makes a server on 127.0.0.1. The caller runs and closes it. port: 0 for any free one."""
    lock, written = threading.Lock(), {}

    def page() -> tuple[str, bytes]:
        """Returns the state of the files and the page. Writes the page if the state has changed."""
        with lock:
            state = _state(folder)
            if written.get("state") != state:
                written.update(page=write().read_bytes(), state=state)
            return written["state"], written["page"]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            host = self.headers.get("Host", "").rpartition(":")[0]
            file = _FILE.fullmatch(urllib.parse.unquote(self.path))
            if host not in (
                "127.0.0.1",
                "localhost",
            ):  # refuse a foreign site that points its own name at this server (DNS rebinding)
                self.send_error(403)
            elif self.path == "/":
                try:
                    state, text = page()
                except (OSError, ValueError) as error:
                    self.send_error(503, explain=str(error))
                    return
                if self.headers.get("If-None-Match") == state:
                    self._answer(304, b"", state)
                else:
                    self._answer(200, text, state, "text/html; charset=utf-8")
            elif file and (folder / file[1]).is_file():
                kind = "text/html; charset=utf-8" if file[1].endswith("html") else "text/javascript"
                self._answer(200, (folder / file[1]).read_bytes(), "", kind)
            else:
                self.send_error(404)

        def _answer(self, status: int, body: bytes, state: str, kind: str = "") -> None:
            self.send_response(status)
            self.send_header("Cache-Control", "no-cache")
            for name, value in (("ETag", state), ("Content-Type", kind)):
                if value:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format, *args):
            pass

    return http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)


def _state(folder: pathlib.Path) -> str:
    """An ETag that changes when a file that the page shows does."""
    files = sorted(path for pattern in _SHOWN for path in folder.glob(pattern))
    return f'"{hash(tuple((str(path), *_stamp(path)) for path in files)):x}"'


def _stamp(path: pathlib.Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except FileNotFoundError:  # the run is replacing it
        return 0, 0
    return found.st_mtime_ns, found.st_size
