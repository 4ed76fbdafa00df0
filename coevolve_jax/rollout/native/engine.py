"""The in-process JAX engine: a KV cache that stays across turns, and conversations that come and go in it.

A store places conversations in the cache: in a row each (row_store.py), or in pages (page_store.py). The
engine works in ticks, which run these programs (programs.py):

  fit      changes the numbers of rows and columns of a cache of rows
  copy     copies a prompt from the row of another conversation that has it too; pages are shared instead
  feed     computes the keys and values of all tokens but the last, FEED rows and a chunk of tokens at a time
  decode   samples in all rows until some of them have stopped. Answers with a schema get one token at a time:
           after each, this process computes the tokens that may follow (grammar.py)

The requests alone determine a tick, so equal requests give equal bits.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from coevolve_jax.distributed import sharding
from coevolve_jax.models.decoder import ModelConfig
from coevolve_jax.rollout.engine import Completion, Request, check_requests
from coevolve_jax.rollout.native.conversation import NOWHERE, Conversation
from coevolve_jax.rollout.native.page_store import PageStore
from coevolve_jax.rollout.native.programs import TICK, Programs
from coevolve_jax.rollout.native.row_store import RowStore
from coevolve_jax.rollout.native.store import Store

FEED = 4  # rows that are fed at once; on a mesh rounded up to a multiple of the parts that hold them
# Tokens fed to each of these rows at once. On CPUs padding costs as much as tokens, and most observations are
# shorter than this. Accelerators read all weights for a group, and can compute this many tokens meanwhile.
CHUNK, ACCELERATED_CHUNK = 32, 128
PART = 4  # a tick ends when one in PART of its rows has stopped


class NativeEngine:
    """Samples from a decoder on this process's devices.

    Args:
      model_config: the architecture.
      params: the first weights; `update_weights` brings later ones.
      slots: conversations that keep a cache at once; more than that are served in turn.
      cache_tokens: the size of a cache of pages, in tokens of all conversations. 0 gives each a row, as long
        as the longest one needs.
      max_length: tokens per conversation, prompt included.
      max_new_tokens: the largest request.sampling.max_new_tokens.
      seed: with each request's own seed, it determines all sampling noise.
      dtype: of weights and computation.
      matmul_dtype: of the operands of products, as for `Decoder`. None: `dtype`.
      copies: keep a copy of the weights, for a learner that donates them while this engine generates.
      record_routing: completions hold the experts that were used; the model must have some.
      tokenizer: the model's, to constrain answers to a schema; None refuses requests with a schema.
      mesh: holds the weights and the cache; None is one device. Where it spans several processes, each has
        such an engine, and all make the same calls in the same order (`rollout/native/lockstep.py`).

    Raises ValueError where a tokenizer is given but llguidance is not installed, the mesh would cut a head,
    or there are too few pages.
    """

    batches = True

    def __init__(
        self,
        model_config: ModelConfig,
        params: Any,
        *,
        slots: int,
        cache_tokens: int = 0,
        max_length: int,
        max_new_tokens: int,
        seed: int,
        dtype: Any = jnp.float32,
        matmul_dtype: Any = None,
        copies: bool = False,
        record_routing: bool = False,
        tokenizer: Any = None,
        mesh: Mesh | None = None,
    ):
        self._config, self._copies = model_config, copies
        self._slots, self._max_length, self._max_new = slots, max_length, max_new_tokens
        self._dtype, self._casts = dtype, matmul_dtype is not None
        self.counts: Counter[str] = Counter()  # see `Engine`
        if mesh and model_config.num_key_value_heads % mesh.shape["tensor"]:
            raise ValueError(
                f"{model_config.num_key_value_heads} key-value heads do not divide by the mesh's tensor axis "
                f"of {mesh.shape['tensor']}: choose a smaller config.mesh.tensor, or "
                "config.engine.sharded=False."
            )
        parts = sharding.token_parts(mesh) if mesh else 1
        self._fed = -(-FEED // parts) * parts
        self._programs = Programs(model_config, dtype, record_routing, mesh, matmul_dtype)
        self._chunk = CHUNK if self._programs.platform == "cpu" else ACCELERATED_CHUNK
        sizes: Any = {"slots": slots, "max_length": max_length, "fed": self._fed, "parts": parts}
        self._store: Store = (
            PageStore(self._programs, tokens=cache_tokens, **sizes)
            if cache_tokens
            else RowStore(self._programs, **sizes)
        )
        self._key = self._programs.key(seed)
        self.constrains = tokenizer is not None
        if self.constrains:  # imported here: most runs need no llguidance
            from coevolve_jax.rollout.native.grammar import Grammars

            self._grammars = Grammars(tokenizer, model_config.vocab_size)
        self._lock = threading.Lock()  # guards the cache: ticks run in threads, and updates come from others
        self._held: dict[int, Conversation] = {}  # by id, oldest first
        self._shapes = _shapes(params)
        self.update_weights(params, 0)

    def update_weights(self, params: Any, version: int) -> None:
        given = _shapes(params)
        for name in sorted(given.keys() | self._shapes.keys()):
            if given.get(name) != (own := self._shapes.get(name)):
                raise ValueError(
                    f"These parameters are of another model: {name} has the shape {given.get(name)} and not "
                    f"{own}. The engine keeps its weights; give it those of the model that it was made with."
                )
        with self._lock:
            self._held = {i: c for i, c in self._held.items() if not c.answered}
            for c in self._held.values():  # conversations in the middle of a message are fed again
                if c.logprobs:
                    self._remember(c)
                else:  # it waits, perhaps with a shared prompt: nothing was sampled with that
                    c.routing = None
                c.row, c.cached, c.pages = NOWHERE, 0, []
            self._params = self._weights(params)
            self._version = version
            self._store.drop()

    def _weights(self, params: Any) -> Any:
        """Returns the weights to compute with.

        They are the parameters themselves, unless they are cast or the learner may donate them. On a CPU they
        are copies, one array for each layer.
        """
        if self._casts or any(x.dtype != self._dtype for x in jax.tree.leaves(params)):
            params = self._programs.cast(params)
        params = self._programs.unstack(params)
        return jax.tree.map(jnp.copy, params) if self._copies else params

    def release(self, conversation_ids: Sequence[int]) -> None:
        with self._lock:
            for conversation_id in conversation_ids:
                if c := self._held.pop(conversation_id, None):
                    self._store.free(c)
            if not self._held:  # free the memory, which the learner's update may need
                self._store.drop()

    def close(self) -> None:
        with self._lock:
            self._store.drop()

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Generates (see `Engine`) in a thread. A cancelled call ends there with its tick."""
        self.check(requests)
        ended = threading.Event()
        try:
            return await asyncio.to_thread(self._generate, requests, ended)
        finally:
            ended.set()

    async def advance(self, requests: Sequence[Request]) -> list[Completion | None]:
        """Runs one tick (see `Engine`)."""
        self.check(requests)
        return await asyncio.to_thread(self.tick, requests)

    def tick(self, requests: Sequence[Request]) -> list[Completion | None]:
        """Does what `advance` does, in this thread, with requests that were checked."""
        with self._lock:
            return self._tick(requests)

    def check(self, requests: Sequence[Request]) -> None:
        """Raises ValueError for requests that `generate` would refuse."""
        check_requests(requests, self._config.vocab_size, self._max_length, self._max_new, self.constrains)
        for r in requests:
            if r.sampling.json_schema is not None:
                self._grammars.begin(r.sampling.json_schema, r.sampling.stop_ids)

    def _generate(self, requests: Sequence[Request], ended: threading.Event) -> list[Completion]:
        """ended: set when nobody waits for the answers any more. Then not all are there."""
        done: dict[int, Completion] = {}
        with self._lock:
            while (waiting := [i for i in range(len(requests)) if i not in done]) and not ended.is_set():
                answers = self._tick([requests[i] for i in waiting])
                done |= {i: c for i, c in zip(waiting, answers, strict=True) if c}
        return [done[i] for i in range(len(requests)) if i in done]

    def _tick(self, requests: Sequence[Request]) -> list[Completion | None]:
        """Serves the first `slots` requests, or as many of them as there is room for."""
        asked = [self._conversation(r) for r in requests[: self._slots]]
        self._forget(asked)
        serving, sharing = self._store.admit(asked, list(self._held.values()))
        later = {c.request.conversation_id for c in sharing}
        alone = [c for c in serving if c.request.conversation_id not in later]
        # Count at a message's first tick: earlier, other conversations may still take its pages.
        self.counts["cached_tokens"] += sum(c.cached for c in alone if not c.logprobs)
        self._feed(alone)
        self._store.share()
        self.counts["cached_tokens"] += sum(c.cached for c in sharing)
        self._feed(serving)
        constrained = [c for c in serving if c.request.sampling.json_schema is not None]
        free = [c for c in serving if c.request.sampling.json_schema is None]
        if free:
            self._decode(free)
        if constrained:
            self._decode_constrained(constrained)
        answers = {c.request.conversation_id: self._answer(c) for c in serving}
        return [answers.get(r.conversation_id) for r in requests]

    def _conversation(self, request: Request) -> Conversation:
        c = self._held.setdefault(request.conversation_id, Conversation.new(request))
        if c.answered or c.request is not request:
            c.begin(request)
        return c

    def _forget(self, asked: Sequence[Conversation]) -> None:
        """Frees the oldest conversations that nobody asks for, where there are more than `slots`."""
        needed = {c.request.conversation_id for c in asked}
        surplus = max(0, len(self._held) - self._slots)
        for conversation_id in [i for i in self._held if i not in needed][:surplus]:
            self._store.free(self._held.pop(conversation_id))

    def _feed(self, conversations: Sequence[Conversation]) -> None:
        """Computes the keys and values of all their tokens but the last."""
        while behind := [c for c in conversations if c.cached < len(c.ids) - 1]:
            for group in self._store.groups(behind):
                shape = self._fed, self._chunk
                tokens = np.zeros(shape, np.int32)
                positions = np.full(shape, self._store.columns, np.int32)  # beyond the cache: ignored
                for i, c in enumerate(group):
                    if c is None:
                        continue
                    new = np.arange(c.cached, min(c.cached + self._chunk, len(c.ids) - 1))
                    tokens[i, : len(new)], positions[i, : len(new)] = c.ids[new], new
                    c.cached += len(new)
                    self.counts["prefill_tokens"] += len(new)
                self._store.feed(self._params, group, tokens, positions)

    def _decode(self, serving: Sequence[Conversation]) -> None:
        sampling = [c.request.sampling for c in serving]
        widest = max(len(s.stop_ids) for s in sampling)
        stop_ids = np.full((self._store.rows, -(-widest // 4) * 4), -1, np.int32)  # few widths, few programs
        for c in serving:
            stop_ids[c.row, : len(c.request.sampling.stop_ids)] = c.request.sampling.stop_ids
        self._store.cache, sampled = self._programs.decode(
            self._params,
            self._store.open(serving),
            self._key,
            *self._last_tokens(serving),
            self._per_row(serving, [c.left for c in serving], np.int32),
            stop_ids,
            np.int32(_quota(serving)),
        )
        ids, logprobs, counts = jax.device_get(sampled)
        for c in serving:
            n = counts[c.row]
            c.extend(ids[c.row, :n], logprobs[c.row, :n], self._version)
            self.counts["decode_tokens"] += int(n)

    def _decode_constrained(self, serving: Sequence[Conversation]) -> None:
        """Does what `_decode` does, for answers that must fit a schema."""
        quota = len(serving) - _quota(serving)
        for _ in range(TICK):
            going = [c for c in serving if not c.finish]
            if len(going) <= quota:
                return
            allowed = np.zeros((self._store.rows, -(-self._config.vocab_size // 32)), np.uint32)
            for c in going:
                self._answer_of(c).allow(allowed[c.row])
            self._store.cache, sampled = self._programs.decode_allowed(
                self._params,
                self._store.open(going),
                self._key,
                *self._last_tokens(going),
                self._per_row(going, [True] * len(going), bool),
                allowed,
            )
            ids, logprobs = jax.device_get(sampled)
            for c in going:
                c.extend(ids[c.row, None], logprobs[c.row, None], self._version)
                self.counts["decode_tokens"] += 1
                if c.finish != "stop":
                    self._answer_of(c).take(int(ids[c.row]))

    def _answer_of(self, c: Conversation) -> Any:
        """Returns the state of its answer to its schema."""
        if c.answer is None:
            sampling = c.request.sampling
            assert sampling.json_schema is not None
            c.answer = self._grammars.begin(sampling.json_schema, sampling.stop_ids)
        return c.answer

    def _last_tokens(self, serving: Sequence[Conversation]) -> tuple[np.ndarray, ...]:
        """Returns, for both programs, each row's last token, its position, its seed and its temperature."""
        per_row = functools.partial(self._per_row, serving)
        return (
            per_row([c.ids[-1] for c in serving], np.int32),
            per_row([len(c.ids) - 1 for c in serving], np.int32),
            per_row([c.request.seed for c in serving], np.uint32),
            per_row([c.request.sampling.temperature for c in serving], np.float32),
        )

    def _per_row(self, serving: Sequence[Conversation], values: Sequence[Any], dtype: Any) -> np.ndarray:
        array = np.zeros(self._store.rows, dtype)
        array[[c.row for c in serving]] = values
        return array

    def _answer(self, c: Conversation) -> Completion | None:
        """Returns its message, or None where it goes on."""
        if not c.finish:
            return None
        self._remember(c)
        c.answered = True
        return Completion(
            c.ids[len(c.request.ids) :],
            np.concatenate(c.logprobs),
            c.finish,
            np.concatenate(c.versions),
            c.answer.failure if c.answer and c.finish == "abort" else "",
            c.routing,
        )

    def _remember(self, c: Conversation) -> None:
        """Saves the experts of the tokens that were fed, if they are recorded."""
        if self._programs.records and c.cached:
            c.remember(self._store.experts(c))


def _quota(serving: Sequence[Conversation]) -> int:
    """Returns how many of them must stop for the tick to end."""
    return -(-sum(c.left > 0 for c in serving) // PART)


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    """Maps the path of each parameter to its shape."""
    return {jax.tree_util.keystr(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(params)}
