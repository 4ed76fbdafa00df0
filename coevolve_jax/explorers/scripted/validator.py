"""The scripted judge: it adds nothing to what the environment's check and the recorded answers say (synthesis/validate.py)."""

from __future__ import annotations

from collections.abc import Sequence

from coevolve_jax.explorers.base import Proposal, ProposalExecution


class Validator:
    def judge(
        self, proposals: Sequence[Proposal], executions: Sequence[ProposalExecution]
    ) -> list[list[str | None]]:
        return [[None] * len(p.turns) for p in proposals]
