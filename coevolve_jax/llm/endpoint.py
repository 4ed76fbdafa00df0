"""Asks a server over the OpenAI protocol, with retries, deadlines and bounds, and reduces its answers.

The key comes from the environment alone. No message, log or exception that leaves this file holds it.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import json
import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import httpx2
import openai
from ml_collections import ConfigDict

from coevolve_jax.llm.answers import Fault
from coevolve_jax.llm.prompting import whole
from coevolve_jax.llm.served import address, listed

# Worth another attempt. None of them is an answer of the model, so none is cached.
AGAIN = ("unreachable", "deadline", "rate_limited", "server_error", "no_choices", "given_up")
GIVEN_UP = ("abort", "error")  # finish reasons of an answer that the server did not end
SECRET = 16  # characters from which a key counts as a secret
PAUSE = 0.5  # seconds before the second attempt; doubles with each attempt
QUOTED = 200  # characters of a server's error that are repeated
BYTES_PER_TOKEN = 3  # of a text whose tokens a server does not count

T = TypeVar("T")


class Endpoint:
    """config: a section with the keys of settings.DEFAULTS. Its methods run on the event loop."""

    def __init__(self, config: ConfigDict):
        self._config = config

    async def complete(self, request: Mapping[str, Any]) -> dict:
        """Returns the server's answer to a request, in the form of `condense`. Raises Fault."""

        async def once() -> dict:
            # A plain post: chat.completions.create would walk through the schema at every request.
            answer = self._server.post("/chat/completions", body=request, cast_to=httpx2.Response)
            return condense(await self._call(answer), request)

        return await self._persist(once)

    async def models(self) -> dict[str, str] | None:
        """Returns the server's models, in the form of `served.listed`; None where it does not list them.

        Raises Fault where the server is away.
        """

        async def once() -> dict[str, str] | None:
            return listed(await self._call(self._server.get("/models", cast_to=httpx2.Response)))

        try:
            return await self._persist(once)
        except Fault as fault:
            if fault.kind in AGAIN:
                raise
            return None

    async def _persist(self, once: Callable[[], Awaitable[T]]) -> T:
        """Attempts `once` up to config.attempts times, with growing pauses. Raises the last Fault."""
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
        # The library's exceptions hold the request with its key: none of them may leave this method.
        kind, detail, wait = "unreachable", "", 0.0
        try:
            async with asyncio.timeout(self._config.timeout):  # for all of it: bytes may come singly
                return self._without_key((await answer).text)
        except (TimeoutError, openai.APITimeoutError):
            kind = "deadline"
        except openai.APIStatusError as error:
            status = error.status_code
            kind = {429: "rate_limited", 401: "unauthorized", 403: "unauthorized"}.get(status) or (
                "server_error" if status >= 500 else "bad_request"
            )
            detail = f"status {status}{self._words(error.body)}"
            wait = _seconds(error.response.headers.get("retry-after"))
        except openai.APIError as error:
            kind = "too_large" if isinstance(error.__cause__, _TooLarge) else kind
        except _TooLarge:
            kind = "too_large"
        except (httpx2.HTTPError, UnicodeError, OSError):
            pass
        except Exception as error:  # the library met an answer that it does not expect
            kind, detail = "no_protocol", type(error).__name__
        raise Fault(kind, detail, wait) from None

    @functools.cached_property
    def _key(self) -> str:
        return os.environ.get(self._config.key_variable, "")

    @functools.cached_property
    def _server(self) -> openai.AsyncOpenAI:
        """The client, made at first use, on the event loop. Its connections live as long as the process."""
        c = self._config
        return openai.AsyncOpenAI(
            base_url=c.base_url,
            api_key=self._key or "none",  # the library wants a key, even for a server without keys
            max_retries=0,  # _persist retries
            timeout=c.timeout,
            http_client=_http(c.base_url, c.max_bytes),
        )

    def _words(self, body: Any) -> str:
        """Quotes the message of an error's body; "" where it has none."""
        said = body.get("message") if isinstance(body, Mapping) else None
        return f": {self._without_key(said)[:QUOTED]!r}" if isinstance(said, str) and said else ""

    def _without_key(self, text: str) -> str:
        """Removes the key, which a server may echo. A short key is no secret but a word, such as "none"."""
        return text.replace(self._key, "[key]") if len(self._key) >= SECRET else text


