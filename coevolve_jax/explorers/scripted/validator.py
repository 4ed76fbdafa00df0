"""The scripted judge: a turn passes where its calls answer as exploration recorded."""

from __future__ import annotations

from collections.abc import Sequence

from coevolve_jax.explorers.base import Proposal, ProposalExecution


class Validator:
    def judge(
        self, proposals: Sequence[Proposal], executions: Sequence[ProposalExecution]
    ) -> list[list[str | None]]:
        return [reasons(p, e) for p, e in zip(proposals, executions, strict=True)]


def reasons(proposal: Proposal, execution: ProposalExecution) -> list[str | None]:
    recorded, start = [o.text for o in proposal.observations], 0
    found: list[str | None] = []
    for turn in execution.observations:
        answers = [o.text for o in turn]
        found.append(None if answers == recorded[start : start + len(answers)] else "result_differs")
        start += len(answers)
    return found
