"""Finds out which tools of a server are fit to train on: makes the same calls twice, in equal worlds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from coevolve_jax.envs.mcp.environment import Environment
from coevolve_jax.types import Call, Observation, Task

APART = 1.1  # seconds between two executions: clocks with whole seconds then differ


@dataclasses.dataclass(frozen=True)
class Step:
    """A call in two worlds, with its answer in each.

    changed: the paths that it changed. differ: the paths that differ between the worlds after it.
    """

    call: Call
    first: Observation
    second: Observation
    changed: frozenset[str]
    differ: frozenset[str]

    @property
    def repeats(self) -> bool:
        """Says whether the answer is the same in both worlds."""
        return self.first == self.second


@dataclasses.dataclass
class Findings:
    """Counts of a tool's calls, and examples of what is wrong with it.

    calls, succeeded, changed: how often it was called, without an error, with a change of the folder.
    differing: an example of two answers that differ. paths: those that it changed. stray: paths that differ
    between two worlds after the same calls.
    """

    calls: int = 0
    succeeded: int = 0
    changed: int = 0
    differing: tuple[str, str] | None = None
    paths: frozenset[str] = frozenset()
    stray: frozenset[str] = frozenset()

    @property
    def fit(self) -> bool:
        return self.succeeded > 0 and self.differing is None and not self.stray


def execute(make: Callable[[], Environment], task: Task, calls: Sequence[Call]) -> list[Step]:
    """Makes the calls in two fresh worlds, one after the other. It ends with a call that is lost in one."""
    played = []
    for number in range(2):
        time.sleep(APART * number)
        world = make()
        world.reset(task)
        steps = [(Observation(""), world.state())]
        for call in calls:
            answered = world.step(call)
            steps.append((answered, world.state()))
            if answered.fatal:
                break
        world.close()
        played.append(steps)
    found = []
    for call, before, one, other in zip(calls, played[0], played[0][1:], played[1][1:]):
        changed, differ = _differing(before[1], one[1]), _differing(one[1], other[1])
        found.append(Step(call, one[0], other[0], changed, differ))
    return found


def _differing(one: dict[str, str], other: dict[str, str]) -> frozenset[str]:
    return frozenset(path for path in one.keys() | other.keys() if one.get(path) != other.get(path))


def alike(rounds: Sequence[Sequence[Step]], others: Sequence[Sequence[Step]]) -> bool:
    """Says whether the same calls gave the same answers and changed the same paths in all four worlds."""
    return all(
        a.first == b.first and b.repeats and not b.differ and a.changed == b.changed
        for one, other in zip(rounds, others, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def summary(rounds: Sequence[Sequence[Step]], tools: Sequence[str]) -> dict[str, Findings]:
    """Returns the findings by tool. rounds: the steps of each world. tools: all that the server offers.

    A path that differs counts for the call after which it first does.
    """
    found = {name: Findings() for name in tools}
    for steps in rounds:
        known: frozenset[str] = frozenset()
        for step in steps:
            own = found[step.call.name]
            own.calls += 1
            own.succeeded += not step.first.error
            own.changed += bool(step.changed)
            own.paths |= step.changed
            own.stray |= step.differ - known
            if not step.repeats and own.differing is None:
                own.differing = step.first.text, step.second.text
            known |= step.differ
    return found


def sentences(found: dict[str, Findings]) -> list[str]:
    """Returns what a user should know before training, with the remedy."""
    told = []
    for name, own in found.items():
        if own.differing:
            told.append(f"{name} answers otherwise in an equal world: {_pair(own.differing)}.")
        if own.stray:
            paths = ", ".join(sorted(own.stray)[:3])
            told.append(
                f"{name} leaves {paths} otherwise in an equal world: where it holds the time, set "
                "config.environment.freeze_time; where it is a log, name it in config.environment.ignore."
            )
        if not own.calls:
            told.append(f"{name} was never called: explore more (--contexts).")
        elif not own.succeeded:
            told.append(
                f"{name} never succeeded in {own.calls} calls: give values for its parameters in "
                "coevolve.json, or leave it out."
            )
    if not any(own.changed for own in found.values()):
        told.append(
            "No call changed the folder: the state of this server lies elsewhere, so that only answers are "
            "graded. Let the server keep it below {world}."
        )
    always = [set(own.paths) for own in found.values() if own.succeeded]
    if always and (shared := set.intersection(*always)):
        told.append(
            f"Every tool changes {', '.join(sorted(shared)[:3])}, even those that only read: an agent that "
            "looks once more than the reference fails. If it is a log, leave it out by "
            "config.environment.ignore."
        )
    fit = [name for name, own in found.items() if own.fit]
    if len(fit) < len(found):
        told.append(
            f"Fit to train on: --config.environment.tools={','.join(fit) or '(none)'}. Tools that ask the "
            "clock become fit by config.environment.freeze_time."
        )
    return told


def _pair(texts: tuple[str, str]) -> str:
    """Quotes two texts where they part."""
    start = next((n for n, (a, b) in enumerate(zip(*texts)) if a != b), min(map(len, texts)))
    return " and ".join(repr(text[max(0, start - 10) : start + 30]) for text in texts)
