"""Measures the learner's waits for rollouts with lognormal durations, by config.rollout.max_staleness.

A small simulation and the loop's own collector and agent give the share of waiting time. A rollout is one
message, which a served engine answers after its seconds; an update is a pause. All seconds come from the
schedule alone.

    JAX_PLATFORMS=cpu python benchmarks/ahead.py --median=0.1 --sigma=1.0 --update=0.25
"""

import asyncio
import heapq
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from absl import app, flags
from ml_collections import ConfigDict

sys.path.insert(0, str(Path(__file__).parents[1]))

from coevolve_jax.loop.collect import Collector
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.rollout.engine import Completion
from coevolve_jax.rollout.limits import Limits
from coevolve_jax.seeding import rng_for
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Task, Turn
from tests.support import loop_fakes
from tests.support.families import lamps

MEDIAN = flags.DEFINE_float("median", 0.1, "seconds of a rollout", lower_bound=0)
SIGMA = flags.DEFINE_float("sigma", 1.0, "of their logarithm", lower_bound=0)
UPDATE = flags.DEFINE_float("update", 0.25, "seconds of an update", lower_bound=0)
CONCURRENCY = flags.DEFINE_integer("concurrency", 64, "rollouts at once", lower_bound=1)
TASKS = flags.DEFINE_integer("tasks", 16, "of a step", lower_bound=1)
GROUP = flags.DEFINE_integer("group_size", 8, "rollouts of a task", lower_bound=1)
STEPS = flags.DEFINE_integer("steps", 40, "GRPO steps", lower_bound=1)
STALENESS = flags.DEFINE_multi_integer(
    "staleness", [0, 1, 2, 4], "config.rollout.max_staleness", lower_bound=0
)


def seconds_of(seed: int, median: float, sigma: float) -> float:
    return median * float(np.exp(sigma * np.random.default_rng(seed).standard_normal()))


def simulate(rollouts: list[list[float]], update: float, concurrency: int, staleness: int) -> float:
    """The share of the time in which the learner waits. rollouts: the seconds of each, by step."""
    free, ready, waited, done = [0.0] * concurrency, [0.0], 0.0, []
    for step in range(len(rollouts)):
        for begun in range(len(done), min(len(rollouts), step + staleness + 1)):
            ends = [0.0]
            for seconds in rollouts[begun]:
                end = max(ready[step], heapq.heappop(free)) + seconds
                heapq.heappush(free, end)
                ends.append(end)
            done.append(max(ends))
        there = max(ready[step], done[step])
        waited += there - ready[step]
        ready.append(there + update)
    return waited / ready[-1]


class Lognormal:
    """A served engine with empty answers, after seconds that depend on the rollout's seed."""

    batches = False

    async def generate(self, requests):
        (request,) = requests
        await asyncio.sleep(seconds_of(request.seed, MEDIAN.value, SIGMA.value))
        ids = np.asarray([0x100, *loop_fakes.CHAT.stop_ids], np.int32)
        return [Completion(ids, np.zeros(2, np.float32), "stop", np.zeros(2, np.int32))]

    def release(self, conversation_ids):
        pass


def measure(staleness: int) -> float:
    """Measures the share of `simulate` with the real collector and agent."""
    rollout = {"temperature": 1.0, "max_staleness": staleness}
    config = ConfigDict({"seed": 0, "steps": STEPS.value, "rollout": rollout})
    tasks = TaskPool()
    tasks.add([Task(f"t{i}", "lamps", lamps.scenario(0), (Turn(f"look {i}"),)) for i in range(TASKS.value)])
    strategy = SimpleNamespace(collect=lambda step, tasks, roll: roll(list(tasks), GROUP.value))
    limits = Limits(max_length=400, max_new_tokens=32)
    agent = Agent(Lognormal(), loop_fakes.CHAT, loop_fakes.Worlds(), lamps.tools, limits, CONCURRENCY.value)
    collect, waited, start = Collector(config, strategy, agent, tasks), 0.0, time.perf_counter()
    for step in range(STEPS.value):
        asked = time.perf_counter()
        collect(step)
        waited += time.perf_counter() - asked
        time.sleep(UPDATE.value)
    total = time.perf_counter() - start
    agent.close()
    return waited / total


def main(_):
    size = TASKS.value, GROUP.value
    seeds = [
        rng_for(0, "rollout", step).integers(2**32, size=size).ravel().tolist() for step in range(STEPS.value)
    ]
    rollouts = [[seconds_of(seed, MEDIAN.value, SIGMA.value) for seed in row] for row in seeds]
    busy = sum(map(sum, rollouts)) / CONCURRENCY.value / STEPS.value
    slowest = statistics.mean(map(max, rollouts))
    print(
        f"A step: update {UPDATE.value:.2f} s; rollouts {busy:.2f} s of all places, slowest {slowest:.2f} s\n"
    )
    print("| max_staleness | the learner waits: simulated | measured |\n|---|---|---|")
    for staleness in STALENESS.value:
        share = simulate(rollouts, UPDATE.value, CONCURRENCY.value, staleness)
        print(f"| {staleness} | {share:.1%} | {measure(staleness):.1%} |", flush=True)


if __name__ == "__main__":
    app.run(main)
