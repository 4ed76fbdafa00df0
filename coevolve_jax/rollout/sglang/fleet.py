"""Several servers as one: the choice of a server for each request, and the recovery of failed ones.

A server that fails gets no more requests from then on. It is probed, with growing pauses. A server that this
process launched is restarted where it is dead or silent. Before it serves again, it gets the newest weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Sequence

from absl import logging

from coevolve_jax.rollout.engine import EngineError
from coevolve_jax.rollout.sglang.server import Server

PROBES = 2  # unanswered probes after which a launched server counts as hanging
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0  # seconds between probes


class Fault(Exception):
    """A server did not do what it was asked. Another attempt or server may help. The message says why."""


class Slow(Fault):
    """A server did not answer in time."""


@dataclasses.dataclass(eq=False)
class Member:
    """A server of the fleet.

    process: its process, where this one launched it. conversation_ids: the conversations that it serves.
    served: requests that it has answered. restarts: how often it was restarted. serving: whether it gets
    requests. why: the reason why it gets none.
    """

    url: str
    process: Server | None = None
    conversation_ids: set[int] = dataclasses.field(default_factory=set)
    served: int = 0
    restarts: int = 0
    serving: bool = True
    why: str = ""


class Fleet:
    """The servers of one engine; all methods run on one event loop.

    Args:
      members: at least one.
      probe: raises Fault where a member is not healthy.
      refresh: brings a member to the newest weights where it has others; raises Fault.
      patience: seconds for which the engine waits while no server serves.
      restarts: how often a launched server may be restarted.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        probe: Callable[[Member], Awaitable[None]],
        refresh: Callable[[Member], Awaitable[None]],
        patience: float,
        restarts: int,
    ):
        self.members = list(members)
        self._probe, self._refresh = probe, refresh
        self._patience, self._restarts = patience, restarts
        self._changed = asyncio.Event()  # set, and replaced, when a server serves again or is lost
        self._recoveries: set[asyncio.Task] = set()
        self.awake = asyncio.Event()  # cleared while the learner has the servers' memory: none recovers then
        self.awake.set()

    @property
    def serving(self) -> list[Member]:
        return [m for m in self.members if m.serving]

    async def take(self, conversation_id: int) -> Member:
        """Returns the member that serves this conversation.

        It stays the same, so that each message finds the earlier ones in the server's cache. A new
        conversation, or one whose member is out, gets the member with the fewest conversations.
        Raises EngineError where none serves for `patience` seconds, or none ever will again.
        """
        member = next((m for m in self.members if conversation_id in m.conversation_ids), None)
        if member is None or not member.serving:
            self.release([conversation_id])
            member = await self._pick()
            member.conversation_ids.add(conversation_id)
        return member

    def knows(self, conversation_id: int) -> bool:
        """Says whether a member serves this conversation, or did until it was put out."""
        return any(conversation_id in m.conversation_ids for m in self.members)

    def release(self, conversation_ids: Iterable[int]) -> None:
        """Forgets these conversations."""
        for member in self.members:
            member.conversation_ids.difference_update(conversation_ids)

    async def _pick(self) -> Member:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience):
                while not (self.serving or self._lost):
                    await self._changed.wait()
        if not self.serving:
            raise EngineError(self._epitaph(self._lost))
        return min(self.serving, key=lambda m: (len(m.conversation_ids), m.served))

    @property
    def _lost(self) -> bool:
        """True where no server will ever serve again."""
        return all(m.process and m.restarts > self._restarts for m in self.members)

    def _epitaph(self, lost: bool) -> str:
        told = "; ".join(f"{m.url}: {m.why}" for m in self.members)
        if lost:
            return (
                f"Every SGLang server has died more than {self._restarts} times ({told}); see its log, and "
                "give it more memory or fewer requests (config.engine.max_concurrency)."
            )
        return (
            f"No SGLang server has answered for {self._patience:g} s ({told}); start it again, or name "
            "another in config.engine.url, and run the same command: it goes on from the last checkpoint."
        )

    def put_out(self, member: Member, why: str) -> None:
        """Sends this member no new requests until it is healthy and has the newest weights."""
        if member.serving:
            logging.warning("%s gets no requests until it is well: %s", member.url, why)
            member.serving, member.why = False, why
            task = asyncio.ensure_future(self._recover(member))
            self._recoveries.add(task)
            task.add_done_callback(self._recoveries.discard)

    def check_awake(self) -> None:
        """Raises Fault while the servers sleep."""
        if not self.awake.is_set():
            raise Fault("the servers sleep")

    async def _recover(self, member: Member) -> None:
        pause, unanswered = FIRST_PAUSE, 0
        while True:
            await self.awake.wait()
            try:
                if member.process and (not member.process.alive() or unanswered >= PROBES):
                    unanswered = 0
                    member.restarts += 1
                    if member.restarts > self._restarts:
                        break
                    await asyncio.to_thread(
                        member.process.restart, member.process.model_path, member.process.version
                    )
                unanswered += 1
                await self._probe(member)
                unanswered = 0
                await self._refresh(member)
                member.serving = True
                logging.warning("%s serves again.", member.url)
                break
            except Exception as fault:  # of any kind: the next attempt may succeed
                member.why = str(fault) or type(fault).__name__
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def close(self) -> None:
        for task in self._recoveries:
            task.cancel()
        for member in self.members:
            if member.process:
                await asyncio.to_thread(member.process.stop)
