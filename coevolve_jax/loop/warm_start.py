"""Supervised warm start: before RL the policy learns tasks' own solutions, acted out by the agent.

    tasks            of config.warm_start.source, or explored, whatever D_0 is; none near an evaluation task
    demonstrations   the real agent makes their reference calls; successes are kept (demonstrations.py)
    updates          cross-entropy of the policy's own tokens, by the learner of RL (supervised.py)
    held out         some demonstrations, whose loss decides which parameters are written

The folder of a warm start:

    config.json      the run's config
    tasks.jsonl      the tasks; made.json has refusals, and what a model as explorer cost
    held_out.jsonl   the evaluation tasks that they are kept apart from, for the run
    llm_calls.jsonl  the questions to a model as explorer and its answers; the run's own file begins with them
    explorer.json    who that model is; for a warm start of a run it is in the workdir
    sft.jsonl        a row per update and per evaluation (supervised.py)
    checkpoints/     until it ends
    summary.json     written before policy/, whose presence marks the warm start as finished
    policy/          a Hugging Face folder, in the dtype in which RL reads it (`build.trained_dtype`)

With LoRA policy/ is the base with the adapters merged and then rounded to that dtype, config.learner.dtype:
the base of RL's adapters, which the success of rollouts and the last held-out loss in summary.json are of.
The losses of sft.jsonl are those of the adapters beside the base.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import jax
from ml_collections import ConfigDict

from coevolve_jax import build, shipped
from coevolve_jax import config as configs
from coevolve_jax.analysis.summary import warm_start_line
from coevolve_jax.config import idle, keys
from coevolve_jax.distributed import sharding
from coevolve_jax.grpo.learner import Learner, TrainState
from coevolve_jax.loop.demonstrations import Demonstrations, demonstrate, given_tasks, make_tasks
from coevolve_jax.loop.evaluate import evaluate
from coevolve_jax.loop.supervised import Supervised, checkpoints
from coevolve_jax.loop.trainer import Trainer
from coevolve_jax.models import hf_io
from coevolve_jax.planning import plan
from coevolve_jax.preemption import interruptible
from coevolve_jax.records.files import write_text
from coevolve_jax.records.workdir import WARM_START, claimed
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.rollout.chat import Chat, load_tokenizer
from coevolve_jax.rollout.engine import Engine
from coevolve_jax.seeding import rng_for
from coevolve_jax.types import Task

RISE = 10  # updates, at most, in which the learning rate rises


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
            print(warm_start_line(warm_start(config, folder, workdir)), file=sys.stderr)
        gc.collect()  # cycles hold its arrays, and the run needs the room
    return str(folder / "policy")


def warm_start(config: ConfigDict, folder: Path, workdir: Path | None = None) -> dict:
    """Does the warm start in `folder`, or goes on with it, to the same bits. Returns summary.json.

    workdir: of its run, which records the model that answers the explorer; None: `folder` records it.

    Raises:
      ValueError: bad input, several processes, or nothing to learn from, in one sentence.
      FloatingPointError: an update is not finite.
      Preempted: the run was asked to end (preemption.py). The last update is saved.
    """
    _check(config)
    with claimed(folder, config):
        if not (folder / "policy").exists():
            _learn(_supervised(config), folder, workdir or folder)
        return json.loads((folder / "summary.json").read_text())


def notes(config: ConfigDict) -> list[str]:
    """Sentences for the user of a warm start that is no part of a run.

    Raises ValueError as `warm_start` does.
    """
    _check(config)
    chat = Chat(load_tokenizer(config.model)).writing(config.rollout.tool_call_format)
    told = [*build.base_notes(config), *chat.notes]
    given, made = config.learner, _supervised(config).learner
    default = lambda key: keys.REQUIRED[f"learner.{key}"].default
    replaced = [f"config.learner.{key}" for key in given if given[key] not in (default(key), made[key])]
    own = f"A warm start has a learning rate, a schedule and a loss of its own, not {', '.join(replaced)}."
    return [*idle.notes(config, rl=False), *told, *([own] if replaced else [])]


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
            f"{shipped.command('sft')} in one, name its policy in config.model, and set "
            "config.warm_start.steps to 0."
        )
    build.family(config)
    plan.check_context(config, hf_io.load_config(config.model))
    mesh = sharding.make_mesh(**config.mesh)
    build.check_attention(config, sharding.platform(mesh))
    if config.learner.optimizer_offload:
        sharding.check_host_memory(mesh)
    build.check_tool_call_format(config, build.scenarios(config))
    if config.warm_start.source:
        given_tasks(config)


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


def _learn(c: ConfigDict, folder: Path, workdir: Path) -> None:
    """Makes the demonstrations, learns from them, and writes the policy. c: from `_supervised`.

    workdir: as in `make_tasks`.
    """
    mesh = sharding.make_mesh(**c.mesh)
    plan.check_fits(c, hf_io.load_config(c.model), mesh, sharding.device_memory(mesh))
    policy = build.policy(c.model, mesh, build.trained_dtype(c.learner))
    # Temperature 1: it fits the model's own distribution, whatever the temperature of rollouts.
    learner = Learner(policy.config, c.learner, policy.params, temperature=1.0, mesh=mesh, seed=c.seed)
    with ExitStack() as stack:
        trainer = stack.enter_context(closing(Trainer(learner, policy, c)))
        env_pool = stack.enter_context(build.env_pool(c))
        engine = stack.enter_context(closing(trainer.engine(folder))) if _needs_engine(c) else None
        with interruptible():
            tasks, refused = make_tasks(c, policy, engine, env_pool, folder, workdir)
            shown = demonstrate(c, policy, env_pool, tasks)
        shown.lost.update(refused)
        held_out, trained = _split(c, tasks, shown)
        print(f"warm start: {shown}; {len(held_out)} of them are held out.", file=sys.stderr)

        success = None
        if engine and c.warm_start.eval_tasks:
            agent = stack.enter_context(closing(build.agent(c, policy, engine, env_pool)))
            tried = [shown.tasks[i] for i in held_out[: c.warm_start.eval_tasks]]
            success = partial(_success, c, trainer, build.evaluation_agent(c, agent), engine, tried)
        pick = lambda chosen: [shown.trajectories[i] for i in chosen]
        begin = lambda: learner.init(policy.params)
        course = Supervised(c, folder, learner, begin, pick(trained), pick(held_out), success)
        stack.enter_context(closing(course))
        policy.params = None  # frees memory
        best, step = course.run()
        if success and all(row["step"] != step for row in course.evaluations("success")):
            with interruptible():
                start = time.perf_counter()
                course.log(step, success(best, step), start)

        summary, dtype = _summary(shown, held_out, course, step), build.trained_dtype(c.learner)
        if c.learner.lora_rank:  # of the policy as it is written
            if held_out:
                loss = course.held_out_loss(partial(learner.score_merged, best))
                summary["held_out_loss"]["after"] = loss
            summary["rounded_away"] = share = learner.rounded_away(best, dtype)
            if dtype != "float32":
                print(
                    f"warm start: policy/ is in {dtype}, as RL reads it: {share:.0%} of the weights changed "
                    "by the adapters round to the base's own; policy/adapter/ has all changes, and "
                    "--config.learner.dtype=float32 rounds none.",
                    file=sys.stderr,
                )
        # The policy comes last: its presence marks the warm start as finished.
        half = folder / "policy.half"
        shutil.rmtree(half, ignore_errors=True)
        trainer.save_policy(best, half, dtype)
        policy.save_words(half)
        write_text(folder / "summary.json", json.dumps(summary, indent=1))
        os.replace(half, folder / "policy")
    if (made := checkpoints(c, folder)).exists():
        made.rmtree()


def _split(c: ConfigDict, tasks: Sequence[Task], shown: Demonstrations) -> tuple[list[int], list[int]]:
    """Draws the held-out tasks. Returns the indices of their demonstrations and those of the others.

    The draw is over all tasks: one whose demonstration is lost on resume moves no other to the other side.
    """
    order = rng_for(c.seed, "warm start split").permutation(len(tasks)).tolist()
    share = c.warm_start.held_out
    count = max(1, round(share * len(order))) if share else 0
    place = {task.id: i for i, task in enumerate(shown.tasks)}
    held_out, trained = (
        [place[tasks[n].id] for n in part if tasks[n].id in place] for part in (order[:count], order[count:])
    )
    if not trained or (count and not held_out):
        raise ValueError(
            f"The warm start has too little to learn from: {shown}, and it holds {len(held_out)} out: "
            "raise the limits in config.rollout, or give more or other tasks (config.warm_start.tasks and "
            ".source), in a new workdir."
        )
    return held_out, trained


def _success(
    c: ConfigDict,
    trainer: Trainer,
    agent: Agent,
    engine: Engine,
    tasks: Sequence[Task],
    state: TrainState,
    step: int,
) -> dict:
    """A row of sft.jsonl with the success of rollouts by the policy in `state`, as it would be written."""
    engine.update_weights(trainer.policy(state, build.trained_dtype(c.learner)), step)
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
