"""An ASGI middleware that makes sglang-jax's HTTP app answer as this project's client needs it to.

It adds POST /update_weights_from_disk, POST /weights_checker, GET /model_info and /server_info, as SGLang has
them. It also adds pausing that an update can rely on.

It mends /generate. Token ids outside the vocabulary are refused. Every request gets an id of its own inside
the server. The output_token_logprobs are cut to the last completion_tokens entries and compared with
output_ids. The meta_info names the weight version.

A request never sees two versions. An update waits until running requests are done, and new ones wait for it.

It knows no framework and nothing of sglang-jax. `app` is any ASGI app, and `weights` gives a ServedWeights.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

# Paths that start no generation and are answered at any time. All others wait while the gate is shut.
CONTROL = {
    "/health",
    "/ping",
    "/get_model_info",
    "/get_server_info",
    "/get_load",
    "/flush_cache",
    "/v1/models",
    "/configure_logging",
    "/start_profile",
    "/stop_profile",
    "/metrics",
    "/openapi.json",
}


class Refused(Exception):
    """An answer that is one sentence. status: the HTTP status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Gate:
    """Lets requests through or holds them, and counts those inside."""

    def __init__(self):
        self.paused = self.updating = False
        self.inside = 0
        self._change = asyncio.Condition()

    @property
    def shut(self) -> bool:
        return self.paused or self.updating

    @contextlib.asynccontextmanager
    async def passage(self):
        async with self._change:
            await self._change.wait_for(lambda: not self.shut)
            self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1
            async with self._change:
                self._change.notify_all()

    async def set(self, **flags: bool) -> None:
        async with self._change:
            vars(self).update(flags)
            self._change.notify_all()

    async def empty(self, seconds: float) -> None:
        """Returns when nothing is inside; TimeoutError after `seconds`."""
        async with self._change:
            await asyncio.wait_for(self._change.wait_for(lambda: self.inside == 0), seconds)


