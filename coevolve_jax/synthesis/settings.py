"""Settings of the pipeline that makes tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from ml_collections import ConfigDict

from coevolve_jax.envs.base import action_pattern
from coevolve_jax.explorers.base import Limits
from coevolve_jax.types import Call, Observation, Task

Fits = Callable[[Task, Sequence[Sequence[Observation]]], bool]  # rollout.agent.Agent.fits


def any_length(task: Task, answers: Sequence[Sequence[Observation]]) -> bool:
    """Accepts every task, for synthesis without rollouts."""
    return True


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings for turning a batch of contexts into tasks.

    Attributes:
      limits: bounds on the proposals of an abstraction.
      rounds, steps: of exploration, per context and per round.
      executions: how often validation executes each proposal. 0 is the ablation without validation: it takes
        every proposal whose tools are offered and that fits.
      calibration: how many failed proposals, at most, the validator judges too.
      fits: whether a rollout can hold a task's calls and answers.
      action_pattern: the action that a call counts as, in the environment family.
    """

    limits: Limits = Limits(proposals=3)
    rounds: int = 3
    steps: int = 10
    executions: int = 1
    calibration: int = 0
    fits: Fits = any_length
    action_pattern: Callable[[Call], str] = action_pattern

    @classmethod
    def of_run(cls, config: ConfigDict, fits: Fits, action_pattern: Callable[[Call], str]) -> Settings:
        """Reads the settings from the config's sections evolution, data and explorer."""
        e, d = config.evolution, config.data
        return cls(
            limits=Limits(e.proposals, d.min_calls, d.max_calls, d.max_turns),
            rounds=e.rounds,
            steps=e.steps,
            executions=e.executions if e.validate else 0,
            calibration=config.explorer.get("calibration", 0),
            fits=fits,
            action_pattern=action_pattern,
        )
