"""Bytes per device of rollouts in the learner's process: the engine's weights and its cache."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.distributed import sharding
from coevolve_jax.models import hf_io
from coevolve_jax.models.decoder import ModelConfig
from coevolve_jax.models.paged import PAGE
from coevolve_jax.planning.sizes import shard_bytes
from coevolve_jax.rollout.native.store import COLUMNS, ladder, least_tokens


def in_process(run: ConfigDict, model: ModelConfig, mesh: Any) -> tuple[int, int]:
    """Bytes of a device that the in-process engine takes: (weights, cache).

    The cache counts when it is full, or while it grows to that.
    """
    engine, params = run.engine, hf_io.abstract_params(model, jnp.dtype(run.engine.dtype))
    own = engine.dtype != run.learner.param_dtype or bool(run.rollout.max_staleness)
    sharded = engine.sharded and mesh.size > 1
    parts = engine_parts(run, mesh)
    whole = sum(math.prod(p.shape) for p in jax.tree.leaves(params)) * jnp.dtype(engine.dtype).itemsize
    weights = shard_bytes(mesh, params) if sharded else whole
    gathered = mesh.size > 1 and not sharded
    cache = cached_tokens(run, parts) // parts * token_bytes(run, model, mesh)
    if not engine.cache_tokens:  # while rows get more columns, the old cache is still there
        cache += cache * sum(ladder(COLUMNS, longest(run), 2)[-2:-1]) // longest(run)
    return weights if own or gathered else 0, cache


def token_bytes(run: ConfigDict, model: ModelConfig, mesh: Any) -> int:
    """Bytes of a device for a cached token: keys and values of its heads, and experts for replay."""
    heads = model.num_key_value_heads // (mesh.shape["tensor"] if run.engine.sharded else 1)
    keys = 2 * model.num_hidden_layers * heads * model.head_dim * jnp.dtype(run.engine.dtype).itemsize
    experts = 2 * len(model.sparse_layers) * model.num_experts_per_tok
    return keys + experts * bool(run.learner.replay_routing)


def longest(run: ConfigDict) -> int:
    """The most tokens that a conversation may have."""
    return run[longest_section(run)].max_length


def longest_section(run: ConfigDict) -> str:
    """The section whose max_length that is. The explorer's counts where it asks the policy."""
    sections = ("rollout", "evaluation", *(["explorer"] if configs.asks_policy(run) else []))
    return max(sections, key=lambda section: run[section].max_length)


def cached_tokens(run: ConfigDict, parts: int) -> int:
    """The most tokens that the cache has, in so many parts: pages, or rows of the longest conversation."""
    if tokens := run.engine.cache_tokens:
        return tokens // PAGE // parts * PAGE * parts
    return -(-run.engine.max_concurrency // parts) * parts * longest(run)


def engine_parts(run: ConfigDict, mesh: Any) -> int:
    """The number of parts of the devices that the in-process engine's cache is divided over."""
    return sharding.token_parts(mesh) if run.engine.sharded else 1


def too_few(run: ConfigDict, mesh: Any) -> int:
    """The fewest tokens that pages may have, where they have less: each part holds a conversation.

    0 where they have enough, or there are none.
    """
    tokens = run.engine.cache_tokens if run.engine.name == "native" else 0
    least = least_tokens(longest(run), engine_parts(run, mesh))
    return least if 0 < tokens < least else 0
