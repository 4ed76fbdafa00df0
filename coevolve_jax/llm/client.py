"""Asks a language model over the OpenAI protocol: many questions at once, each answer checked and paid once.

No answer of a server ends a run. A fault is counted in `costs` under its name (FAULTS), and the answer is
None. The cache keeps answers by server and served model (served.py), so no other model's answer is used.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ml_collections import ConfigDict

from coevolve_jax import event_loop
from coevolve_jax.llm.answers import Fault, Form, book, read
from coevolve_jax.llm.cache import Cache
from coevolve_jax.llm.calls import LLMCall
from coevolve_jax.llm.endpoint import AGAIN, BYTES_PER_TOKEN, Endpoint, message
from coevolve_jax.llm.prompting import Question
from coevolve_jax.llm.served import Served, address, choose, from_cache, going_on

T = TypeVar("T")

FAULTS = {  # kind -> its meaning, for the section of the config that the client reads
    "unreachable": "no connection, or it broke off",
    "deadline": "no whole answer within {section}.timeout seconds",
    "rate_limited": "too many questions for the server",
    "server_error": "the server failed",
    "unauthorized": "the key is missing, or not accepted",
    "bad_request": "the server refuses the model's name or a parameter",
    "too_large": "more than {section}.max_bytes",
    "no_protocol": "not an answer of the protocol, such as a page of HTML",
    "no_choices": "an answer without a message",
    "given_up": "the server gave the answer up before its end",
    "truncated": "cut at {section}.max_tokens",
    "content_filter": "withheld by the server's filter",
    "refusal": "the model declined",
    "tool_call": "a tool call instead of text",
    "reasoning_only": "reasoning and no answer",
    "empty": "no text",
    "no_json": "text that holds no JSON object, also when asked again",
    "wrong_schema": "JSON of another form, also when asked again",
    "budget": "not asked: {section}.budget_tokens or {section}.budget_money is spent",
    "offline": "not asked: {section}.offline, and the answer is not in the cache",
    "cache": "the file {section}.cache could not be read or written; the server was asked, "
    "and its answer used",
}
ENDPOINT = (*AGAIN, "unauthorized", "bad_request", "no_protocol")  # no server there that serves us
REPAIRED = ("no_json", "wrong_schema")  # the model gets one more try, with the complaint
QUOTED = 4000  # characters of a wrong answer that the model is shown again


class Client:
    """llm.answers.Client over a server.

    config: a section of the config with the keys of settings.DEFAULTS. section: its name, for messages.
    recorded: the model that answered the run so far (a Served as JSON values); None: a new run.
    costs: those of answers.Client, and money/ROLE and money.

    An answer from the cache costs as much as when it was given. So a killed run that resumes has the same
    costs. Attempts without an answer cost nothing.
    """

    def __init__(
        self, config: ConfigDict, recorded: Mapping[str, Any] | None = None, section: str = "explorer"
    ):
        self._config, self._section, self.costs = config, section, Counter()
        self.llm_calls: list[LLMCall] = []
        self._cache = Cache(config.cache, section) if config.cache else None
        self._said: set[str] = set()
        self._details: dict[str, str] = {}  # of the first fault of each kind
        self._endpoint, self._address = Endpoint(config), address(config.base_url)
        self._served = Served(**recorded) if recorded else None
        self._settled, self._away = False, ""  # whether the server serves _served; the fault if it is away

    def settle(self) -> Served:
        """Finds the model that answers, once.

        Raises ValueError where it is unknown or differs from the recorded one. Raises Fault where the server
        is away.
        """
        if self._settled and self._served:
            return self._served
        c = self._config
        if c.offline:
            rows = self._cache.servers() if self._cache else []
            found = self._served or from_cache(c.base_url, c.model, rows, c.cache, self._section)
        else:
            now = choose(c.base_url, c.model, event_loop.run(self._endpoint.models()), self._section)
            found = going_on(now, self._served, self._section) if self._served else now
            self._on_disk(lambda cache: cache.remember(found.key, found.server, found.model))
        self._served, self._settled = found, True
        return found

    def found(self) -> Served | None:
        """The model that answers, by the server or, if that is away, by the run's record.

        None: the server is away and there is no record. Raises ValueError as `settle` does.
        """
        try:
            return self.settle()
        except Fault as fault:
            self._away = self._noted(fault)
            return self._served

    @property
    def served(self) -> Served:
        """Like `found`, but raises ValueError where the server is away and no record names the model."""
        if (found := self._served or self.found()) is None:
            raise ValueError(self._unreached(f"{self._away}: {self._meaning(self._away)}"))
        return found

    def ask(self, role: str, questions: Sequence[Question], form: type[Form]) -> list[Form | None]:
        """Returns the answers, in order; None where there is none. role: the role that pays for them.

        At most config.concurrency questions are asked at once. The budget is checked before a batch, not
        within it.
        """
        if spent := self._spent():
            self.costs["llm_faults/budget"] += len(questions)
            self._say("budget", f"{spent}: no more questions are asked.")
            return [None] * len(questions)
        # System prompts are long and mostly equal: interned, they take memory once.
        llm_calls = [LLMCall(role, q.about, sys.intern(q.system), q.user) for q in questions]
        away = None
        if questions:
            try:
                self.settle()
            except Fault as fault:
                away = fault  # the cache may still hold answers of a recorded model
        answers = event_loop.run(self._ask_all(questions, llm_calls, form, away)) if questions else []
        for llm_call in llm_calls:
            self._book(llm_call)  # in the order of questions: float sums are then reproducible
        return answers

    def unanswered(self, costs: Mapping[str, float]) -> str:
        """Implements Roles.unanswered.

        Nothing answers if all questions met faults of the endpoint, or if a budget was spent before them.
        """
        faults = {k.removeprefix("llm_faults/"): n for k, n in costs.items() if k.startswith("llm_faults/")}
        faults.pop("cache", None)  # not a fault of the server
        answered = any(k.startswith("llm_requests/") for k in costs)
        if not answered and set(faults) == {"budget"}:
            return f"{self._spent()}: raise it, or ask for fewer tasks."
        if answered or not faults or not set(faults) <= set(ENDPOINT):
            return ""
        met = ", ".join(f"{n} times {kind} ({self._meaning(kind)})" for kind, n in faults.items())
        return self._unreached(met)

    def _spent(self) -> str:
        """Says which budget is spent; "" where none is."""
        for key, cost in (("budget_tokens", "llm_tokens"), ("budget_money", "money")):
            if (most := self._config[key]) and self.costs[cost] >= most:
                return f"config.{self._section}.{key} = {most} is spent"
        return ""

    def _noted(self, fault: Fault) -> str:
        """Keeps the first detail of each kind of fault, for messages. Returns the kind."""
        self._details.setdefault(fault.kind, fault.detail)
        return fault.kind

    def _meaning(self, kind: str) -> str:
        """Explains a kind of fault, with what the server said when it was first met."""
        meaning, detail = FAULTS[kind].format(section=self._section), self._details.get(kind)
        return f"{meaning}; {detail}" if detail else meaning

    def _unreached(self, met: str) -> str:
        return (
            f"No question to config.{self._section}.base_url = {self._address!r} was answered ({met}): start "
            f"the server there, or mend its address, config.{self._section}.model, or the key in the "
            f"environment variable {self._config.key_variable}."
        )

    def resume(self, llm_calls: Iterable[LLMCall]) -> None:
        """Books questions that an earlier process has asked, so that they count for the budget."""
        for llm_call in llm_calls:
            self._book(llm_call)

    def _book(self, llm_call: LLMCall) -> None:
        book(self.costs, llm_call)
        for key, count in (("in", llm_call.tokens_in), ("out", llm_call.tokens_out)):
            for money in ("money", f"money/{llm_call.role}"):
                self.costs[money] += count * self._config[f"price_{key}"] / 1e6
        self.llm_calls.append(llm_call)

    async def _ask_all(
        self,
        questions: Sequence[Question],
        llm_calls: Sequence[LLMCall],
        form: type[Form],
        away: Fault | None,
    ) -> list[Form | None]:
        """Returns the answers and fills the calls. away: the fault of a server that is away."""
        limit, under_way = asyncio.Semaphore(self._config.concurrency), dict[str, asyncio.Task]()

        async def one(question: Question, llm_call: LLMCall) -> Form | None:
            try:
                async with limit:
                    return await self._ask(under_way, away, question, form, llm_call)
            except Fault as fault:
                llm_call.fault = kind = self._noted(fault)
                self._say(
                    kind,
                    f"The endpoint config.{self._section}.base_url = {self._address!r}: {kind} "
                    f"({self._meaning(kind)}).",
                )
                return None

        return list(await asyncio.gather(*map(one, questions, llm_calls)))

    async def _ask(
        self,
        under_way: dict[str, asyncio.Task],
        away: Fault | None,
        question: Question,
        form: type[Form],
        llm_call: LLMCall,
    ) -> Form:
        """Returns the answer. Asks again once if it has the wrong form. Raises Fault."""
        c = self._config
        request: dict[str, Any] = {
            "model": self._served.model if self._served else c.model,
            "messages": [
                {"role": "system", "content": question.system},
                {"role": "user", "content": question.user},
            ],
            "temperature": c.temperature,
            "max_tokens": c.max_tokens,
            "seed": question.seed,
        }
        if c.json_schema:
            request["response_format"] = _response_format(form)
        for again in (False, True):
            reply = await self._reply(under_way, away, request)
            llm_call.answers.append(reply["text"])
            llm_call.tokens_in += reply["tokens_in"]
            llm_call.tokens_out += reply["tokens_out"]
            if reply.get("estimated"):  # answers of earlier versions lack it
                self._say(
                    "estimated",
                    f"The endpoint config.{self._section}.base_url = {self._address!r} does not say how many "
                    f"tokens it used: one for each {BYTES_PER_TOKEN} bytes of text is booked.",
                )
            try:
                return read(message(reply), form)
            except Fault as fault:
                if again or fault.kind not in REPAIRED:
                    raise
                llm_call.complaint = fault.detail
                said = {"role": "assistant", "content": reply["text"][:QUOTED]}
                wish = (
                    f"This is not what was asked for ({llm_call.complaint}). Answer again, with the JSON "
                    "object alone."
                )
                messages = [*request["messages"], said, {"role": "user", "content": wish}]
                request = {**request, "messages": messages}
        raise AssertionError("unreachable")

    async def _reply(
        self, under_way: dict[str, asyncio.Task], away: Fault | None, request: Mapping[str, Any]
    ) -> dict:
        """Returns the server's reply in the form of `condense`. Raises Fault.

        It comes from the cache, from an equal request under way, or from a new request.
        """
        who = self._served.key if self._served else ""
        key = hashlib.sha256(json.dumps([who, request], sort_keys=True).encode()).hexdigest()
        if who and (known := self._on_disk(lambda cache: cache.get(key))) is not None:
            return known
        if self._config.offline:
            raise Fault("offline")
        if away:
            raise away
        if key not in under_way:
            under_way[key] = asyncio.ensure_future(self._fetch(request, key))
        return await asyncio.shield(under_way[key])  # others may wait for it when this one is cancelled

    async def _fetch(self, request: Mapping[str, Any], key: str) -> dict:
        """Asks the server. Writes the paid answer into the cache before anything reads it.

        Returns what the cache has then: another run may have been faster.
        """
        reply = await self._endpoint.complete(request)
        return self._on_disk(lambda cache: cache.put(key, request, reply)) or reply

    def _on_disk(self, use: Callable[[Cache], T]) -> T | None:
        """Returns the cache's answer. None without a cache, or if its file fails, which counts as a fault."""
        try:
            return use(self._cache) if self._cache else None
        except sqlite3.Error as error:
            self.costs["llm_faults/cache"] += 1
            self._say(
                "cache",
                f"config.{self._section}.cache = {self._config.cache!r} fails ({error}): answers are not "
                "kept.",
            )
            return None

    def _say(self, kind: str, sentence: str) -> None:
        """Prints the sentence on stderr, once per kind. The ledger counts the others."""
        if kind not in self._said:
            self._said.add(kind)
            print(sentence, file=sys.stderr)


@functools.cache
def _response_format(form: type[Form]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": form.__name__, "schema": form.model_json_schema()}}
