"""A strategy's rollouts: `Roller` rolls tasks out; `Collector` collects a step's batch, or steps ahead."""

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
from coevolve_jax.records.costs import ROLLOUTS, SAMPLED
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.rollout.engine import check_logprobs
from coevolve_jax.rollout.utilization import Usage
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies.base import Strategy, trajectories_of
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Group, Hint, Outcome, Task, Trajectory


class Roller:
    """strategies.base.Roll for one step.

    Seeds depend on the step, the role, and the number of earlier calls in that role.

    costs: counts so far: "rollouts/ROLE" and "sampled_tokens/ROLE".
    closed: whether its costs are booked. A further call, which nobody would count, raises ValueError.
    """

    def __init__(self, config: ConfigDict, agent: Agent, step: int):
        self._config, self._agent, self._step = config, agent, step
        self._calls: Counter[str] = Counter()
        self.costs: Counter[str] = Counter()
        self.closed = False

    def __call__(
        self,
        tasks: Sequence[Task],
        k: int,
        hints: Callable[[Task, int], Hint | None] | None = None,
        role: str = "policy",
        greedy: bool = False,
    ) -> list[Group]:
        """greedy: sample at temperature 0."""
        if self.closed:
            raise ValueError(
                f"The strategy called `roll` of step {self._step} after `collect` had returned, when its "
                "rollouts were counted already: call it within `collect`, or use lab.probe in `evolve`."
            )
        call, self._calls[role] = self._calls[role], self._calls[role] + 1
        again = (call,) if call else ()
        rng = rng_for(self._config.seed, "rollout" if role == "policy" else role, self._step, *again)
        seeds = rng.integers(2**32, size=(len(tasks), k)).tolist()
        temperature = 0.0 if greedy else self._config.rollout.temperature
        groups = list(map(without_answers, self._agent.rollout_groups(tasks, seeds, temperature, hints)))
        done = trajectories_of(groups)
        self.costs[ROLLOUTS + role] += len(done)
        self.costs[SAMPLED + role] += sum(int(t.mask.sum()) for t in done)
        return groups


class Collected(NamedTuple):
    """The rollouts of one step.

    Attributes:
      groups: of the step.
      usage: of engine and workers since the last step was collected.
      costs: see Roller.
      seconds: duration of strategy.collect. With steps ahead, rollouts of several steps share that time.
    """

    groups: list[Group]
    usage: Usage
    costs: Counter[str]
    seconds: float


class Collector:
    """Calls strategy.collect for one step after the other.

    With config.rollout.max_staleness S, rollouts of the next S steps run ahead by the current weights.
    Meanwhile the loop waits for this step's rollouts and learns from them.

    A step's batch is what the strategy drew for it, not what finishes first: that would favour short
    trajectories. Slow rollouts delay only their own step. Those of later steps take the slots that become
    free.
    """

    def __init__(self, config: ConfigDict, strategy: Strategy, agent: Agent, tasks: TaskPool):
        self._config, self._strategy, self._agent, self._tasks = config, strategy, agent, tasks
        bound = config.rollout.max_staleness
        # An engine that serves whole batches cannot mix steps: one thread then takes one step after the
        # other.
        self._threads = ThreadPoolExecutor(1 if agent.batches else 1 + bound) if bound else None
        self._coming: deque[Future] = deque()  # rollouts of the next step to return, then of those after it

    @interruptible()
    def __call__(self, step: int) -> Collected:
        """Returns the rollouts of this step. Those older than max_staleness are marked invalid.

        Raises:
          FloatingPointError: the policy's log-probabilities are not finite.
          Preempted: the run is asked to end.
        """
        bound = self._config.rollout.max_staleness
        if not self._coming:
            self._agent.usage()  # resets the counts: what ran before is not this step's
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
        # D_t may grow while the thread runs, and its draw must not depend on when.
        tasks = self._tasks.fork() if self._threads else self._tasks

        def collect():
            start, roll = time.perf_counter(), Roller(self._config, self._agent, step)
            groups = self._strategy.collect(step, tasks, roll)
            roll.closed = True
            return groups, roll.costs, time.perf_counter() - start

        if self._threads:
            return self._threads.submit(collect)
        done: Future = Future()
        done.set_result(collect())
        return done


def leave_out_stale(trajectories: Sequence[Trajectory], step: int, bound: int) -> tuple[Trajectory, ...]:
    """Marks trajectories invalid if weights more than `bound` updates old sampled any of their tokens."""
    too_old = Outcome(0.0, False, valid=False, reason="sampled by weights that are too old")
    return tuple(
        dataclasses.replace(t, outcome=too_old)
        if t.outcome.valid and step - t.versions[t.mask].min(initial=step) > bound
        else t
        for t in trajectories
    )


def without_answers(group: Group) -> Group:
    """Gives the valid rollouts of a held-out query reward 0, whatever they did; other groups stay."""
    if not group.task.is_query:
        return group
    hidden = Outcome(0.0, False, reason="the answer of a held-out query is not told in training")
    return dataclasses.replace(
        group,
        trajectories=tuple(
            dataclasses.replace(t, outcome=hidden) if t.outcome.valid else t for t in group.trajectories
        ),
    )


def describe(groups: Sequence[Group], step: int) -> dict[str, float | int | None]:
    """Statistics of one step's rollouts for metrics.jsonl; None if no valid rollout contributes.

    Rewards and successes are those of tasks with answers. Held-out queries have none: they are left out.
    """
    trajectories = trajectories_of(groups)
    told = [g for g in groups if not g.task.is_query]
    scored = [t for g in told for t in g.valid]
    valid = [t for t in trajectories if t.outcome.valid]
    mean = lambda values: float(np.mean(values)) if len(values) else None
    of_kind = lambda initial: mean(
        [t.outcome.success for g in told if (g.task.lineage.kind == "initial") == initial for t in g.valid]
    )
    steps = [s for t in valid for s in t.steps]
    ages = np.concatenate([step - t.versions[t.mask] for t in valid] or [np.zeros(0)])
    return {
        "reward": mean([t.outcome.reward for t in scored]),
        "success": mean([t.outcome.success for t in scored]),
        "success_initial": of_kind(True),
        "success_new": of_kind(False),
        "valid": len(valid) / len(trajectories),
        "mixed_groups": mean([g.mixed for g in told if g.valid]),
        "mean_turn_calls": mean([len(t.steps) / len(t.turn_starts) for t in valid]),
        "malformed": mean([s.call is None for s in steps]),
        "length": mean([len(t.ids) for t in valid]),
        # Age, in updates, of the weights that sampled each token.
        "staleness_mean": float(ages.mean()) if len(ages) else 0.0,
        "staleness_max": int(ages.max(initial=0)),
    }
