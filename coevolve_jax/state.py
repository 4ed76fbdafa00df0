"""What a run is, besides the learner's arrays: one object that goes into every checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from coevolve_jax.synthesis.pipeline import Evidence, SynthesisStats
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.synthesis.signals import History
from coevolve_jax.grpo.filter import FilterState
from coevolve_jax.types import Signal, Task, Trajectory


@dataclasses.dataclass
class RunState:
    """step: GRPO steps done. tasks: D_t. held_out: the evaluation tasks. pending: signal-annotated trajectories
    since the last evolution. initial: how D_0 was made; synthesis: what evolution made so far.
    before: the held-out result of the policy before RL. seconds: by phase. filter: what the group filter
    has seen."""

    step: int
    tasks: TaskPool
    held_out: list[Task]
    before: dict
    initial: SynthesisStats
    history: History = dataclasses.field(default_factory=History)
    pending: list[Evidence] = dataclasses.field(default_factory=list)
    synthesis: SynthesisStats = dataclasses.field(default_factory=SynthesisStats)
    signals: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    filter: FilterState = FilterState()

    def to_json(self) -> dict:
        groups = {}
        for w in self.pending:
            key = f"{w.signal.step}/{w.signal.task_id}"
            groups[key] = [
                t.to_json() for t in sorted((w.trajectory, *w.siblings), key=lambda t: t.rollout_index)
            ]
        return {
            "step": self.step,
            "tasks": self.tasks.to_json(),
            "held_out": [t.to_json() for t in self.held_out],
            "before": self.before,
            "initial": self.initial.to_json(),
            "history": self.history.to_json(),
            "pending": {"signals": [w.signal.to_json() for w in self.pending], "groups": groups},
            "synthesis": self.synthesis.to_json(),
            "signals": self.signals,
            "seconds": self.seconds,
            "filter": self.filter._asdict(),
        }

    @classmethod
    def from_json(cls, data: Mapping, max_tasks: int | None) -> RunState:
        groups = {k: [Trajectory.from_json(t) for t in g] for k, g in data["pending"]["groups"].items()}
        pending = []
        for signal in map(Signal.from_json, data["pending"]["signals"]):
            group = groups[f"{signal.step}/{signal.task_id}"]
            own = next(t for t in group if t.rollout_index == signal.rollout_index)
            pending.append(Evidence(signal, own, tuple(t for t in group if t is not own)))
        return cls(
            step=data["step"],
            tasks=TaskPool.from_json(data["tasks"], max_tasks),
            held_out=[Task.from_json(t) for t in data["held_out"]],
            before=data["before"],
            initial=SynthesisStats.from_json(data["initial"]),
            history=History.from_json(data["history"]),
            pending=pending,
            synthesis=SynthesisStats.from_json(data["synthesis"]),
            signals=dict(data["signals"]),
            seconds=dict(data["seconds"]),
            filter=FilterState(**data["filter"]),
        )
