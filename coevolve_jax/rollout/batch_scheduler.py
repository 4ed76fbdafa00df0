"""Decides when an engine that serves batches is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from coevolve_jax.rollout.engine import Completion, Request


class BatchScheduler:
    """Asks an engine that serves batches as soon as every open conversation waits for it.

    A batch then holds the same requests however long the environment takes. Equal runs give equal bits.
    """

    def __init__(
        self, advance: Callable[[Sequence[Request]], Awaitable[Sequence[Completion | None]]], slots: int
    ):
        """advance: `Engine.advance`, or `generate` of an engine without it. slots: open conversations."""
        self._advance, self._slots = advance, slots
        self._waiting: list[tuple[Request, asyncio.Future]] = []
        self._serving: asyncio.Task | None = None

    async def ask(self, request: Request) -> Completion:
        """Returns the completion of a request, which may take several batches."""
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        self._start_if_complete()
        return await answer

    def done(self) -> None:
        """Gives up the slot of an ended conversation that no other takes: the rest would wait for it."""
        self._slots -= 1
        self._start_if_complete()

    def _start_if_complete(self) -> None:
        if self._waiting and len(self._waiting) == self._slots:
            # Sort by conversation: the order of arrival depends on the environment's speed.
            round = sorted(self._waiting, key=lambda asked: asked[0].conversation_id)
            self._waiting = []
            self._serving = asyncio.ensure_future(self._serve(round))

    async def _serve(self, round: Sequence[tuple[Request, asyncio.Future]]) -> None:
        try:
            completions = await self._advance([request for request, _ in round])
            answered = list(zip(round, completions, strict=True))
        except BaseException as error:  # all that wait must get the error, a cancellation included
            for _, answer in round:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (request, answer), completion in answered:
            if answer.done():  # it was cancelled
                continue
            if completion is None:  # incomplete: the same request goes into the next batch
                self._waiting.append((request, answer))
            else:
                answer.set_result(completion)
        self._start_if_complete()
