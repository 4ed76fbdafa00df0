"""Decoders of the Llama and Qwen families as Flax linen modules: Llama, Qwen2 and 2.5, Qwen3, Qwen3-MoE.

Modules carry the names of the Hugging Face checkpoint (self_attn, q_proj, ...), so `hf_io` maps one to the
other by rule. The layers are scanned: each parameter is stacked on a leading axis, over the layers that have
it. A model that mixes dense and sparse layers stacks mlp/gate and mlp/experts over the sparse ones. It stacks
the rest of mlp over the dense ones, and all else over all layers.

B: rows; L: tokens of a row; T: new tokens of a row; S: cache columns; D: hidden size; V: vocabulary;
A: sparse layers; K: experts per token.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from coevolve_jax.distributed import sharding
from coevolve_jax.models import products
from coevolve_jax.models.attention import attention
from coevolve_jax.models.config import ModelConfig
from coevolve_jax.models.moe import MoE, Routing


def rope(positions: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [..., 1, head_dim / 2], of positions [...]. Source: arXiv 2104.09864, eq. 34."""
    dim, scaling = config.head_dim, config.rope_scaling
    frequencies = config.rope_theta ** (-jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
    if scaling:
        frequencies = scaling.slow(frequencies, config.rope_theta)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos * scaling.scale, sin * scaling.scale) if scaling else (cos, sin)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [..., heads, head_dim]. The halves of a head are the two coordinates, as in HF."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def default_positions(tokens: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Positions [B, L] that count from 0, or from each segment's first token if there are segments."""
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    if segment_ids is None:
        return index
    starts = segment_ids != jnp.pad(segment_ids, ((0, 0), (1, 0)))[:, :-1]
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


class RMSNorm(nn.Module):
    eps: float
    dtype: Any
    param_dtype: Any

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), self.param_dtype)
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        return (x * scale.astype(jnp.float32)).astype(self.dtype)


class Attention(nn.Module):
    config: ModelConfig
    dtype: Any
    param_dtype: Any
    matmul_dtype: Any = None

    def setup(self):
        c = self.config
        self.q_proj = self._dense(c.num_attention_heads * c.head_dim, c.qkv_bias)
        self.k_proj = self._dense(c.num_key_value_heads * c.head_dim, c.qkv_bias)
        self.v_proj = self._dense(c.num_key_value_heads * c.head_dim, c.qkv_bias)
        self.o_proj = self._dense(c.hidden_size, c.output_bias)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.rms_norm_eps, self.dtype, self.param_dtype)
            self.k_norm = RMSNorm(c.rms_norm_eps, self.dtype, self.param_dtype)

    def _dense(self, features: int, bias: bool) -> nn.Dense:
        return nn.Dense(
            features,
            bias,
            self.dtype,
            self.param_dtype,
            kernel_init=nn.initializers.normal(self.config.initializer_range),
            dot_general=products.of(self.matmul_dtype),
        )

    def qkv(self, x, cos, sin):
        """Maps x [B * L, D] to q [B, L, heads, head_dim] and k, v [B, L, kv heads, head_dim]. Rotates q and
        k."""
        c, rows = self.config, cos.shape[:2]
        q = self.q_proj(x).reshape(*rows, c.num_attention_heads, c.head_dim)
        k = self.k_proj(x).reshape(*rows, c.num_key_value_heads, c.head_dim)
        v = self.v_proj(x).reshape(*rows, c.num_key_value_heads, c.head_dim)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def output(self, heads):
        """Maps heads [B, L, heads, head_dim] to [B * L, D]."""
        return self.o_proj(heads.reshape(-1, heads.shape[-2] * heads.shape[-1]))


class MLP(nn.Module):
    config: ModelConfig
    dtype: Any
    param_dtype: Any
    matmul_dtype: Any = None

    @nn.compact
    def __call__(self, x):
        c = self.config

        def dense(features, name):
            return nn.Dense(
                features,
                c.mlp_bias,
                self.dtype,
                self.param_dtype,
                name=name,
                kernel_init=nn.initializers.normal(c.initializer_range),
                dot_general=products.of(self.matmul_dtype),
            )

        gate = nn.silu(dense(c.intermediate_size, "gate_proj")(x))
        return dense(c.hidden_size, "down_proj")(gate * dense(c.intermediate_size, "up_proj")(x))


