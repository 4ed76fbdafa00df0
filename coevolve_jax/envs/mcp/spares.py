"""Servers that wait for a world, since a start takes far longer than a call."""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict, deque

from coevolve_jax.envs.mcp.spec import Spec
from coevolve_jax.envs.mcp.world import World

SPARES = 2  # started servers that wait for the next world of the same kind
MOST_SPARES = 8  # of all kinds, in one process
MOST_IDLE = 64  # servers that have served a world and wait for another
RECENT = 16  # worlds among which a second one of a kind brings spares


class Spares:
    """The servers of this process that wait."""

    def __init__(self):
        self._waiting: OrderedDict[Spec, list[World]] = OrderedDict()
        self._recent: deque[Spec] = deque(maxlen=RECENT)

    def take(self, spec: Spec) -> World:
        """Returns a fresh world, whose server may still be starting.

        From the second world of a kind on, other servers are started behind it, unless they are reused.
        """
        kind = spec.kind
        waiting = self._waiting.pop(kind, [])
        world = waiting.pop(0) if waiting else World(spec)
        if spec.reuse_server:
            if world.begun:
                world = _restored(world, spec)
        elif kind in self._recent:
            waiting += [World(spec) for _ in range(SPARES - len(waiting))]
        self._recent.append(kind)
        self._keep(kind, waiting)
        return world

    def give(self, world: World) -> None:
        """Takes a world that is needed no more: its server is reused, if it may be, or ends."""
        if not world.spec.reuse_server or not world.can_be_restored or not _emptied(world):
            world.close()
            return
        kind = world.spec.kind
        self._keep(kind, [world, *self._waiting.pop(kind, [])])

    def _keep(self, kind: Spec, worlds: list[World]) -> None:
        """Lets these wait. Of too many, those go that were asked for longest ago."""
        if worlds:
            self._waiting[kind] = worlds
        alike = {k: w for k, w in self._waiting.items() if k.reuse_server == kind.reuse_server}
        most = MOST_IDLE if kind.reuse_server else MOST_SPARES
        while sum(map(len, alike.values())) > most:
            oldest = next(iter(alike))
            alike[oldest].pop().close()
            if not alike[oldest]:
                del alike[oldest], self._waiting[oldest]


def _emptied(world: World) -> bool:
    with contextlib.suppress(OSError, RecursionError):
        world.empty()
        return True
    return False


def _restored(world: World, spec: Spec) -> World:
    try:
        world.restore(spec)
        return world
    except (OSError, RecursionError):
        world.close()
        return World(spec)


spares = functools.cache(Spares)
