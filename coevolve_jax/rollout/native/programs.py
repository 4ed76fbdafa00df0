"""The in-process engine's jitted programs, on a cache of rows (one per conversation) or of pages."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from coevolve_jax.distributed import sharding
from coevolve_jax.models.cache import init_cache
from coevolve_jax.models.decoder import Decoder, ModelConfig, in_float32, unstack
from coevolve_jax.models.paged import init_pages
from coevolve_jax.rollout.native import rows as cache_rows
from coevolve_jax.rollout.native import sample_token
from coevolve_jax.rollout.routing import init_recorded

TICK = 16  # the most tokens of a row in one call of `decode`


@functools.cache
class Programs:
    """The compiled programs. Engines of equal settings share them.

    record: the cache is a `routing.Recorded` instead of a `KVCache`. mesh: holds parameters and caches.
    matmul_dtype: as for `Decoder`.

    B: rows of the cache; S: its columns; R: rows that are fed or copied at once. Caches are donated.
    `feed_pages`, `decode` and `decode_allowed` also take a `PagedCache`, whose table names the rows' pages.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: Any,
        record: bool,
        mesh: Mesh | None = None,
        matmul_dtype: Any = None,
    ):
        self._config, self._dtype, self.records, self._mesh = config, dtype, record, mesh
        self._matmul_dtype = matmul_dtype
        self.platform = sharding.platform(mesh) if mesh else jax.default_backend()
        self._model = Decoder(
            config, dtype=dtype, mesh=mesh, platform=self.platform, matmul_dtype=matmul_dtype
        )
        on_cpu = mesh is None and self.platform == "cpu"
        self._parts = _parts(config.num_key_value_heads) if on_cpu else 1
        self._take = functools.partial(cache_rows.take, mesh=mesh)
        self._put = functools.partial(cache_rows.put, mesh=mesh)
        self._placed = functools.partial(cache_rows.place, mesh=mesh)
        self._told = functools.partial(sharding.place_everywhere, mesh)  # replicates what the host reads
        self.cast = jax.jit(self.computed)
        # XLA's CPU backend copies each slice of a stack. Unstacking once saves that copy in every call.
        self.unstack = jax.jit(self._unstack) if on_cpu else lambda params: params
        self.key = jax.jit(lambda seed: self._told(jax.random.key(seed)), static_argnums=0)
        self.experts = jax.jit(lambda cache, where: self._told(cache.experts[where]))  # a row, or pages
        self.fit = jax.jit(self._fit, static_argnums=2)
        # Jitted, so that each device makes its own part and none holds the whole cache.
        self._empty_on_mesh = jax.jit(self._empty, static_argnums=(0, 1))
        self.copy = jax.jit(self._copy, donate_argnums=0)
        self.feed = jax.jit(self._feed, donate_argnums=1)
        self.empty_pages = jax.jit(self._empty_pages, static_argnums=0)
        self.feed_pages = jax.jit(self._feed_pages, donate_argnums=1)
        self.decode = jax.jit(self._decode, donate_argnums=1)
        self.decode_allowed = jax.jit(self._decode_allowed, donate_argnums=1)

    def empty(self, rows: int, columns: int) -> Any:
        """Returns an empty cache of `rows` rows with `columns` tokens each."""
        return (self._empty_on_mesh if self._mesh else self._empty)(rows, columns)

    def _empty(self, rows, columns):
        cache = init_cache(self._config, rows, columns, self._dtype, self.platform, self._parts)
        return self._placed(init_recorded(self._config, cache) if self.records else cache)

    def _empty_pages(self, pages):
        """Returns an empty cache of `pages` pages, counted over all devices."""
        cache = init_pages(self._config, pages, self._dtype)
        return self._placed(init_recorded(self._config, cache) if self.records else cache)

    def computed(self, params: Any) -> Any:
        """Casts the parameters to the dtype that they are used in."""

        def one(path, x):
            if in_float32(path):
                return x.astype(jnp.float32)
            *above, _, name = (key.key for key in path)
            operand = name == "kernel" and "experts" not in above
            return x.astype(self._matmul_dtype if operand and self._matmul_dtype else self._dtype)

        return jax.tree_util.tree_map_with_path(one, params)

    def _unstack(self, params):
        """Returns the parameters with one array per layer. All programs accept both forms."""
        return unstack(params, self._config)

    def _fit(self, cache, rows, columns):
        """Returns a cache of these rows [B] (row B is empty) with this many columns."""
        return self._placed(self._take(cache, rows).resize(columns))

    def _apply(self, params, tokens, positions, cache):
        """Applies `Decoder.decode` with any kind of cache."""
        decode = functools.partial(
            self._model.apply, {"params": params}, tokens, positions, method=Decoder.decode
        )
        if not self.records:
            return decode(cache)
        (hidden, kv), told = decode(cache.kv, mutable=["intermediates"])
        return hidden, cache.write(kv, positions, told["intermediates"]["routing"].experts, self._mesh)

    def _copy(self, cache, sources, targets):
        """Copies row sources[i] to row targets[i]. Both: int32 [R]; row B does not exist and is ignored."""
        return self._put(cache, targets, self._take(cache, sources))

    def _feed(self, params, cache, tokens, positions, rows):
        """Computes the keys and values of `tokens` [R, T] in `rows` [R].

        Padding tokens have position S; padding rows are row B.
        """
        _, part = self._apply(params, tokens, positions, self._take(cache, rows))
        return self._put(cache, rows, part)

    def _feed_pages(self, params, cache, tokens, positions):
        """Does what `_feed` does, in the rows [R] of the cache's table. Padding has position S."""
        return self._placed(self._apply(params, tokens, positions, cache)[1])

    def _decode(self, params, cache, key, tokens, positions, seeds, temperatures, budgets, stop_ids, quota):
        """Samples tokens one by one in each row, until `quota` rows have stopped or there are TICK tokens.

        tokens, positions: int32 [B], each row's last token and its position; it is not in the cache yet.
        seeds: uint32 [B]. temperatures: float32 [B].
        budgets: int32 [B], tokens that the row may still get; 0 for rows that want none.
        stop_ids: int32 [B, N]; -1 is padding. quota: int32 [].

        Returns (cache, (ids int32 [B, TICK], log-probabilities float32 [B, TICK], token counts int32 [B])).
        """
        keys = jax.vmap(lambda seed: jax.random.fold_in(key, seed))(seeds)
        batch, wanted = len(tokens), budgets > 0
        if self.platform != "tpu":  # on TPUs products read the stack itself
            params = self._unstack(params)  # here, not in the loop for each token
        # Draw all numbers at once: inside the loop this would be a hundred tiny operations per token.
        numbers = jax.vmap(lambda step: self._draw(keys, positions + step))(jnp.arange(TICK))

        def goes_on(carry):
            stopped = jnp.sum(carry["done"] & wanted)
            return (carry["step"] < TICK) & (stopped < quota)

        def one_token(carry):
            step, done = carry["step"], carry["done"]
            cache, token, logprob = self._next(
                params, carry["cache"], carry["token"], positions + step, done, numbers[step], temperatures
            )
            stops = jnp.any(token[:, None] == stop_ids, axis=1) | (step + 1 >= budgets)
            return {
                "step": step + 1,
                "token": token,
                "done": done | stops,
                "counts": carry["counts"] + ~done,
                "ids": carry["ids"].at[:, step].set(token),
                "logprobs": carry["logprobs"].at[:, step].set(logprob),
                "cache": cache,
            }

        start = {
            "step": jnp.zeros((), jnp.int32),
            "token": tokens,
            "done": ~wanted,
            "counts": jnp.zeros(batch, jnp.int32),
            "ids": jnp.zeros((batch, TICK), jnp.int32),
            "logprobs": jnp.zeros((batch, TICK), jnp.float32),
            "cache": cache,
        }
        final = jax.lax.while_loop(goes_on, one_token, start)
        return final["cache"], self._told((final["ids"], final["logprobs"], final["counts"]))

    def _decode_allowed(self, params, cache, key, tokens, positions, seeds, temperatures, wanted, allowed):
        """Samples one allowed token for each row. The arguments are those of `_decode`, except these:

        wanted: bool [B]; the results of other rows mean nothing. allowed: uint32 [B, ceil(V / 32)], a bit for
        each token of the vocabulary, the lowest first.

        Returns (cache, (ids int32 [B], log-probabilities float32 [B])); the latter among the allowed tokens.
        """
        keys = jax.vmap(lambda seed: jax.random.fold_in(key, seed))(seeds)
        numbers = self._draw(keys, positions)
        cache, *sampled = self._next(
            params, cache, tokens, positions, ~wanted, numbers, temperatures, allowed
        )
        return cache, self._told(sampled)

    def _draw(self, keys, positions):
        """Returns the random numbers for the tokens that follow `positions` [B]."""
        return sample_token.draw(jax.vmap(jax.random.fold_in)(keys, positions + 1), self._config.vocab_size)

    def _next(self, params, cache, tokens, positions, done, numbers, temperatures, allowed=None):
        """Feeds each row's last token, and samples the next one where the row is not done."""
        place = jnp.where(done, cache.columns, positions)  # done rows write beyond the cache: ignored
        hidden, cache = self._apply(params, tokens[:, None], place[:, None], cache)
        logits = self._model.apply({"params": params}, hidden[:, 0], method=Decoder.unembed)
        for kind in ("vocabulary", "rows"):
            logits = sharding.place_decoded(self._mesh, kind, logits)
        if allowed is not None:
            bits = (allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
            logits = jnp.where(bits.reshape(len(logits), -1)[:, : logits.shape[1]], logits, -jnp.inf)
        token, logprob = sample_token.sample(logits, temperatures, numbers, ~done)
        return self._placed(cache), token, logprob


def _parts(heads: int) -> int:
    """Returns the number of arrays for a layer's heads on a CPU, which computes a small product on one core.

    It is the largest divisor of the heads up to the number of XLA's cores. No sampled number depends on it.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(cores, int(os.environ.get("NPROC") or cores))  # XLA reads NPROC too
    return max(n for n in range(1, threads + 1) if heads % n == 0)
