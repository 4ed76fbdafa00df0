"""CoEvolve: a policy and its training set evolve together (arXiv 2604.15840).

    D_0 = N validated tasks from unguided exploration
    for each GRPO step t:
        1. K rollouts for each of a batch of tasks from D_t, in the real environment
        2. GRPO update of the policy
        3. weakness signals from these rollouts
        4. every F steps: reflect -> explore -> abstract -> validate; D_{t+1} = D_t + what is valid

Everything random is drawn from (seed, purpose, step), so that a run that was killed goes on exactly as if it had
not been, where the in-process engine generates and config.rollout.max_staleness is 0.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict
from tqdm import tqdm

from coevolve_jax import build, checkpoint, config as configs, metrics
from coevolve_jax.distributed import hosts, sharding
from coevolve_jax.analysis import report
from coevolve_jax.evaluate import evaluate, versions
from coevolve_jax.synthesis import signals
from coevolve_jax.synthesis.pipeline import Synthesizer, join_evidence
from coevolve_jax.synthesis.leakage import LeakGuard
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.grpo.advantages import group_advantages
from coevolve_jax.grpo.filter import FilterState, filter_groups
from coevolve_jax.grpo.learner import Learner, TrainState
from coevolve_jax.grpo.packing import pack
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.rollout.chat import Chat
from coevolve_jax.rollout.engine import EngineError
from coevolve_jax.sampling import Rollouts, check_sampler, group_spreads, leave_out_stale, rng_for, staleness
from coevolve_jax.state import RunState
from coevolve_jax.types import Task, Trajectory


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Adds the time that its body takes to seconds[phase]."""
    start = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start


def train(config: ConfigDict, workdir: str | os.PathLike) -> dict:
    """Runs, or goes on with, the run in `workdir`. Returns what its summary.json holds.

    Of several processes (distributed/hosts.py) the first one does; the others follow it, and return {}.

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
    scenarios = build.scenarios(c)
    build.claim(workdir, c)

    with (
        build.env_pool(c) as env_pool,
        closing(build.engine(c, learner.initial_policy(), workdir)) as engine,
        closing(build.agent(c, policy, engine, env_pool)) as agent,
    ):
        explorer = build.explorer(c)

        # ---- Go on with a checkpoint, or make the held-out tasks and D_0 ---------------------------
        restored = learner.restore(workdir / "checkpoints")
        if restored is None:
            run = start(c, explorer, env_pool, agent)
            state = learner.init(policy.params)
            logs = metrics.MetricsWriter(workdir)
        else:
            _, state, saved = restored
            run = RunState.from_json(saved, c.data.max_tasks or None)
            logs = metrics.MetricsWriter(workdir, saved["sizes"])
            engine.update_weights(learner.policy(state), run.step)
        synthesizer = Synthesizer(explorer, env_pool, c, leak_guard(c, run.held_out))
        write_lines(workdir / "held_out.jsonl", [t.to_json() for t in run.held_out])
        run.tasks.write(workdir / "tasks.jsonl")

        def save() -> None:
            if checkpoint.latest_step(workdir / "checkpoints") == run.step:
                return
            with timed(run.seconds, "checkpoint"):
                saved = {**run.to_json(), "sizes": logs.sizes()}
                learner.save(workdir / "checkpoints", run.step, state, saved, keep=c.checkpoint.keep)

        # ---- The loop ------------------------------------------------------------------------------
        progress = metrics.Progress(c.steps, run.step)
        rollouts = Rollouts(c, agent, run.tasks)
        for step in range(run.step, c.steps):
            seconds: dict[str, float] = {}
            with timed(seconds, "step"):
                # 1. K rollouts for each of a batch of tasks from D_t
                with timed(seconds, "rollout"):
                    try:
                        batch, trajectories, utilization = rollouts.next_batch(step)
                    except EngineError:
                        save()
                        raise
                    check_sampler(trajectories)
                    trajectories = leave_out_stale(trajectories, step, c.rollout.max_staleness)

                # 2. GRPO update of the policy
                with timed(seconds, "update"):
                    chosen, run.filter = choose(c, trajectories, run.filter)
                    state, learned = update(c, learner, state, chosen)
                    engine.update_weights(learner.policy(state), step + 1)

                # 3. Weakness signals from these rollouts
                found, run.history = signals.extract(
                    run.history, trajectories, step, window=c.signals.window, theta=c.signals.rare_percent
                )
                run.tasks.record(signals.task_scores(trajectories))
                run.pending += join_evidence(found, trajectories)

                # 4. Every F steps the training set evolves
                evolution = None
                if (step + 1) % c.evolution.every == 0 and c.evolution.mode != "static":
                    with timed(seconds, "evolution"):
                        tally = synthesizer.evolve(
                            run.tasks, scenarios, run.pending, step, rng_for(c.seed, "evolve", step)
                        )
                    run.synthesis.add(tally)
                    run.pending, evolution = [], tally.to_json()
                    run.tasks.write(workdir / "tasks.jsonl")

            # ---- What it looked like, and the checkpoint -------------------------------------------
            run.step = step + 1
            fired = signals.count_by_kind(found)
            run.signals = {kind: run.signals.get(kind, 0) + n for kind, n in fired.items()}
            for phase in ("rollout", "update", "evolution"):
                run.seconds[phase] = run.seconds.get(phase, 0.0) + seconds.get(phase, 0.0)
            row = {
                "step": step,
                **describe(batch, trajectories),
                **staleness(trajectories, step),
                **learned,
                "tasks": len(run.tasks),
                "utilization": utilization,
                "groups": {"rolled_out": len(batch), "learned_from": len({t.task_id for t in chosen})},
                "signals": fired,
                "evolution": evolution,
                "seconds": seconds,
            }
            logs.write_step(row)
            logs.append("signals.jsonl", [s.to_json() for s in found])
            if step % c.logging.trajectories_every == 0 or run.step == c.steps:
                shown = readable(policy.chat, batch, trajectories, step)[: c.logging.trajectories]
                logs.append(f"trajectories/step_{step:05d}.jsonl", shown)
            if run.step % c.checkpoint.every == 0 or run.step == c.steps:
                save()
            progress.update(row)
        progress.close()
        logs.close()

        # ---- What the policy has become ------------------------------------------------------------
        with timed(run.seconds, "evaluation"):
            after = held_out_result(c, agent, run.held_out)
        learner.save_policy(state, workdir / "policy")
        policy.tokenizer.save_pretrained(workdir / "policy")
    return finish(c, workdir, run, after)


def leak_guard(config: ConfigDict, held_out: Sequence[Task]) -> LeakGuard:
    """Compares with the held-out tasks and with BFCL's own tasks of the evaluation split."""
    return LeakGuard([*build.benchmark_tasks(config), *held_out], config.data.leak_threshold)


