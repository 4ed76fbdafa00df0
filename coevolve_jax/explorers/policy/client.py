"""Asks the policy itself: its chat format turns a question into token ids, the run's engine samples the rest.

As with a server, no answer ends a run. A fault is counted in `costs` under its name (FAULTS), and the answer
is None.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax import event_loop
from coevolve_jax.llm.answers import Fault, Form, book, read
from coevolve_jax.llm.calls import LLMCall
from coevolve_jax.llm.prompting import Question
from coevolve_jax.rollout.chat import Chat
from coevolve_jax.rollout.engine import Completion, Engine, EngineError, Request, Sampling

T = TypeVar("T")

FAULTS = {
    "too_long": "not asked: with explorer.max_tokens the question is longer than explorer.max_length",
    "truncated": "cut at explorer.max_tokens",
    "abort": "the engine could not complete it",
    "empty": "no text",
    "no_json": "text that holds no JSON object",
    "wrong_schema": "JSON of another form",
}


class Client:
    """llm.answers.Client over an engine.

    config: the section explorer of the run's config, with temperature, max_tokens and max_length, and for
    `ask` json_schema (explorers.policy.DEFAULTS). Raises ValueError if json_schema is True and the engine
    cannot constrain samples.
    """

    def __init__(self, config: ConfigDict, chat: Chat, engine: Engine):
        if config.get("json_schema") and not engine.constrains:
            raise ValueError(
                "config.explorer.json_schema is True, and the engine of this run cannot constrain what it "
                "samples: set it to False, and answers are only checked."
            )
        self._config, self._chat, self._engine = config, chat, engine
        self._conversation_ids = itertools.count(-1, -1)  # negative, since rollouts count upwards from 0
        self.costs: Counter = Counter()
        self.llm_calls: list[LLMCall] = []

    def ask(self, role: str, questions: Sequence[Question], form: type[Form]) -> list[Form | None]:
        """Returns the answers, in order; None where there is none. role: the role that pays for them."""
        schema = json.dumps(form.model_json_schema()) if self._config.json_schema else None
        return self._ask(role, questions, lambda text: read(text, form), schema)

    def words(self, role: str, questions: Sequence[Question]) -> list[str | None]:
        """Returns answers in plain text; otherwise like `ask`."""
        return self._ask(role, questions, _some_text, None)

    def _ask(
        self, role: str, questions: Sequence[Question], parse: Callable[[str], T], schema: str | None
    ) -> list[T | None]:
        """parse: reads an answer; raises Fault. schema: JSON text for Sampling, or None."""
        c = self._config
        sampling = Sampling(c.temperature, c.max_tokens, self._chat.stop_ids, schema)
        requests = []
        for q in questions:
            ids = np.asarray(self._chat.question(q.system, q.user), np.int32)
            requests.append(Request(next(self._conversation_ids), ids, sampling, q.seed))
        fitting = [r for r in requests if len(r.ids) + c.max_tokens <= c.max_length]
        completions = zip(fitting, self._complete(fitting), strict=True)
        done = {r.conversation_id: completion for r, completion in completions}
        answers: list[T | None] = []
        for q, r in zip(questions, requests, strict=True):
            llm_call = LLMCall(role, q.about, q.system, q.user)
            answers.append(self._read(r, done.get(r.conversation_id), parse, llm_call))
            book(self.costs, llm_call)
            self.llm_calls.append(llm_call)
        return answers

    def _complete(self, requests: Sequence[Request]) -> list[Completion]:
        """Samples the answers. An EngineError becomes completions with finish "abort".

        A broken engine fails again at the next rollouts. There the run can save its work first.
        """
        try:
            return event_loop.run(self._engine.generate(requests)) if requests else []
        except EngineError as error:
            none = np.zeros(0, np.int32)
            return [Completion(none, none.astype(np.float32), "abort", none, str(error))] * len(requests)
        finally:
            self._engine.release([r.conversation_id for r in requests])

    def _read(
        self, request: Request, completion: Completion | None, parse: Callable[[str], T], llm_call: LLMCall
    ) -> T | None:
        """Reads the answer from a completion and notes it in the call.

        completion: None if the question was too long to ask. Returns None where there is no usable answer.
        """
        unfinished = {"length": "truncated", "abort": "abort"}
        try:
            if completion is None:
                raise Fault("too_long")
            text = self._chat.decode(completion.ids[: -1 if completion.finish == "stop" else None])
            llm_call.answers.append(text)
            llm_call.tokens_in, llm_call.tokens_out = len(request.ids), len(completion.ids)
            if completion.finish in unfinished:
                raise Fault(unfinished[completion.finish], completion.reason)
            return parse(text)
        except Fault as fault:
            llm_call.fault = fault.kind
            return None


def _some_text(text: str) -> str:
    if not (found := text.strip()):
        raise Fault("empty")
    return found