class Block(nn.Module):
    """One layer.

    Its stream x is [B * L, D], not [B, L, D], so products are of two matrices. XLA's CPU backend runs these
    in half the time, forward and backward.
    """

    config: ModelConfig
    dtype: Any
    param_dtype: Any
    sparse: bool = False
    attention: str = "auto"
    mesh: Mesh | None = None
    platform: str = "cpu"
    matmul_dtype: Any = None

    def setup(self):
        args = self.dtype, self.param_dtype
        self.input_layernorm = RMSNorm(self.config.rms_norm_eps, *args)
        self.self_attn = Attention(self.config, *args, self.matmul_dtype)
        self.post_attention_layernorm = RMSNorm(self.config.rms_norm_eps, *args)
        own = self.config, *args
        self.mlp: Any = MoE(*own, self.mesh, self.platform) if self.sparse else MLP(*own, self.matmul_dtype)

    def __call__(self, x, cos, sin, segment_ids, parents, routing):
        """Applies the layer. Returns x and, from a sparse layer, its Routing.

        routing: int32 [B, L, K] or None, as for `MoE`.
        """
        q, k, v = self.self_attn.qkv(self.input_layernorm(x), cos, sin)
        heads = attention(
            q, k, v, segment_ids, self.attention, self.mesh, platform=self.platform, parents=parents
        )
        x = x + self.self_attn.output(heads)
        return self._feed_forward(x, None if segment_ids is None else segment_ids != 0, routing)

    def decode(self, x, cos, sin, positions, kept, cache):
        """Attends x [B * T, D] to this layer's cache, `kept`. Returns (x, routing, updated `kept`)."""
        q, k, v = self.self_attn.qkv(self.input_layernorm(x), cos, sin)
        real = positions < cache.columns if self.sparse else None
        heads, written = cache.attend(q, k, v, kept, positions, self.mesh, self.platform)
        place = partial(sharding.place_decoded, self.mesh)
        x = place("stream", x + self.self_attn.output(place("features", heads.astype(self.dtype))))
        x, routed = self._feed_forward(x, real, None)
        return place("stream", x), routed, written

    def _feed_forward(self, x, real, routing):
        normed = self.post_attention_layernorm(x)
        if not self.sparse:
            return x + self.mlp(normed), None
        real = jnp.ones(len(x), bool) if real is None else real.reshape(-1)
        out, routed = self.mlp(normed, real, None if routing is None else routing.reshape(len(x), -1))
        return x + out, routed