class Shim:
    """The middleware.

    Args:
      app: the wrapped ASGI app.
      weights: returns the ServedWeights, which exist once the server has loaded its model.
      options: returns the options with which the server was started, by name. Their values are JSON.
      drain: seconds that an update waits for running requests.
      flush: seconds that it tries to empty the cache.
    """

    def __init__(
        self,
        app: Callable,
        weights: Callable[[], Any],
        options: Callable[[], dict],
        drain: float = 500,
        flush: float = 30,
    ):
        self.app, self.weights, self.options, self.drain, self.flush = app, weights, options, drain, flush
        self.gate, self._turn = Gate(), asyncio.Lock()
        self._inner_rids: dict[str, list[str]] = {}  # the client's id -> the server's, of running requests
        self._routes = {
            "/update_weights_from_disk": self._update,
            "/weights_checker": self._checksum,
            "/model_info": self._model_info,
            "/server_info": self._server_info,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/abort_request": self._abort,
            "/generate": self._generate,
        }

    async def __call__(self, scope, receive, send) -> None:
        route = self._routes.get(scope.get("path")) if scope["type"] == "http" else None
        if route:
            try:
                status, answer = await route(scope, await _body(receive), receive)
            except Refused as error:
                status, answer = (
                    error.status,
                    {"success": False, "message": str(error), "error": {"message": str(error)}},
                )
            await _respond(send, status, answer)
        elif scope["type"] != "http" or scope["path"] in CONTROL:
            await self.app(scope, receive, send)
        elif scope["path"] == "/health_generate" and self.gate.shut:  # else the server would look dead
            await self.app({**scope, "path": "/health", "raw_path": b"/health"}, receive, send)
        else:
            async with self.gate.passage():
                await self.app(scope, receive, send)

    # ---- Weights -------------------------------------------------------------------------------------------

    async def _update(self, scope, body: dict, receive):
        folder, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(folder, str) or not isinstance(version, str):
            raise Refused(
                400,
                f"An update needs model_path and weight_version as strings, not {folder!r} and {version!r}.",
            )
        if body.get("flush_cache", True) is not True:
            raise Refused(400, "flush_cache must be true: the cache holds keys and values of old weights.")
        async with self._turn:
            weights = self.weights()
            try:
                leaves = await asyncio.to_thread(weights.read, folder)  # while requests are served
            except ValueError as error:
                raise Refused(400, str(error)) from error
            await self.gate.set(updating=True)
            try:
                await self._switch(scope, weights, leaves)
                weights.folder, weights.version = folder, version
            finally:
                await self.gate.set(updating=False)
        return 200, {"success": True, "message": f"Serving {folder} as {version}.", "num_paused_requests": 0}

    async def _switch(self, scope, weights, leaves) -> None:
        try:
            await self.gate.empty(self.drain)
        except TimeoutError:
            raise Refused(
                503,
                f"{self.gate.inside} request(s) still ran after {self.drain:g} s, so the old "
                "weights stay; abort them or allow more time with --drain-seconds.",
            ) from None
        old = weights.replace(leaves)
        if not await self._flush(scope):
            weights.replace(old)
            raise Refused(
                500, f"sglang-jax did not flush its cache within {self.flush:g} s, so the old weights stay."
            )

    async def _flush(self, scope) -> bool:
        """Flushes the cache, again until it succeeds or time is up. Returns whether it did.

        The scheduler refuses while it holds a request, even one whose answer is out.
        """
        end = time.monotonic() + self.flush
        while (await self._call(scope, "/flush_cache", {}))[0] != 200:
            if time.monotonic() > end:
                return False
            await asyncio.sleep(0.05)
        return True

    async def _checksum(self, scope, body: dict, receive):
        if body.get("action", "checksum") != "checksum":
            raise Refused(400, f"weights_checker knows the action 'checksum', not {body.get('action')!r}.")
        async with self._turn:  # keeps updates out
            sums = await asyncio.to_thread(self.weights().checksums)
        whole = hashlib.sha256("".join(f"{name}{sums[name]}" for name in sorted(sums)).encode()).hexdigest()
        return 200, {
            "success": True,
            "message": "",
            "per_engine_checksum": whole,
            "ranks": [{"checksums": sums, "per_gpu_checksum": whole, "parallelism_info": []}],
        }

    async def _model_info(self, scope, body: dict, receive):
        weights = self.weights()
        return 200, {
            "model_path": str(weights.folder),
            "weight_version": weights.version,
            "is_generation": True,
        }

    async def _server_info(self, scope, body: dict, receive):
        absent = {"pp_size": 1, "quantization": None}  # options of SGLang that sglang-jax lacks
        return 200, {**absent, **self.options(), "weight_version": self.weights().version}

    # ---- Pausing -------------------------------------------------------------------------------------------

    async def _pause(self, scope, body: dict, receive):
        mode = body.get("mode", "retract")
        if mode not in ("retract", "abort"):
            raise Refused(
                400,
                f"Pausing knows the modes retract and abort, not {mode!r}: with in_place "
                "a request would go on with keys and values of the old weights.",
            )
        await self.gate.set(paused=True)
        if mode == "abort":
            await self._call(scope, "/abort_request", {"rid": "", "abort_all": True})
        return 200, {"status": "ok", "message": "New requests wait; running ones finish before an update."}

    async def _continue(self, scope, body: dict, receive):
        await self.gate.set(paused=False)
        return 200, {"status": "ok", "message": "Generation continues."}

    async def _abort(self, scope, body: dict, receive):
        everything = body.get("abort_all") is True
        rids = list(self._inner_rids.get(str(body.get("rid")), []))
        for rid in [""] if everything else rids:
            await self._call(scope, "/abort_request", {"rid": rid, "abort_all": everything})
        return 200, {"success": True, "message": f"{len(rids)} request(s) of that id were running."}

    # ---- Generating ----------------------------------------------------------------------------------------

    async def _generate(self, scope, body: dict, receive):
        weights = self.weights()
        prompts = check_prompts(body, weights.vocab_size)
        many = body["input_ids"] and isinstance(body["input_ids"][0], list)
        given = _one_each(body.get("rid"), prompts, "rid")
        with_logprobs = _one_each(body.get("return_logprob", False), prompts, "return_logprob")
        rids = [uuid.uuid4().hex for _ in prompts]  # a reused id would mix old output into the answer
        async with self.gate.passage():
            with self._known(given, rids):
                status, answer = await self._call(
                    scope, "/generate", {**body, "rid": rids if many else rids[0]}, receive
                )
            version = weights.version
        if status != 200:
            return status, answer
        answers = answer if many else [answer]
        if len(answers) != len(prompts):
            raise Refused(500, f"sglang-jax gave {len(answers)} answer(s) to {len(prompts)} prompt(s).")
        for one, rid, logprobs in zip(answers, given, with_logprobs):
            mend(one, version, rid, bool(logprobs))
        return 200, answer

    @contextlib.contextmanager
    def _known(self, given: list, rids: list[str]):
        """Records which ids in the server stand for the client's, for /abort_request."""
        pairs = [(outer, inner) for outer, inner in zip(given, rids) if isinstance(outer, str)]
        for outer, inner in pairs:
            self._inner_rids.setdefault(outer, []).append(inner)
        try:
            yield
        finally:
            for outer, inner in pairs:
                self._inner_rids[outer].remove(inner)
                if not self._inner_rids[outer]:
                    del self._inner_rids[outer]

    async def _call(self, scope, path: str, body: dict, receive: Callable | None = None) -> tuple[int, Any]:
        """The app's own answer to a POST. receive: the client's, so that the app hears if the client goes
        away."""
        content = json.dumps(body).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        messages = [{"type": "http.request", "body": content, "more_body": False}]
        status, chunks = 500, []

        async def next_message():
            return messages.pop() if messages else await (receive or asyncio.Event().wait)()

        async def collect(message):
            nonlocal status
            status = message.get("status", status)
            chunks.append(message.get("body", b""))

        inner = {
            **scope,
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": headers,
        }
        await self.app(inner, next_message, collect)
        text = b"".join(chunks)
        try:
            return status, json.loads(text)
        except ValueError:
            return status, {"message": text.decode(errors="replace")}


