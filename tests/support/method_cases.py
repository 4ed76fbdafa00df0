"""Made-up tasks, rollouts and labs for the tests of methods. Nothing runs a model or an environment."""

import json
from collections import Counter

import numpy as np

from coevolve_jax import build
from coevolve_jax import config as configs
from coevolve_jax.seeding import rng_for
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.testing.made_up import MadeUpLab
from coevolve_jax.types import Call, Group, Lineage, Outcome, Step, Task, Trajectory, Turn
from tests.support.paths import ROOT

TINY = configs.load_file(ROOT / "configs" / "bfcl_tiny.py")


def config_of(name: str, **changes):
    """The tiny config with a strategy. Keys without a dot are settings of the strategy."""
    keys = {k if "." in k else f"strategy.{k}": v for k, v in changes.items()}
    return configs.override(TINY, {"strategy.name": name, "steps": 60, "evolution.every": 5, **keys})


def a_task(id: str, *names: str, scenario=None, kind: str = "initial", turns: int = 1) -> Task:
    """A task whose reference calls have these names; by default in a scenario of its own."""
    calls = tuple(Call(name, {"x": i}) for i, name in enumerate(names))
    parts = tuple(Turn("q", calls[i::turns]) for i in range(turns))
    return Task(id, "made_up", {"id": id} if scenario is None else scenario, parts, lineage=Lineage(kind))


def a_pool(*tasks: Task) -> TaskPool:
    pool = TaskPool()
    assert not any(pool.add(tasks))
    return pool


def a_step(name: str, x: int = 0, error: bool = False, answer: str = "{}", turn: int = 0) -> Step:
    return Step(turn, name, Call(name, {"x": x}), answer, error)


def a_rollout(
    task: Task,
    index: int,
    success: bool,
    steps=None,
    *,
    logprob: float = -0.5,
    tokens: int = 6,
    stop: str = "done",
    valid: bool = True,
) -> Trajectory:
    """A rollout of `tokens` sampled tokens after 4 others. steps: None stands for the reference calls."""
    mask = np.arange(4 + tokens) >= 4
    made = tuple(Step(0, c.name, c, "{}", error=False) for c in task.calls)
    won = success and valid
    return Trajectory(
        task.id, index, np.arange(4 + tokens, dtype=np.int32), mask,
        np.where(mask, logprob, 0).astype(np.float32), np.where(mask, 0, -1).astype(np.int32), (0,),
        made if steps is None else tuple(steps), stop, Outcome(float(won), won, valid),
    )  # fmt: skip


def a_group(task: Task, *successes: bool, **how) -> Group:
    return Group(task, tuple(a_rollout(task, i, bool(won), **how) for i, won in enumerate(successes)))


class Rolls:
    """A strategies.base.Roll whose rollouts succeed with a chance by task. It counts the visits."""

    def __init__(self, chance, seed: int = 0):
        self.chance, self.seed, self.calls, self.visits = chance, seed, 0, Counter()

    def __call__(self, tasks, k, hints=None, role="policy"):
        rng = rng_for(self.seed, "rolls", self.calls)
        self.calls += 1
        self.visits.update(task.id for task in tasks)
        return [a_group(task, *(rng.random(k) < self.chance(task))) for task in tasks]


class Lab(MadeUpLab):
    """A made-up lab that keeps the contexts it was given, and probes by a chance by task."""

    def __init__(self, config, tasks, chance=lambda task: 0.5, **more):
        super().__init__(config, tasks, **more)
        self.contexts, self.kinds, self._rolls = [], Counter(), Rolls(chance, seed=9)

    def synthesize(self, contexts, **how):
        self.contexts += contexts
        self.kinds[how["kind"]] += len(contexts)
        return super().synthesize(contexts, **how)

    def probe(self, tasks, k, step):
        self.probed = True
        return self._rolls(tasks, k)


def again(strategy, config):
    """The strategy as a checkpoint restores it."""
    state = json.loads(json.dumps(strategy.to_json()))
    return build.strategy(config, {"strategy": {"name": config.strategy.name, "state": state}})


def born(tasks: TaskPool, kind: str) -> list[Task]:
    return [task for task in tasks if task.lineage.kind == kind]


def slots(strategy, tasks, rolls, steps: range, name) -> Counter:
    """Runs steps without growth. Returns how often each name of tasks was drawn."""
    drawn: Counter = Counter()
    for step in steps:
        groups = strategy.collect(step, tasks, rolls)
        strategy.compute_advantages(groups)
        strategy.observe(step, groups)
        drawn.update(name(group.task) for group in groups)
    return drawn
