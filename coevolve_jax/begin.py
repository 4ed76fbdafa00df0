"""What a run begins with: its held-out sets, D_0, and the success of the policy as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ml_collections import ConfigDict
from tqdm import tqdm

from coevolve_jax import build, names
from coevolve_jax.evaluate import evaluate_held_out
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.run import RunState, timed
from coevolve_jax.seeding import rng_for
from coevolve_jax.synthesis import choice
from coevolve_jax.synthesis.leakage import LeakGuard
from coevolve_jax.synthesis.pipeline import SynthesisStats, Synthesizer
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Task


def begin(
    config: ConfigDict, synthesizer: Callable[[LeakGuard | None], Synthesizer], agent: Agent
) -> RunState:
    """The state of a run before its first step.

    Held out, in scenarios of the evaluation split and never trained on: config.evaluation.tasks from unguided
    exploration, as D_0 is ("held_out"), and config.evaluation.balanced_tasks in which all tools come about equally
    often ("balanced"). D_0 is config.data.initial_tasks from unguided exploration of the training split; with a
    section config.testbed each weak tool comes at least `least` and at most `most` times in it.
    """
    c, seconds = config, {}
    key, train = build.family(c).task_key, build.scenarios(c)
    testbed = c.get("testbed")

    def explored(
        guard: LeakGuard | None, scenarios: Sequence[Task], wanted: int, kind: str, seed: int
    ) -> tuple[list[Task], SynthesisStats]:
        tasks = TaskPool(key=key)
        with tqdm(total=wanted, desc=f"{kind} tasks", unit="task", leave=False) as bar:
            stats = synthesizer(guard).explore_unguided(
                tasks,
                scenarios,
                wanted=wanted,
                kind=kind,
                step=0,
                rng=rng_for(seed, kind),
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
        first, initial = explored(guard, train, testbed.candidates if testbed else size, "initial", c.seed)
        if testbed:
            rng = rng_for(c.seed, "testbed")
            first = choice.scarce(first, size, testbed.weak_tools, testbed.least, testbed.most, rng)
        tasks = TaskPool(c.data.max_tasks or None, key)
        tasks.add(first)
        initial = dataclasses.replace(initial, added=len(tasks), explored=[])
    with timed(seconds, "evaluation"):
        rows = evaluate_held_out(c, agent, held_out, step=0, greedy=True)
    return RunState(0, tasks, held_out, rows, initial, seconds=seconds)


def leak_guard(config: ConfigDict, held_out: Sequence[Task]) -> LeakGuard:
    """Compares with the held-out tasks and with the benchmark's own tasks of the evaluation split.

    Runs whose config is older than the keys of n-grams and embedding have neither.
    """
    data, model = config.data, config.data.get("leak_embedding")
    return LeakGuard(
        [*build.benchmark_tasks(config), *held_out],
        data.leak_threshold,
        features=build.family(config).features,
        query_threshold=data.get("leak_query_threshold", 0.0),
        embed=names.function(model, "data.leak_embedding") if model else None,
        embedding_threshold=data.get("leak_embedding_threshold", 0.0),
    )
