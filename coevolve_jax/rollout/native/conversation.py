"""What the in-process engine knows of a conversation."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from coevolve_jax.rollout.engine import Request

if TYPE_CHECKING:
    from coevolve_jax.rollout.native.grammar import Answer

NOWHERE = -1  # the row of a conversation that has none


@dataclasses.dataclass
class Conversation:
    """What is known of a conversation.

    ids: int32, all its tokens. prompt: those that it came with but the last; ids begin with them. request: what it is
    answering, or has answered last. row: of the cache; where that is of pages, the row of this tick. cached: how many of the
    ids have their keys there. part, pages: where they lie (`page_store.py`).
    logprobs, versions: of the tokens sampled since. routing: of the first ids, int16 [n, A, K], where it was recorded with
    weights that there are no more, or in pages that it has lost.
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
        """Keeps the keys of the tokens that the request's ids begin with, of all but the last at most."""
        known = min(self.cached, len(request.ids) - 1)
        other = np.flatnonzero(self.ids[:known] != request.ids[:known])
        self.cached = int(other[0]) if len(other) else known
        if self.cached < len(self.prompt):
            self.prompt = request.ids[:-1]
        self.request, self.ids, self.answered = request, request.ids, False
        self.logprobs, self.versions, self.routing, self.answer = [], [], None, None

    @property
    def left(self) -> int:
        """Tokens that the request's budget still allows."""
        return len(self.request.ids) + self.request.sampling.max_new_tokens - len(self.ids)

    @property
    def finish(self) -> str:
        """Completion.finish, or "" where its message goes on."""
        if self.answer and self.answer.failure:
            return "abort"
        if len(self.ids) > len(self.request.ids) and self.ids[-1] in self.request.sampling.stop_ids:
            return "stop"
        return "" if self.left > 0 else "length"

    def remember(self, experts: np.ndarray) -> None:
        """Takes the experts of its tokens in the cache, int16 [cached, A, K], where it does not know them yet."""
        known = experts[:0] if self.routing is None else self.routing
        self.routing = np.concatenate([known, experts[len(known) :]])

    def extend(self, ids: np.ndarray, logprobs: np.ndarray, version: int) -> None:
        """Takes what was sampled; the last one's keys are not cached yet."""
        self.ids = np.concatenate([self.ids, ids])
        self.cached = len(self.ids) - 1
        self.logprobs.append(logprobs)
        self.versions.append(np.full(len(ids), version, np.int32))
