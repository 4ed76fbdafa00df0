"""The state of a run, which is in every checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from coevolve_jax.records.checkpoint import INPUTS
from coevolve_jax.records.costs import ROLLOUTS, total
from coevolve_jax.records.logs import encode
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Task


@dataclasses.dataclass
class RunState:
    """The part of every checkpoint besides the learner's arrays and the strategy's own state.

    Attributes:
      step: GRPO steps done.
      tasks: D_t.
      held_out: the held-out tasks.
      evaluations: the rows of evaluations.jsonl. The first of each set is the policy before RL.
      initial: statistics of making D_0.
      synthesis: statistics of evolution since.
      signals: counts by kind.
      ledger: costs so far, by service (loop/lab.py, loop/collect.py).
      seconds: time by phase.
      pending: the records by `Run.note` of a step whose evolution is not done. The checkpoint's arrays are
        then those after that step's update.
      inputs: digests of the files that the run began with (loop/inputs.py); {} of a run from before these.
    """

    step: int
    tasks: TaskPool
    held_out: list[Task]
    evaluations: list[dict]
    initial: SynthesisStats
    synthesis: SynthesisStats = dataclasses.field(default_factory=SynthesisStats)
    signals: dict[str, int] = dataclasses.field(default_factory=dict)
    ledger: Counter[str] = dataclasses.field(default_factory=Counter)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    pending: dict[str, Any] | None = None
    inputs: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def learned(self) -> int:
        """GRPO updates done."""
        return self.step + (self.pending is not None)

    @property
    def rollouts(self) -> int:
        """Training rollouts so far, of every role (loop/collect.py) and of an explorer's wording."""
        return total(self.ledger, ROLLOUTS)

    def to_json(self) -> dict:
        pending = {"pending": json.loads(encode(self.pending))} if self.pending else {}
        return {
            "step": self.step,
            "tasks": self.tasks.to_json(),
            "held_out": [t.to_json() for t in self.held_out],
            "evaluations": self.evaluations,
            "initial": self.initial.to_json(),
            "synthesis": self.synthesis.to_json(),
            "signals": self.signals,
            "ledger": dict(sorted(self.ledger.items())),
            "seconds": self.seconds,
            INPUTS: self.inputs,
            **pending,
        }

    @classmethod
    def from_json(cls, data: Mapping, max_tasks: int | None, key: Callable[[Task], str]) -> RunState:
        """max_tasks, key: of the task pool."""
        return cls(
            step=data["step"],
            tasks=TaskPool.from_json(data["tasks"], max_tasks, key),
            held_out=[Task.from_json(t) for t in data["held_out"]],
            evaluations=list(data["evaluations"]),
            initial=SynthesisStats.from_json(data["initial"]),
            synthesis=SynthesisStats.from_json(data["synthesis"]),
            signals=dict(data["signals"]),
            ledger=Counter(data["ledger"]),
            seconds=dict(data["seconds"]),
            pending=data.get("pending"),
            inputs=dict(data.get(INPUTS, {})),
        )
