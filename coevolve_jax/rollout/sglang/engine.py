"""The engine that asks SGLang servers, over HTTP, token ids in and token ids out.

What can go wrong on the way (a server killed, hanging, out of memory, refusing; a connection reset, a body cut
short) costs one request at most, which is asked again from where it had come to: what was returned is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np

from coevolve_jax import event_loop
from coevolve_jax.models.qwen import QwenConfig
from coevolve_jax.rollout.engine import Completion, EngineError, Request, check_requests
from coevolve_jax.rollout.routing import read_routing
from coevolve_jax.rollout.sglang.answer import read_answer, read_counts
from coevolve_jax.rollout.sglang.fleet import Fault, Fleet, Member, Slow
from coevolve_jax.rollout.sglang.push import Pusher, call
from coevolve_jax.rollout.sglang.weights import Weights

FIRST_PAUSE = 0.1  # seconds before a request is tried again; doubled each time, up to 16 times that
SPARE = 8  # tokens of the servers' context that stay free: at its end they cut max_new_tokens without a word
GIVEN_UP = 16  # completions in a row that could not be had, after which the engine stops
KEPT = 3.0  # seconds that an idle connection is kept: less than the 5 after which the servers close it


class SGLangEngine:
    """Engine (rollout/engine.py) over running SGLang servers.

    Requests come and go; a conversation stays with one server. `Request.seed` reaches the server as sampling_seed,
    which it heeds only in its deterministic mode: runs are not repeatable bit by bit.

    Args:
      model_config: the policy's architecture; ids outside its vocabulary, which kill a server, are never sent.
      params: the first weights, pushed as version 0, so that a push that cannot work fails at once.
      members: the servers. Those with a process are started anew when they die, and stopped by `close`.
      pusher: how weights get there (rollout/sglang/push.py).
      max_length: tokens per conversation; the servers must serve as many.
      max_new_tokens: the largest request.sampling.max_new_tokens.
      timeout: seconds that one message may take. probe_timeout: seconds that a server may take to say that it is well;
        it samples a token for it.
      attempts: how often a message is tried before its trajectory is given up.
      patience: seconds for which the engine waits while no server answers.
      restarts: how often each launched server may be started anew.
      record_routing: completions tell which experts were used; for servers with --enable-return-routed-experts.
      constrains: requests may have a schema; for servers with a tokenizer and a grammar backend.
      ahead: `update_weights` returns once the weights are written, and the servers take them while the caller goes on.
        Conversations under way meet them there; those that begin wait for them.
      sleeps: `sleep` will be called; for servers with --enable-memory-saver.

    Raises:
      EngineError: a server does not answer, or has too little room.
      ValueError: it serves another model, or cannot serve this one.
    """

    batches = False

    def __init__(
        self,
        model_config: QwenConfig,
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
        self.faults = 0  # so far; every one was tried again
        self.counts: Counter[str] = Counter(messages=0, slow_retries=0)  # as of `Engine`
        self._aborts: set[asyncio.Task] = set()  # an event loop holds its tasks weakly
        self.versions: dict[str, str] = {}  # as of `Engine`
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
        """Asks until the message is whole: after a fault again, and on where the server stopped too early; all of it
        anew where it has to fit a schema, of which a server knows the beginning only."""
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
                if isinstance(fault, Slow) and member.served > served:  # others it has answered meanwhile
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
        """One POST of what there is so far. Cancelled or timed out, the server is told to stop."""
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
        completion = read_answer(answer, self._config.vocab_size, budget, r.sampling.stop_ids)
        if self._record_routing and completion.finish != "abort":
            completion = await self._with_routing(completion, answer, len(ids) + len(completion.ids) - 1)
        self.counts.update(read_counts(answer["meta_info"]), decode_tokens=len(completion.ids))
        return completion

    async def _with_routing(self, completion: Completion, answer: dict, tokens: int) -> Completion:
        text = answer["meta_info"].get("routed_experts")
        try:  # of a long conversation it is megabytes
            routing = await asyncio.to_thread(read_routing, text, self._config, tokens)
        except ValueError as error:
            raise Fault(f"/generate: {error}") from None
        return dataclasses.replace(completion, routing=routing)

    async def _abort(self, member: Member, rid: str) -> None:
        try:
            await self._call(member, "POST", "/abort_request", {"rid": rid}, self._probe_timeout, reads=False)
        except (Fault, EngineError):
            pass  # it has no such request any more, or nothing at all

    async def _call(
        self, member: Member, method: str, path: str, body: Any, seconds: float, reads: bool = True
    ) -> Any:
        """The JSON that the server answers. Raises Fault, and EngineError for what it will never accept."""
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
                    f"{error} Start it with experiments/serve.py, or leave config.engine.url empty to "
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
                    f"The server at {member.url} cannot give back its memory: start it with --enable-memory-saver, or set "
                    "config.engine.sleep to False."
                )
            tokens_only = served.get("skip_tokenizer_init") or served.get("grammar_backend") == "none"
            if self.constrains and tokens_only:
                raise EngineError(
                    f"The server at {member.url} cannot constrain answers to a schema: start it with experiments/serve.py "
                    "--words, or set config.explorer.json_schema to False."
                )

    async def _probe(self, member: Member) -> None:
        async with self._pushing:  # while weights are loaded, a server does not answer
            self._fleet.check_awake()
            # A push whose connection broke may have left it paused, in which it never is well.
            await self._call(member, "POST", "/continue_generation", {}, self._probe_timeout, reads=False)
            await self._call(member, "GET", "/health", None, self._probe_timeout, reads=False)

    async def _refresh(self, member: Member) -> None:
        """Brings a server that was out to the newest weights, unless it still has them."""
        async with self._pushing:
            served = (await call(self._http, member.url, "GET", "/model_info")).get("weight_version")
            self._fleet.check_awake()
            assert self._weights is not None, "A fleet is refreshed after the engine has its first weights."
            if served != str(self._weights.version) or not self._pusher.holds(member.url, self._weights):
                await self._pusher.push(self._http, member.url, self._weights)

    # ---- Weights ------------------------------------------------------------------------------------------

    def update_weights(self, params: Any, version: int) -> None:
        """As of `Engine`. A server that does not take them is out until it does; where none does, `generate` tells."""
        event_loop.run(self._switched())  # a version must be read before it is the last but two
        try:
            weights = self._pusher.write(params, version)
        except OSError as error:  # said by `generate`, when the step that made these weights is whole
            self._broken = EngineError(
                f"The weights of version {version} cannot be written ({error}): give "
                "config.engine.push_folder a folder with room for three versions."
            )
            return
        event_loop.run(self._switch(weights))

    async def _switch(self, weights: Weights) -> None:
        self._switching = asyncio.create_task(self._push(weights))
        if not self._ahead:
            await self._switching

    async def _switched(self) -> None:
        """Returns when the servers have the newest weights. Raises what kept all of them from it."""
        if self._switching:
            await asyncio.shield(self._switching)

    async def _push(self, weights: Weights) -> None:
        async with self._pushing:
            self._weights, before = weights, self._pusher.paused_seconds
            self._fleet.awake.set()
            outcomes = await asyncio.gather(
                *(self._push_to(member, weights) for member in self._fleet.serving), return_exceptions=True
            )
        paused = self._pusher.paused_seconds - before
        self.counts.update({"paused_seconds": paused / len(self._fleet.members)})
        for outcome in outcomes:
            if outcome is not None:
                raise outcome

    async def _push_to(self, member: Member, weights: Weights) -> None:
        try:
            await self._wake(member)
            await self._pusher.push(self._http, member.url, weights)
        except (EngineError, Fault) as error:
            self._fleet.put_out(member, str(error))

    def sleep(self) -> None:
        """The servers give back the memory of weights and caches; `update_weights` wakes them.

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
        """It asserts that it is idle, or paused."""
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
        """It has its memory again, and no weights until some are pushed."""
        if member in self._asleep:
            self._asleep.remove(member)
            await self._post(member, "/resume_memory_occupation", {})

    async def _post(self, member: Member, path: str, body: dict) -> None:
        await self._call(member, "POST", path, body, self._timeout, reads=False)

    def release(self, conversation_ids: Sequence[int]) -> None:
        """The servers drop the prefixes that were used least recently by themselves."""
        event_loop.soon(self._fleet.release, conversation_ids)

    def close(self) -> None:
        event_loop.run(self._aclose())

    async def _aclose(self) -> None:
        if self._switching:
            self._switching.cancel()
            await asyncio.wait([self._switching])
        for member in list(self._asleep):  # whoever attaches next pushes its weights first
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
    """One completion of several that follow each other."""
    return Completion(
        np.concatenate([p.ids for p in parts]),
        np.concatenate([p.logprobs for p in parts]),
        finish,
        np.concatenate([p.versions for p in parts]),
        reason,
        parts[-1].routing,
    )
