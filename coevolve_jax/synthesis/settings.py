"""The sizes of the pipeline that makes tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ml_collections import ConfigDict

from coevolve_jax.explorers.base import Limits
from coevolve_jax.types import Observation, Task

Fits = Callable[[Task, Sequence[Sequence[Observation]]], bool]  # rollout.agent.Agent.fits


def any_length(task: Task, answers: Sequence[Sequence[Observation]]) -> bool:
    """Every task fits: no rollouts are meant."""
    return True


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a batch of contexts becomes tasks.

    limits: of abstraction. rounds, steps: of exploration.
    executions: how often each proposal is executed; 0 takes what is offered and fits, for the ablation without
    validation.
    calibration: how many failed proposals, at most, the validator sees as well.
    fits: whether a rollout can hold a task's calls and answers.
    """

    limits: Limits = Limits(proposals=3)
    rounds: int = 3
    steps: int = 10
    executions: int = 1
    calibration: int = 0
    fits: Fits = any_length

    @classmethod
    def of_run(cls, config: ConfigDict, fits: Fits) -> Settings:
        """The settings in the sections evolution, data and explorer."""
        e, d = config.evolution, config.data
        return cls(
            limits=Limits(e.proposals, d.min_calls, d.max_calls, d.max_turns),
            rounds=e.rounds,
            steps=e.steps,
            executions=e.executions if e.validate else 0,
            calibration=config.explorer.get("calibration", 0),
            fits=fits,
        )
