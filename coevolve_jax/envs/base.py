"""What an environment offers to the agent, the explorer and the validator."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from coevolve_jax.types import Call, Observation, Outcome, Task


class Environment(Protocol):
    """One world for one rollout; used inside a worker process."""

    def reset(self, task: Task) -> None:
        """Builds the task's initial state afresh. Equal tasks give equal states."""

    def step(self, call: Call) -> Observation:
        """Executes one call. What the model wrote wrong comes back as an error observation."""

    def end_turn(self) -> None:
        """The agent has finished the current user turn: the turn is graded against its reference."""

    def score(self) -> Outcome:
        """Outcome so far; turns that were not ended count as failed."""

    def fingerprint(self) -> str:
        """Hash of everything that the state comparison of `score` looks at."""

    def close(self) -> None:
        """Frees the world."""


@dataclasses.dataclass(frozen=True)
class Execution:
    """Calls run one after the other in a fresh world.

    observations[i] answers calls[i]. fingerprints[i] is the state before
    calls[i] and fingerprints[-1] the final one: len(calls) + 1 entries.
    valid is False when the infrastructure failed on the way.
    """

    observations: tuple[Observation, ...]
    fingerprints: tuple[str, ...]
    valid: bool = True


class EnvPool(Protocol):
    """Many worlds in isolated worker processes, used in batches.

    A session is an integer handle. A call that hangs or kills its worker
    costs its own session (which answers valid=False from then on) and no other.
    Threads may use it at once. busy: seconds that its workers have spent on requests, their mean.
    """

    busy: float

    def reset(self, tasks: Sequence[Task]) -> list[int]: ...

    def step(self, sessions: Sequence[int], calls: Sequence[Sequence[Call]]) -> list[list[Observation]]: ...

    def end_turn(self, sessions: Sequence[int]) -> None: ...

    def score(self, sessions: Sequence[int]) -> list[Outcome]: ...

    def close(self, sessions: Sequence[int]) -> None: ...

    def execute(self, jobs: Sequence[tuple[Task, Sequence[Call]]]) -> list[Execution]:
        """Runs each job's calls in a fresh world of its task."""

    def shutdown(self) -> None: ...
