"""The in-process engine's record of a conversation."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from coevolve_jax.rollout.engine import Request

if TYPE_CHECKING:
    from coevolve_jax.rollout.native.grammar import Answer

NOWHERE = -1  # marks a conversation without a row


@dataclasses.dataclass
class Conversation:
    """The record of a conversation.

    request: the request that it answers, or has answered last. ids: int32, all its tokens.
    prompt: the tokens that it came with, without the last; ids begin with them.
    row: its row of the cache; in a cache of pages, its row in this tick.
    cached: the number of ids whose keys are in the cache.
    part, pages: where these keys lie, in a cache of pages (`page_store.py`).
    answered: whether the request has its answer. logprobs, versions: of the tokens sampled for the request.
    routing: int16 [n, A, K], the experts of the first n ids. It is saved when the answer ends, new weights
        come, or its pages are lost.
    answer: the state of an answer to a schema.
    """

    request: Request
    ids: np.ndarray
    prompt: np.ndarray
    row: int = NOWHERE
    cached: int = 0
    part: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    answered: bool = False
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    versions: list[np.ndarray] = dataclasses.field(default_factory=list)
    routing: np.ndarray | None = None
    answer: Answer | None = None

    @classmethod
    def new(cls, request: Request) -> Conversation:
        return cls(request, request.ids, request.ids[:-1])

    def begin(self, request: Request) -> None:
        """Begins a new request. Keeps the keys of the common prefix, but never that of the last id."""
        known = min(self.cached, len(request.ids) - 1)
        other = np.flatnonzero(self.ids[:known] != request.ids[:known])
        self.cached = int(other[0]) if len(other) else known
        if self.cached < len(self.prompt):
            self.prompt = request.ids[:-1]
        self.request, self.ids, self.answered = request, request.ids, False
        self.logprobs, self.versions, self.routing, self.answer = [], [], None, None

    @property
    def left(self) -> int:
        """The number of tokens that the request's budget still allows."""
        return len(self.request.ids) + self.request.sampling.max_new_tokens - len(self.ids)

    @property
    def finish(self) -> str:
        """Completion.finish, or "" where the message goes on."""
        if self.answer and self.answer.failure:
            return "abort"
        if len(self.ids) > len(self.request.ids) and self.ids[-1] in self.request.sampling.stop_ids:
            return "stop"
        return "" if self.left > 0 else "length"

    def remember(self, experts: np.ndarray) -> None:
        """Saves the experts of its tokens in the cache, int16 [cached, A, K]. Known ones stay as they are."""
        known = experts[:0] if self.routing is None else self.routing
        self.routing = np.concatenate([known, experts[len(known) :]])

    def extend(self, ids: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Appends sampled tokens. The keys of the last one are not cached yet."""
        self.ids = np.concatenate([self.ids, ids])
        self.cached = len(self.ids) - 1
        self.logprobs.append(logprobs)
        self.versions.append(np.full(len(ids), version, np.int32))
