"""The in-process JAX engine: prefill, decode and a KV cache that is kept across turns.

Every conversation owns one row ("slot") of the cache. A call of `generate`
runs three kinds of programs, each compiled for a few fixed shapes:

  prefill   the prompts that are new, each distinct one once (K rollouts share it)
  extend    CHUNK tokens of those rows to which more than CHUNK tokens were added (long observations)
  decode    the tokens that are left, CHUNK at most, then sampling until every row has stopped
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coevolve_jax.models.qwen import Qwen, QwenConfig, init_cache
from coevolve_jax.rollout.engine import Completion, Request, check_request
from coevolve_jax.rollout.native import sample_token
from coevolve_jax.rollout.routing import init_recorded

CHUNK = 32  # tokens; most observations are shorter, and padding costs as much as tokens


def bucket(n: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending `sizes` that holds n."""
    return next(s for s in sizes if s >= n)


def ladder(low: int, high: int, factor: int) -> tuple[int, ...]:
    """low, factor * low, ... and high itself. Every size is a program to compile, so there are few."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= factor
    return (*sizes, high)


@functools.cache
class Programs:
    """The jitted programs; engines of equal settings share them, compiled.

    slots, max_length, max_new: as of the engine. record: the cache is a `routing.Recorded`, not a `KVCache`.
    """

    def __init__(
        self, config: QwenConfig, dtype: Any, slots: int, max_length: int, max_new: int, record: bool
    ):
        self._config, self._dtype, self._model = config, dtype, Qwen(config, dtype=dtype)
        self._slots, self._max_length, self._max_new = slots, max_length, max_new
        self._record = record
        self.prefill = jax.jit(self._prefill, donate_argnums=1)
        self.extend = jax.jit(self._extend, donate_argnums=1, static_argnames=("columns",))
        self.decode = jax.jit(self._decode, donate_argnums=1, static_argnames=("columns",))

    def empty(self, rows: int, columns: int) -> Any:
        """A cache of `columns` tokens for each of `rows` rows."""
        return (init_recorded if self._record else init_cache)(self._config, rows, columns, self._dtype)

    def _feed(self, params, tokens, positions, cache):
        """`Qwen.decode`, with any cache of `empty`."""
        decode = functools.partial(
            self._model.apply, {"params": params}, tokens, positions, method=Qwen.decode
        )
        if not self._record:
            return decode(cache)
        (hidden, kv), told = decode(cache.kv, mutable=["intermediates"])
        return hidden, cache.write(kv, positions, told["intermediates"]["routing"].experts)

    def _prefill(self, params, cache, tokens, positions, source, slots):
        """Computes the prompts' keys and values, and copies prompt source[i] into row slots[i]."""
        count, length = tokens.shape
        _, prompts = self._feed(params, tokens, positions, self.empty(count, length))
        return cache.put(slots, prompts.take(source))

    def _extend(self, params, cache, tokens, positions, slots, *, columns):
        """Computes the keys and values of `tokens` in the rows `slots`."""
        rows = cache.take(slots, columns)
        positions = jnp.minimum(positions, columns)  # padding lies beyond these columns too
        _, rows = self._feed(params, tokens, positions, rows)
        return cache.put(slots, rows)

    def _decode(
        self,
        params,
        cache,
        key,
        tokens,
        positions,
        slots,
        lengths,
        seeds,
        temperatures,
        budgets,
        stop_ids,
        *,
        columns,
    ):
        """Feeds `tokens` to the rows `slots`, then samples until each row stops or its budget is spent."""
        apply = functools.partial(self._model.apply, {"params": params})
        rows = cache.take(slots, columns)
        positions = jnp.minimum(positions, columns)
        hidden, rows = self._feed(params, tokens, positions, rows)
        fed = jnp.sum(positions < columns, axis=1)
        last = jnp.take_along_axis(hidden, jnp.maximum(fed - 1, 0)[:, None, None], axis=1)[:, 0]
        keys = jax.vmap(lambda seed: jax.random.fold_in(key, seed))(seeds)
        batch = tokens.shape[0]

        def sample(hidden, position):
            here = jax.vmap(jax.random.fold_in)(keys, position)
            return sample_token.sample(apply(hidden, method=Qwen.unembed), temperatures, here, budgets > 0)

        def append(carry, hidden):
            """Samples one token for each row that goes on."""
            step, done = carry["step"], carry["done"]
            token, logprob = sample(hidden, lengths + step)
            counts = carry["counts"] + ~done
            return {
                **carry,
                "step": step + 1,
                "token": token,
                "done": done | jnp.isin(token, stop_ids) | (counts >= budgets),
                "ids": carry["ids"].at[:, step].set(jnp.where(done, 0, token)),
                "logprobs": carry["logprobs"].at[:, step].set(jnp.where(done, 0.0, logprob)),
                "counts": counts,
            }

        def one_token(carry):
            place = jnp.where(carry["done"], columns, lengths + carry["step"] - 1)
            hidden, rows = self._feed(params, carry["token"][:, None], place[:, None], carry["rows"])
            return append({**carry, "rows": rows}, hidden[:, 0])

        start = {
            "step": jnp.zeros((), jnp.int32),
            "done": budgets == 0,
            "rows": rows,
            "ids": jnp.zeros((batch, self._max_new), jnp.int32),
            "logprobs": jnp.zeros((batch, self._max_new), jnp.float32),
            "counts": jnp.zeros(batch, jnp.int32),
        }
        final = jax.lax.while_loop(lambda carry: jnp.any(~carry["done"]), one_token, append(start, last))
        experts = (final["rows"].experts,) if self._record else ()
        return cache.put(slots, final["rows"]), (final["ids"], final["logprobs"], final["counts"], *experts)


