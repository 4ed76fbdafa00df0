"""A strategy's rollouts: what `roll` does, and a step's batch collected now or some steps ahead."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.preemption import interruptible
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.rollout.engine import check_logprobs
from coevolve_jax.rollout.utilization import Usage
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import Strategy, trajectories_of
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Group, Hint, Outcome, Task, Trajectory


class Roller:
    """strategies.base.Roll for one step: seeds depend on the step, on `role` and on how often it was called.

    costs: what was rolled out so far: "rollouts/ROLE" and "sampled_tokens/ROLE".
    """

    def __init__(self, config: ConfigDict, agent: Agent, step: int):
        self._config, self._agent, self._step = config, agent, step
        self._calls: Counter[str] = Counter()
        self.costs: Counter[str] = Counter()

    def __call__(
        self,
        tasks: Sequence[Task],
        k: int,
        hints: Callable[[Task, int], Hint | None] | None = None,
        role: str = "policy",
    ) -> list[Group]:
        call, self._calls[role] = self._calls[role], self._calls[role] + 1
        again = (call,) if call else ()
        rng = rng_for(self._config.seed, "rollout" if role == "policy" else role, self._step, *again)
        seeds = rng.integers(2**32, size=(len(tasks), k)).tolist()
        groups = self._agent.rollout_groups(tasks, seeds, self._config.rollout.temperature, hints)
        done = trajectories_of(groups)
        self.costs[f"rollouts/{role}"] += len(done)
        self.costs[f"sampled_tokens/{role}"] += sum(int(t.mask.sum()) for t in done)
        return groups


class Collected(NamedTuple):
    """groups: of the step. usage: of engine and workers since the last one. costs: see Roller. seconds: from the first of
    these rollouts to the last, beside other steps' where they run ahead."""

    groups: list[Group]
    usage: Usage
    costs: Counter[str]
    seconds: float


class Collector:
    """strategy.collect for one step after the other; with config.rollout.max_staleness S the rollouts of the next S
    steps already run, by the weights that there are, while this step's are waited for and learned from.

    A step's batch is what the strategy drew for it, and not what ends first: that would be the short trajectories. Slow
    ones hold up their own step alone, since the next steps' take the places that become free.
    """

    def __init__(self, config: ConfigDict, strategy: Strategy, agent: Agent, tasks: TaskPool):
        self._config, self._strategy, self._agent, self._tasks = config, strategy, agent, tasks
        bound = config.rollout.max_staleness
        # An engine that serves batches is asked for one step after the other.
        self._threads = ThreadPoolExecutor(1 if agent.batches else 1 + bound) if bound else None
        self._coming: deque[Future] = deque()  # of this step, when it is called for, and of those after it

    @interruptible()
    def __call__(self, step: int) -> Collected:
        """The rollouts of this step, too old ones as invalid.

        Raises FloatingPointError where the policy gives no probabilities, Preempted where the run is asked to end.
        """
        bound = self._config.rollout.max_staleness
        if not self._coming:
            self._agent.usage()  # forgets what was before
        while len(self._coming) <= bound and (
            not self._coming or step + len(self._coming) < self._config.steps
        ):
            self._coming.append(self._begin(step + len(self._coming)))
        groups, costs, seconds = self._coming.popleft().result()
        check_logprobs(trajectories_of(groups))
        fresh = [
            dataclasses.replace(g, trajectories=leave_out_stale(g.trajectories, step, bound)) for g in groups
        ]
        return Collected(fresh, self._agent.usage(), costs, seconds)

    def _begin(self, step: int) -> Future:
        tasks = self._tasks.fork() if self._threads else self._tasks  # it grows while they run

        def collect():
            start, roll = time.perf_counter(), Roller(self._config, self._agent, step)
            groups = self._strategy.collect(step, tasks, roll)
            return groups, roll.costs, time.perf_counter() - start

        if self._threads:
            return self._threads.submit(collect)
        done: Future = Future()
        done.set_result(collect())
        return done


def leave_out_stale(trajectories: Sequence[Trajectory], step: int, bound: int) -> tuple[Trajectory, ...]:
    """Trajectories with a token sampled by weights more than `bound` updates old become invalid."""
    too_old = Outcome(0.0, False, valid=False, reason="sampled by weights that are too old")
    return tuple(
        dataclasses.replace(t, outcome=too_old)
        if t.outcome.valid and step - t.versions[t.mask].min(initial=step) > bound
        else t
        for t in trajectories
    )


def describe(groups: Sequence[Group], step: int) -> dict[str, float | int | None]:
    """Numbers of one step's rollouts for metrics.jsonl; None where no valid rollout has any."""
    trajectories = trajectories_of(groups)
    valid = [t for t in trajectories if t.outcome.valid]
    mean = lambda values: float(np.mean(values)) if len(values) else None
    of_kind = lambda initial: mean(
        [t.outcome.success for g in groups if (g.task.lineage.kind == "initial") == initial for t in g.valid]
    )
    steps = [s for t in valid for s in t.steps]
    ages = np.concatenate([step - t.versions[t.mask] for t in valid] or [np.zeros(0)])
    return {
        "reward": mean([t.outcome.reward for t in valid]),
        "success": mean([t.outcome.success for t in valid]),
        "success_initial": of_kind(True),
        "success_new": of_kind(False),
        "valid": len(valid) / len(trajectories),
        "mixed_groups": mean([g.mixed for g in groups if g.valid]),
        "mean_turn_calls": mean([len(t.steps) / len(t.turn_starts) for t in valid]),
        "malformed": mean([s.call is None for s in steps]),
        "length": mean([len(t.ids) for t in valid]),
        # How many updates old the weights were that sampled the tokens learned from.
        "staleness_mean": float(ages.mean()) if len(ages) else 0.0,
        "staleness_max": int(ages.max(initial=0)),
    }
