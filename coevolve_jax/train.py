"""CoEvolve: a policy and its training set evolve together (arXiv 2604.15840).

    D_0 = N validated tasks from unguided exploration
    for each GRPO step t:
        1. K rollouts for each of a batch of tasks from D_t, in the real environment
        2. GRPO update of the policy
        3. weakness signals from these rollouts
        4. every F steps: reflect -> explore -> abstract -> validate; D_{t+1} = D_t + what is valid

Which tasks, what is learned from them, what counts as weakness and how the set evolves is the strategy's
(strategies/coevolve.py is the paper's). Everything random is drawn from (seed, purpose, step), so that a run that
was killed goes on exactly as if it had not been, where the in-process engine generates and
config.rollout.max_staleness is 0.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import jax
from ml_collections import ConfigDict
from tqdm import tqdm

from coevolve_jax import build
from coevolve_jax import config as configs
from coevolve_jax.collect import Collector, Roller
from coevolve_jax.distributed import hosts, sharding
from coevolve_jax.evaluate import held_out_result
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.grpo.update import learn
from coevolve_jax.lab import Laboratory
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.rollout.engine import EngineError
from coevolve_jax.run import Run, RunState, claim, timed
from coevolve_jax.seeding import rng_for
from coevolve_jax.synthesis.leakage import LeakGuard
from coevolve_jax.synthesis.pipeline import Synthesizer
from coevolve_jax.synthesis.signals import task_scores
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Task


def train(config: ConfigDict, workdir: str | os.PathLike, until: int | None = None) -> dict:
    """Runs, or goes on with, the run in `workdir`. Returns what its summary.json holds.

    Of several processes (distributed/hosts.py) the first one does; the others follow it, and return {}.

    until: stop with a checkpoint after that many GRPO steps in all, if they are fewer than config.steps; {} is
    returned then, and the same call without it goes on.

    Raises:
      ValueError: bad input, in one sentence; nothing was overwritten.
      FloatingPointError: an update is not finite; the last checkpoint is intact.
      EngineError: nothing generates any more; every finished step is in the last checkpoint.
    """
    c, workdir = config, Path(workdir)
    configs.check(c)
    mesh = sharding.make_mesh(**c.mesh)
    policy = build.policy(c.model, mesh)
    learner = Learner(
        policy.config, c.learner, policy.params, temperature=c.rollout.temperature, mesh=mesh, seed=c.seed
    )
    if jax.process_index() > 0:
        hosts.follow(learner, policy)
        return {}
    learner = hosts.Leader(learner, policy, engine_device=c.engine.name == "native")
    scenarios, roles = build.scenarios(c), build.explorer(c)
    claim(workdir, c)

    with (
        build.env_pool(c) as env_pool,
        closing(build.engine(c, learner.initial_policy(), workdir)) as engine,
        closing(build.agent(c, policy, engine, env_pool)) as agent,
    ):
        # ---- Go on with a checkpoint, or make the held-out tasks and D_0 ---------------------------
        synthesizer = partial(Synthesizer, roles, build.family(c).tools, env_pool, c)
        restored = learner.restore(workdir / "checkpoints")
        if restored is None:
            begun, saved = begin(c, synthesizer, agent), None
            state = learner.init(policy.params)
        else:
            step, state, saved = restored
            begun = RunState.from_json(saved, c.data.max_tasks or None, build.family(c).task_key)
            engine.update_weights(learner.policy(state), step)
        strategy = build.strategy(c, saved)

        # ---- The loop ------------------------------------------------------------------------------
        last = c.steps if until is None else min(c.steps, until)
        with closing(Run(c, workdir, begun, saved)) as run:
            tasks, roller = run.state.tasks, partial(Roller, c, agent)
            guard = leak_guard(c, run.state.held_out)
            lab = Laboratory(tasks, scenarios, synthesizer(guard), roller, run.state.ledger)
            collect = Collector(c, strategy, agent, tasks)  # strategy.collect, at once or one step ahead
            for step in range(run.state.step, last):
                seconds: dict[str, float] = {}
                with timed(seconds, "step"):
                    # 1. K rollouts for each of a batch of tasks from D_t
                    with timed(seconds, "rollout"):
                        try:
                            collected = collect(step)
                        except EngineError:
                            run.save(learner, state, strategy)
                            raise
                    groups = collected.groups

                    # 2. GRPO update of the policy
                    with timed(seconds, "update"):
                        samples = strategy.credit(groups)
                        state, learned = learn(c, learner, state, samples)
                        engine.update_weights(learner.policy(state), step + 1)

                    # 3. Weakness signals from these rollouts
                    found = strategy.observe(step, groups)
                    tasks.record(task_scores(t for group in groups for t in group.trajectories))

                    # 4. Every F steps the training set evolves
                    with timed(seconds, "evolution"):
                        grown = strategy.evolve(step, lab)

                run.log(collected, samples, learned, found, grown, seconds, policy.chat)
                if run.state.step % c.checkpoint.every == 0 or run.state.step == last:
                    run.save(learner, state, strategy)

        # ---- What the policy has become ------------------------------------------------------------
        if last < c.steps:
            return {}
        with timed(run.state.seconds, "evaluation"):
            after = held_out_result(c, agent, run.state.held_out)
        learner.save_policy(state, workdir / "policy")
        policy.tokenizer.save_pretrained(workdir / "policy")
    return run.finish(after)


def leak_guard(config: ConfigDict, held_out: Sequence[Task]) -> LeakGuard:
    """Compares with the held-out tasks and with the benchmark's own tasks of the evaluation split."""
    tasks, features = [*build.benchmark_tasks(config), *held_out], build.family(config).features
    return LeakGuard(tasks, config.data.leak_threshold, features=features)


def begin(config: ConfigDict, synthesizer: partial[Synthesizer], agent: Agent) -> RunState:
    """The held-out tasks, D_0, and the success of the policy as it is."""
    c, seconds = config, {}

    def explore(
        tasks: TaskPool, guard: LeakGuard | None, scenarios: Sequence[Task], wanted: int, kind: str, seed: int
    ):
        with tqdm(total=wanted, desc=f"{kind} tasks", unit="task", leave=False) as bar:
            return synthesizer(guard).explore_unguided(
                tasks,
                scenarios,
                wanted=wanted,
                kind=kind,
                step=0,
                rng=rng_for(seed, kind),
                on_added=bar.update,
            )

    with timed(seconds, "other"):
        key = build.family(c).task_key
        held_out, tasks = TaskPool(key=key), TaskPool(c.data.max_tasks or None, key)
        explore(
            held_out, None, build.held_out_scenarios(c), c.evaluation.tasks, "held_out", c.evaluation.seed
        )
        guard = leak_guard(c, list(held_out))
        initial = explore(tasks, guard, build.scenarios(c), c.data.initial_tasks, "initial", c.seed)
    with timed(seconds, "evaluation"):
        before = held_out_result(c, agent, list(held_out))
    return RunState(0, tasks, list(held_out), before, initial, seconds=seconds)
