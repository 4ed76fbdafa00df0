"""The contract between roles and a model: questions in, answers of a given form out. Parses answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from coevolve_jax.llm.calls import LLMCall
from coevolve_jax.llm.prompting import Question

Form = TypeVar("Form", bound=BaseModel)


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
    """Parses the answer in a model's text. Raises Fault: "empty", "no_json" or "wrong_schema"."""
    if not text.strip():
        raise Fault("empty")
    start, end = text.find("{"), text.rfind("}")  # some models put words or fences around it
    if start < 0 or end < start:
        raise Fault("no_json", "it holds no JSON object")
    try:
        return form.model_validate_json(text[start : end + 1])
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        kind = "no_json" if first["type"] == "json_invalid" else "wrong_schema"
        place = ".".join(map(str, first["loc"])) or "the object"
        raise Fault(kind, f"{place}: {first['msg']}"[:300]) from None
