"""Re-exploration: an explorer acts in the real environment under contexts, for R rounds of S steps.

Every round starts in a fresh environment of the context's scenario. So any sequence of calls within a round
can be replayed from the scenario's initial state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from coevolve_jax.envs.base import EnvPool
from coevolve_jax.explorers.base import Episode, Exploration, Explorer
from coevolve_jax.types import Context, Task, Triplet

Tools = Callable[[Task], list[dict]]  # task -> function schemas of the tools that the environment offers


def spawn(rng: np.random.Generator, count: int) -> list[np.random.Generator]:
    """Makes independent generators that depend on the state of `rng` alone, unlike Generator.spawn."""
    return [np.random.default_rng(int(seed)) for seed in rng.integers(2**63, size=count)]


def offered_names(tools: Sequence[dict]) -> frozenset[str]:
    return frozenset(t["function"]["name"] for t in tools)


def unguided(scenario: Task, id: str) -> Context:
    """The context of exploration without a signal, for D_0 and the random strategy."""
    return Context(id, None, scenario, "Free exploration of the scenario.")


def explore(
    explorer: Explorer,
    tools: Tools,
    env_pool: EnvPool,
    contexts: Sequence[Context],
    *,
    rounds: int,
    steps: int,
    rng: np.random.Generator,
) -> list[Exploration]:
    """Explores all contexts in lockstep: one `act` and one batch of the environment pool per step.

    Returns at most rounds * steps triplets for each context. A call that destroys its environment, whoever is
    to blame, ends its round and leaves no triplet. A call to a tool that is not offered ends the round
    unexecuted.
    """
    rngs = spawn(rng, len(contexts))
    offered = [tools(c.task) for c in contexts]
    names = [offered_names(t) for t in offered]
    triplets: list[list[Triplet]] = [[] for _ in contexts]
    for round in range(rounds):
        env_ids = env_pool.reset([c.task for c in contexts])
        histories: list[list[Triplet]] = [[] for _ in contexts]
        active = list(range(len(contexts)))
        for _ in range(steps):
            options = env_pool.options([env_ids[i] for i in active])
            episodes = [
                Episode(contexts[i], offered[i], tuple(histories[i]), round, rngs[i], now)
                for i, now in zip(active, options)
            ]
            chosen = zip(active, explorer.act(episodes), strict=True)
            calls = {i: call for i, call in chosen if call is not None and call.name in names[i]}
            if not calls:
                break
            answers = env_pool.step([env_ids[i] for i in calls], [[call] for call in calls.values()])
            active = [i for i, (o,) in zip(calls, answers) if o.valid and not o.fatal]
            for i, (observation,) in zip(calls, answers):
                if i in active:
                    index = len(triplets[i]) + len(histories[i])
                    histories[i].append(Triplet(index, round, calls[i], observation))
        env_pool.close(env_ids)
        for collected, history in zip(triplets, histories):
            collected.extend(history)
    return [
        Exploration(context, given, tuple(found), again)
        for context, given, found, again in zip(contexts, offered, triplets, spawn(rng, len(contexts)))
    ]
