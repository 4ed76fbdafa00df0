"""Demonstrations: scripts acted out in an environment family's real environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from coevolve_jax.rollout.agent import Agent
from coevolve_jax.rollout.chat import Chat
from coevolve_jax.rollout.engine import Completion, Request
from coevolve_jax.rollout.limits import Limits
from coevolve_jax.types import Task, Trajectory


class DemonstrationEngine:
    """Plays scripts through the agent loop, in place of a policy: conversation n says script n."""

    batches = True
    constrains = False

    def __init__(self, chat: Chat, scripts: Sequence[Sequence[str]], encode):
        self._lines = [[encode(m) + [chat.stop_ids[0]] for m in s] for s in scripts]
        self._said = [0] * len(scripts)

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        out = []
        for r in requests:
            ids = np.asarray(self._lines[r.conversation_id][self._said[r.conversation_id]], np.int32)
            self._said[r.conversation_id] += 1
            finish = "stop" if len(ids) <= r.sampling.max_new_tokens else "length"
            out.append(Completion(ids, np.zeros(len(ids), np.float32), finish, np.zeros(len(ids), np.int32)))
        return out

    def update_weights(self, params, version: int) -> None:
        raise NotImplementedError("A demonstrator has no weights.")

    def release(self, conversation_ids: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass


def demonstrate(
    tokenizer,
    pool,
    tools: Callable[[Task], list[dict]],
    tasks: Sequence[Task],
    scripts: Sequence[Sequence[str]],
    limits: Limits,
) -> list[Trajectory]:
    """Acts the scripts out in the real environment, through the agent loop that RL uses."""
    chat = Chat(tokenizer)
    engine = DemonstrationEngine(chat, scripts, lambda m: tokenizer.encode(m, add_special_tokens=False))
    agent = Agent(engine, chat, pool, tools, limits, concurrency=256)
    groups = agent.rollout_groups(tasks, [[0]] * len(tasks), temperature=1.0)
    return [group.trajectories[0] for group in groups]
