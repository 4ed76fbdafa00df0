"""Makes the lineage of a task: at birth, when D_t takes it, and when a file gives it."""

from __future__ import annotations

import dataclasses

from coevolve_jax.explorers.base import Proposal
from coevolve_jax.synthesis.leakage import Near
from coevolve_jax.types import Lineage


@dataclasses.dataclass(frozen=True)
class Birth:
    """Why and when a batch of tasks is made.

    kind, step: as in Lineage. first_id: number of the batch's first proposal.
    """

    kind: str
    step: int = 0
    first_id: int = 0

    def task_id(self, n: int) -> str:
        """The id of the task that the batch's n-th proposal becomes."""
        return f"{self.kind}-{self.step}-{self.first_id + n}"


def at_birth(
    proposal: Proposal, birth: Birth, *, explorer: str, verdict: str, reason: str, turns: int
) -> Lineage:
    """The lineage of a validated task. explorer: name of the roles. turns: how many turns the task keeps."""
    calls = sum(len(turn.calls) for turn in proposal.turns[:turns])
    context = proposal.context
    return Lineage(
        kind=birth.kind,
        signal=context.signal,
        parent=context.parent or context.task.id,
        context=context.id,
        explorer=explorer,
        triplets=proposal.triplets[:calls],
        verdict=verdict,
        reason=reason,
        step=birth.step,
        focus=tuple(context.focus_pattern),
        rule_queries=proposal.rule_queries[:turns],
    )


def in_pool(lineage: Lineage, near: Near | None, solved: float | None) -> Lineage:
    """The lineage of a task that D_t takes.

    Args:
      near: from leak control; None: there is no leak control.
      solved: share of rollouts that solved the task; None: it was not probed now.
    """
    found = {} if solved is None else {"solved": solved}
    if near is not None:
        found |= {
            "similarity": round(near.similarity, 4),
            "nearest": near.task,
            "measure": near.measure,
        }
    return dataclasses.replace(lineage, **found)


def from_file(lineage: Lineage) -> Lineage:
    """The lineage of another run's task in D_0: it keeps its origin, as kind "initial" of step 0.

    It has no parent. Tasks get new ids, so the id of its parent there may name another task here.
    """
    return dataclasses.replace(lineage, kind="initial", step=0, parent=None)
