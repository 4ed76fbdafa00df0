"""One step's batch of tasks and their rollouts, now or one step ahead."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.grpo.advantages import spreads
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.types import Outcome, Task, Trajectory

PURPOSES = ("held_out", "initial", "sample", "rollout", "evolve")


def rng_for(seed: int, purpose: str, step: int = 0, *again: int) -> np.random.Generator:
    """The generator of one purpose at one step, and of its repetition `again`; none lives across steps."""
    return np.random.default_rng([seed, PURPOSES.index(purpose), step, *again])


class Rollouts:
    """The rollouts of one step after the other; with config.rollout.max_staleness those of the next step already run, by
    the weights that there are, while this step's are learned from."""

    def __init__(self, config: ConfigDict, agent: Agent, tasks: TaskPool):
        self._config, self._agent, self._tasks = config, agent, tasks
        self._thread = ThreadPoolExecutor(1) if config.rollout.max_staleness else None
        self._coming: Future | None = None

    def next_batch(self, step: int) -> tuple[list[Task], list[Trajectory], dict[str, float]]:
        """The tasks of this step, their trajectories, and how busy engine and workers were (Agent.utilization).
        What was drawn counts in the pool from here on."""
        coming, self._coming = self._coming or self._begin(step), None
        drawn, batch, trajectories, utilization = coming.result()
        self._tasks.commit(drawn)
        if self._config.rollout.max_staleness and step + 1 < self._config.steps:
            self._coming = self._begin(step + 1)
        return batch, trajectories, utilization

    def _begin(self, step: int) -> Future:
        tasks = self._tasks.fork()

        def roll():
            self._agent.utilization()  # forgets what was before
            return tasks, *sample(self._config, self._agent, tasks, step), self._agent.utilization()

        if self._thread:
            return self._thread.submit(roll)
        done: Future = Future()
        done.set_result(roll())
        return done


def leave_out_stale(trajectories: Sequence[Trajectory], step: int, bound: int) -> list[Trajectory]:
    """Trajectories with a token sampled by weights more than `bound` updates old become invalid."""
    return [
        dataclasses.replace(
            t, outcome=Outcome(0.0, False, valid=False, reason="sampled by weights that are too old")
        )
        if t.outcome.valid and step - t.versions[t.mask].min(initial=step) > bound
        else t
        for t in trajectories
    ]


def staleness(trajectories: Sequence[Trajectory], step: int) -> dict[str, float]:
    """How many updates old the weights were that sampled the tokens learned from."""
    ages = np.concatenate(
        [step - t.versions[t.mask] for t in trajectories if t.outcome.valid] or [np.zeros(0)]
    )
    return {
        "staleness_mean": float(ages.mean()) if len(ages) else 0.0,
        "staleness_max": int(ages.max(initial=0)),
    }


def sample(
    config: ConfigDict, agent: Agent, tasks: TaskPool, step: int
) -> tuple[list[Task], list[Trajectory]]:
    """A batch of tasks from D_t and their rollouts.

    With config.learner.dynamic_sampling (DAPO, arXiv 2503.14476, section 3.2) a group without spread asks for
    another task, for at most that many rounds more. All that was rolled out is returned.
    """
    c, batch, trajectories = config, [], []
    missing = c.rollout.tasks_per_step
    for round in range(1 + c.learner.dynamic_sampling):
        again = (round,) if round else ()
        drawn = tasks.sample(missing, rng_for(c.seed, "sample", step, *again), new_share=c.data.new_share)
        if round:  # a small pool may give a task of this step once more
            seen = {t.id for t in batch}
            drawn = [t for t in drawn if t.id not in seen]
        if not drawn:
            break
        batch += drawn
        trajectories += roll_out(c, agent, drawn, step, *again)
        missing = c.rollout.tasks_per_step - sum(
            spread > 0 for spread in group_spreads(trajectories).values()
        )
        if missing <= 0:
            break
    return batch, trajectories


def roll_out(
    config: ConfigDict, agent: Agent, batch: Sequence[Task], step: int, *again: int
) -> list[Trajectory]:
    """K trajectories for each task of the batch."""
    k = config.rollout.group_size
    seeds = rng_for(config.seed, "rollout", step, *again).integers(2**32, size=len(batch) * k)
    jobs = [(task, m, int(seeds[i * k + m])) for i, task in enumerate(batch) for m in range(k)]
    return agent.rollouts(jobs, config.rollout.temperature)


def group_spreads(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Task id -> standard deviation of its valid rollouts' rewards."""
    return spreads(*zip(*((t.outcome.reward, t.task_id, t.outcome.valid) for t in trajectories)))


def check_sampler(trajectories: Sequence[Trajectory]) -> None:
    """Raises FloatingPointError where the policy gives no probabilities, which its rewards need not show."""
    if not all(np.isfinite(t.logprobs).all() for t in trajectories):
        raise FloatingPointError(
            "The sampler's log-probabilities are not finite: the last update broke the policy; lower "
            "config.learner.learning_rate and start again in a new workdir, or from an earlier checkpoint."
        )
