"""Durations that do not depend on what else the machine does."""

import os
import time
from pathlib import Path


class Stopwatch:
    """Seconds since its creation, less the time that this process and its children waited for a core.

    The kernel keeps the waiting time per thread. On a quiet machine the result is the wall time.
    """

    def __init__(self):
        self._waited, self._start = _waited(), time.monotonic()

    @property
    def seconds(self) -> float:
        wall = time.monotonic() - self._start
        return wall - sum(s - self._waited.get(thread, 0.0) for thread, s in _waited().items())


def _waited() -> dict[str, float]:
    """Seconds on a run queue since its start, for each thread of this process and its children."""
    children = [
        child for task in Path("/proc/self/task").iterdir() for child in _read(task / "children").split()
    ]
    threads = [t for pid in [os.getpid(), *children] for t in Path(f"/proc/{pid}/task").glob("*")]
    told = {thread.name: _read(thread / "schedstat").split() for thread in threads}
    return {name: int(words[1]) / 1e9 for name, words in told.items() if words}


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return ""


def cpu_seconds(pid: int) -> float:
    """CPU time of a process in seconds, in steps of 10 ms."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
