"""Qwen2 / Qwen2.5 and Qwen3 (dense) as Flax linen modules.

Modules carry the names of the Hugging Face checkpoint (self_attn, q_proj, ...), so that `hf_io` maps
one to the other by rule. The layers are scanned: each of their parameters is stacked on a leading axis.

B: rows; L: tokens of a row; T: new tokens of a row; S: cache columns; D: hidden size; V: vocabulary.
"""
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from coevolve_jax.models.attention import attention, cached_attention


@dataclasses.dataclass(frozen=True)
class QwenConfig:
    """What a checkpoint's config.json says about the architecture, under the names used there.

    model_type: "qwen2" (Qwen2 and Qwen2.5) or "qwen3". The token ids are kept only to be written back.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    initializer_range: float = 0.02
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    @property
    def qk_norm(self) -> bool:
        return self.model_type == "qwen3"

    @property
    def qkv_bias(self) -> bool:
        return self.model_type == "qwen2" or self.attention_bias

    @property
    def output_bias(self) -> bool:
        return self.model_type == "qwen3" and self.attention_bias

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> QwenConfig:
        """Parses a Hugging Face config.json.

        Raises ValueError, in one sentence, on an architecture or option that this code does not implement.
        """
        _check_supported(data)
        fields = {f.name: data[f.name] for f in dataclasses.fields(cls) if data.get(f.name) is not None}
        fields["rope_theta"] = _rope_theta(data)
        heads = fields.get("num_attention_heads")
        if heads and "hidden_size" in fields:
            fields.setdefault("num_key_value_heads", heads)
            fields.setdefault("head_dim", fields["hidden_size"] // heads)
        if isinstance(fields.get("eos_token_id"), list):
            fields["eos_token_id"] = tuple(fields["eos_token_id"])
        needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        if missing := [name for name in needed if name not in fields]:
            raise ValueError(f"The model's config.json lacks {', '.join(missing)}.")
        if fields["num_attention_heads"] % fields["num_key_value_heads"]:
            raise ValueError(f"num_attention_heads {fields['num_attention_heads']} in config.json is not a "
                             f"multiple of num_key_value_heads {fields['num_key_value_heads']}.")
        return cls(**fields)

    def to_hf(self) -> dict[str, Any]:
        """The config.json that transformers, SGLang and `from_hf` read."""
        data = {k: v for k, v in dataclasses.asdict(self).items() if v is not None}
        name = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[self.model_type]
        if isinstance(self.eos_token_id, tuple):
            data["eos_token_id"] = list(self.eos_token_id)
        # transformers 5 reads rope_parameters, everything older the top-level rope_theta.
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        return {"architectures": [name], **data, "hidden_act": "silu", "rope_parameters": rope}


def _check_supported(data: Mapping[str, Any]) -> None:
    kind = data.get("model_type")
    if kind not in ("qwen2", "qwen3"):
        raise ValueError(f"model_type {kind!r} in config.json is not supported; use a qwen2 (Qwen2, Qwen2.5) "
                         "or qwen3 (dense Qwen3) checkpoint.")
    if data.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {data['hidden_act']!r} in config.json is not supported; only silu is.")
    if data.get("use_sliding_window") or set(data.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError("use_sliding_window or layer_types in config.json ask for sliding-window attention, "
                         "which is not supported; use a checkpoint with full attention.")
    for place in ("rope_parameters", "rope_scaling"):
        rope = data.get(place) or {}
        scaling = rope.get("rope_type", rope.get("type", "default"))
        if scaling != "default":
            raise ValueError(f"{place} type {scaling!r} in config.json is not supported; only unscaled "
                             "rotary embeddings ('default') are, so remove the scaling.")


def _rope_theta(data: Mapping[str, Any]) -> float:
    """transformers 5 keeps it in rope_parameters, older versions at the top level."""
    theta = (data.get("rope_parameters") or {}).get("rope_theta", data.get("rope_theta"))
    if theta is None:
        raise ValueError("The model's config.json names no rope_theta, neither in rope_parameters nor at the "
                         "top level; take it from the checkpoint's model card.")
    return float(theta)


class KVCache(NamedTuple):
    """Keys (rotated) and values; column s of row b belongs to the token at position s.

    k, v: one array [B, num_key_value_heads, S, head_dim] per layer. Separate arrays, with the columns of a
    head together, because XLA then writes new columns in place and feeds the rest to the products
    uncopied (on a CPU a third less time per token than one stacked array).
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]

    def take(self, rows: jax.Array, columns: int | None = None) -> KVCache:
        """The first `columns` columns (all by default) of `rows` [R]; a row that does not exist is zeros."""
        return jax.tree.map(lambda x: x.at[rows, :, :columns].get(mode="fill", fill_value=0), self)

    def put(self, rows: jax.Array, part: KVCache) -> KVCache:
        """Writes `part` to the first columns of `rows` [R]; what goes to no existing row is dropped."""
        columns = part.k[0].shape[2]
        return jax.tree.map(lambda x, new: x.at[rows, :, :columns].set(new, mode="drop"), self, part)


