"""How busy the engine and the environment's workers are while rollouts run, and the engine's counts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from coevolve_jax.envs.base import EnvPool

SLOW = 0.01  # share of messages; the user is told if retries of slow messages exceed it


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


def serving(counts: Mapping[str, float]) -> dict[str, float]:
    """The counts of Engine.counts that the engine has, for metrics.jsonl and summary.json.

    queue_seconds is the mean per message. paused_seconds counts pauses during rollouts, so only if they run
    ahead.
    """
    told = {n: counts[n] for n in ("prefill_tokens", "decode_tokens", "paused_seconds") if n in counts}
    if counts.get("messages"):
        told |= {n: counts.get(n, 0) for n in ("messages", "slow_retries")}
    if counts.get("queued"):
        told["queue_seconds"] = counts["queue_seconds"] / counts["queued"]
    return told


def slow_note(told: Mapping[str, float]) -> str:
    """A sentence if more than SLOW of the messages were resampled for taking too long; else "".

    told: from `serving`.
    """
    retries, messages = told.get("slow_retries", 0), told.get("messages", 0)
    if retries <= SLOW * messages:
        return ""
    return (
        f"serving: {retries:g} slow messages were sampled anew, for {messages:g} asked for, "
        f"more than {SLOW:.0%}: this "
        "favours short messages; raise config.engine.timeout, or lower config.engine.max_concurrency."
    )
