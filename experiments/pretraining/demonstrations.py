"""Demonstrations: scripts acted out in an environment family's real environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from coevolve_jax.rollout.agent import Agent
from coevolve_jax.rollout.chat import Chat
from coevolve_jax.rollout.limits import Limits
from coevolve_jax.rollout.reference_engine import ReferenceEngine
from coevolve_jax.types import Hint, Task, Trajectory


def demonstrate(
    tokenizer,
    pool,
    tools: Callable[[Task], list[dict]],
    tasks: Sequence[Task],
    scripts: Sequence[Sequence[str]],
    limits: Limits,
    hints: Mapping[str, Hint] | None = None,
) -> list[Trajectory]:
    """Acts the scripts out in the real environment, through the agent loop that RL uses.

    hints: task id -> the hint that its demonstration is given.
    """
    help = lambda task, rollout_index: (hints or {}).get(task.id)
    chat = Chat(tokenizer)
    encode = lambda message: [*tokenizer.encode(message, add_special_tokens=False), chat.stop_ids[0]]
    engine = ReferenceEngine([[encode(message) for message in script] for script in scripts])
    agent = Agent(engine, chat, pool, tools, limits, concurrency=256)
    groups = agent.rollout_groups(tasks, [[n] for n in range(len(tasks))], 1.0, help)
    return [group.trajectories[0] for group in groups]