class Decoder(nn.Module):
    """A causal language model.

    Attributes:
      dtype: dtype of the computation. Norms, softmax, router, rotary embeddings and logits are always
        float32.
      remat: recompute each layer in the backward pass instead of keeping its activations.
      attention: the implementation of `attention` that `hidden` uses.
      mesh: the mesh over which the model is spread, if it is.
      platform: the target of its programs, as JAX names it (cpu, gpu, tpu).
      matmul_dtype: dtype of the operands of the dense layers' products and of the unembedding's, on CPUs
        (products.py). Their results are in `dtype`. None: `dtype`.

    A forward of a model with experts gives its Routing to callers that ask for it:

        out, state = model.apply(variables, ..., mutable=["intermediates"])
        routing = state["intermediates"]["routing"]
    """

    config: ModelConfig
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    remat: bool = False
    attention: str = "auto"
    mesh: Mesh | None = None
    platform: str = dataclasses.field(default_factory=jax.default_backend)
    matmul_dtype: Any = None

    def setup(self):
        c = self.config
        init = nn.initializers.normal(c.initializer_range)
        self.embed_tokens = nn.Embed(c.vocab_size, c.hidden_size, self.dtype, self.param_dtype, init)
        if c.dense_layers and c.sparse_layers:
            # Stored parameters may have adapters beside the kernels. `decode` may get those of `unstack`.
            made = self.has_variable("params", "layers")
            stored = lambda: self.get_variable("params", "layers")
            self.layers = stored() if made else self.param("layers", self._init_mixed)
        else:
            self.layers = self._scan(bool(c.sparse_layers), c.num_hidden_layers)
        self.norm = RMSNorm(c.rms_norm_eps, self.dtype, self.param_dtype)
        if not c.tie_word_embeddings:
            self.lm_head = LMHead(c, self.matmul_dtype or self.dtype, self.param_dtype)

    def _scan(self, sparse: bool, length: int, **kwargs):
        """Makes a module of `length` layers of one kind."""
        block = nn.map_variables(Block, "params", _opaque, init=True) if self.platform == "tpu" else Block
        block = nn.remat(block, prevent_cse=False) if self.remat else block
        scan = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(*[nn.broadcast] * 4, 0),
            length=length,
        )
        own = sparse, self.attention, self.mesh, self.platform, self.matmul_dtype
        return scan(self.config, self.dtype, self.param_dtype, *own, **kwargs)

    def _init_mixed(self, key):
        """Initialises the parameters of layers of both kinds, stacked as the module's docstring says."""
        c = self.config
        x, positions = jnp.zeros((1, c.hidden_size), self.dtype), jnp.zeros((1, 1), jnp.int32)

        def stack(key, sparse, length):
            scan = self._scan(sparse, length, parent=None)
            return scan.init(key, x, *rope(positions, c), None, None, None)["params"]

        keys = jax.random.split(key, 3)
        both = [stack(keys[0], False, len(c.dense_layers)), stack(keys[1], True, len(c.sparse_layers))]
        return stack(keys[2], False, c.num_hidden_layers) | {"mlp": both[0]["mlp"] | both[1]["mlp"]}

    def __call__(self, tokens, positions=None, segment_ids=None, routing=None, parents=None):
        """Maps tokens, int32 [B, L], to logits, float32 [B, L, V]. See `hidden`."""
        return self.unembed(self.hidden(tokens, positions, segment_ids, routing, parents))

    def hidden(self, tokens, positions=None, segment_ids=None, routing=None, parents=None):
        """Hidden states after the final norm, [B, L, D].

        Args:
          tokens: int32 [B, L].
          positions: int32 [B, L], by default counted from each segment's start.
          segment_ids: int32 [B, L], 0 on padding. None: each row is one sequence.
          routing: int32 [A, B, L, K], the experts that each sparse layer uses for each token in place of the
            router's choice, such as the sampler's (arXiv 2510.11370). Their weights still are the router's,
            with gradient. -1 leaves the choice to the router.
          parents: int32 [B, L], the segments that tokens attend to besides their own, as for `attention`. A
            token's position then goes on from its parent's.

        If the mesh splits rows, all arrays hold parts of rows (`context_parallel.split`).
        """
        if positions is None:
            positions = default_positions(tokens, segment_ids)
        cos, sin = rope(positions, self.config)
        x = self.embed_tokens(tokens.reshape(-1))
        x, routed = self._layers(x, cos, sin, segment_ids, parents, routing)
        self._tell(routed, tokens.shape)
        return self.norm(x).reshape(*tokens.shape, -1)

    def _layers(self, x, cos, sin, segment_ids, parents, routing):
        c = self.config
        if not (c.dense_layers and c.sparse_layers):
            return self.layers(x, cos, sin, segment_ids, parents, routing)
        parts = []
        start, first = 0, {False: 0, True: 0}  # the next layer: among all, and among those of each kind
        for sparse, run in itertools.groupby(i in c.sparse_layers for i in range(c.num_hidden_layers)):
            count = len(list(run))
            own = slice(first[sparse], first[sparse] + count)
            params = _part(self.layers, sparse, slice(start, start + count), own)
            scan = self._scan(sparse, count, parent=None)
            given = routing[own] if sparse and routing is not None else None
            x, routed = scan.apply({"params": params}, x, cos, sin, segment_ids, parents, given)
            parts += [routed] if sparse else []
            start, first[sparse] = start + count, own.stop
        return x, jax.tree.map(lambda *x: jnp.concatenate(x), *parts)

    def _tell(self, routed: Routing | None, shape: tuple[int, int]):
        """Sows the Routing of all sparse layers, for callers that ask for it."""
        if routed is not None and routed.experts is not None:
            experts = routed.experts.reshape(-1, *shape, self.config.num_experts_per_tok)
            self.sow(
                "intermediates",
                "routing",
                routed._replace(experts=experts),
                init_fn=lambda: None,
                reduce_fn=lambda _, new: new,
            )

    def unembedding(self):
        """The matrix that gives logits, and the axis of its vocabulary: ([V, D], 0) or ([D, V], 1)."""
        if self.config.tie_word_embeddings:
            return self.embed_tokens.embedding, 0
        return self.lm_head.variables["params"]["kernel"], 1

    def unembed(self, hidden):
        """Maps hidden [..., D] to logits, float32 [..., V]."""
        if not self.config.tie_word_embeddings:
            return self.lm_head(hidden)
        table = self.embed_tokens.embedding.astype(self.matmul_dtype or self.dtype)
        hidden = hidden.astype(table.dtype)
        return jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)

    def _rotations(self, positions, columns):
        """Computes `rope` of positions [B, T] below `columns`. Other positions give meaningless values."""
        if self.platform != "cpu":
            return rope(positions, self.config)
        # XLA's CPU backend recomputes cosines in each loop that uses them, so twice per layer. It computes a
        # table to look them up in once per program.
        table = rope(jnp.arange(columns), self.config)
        return tuple(x.at[positions].get(mode="clip") for x in table)

    def decode(self, tokens, positions, cache):
        """Feeds T new tokens per row to a model that remembers the earlier ones in `cache`.

        Returns (hidden [B, T, D], cache). Donate the cache to update it in place. The parameters may be those
        that `unstack` gives.

        Args:
          tokens: int32 [B, T].
          positions: int32 [B, T]. A token is written at cache column positions[b, t] and attends to the
            columns up to it. Padding has position S or more: it is not written, and its output means nothing.
          cache: a `KVCache` or a `PagedCache`.
        """
        c = self.config
        cos, sin = self._rotations(positions, cache.columns)
        x = sharding.place_decoded(self.mesh, "stream", self.embed_tokens(tokens.reshape(-1)))
        layers = unstack(self.variables["params"], c)["layers"]
        written, parts = [], []
        for i, kept in enumerate(zip(cache.k, cache.v, strict=True)):
            sparse = i in c.sparse_layers
            own_layer = sparse, self.attention, self.mesh, self.platform, self.matmul_dtype
            block = Block(c, self.dtype, self.param_dtype, *own_layer, parent=None)
            given = x, cos, sin, positions, kept, cache
            x, routed, layer = block.apply({"params": layers[i]}, *given, method=Block.decode)
            written.append(layer)
            parts += [routed] if sparse else []
        self._tell(jax.tree.map(lambda *x: jnp.stack(x), *parts) if parts else None, tokens.shape)
        keys, values = zip(*written)
        return self.norm(x).reshape(*tokens.shape, -1), cache.replace(k=keys, v=values)


