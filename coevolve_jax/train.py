"""CoEvolve: a policy and its training set evolve together (arXiv 2604.15840).

    D_0 = N validated tasks from unguided exploration
    for each GRPO step t:
        1. K rollouts for each of a batch of tasks from D_t, in the real environment
        2. GRPO update of the policy
        3. weakness signals from these rollouts
        4. every F steps: reflect -> explore -> abstract -> validate; D_{t+1} = D_t + the valid tasks

The strategy draws the tasks, computes advantages, defines weakness and decides how D_t grows. The paper's
method is strategies/coevolve.py.

Every random generator is seeded from (seed, purpose, step), so a killed run resumes to the same bits. This
holds for the in-process engine with config.rollout.max_staleness 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import jax
from ml_collections import ConfigDict

from coevolve_jax import build
from coevolve_jax import config as configs
from coevolve_jax.config import idle
from coevolve_jax.distributed import sharding
from coevolve_jax.grpo.learn import learn
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.loop import inputs, leader, rendezvous
from coevolve_jax.loop.collect import Collector, Roller
from coevolve_jax.loop.evaluate import evaluate_held_out
from coevolve_jax.loop.evolve import Evolver
from coevolve_jax.loop.initial import add_queries, bootstrap, check_start, kept_apart, leak_guard
from coevolve_jax.loop.lab import Laboratory
from coevolve_jax.loop.run import Run, finished, restore
from coevolve_jax.loop.services import Services
from coevolve_jax.loop.state import RunState
from coevolve_jax.loop.timing import timed
from coevolve_jax.loop.warm_start import initial_model
from coevolve_jax.models import hf_io
from coevolve_jax.planning import plan
from coevolve_jax.preemption import Preempted, interruptible
from coevolve_jax.records.workdir import claimed, record_model, recorded_model
from coevolve_jax.strategies.base import help_of
from coevolve_jax.synthesis.signals import task_scores


def train(config: ConfigDict, workdir: str | os.PathLike, until: int | None = None) -> dict:
    """Starts or resumes the run in `workdir`. Of a finished run only the report is written again.

    With several processes, process 0 runs the loop and the others follow it (loop/leader.py).

    Args:
      config: the run's config, as config.load_file returns it.
      workdir: the run's folder. A folder that holds a checkpoint of this config is resumed.
      until: if below config.steps, stop with a checkpoint after that many GRPO steps in all. With 0 the run
        stops after D_0, the held-out tasks and the first evaluation. The same call without `until` resumes.

    Returns:
      the content of summary.json; {} in the processes that follow, and after a stop by `until`, or where the
        run is beyond that.

    Raises:
      ValueError: bad input, or files that the run began with have changed, in one sentence; nothing was
        overwritten.
      FloatingPointError: an update is not finite. The last checkpoint is intact; failure.json says why.
      EngineError: no engine generates any more. The last checkpoint holds every update, unless this happened
        while a scripted explorer's strategy probed tasks (`Lab.probe`): then it is the last one that was due.
      Preempted: the run was asked to end (preemption.py). The checkpoint is as for EngineError.
    """
    c, workdir = config, Path(workdir)
    configs.check(c)
    configs.check_evolution(c)
    told = finished(c, workdir) if jax.process_index() == 0 else None
    done = told is not None
    if rendezvous.shared(done) if jax.process_count() > 1 else done:
        return told if told and (until is None or until >= told["steps"]) else {}
    mesh = sharding.make_mesh(**c.mesh)
    scenarios = []
    if jax.process_index() == 0:
        fresh = not (workdir / "config.json").exists()
        for note in [*idle.notes(c, fresh=fresh), *build.base_notes(c)]:
            print(note, file=sys.stderr)
        scenarios = build.scenarios(c)
        check_start(c, scenarios, fresh=not (workdir / "held_out.jsonl").exists())
    build.check_attention(c, sharding.platform(mesh))
    if c.learner.optimizer_offload:
        sharding.check_host_memory(mesh)
    model = hf_io.load_config(c.model)
    plan.check_context(c, model)
    plan.check_fits(c, model, mesh, sharding.device_memory(mesh))
    # In the dtype of the master weights, which are copies. The learner casts the reference that it keeps.
    policy = build.policy(initial_model(c, workdir), mesh, build.trained_dtype(c.learner))
    chat = policy.chat.writing(c.rollout.tool_call_format)
    if jax.process_index() == 0:
        for note in chat.notes:
            print(note, file=sys.stderr)
    learner = Learner(
        policy.config, c.learner, policy.params, temperature=c.rollout.temperature, mesh=mesh, seed=c.seed
    )
    if jax.process_index() > 0:
        leader.follow(learner, policy, c)
        return {}
    learner = leader.lead(learner, policy, c)

    with (
        claimed(workdir, c),
        closing(learner),  # closing waits until the last checkpoint is on disk
        build.env_pool(c) as env_pool,
        closing(learner.engine(workdir)) as engine,
        closing(build.agent(c, policy, engine, env_pool)) as agent,
    ):
        trackers = build.trackers(c, workdir)
        here = inputs.digests(c)
        # ---- Resume from a checkpoint, or make the held-out tasks and D_0 --------------------------
        roles = build.explorer(c, policy, engine, recorded_model(workdir), agent)
        record_model(workdir, roles.served() if roles.served else None)
        synthesizer = lambda guard, fits=agent.fits: build.synthesizer(c, roles, env_pool, guard, fits)
        eval_agent = build.evaluation_agent(c, agent)
        restored = restore(c, learner, workdir)
        if restored is None:
            run_state, saved = bootstrap(c, synthesizer, eval_agent, workdir), None
            state = learner.init(policy.params)
        else:
            step, state, saved = restored
            print(f"{workdir} goes on after step {step} of {c.steps}.", file=sys.stderr)
            run_state = RunState.from_json(saved, c.data.max_tasks or None, build.family(c).task_key)
            engine.update_weights(learner.policy(state), step)
        run_state.inputs = inputs.begun_with(c, here, run_state.inputs)
        used = inputs.versions(build.family(c).versions(), getattr(engine, "versions", {}), run_state.inputs)
        add_queries(c, run_state.tasks, run_state.held_out)
        luck = build.training_luck(c)
        strategy = build.strategy(luck, saved)

        # ---- The loop ------------------------------------------------------------------------------
        last = c.steps if until is None else min(c.steps, until)
        with closing(Run(c, workdir, run_state, saved, trackers)) as run, run.noting_divergence():
            tasks, roller = run.state.tasks, partial(Roller, luck, agent)
            guard = leak_guard(c, kept_apart(c, run.state.held_out))
            services = Services(luck, learner, engine, lambda: state)
            lab = Laboratory(
                tasks, scenarios, synthesizer(guard), roller, run.state.ledger, run.record, services
            )
            collect = Collector(luck, strategy, agent, tasks)  # strategy.collect, now or some steps ahead
            evolve = Evolver(luck, strategy, lab, saved)  # strategy.evolve, now or during the next steps
            help = help_of(strategy)
            held_out = partial(
                evaluate_held_out, c, eval_agent, run.state.held_out, workdir=workdir, help=help
            )
            # Around blocks between two updates, where the state is consistent: if one fails, save first.
            saving = partial(save_on_error, lambda: run.save(learner, state, evolve.to_json()))
            if last == 0:  # the initial state, for other runs to fork
                run.save(learner, state, evolve.to_json())
            with saving():
                run.evaluate_if_due(held_out)  # the last run may have ended during this evaluation
            while run.state.step < last and not run.ended:
                step, seconds = run.state.step, run.seconds_so_far()
                with timed(seconds, "step"):
                    # A checkpoint may lie between a step's update and its evolution: then only 4. is left.
                    if run.state.pending is None:
                        # 1. K rollouts for each of a batch of tasks from D_t
                        with timed(seconds, "rollout"), saving():
                            collected = collect(step)
                            if c.engine.sleep and (sleep := getattr(engine, "sleep", None)):
                                sleep()
                        groups = collected.groups

                        # 2. GRPO update of the policy
                        with timed(seconds, "update"):
                            with saving():
                                samples = strategy.compute_advantages(groups)
                            state, learned = learn(c, learner, state, samples, step)
                        with timed(seconds, "push"):
                            engine.update_weights(learner.policy(state), step + 1)

                        # 3. Weakness signals from these rollouts
                        found = strategy.observe(step, groups)
                        tasks.record(task_scores(groups))
                        run.note(collected, samples, learned, found, seconds, policy.chat)

                    # 4. Every F steps the training set evolves. If it is given up, save the state before it.
                    with timed(seconds, "evolution"), saving(only_if=lambda: evolve.given_up):
                        evolved = evolve(step)

                run.log(evolved, seconds)
                with saving():
                    run.evaluate_if_due(held_out)
                if run.state.step % c.checkpoint.every == 0 or run.state.step == last or run.ended:
                    run.save(learner, state, evolve.to_json())

            evolve.close()

        # ---- Final evaluation and export -----------------------------------------------------------
        if last < run.state.step or not run.ended:
            return {}
        with interruptible(), run.noting_divergence():
            run.evaluated(partial(held_out, greedy=True, last=True))
        learner.save_policy(state, workdir / "policy")
        policy.save_words(workdir / "policy")
    return run.finish(used)


@contextmanager
def save_on_error(save: Callable[[], object], only_if: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Saves, then re-raises, if the block fails. Not after FloatingPointError: that policy is useless."""
    try:
        yield
    except FloatingPointError:
        raise
    except (Exception, Preempted):
        if only_if():
            save()
        raise
