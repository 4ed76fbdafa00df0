"""Asks a language model over the OpenAI protocol: many questions at once, each answer checked and paid once.

Nothing that a server does ends a run: what goes wrong is counted in `costs` under its name (FAULTS), and the answer
is None. The key comes from the environment alone; it is in no message, no log, no cache and no exception that leaves
this file.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
import openai
from ml_collections import ConfigDict

from coevolve_jax import event_loop
from coevolve_jax.explorers.base import Dialogue
from coevolve_jax.explorers.llm.answers import Fault, Form, Question, book, read
from coevolve_jax.explorers.llm.cache import Cache

FAULTS = {
    "unreachable": "no connection, or it broke off",
    "deadline": "no whole answer within explorer.timeout seconds",
    "rate_limited": "status 429",
    "server_error": "status 5xx",
    "unauthorized": "status 401 or 403: the key",
    "bad_request": "another status 4xx: the model's name, or a parameter that the server does not know",
    "too_large": "more than explorer.max_bytes",
    "no_protocol": "not an answer of the protocol, such as a page of HTML",
    "no_choices": "an answer without a message",
    "truncated": "cut at explorer.max_tokens",
    "content_filter": "withheld by the server's filter",
    "refusal": "the model declined",
    "tool_call": "a tool call instead of text",
    "reasoning_only": "reasoning and no answer",
    "empty": "no text",
    "no_json": "text that holds no JSON object, also when asked again",
    "wrong_schema": "JSON of another form, also when asked again",
    "budget": "not asked: explorer.budget_tokens or explorer.budget_money is spent",
    "offline": "not asked: explorer.offline, and the answer is not in the cache",
}
AGAIN = ("unreachable", "deadline", "rate_limited", "server_error")  # worth another attempt
ENDPOINT = (*AGAIN, "unauthorized", "bad_request", "no_protocol")  # nobody is there who knows us
REPAIRED = ("no_json", "wrong_schema")  # worth saying so to the model, once
QUOTED = 4000  # characters of a wrong answer that the model is shown again
SECRET = 16  # characters that a key has at least
PAUSE = 0.5  # seconds before the second attempt; they double


class Client:
    """config: the section explorer of the run's config, with the keys of explorers.llm.DEFAULTS.

    costs: those of answers.Client, and money/ROLE and money. An answer from the cache costs what it cost when it was
    given, so that a run which was killed and goes on has the same books; attempts that gave no answer cost nothing.
    """

    def __init__(self, config: ConfigDict):
        self._config, self.costs = config, Counter()
        self.dialogues: list[Dialogue] = []
        self._cache = Cache(config.cache) if config.cache else None
        self._said: set[str] = set()

    def ask(self, role: str, questions: Sequence[Question], form: type[Form]) -> list[Form | None]:
        """The answers, in order; None where there is none. role: whom they are booked to.

        At most config.concurrency are under way at once. The budget is looked at before a batch, not within it.
        """
        c = self._config
        spent = (
            c.budget_tokens and self.costs["llm_tokens"] >= c.budget_tokens,
            c.budget_money and self.costs["money"] >= c.budget_money,
        )
        if any(spent):
            self.costs["llm_faults/budget"] += len(questions)
            self._say("budget", "The explorer's budget is spent: training goes on without new tasks.")
            return [None] * len(questions)
        # Equal system prompts, which are long, take memory once.
        dialogues = [Dialogue(role, q.about, sys.intern(q.system), q.user) for q in questions]
        answers = event_loop.run(self._ask_all(questions, dialogues, form)) if questions else []
        for dialogue in dialogues:
            self._book(dialogue)  # in the order of the questions, for the same sums again
        return answers

    def unanswered(self, costs: Mapping[str, float]) -> str:
        """Roles.unanswered: where the questions met with faults of the endpoint alone."""
        faults = {k.removeprefix("llm_faults/"): n for k, n in costs.items() if k.startswith("llm_faults/")}
        answered = any(k.startswith("llm_requests/") for k in costs)
        if answered or not faults or not set(faults) <= set(ENDPOINT):
            return ""
        met = ", ".join(f"{n} times {kind} ({FAULTS[kind]})" for kind, n in faults.items())
        return (
            f"No question to config.explorer.base_url = {self._config.base_url!r} was answered ({met}): start the server "
            "there, or mend its address, config.explorer.model, or the key in the environment variable "
            f"{self._config.key_variable}."
        )

    def _book(self, dialogue: Dialogue) -> None:
        book(self.costs, dialogue)
        for key, count in (("in", dialogue.tokens_in), ("out", dialogue.tokens_out)):
            for money in ("money", f"money/{dialogue.role}"):
                self.costs[money] += count * self._config[f"price_{key}"] / 1e6
        self.dialogues.append(dialogue)

    async def _ask_all(
        self, questions: Sequence[Question], dialogues: Sequence[Dialogue], form: type[Form]
    ) -> list[Form | None]:
        """The answers; what was said goes into the dialogues."""
        limit, server = asyncio.Semaphore(self._config.concurrency), self._server
        under_way: dict[str, asyncio.Task] = {}

        async def one(question: Question, dialogue: Dialogue) -> Form | None:
            try:
                async with limit:
                    return await self._ask(server, under_way, question, form, dialogue)
            except Fault as fault:
                dialogue.fault = fault.kind
                self._say(
                    fault.kind,
                    f"The explorer's endpoint, config.explorer.base_url = {self._config.base_url!r}: {fault.kind} "
                    f"({fault.detail or FAULTS[fault.kind]}).",
                )
                return None

        return list(await asyncio.gather(*map(one, questions, dialogues)))

    @functools.cached_property
    def _key(self) -> str:
        return os.environ.get(self._config.key_variable, "")

    @functools.cached_property
    def _server(self) -> openai.AsyncOpenAI:
        """Made where it is used, on the event loop; its connections live as long as the process."""
        c = self._config
        return openai.AsyncOpenAI(
            base_url=c.base_url,
            api_key=self._key or "none",  # a server of one's own asks for none
            max_retries=0,  # what is retried, and for how long, is decided here
            timeout=c.timeout,
            http_client=httpx2.AsyncClient(
                transport=_Bounded(c.max_bytes), headers={"Accept-Encoding": "identity"}
            ),
        )

    async def _ask(
        self,
        server: openai.AsyncOpenAI,
        under_way: dict[str, asyncio.Task],
        question: Question,
        form: type[Form],
        dialogue: Dialogue,
    ) -> Form:
        """The answer, asked for again once where it has the wrong form. Raises Fault."""
        c = self._config
        request: dict[str, Any] = {
            "model": c.model,
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
            reply = await self._reply(server, under_way, request)
            dialogue.answers.append(reply["text"])
            dialogue.tokens_in += reply["tokens_in"]
            dialogue.tokens_out += reply["tokens_out"]
            try:
                return read(message(reply), form)
            except Fault as fault:
                if again or fault.kind not in REPAIRED:
                    raise
                dialogue.complaint = fault.detail
                said = {"role": "assistant", "content": reply["text"][:QUOTED]}
                wish = f"This is not what was asked for ({dialogue.complaint}). Answer again, with the JSON object alone."
                messages = [*request["messages"], said, {"role": "user", "content": wish}]
                request = {**request, "messages": messages}
        raise AssertionError("unreachable")

    async def _reply(
        self, server: openai.AsyncOpenAI, under_way: dict[str, asyncio.Task], request: Mapping[str, Any]
    ) -> dict:
        """What the server said, as `condense` has it: from the cache, or from an equal question that is under way."""
        key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        if self._cache is not None and (known := self._cache.get(key)) is not None:
            return known
        if self._config.offline:
            raise Fault("offline")
        if key not in under_way:
            under_way[key] = asyncio.ensure_future(self._fetch(server, request, key))
        return await asyncio.shield(under_way[key])

    async def _fetch(self, server: openai.AsyncOpenAI, request: Mapping[str, Any], key: str) -> dict:
        """Attempts with growing pauses. What was paid is in the cache before anybody reads it."""
        c = self._config
        for attempt in range(c.attempts):
            try:
                reply = await self._attempt(server, request)
                if self._cache is not None:
                    self._cache.put(key, request, reply)
                return reply
            except Fault as fault:
                if fault.kind not in AGAIN or attempt + 1 == c.attempts:
                    raise
                await asyncio.sleep(min(max(fault.wait, PAUSE * 2**attempt), c.patience))
        raise AssertionError("unreachable")

    async def _attempt(self, server: openai.AsyncOpenAI, request: Mapping[str, Any]) -> dict:
        # The exceptions of the library hold the request with its key: none of them goes further than here.
        kind, detail, wait = "unreachable", "", 0.0
        try:
            async with asyncio.timeout(self._config.timeout):  # around all of it: bytes may come one by one
                # As it is: chat.completions.create would look through the schema at every request.
                reply = await server.post("/chat/completions", body=request, cast_to=httpx2.Response)
                return condense(self._without_key(reply.text))
        except Fault:
            raise
        except (TimeoutError, openai.APITimeoutError):
            kind = "deadline"
        except openai.APIStatusError as error:
            status = error.status_code
            kind = {429: "rate_limited", 401: "unauthorized", 403: "unauthorized"}.get(status) or (
                "server_error" if status >= 500 else "bad_request"
            )
            detail, wait = f"status {status}", _seconds(error.response.headers.get("retry-after"))
        except openai.APIError as error:
            kind = "too_large" if isinstance(error.__cause__, _TooLarge) else kind
        except _TooLarge:
            kind = "too_large"
        except (httpx2.HTTPError, UnicodeError, OSError):
            pass
        raise Fault(kind, detail, wait) from None

    def _without_key(self, text: str) -> str:
        """A server may say back what it was sent; a short key is no secret but a word, such as "none"."""
        return text.replace(self._key, "[key]") if len(self._key) >= SECRET else text

    def _say(self, kind: str, sentence: str) -> None:
        """On the terminal, once for each kind; the ledger counts the others."""
        if kind not in self._said:
            self._said.add(kind)
            print(sentence, file=sys.stderr)


@functools.cache
def _response_format(form: type[Form]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": form.__name__, "schema": form.model_json_schema()}}


def condense(body: str) -> dict:
    """What we read of a chat completion, as JSON values: it is what the cache keeps.

    Raises Fault ("no_protocol") for what is none.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise Fault("no_protocol", f"it begins {body[:60]!r}") from None
    if not isinstance(data, dict) or not isinstance(data.get("choices"), list):
        raise Fault("no_protocol", "no choices in it")
    usage = data.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    choice = data["choices"][0] if data["choices"] and isinstance(data["choices"][0], dict) else None
    message = choice.get("message") if choice else None
    message = message if isinstance(message, dict) else {}
    text, reasoning = message.get("content"), message.get("reasoning_content")
    return {
        "tokens_in": _count(usage.get("prompt_tokens")),
        "tokens_out": _count(usage.get("completion_tokens")),
        "choice": choice is not None,
        "finish": str(choice.get("finish_reason")) if choice else "",
        "text": text if isinstance(text, str) else "",
        "refusal": bool(message.get("refusal")),
        "tool_call": bool(message.get("tool_calls")),
        "reasoning": isinstance(reasoning, str) and bool(reasoning),
    }


