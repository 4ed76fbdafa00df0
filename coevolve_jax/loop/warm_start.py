"""Supervised warm start: before RL the policy learns tasks' own solutions, acted out by the agent.

    tasks            of config.warm_start.source, or explored as D_0 is; none is near an evaluation task
    demonstrations   trajectories of the real agent that makes their reference calls; successes are kept
    updates          cross-entropy of the policy's own tokens, by the learner of RL (supervised.py)
    held out         some demonstrations, whose loss decides which parameters are written

The folder of a warm start:

    config.json      the run's config
    tasks.jsonl      the tasks; explorer_costs.json has what a model as explorer cost
    sft.jsonl        a row per update and per evaluation (supervised.py)
    checkpoints/     until it ends
    summary.json     written before policy/, whose presence marks the warm start as finished
    policy/          a Hugging Face folder
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
from ml_collections import ConfigDict
from tqdm import tqdm

from coevolve_jax import build
from coevolve_jax import config as configs
from coevolve_jax.analysis.summary import warm_start_line
from coevolve_jax.build import Policy
from coevolve_jax.distributed import sharding
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.grpo.learner import Learner, TrainState
from coevolve_jax.loop.evaluate import evaluate
from coevolve_jax.loop.initial import explore, held_out_tasks, leak_guard, read_tasks, task_pool
from coevolve_jax.loop.supervised import Supervised, checkpoints
from coevolve_jax.loop.trainer import Trainer
from coevolve_jax.models import hf_io
from coevolve_jax.planning import plan
from coevolve_jax.preemption import interruptible
from coevolve_jax.records.workdir import WARM_START, claimed, write_text
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.rollout.engine import Engine
from coevolve_jax.rollout.reference_engine import ReferenceEngine, solution
from coevolve_jax.seeding import rng_for
from coevolve_jax.synthesis.pipeline import Synthesizer
from coevolve_jax.types import Task, Trajectory

END = "Done."  # the message that ends a user turn
RISE = 10  # updates, at most, in which the learning rate rises


class Demonstrations(NamedTuple):
    """Successful trajectories and their tasks. lost: why others are left out -> number of tasks."""

    tasks: list[Task]
    trajectories: list[Trajectory]
    lost: Counter[str]

    def __str__(self) -> str:
        kept, why = len(self.tasks), ", ".join(f"{word} {n}" for word, n in self.lost.most_common())
        told = f"{kept} of {kept + self.lost.total()} tasks are solved by their own calls"
        return f"{told} (others: {why})" if why else told


def initial_model(config: ConfigDict, workdir: Path) -> str:
    """Returns the folder of the policy before RL: config.model, or the policy of the run's warm start.

    Does the warm start first, or goes on with it, unless it is finished. Raises as `warm_start` does.
    """
    if not config.warm_start.steps:
        return config.model
    folder = workdir / WARM_START
    if not (folder / "policy").exists():
        _check(config)
        with claimed(workdir, config):
            print(warm_start_line(warm_start(config, folder)), file=sys.stderr)
    return str(folder / "policy")


def warm_start(config: ConfigDict, folder: Path) -> dict:
    """Does the warm start in `folder`, or goes on with it, to the same bits. Returns summary.json.

    Raises:
      ValueError: bad input, several processes, or nothing to learn from, in one sentence.
      FloatingPointError: an update is not finite.
      Preempted: the run was asked to end (preemption.py). The last update is saved.
    """
    _check(config)
    with claimed(folder, config):
        if not (folder / "policy").exists():
            _learn(_supervised(config), folder)
        return json.loads((folder / "summary.json").read_text())


def demonstrate(
    config: ConfigDict, policy: Policy, env_pool: ProcessPool, tasks: Sequence[Task]
) -> Demonstrations:
    """Lets the agent of RL make each task's reference calls, one per message, in the environment."""
    chat = policy.chat.writing(config.rollout.tool_call_format)
    end = [*policy.tokenizer.encode(END, add_special_tokens=False), *chat.stop_ids]
    engine = ReferenceEngine([solution(task, chat, end) for task in tasks])
    with (
        closing(build.agent(config, policy, engine, env_pool)) as agent,
        tqdm(total=len(tasks), desc="demonstrations", unit="task", leave=False) as bar,
    ):
        groups = agent.rollout_groups(tasks, [[n] for n in range(len(tasks))], 1.0, on_done=bar.update)
    done = [(g.task, t) for g in groups for t in g.trajectories]
    kept = [(task, t) for task, t in done if t.outcome.success]
    stops = Counter(t.stop for _, t in done if not t.outcome.success)
    lost = Counter({"unsolved" if stop == "done" else stop: n for stop, n in stops.items()})
    return Demonstrations([task for task, _ in kept], [t for _, t in kept], lost)