class NativeEngine:
    """Samples from Qwen on this process's devices.

    Args:
      model_config: the architecture.
      params: the first weights; `update_weights` brings later ones.
      slots: conversations that keep a cache at once; more than that are served in turn.
      max_length: tokens per conversation, prompt included.
      max_new_tokens: the largest request.sampling.max_new_tokens.
      seed: of all sampling noise, together with each request's own seed.
      copies: keep a copy of the weights, for a learner that donates them while this engine generates.
      record_routing: completions tell which experts were used; the model must have some.
    """

    batches = True

    def __init__(
        self,
        model_config: QwenConfig,
        params: Any,
        *,
        slots: int,
        max_length: int,
        max_new_tokens: int,
        seed: int,
        dtype: Any = jnp.float32,
        copies: bool = False,
        record_routing: bool = False,
    ):
        self._config = model_config
        self._slots, self._max_length, self._max_new = slots, max_length, max_new_tokens
        self._dtype, self._copies = dtype, copies
        self._key = jax.random.key(seed)
        self._row_sizes = ladder(16, slots, 4)
        self._column_sizes = ladder(256, max_length, 2)
        self._programs = Programs(model_config, dtype, slots, max_length, max_new_tokens, record_routing)
        self._lock = threading.Lock()  # held by whoever uses the cache: a batch is never cut in two
        self.update_weights(params, 0)

    def update_weights(self, params: Any, version: int) -> None:
        with self._lock:
            self._params = jax.tree.map(jnp.copy, params) if self._copies else params
            self._version = version
            self._cache = None
            self._held: dict[int, tuple[int, np.ndarray]] = {}  # session -> slot, ids whose keys are cached
            self._free = list(range(self._slots))

    def release(self, sessions: Sequence[int]) -> None:
        with self._lock:
            self._release(sessions)

    def _release(self, sessions: Sequence[int]) -> None:
        for session in sessions:
            if session in self._held:
                self._free.append(self._held.pop(session)[0])

    def close(self) -> None:
        with self._lock:
            self._cache = None

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """As of `Engine`; in a thread of its own. What is cancelled runs on there, and its result is dropped."""
        for r in requests:
            check_request(r, self._config.vocab_size, self._max_length, self._max_new)
        return await asyncio.to_thread(self._generate, requests)

    def _generate(self, requests: Sequence[Request]) -> list[Completion]:
        completions: list[Completion] = []
        with self._lock:
            for start in range(0, len(requests), self._slots):
                completions += self._generate_wave(requests[start : start + self._slots])
        return completions

    # Slots: which rows of the cache hold which conversation.

    def _generate_wave(self, requests: Sequence[Request]) -> list[Completion]:
        if self._cache is None:
            self._cache = self._programs.empty(self._slots, self._max_length)
        self._admit(requests)
        self._catch_up(requests)
        rows = bucket(len(requests), self._row_sizes)
        limit = max(len(r.ids) + r.sampling.max_new_tokens for r in requests)
        stop_ids = requests[0].sampling.stop_ids
        per_row = lambda values, fill, dtype: np.asarray([*values, *[fill] * (rows - len(requests))], dtype)
        self._cache, sampled = self._programs.decode(
            self._params,
            self._cache,
            self._key,
            *self._chunk(requests, rows),
            per_row([len(r.ids) for r in requests], self._max_length, np.int32),
            per_row([r.seed for r in requests], 0, np.uint32),
            per_row([r.sampling.temperature for r in requests], 0.0, np.float32),
            per_row([r.sampling.max_new_tokens for r in requests], 0, np.int32),
            np.asarray(stop_ids, np.int32),
            columns=bucket(limit, self._column_sizes),
        )
        completions = []
        for r, ids, logprobs, count, *experts in zip(requests, *jax.device_get(sampled)):
            ids = ids[:count]
            fed = len(r.ids) + len(ids) - 1
            # The last sampled token has been returned but not fed: its keys are not cached yet.
            self._held[r.session] = (self._held[r.session][0], np.concatenate([r.ids, ids[:-1]]))
            finish = "stop" if len(ids) and ids[-1] in stop_ids else "length"
            versions = np.full(count, self._version, np.int32)
            routing = experts[0][:, :fed].swapaxes(0, 1) if experts else None
            completions.append(Completion(ids, logprobs[:count], finish, versions, routing=routing))
        return completions

    def _catch_up(self, requests: Sequence[Request]) -> None:
        """Feeds, to those that lack more, all but the last CHUNK tokens at most."""
        while True:
            behind = [r for r in requests if len(r.ids) - len(self._held[r.session][1]) > CHUNK]
            if not behind:
                return
            columns = bucket(max(len(r.ids) for r in behind), self._column_sizes)
            chunk = self._chunk(behind, bucket(len(behind), self._row_sizes))
            self._cache = self._programs.extend(self._params, self._cache, *chunk, columns=columns)
            for r in behind:
                slot, cached = self._held[r.session]
                self._held[r.session] = (slot, r.ids[: len(cached) + CHUNK])

    def _chunk(self, requests: Sequence[Request], rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The next CHUNK tokens of each request: tokens and positions [rows, CHUNK], slots [rows]."""
        tokens = np.zeros((rows, CHUNK), np.int32)
        positions = np.full((rows, CHUNK), self._max_length, np.int32)  # beyond the cache: ignored
        slots = np.full(rows, self._slots, np.int32)  # no such row: ignored
        for i, r in enumerate(requests):
            slots[i], cached = self._held[r.session]
            new = r.ids[len(cached) : len(cached) + CHUNK]
            tokens[i, : len(new)] = new
            positions[i, : len(new)] = np.arange(len(cached), len(cached) + len(new))
        return tokens, positions, slots

    def _admit(self, requests: Sequence[Request]) -> None:
        """Gives every request a slot whose cache holds a prefix of its ids, all but the last at most."""
        new = []
        for r in requests:
            held = self._held.get(r.session)
            if held is None:
                new.append(r)
                continue
            slot, cached = held
            if len(cached) >= len(r.ids) or not np.array_equal(cached, r.ids[: len(cached)]):
                common = np.flatnonzero(cached[: len(r.ids) - 1] != r.ids[:-1][: len(cached)])
                keep = common[0] if len(common) else min(len(cached), len(r.ids) - 1)
                self._held[r.session] = (slot, cached[:keep])
        if not new:
            return
        serving = {r.session for r in requests}
        for session in list(self._held):  # oldest first
            if len(self._free) >= len(new):
                break
            if session not in serving:
                self._release([session])
        prompts = {r.ids.tobytes(): r.ids for r in new}
        source = {key: i for i, key in enumerate(prompts)}
        slots = [self._free.pop(0) for _ in new]
        count = bucket(len(prompts), self._row_sizes)
        length = bucket(max(len(ids) for ids in prompts.values()), self._column_sizes)
        tokens = np.zeros((count, length), np.int32)
        positions = np.full((count, length), length, np.int32)
        for i, ids in enumerate(prompts.values()):
            tokens[i, : len(ids)] = ids
            positions[i, : len(ids)] = np.arange(len(ids))
        pad = [0] * (self._slots - len(new))
        self._cache = self._programs.prefill(
            self._params,
            self._cache,
            tokens,
            positions,
            np.asarray([*(source[r.ids.tobytes()] for r in new), *pad], np.int32),
            np.asarray([*slots, *[self._slots for _ in pad]], np.int32),
        )
        for r, slot in zip(new, slots, strict=True):
            self._held[r.session] = (slot, r.ids[:-1])
