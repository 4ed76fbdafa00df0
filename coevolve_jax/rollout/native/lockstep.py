"""The in-process engine over the devices of several processes: each has one, and all make the same calls.

An engine's calls alone determine what it does, and each of its programs runs on all processes' devices. So
the leader publishes its calls, like the learner's (loop/leader.py), and each process's engine executes them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from coevolve_jax.rollout.engine import Completion, EngineError, Request, Sampling
from coevolve_jax.rollout.native.engine import NativeEngine

# The least number of tokens to send. More are padded to a power of two: every size is a program to compile.
SMALLEST = 4096


class Calls(Protocol):
    """The calls that all processes make. `loop.leader.Leader` has them."""

    def tick(
        self,
        new: list[dict],
        prompts: tuple[np.ndarray] | None,
        conversation_ids: list[int],
        released: list[int],
    ) -> list[Completion | None]: ...

    def serve(self, served: Any, version: int) -> None: ...


class Lockstep:
    """One process's engine, with the requests that it must answer."""

    def __init__(self, engine: NativeEngine):
        self.engine = engine
        self._requests: dict[int, Request] = {}  # by conversation

    def tick(
        self,
        new: list[dict],
        prompts: tuple[np.ndarray] | None,
        conversation_ids: list[int],
        released: list[int],
    ) -> list[Completion | None]:
        """Runs one tick of the engine.

        new: requests without their ids. Each replaces the last request of its conversation.
        prompts: int32, the ids of the new requests, joined and padded; None without new ones.
        conversation_ids: the conversations to serve, in order. released: conversations that have ended.
        """
        if released:
            self.engine.release(released)
            for conversation_id in released:
                self._requests.pop(conversation_id, None)
        start = 0
        for told in new:
            assert prompts is not None
            end = start + told["length"]
            self._requests[told["conversation_id"]] = _request(told, np.array(prompts[0][start:end]))
            start = end
        return self.engine.tick([self._requests[i] for i in conversation_ids]) if conversation_ids else []


class LockstepEngine:
    """The leader's `Engine`: each call becomes one of all processes. engine: the leader's own."""

    batches = True

    def __init__(self, calls: Calls, engine: NativeEngine):
        self._calls, self._engine = calls, engine
        self.constrains = engine.constrains
        self.counts: Counter[str] = engine.counts
        self._turn = asyncio.Lock()  # held by the call that is served
        self._lock = threading.Lock()  # guards the three attributes below, and orders published calls
        self._known: dict[int, Request] = {}  # conversation_id -> request that all processes know
        self._released: list[int] = []  # conversations to release with the next tick
        self._closed = False

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Generates (see `Engine`), one call at a time: two would keep evicting each other's cache."""
        done: dict[int, Completion] = {}
        async with self._turn:
            while waiting := [i for i in range(len(requests)) if i not in done]:
                answers = await self._one_tick([requests[i] for i in waiting])
                done |= {i: c for i, c in zip(waiting, answers, strict=True) if c}
        return [done[i] for i in range(len(requests))]

    async def advance(self, requests: Sequence[Request]) -> list[Completion | None]:
        """Runs one tick of every process's engine (see `Engine`)."""
        async with self._turn:
            return await self._one_tick(requests)

    async def _one_tick(self, requests: Sequence[Request]) -> list[Completion | None]:
        self._engine.check(requests)
        return await asyncio.to_thread(self._advance, requests)

    def _advance(self, requests: Sequence[Request]) -> list[Completion | None]:
        with self._lock:
            if self._closed:  # a late call of a cancelled thread; the other processes may be gone
                raise EngineError("The engine is closed.")
            new = [r for r in requests if self._known.get(r.conversation_id) is not r]
            self._known |= {r.conversation_id: r for r in new}
            prompts = (_padded(np.concatenate([r.ids for r in new])),) if new else None
            released, self._released = self._released, []
            return self._calls.tick(
                [_told(r) for r in new], prompts, [r.conversation_id for r in requests], released
            )

    def update_weights(self, params: Any, version: int) -> None:
        self._calls.serve(params, version)

    def release(self, conversation_ids: Sequence[int]) -> None:
        """Releases with the next tick, or at once after the last conversation, to free the memory."""
        with self._lock:
            self._released += conversation_ids
            for conversation_id in conversation_ids:
                self._known.pop(conversation_id, None)
            if not self._known and self._released:
                released, self._released = self._released, []
                self._calls.tick([], None, [], released)

    def close(self) -> None:
        """Waits for the running tick. None runs afterwards."""
        with self._lock:
            self._closed = True
        self._engine.close()


def _told(r: Request) -> dict:
    """Returns a request as JSON, without its ids."""
    return {
        "conversation_id": r.conversation_id,
        "length": len(r.ids),
        "sampling": dataclasses.asdict(r.sampling),
        "seed": r.seed,
    }


def _request(told: Mapping[str, Any], ids: np.ndarray) -> Request:
    sampling = told["sampling"]
    stop_ids = tuple(sampling["stop_ids"])
    return Request(told["conversation_id"], ids, Sampling(**{**sampling, "stop_ids": stop_ids}), told["seed"])


def _padded(ids: np.ndarray) -> np.ndarray:
    size = max(SMALLEST, 1 << (len(ids) - 1).bit_length())
    return np.pad(ids.astype(np.int32), (0, size - len(ids)))
