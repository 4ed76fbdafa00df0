"""What the roles want of a model: answers of a form to questions, whoever is asked; and how text becomes one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from coevolve_jax.explorers.base import LLMCall

Form = TypeVar("Form", bound=BaseModel)


class Question(NamedTuple):
    """seed: goes to the model, so that equal questions may get different answers and each comes again. about: what it
    is asked for, for the log alone (explorers.base.LLMCall)."""

    system: str
    user: str
    seed: int
    about: Mapping[str, Any] = {}


class Client(Protocol):
    """costs: cumulative, by key of the ledger: llm_requests/ROLE, llm_tokens_in/ROLE, llm_tokens_out/ROLE, llm_tokens,
    llm_faults/FAULT; the roles add what they refuse. llm_calls: all questions that were asked, in order, until somebody
    takes them out."""

    costs: Counter
    llm_calls: list[LLMCall]

    def ask(self, role: str, questions: Sequence[Question], form: type[Form]) -> list[Form | None]:
        """The answers, in order; None where there is none, which is counted. role: whom they are booked to."""
        ...


def whole(text: str) -> str:
    """Text that can be sent: halves of surrogate pairs, as JSON may hold them, become U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Fault(Exception):
    """Why there is no answer. kind: its name in the ledger. wait: seconds that a server asks for."""

    def __init__(self, kind: str, detail: str = "", wait: float = 0.0):
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail, self.wait = kind, detail, wait


def book(costs: Counter, llm_call: LLMCall) -> None:
    """What a question has cost, and what went wrong with it."""
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
    """The answer that a model's text holds. Raises Fault: "empty", "no_json" or "wrong_schema"."""
    if not text.strip():
        raise Fault("empty")
    start, end = text.find("{"), text.rfind("}")  # some put it between words or fences
    if start < 0 or end < start:
        raise Fault("no_json", "it holds no JSON object")
    try:
        return form.model_validate_json(text[start : end + 1])
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        kind = "no_json" if first["type"] == "json_invalid" else "wrong_schema"
        place = ".".join(map(str, first["loc"])) or "the object"
        raise Fault(kind, f"{place}: {first['msg']}"[:300]) from None