def start(config: ConfigDict, explorer, env_pool, agent: Agent) -> RunState:
    """The held-out tasks, D_0 and the success of the policy as it is."""
    c, seconds = config, {}

    def explore_unguided(
        tasks: TaskPool, guard: LeakGuard | None, scenarios: Sequence[Task], wanted: int, kind: str, seed: int
    ):
        with tqdm(total=wanted, desc=f"{kind} tasks", unit="task", leave=False) as bar:
            return Synthesizer(explorer, env_pool, c, guard).explore_unguided(
                tasks,
                scenarios,
                wanted=wanted,
                kind=kind,
                step=0,
                rng=rng_for(seed, kind),
                on_added=bar.update,
            )

    with timed(seconds, "other"):
        held_out = TaskPool()
        explore_unguided(
            held_out, None, build.held_out_scenarios(c), c.evaluation.tasks, "held_out", c.evaluation.seed
        )
        tasks = TaskPool(c.data.max_tasks or None)
        guard = leak_guard(c, list(held_out))
        initial = explore_unguided(tasks, guard, build.scenarios(c), c.data.initial_tasks, "initial", c.seed)
    with timed(seconds, "evaluation"):
        before = held_out_result(c, agent, list(held_out))
    return RunState(0, tasks, list(held_out), before, initial, seconds=seconds)


def choose(
    config: ConfigDict, trajectories: Sequence[Trajectory], state: FilterState
) -> tuple[list[Trajectory], FilterState]:
    """The trajectories to learn from, and the group filter's state after them."""
    c, kept = config.learner, group_spreads(trajectories)
    if c.skip_dead_groups or c.dynamic_sampling:
        kept = {task_id: spread for task_id, spread in kept.items() if spread > 0}
    if c.group_filter:
        kept, state = filter_groups(state, kept)
    return [t for t in trajectories if t.task_id in kept], state


def update(
    config: ConfigDict, learner: Learner | hosts.Leader, state: TrainState, trajectories: Sequence[Trajectory]
) -> tuple[TrainState, dict[str, Any]]:
    """config.learner.epochs updates. Raises FloatingPointError where one is not finite."""
    c = config.learner
    advantages = group_advantages(
        [t.outcome.reward for t in trajectories],
        [t.task_id for t in trajectories],
        [t.outcome.valid for t in trajectories],
        estimator=c.advantage,
    )
    batch = pack(
        trajectories,
        advantages,
        row_length=c.row_length,
        rows_per_microbatch=c.rows_per_microbatch,
        max_rows=config.rollout.tasks_per_step * config.rollout.group_size,
        routing=learner.routing,
    )
    old_logprobs = learner.score(state, batch) if c.tis_cap else None
    mismatch: dict[str, float] = {}
    for _ in range(c.epochs):
        state, learned = learner.update(state, batch, old_logprobs)
        learned = {name: value.item() for name, value in jax.device_get(learned).items()}
        if not learned.pop("finite"):
            raise FloatingPointError(
                f"The update (loss {learned['loss']}, gradient norm {learned['grad_norm']}) or its step is not "
                "finite: the last checkpoint is intact; start a new workdir with a lower config.learner.learning_rate."
            )
        # Only the first epoch's policy is the one that the sampler had.
        mismatch = mismatch or {name: value for name, value in learned.items() if name.startswith("mismatch")}
    return state, {**learned, **mismatch}


