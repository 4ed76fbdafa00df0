"""Asks a server over the OpenAI protocol: attempts, deadlines, bounds, and what of an answer is read.

The key comes from the environment alone; it is in no message, no log and no exception that leaves this file.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import httpx2
import openai
from ml_collections import ConfigDict

from coevolve_jax.explorers.llm.answers import Fault, whole
from coevolve_jax.explorers.llm.served import listed

AGAIN = ("unreachable", "deadline", "rate_limited", "server_error")  # worth another attempt
SECRET = 16  # characters that a key has at least
PAUSE = 0.5  # seconds before the second attempt; they double

T = TypeVar("T")


class Endpoint:
    """config: the section explorer of the run's config. Its methods run on the event loop."""

    def __init__(self, config: ConfigDict):
        self._config = config

    async def complete(self, request: Mapping[str, Any]) -> dict:
        """Returns the server's answer to a request, as `condense` has it. Raises Fault."""

        async def once() -> dict:
            # As it is: chat.completions.create would look through the schema at every request.
            return condense(
                await self._call(
                    self._server.post("/chat/completions", body=request, cast_to=httpx2.Response)
                )
            )

        return await self._persist(once)

    async def models(self) -> dict[str, str] | None:
        """The models that it serves, as `served.listed` has them; None where it does not list any. Raises Fault where
        it is away."""

        async def once() -> dict[str, str] | None:
            return listed(await self._call(self._server.get("/models", cast_to=httpx2.Response)))

        try:
            return await self._persist(once)
        except Fault as fault:
            if fault.kind in AGAIN:
                raise
            return None

    async def _persist(self, once: Callable[[], Awaitable[T]]) -> T:
        """Attempts with growing pauses."""
        c = self._config
        for attempt in range(c.attempts):
            try:
                return await once()
            except Fault as fault:
                if fault.kind not in AGAIN or attempt + 1 == c.attempts:
                    raise
                await asyncio.sleep(min(max(fault.wait, PAUSE * 2**attempt), c.patience))
        raise AssertionError("unreachable")

    async def _call(self, answer: Awaitable[httpx2.Response]) -> str:
        # The exceptions of the library hold the request with its key: none of them goes further than here.
        kind, detail, wait = "unreachable", "", 0.0
        try:
            async with asyncio.timeout(self._config.timeout):  # around all of it: bytes may come one by one
                return self._without_key((await answer).text)
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

    def _without_key(self, text: str) -> str:
        """A server may say back what it was sent; a short key is no secret but a word, such as "none"."""
        return text.replace(self._key, "[key]") if len(self._key) >= SECRET else text


def condense(body: str) -> dict:
    """Returns what we read of a chat completion, as JSON values; the cache keeps the same.

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
        "text": whole(text) if isinstance(text, str) else "",
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
