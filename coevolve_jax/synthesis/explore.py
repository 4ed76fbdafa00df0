"""Re-exploration: an explorer acts in the real environment under a context, R rounds of S steps.

Every round starts from a fresh session of the context's scenario, so that any
sequence of calls within a round replays from the scenario's initial state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from coevolve_jax.envs.base import EnvPool
from coevolve_jax.types import Call, Context, Task, Triplet


class Actor(Protocol):
    def tools(self, task: Task) -> list[dict]:
        """The tools that the environment offers in this task; nothing else is ever executed."""

    def act(
        self,
        context: Context,
        tools: Sequence[dict],
        history: Sequence[Triplet],
        round: int,
        rng: np.random.Generator,
    ) -> Call | None:
        """The next call of this round, whose steps so far are `history`; None ends the round."""


def spawn(rng: np.random.Generator, count: int) -> list[np.random.Generator]:
    """Independent generators, a function of the state of `rng` alone (unlike Generator.spawn)."""
    return [np.random.default_rng(int(seed)) for seed in rng.integers(2**63, size=count)]


def explore(
    explorer: Actor, pool: EnvPool, context: Context, *, rounds: int, steps: int, rng: np.random.Generator
) -> list[Triplet]:
    """Explores one context; see `explore_all`."""
    return explore_all(explorer, pool, [context], rounds=rounds, steps=steps, rng=rng)[0]


def explore_all(
    explorer: Actor,
    pool: EnvPool,
    contexts: Sequence[Context],
    *,
    rounds: int,
    steps: int,
    rng: np.random.Generator,
) -> list[list[Triplet]]:
    """Explores all contexts in lockstep: one `pool.step` per step, whatever their number.

    Returns the triplets of each context, at most rounds * steps, indexed from
    0. A session whose infrastructure fails ends its round and leaves no
    triplet for the failed step. A call to a tool that is not offered ends the round likewise.
    """
    rngs = spawn(rng, len(contexts))
    offered = [explorer.tools(c.task) for c in contexts]
    names = [frozenset(t["function"]["name"] for t in tools) for tools in offered]
    triplets: list[list[Triplet]] = [[] for _ in contexts]
    for round in range(rounds):
        sessions = pool.reset([c.task for c in contexts])
        histories: list[list[Triplet]] = [[] for _ in contexts]
        active = list(range(len(contexts)))
        for _ in range(steps):
            calls = {i: explorer.act(contexts[i], offered[i], histories[i], round, rngs[i]) for i in active}
            active = [i for i in active if calls[i] is not None and calls[i].name in names[i]]
            if not active:
                break
            answers = pool.step([sessions[i] for i in active], [[calls[i]] for i in active])
            for i, (observation,) in zip(active, answers):
                if observation.valid:
                    index = len(triplets[i]) + len(histories[i])
                    histories[i].append(Triplet(index, round, calls[i], observation))
            active = [i for i, (observation,) in zip(active, answers) if observation.valid]
        pool.close(sessions)
        for collected, history in zip(triplets, histories):
            collected.extend(history)
    return triplets
