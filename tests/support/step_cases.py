"""Random groups of rollouts: every outcome, invalid ones, empty groups, failing calls, unparsable texts."""

import dataclasses

import numpy as np

from coevolve_jax.types import Call, Group, Lineage, Outcome, Step, Task, Trajectory, Turn

TOOLS = "abcdef"
STOPS = ("done", "done", "token_limit", "step_limit", "context_limit")


def pick(rng, values):
    return values[rng.integers(len(values))]


def a_call(rng) -> Call:
    return Call(pick(rng, TOOLS), {"x": int(rng.integers(2))})


def a_task(rng, name, kind="initial") -> Task:
    calls = [tuple(a_call(rng) for _ in range(rng.integers(1, 4))) for _ in range(rng.integers(1, 3))]
    lineage = Lineage(kind, parent=f"scenario_{rng.integers(3)}", context=f"context of {name}")
    return Task(name, "made_up", {"n": name}, tuple(Turn("q", own) for own in calls), lineage=lineage)


def a_step(rng, reference) -> Step:
    """A call of the reference, another one, or a text that is no call."""
    kind, error = rng.random(), bool(rng.random() < 0.3)
    if kind < 0.15:
        return Step(0, pick(rng, ("?", "??")), None, "no call", error=True)
    call = pick(rng, reference) if kind < 0.7 else a_call(rng)
    pattern = "" if kind > 0.95 else f"{call.name} on x" if kind > 0.85 else None
    return Step(0, f"{call.name}{call.arguments['x']}", call, f"answer {rng.integers(9)}", error, pattern)


def a_rollout(rng, task, index, step=0) -> Trajectory:
    """The reference with gaps and additions."""
    length, turns = int(rng.integers(4, 12)), int(rng.integers(1, 4))
    mask = rng.random(length) < 0.5
    mask[-1] = True
    steps = [
        Step(0, f"{c.name}{c.arguments['x']}", c, "{}", error=False) for c in task.calls if rng.random() < 0.8
    ]
    for _ in range(rng.integers(0, 4)):
        steps.insert(int(rng.integers(len(steps) + 1)), a_step(rng, task.calls))
    reward, valid = float(pick(rng, (0.0, 0.25, 0.5, 1.0))), bool(rng.random() < 0.8)
    return Trajectory(
        task.id,
        index,
        rng.integers(0, 50, length).astype(np.int32),
        mask,
        np.where(mask, -rng.random(length), 0).astype(np.float32),
        np.where(mask, step - rng.integers(0, 3, length), -1).astype(np.int32),
        tuple(range(turns)),
        tuple(steps),
        pick(rng, STOPS) if valid else "environment",
        Outcome(reward, reward >= 0.5, valid),
    )


def some_groups(rng, step=0, most=5, k=4) -> list[Group]:
    """Groups of initial and of new tasks; some without a valid rollout, some without any."""
    groups = []
    for i in range(rng.integers(1, most + 1)):
        task = a_task(rng, f"t{i}", pick(rng, ("initial", "signal")))
        count = int(rng.integers(0, k + 1)) if i else k
        rollouts = [a_rollout(rng, task, m, step) for m in range(count)]
        if rng.random() < 0.3:  # all rewards are equal
            rollouts = [as_(t, rollouts[0].outcome.reward, t.outcome.valid) for t in rollouts]
        if rng.random() < 0.15:
            rollouts = [as_(t, t.outcome.reward, False) for t in rollouts]
        groups.append(Group(task, tuple(rollouts)))
    return groups


def as_(trajectory, reward, valid) -> Trajectory:
    return dataclasses.replace(trajectory, outcome=Outcome(reward, reward >= 0.5, valid))
