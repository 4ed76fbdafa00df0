"""Measures how busy the engine and the environment's workers are while rollouts run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from coevolve_jax.envs.base import EnvPool


class Usage(NamedTuple):
    """The usage of engine and workers.

    utilization: shares from 0 to 1, the first two averaged over the time in which rollouts ran. "engine":
    requests in flight, of the most allowed. "workers": busy workers of the environment. "cached": prompt
    tokens that the engine had in its cache, where it reports them.
    counts: the engine's own (Engine.counts).
    """

    utilization: dict[str, float]
    counts: Counter[str]


class UsageMeter:
    """Adds up how long engine and workers are busy while rollouts run. Several threads may use it at once."""

    def __init__(self, pool: EnvPool):
        self._pool, self._lock = pool, threading.Lock()
        self._calls = self._requests = 0  # running now
        self._seconds = self._asked = self._acted = 0.0
        self._last = time.perf_counter(), pool.busy

    @contextlib.contextmanager
    def of(self, *, calls: int = 0, requests: int = 0) -> Iterator[None]:
        """Counts calls and requests as running while its body runs."""
        self._count(calls, requests)
        try:
            yield
        finally:
            self._count(-calls, -requests)

    def take(self) -> tuple[float, float, float]:
        """Returns seconds in which rollouts ran, request seconds and worker seconds, since the last call."""
        self._count()
        with self._lock:
            taken = max(self._seconds, 1e-9), self._asked, self._acted
            self._seconds = self._asked = self._acted = 0.0
        return taken

    def _count(self, calls: int = 0, requests: int = 0) -> None:
        with self._lock:
            (then, acted), self._last = self._last, (time.perf_counter(), self._pool.busy)
            if self._calls:
                self._seconds += self._last[0] - then
                self._acted += self._last[1] - acted
                self._asked += self._requests * (self._last[0] - then)
            self._calls, self._requests = self._calls + calls, self._requests + requests
