"""Demonstrations: tasks whose reference calls the agent of RL makes in the real environment."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict
from tqdm import tqdm

from coevolve_jax import build
from coevolve_jax.build import Policy
from coevolve_jax.envs.base import canonical
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.loop.initial import (
    EVALUATION_SCENARIO,
    explore,
    held_out_tasks,
    leak_guard,
    read_tasks,
    task_pool,
)
from coevolve_jax.records.files import write_lines, write_text
from coevolve_jax.records.llm_calls import Packer
from coevolve_jax.records.logs import LLM_CALLS
from coevolve_jax.records.workdir import MADE, record_model, recorded_model
from coevolve_jax.rollout.engine import Engine
from coevolve_jax.rollout.reference_engine import ReferenceEngine, solution
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Task, Trajectory

END = "Done."  # the message that ends a user turn


class Demonstrations(NamedTuple):
    """Successful trajectories and their tasks. lost: why others are left out -> number of tasks."""

    tasks: list[Task]
    trajectories: list[Trajectory]
    lost: Counter[str]

    def __str__(self) -> str:
        kept, why = len(self.tasks), ", ".join(f"{word} {n}" for word, n in self.lost.most_common())
        told = f"{kept} of {kept + self.lost.total()} tasks give a demonstration"
        return f"{told} (others: {why})" if why else told


def make_tasks(
    config: ConfigDict,
    policy: Policy,
    engine: Engine | None,
    env_pool: ProcessPool,
    folder: Path,
    workdir: Path,
) -> tuple[list[Task], Counter[str]]:
    """Returns the tasks to demonstrate, none near an evaluation task of the run, and refusals of others.

    They are those of config.warm_start.source, with refusals counted. Or unguided exploration of the training
    scenarios finds them, also where D_0 is not explored. The folder's tasks.jsonl and made.json keep both for
    later calls, and its held_out.jsonl the held-out tasks: where the policy explores, the one that is learned
    would make others.

    policy, engine: for an explorer that asks the policy. workdir: records the model that answers, whose
    questions go to the folder's llm_calls.jsonl.

    Raises ValueError where that model is needed and away, or differs from the recorded one.
    """
    c, path, tasks = config, folder / "tasks.jsonl", task_pool(config)
    if path.exists():
        made = json.loads((folder / MADE).read_text())
        return list(TaskPool.read(path)), Counter(made["refused"])
    with closing(build.agent(c, policy, ReferenceEngine(()), env_pool)) as agent:
        roles = build.explorer(c, policy, engine, recorded_model(workdir), agent)
        if roles.served and not roles.initial:  # else rules explore
            record_model(workdir, roles.served())
        synthesizer = lambda guard, fits=agent.fits: build.synthesizer(c, roles, env_pool, guard, fits)
        held_out = held_out_tasks(c, synthesizer(None, build.evaluation_agent(c, agent).fits))
        guarded = synthesizer(leak_guard(c, held_out))
        refused = Counter[str]()
        if c.warm_start.source:
            apart = build.evaluation_scenarios(c)
            for task in given_tasks(c):
                elsewhere = canonical(task.scenario) not in apart
                refusal = guarded.add(tasks, task)[0] if elsewhere else EVALUATION_SCENARIO
                refused.update([refusal] if refusal else [])
        else:
            explore(guarded, tasks, build.scenarios(c), c.warm_start.tasks, "warm_start", c.seed)
    made = {"refused": dict(refused), "costs": dict(roles.costs or {})}
    write_lines(folder / "held_out.jsonl", [task.to_json() for task in held_out])
    write_text(folder / MADE, json.dumps(made, indent=1))
    if roles.llm_calls:
        write_lines(folder / LLM_CALLS, list(Packer().pack(roles.llm_calls)))
    tasks.write(path)
    return list(tasks), refused


def given_tasks(config: ConfigDict) -> list[Task]:
    """Reads the tasks of config.warm_start.source. Raises ValueError as `read_tasks` does."""
    source = Path(config.warm_start.source)
    path = source / "tasks.jsonl" if source.is_dir() else source
    return read_tasks(config, str(path), "warm_start.source")


def demonstrate(
    config: ConfigDict, policy: Policy, env_pool: ProcessPool, tasks: Sequence[Task]
) -> Demonstrations:
    """Lets the agent of RL make each task's reference calls, one per message, in the environment.

    Only successes are kept. `Trajectory.stop`, or "unsolved", says why others are lost.
    """
    chat = policy.chat.writing(config.rollout.tool_call_format)
    engine = ReferenceEngine([solution(task, chat, chat.said(END)) for task in tasks])
    with (
        closing(build.agent(config, policy, engine, env_pool)) as agent,
        tqdm(total=len(tasks), desc="demonstrations", unit="task", leave=False) as bar,
    ):
        seeds = [[n] for n in range(len(tasks))]
        groups = agent.rollout_groups(tasks, seeds, 1.0, on_done=lambda rollout: bar.update())
    done = [(g.task, t) for g in groups for t in g.trajectories]
    kept = [(task, t) for task, t in done if t.outcome.success]
    stops = Counter(t.stop for _, t in done if not t.outcome.success)
    lost = Counter({"unsolved" if stop == "done" else stop: n for stop, n in stops.items()})
    return Demonstrations([task for task, _ in kept], [t for _, t in kept], lost)
