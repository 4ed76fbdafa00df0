"""The contract between roles and a model: questions in, answers of a given form out. Parses answers."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from coevolve_jax.llm.calls import LLMCall
from coevolve_jax.llm.prompting import Question

Form = TypeVar("Form", bound=BaseModel)

MARK = re.compile(r'</?think>|\{(?=\s*["}])')  # where a thought ends or begins, or an object begins
MOST_BROKEN = 100  # objects of one text; each costs time that grows with the text
# Finds where an object ends; the form reads it. Numbers stay text, since Python refuses long ones.
DECODER = json.JSONDecoder(parse_int=str, parse_float=str)


class Client(Protocol):
    """Asks a model.

    costs: cumulative, by key of the ledger: llm_requests/ROLE, llm_tokens_in/ROLE, llm_tokens_out/ROLE,
      llm_tokens, llm_repairs and llm_faults/FAULT. The roles add their refusals.
    llm_calls: all questions that were asked, in order. The logger takes them out.
    """

    costs: Counter
    llm_calls: list[LLMCall]

    def ask(self, role: str, questions: Sequence[Question], form: type[Form]) -> list[Form | None]:
        """Returns the answers, in order; None for a fault, which is counted. role: the role that pays."""
        ...


class Fault(Exception):
    """The reason why an answer is missing or unusable.

    kind: its name in the ledger. wait: seconds that the server asks to wait.
    """

    def __init__(self, kind: str, detail: str = "", wait: float = 0.0):
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail, self.wait = kind, detail, wait


def book(costs: Counter, llm_call: LLMCall) -> None:
    """Adds the costs of a question and its fault, if any, to the ledger's counts."""
    if llm_call.answers:
        costs[f"llm_requests/{llm_call.role}"] += len(llm_call.answers)
        costs[f"llm_tokens_in/{llm_call.role}"] += llm_call.tokens_in
        costs[f"llm_tokens_out/{llm_call.role}"] += llm_call.tokens_out
        costs["llm_tokens"] += llm_call.tokens_in + llm_call.tokens_out
    if llm_call.complaint:
        costs["llm_repairs"] += 1
    if llm_call.fault:
        costs[f"llm_faults/{llm_call.fault}"] += 1


def read(text: str, form: type[Form]) -> Form:
    """Parses the answer in a model's text: the one object of this form, amid any other text but thoughts.

    Raises Fault: "empty", "no_json" or "wrong_schema". Two different answers are none.
    """
    if not text.strip():
        raise Fault("empty")
    answer, fault = None, Fault("no_json", "it holds no JSON object")
    for written in dict.fromkeys(_objects(text)):
        try:
            found = form.model_validate_json(written)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            kind = "no_json" if first["type"] == "json_invalid" else "wrong_schema"
            place = ".".join(map(str, first["loc"])) or "the object"
            fault = Fault(kind, f"{place}: {first['msg']}"[:300])
            continue
        if answer is not None and found != answer:
            raise Fault("wrong_schema", "it holds several different answers")
        answer = found
    if answer is None:
        raise fault
    return answer


def _objects(text: str) -> list[str]:
    """Returns the whole JSON objects of a text that are no part of another object or of a thought.

    A thought ends at </think>, and begins at <think> or with the text. One without an end goes on to the end
    of the text. After a broken object nothing counts before the next end of a thought.
    """
    found, at, broken = [], 0, 0
    while broken < MOST_BROKEN and (mark := MARK.search(text, at)):
        start, at = mark.span()
        if mark[0] == "</think>":
            found.clear()
            continue
        if mark[0] == "{":
            try:
                _, at = DECODER.raw_decode(text, start)
                found.append(text[start:at])
                continue
            except (json.JSONDecodeError, RecursionError):
                broken += 1
        at = text.find("</think>", at)
        if at < 0:
            break
    return found
