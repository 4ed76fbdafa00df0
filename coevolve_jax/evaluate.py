"""Success rates under a named protocol."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Sequence
from importlib import metadata

import numpy as np
from ml_collections import ConfigDict
from tqdm import tqdm

from coevolve_jax.rollout.agent import Agent, Job
from coevolve_jax.types import Task, Trajectory


@dataclasses.dataclass(frozen=True)
class Result:
    """success: mean over tasks and samples, invalid rollouts left out. by_task: id -> [successes, trials].
    by_calls: number of reference calls -> the same. mixed_groups: share of tasks whose samples hold both outcomes."""

    temperature: float
    samples: int
    success: float
    invalid: int
    mixed_groups: float
    by_task: dict[str, list[int]]
    by_calls: dict[str, list[int]]
    stops: dict[str, int]

    def to_json(self) -> dict:
        return dataclasses.asdict(self)


def evaluate(
    agent: Agent,
    tasks: Sequence[Task],
    *,
    samples: int,
    temperature: float,
    seed: int,
    title: str = "evaluation",
) -> tuple[Result, list[Trajectory]]:
    """Rolls every task out `samples` times; the trajectories come task by task.

    The engine's noise depends on `seed`, so that equal weights and seeds give equal results.
    """
    seeds = np.random.default_rng(seed).integers(2**32, size=len(tasks) * samples)
    jobs = [Job(task, m, int(seeds[i * samples + m])) for i, task in enumerate(tasks) for m in range(samples)]
    with tqdm(total=len(jobs), desc=title, unit="rollout", leave=False) as bar:
        trajectories = agent.rollouts(jobs, temperature, on_done=bar.update)
    return tally(tasks, trajectories, samples, temperature), trajectories


def tally(
    tasks: Sequence[Task], trajectories: Sequence[Trajectory], samples: int, temperature: float
) -> Result:
    """Counts outcomes; trajectories[i] belongs to tasks[i // samples]."""
    by_task = {task.id: [0, 0] for task in tasks}
    by_calls: dict[int, list[int]] = {len(task.calls): [0, 0] for task in tasks}
    for i, t in enumerate(trajectories):
        if t.outcome.valid:
            for count in (by_task[t.task_id], by_calls[len(tasks[i // samples].calls)]):
                count[0] += int(t.outcome.success)
                count[1] += 1
    trials = sum(n for _, n in by_task.values())
    return Result(
        temperature=temperature,
        samples=samples,
        success=sum(s for s, _ in by_task.values()) / trials if trials else 0.0,
        invalid=len(trajectories) - trials,
        mixed_groups=float(np.mean([0 < s < n for s, n in by_task.values()])),
        by_task=by_task,
        by_calls={str(n): by_calls[n] for n in sorted(by_calls)},
        stops=dict(sorted(Counter(t.stop for t in trajectories).items())),
    )


def held_out_result(config: ConfigDict, agent: Agent, tasks: Sequence[Task]) -> dict:
    """Success on the held-out tasks by sampling, as in training, and by greedy decoding."""
    c = config.evaluation
    sampled, _ = evaluate(
        agent, tasks, samples=c.samples, temperature=c.temperature, seed=c.seed, title="held-out"
    )
    greedy, _ = evaluate(agent, tasks, samples=1, temperature=0.0, seed=c.seed, title="held-out, greedy")
    return {**sampled.to_json(), "greedy_success": greedy.success}


def versions() -> dict[str, str]:
    """Versions of what a score depends on, of the packages that this interpreter has."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "bfcl-eval", "numpy")
    found = {}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