def in_float32(path: tuple) -> bool:
    """Whether a parameter is used in float32, whatever the dtype of the computation: norms and routers are.

    path: as `jax.tree_util.tree_map_with_path` gives it.
    """
    *_, module, name = (key.key for key in path)
    return name not in ("kernel", "bias", "embedding") or module == "gate"


def unstack(params: Any, config: ModelConfig) -> Any:
    """The parameters with a tuple of layers in place of the stack that the module's docstring describes."""
    layers = params["layers"]
    if isinstance(layers, tuple):
        return params
    own = {i: n for kind in (config.dense_layers, config.sparse_layers) for n, i in enumerate(kind)}
    each = (_part(layers, i in config.sparse_layers, i, own[i]) for i in range(config.num_hidden_layers))
    return {**params, "layers": tuple(each)}


def _part(stacked: Any, sparse: bool, every: int | slice, own: int | slice) -> Any:
    """The parameters of layers `every` among all layers, which are layers `own` among those of their kind."""
    mlp = {name: p for name, p in stacked["mlp"].items() if (name in ("gate", "experts")) == sparse}

    def take(tree, layers):
        if isinstance(layers, int):
            return jax.tree.map(lambda p: p[layers], tree)
        # Not p[layers]: that slice names no strides, and JAX 0.10.2 then cannot add its gradient in place.
        return jax.tree.map(lambda p: jax.lax.slice_in_dim(p, layers.start, layers.stop), tree)

    return {name: take(mlp, own) if name == "mlp" else take(tree, every) for name, tree in stacked.items()}


@jax.custom_vjp
def _opaque(params: Any) -> Any:
    """Makes XLA take a layer's parameters as they are.

    Without this, XLA for TPUs casts the parameters of all layers to the compute type before its loop over
    them. It also changes the layout of some. That needs up to as much memory again as they take in that type.
    """

    def each(x: jax.Array) -> jax.Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
        return jax.lax.bitcast_convert_type(jax.lax.optimization_barrier(bits), x.dtype)

    return jax.tree.map(each, params)


_opaque.defvjp(lambda params: (_opaque(params), None), lambda _, gradient: (gradient,))


class LMHead(nn.Module):
    """The unembedding of a model whose input and output embeddings are not tied."""

    config: ModelConfig
    dtype: Any
    param_dtype: Any

    @nn.compact
    def __call__(self, x):
        c = self.config
        init = nn.initializers.normal(c.initializer_range)
        kernel = self.param("kernel", init, (c.hidden_size, c.vocab_size), self.param_dtype)
        x = x.astype(self.dtype)
        return jnp.einsum("...d,dv->...v", x, kernel.astype(self.dtype), preferred_element_type=jnp.float32)
