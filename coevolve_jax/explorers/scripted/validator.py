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
    recorded = iter(proposal.observations)
    same = [all([answer.text == next(recorded).text for answer in turn]) for turn in execution.observations]
    return [None if passed else "result_differs" for passed in same]
