"""Bytes per device of the parts of an update: exact for shards, arithmetic for what a program works with."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from coevolve_jax.distributed import sharding
from coevolve_jax.models import expert_all_to_all
from coevolve_jax.models.decoder import ModelConfig


def shard_bytes(mesh: Any, tree: Any) -> int:
    """Bytes that each device holds of a tree of parameters or of optimiser state."""
    shardings = sharding.param_shardings(mesh, tree)
    size = lambda x, s: math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize
    return sum(jax.tree.leaves(jax.tree.map(size, tree, shardings)))


def in_flight(mesh: Any, params: Any, learner: ConfigDict) -> int:
    """Bytes of two moments, old and new, of one layer or of all that is in no layer."""
    size = lambda tree: shard_bytes(
        mesh, jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.dtype(learner.moment_dtype)), tree)
    )
    layers = jax.tree.leaves(params["layers"])[0].shape[0]
    others = {name: leaf for name, leaf in params.items() if name != "layers"}
    return 2 * 2 * max(size(others), size({"layers": params["layers"]}) // layers)


def gathered(layers: Any, learner: ConfigDict, mesh: Any) -> int:
    """Bytes of gathered layers in the compute type.

    They are the layer at work, the next one on its way, and the gradient before it is scattered.
    """
    tensor, expert = mesh.shape["tensor"], mesh.shape["expert"]
    # Experts stay on their devices.
    whole = lambda p: math.prod(p.shape[1:]) // (tensor * (expert if p.ndim == 4 else 1))
    layer = sum(whole(p) for p in jax.tree.leaves(layers))
    copies = 3 if math.prod(mesh.shape[axis] for axis in sharding.MATRICES) > 1 else 1
    return copies * layer * jnp.dtype(learner.dtype).itemsize


def whole_rows(c: ModelConfig, learner: ConfigDict, mesh: Any, tokens: int) -> int:
    """Bytes of gathered keys and values, and their gradients, of rows that are split over devices."""
    if sharding.context_parts(mesh) == 1:
        return 0
    width = c.num_key_value_heads * c.head_dim // mesh.shape["tensor"]
    return 4 * width * tokens * jnp.dtype(learner.dtype).itemsize


def activations(c: ModelConfig, learner: ConfigDict, mesh: Any, tokens: int) -> tuple[int, int]:
    """Bytes that all layers keep from the forward to the backward pass, and bytes that one layer's takes."""
    tensor = mesh.shape["tensor"]
    stream = c.hidden_size
    heads = c.num_attention_heads * c.head_dim // tensor
    kv_heads = c.num_key_value_heads * c.head_dim // tensor
    size, exchanged = tokens * jnp.dtype(learner.dtype).itemsize, 0
    if c.sparse_layers:  # a copy of every token per expert that it goes to, before and after
        chosen = c.num_experts_per_tok
        hidden, copies = chosen * c.moe_intermediate_size // tensor, 2 * chosen * stream
        if mesh.shape["expert"] > 1:  # only the rounds of the exchange hold these, one round at a time
            exchanged = _exchanged(c, learner, mesh, tokens * chosen)
            hidden, copies = 0, 0
    else:
        hidden, copies = c.intermediate_size // tensor, 0
    # Layer input, both norms' outputs and the stream between; queries, keys and values before and after the
    # rotation, and the heads' output; gate, up and their product.
    kept = 4 * stream + 3 * heads + 3 * kv_heads + 3 * hidden + copies
    # The gradients of the MLP's three hidden arrays and of the stream, which norms take in float32.
    work = 3 * hidden + copies + 4 * stream
    if learner.remat:  # only a layer's input is kept; the backward pass computes the rest again
        return size * c.num_hidden_layers * stream, size * (kept + work) + exchanged
    return size * c.num_hidden_layers * kept, size * work + exchanged


def _exchanged(c: ModelConfig, learner: ConfigDict, mesh: Any, pairs: int) -> int:
    """Bytes of one round of an exchange in the backward pass.

    In the compute type: tokens and gradients, sent and received, and an expert's three hidden arrays with
    their gradients. In float32: the sums over tokens and over a device's experts.
    """
    devices, tensor = mesh.shape["expert"], mesh.shape["tensor"]
    hidden = c.moe_intermediate_size // tensor
    one_round = expert_all_to_all.room(pairs, devices) * (2 * 3 * hidden + 4 * c.hidden_size)
    experts = c.num_experts // devices * 3 * c.hidden_size * hidden
    sums = pairs // c.num_experts_per_tok * c.hidden_size + experts
    return one_round * jnp.dtype(learner.dtype).itemsize + 4 * sums


def logprobs(c: ModelConfig, learner: ConfigDict, mesh: Any, tokens: int) -> int:
    """Bytes of the log-probabilities.

    These are logits, logits below their peak and their exponentials, in float32; the unembedding and its
    gradient.
    """
    tensor, shards = mesh.shape["tensor"], mesh.size // mesh.shape["tensor"]
    chunk = min(-(-learner.logprob_chunk // shards), tokens)
    table = c.vocab_size * c.hidden_size // tensor
    gathered = jnp.dtype(learner.dtype).itemsize + 4
    return 3 * chunk * (c.vocab_size // tensor) * 4 + table * gathered
