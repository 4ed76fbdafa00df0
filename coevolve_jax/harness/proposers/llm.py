"""A language model proposes one move of one lever, with a hypothesis. The scripted proposer stands in for it.

The model's answer is six short values. Lever, move, diagnostic and direction must be names of the tables, so
text becomes a value in a range and nothing else. After each version it may also invent a diagnostic. That is
a formula, which is checked as any other (diagnosis/expressions.py) and counts only if its test says so.

What the model reads holds no selection or test task, no path, and no score finer than one standard error. A
wrong, late or unaffordable answer is counted, and the scripted proposer goes on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from ml_collections import ConfigDict
from pydantic import BaseModel, Field

from coevolve_jax import config as configs
from coevolve_jax.diagnosis import expressions
from coevolve_jax.diagnosis.features import fields
from coevolve_jax.diagnosis.trends import MEANINGS, SETTINGS
from coevolve_jax.harness.diagnostics import LIVE
from coevolve_jax.harness.proposers.base import History, Seen
from coevolve_jax.harness.proposers.scripted import Scripted
from coevolve_jax.harness.records import Expectation, Proposal
from coevolve_jax.harness.registry import Diagnostic
from coevolve_jax.harness.skills import holding
from coevolve_jax.harness.templates import Candidate
from coevolve_jax.llm.answers import Client, Fault, Form, read
from coevolve_jax.llm.calls import LLMCall
from coevolve_jax.llm.client import Client as Server
from coevolve_jax.llm.prompting import Prompts, Question, json_line, line, step_line

PROMPTS = Prompts(Path(__file__).with_name("prompts"))
PROPOSE, INVENT = "propose", "invent"  # roles, and names of prompts
LAST = 12  # versions that a question tells of
SHOWN = 6  # rollouts
ATTEMPTS = 2  # questions, at most, for one proposal; a formula takes one more


class Answer(BaseModel):
    """A model's proposal."""

    lever: str = Field(max_length=60)
    move: str = Field(max_length=60)
    because: str = Field(max_length=400)
    diagnostic: str = Field(max_length=60)
    direction: Literal["up", "down"]
    least: float = Field(ge=0, allow_inf_nan=False, strict=True)


class Invention(BaseModel):
    """A model's formula."""

    unit: Literal["trajectory", "step"]
    formula: str = Field(max_length=expressions.LENGTH)


class Resumable(Client, Protocol):
    """A client that can be told what an earlier process has asked."""

    def resume(self, llm_calls: Iterable[LLMCall]) -> None: ...


class Recorded:
    """A client that gives the answers on record: equal questions get them in their order, others get none.

    llm_calls: rows of llm_calls.jsonl.
    """

    def __init__(self, llm_calls: Iterable[Mapping]):
        self.costs, self.llm_calls = Counter[str](), [LLMCall(**row) for row in llm_calls]
        self._left = list(self.llm_calls)

    def ask(self, role: str, questions: Sequence[Question], form: type[Form]) -> list[Form | None]:
        return [self._answer(role, question, form) for question in questions]

    def _answer(self, role: str, question: Question, form: type[Form]) -> Form | None:
        asked = (role, question.system, question.user)
        call = next((c for c in self._left if (c.role, c.system, c.user) == asked), None)
        if call is None:
            return None
        self._left.remove(call)
        try:
            return None if call.fault else read(call.answers[-1], form)
        except Fault:
            return None

    def resume(self, llm_calls: Iterable[LLMCall]) -> None:
        """Does nothing: all that was asked is on record."""