def _check(config: ConfigDict) -> None:
    """Raises ValueError for a warm start that cannot begin."""
    configs.check(config)
    if not config.warm_start.steps:
        raise ValueError(
            "config.warm_start.steps is 0: give the number of updates, as in --config.warm_start.steps=200."
        )
    if jax.process_count() > 1:
        raise ValueError(
            f"config.warm_start is for one process, and these are {jax.process_count()}: run "
            "experiments/sft.py in one, name its policy in config.model, and set config.warm_start.steps "
            "to 0."
        )
    if config.warm_start.source:
        _given_tasks(config)


def _given_tasks(config: ConfigDict) -> list[Task]:
    """The tasks of config.warm_start.source."""
    source = Path(config.warm_start.source)
    path = source / "tasks.jsonl" if source.is_dir() else source
    return read_tasks(config, str(path), "warm_start.source")


def _supervised(config: ConfigDict) -> ConfigDict:
    """The config with a learner for cross-entropy alone. Its optimiser and its precision stay."""
    w = config.warm_start
    changes = {
        "learner.learning_rate": w.learning_rate,
        "learner.schedule": "linear",
        "learner.warmup_steps": min(RISE, w.steps // 10),
        "learner.decay_steps": w.steps,
        "learner.final_rate": 0.1,
        "learner.kl": "none",
        "learner.epochs": 1,
        "learner.tis_cap": 0.0,
        "learner.replay_routing": False,
        "rollout.tasks_per_step": w.batch,  # `learn` makes room for so many trajectories
        "rollout.group_size": 1,
    }
    return configs.override(config, changes | ({"engine.name": "native"} if _needs_engine(config) else {}))


def _needs_engine(config: ConfigDict) -> bool:
    w = config.warm_start
    return w.eval_tasks > 0 or (not w.source and configs.asks_policy(config))


def _learn(c: ConfigDict, folder: Path) -> None:
    """Makes the demonstrations, learns from them, and writes the policy. c: from `_supervised`."""
    mesh = sharding.make_mesh(**c.mesh)
    plan.check_fits(c, hf_io.load_config(c.model), mesh, sharding.device_memory(mesh))
    policy = build.policy(c.model, mesh, c.learner.dtype)
    # Temperature 1: it fits the model's own distribution, whatever the temperature of rollouts.
    learner = Learner(policy.config, c.learner, policy.params, temperature=1.0, mesh=mesh, seed=c.seed)
    with ExitStack() as stack:
        trainer = stack.enter_context(closing(Trainer(learner, policy, c)))
        env_pool = stack.enter_context(build.env_pool(c))
        engine = stack.enter_context(closing(trainer.engine(folder))) if _needs_engine(c) else None
        with interruptible():
            shown = demonstrate(c, policy, env_pool, _tasks(c, policy, engine, env_pool, folder))
        held_out, trained = _split(c, shown)
        print(f"warm start: {shown}; {len(held_out)} of them are held out.", file=sys.stderr)

        success = None
        if engine and c.warm_start.eval_tasks:
            agent = stack.enter_context(closing(build.agent(c, policy, engine, env_pool)))
            tried = [shown.tasks[i] for i in held_out[: c.warm_start.eval_tasks]]
            success = partial(_success, c, trainer, agent, engine, tried)
        pick = lambda chosen: [shown.trajectories[i] for i in chosen]
        begin = lambda: learner.init(policy.params)
        course = Supervised(c, folder, learner, begin, pick(trained), pick(held_out), success)
        stack.enter_context(closing(course))
        if not learner.keeps_reference:
            policy.params = None  # frees memory
        best, step = course.run()
        if success and all(row["step"] != step for row in course.evaluations("success")):
            with interruptible():
                start = time.perf_counter()
                course.log(step, success(best, step), start)

        # The policy comes last: its presence marks the warm start as finished.
        half = folder / "policy.half"
        shutil.rmtree(half, ignore_errors=True)
        trainer.save_policy(best, half)
        policy.tokenizer.save_pretrained(half)
        write_text(folder / "summary.json", json.dumps(_summary(shown, held_out, course, step), indent=1))
        os.replace(half, folder / "policy")
    if (made := checkpoints(c, folder)).exists():
        made.rmtree()


def _tasks(
    c: ConfigDict, policy: Policy, engine: Engine | None, env_pool: ProcessPool, folder: Path
) -> list[Task]:
    """The tasks to demonstrate. They are made once: later calls read the folder's tasks.jsonl."""
    path, tasks = folder / "tasks.jsonl", task_pool(c)
    if path.exists():
        return list(tasks.read(path))
    roles, tools = build.explorer(c, policy, engine), build.family(c).tools
    with closing(build.agent(c, policy, ReferenceEngine(()), env_pool)) as agent:
        synthesizer = lambda guard: Synthesizer(roles, tools, env_pool, c, guard, agent.fits)
        guarded = synthesizer(leak_guard(c, held_out_tasks(c, synthesizer(None))))
        if c.warm_start.source:
            for task in _given_tasks(c):
                guarded.add(tasks, task)
        else:
            explore(guarded, tasks, build.scenarios(c), c.warm_start.tasks, "warm_start", c.seed)
    if roles.costs:
        write_text(folder / "explorer_costs.json", json.dumps(dict(roles.costs), indent=1))
    tasks.write(path)
    return list(tasks)


def _split(c: ConfigDict, shown: Demonstrations) -> tuple[list[int], list[int]]:
    """Draws the held-out demonstrations. Returns their indices and those of the others."""
    order = rng_for(c.seed, "warm start split").permutation(len(shown.tasks)).tolist()
    share = c.warm_start.held_out
    count = max(1, round(share * len(order))) if share else 0
    if count >= len(order):
        raise ValueError(
            f"The warm start has too little to learn from: {shown}, and it holds {count} out. Raise the "
            "limits in config.rollout, or give more or other tasks (config.warm_start.tasks and .source), in "
            "a new workdir."
        )
    return order[:count], order[count:]


def _success(
    c: ConfigDict,
    trainer: Trainer,
    agent: Agent,
    engine: Engine,
    tasks: Sequence[Task],
    state: TrainState,
    step: int,
) -> dict:
    """A row of sft.jsonl with the success of rollouts by the policy in `state`."""
    engine.update_weights(trainer.policy(state), step)
    how = dict(num_rollouts=c.evaluation.num_rollouts, temperature=c.rollout.temperature, seed=c.seed)
    result, _ = evaluate(agent, tasks, **how, title="warm start")
    return {"success": result.success, "tasks": len(tasks), "invalid": result.invalid, "stops": result.stops}


def _summary(shown: Demonstrations, held_out: Sequence[int], course: Supervised, best: int) -> dict:
    """summary.json. best: the step whose parameters are written; "before" and "after" are step 0 and it."""

    def of(key: str) -> dict | None:
        at = {row["step"]: row[key] for row in course.evaluations(key)}
        return {"before": at[0], "after": at[best]} if at else None

    return {
        "demonstrations": len(shown.tasks) - len(held_out),
        "held_out": len(held_out),
        "lost": dict(shown.lost),
        "steps": course.step,
        "best_step": best,
        "held_out_loss": of("held_out_loss"),
        "success": of("success"),
        "seconds": sum(row["seconds"] for row in course.rows),
    }
