"""Answers of one line to questions that are not the explorer's own: a strategy asks them (Roles.ask)."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from coevolve_jax.llm.answers import Client
from coevolve_jax.llm.prompting import Question, line


class Saying(BaseModel):
    model_config = ConfigDict(coerce_numbers_to_str=True)  # asked for a number, models write one
    answer: str = Field(min_length=1, max_length=600)


def ask(client: Client, role: str, questions: Sequence[Question]) -> list[str | None]:
    """Returns each answer as one line, in order; None where there is none. role: the role that pays.

    A question has to end with what the field "answer" of a JSON object shall hold.
    """
    answers = client.ask(role, questions, Saying)
    return [(line(said.answer) or None) if said else None for said in answers]