class Model:
    """Asks a client.

    refused: refusals of its answers, a sentence each, newest last.
    """

    def __init__(self, client: Resumable):
        self.client, self.refused = client, list[str]()
        self._scripted = Scripted()

    @property
    def llm_calls(self) -> Sequence[LLMCall]:
        return self.client.llm_calls

    def resume(self, llm_calls: Sequence[LLMCall]) -> None:
        if llm_calls:
            self.client.resume(llm_calls)

    def propose(self, history: History, rng: np.random.Generator) -> Proposal | None:
        parent = history.best
        for _ in range(ATTEMPTS):
            question = PROMPTS.question(
                PROPOSE, int(rng.integers(2**31)), {"version": parent.id}, **self._told(history, parent)
            )
            (answer,) = self.client.ask(PROPOSE, [question], Answer)
            if answer is None:
                break
            if found := self._checked(history, parent, answer):
                return found
        return self._scripted.propose(history, rng)

    def _checked(self, history: History, parent: Seen, answer: Answer) -> Proposal | None:
        """The proposal of an answer; None, with a refusal, where it names what there is not."""
        if answer.diagnostic not in MEANINGS or answer.diagnostic in SETTINGS:
            return self._refuse(f"{answer.diagnostic[:40]!r} is no value that training shows.")
        if (answer.lever, answer.move) not in history.new_moves(parent.id):
            return self._refuse(f"{answer.lever[:40]!r} {answer.move[:40]!r} is no open move.")
        found = history.first_that_runs(parent.id, [(answer.lever, answer.move)])
        if found is None:
            why = "cannot run, has no effect or gives the config of an earlier version"
            return self._refuse(f"{answer.lever} {answer.move} {why}.")
        return Proposal(
            parent.id,
            *found,
            because=line(answer.because),
            proposer="llm",
            evidence={answer.diagnostic: parent.row.get(answer.diagnostic)},
            expects=Expectation(answer.diagnostic, answer.direction, answer.least),
        )

    def invent(self, history: History, version: str, rng: np.random.Generator) -> list[Candidate]:
        """Returns the model's formula, if it gives one that can be tested."""
        names = sorted(history.names(version))
        known = {name: value for name, value in history.versions[-1].row.items() if value is not None}
        question = PROMPTS.question(
            INVENT,
            int(rng.integers(2**31)),
            {"version": version},
            fields={unit: list(fields(unit).values()) for unit in ("trajectory", "step")},
            names=[json_line({"name": name})[9:-1] for name in names],
            values=[(name, f"{value:.4g}", MEANINGS[name]) for name, value in known.items()],
            tested=[f"{d.formula} ({d.unit}): {d.status}" for d in history.diagnostics if d.test],
            rollouts=list(_rollouts(history, version)),
        )
        (answer,) = self.client.ask(INVENT, [question], Invention)
        if answer is None:
            return []
        formula = answer.formula.strip()
        try:
            expressions.compile(formula, answer.unit, names)
        except expressions.ExpressionError as error:
            self._refuse(str(error), INVENT)
            return []
        return [Candidate(f"llm_{version}", formula, None, answer.unit, "llm")]

    def _refuse(self, why: str, role: str = PROPOSE) -> None:
        self.refused.append(why)
        self.client.costs[f"refused/{role}"] += 1

    def _told(self, history: History, parent: Seen) -> dict:
        new: dict[str, list[str]] = {}
        for lever, move in history.new_moves(parent.id):
            new.setdefault(lever, []).append(move)
        config = history.configs[parent.id]
        known = {name: value for name, value in parent.row.items() if value is not None}
        return {
            "parent": parent,
            "values": [(name, f"{value:.4g}", MEANINGS[name]) for name, value in known.items()],
            "versions": [_version(v) for v in history.versions[-LAST:]],
            "skills": [f"{s.because} Then: {s.lever} {s.move}." for s in holding(history.skills, parent.row)],
            "levers": [f"{key} = {_value(config, key)}: {', '.join(moves)}" for key, moves in new.items()],
            "diagnostics": [_diagnostic(d) for d in history.diagnostics if d.status in LIVE],
            "rollouts": list(_rollouts(history, parent.id)),
        }


def _version(seen: Seen) -> str:
    score = "not trained" if seen.score is None else f"score about {100 * seen.score:.0f}%"
    move = (
        f"{seen.proposal.lever} {seen.proposal.move} of {seen.proposal.parent}" if seen.proposal else "start"
    )
    return f"{seen.id}: {move}, {seen.kind}, {score}. {line(seen.decided)}".rstrip()


def _diagnostic(d: Diagnostic) -> str:
    worse = "higher" if d.direction == "up_is_bad" else "lower"
    told = f"{worse} in failures" if d.unit == "trajectory" else f"{worse} where later gains are small"
    return f"{d.formula} (of a {d.unit}): {told}"


def _value(config: ConfigDict, key: str) -> str:
    return json_line({"value": configs.find(config, key)})[10:-1]


def _rollouts(history: History, version: str) -> Iterator[str]:
    """Training rollouts of the half of the tasks that proposers see, failures and successes in turn."""
    rollouts = [(t.outcome.success, t) for g in history.rollouts(version) for t in g.valid]
    sides = [[t for won, t in rollouts if won == side][: SHOWN // 2] for side in (False, True)]
    for t in [t for side in sides for t in side]:
        steps = [step_line(i, s.call, s.observation, s.error) for i, s in enumerate(t.steps) if s.call]
        yield json_line({"success": t.outcome.success, "stop": t.stop, "steps": steps[:8]})


def recorded(llm_calls: Iterable[Mapping]) -> Model:
    """The proposer whose model says what it has said. llm_calls: rows of llm_calls.jsonl."""
    return Model(Recorded(llm_calls))


def make(config: ConfigDict) -> Model:
    """Raises ValueError where config.harness_model cannot be asked (llm/client.py)."""
    if "harness_model" not in config:
        raise ValueError(
            "config.harness.proposer is 'llm', and the config has no section harness_model: use "
            "configs/bfcl_harness.py:proposer=llm, or make one by coevolve_jax.config.harness_model()."
        )
    client = Server(config.harness_model, section="harness_model")
    client.found()
    if math.isclose(config.harness_model.budget_tokens, 0):
        raise ValueError(
            "config.harness_model.budget_tokens is 0: a campaign that asks a model needs a bound."
        )
    return Model(client)
