"""An engine that replays known messages: tasks' own solutions, acted out in the environment by the agent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from coevolve_jax.rollout.chat import Chat
from coevolve_jax.rollout.engine import Completion, Request
from coevolve_jax.types import Task

Messages = Sequence[Sequence[int]]  # the ids of one conversation's assistant messages, stop ids included


def solution(task: Task, chat: Chat, end: Sequence[int]) -> Messages:
    """Returns a task's reference calls as messages, one per call, and `end` at the end of each user turn."""
    return [ids for turn in task.turns for ids in (*(chat.message([c]) for c in turn.calls), list(end))]


class ReferenceEngine:
    """Answers the requests of one conversation with messages[seed], one after the other.

    A message longer than `max_new_tokens` is cut, as a sampled one is. A conversation that asks for more
    messages than there are is aborted. Log-probabilities are zeros: nothing is sampled.
    """

    batches = False
    constrains = False

    def __init__(self, messages: Sequence[Messages]):
        """messages: by `Request.seed`, so each conversation needs a seed of its own."""
        self._messages, self._given = messages, Counter[int]()

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [self._next(r) for r in requests]

    def _next(self, request: Request) -> Completion:
        messages, given = self._messages[request.seed], self._given[request.conversation_id]
        self._given[request.conversation_id] += 1
        if given == len(messages):
            return _completion((), "abort", "the solution has no further message")
        ids, room = messages[given], request.sampling.max_new_tokens
        return _completion(ids[:room], "stop" if len(ids) <= room else "length")

    def update_weights(self, params: Any, version: int) -> None:
        raise NotImplementedError("Replayed messages come from no weights.")

    def release(self, conversation_ids: Sequence[int]) -> None:
        for conversation_id in conversation_ids:
            self._given.pop(conversation_id, None)

    def close(self) -> None:
        pass


def _completion(ids: Sequence[int], finish: str, reason: str = "") -> Completion:
    zeros = np.zeros(len(ids))
    return Completion(
        np.asarray(ids, np.int32), zeros.astype(np.float32), finish, zeros.astype(np.int32), reason
    )