def describe(batch: Sequence[Task], trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Numbers of one step's rollouts; None where no valid rollout has any."""
    valid = [t for t in trajectories if t.outcome.valid]
    mean = lambda values: float(np.mean(values)) if len(values) else None
    born = {task.id: task.lineage.kind == "initial" for task in batch}
    of_kind = lambda initial: mean([t.outcome.success for t in valid if born[t.task_id] == initial])
    groups = [[t.outcome.success for t in valid if t.task_id == task_id] for task_id in born]
    steps = [s for t in valid for s in t.steps]
    return {
        "reward": mean([t.outcome.reward for t in valid]),
        "success": mean([t.outcome.success for t in valid]),
        "success_initial": of_kind(True),
        "success_new": of_kind(False),
        "valid": len(valid) / len(trajectories),
        "mixed_groups": mean([0 < sum(g) < len(g) for g in groups if g]),
        "mean_turn_calls": mean([len(t.steps) / len(t.turn_starts) for t in valid]),
        "malformed": mean([s.call is None for s in steps]),
        "length": mean([len(t.ids) for t in valid]),
    }


def readable(chat: Chat, batch: Sequence[Task], trajectories: Sequence[Trajectory], step: int) -> list[dict]:
    """Trajectories as one reads them: one of each outcome of each task, failures and successes in turn."""
    queries = {task.id: [turn.query for turn in task.turns] for task in batch}
    distinct = {(t.task_id, t.outcome.success): t for t in reversed(trajectories)}.values()
    failures, successes = ([t for t in distinct if t.outcome.success == success] for success in (False, True))
    in_turn = [t for pair in itertools.zip_longest(failures, successes) for t in pair if t is not None]
    return [
        {
            "step": step,
            **t.to_json(),
            "reward": t.outcome.reward,
            "success": t.outcome.success,
            "valid": t.outcome.valid,
            "policy_tokens": int(t.mask.sum()),
            "text": chat.decode(t.ids),
            "queries": queries[t.task_id],
        }
        for t in in_turn
    ]


def held_out_result(config: ConfigDict, agent: Agent, tasks: Sequence[Task]) -> dict:
    """Success on the held-out tasks by sampling, as in training, and by greedy decoding."""
    c = config.evaluation
    sampled, _ = evaluate(
        agent, tasks, samples=c.samples, temperature=c.temperature, seed=c.seed, title="held-out"
    )
    greedy, _ = evaluate(agent, tasks, samples=1, temperature=0.0, seed=c.seed, title="held-out, greedy")
    return {**sampled.to_json(), "greedy_success": greedy.success}


def finish(config: ConfigDict, workdir: Path, run: RunState, after: dict) -> dict:
    """Writes summary.json, ledger.json and report.html; returns the summary."""
    made = run.synthesis
    total = sum(run.seconds.values())
    summary = {
        "held_out_success_before": run.before["success"],
        "held_out_success_after": after["success"],
        "held_out_tasks": len(run.held_out),
        "held_out": {"before": run.before, "after": after},
        "signals": run.signals,
        "tasks": {
            "initial": run.initial.added,
            "final": len(run.tasks),
            "proposed": made.proposed,
            "accepted": made.accepted,
            "retained": made.retained,
            "refused": dict(sorted(made.refused.items())),
        },
        "seconds": dict(sorted(run.seconds.items())),
        "evolution_share": run.seconds.get("evolution", 0.0) / total,
        "steps": run.step,
        "seed": config.seed,
        "mode": config.evolution.mode,
        "config_digest": configs.digest(config),
        "versions": versions(),
    }
    ledger = {
        "initial": run.initial.to_json(),
        "evolution": made.to_json(),
        "llm_tokens": 0,
        "seconds": run.seconds.get("evolution", 0.0),
    }
    for name, content in (("summary.json", summary), ("ledger.json", ledger)):
        write_text(workdir / name, json.dumps(content, indent=1))
    report.write(workdir)
    print(metrics.summary_table(summary, workdir))
    return summary


def write_lines(path: Path, rows: Sequence[dict]) -> None:
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_text(path: Path, text: str) -> None:
    """Replaces a file at once: a reader or a kill sees the old or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
