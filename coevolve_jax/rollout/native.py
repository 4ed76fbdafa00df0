"""The in-process JAX engine: prefill, decode and a KV cache that is kept across turns.

Every conversation owns one row ("slot") of the cache. A call of `generate`
runs at most three kinds of programs, each compiled for a few fixed shapes:

  prefill   the prompts that are new, each distinct one once (K rollouts share it)
  decode    per row: feed what came since (an observation), then sample until every row has stopped
"""
from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coevolve_jax.models.qwen import Qwen, QwenConfig, init_cache
from coevolve_jax.rollout.engine import Completion, Request


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


class NativeEngine:
    """Samples from Qwen on this process's devices.

    Args:
      model_config: the architecture.
      params: the first weights; `update_weights` brings later ones.
      slots: conversations that keep a cache at once; more than that are served in turn.
      max_length: tokens per conversation, prompt included.
      max_new_tokens: the largest request.sampling.max_new_tokens.
      seed: of all sampling noise, together with each request's own seed.
    """

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
    ):
        self._config = model_config
        self._model = Qwen(model_config, dtype=dtype)
        self._slots, self._max_length, self._max_new = slots, max_length, max_new_tokens
        self._dtype = dtype
        self._key = jax.random.key(seed)
        self._row_sizes = ladder(16, slots, 4)
        self._feed_sizes = ladder(16, max_length, 4)
        self._column_sizes = ladder(256, max_length, 2)
        self._prefill = jax.jit(self._prefill_step, donate_argnums=1)
        self._decode = jax.jit(self._decode_step, donate_argnums=1, static_argnames=("columns",))
        self.update_weights(params, 0)

    def update_weights(self, params: Any, version: int) -> None:
        self._params, self._version = params, version
        self._cache = None
        self._held: dict[int, tuple[int, np.ndarray]] = {}  # session -> slot, ids whose keys are cached
        self._free = list(range(self._slots))

    def release(self, sessions: Sequence[int]) -> None:
        for session in sessions:
            if session in self._held:
                self._free.append(self._held.pop(session)[0])

    def close(self) -> None:
        self._cache = None

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in order.

        Raises:
          ValueError: an id outside the vocabulary, an empty prompt, or one that leaves no room for
            its max_new_tokens in max_length; nothing has been computed then.
        """
        for r in requests:
            self._check(r)
        completions: list[Completion] = []
        for start in range(0, len(requests), self._slots):
            completions += self._generate_wave(requests[start : start + self._slots])
        return completions

    def _check(self, r: Request) -> None:
        if len(r.ids) == 0:
            raise ValueError(f"Request of session {r.session} has no tokens: send at least one.")
        if r.ids.min() < 0 or r.ids.max() >= self._config.vocab_size:
            raise ValueError(
                f"Request of session {r.session} has token id {r.ids.max()}, but the model's vocabulary has "
                f"{self._config.vocab_size}: the tokenizer does not belong to this model."
            )
        if r.sampling.max_new_tokens > self._max_new or len(r.ids) + r.sampling.max_new_tokens > self._max_length:
            raise ValueError(
                f"Request of session {r.session}: {len(r.ids)} tokens plus max_new_tokens "
                f"{r.sampling.max_new_tokens} exceed the engine's max_length {self._max_length} "
                f"(and max_new_tokens {self._max_new}): shorten the prompt or raise them in the config."
            )

    # Slots: which rows of the cache hold which conversation.

    def _generate_wave(self, requests: Sequence[Request]) -> list[Completion]:
        if self._cache is None:
            self._cache = init_cache(self._config, self._slots, self._max_length, self._dtype)
        self._admit(requests)
        held = [self._held[r.session] for r in requests]
        fresh = [r.ids[len(cached) :] for r, (_, cached) in zip(requests, held, strict=True)]
        limit = max(len(r.ids) + r.sampling.max_new_tokens for r in requests)
        rows = bucket(len(requests), self._row_sizes)
        feed = bucket(max(map(len, fresh)), self._feed_sizes)
        tokens = np.zeros((rows, feed), np.int32)
        positions = np.full((rows, feed), self._max_length, np.int32)  # beyond the cache: ignored
        for i, (r, new) in enumerate(zip(requests, fresh, strict=True)):
            tokens[i, : len(new)] = new
            positions[i, : len(new)] = np.arange(len(r.ids) - len(new), len(r.ids))
        column = lambda values, fill, dtype=np.int32: np.asarray(
            [*values, *[fill] * (rows - len(requests))], dtype
        )
        stop_ids = requests[0].sampling.stop_ids
        self._cache, (ids, logprobs, counts) = self._decode(
            self._params,
            self._cache,
            self._key,
            tokens,
            positions,
            column([slot for slot, _ in held], self._slots),
            column([len(r.ids) for r in requests], self._max_length),
            column([r.seed for r in requests], 0, np.uint32),
            column([r.sampling.temperature for r in requests], 0.0, np.float32),
            column([r.sampling.max_new_tokens for r in requests], 0),
            np.asarray(stop_ids, np.int32),
            columns=bucket(limit, self._column_sizes),
        )
        ids, logprobs, counts = jax.device_get((ids, logprobs, counts))
        completions = []
        for i, r in enumerate(requests):
            sampled = ids[i, : counts[i]]
            # The last sampled token has been returned but not fed: its keys are not cached yet.
            self._held[r.session] = (held[i][0], np.concatenate([r.ids, sampled[:-1]]))
            finish = "stop" if len(sampled) and sampled[-1] in stop_ids else "length"
            versions = np.full(len(sampled), self._version, np.int32)
            completions.append(Completion(sampled, logprobs[i, : counts[i]], finish, versions))
        return completions

    def _admit(self, requests: Sequence[Request]) -> None:
        """Gives every request a slot whose cache holds a prefix of its ids, all but the last at most."""
        new = []
        for r in requests:
            slot, cached = self._held.get(r.session, (None, None))
            if slot is None:
                new.append(r)
            elif len(cached) >= len(r.ids) or not np.array_equal(cached, r.ids[: len(cached)]):
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
                self.release([session])
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
        self._cache = self._prefill(
            self._params,
            self._cache,
            tokens,
            positions,
            np.asarray([*(source[r.ids.tobytes()] for r in new), *pad], np.int32),
            np.asarray([*slots, *[self._slots for _ in pad]], np.int32),
        )
        for r, slot in zip(new, slots, strict=True):
            self._held[r.session] = (slot, r.ids[:-1])

    # The jitted programs.

    def _prefill_step(self, params, cache, tokens, positions, source, slots):
        """Computes the prompts' keys and values, and copies prompt source[i] into row slots[i]."""
        count, length = tokens.shape
        prompts = init_cache(self._config, count, length, self._dtype)
        _, prompts = self._model.apply({"params": params}, tokens, positions, prompts, method=Qwen.decode)
        return cache.put(slots, prompts.take(source))

    def _decode_step(
        self, params, cache, key, tokens, positions, slots, lengths, seeds, temperatures, budgets, stop_ids, *, columns
    ):
        """Feeds `tokens` to the rows `slots`, then samples until each row stops or its budget is spent."""
        apply = functools.partial(self._model.apply, {"params": params})
        positions = jnp.where(positions < self._max_length, positions, columns)
        rows = cache.take(slots, columns)
        hidden, rows = apply(tokens, positions, rows, method=Qwen.decode)
        fed = jnp.sum(positions < columns, axis=1)
        last = jnp.take_along_axis(hidden, jnp.maximum(fed - 1, 0)[:, None, None], axis=1)[:, 0]
        keys = jax.vmap(lambda seed: jax.random.fold_in(key, seed))(seeds)
        batch = tokens.shape[0]

        def sample(hidden, position):
            logits = apply(hidden, method=Qwen.unembed)
            greedy = temperatures == 0
            logprobs = jax.nn.log_softmax(logits / jnp.where(greedy, 1.0, temperatures)[:, None])
            noise = jax.vmap(lambda k, p: jax.random.gumbel(jax.random.fold_in(k, p), logprobs.shape[1:]))(
                keys, position
            )
            token = jnp.argmax(logprobs + jnp.where(greedy[:, None], 0.0, noise), axis=-1).astype(jnp.int32)
            return token, jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]

        def unfinished(carry):
            return jnp.any(~carry["done"])

        def one_token(carry):
            step, done = carry["step"], carry["done"]
            token, logprob = sample(carry["hidden"], lengths + step)
            ids = carry["ids"].at[:, step].set(jnp.where(done, 0, token))
            logprobs = carry["logprobs"].at[:, step].set(jnp.where(done, 0.0, logprob))
            counts = carry["counts"] + ~done
            done = done | jnp.isin(token, stop_ids) | (counts >= budgets)
            place = jnp.where(done, columns, lengths + step)
            hidden, rows = apply(token[:, None], place[:, None], carry["rows"], method=Qwen.decode)
            return {
                "step": step + 1,
                "done": done,
                "hidden": hidden[:, 0],
                "rows": rows,
                "ids": ids,
                "logprobs": logprobs,
                "counts": counts,
            }

        final = jax.lax.while_loop(
            unfinished,
            one_token,
            {
                "step": jnp.zeros((), jnp.int32),
                "done": budgets == 0,
                "hidden": last,
                "rows": rows,
                "ids": jnp.zeros((batch, self._max_new), jnp.int32),
                "logprobs": jnp.zeros((batch, self._max_new), jnp.float32),
                "counts": jnp.zeros(batch, jnp.int32),
            },
        )
        return cache.put(slots, final["rows"]), (final["ids"], final["logprobs"], final["counts"])
