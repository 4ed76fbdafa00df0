"""The architecture of a decoder, read from its checkpoint's config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from coevolve_jax.models.rope_scaling import Scaling, read_rope, write_rope

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
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
class ModelConfig:
    """The architecture, under the names of config.json.

    model_type: one of ARCHITECTURES. "qwen2" is Qwen2.5's too, and "llama" is SmolLM2's. rope_scaling: None
    for unscaled rotary embeddings. mlp_bias matters for llama alone, the fields from num_experts on for
    qwen3_moe alone. The token ids are kept only to be written back.
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
    mlp_bias: bool = False
    initializer_range: float = 0.02
    max_position_embeddings: int = 32768
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    rope_scaling: Scaling | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    router_aux_loss_coef: float = 0.001

    @property
    def qk_norm(self) -> bool:
        return self.model_type in ("qwen3", "qwen3_moe")

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
    def from_hf(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Parses a Hugging Face config.json.

        Raises ValueError where it asks for an architecture or option that this code does not implement.
        """
        _check_supported(data)
        fields = {f.name: data[f.name] for f in dataclasses.fields(cls) if data.get(f.name) is not None}
        fields.pop("rope_scaling", None)
        fields |= read_rope(data)
        heads = fields.get("num_attention_heads")
        if heads and "hidden_size" in fields:
            fields.setdefault("num_key_value_heads", heads)
            # Of transformers' configurations, Qwen3's alone has a default of its own.
            own = 128 if data["model_type"] == "qwen3" else fields["hidden_size"] // heads
            fields.setdefault("head_dim", own)
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
        if data["model_type"] != "llama":
            fields.pop("mlp_bias", None)
        if missing := [name for name in needed if name not in fields]:
            raise ValueError(f"The model's config.json lacks {', '.join(missing)}.")
        _check_sizes(config := cls(**fields))
        return config

    def to_hf(self) -> dict[str, Any]:
        """The config.json that transformers, SGLang and `from_hf` read."""
        rope = write_rope(self.rope_theta, self.rope_scaling)
        # An absent id is written: readers have defaults of their own, such as 2 for Llama's end.
        data = {
            k: v
            for k, v in dataclasses.asdict(self).items()
            if k not in rope and (v is not None or k.endswith("_token_id"))
        }
        absent = EXPERT_FIELDS if self.model_type != "qwen3_moe" else ()
        absent += ("mlp_bias",) if self.model_type != "llama" else ()
        data = {k: list(v) if isinstance(v, tuple) else v for k, v in data.items() if k not in absent}
        return {"architectures": [ARCHITECTURES[self.model_type]], **data, "hidden_act": "silu", **rope}


def _check_supported(data: Mapping[str, Any]) -> None:
    kind = data.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"model_type {kind!r} in config.json is not supported; use a llama, qwen2 (Qwen2 or "
            "Qwen2.5), qwen3 (dense Qwen3) or qwen3_moe checkpoint."
        )
    if quantized := data.get("quantization_config"):
        raise ValueError(
            f"config.json has a quantization_config ({quantized.get('quant_method', 'unnamed')}): use the "
            "checkpoint's variant in bfloat16, for quantised weights cannot be trained."
        )
    if data.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {data['hidden_act']!r} in config.json is not supported; only silu is.")
    if data.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(
            f"partial_rotary_factor {data['partial_rotary_factor']} in config.json is not supported: use a "
            "checkpoint whose heads are rotated whole."
        )
    if data.get("use_sliding_window") or set(data.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(
            "use_sliding_window or layer_types in config.json ask for sliding-window attention, "
            "which is not supported; use a checkpoint with full attention."
        )


def _check_sizes(config: ModelConfig) -> None:
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
