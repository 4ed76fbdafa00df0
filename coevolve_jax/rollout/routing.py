"""Records the experts that the sampler used for each token, so that the update can use them too.

This is rollout routing replay (arXiv 2510.11370).

A: sparse layers; B: rows; K: experts per token; S: cache columns; T: new tokens of a row; N: pages.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from coevolve_jax.models.cache import KVCache, resize_axis
from coevolve_jax.models.config import ModelConfig
from coevolve_jax.models.paged import PagedCache


class Recorded(NamedTuple):
    """A KV cache that also records the experts of each of its tokens, in the layout of the values.

    experts: int16 [B, A, S, K] in rows, [N, A, PAGE, K] in pages. Entries without a token mean nothing.
    `take`, `put` and `resize` are for rows, `with_table` is for pages.
    """

    kv: Any
    experts: jax.Array

    @property
    def columns(self) -> int:
        return self.kv.columns

    def take(self, rows: jax.Array) -> Recorded:
        """Does what `KVCache.take` does."""
        return Recorded(self.kv.take(rows), self.experts.at[rows].get(mode="fill", fill_value=-1))

    def put(self, rows: jax.Array, part: Recorded) -> Recorded:
        """Does what `KVCache.put` does."""
        return Recorded(self.kv.put(rows, part.kv), self.experts.at[rows].set(part.experts, mode="drop"))

    def resize(self, columns: int) -> Recorded:
        """Does what `KVCache.resize` does."""
        return Recorded(self.kv.resize(columns), resize_axis(self.experts, 2, columns))

    def with_table(self, table: Any) -> Recorded:
        """Does what `PagedCache.with_table` does."""
        return Recorded(self.kv.with_table(table), self.experts)

    def write(self, kv: Any, positions: jax.Array, experts: jax.Array, mesh: Mesh | None) -> Recorded:
        """Returns the cache after T more tokens of each row, at `positions` [B, T].

        kv: the cache that already holds their keys and values. experts: int32 [A, B, T, K].
        """
        return Recorded(kv, kv.write(self.experts, experts.transpose(1, 2, 0, 3), positions, mesh))


def init_recorded(config: ModelConfig, cache: KVCache | PagedCache) -> Recorded:
    """Returns an empty cache of a model with experts. cache: its keys and values."""
    places, each = cache.places
    shape = (places, len(config.sparse_layers), each, config.num_experts_per_tok)
    return Recorded(cache, jnp.full(shape, -1, jnp.int16))


def read_routing(text: Any, config: ModelConfig, tokens: int) -> np.ndarray:
    """Reads the routing in an answer of an SGLang server (0.5.23, --enable-return-routed-experts).

    SGLang counts all layers; its entries for dense ones mean nothing.

    Args:
      text: meta_info["routed_experts"] of the answer to a request with return_routed_experts: base64 of int32
        [tokens, all layers, K].
      config: the policy's architecture.
      tokens: the number of tokens fed to the server: the request's and all but the last sampled.

    Returns:
      int16 [tokens, A, K], of the sparse layers alone.

    Raises:
      ValueError: the text is not base64, or not the routing of such a model.
    """
    if not isinstance(text, str):
        raise ValueError("the server returned no routing: start it with --enable-return-routed-experts")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("the routing that the server returned is no base64 text") from None
    layers, top_k = config.num_hidden_layers, config.num_experts_per_tok
    if len(data) != 4 * tokens * layers * top_k:
        raise ValueError(
            f"the routing that the server returned has {len(data)} bytes, and {tokens} tokens of "
            f"{layers} layers and {top_k} experts have {4 * tokens * layers * top_k}"
        )
    routing = np.frombuffer(data, "<i4").reshape(tokens, layers, top_k)[:, list(config.sparse_layers)]
    if routing.size and not (0 <= routing.min() and routing.max() < config.num_experts):
        raise ValueError(
            f"the routing that the server returned names expert {routing.min()} or {routing.max()}, "
            f"and the model has experts 0 to {config.num_experts - 1}"
        )
    ordered = np.sort(routing, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():  # a token that was not recorded has only zeros
        raise ValueError("the routing that the server returned names an expert twice for one token")
    return routing.astype(np.int16)