def check_prompts(body: dict, vocab_size: int) -> list[list[int]]:
    """The prompts of a /generate body as lists of ids. Raises Refused where one would harm the server."""
    if body.get("stream"):
        raise Refused(400, "This server answers whole responses; leave stream out.")
    ids = body.get("input_ids")
    if not isinstance(ids, list):
        raise Refused(
            400, "input_ids must be a list of token ids or a list of such lists: no text is tokenised here."
        )
    prompts = ids if ids and isinstance(ids[0], list) else [ids]
    for prompt in prompts:
        if not isinstance(prompt, list) or not prompt:
            raise Refused(
                400, f"A prompt must be a list of token ids that is not empty, not {str(prompt)[:40]!r}."
            )
        wrong = [i for i in prompt if type(i) is not int or not 0 <= i < vocab_size]
        if wrong:
            raise Refused(
                400,
                f"{str(wrong[0])[:40]!r} is no token id of this model, whose vocabulary is 0 "
                f"to {vocab_size - 1}.",
            )
    return prompts


def _one_each(value: Any, prompts: list, name: str) -> list:
    values = value if isinstance(value, list) else [value] * len(prompts)
    if len(values) != len(prompts):
        raise Refused(400, f"{len(prompts)} prompt(s) came with {len(values)} of {name}; send one for each.")
    return values


def mend(answer: dict, version: str, rid: str | None, with_logprobs: bool) -> None:
    """Completes one answer of sglang-jax in place. Raises Refused (500) where its parts contradict each
    other."""
    meta, ids = answer.get("meta_info"), answer.get("output_ids")
    if not isinstance(meta, dict) or not isinstance(ids, list):
        raise Refused(500, "sglang-jax answered without meta_info or output_ids.")
    count = meta.get("completion_tokens")
    if len(ids) != count:
        raise Refused(500, f"sglang-jax says completion_tokens={count} but gave {len(ids)} output_ids.")
    if with_logprobs:  # past some tens of tokens the first entries are duplicates; the last ones are right
        logprobs = meta.get("output_token_logprobs") or []
        logprobs = logprobs[max(len(logprobs) - count, 0) :]
        if [entry[1] for entry in logprobs] != ids:
            raise Refused(500, "sglang-jax's output_token_logprobs are not those of its output_ids.")
        meta["output_token_logprobs"] = logprobs
    meta["weight_version"] = version
    meta["weight_versions"] = [{"version": version, "start": 0, "end": count}]
    if rid is not None:
        meta["id"] = rid


async def _body(receive) -> dict:
    content, more = b"", True
    while more:
        message = await receive()
        content, more = content + message.get("body", b""), message.get("more_body", False)
    return parse(content)


def parse(content: bytes) -> dict:
    """A request's JSON object. {} for an empty body or one that is no object."""
    try:
        body = json.loads(content or b"{}")
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


async def _respond(send: Callable[[dict], Awaitable], status: int, answer: Any) -> None:
    content = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
