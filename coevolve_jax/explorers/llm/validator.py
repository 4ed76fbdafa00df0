"""A language model as the judge of proposals: after the environment, its opinion on each user turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, Field

from coevolve_jax.explorers.base import Answers, Proposal
from coevolve_jax.explorers.evidence import signature
from coevolve_jax.explorers.llm.lines import question
from coevolve_jax.llm.answers import Client
from coevolve_jax.llm.prompting import line, seed_of, step_line

Reason = Literal[
    "ok",
    "wrong_call",
    "wrong_argument",
    "missing_step",
    "needless_step",
    "underspecified",
    "two_goals",
    "failed_step",
    "goal_not_reached",
]


class TurnJudgement(BaseModel):
    thought: str = Field(default="", max_length=2000)
    reason: Reason


class Judgement(BaseModel):
    turns: list[TurnJudgement] = Field(min_length=1)


class Validator:
    def __init__(self, client: Client):
        self._client = client

    def judge(
        self, proposals: Sequence[Proposal], answers: Sequence[Answers]
    ) -> list[list[str | None] | None]:
        """Judges each user turn. Without an opinion the environment decides ("judge_silent" counts them)."""
        questions = [
            question(
                "judge",
                seed_of(p.context.id, *map(signature, p.calls)),
                {"context": p.context.id, "triplets": p.triplets},
                system=line(p.context.task.system),
                description=line(p.description),
                turns=[
                    {
                        "query": line(turn.query),
                        "steps": [
                            step_line(i, call, o.text, o.error)
                            for i, (call, o) in enumerate(zip(turn.calls, observations))
                        ],
                    }
                    for turn, observations in zip(p.turns, own)
                ],
            )
            for p, own in zip(proposals, answers, strict=True)
        ]
        judgements = self._client.ask("judge", questions, Judgement)
        return [self._reasons(len(own), said) for own, said in zip(answers, judgements, strict=True)]

    def _reasons(self, executed: int, answer: Judgement | None) -> list[str | None] | None:
        """Reads the reasons of the first turns. executed: the number of user turns that were executed."""
        if answer is None or len(answer.turns) < executed:
            self._client.costs["judge_silent"] += 1
            return None
        return [None if turn.reason == "ok" else turn.reason for turn in answer.turns[:executed]]
