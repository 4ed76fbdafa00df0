"""The engine over SGLang servers: token ids in, token ids out, by HTTP.

A fault costs one request at most: a server killed, hanging, out of memory or refusing, a connection reset, a
body cut short. The request is then sent again and continues after the tokens that were returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import random
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np

from coevolve_jax import event_loop, shipped
from coevolve_jax.models.decoder import ModelConfig
from coevolve_jax.rollout.engine import Completion, EngineError, Request, check_requests
from coevolve_jax.rollout.routing import read_routing
from coevolve_jax.rollout.sglang.answer import read_answer, read_counts
from coevolve_jax.rollout.sglang.fleet import Fault, Fleet, Member, Slow
from coevolve_jax.rollout.sglang.push import Pusher, call
from coevolve_jax.rollout.sglang.weights import Weights

FIRST_PAUSE = 0.1  # seconds before a request is sent again; doubled each time, up to 16 times that
SPARE = 8  # tokens of the servers' context that stay free: at its end they silently cut max_new_tokens
GIVEN_UP = 16  # the engine stops after this many failed messages in a row
KEPT = 3.0  # seconds that an idle connection is kept: the servers close it after 5


class SGLangEngine:
    """Engine (rollout/engine.py) over running SGLang servers.

    Requests come and go; a conversation stays with one server. Runs are not repeatable bit by bit: a server
    uses `Request.seed`, its sampling_seed, only in its deterministic mode.

    Args:
      model_config: the policy's architecture. Ids outside its vocabulary kill a server: none is ever sent.
      params: the first weights. They are pushed as version 0, so that a push that cannot work fails at once.
      members: the servers. Those with a process are restarted when they die, and stopped by `close`.
      pusher: brings weights to the servers (rollout/sglang/push.py).
      max_length: tokens per conversation; the servers must serve as many.
      max_new_tokens: the largest request.sampling.max_new_tokens.
      timeout: seconds that one message may take.
      probe_timeout: seconds that a health check may take, for which the server samples a token.
      attempts: how often a message is tried before its trajectory is given up.
      patience: seconds for which the engine waits while no server answers.
      restarts: how often each launched server may be restarted.
      record_routing: completions hold the experts that were used (needs --enable-return-routed-experts).
      constrains: requests may have a schema; for servers with a tokenizer and a grammar backend.
      ahead: `update_weights` returns once the weights are written, and the servers load them meanwhile.
        Running conversations get them on the way; new ones wait for them.
      sleeps: `sleep` will be called; for servers with --enable-memory-saver.

    Raises:
      EngineError: a server does not answer, or has too little room. `generate` raises it too where another
        program has pushed its weights to a server.
      ValueError: it serves another model, or cannot serve this one.
    """

    batches = False

    def __init__(
        self,
        model_config: ModelConfig,
        params: Any,
        *,
        members: Sequence[Member],
        pusher: Pusher,
        max_length: int,
        max_new_tokens: int,
        timeout: float = 300.0,
        probe_timeout: float = 25.0,
        attempts: int = 5,
        patience: float = 120.0,
        restarts: int = 5,
        record_routing: bool = False,
        constrains: bool = False,
        ahead: bool = False,
        sleeps: bool = False,
    ):
        if model_config.dense_layers and model_config.sparse_layers:
            raise ValueError(
                "SGLang 0.5.23 serves every layer of a Qwen3-MoE as sparse, and this model has dense "
                'layers as well: use config.engine.name = "native".'
            )
        self._config, self._record_routing, self.constrains = model_config, record_routing, constrains
        self._max_length, self._max_new = max_length, max_new_tokens
        self._timeout, self._probe_timeout, self._attempts = timeout, probe_timeout, attempts
        self._pusher = pusher
        self._weights: Weights | None = None
        self._switching: asyncio.Task | None = None  # the last push
        self._ahead = False  # until the servers have the first weights
        self._sleeps, self._asleep = sleeps, set[Member]()
        self._given_up = 0
        self.faults = 0  # failed attempts so far
        self.counts: Counter[str] = Counter(messages=0, slow_retries=0)  # see `Engine`
        self._aborts: set[asyncio.Task] = set()  # keeps tasks alive: an event loop holds them weakly
        self.versions: dict[str, str] = {}  # see `Engine`
        self._broken: EngineError | None = None
        event_loop.run(self._start(members, patience, restarts))
        try:
            event_loop.run(self._check_served())
            self.update_weights(params, 0)
            if not self._fleet.serving:
                raise EngineError(self._fleet.members[0].why)
            self._ahead = ahead
        except BaseException:
            self.close()
            raise

    async def _start(self, members: Sequence[Member], patience: float, restarts: int) -> None:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        self._pushing = asyncio.Lock()
        self._fleet = Fleet(
            members, probe=self._probe, refresh=self._refresh, patience=patience, restarts=restarts
        )

    @property
    def urls(self) -> list[str]:
        return [member.url for member in self._fleet.members]

    # ---- Requests -----------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        if self._broken:
            raise self._broken
        check_requests(requests, self._config.vocab_size, self._max_length, self._max_new, self.constrains)
        tasks = [asyncio.ensure_future(self._complete(request)) for request in requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _complete(self, r: Request) -> Completion:
        """Asks until the message is whole.

        After a fault, or where the server stopped early, the next request continues the message. With a
        schema the message starts over instead: a server can only begin a schema.
        """
        self.counts["messages"] += 1
        constrained = r.sampling.json_schema is not None
        parts = [_NOTHING]
        failed, why = 0, ""
        while failed < self._attempts:
            done = sum(len(p.ids) for p in parts)
            if parts[-1].finish == "stop" or done == r.sampling.max_new_tokens:
                self._given_up = 0
                return _join(parts, "stop" if parts[-1].finish == "stop" else "length")
            if failed:
                await asyncio.sleep(FIRST_PAUSE * 2 ** min(failed - 1, 4) * random.uniform(0.5, 1.5))
            if not self._fleet.knows(r.conversation_id):
                await self._switched()
            member = await self._fleet.take(r.conversation_id)
            served = member.served
            try:
                ids = np.concatenate([r.ids, *(p.ids for p in parts)])
                parts.append(await self._ask(member, r, ids, done))
                member.served += 1
            except Fault as fault:
                self.faults += 1
                self.counts["slow_retries"] += isinstance(fault, Slow)
                failed, why = failed + 1, str(fault)
                # A slow server that has answered others is not dead: only this conversation moves.
                if isinstance(fault, Slow) and member.served > served:
                    self._fleet.release([r.conversation_id])
                else:
                    self._fleet.put_out(member, why)
                continue
            if parts[-1].finish == "abort" or constrained and not parts[-1].finish:
                self.faults += 1
                failed, why = failed + 1, parts[-1].reason or "it ended an answer without a stop id"
                parts = [_NOTHING] if constrained else parts
        self._given_up += 1
        if self._given_up >= GIVEN_UP:
            raise EngineError(
                f"{self._given_up} messages in a row could not be had, each after {self._attempts} "
                f"attempts; the last one because {why}. See the servers' logs; the same command goes on "
                "from the last checkpoint."
            )
        return _join(parts, "abort", why)

    async def _ask(self, member: Member, r: Request, ids: np.ndarray, done: int) -> Completion:
        """Posts the tokens so far once. Tells the server to stop where the call is cancelled or fails."""
        rid = uuid.uuid4().hex
        body = {
            "rid": rid,
            "input_ids": ids.tolist(),
            "return_logprob": True,
            "return_routed_experts": self._record_routing,
            "sampling_params": {
                "temperature": r.sampling.temperature,
                "top_p": 1.0,
                "top_k": -1,
                "max_new_tokens": r.sampling.max_new_tokens - done,
                "stop_token_ids": list(r.sampling.stop_ids),
                "ignore_eos": not r.sampling.stop_ids,
                "sampling_seed": r.seed % 2**31,
            },
        }
        if r.sampling.json_schema is not None:
            body["sampling_params"]["json_schema"] = r.sampling.json_schema
        try:
            answer = await self._call(member, "POST", "/generate", body, self._timeout)
        except (asyncio.CancelledError, Fault):
            abort = asyncio.ensure_future(self._abort(member, rid))
            self._aborts.add(abort)
            abort.add_done_callback(self._aborts.discard)
            raise
        budget = r.sampling.max_new_tokens - done
        version_of = functools.partial(self._pusher.version_of, member.url)
        completion = read_answer(answer, self._config.vocab_size, budget, r.sampling.stop_ids, version_of)
        if self._record_routing and completion.finish != "abort":
            completion = await self._with_routing(completion, answer, len(ids) + len(completion.ids) - 1)
        self.counts.update(read_counts(answer["meta_info"]), decode_tokens=len(completion.ids))
        return completion

    async def _with_routing(self, completion: Completion, answer: dict, tokens: int) -> Completion:
        text = answer["meta_info"].get("routed_experts")
        try:  # in a thread: a long conversation has megabytes of routing
            routing = await asyncio.to_thread(read_routing, text, self._config, tokens)
        except ValueError as error:
            raise Fault(f"/generate: {error}") from None
        return dataclasses.replace(completion, routing=routing)

    async def _abort(self, member: Member, rid: str) -> None:
        try:
            await self._call(member, "POST", "/abort_request", {"rid": rid}, self._probe_timeout, reads=False)
        except (Fault, EngineError):
            pass  # the request, or the server, is gone

    async def _call(
        self, member: Member, method: str, path: str, body: Any, seconds: float, reads: bool = True
    ) -> Any:
        """Returns the server's JSON answer. Raises Fault, or EngineError where the server refuses (400)."""
        try:
            async with self._http.request(
                method, member.url + path, json=body, timeout=aiohttp.ClientTimeout(total=seconds)
            ) as response:
                text = await response.text()
                if response.status == 400:
                    raise EngineError(f"{member.url}{path} refuses what it was asked: {text[:300]}")
                if response.status != 200:
                    raise Fault(f"{path} answered {response.status}: {text[:200]}")
                if not reads:
                    return None
                return json.loads(text) if len(text) < 2**20 else await asyncio.to_thread(json.loads, text)
        except TimeoutError:
            raise Slow(f"{path} did not answer within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Fault(f"{path} failed: {type(error).__name__}: {error}"[:300]) from None

    # ---- Servers ------------------------------------------------------------------------------------------

    async def _check_served(self) -> None:
        for member in self._fleet.members:
            try:
                served = await call(self._http, member.url, "GET", "/server_info")
            except EngineError as error:
                raise EngineError(
                    f"{error} Start it with {shipped.command('serve')}, or leave config.engine.url empty to "
                    "have one launched."
                ) from None
            if version := served.get("version"):
                told = {*filter(None, self.versions.get("sglang", "").split(", ")), str(version)}
                self.versions["sglang"] = ", ".join(sorted(told))
            room = served.get("context_length")
            if isinstance(room, int) and room < self._max_length + SPARE:
                raise EngineError(
                    f"The server at {member.url} serves {room} tokens and config.rollout.max_length is "
                    f"{self._max_length}: start it with --context-length {self._max_length + SPARE}."
                )
            if self._sleeps and not served.get("enable_memory_saver"):
                raise EngineError(
                    f"The server at {member.url} cannot give back its memory: start it with "
                    "--enable-memory-saver, or set config.engine.sleep to False."
                )
            tokens_only = served.get("skip_tokenizer_init") or served.get("grammar_backend") == "none"
            if self.constrains and tokens_only:
                raise EngineError(
                    f"The server at {member.url} cannot constrain answers to a schema: start it with "
                    f"{shipped.command('serve')} --words, or set config.explorer.json_schema to False."
                )

    async def _probe(self, member: Member) -> None:
        async with self._pushing:  # while weights are loaded, a server does not answer
            self._fleet.check_awake()
            # A push whose connection broke may have left the server paused. A paused one is never healthy.
            await self._call(member, "POST", "/continue_generation", {}, self._probe_timeout, reads=False)
            await self._call(member, "GET", "/health", None, self._probe_timeout, reads=False)

    async def _refresh(self, member: Member) -> None:
        """Brings a server that was out to the newest weights, unless it still has them."""
        async with self._pushing:
            with contextlib.suppress(EngineError, Fault):  # a server that was started anew is awake
                await self._wake(member)
            served = (await call(self._http, member.url, "GET", "/model_info")).get("weight_version")
            self._fleet.check_awake()
            assert self._weights is not None, "A fleet is refreshed after the engine has its first weights."
            label = self._pusher.label(self._weights)
            if served != label or not self._pusher.holds(member.url, self._weights):
                await self._pusher.push(self._http, member.url, self._weights)

    # ---- Weights ------------------------------------------------------------------------------------------

    def update_weights(self, params: Any, version: int) -> None:
        """Pushes new weights (see `Engine`).

        A server that does not take them gets no requests until it does. Where none does, `generate` raises.
        """
        event_loop.run(self._switched())  # `write` deletes the version before last: nobody may still read it
        try:
            weights = self._pusher.write(params, version)
        except OSError as error:  # raised by the next `generate`, so that the present step can be saved first
            self._broken = EngineError(
                f"The weights of version {version} cannot be written ({error}): give "
                "config.engine.push_folder a folder with room for three versions."
            )
            return
        event_loop.run(self._switch(weights))

    async def _switch(self, weights: Weights) -> None:
        self._switching = asyncio.create_task(self._push(weights))
        if not self._ahead:
            await self._switched()

    async def _switched(self) -> None:
        """Waits until the servers have the newest weights. Raises an error of the push itself.

        ValueError is raised once, for weights of another model: the servers keep theirs and go on.
        """
        if switching := self._switching:
            try:
                await asyncio.shield(switching)
            except ValueError:
                self._switching = None
                raise

    async def _push(self, weights: Weights) -> None:
        async with self._pushing:
            kept, self._weights, before = self._weights, weights, self._pusher.paused_seconds
            self._fleet.awake.set()
            outcomes = await asyncio.gather(
                *(self._push_to(member, weights) for member in self._fleet.serving), return_exceptions=True
            )
        paused = self._pusher.paused_seconds - before
        self.counts.update({"paused_seconds": paused / len(self._fleet.members)})
        for outcome in outcomes:
            if outcome is not None:
                self._weights = kept  # the servers refused these
                raise outcome

    async def _push_to(self, member: Member, weights: Weights) -> None:
        try:
            await self._wake(member)
            await self._pusher.push(self._http, member.url, weights)
        except (EngineError, Fault) as error:
            self._fleet.put_out(member, str(error))

    def sleep(self) -> None:
        """Makes the servers give back the memory of weights and caches. `update_weights` wakes them.

        Raises EngineError where one does not.
        """
        event_loop.run(self._sleep())

    async def _sleep(self) -> None:
        async with self._pushing:
            self._fleet.awake.clear()
            try:
                await asyncio.gather(*(self._lay_down(member) for member in self._fleet.serving))
            except EngineError:
                self._fleet.awake.set()
                raise

    async def _lay_down(self, member: Member) -> None:
        """Makes a server give back its memory. Pauses it first: a busy server fails an assertion."""
        try:
            await self._post(member, "/pause_generation", {"mode": "retract"})
            await self._post(member, "/release_memory_occupation", {})
        except (EngineError, Fault) as error:
            with contextlib.suppress(EngineError, Fault):
                await self._post(member, "/continue_generation", {})
            raise EngineError(
                f"The server at {member.url} did not give back its memory ({error}): see its log, or set "
                "config.engine.sleep to False."
            ) from None
        self._asleep.add(member)

    async def _wake(self, member: Member) -> None:
        """Returns a server its memory. It has no weights until some are pushed."""
        if member in self._asleep:
            await self._post(member, "/resume_memory_occupation", {})
            self._asleep.discard(member)

    async def _post(self, member: Member, path: str, body: dict) -> None:
        await self._call(member, "POST", path, body, self._timeout, reads=False)

    def release(self, conversation_ids: Sequence[int]) -> None:
        """Forgets where these conversations were served. Servers evict unused prefixes by themselves."""
        event_loop.soon(self._fleet.release, conversation_ids)

    def close(self) -> None:
        event_loop.run(self._aclose())

    async def _aclose(self) -> None:
        if self._switching:
            self._switching.cancel()
            await asyncio.wait([self._switching])
        for member in list(self._asleep):  # without weights: the next run pushes its own first
            with contextlib.suppress(EngineError, Fault):
                await self._wake(member)
                await self._post(member, "/continue_generation", {})
        try:
            await self._pusher.close(self._http)
        finally:
            await self._fleet.close()
            await self._http.close()


_NOTHING = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), "", np.zeros(0, np.int32))


def _join(parts: Sequence[Completion], finish: str, reason: str = "") -> Completion:
    """Joins completions that continue each other into one."""
    return Completion(
        np.concatenate([p.ids for p in parts]),
        np.concatenate([p.logprobs for p in parts]),
        finish,
        np.concatenate([p.versions for p in parts]),
        reason,
        parts[-1].routing,
    )
