"""Demonstrations: tasks in the train split's scenarios, acted out in BFCL's real environment."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from coevolve_jax import envs
from coevolve_jax.envs import bfcl
from coevolve_jax.envs.bfcl.toolsets import TOOLSETS
from coevolve_jax.explorers import scripted
from coevolve_jax.explorers.base import Limits as TaskLimits
from coevolve_jax.rollout.agent import Agent, Job, Limits
from coevolve_jax.rollout.chat import Chat
from coevolve_jax.rollout.engine import Completion, Request
from coevolve_jax.synthesis.explore import unguided
from coevolve_jax.synthesis.pipeline import synthesize
from coevolve_jax.types import Task, Trajectory

DEMO_TOOLSETS = ("GorillaFileSystem", "MessageAPI", "TicketAPI", "TwitterAPI")
OTHER_TOOLSETS = tuple(t for t in TOOLSETS if t not in DEMO_TOOLSETS)
DEMO_SHARE = 0.9  # of the tasks; the other four classes share the rest


def make_tasks(pool, count: int, rng: np.random.Generator) -> list[Task]:
    """Validated tasks in scenarios of the train split, from unguided exploration; one or two tool classes on offer."""
    roles = scripted.make(None, envs.load("bfcl"))
    scenarios = {t: [s for s in bfcl.scenarios("train") if t in s.scenario["toolsets"]] for t in TOOLSETS}
    tasks: dict[str, Task] = {}
    contexts_made = 0
    with tqdm(total=count, desc="tasks", unit="task") as bar:
        while len(tasks) < count:
            contexts = []
            for _ in range(64):
                toolset = str(rng.choice(DEMO_TOOLSETS if rng.random() < DEMO_SHARE else OTHER_TOOLSETS))
                scenario = _offer(scenarios[toolset], toolset, rng)
                contexts.append(unguided(scenario, f"pretrain-{contexts_made}"))
                contexts_made += 1
            verdicts = synthesize(
                roles,
                bfcl.tools,
                pool,
                contexts,
                TaskLimits(proposals=4),
                rounds=2,
                steps=10,
                rng=rng,
                kind="initial",
                first_id=5 * contexts_made,
            ).verdicts
            before = len(tasks)
            for task in (v.task for v in verdicts if v.task is not None):
                tasks.setdefault(
                    json.dumps([task.scenario["toolsets"], [c.to_json() for c in task.calls]]), task
                )
            bar.update(min(len(tasks), count) - before)
    return list(tasks.values())[:count]


def _offer(among: Sequence[Task], toolset: str, rng: np.random.Generator) -> Task:
    """One of these scenarios that offers a tool class, alone or with another one of the scenario's."""
    drawn = among[int(rng.integers(len(among)))]
    offered = {toolset, str(rng.choice(drawn.scenario["toolsets"]))} if rng.random() < 0.3 else {toolset}
    kept = [t for t in drawn.scenario["toolsets"] if t in offered]
    return dataclasses.replace(drawn, scenario={**drawn.scenario, "toolsets": kept})


class DemonstrationEngine:
    """Plays scripts through the agent loop: the n-th session says the n-th script. Not a policy."""

    batches = True

    def __init__(self, chat: Chat, scripts: Sequence[Sequence[str]], encode):
        self._lines = [[encode(m) + list(chat.stop_ids) for m in s] for s in scripts]
        self._said = [0] * len(scripts)

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        out = []
        for r in requests:
            ids = np.asarray(self._lines[r.session][self._said[r.session]], np.int32)
            self._said[r.session] += 1
            finish = "stop" if len(ids) <= r.sampling.max_new_tokens else "length"
            out.append(Completion(ids, np.zeros(len(ids), np.float32), finish, np.zeros(len(ids), np.int32)))
        return out

    def update_weights(self, params, version: int) -> None:
        raise NotImplementedError("A demonstrator has no weights.")

    def release(self, sessions: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass


def demonstrate(
    tokenizer, pool, tasks: Sequence[Task], scripts: Sequence[Sequence[str]], limits: Limits
) -> list[Trajectory]:
    """The scripts acted out in the real environment, through the agent loop that RL uses."""
    chat = Chat(tokenizer)
    engine = DemonstrationEngine(chat, scripts, lambda m: tokenizer.encode(m, add_special_tokens=False))
    agent = Agent(engine, chat, pool, bfcl.tools, limits, concurrency=256)
    return agent.rollouts([Job(task, 0, 0) for task in tasks], temperature=1.0)