def init_cache(config: QwenConfig, rows: int, capacity: int, dtype: Any = jnp.float32) -> KVCache:
    """An empty cache of `capacity` columns (tokens) for each of `rows` rows."""
    shape = (rows, config.num_key_value_heads, capacity, config.head_dim)
    # Every layer has its own buffer: one that is donated must not occur twice.
    empty = lambda: tuple(jnp.zeros(shape, dtype) for _ in range(config.num_hidden_layers))
    return KVCache(empty(), empty())


def rope(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [..., 1, head_dim / 2], of positions [...] (arXiv 2104.09864, eq. 34)."""
    frequencies = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [..., heads, head_dim]; the halves of a head are the two coordinates, as in HF."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def default_positions(tokens: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Positions [B, L] that count from 0, from each segment's first token if there are segments."""
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
    config: QwenConfig
    dtype: Any
    param_dtype: Any

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
        return nn.Dense(features, bias, self.dtype, self.param_dtype,
                        kernel_init=nn.initializers.normal(self.config.initializer_range))

    def qkv(self, x, cos, sin):
        """x [B * L, D] -> rotated q [B, L, heads, head_dim], rotated k and v [B, L, kv heads, head_dim]."""
        c, rows = self.config, cos.shape[:2]
        q = self.q_proj(x).reshape(*rows, c.num_attention_heads, c.head_dim)
        k = self.k_proj(x).reshape(*rows, c.num_key_value_heads, c.head_dim)
        v = self.v_proj(x).reshape(*rows, c.num_key_value_heads, c.head_dim)
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def output(self, heads):
        """heads [B, L, heads, head_dim] -> [B * L, D]."""
        return self.o_proj(heads.reshape(-1, heads.shape[-2] * heads.shape[-1]))


class MLP(nn.Module):
    config: QwenConfig
    dtype: Any
    param_dtype: Any

    @nn.compact
    def __call__(self, x):
        c = self.config

        def dense(features, name):
            return nn.Dense(features, False, self.dtype, self.param_dtype, name=name,
                            kernel_init=nn.initializers.normal(c.initializer_range))

        gate = nn.silu(dense(c.intermediate_size, "gate_proj")(x))
        return dense(c.hidden_size, "down_proj")(gate * dense(c.intermediate_size, "up_proj")(x))


class Block(nn.Module):
    """One layer. Its stream x is [B * L, D]: products of two matrices, which XLA's CPU backend runs half as
    long forward and backward as those of [B, L, D] with a matrix."""

    config: QwenConfig
    dtype: Any
    param_dtype: Any
    attention: str = "auto"
    mesh: Mesh | None = None

    def setup(self):
        args = self.dtype, self.param_dtype
        self.input_layernorm = RMSNorm(self.config.rms_norm_eps, *args)
        self.self_attn = Attention(self.config, *args)
        self.post_attention_layernorm = RMSNorm(self.config.rms_norm_eps, *args)
        self.mlp = MLP(self.config, *args)

    def __call__(self, x, cos, sin, segment_ids):
        q, k, v = self.self_attn.qkv(self.input_layernorm(x), cos, sin)
        x = x + self.self_attn.output(attention(q, k, v, segment_ids, self.attention, self.mesh))
        return x + self.mlp(self.post_attention_layernorm(x)), None

    def decode(self, x, cos, sin, positions, cache):
        """x [B * T, D] against this layer's (k, v) of the cache, which are returned updated."""
        q, k, v = self.self_attn.qkv(self.input_layernorm(x), cos, sin)
        place = jnp.arange(len(positions))[:, None], slice(None), positions
        cache = [old.at[place].set(new.astype(old.dtype), mode="drop") for old, new in zip(cache, (k, v))]
        x = x + self.self_attn.output(cached_attention(q, *cache, positions).astype(self.dtype))
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Qwen(nn.Module):
    """A causal language model. dtype: of the computation; norms, softmax, rotary embeddings and logits
    are float32 whatever it is. remat: recompute each layer in the backward pass instead of keeping
    its activations. attention: the implementation of `attention` that `hidden` takes. mesh: where the
    model is spread over devices, that mesh."""

    config: QwenConfig
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    remat: bool = False
    attention: str = "auto"
    mesh: Mesh | None = None

    def setup(self):
        c = self.config
        init = nn.initializers.normal(c.initializer_range)
        self.embed_tokens = nn.Embed(c.vocab_size, c.hidden_size, self.dtype, self.param_dtype, init)
        block = nn.remat(Block, prevent_cse=False) if self.remat else Block
        scan = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True},
                       in_axes=nn.broadcast, length=c.num_hidden_layers)
        self.layers = scan(c, self.dtype, self.param_dtype, self.attention, self.mesh)
        self.norm = RMSNorm(c.rms_norm_eps, self.dtype, self.param_dtype)
        if not c.tie_word_embeddings:
            self.lm_head = LMHead(c, self.dtype, self.param_dtype)

    def __call__(self, tokens, positions=None, segment_ids=None):
        """tokens: int32 [B, L] -> logits, float32 [B, L, V]. See `hidden`."""
        return self.unembed(self.hidden(tokens, positions, segment_ids))

    def hidden(self, tokens, positions=None, segment_ids=None):
        """Hidden states after the final norm, [B, L, D].

        tokens: int32 [B, L]. positions: int32 [B, L], by default counted from each segment's start.
        segment_ids: int32 [B, L], 0 on padding; None where each row is one sequence.
        """
        if positions is None:
            positions = default_positions(tokens, segment_ids)
        cos, sin = rope(positions, self.config.head_dim, self.config.rope_theta)
        x, _ = self.layers(self.embed_tokens(tokens.reshape(-1)), cos, sin, segment_ids)
        return self.norm(x).reshape(*tokens.shape, -1)

    def unembed(self, hidden):
        """hidden [..., D] -> logits, float32 [..., V]."""
        if not self.config.tie_word_embeddings:
            return self.lm_head(hidden)
        table = self.embed_tokens.embedding.astype(self.dtype)
        return jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)

    def decode(self, tokens, positions, cache):
        """Feeds T new tokens per row to a model that remembers the earlier ones in `cache`.

        tokens: int32 [B, T]. positions: int32 [B, T]; a token is written at cache column positions[b, t]
        and attends to the columns up to it. Padding has position S or more: it is not written, and
        its output means nothing. Returns (hidden [B, T, D], cache); donate the cache to update it in place.
        """
        cos, sin = rope(positions, self.config.head_dim, self.config.rope_theta)
        x = self.embed_tokens(tokens.reshape(-1))
        stacked = self.layers.variables["params"]
        block = Block(self.config, self.dtype, self.param_dtype, parent=None)
        layers = []
        for i, layer in enumerate(zip(*cache, strict=True)):
            variables = {"params": jax.tree.map(lambda p: p[i], stacked)}
            x, layer = block.apply(variables, x, cos, sin, positions, layer, method=Block.decode)
            layers.append(layer)
        return self.norm(x).reshape(*tokens.shape, -1), KVCache(*zip(*layers))


class LMHead(nn.Module):
    """The unembedding of a model whose input and output embeddings are not tied."""

    config: QwenConfig
    dtype: Any
    param_dtype: Any

    @nn.compact
    def __call__(self, x):
        c = self.config
        init = nn.initializers.normal(c.initializer_range)
        kernel = self.param("kernel", init, (c.hidden_size, c.vocab_size), self.param_dtype)
        return jnp.einsum("...d,dv->...v", x, kernel.astype(self.dtype), preferred_element_type=jnp.float32)