def condense(body: str, request: Mapping[str, Any]) -> dict:
    """Reduces a chat completion to the fields that we read, as JSON values. The cache keeps the same.

    Tokens that the server does not count are estimated from the texts of the request and of the answer.
    Raises Fault: "no_protocol" for a body that is no chat completion, "no_choices" for one without a message,
    "given_up" for one that the server did not end.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        raise Fault("no_protocol", f"it begins {body[:60]!r}") from None
    if not isinstance(data, dict) or not isinstance(data.get("choices"), list):
        raise Fault("no_protocol", "no choices in it")
    usage = data.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    choice = data["choices"][0] if data["choices"] else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(choice, dict) or not isinstance(message, dict):
        raise Fault("no_choices")
    if choice.get("finish_reason") in GIVEN_UP:
        raise Fault("given_up")
    text, reasoning = message.get("content"), message.get("reasoning_content")
    asked = [each["content"] for each in request["messages"]]
    answered = [each for each in (text, reasoning) if isinstance(each, str)]
    tokens_in, tokens_out = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    return {
        "tokens_in": tokens_in or _estimate(asked),
        "tokens_out": tokens_out or _estimate(answered),
        "estimated": not tokens_in or (not tokens_out and any(answered)),
        "finish": str(choice.get("finish_reason")),
        "text": whole(text) if isinstance(text, str) else "",
        "refusal": bool(message.get("refusal")),
        "tool_call": bool(message.get("tool_calls")),
        "reasoning": isinstance(reasoning, str) and bool(reasoning),
    }


def message(reply: Mapping[str, Any]) -> str:
    """Returns the text of a reply. Raises Fault where it is missing or incomplete."""
    text: str = reply["text"].strip()
    checks = (
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
    """Reads a token count from a server; 0 for anything that is no sound number."""
    sound = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e9
    return int(value) if sound else 0


def _estimate(texts: Sequence[str]) -> int:
    """Estimates the tokens of texts, rounded up."""
    return math.ceil(sum(len(text.encode(errors="replace")) for text in texts) / BYTES_PER_TOKEN)


def _seconds(header: str | None) -> float:
    """Reads Retry-After in seconds; 0 for a date, or for nothing."""
    try:
        seconds = float(header or 0)
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


class _TooLarge(Exception):
    pass


def _http(base_url: str, most: int) -> httpx2.AsyncClient:
    """Makes a client that raises _TooLarge for answers of more than `most` bytes.

    It opens as many connections as there are questions at once, which `concurrency` limits.
    It uses the environment's proxies, but none for a server on this machine. Raises ValueError for a proxy
    that cannot be used. The message does not repeat its address, which may hold a password.
    """
    # With a transport given, the client does not look for proxies.
    limits = httpx2.Limits(max_connections=None)
    direct = httpx2.AsyncHTTPTransport(limits=limits) if _is_local(base_url) else None

    async def bounded(response: httpx2.Response) -> None:
        if response.headers.get("content-encoding", "identity") != "identity":  # it may unpack to any size
            raise _TooLarge
        response.encoding = "utf-8"  # as JSON is, whatever codec the header names
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _BoundedStream(response.stream, most)

    try:
        return httpx2.AsyncClient(
            transport=direct,
            limits=limits,
            headers={"Accept-Encoding": "identity"},
            event_hooks={"response": [bounded]},
        )
    except (ValueError, ImportError, httpx2.InvalidURL) as error:
        raise ValueError(
            f"{address(base_url)!r} cannot be asked through the proxy of the environment variable "
            f"HTTP_PROXY, HTTPS_PROXY or ALL_PROXY ({type(error).__name__}): name one that begins with "
            "http:// or https://, install socksio for one with socks5://, or unset the variable."
        ) from None


def _is_local(base_url: str) -> bool:
    host = httpx2.URL(base_url).host
    try:
        ip = ipaddress.ip_address(host)
        return ip.is_loopback or ip.is_unspecified
    except ValueError:
        return host == "localhost"


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
