"""Small cases for the tests of explorers and of synthesis."""

import numpy as np

from coevolve_jax.envs import bfcl
from coevolve_jax.explorers.base import Exploration
from coevolve_jax.synthesis.explore import unguided
from coevolve_jax.types import (
    Call,
    Evidence,
    Group,
    Outcome,
    Signal,
    Step,
    Task,
    Trajectory,
    Triplet,
    Turn,
)


def trajectory(rollout_index, reward, *steps, valid=True):
    """steps: (tool, arguments, error text or None)."""
    rows = tuple(
        Step(0, name, Call(name, args), error or "{}", error is not None) for name, args, error in steps
    )
    none = np.zeros(0, np.int32)
    return Trajectory(
        "t",
        rollout_index,
        none,
        none.astype(bool),
        none.astype(np.float32),
        none,
        (0,),
        rows,
        "done",
        Outcome(reward, reward >= 0.5, valid),
    )


def file_task(*calls):
    """A task of one turn in a small file system, with `calls` as its reference."""
    contents = {
        "a.txt": {"type": "file", "content": "one\ntwo"},
        "sub": {"type": "directory", "contents": {}},
    }
    state = {"GorillaFileSystem": {"root": {"home": {"type": "directory", "contents": contents}}}}
    return Task(
        "t", "bfcl", bfcl.scenario(["GorillaFileSystem"], state), (Turn("do it", calls),) if calls else ()
    )


def recorded(pool, task, calls):
    (run,) = pool.execute([(task, calls)])
    return [Triplet(i, 0, c, o) for i, (c, o) in enumerate(zip(calls, run.observations))]


def evidence(kind, task, own, siblings=(), step=1, pattern=None):
    """A signal of this kind, whose trajectory is `own`."""
    return Evidence(Signal(kind, task.id, own.rollout_index, step, pattern), Group(task, (*siblings, own)))


def exploration(task, triplets, seed=0, tools=()):
    return Exploration(unguided(task, "c"), tools, tuple(triplets), np.random.default_rng(seed))