def message(reply: Mapping[str, Any]) -> str:
    """The text of a reply. Raises Fault where there is none, or not all of it."""
    text: str = reply["text"].strip()
    checks = (
        ("no_choices", not reply["choice"]),
        ("content_filter", reply["finish"] == "content_filter"),
        ("refusal", reply["refusal"]),
        ("tool_call", reply["tool_call"] and not text),
        ("truncated", reply["finish"] == "length"),
        ("reasoning_only", reply["reasoning"] and not text),
    )
    for kind, found in checks:
        if found:
            raise Fault(kind)
    return text


def _count(value: Any) -> int:
    """Tokens that a server says it used."""
    sound = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e9
    return int(value) if sound else 0


def _seconds(header: str | None) -> float:
    """Retry-After in seconds; a date, or nothing, is 0."""
    try:
        seconds = float(header or 0)
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


class _TooLarge(Exception):
    pass


class _Bounded(httpx2.AsyncBaseTransport):
    """The usual transport, but for answers of more than so many bytes."""

    def __init__(self, most: int):
        self._most, self._inner = most, httpx2.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await self._inner.handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":  # it may unpack to anything
            await response.aclose()
            raise _TooLarge
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        return httpx2.Response(
            response.status_code,
            headers=response.headers,
            stream=_BoundedStream(response.stream, self._most),
            extensions=response.extensions,
        )

    async def aclose(self) -> None:
        await self._inner.aclose()


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, most: int):
        self._stream, self._most = stream, most

    async def __aiter__(self):
        seen = 0
        async for part in self._stream:
            seen += len(part)
            if seen > self._most:
                raise _TooLarge
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
