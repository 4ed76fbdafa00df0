"""What a run begins with: its held-out sets, D_0, and the success of the policy as it is."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Sequence

from ml_collections import ConfigDict
from tqdm import tqdm

from coevolve_jax import build, names
from coevolve_jax.loop.evaluate import evaluate_held_out
from coevolve_jax.loop.lab import EXPLORER
from coevolve_jax.loop.run import RunState
from coevolve_jax.loop.timing import timed
from coevolve_jax.preemption import interruptible
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.seeding import rng_for
from coevolve_jax.synthesis import choice
from coevolve_jax.synthesis.leakage import LeakGuard
from coevolve_jax.synthesis.pipeline import SynthesisStats, Synthesizer
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.synthesis.validate import execute
from coevolve_jax.types import Task


@interruptible()
def bootstrap(
    config: ConfigDict, synthesizer: Callable[[LeakGuard | None], Synthesizer], agent: Agent
) -> RunState:
    """The state of a run before its first step.

    Held out, in scenarios of the evaluation split and never trained on: config.evaluation.tasks from unguided
    exploration, as D_0 is ("held_out"), and config.evaluation.balanced_tasks in which all tools come about equally
    often ("balanced"). D_0 is config.data.initial_tasks from unguided exploration of the training split, or those of
    config.data.initial_file; with a section config.testbed each weak tool comes at least `least` and at most `most` times
    in it. What is explored is made by `Roles.initial`, where there are such.
    """
    c, seconds = config, {}
    key, train = build.family(c).task_key, build.scenarios(c)
    testbed = c.get("testbed")

    def explored(
        guard: LeakGuard | None, scenarios: Sequence[Task], wanted: int, kind: str, seed: int
    ) -> tuple[list[Task], SynthesisStats]:
        tasks, made_by = TaskPool(key=key), synthesizer(guard)
        made_by = dataclasses.replace(made_by, roles=made_by.roles.initial or made_by.roles)
        with tqdm(total=wanted, desc=f"{kind} tasks", unit="task", leave=False) as bar:
            stats = made_by.synthesize_unguided(
                tasks,
                scenarios,
                wanted=wanted,
                kind=kind,
                step=0,
                rng=rng_for(seed, kind),
                all_or_none=True,
                on_added=bar.update,
            )
        return list(tasks), stats

    with timed(seconds, "other"):
        e, fair = c.evaluation, build.held_out_scenarios(c)
        held_out, _ = explored(None, fair, e.tasks, "held_out", e.seed)
        if e.balanced_tasks:
            many, _ = explored(None, fair, e.balanced_candidates, "balanced", e.seed)
            held_out += choice.balanced(many, e.balanced_tasks, rng_for(e.seed, "balanced choice"))
        guard, size = leak_guard(c, held_out), c.data.initial_tasks
        if path := c.data.get("initial_file"):
            first, initial = tasks_from_file(c, path, synthesizer(guard))
        else:
            wanted = testbed.candidates if testbed else size
            first, initial = explored(guard, train, wanted, "initial", c.seed)
        if testbed:
            rng = rng_for(c.seed, "testbed")
            first = choice.scarce(first, size, testbed.weak_tools, testbed.least, testbed.most, rng)
        tasks = TaskPool(c.data.max_tasks or None, key)
        tasks.add(first)
        initial = dataclasses.replace(initial, added=len(tasks))
    with timed(seconds, "evaluation"):
        rows = evaluate_held_out(c, agent, held_out, step=0, greedy=True)
    ledger = Counter({EXPLORER + key: n for key, n in (synthesizer(None).roles.costs or {}).items()})
    return RunState(0, tasks, held_out, rows, initial, ledger=ledger, seconds=seconds)


def tasks_from_file(
    config: ConfigDict, path: str, synthesizer: Synthesizer
) -> tuple[list[Task], SynthesisStats]:
    """The tasks of a tasks.jsonl, as D_0: those that can still be reproduced, that a rollout can hold, and that are near to no
    evaluation task.

    Raises ValueError for a file that holds no tasks, tasks of another environment, or too few that are good.
    """
    if not os.path.isfile(path):
        raise ValueError(f"config.data.initial_file is {path!r}, which is no file: name a run's tasks.jsonl.")
    found, pool = list(TaskPool.read(path)), TaskPool(key=build.family(config).task_key)
    for task in found:
        if task.environment != config.environment.name:
            raise ValueError(
                f"Task {task.id} of {path} belongs to the environment {task.environment!r}, and config.environment.name "
                f"is {config.environment.name!r}: give tasks that were made in it."
            )
    stats = SynthesisStats(proposed=len(found))
    for n, (task, execution) in enumerate(zip(found, execute(synthesizer.env_pool, found), strict=True)):
        lineage = dataclasses.replace(task.lineage, kind="initial", step=0)
        renamed = dataclasses.replace(task, id=f"initial-0-{n}", lineage=lineage)
        failed = any(answer.error for turn in execution.observations for answer in turn)
        refusal = None if execution.outcome.success else "state_differs"
        if failed or not execution.valid:
            refusal = "step_failed" if execution.valid else "environment"
        if refusal is None and not synthesizer.fits(renamed, execution.observations):
            refusal = "too_long"  # as of explored tasks
        refusal = refusal or synthesizer.admit(pool, renamed)[0]
        stats.refused.update([refusal] if refusal else [])
    stats.added = stats.accepted = len(pool)
    if len(pool) < config.rollout.tasks_per_step:
        raise ValueError(
            f"{path} gives {len(pool)} good tasks of {len(found)} (refused: {dict(stats.refused)}), fewer than the "
            f"{config.rollout.tasks_per_step} of a batch: give more, or lower config.rollout.tasks_per_step."
        )
    return list(pool), stats


def leak_guard(config: ConfigDict, held_out: Sequence[Task]) -> LeakGuard:
    """Compares with the held-out tasks and with the benchmark's own tasks that are for evaluation (build.py).

    Runs whose config is older than the keys of arguments, n-grams, embedding and splits have none of them.
    """
    data, model = config.data, config.data.get("leak_embedding")
    return LeakGuard(
        [*build.benchmark_tasks(config), *held_out],
        data.leak_threshold,
        features=build.family(config).features,
        query_threshold=data.get("leak_query_threshold", 0.0),
        embed=names.function(model, "data.leak_embedding") if model else None,
        embedding_threshold=data.get("leak_embedding_threshold", 0.0),
        call_threshold=data.get("leak_call_threshold", 0.0),
    )
