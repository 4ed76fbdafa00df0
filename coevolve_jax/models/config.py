"""The architecture of a Qwen model, read from its checkpoint's config.json."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

ARCHITECTURES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
# Fields that only a model with experts has.
EXPERT_FIELDS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
    "router_aux_loss_coef",
)
EXPERT_COUNT = ("num_local_experts", "num_experts")  # in transformers 5, and in older versions


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN scaling of rotary embeddings (arXiv 2309.00071), under the names of config.json.

    Attributes:
      factor: the ratio by which the context grows.
      original_max_position_embeddings: the context in tokens before it grew.
      beta_fast: a pair of coordinates that turns more often than this in the original context is unchanged.
      beta_slow: a pair that turns less often than this is slowed down by `factor`.
      attention_factor: scales cos and sin. None: derived from factor, and from mscale and mscale_all_dim
        where both are given.
      truncate: round the bounds of the ramp between beta_fast and beta_slow to whole coordinates.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def scale(self) -> float:
        """The factor by which cos and sin are multiplied."""
        if self.attention_factor is not None:
            return self.attention_factor
        grown = lambda mscale: 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0
        if self.mscale and self.mscale_all_dim:
            return grown(self.mscale) / grown(self.mscale_all_dim)
        return grown(1.0)

    def bounds(self, head_dim: int, theta: float) -> tuple[float, float]:
        """The ramp's first and last coordinate: frequencies go from unscaled to divided by `factor`."""

        def turning(times):
            original = self.original_max_position_embeddings
            return head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

        low, high = turning(self.beta_fast), turning(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        return low, high if high != low else high + 0.001


@dataclasses.dataclass(frozen=True)
class QwenConfig:
    """The architecture, under the names of config.json.

    model_type: "qwen2" (Qwen2 and Qwen2.5), "qwen3" or "qwen3_moe". yarn: None for unscaled rotary
    embeddings. The fields from num_experts on matter for qwen3_moe alone. The token ids are kept only to be
    written back.
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
    yarn: Yarn | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    router_aux_loss_coef: float = 0.001

    @property
    def qk_norm(self) -> bool:
        return self.model_type != "qwen2"

    @property
    def qkv_bias(self) -> bool:
        return self.model_type == "qwen2" or self.attention_bias

    @property
    def output_bias(self) -> bool:
        return self.model_type != "qwen2" and self.attention_bias

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The layers with experts, ascending."""
        every = self.decoder_sparse_step
        return tuple(
            i
            for i in range(self.num_hidden_layers)
            if self.num_experts and i not in self.mlp_only_layers and (i + 1) % every == 0
        )

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers with a single MLP, ascending."""
        return tuple(i for i in range(self.num_hidden_layers) if i not in self.sparse_layers)

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> QwenConfig:
        """Parses a Hugging Face config.json.

        Raises ValueError where it asks for an architecture or option that this code does not implement.
        """
        _check_supported(data)
        fields = {f.name: data[f.name] for f in dataclasses.fields(cls) if data.get(f.name) is not None}
        fields |= _rope(data)
        heads = fields.get("num_attention_heads")
        if heads and "hidden_size" in fields:
            fields.setdefault("num_key_value_heads", heads)
            fields.setdefault("head_dim", fields["hidden_size"] // heads)
        for name in ("eos_token_id", "mlp_only_layers"):
            if isinstance(fields.get(name), list):
                fields[name] = tuple(fields[name])
        needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        if data["model_type"] == "qwen3_moe":
            for name in EXPERT_COUNT:
                if data.get(name):
                    fields["num_experts"] = data[name]
            needed += EXPERT_FIELDS[:3]
        else:
            fields = {name: value for name, value in fields.items() if name not in EXPERT_FIELDS}
        if missing := [name for name in needed if name not in fields]:
            raise ValueError(f"The model's config.json lacks {', '.join(missing)}.")
        _check_sizes(config := cls(**fields))
        return config

    def to_hf(self) -> dict[str, Any]:
        """The config.json that transformers, SGLang and `from_hf` read."""
        data = {k: v for k, v in dataclasses.asdict(self).items() if v is not None and k != "yarn"}
        for name in EXPERT_FIELDS if self.model_type != "qwen3_moe" else ():
            del data[name]
        data = {k: list(v) if isinstance(v, tuple) else v for k, v in data.items()}
        # transformers 5 reads rope_parameters, older versions the top-level rope_theta and rope_scaling.
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.yarn:
            given = {k: v for k, v in dataclasses.asdict(self.yarn).items() if v is not None}
            data["rope_scaling"] = rope = {**rope, "rope_type": "yarn", **given}
        return {
            "architectures": [ARCHITECTURES[self.model_type]],
            **data,
            "hidden_act": "silu",
            "rope_parameters": rope,
        }


def _check_supported(data: Mapping[str, Any]) -> None:
    kind = data.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"model_type {kind!r} in config.json is not supported; use a qwen2 (Qwen2 or "
            "Qwen2.5), qwen3 (dense Qwen3) or qwen3_moe checkpoint."
        )
    if quantized := data.get("quantization_config"):
        raise ValueError(
            f"config.json has a quantization_config ({quantized.get('quant_method', 'unnamed')}): use the "
            "checkpoint's variant in bfloat16, for quantised weights cannot be trained."
        )
    if data.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {data['hidden_act']!r} in config.json is not supported; only silu is.")
    if data.get("use_sliding_window") or set(data.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(
            "use_sliding_window or layer_types in config.json ask for sliding-window attention, "
            "which is not supported; use a checkpoint with full attention."
        )
    for place in ("rope_parameters", "rope_scaling"):
        rope = data.get(place) or {}
        scaling = rope.get("rope_type", rope.get("type", "default"))
        if scaling not in ("default", "yarn"):
            raise ValueError(
                f"{place} type {scaling!r} in config.json is not supported; only unscaled "
                "rotary embeddings ('default') and 'yarn' are, so use one of these."
            )
        if (partial := rope.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ValueError(
                f"partial_rotary_factor {partial} of {place} in config.json is not supported; "
                "use a checkpoint that rotates whole heads."
            )


def _check_sizes(config: QwenConfig) -> None:
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_attention_heads {config.num_attention_heads} in config.json is not a "
            f"multiple of num_key_value_heads {config.num_key_value_heads}."
        )
    if config.num_experts_per_tok > config.num_experts:
        raise ValueError(
            f"num_experts_per_tok {config.num_experts_per_tok} in config.json is more than "
            f"num_experts {config.num_experts}; lower it."
        )
    if config.decoder_sparse_step < 1:
        raise ValueError(
            f"decoder_sparse_step {config.decoder_sparse_step} in config.json is less than 1; "
            "make it 1 and list the layers without experts in mlp_only_layers."
        )


def _rope(data: Mapping[str, Any]) -> dict[str, Any]:
    """Reads rope_theta and yarn.

    As in transformers, rope_scaling (the older name) wins over rope_parameters.
    """
    parameters, scaling = data.get("rope_parameters") or {}, data.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", parameters.get("rope_theta", data.get("rope_theta")))
    if theta is None:
        raise ValueError(
            "The model's config.json names no rope_theta, neither in rope_parameters nor at the "
            "top level; take it from the checkpoint's model card."
        )
    rope = scaling or parameters
    if rope.get("rope_type", rope.get("type", "default")) == "default":
        return {"rope_theta": float(theta)}
    fields = {f.name: rope[f.name] for f in dataclasses.fields(Yarn) if rope.get(f.name) is not None}
    # As in transformers 5, an original length at the top level wins over the one in the scaling.
    length, limit = "original_max_position_embeddings", data.get("max_position_embeddings", 32768)
    fields[length] = data.get(length) or fields.get(length, limit)
    fields.setdefault("factor", limit / fields[length])
    for name in ("beta_fast", "beta_slow"):
        if not fields.get(name, True):  # transformers takes 0 as the default
            del fields[name]
    return {"rope_theta": float(theta), "yarn": Yarn(**fields)}
