"""The record of a question to a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass
class LLMCall:
    """A question that a role put to a model, and what came back.

    about: the purpose of the question, as JSON values. An explorer's "context" is the id of its context.
      Exploration adds "round" and "step", the steps taken so far in the round. Judging adds the "triplets" of
      the proposal. Solving adds "triplets", "turn" and "step". Wording adds "triplets" and "turn".
      A strategy's question has a "subject" instead of a context: the skill, action, principle or task.
    answers: as the model wrote them. There is a second one if the first was unusable.
    complaint: what the model was told before its second answer.
    fault: the name of the reason why no answer was usable; "" where one was.
    tokens_in, tokens_out: tokens of all questions and of all answers.
    """

    role: str
    about: Mapping[str, Any]
    system: str
    user: str
    answers: list[str] = dataclasses.field(default_factory=list)
    complaint: str = ""
    fault: str = ""
    tokens_in: int = 0
    tokens_out: int = 0
