"""The same calls in two equal worlds of a server, one after the other."""

import dataclasses
import time

from coevolve_jax.toolcheck.facts import PAUSE
from coevolve_jax.toolcheck.servers import differing
from coevolve_jax.types import Observation


@dataclasses.dataclass(frozen=True)
class Step:
    """The answers to a call, the paths that it changed, and those that differ between the worlds after it."""

    first: Observation
    second: Observation
    changed: list[str]
    differ: list[str]

    @property
    def repeats(self) -> bool:
        return self.first == self.second


def execute(make, task, calls) -> list[Step]:
    """Makes the calls in two fresh worlds."""
    played = []
    for number in range(2):
        time.sleep(PAUSE * number)
        world = make()
        world.reset(task)
        states, answers = [world.state()], []
        for call in calls:
            answers.append(world.step(call))
            states.append(world.state())
        world.close()
        played.append((answers, states))
    (one, before), (other, after) = played
    return [
        Step(a, b, differing(*before[n : n + 2]), differing(before[n + 1], after[n + 1]))
        for n, (a, b) in enumerate(zip(one, other))
    ]
