"""The scripted judge has no opinion: the environment and the recorded answers decide alone."""

from __future__ import annotations

from collections.abc import Sequence

from coevolve_jax.explorers.base import Answers, Proposal


class Validator:
    def judge(
        self, proposals: Sequence[Proposal], answers: Sequence[Answers]
    ) -> list[list[str | None] | None]:
        return [None] * len(proposals)
