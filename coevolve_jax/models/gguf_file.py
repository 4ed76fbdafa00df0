"""An open GGUF file, llama.cpp's format, and the architecture that its metadata describe.

Source of keys and layouts: llama.cpp's convert_hf_to_gguf.py and gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from coevolve_jax.models import gguf_tokenizer
from coevolve_jax.models.config import ModelConfig
from coevolve_jax.models.rope_scaling import Llama3Rope, Scaling, Yarn

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FACTORS = "rope_freqs.weight"  # by what each frequency is divided

# Field of ModelConfig -> its key after the architecture's name.
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
}
OPTIONAL = ("num_key_value_heads", "head_dim", "rope_theta")
YARN_KEYS = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
IGNORED = ("vocab_size", "rope.scaling.finetuned")
# Further keys are refused, unless they have a value that changes nothing.
NEUTRAL = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "pooling_type": 0,
    "rope.scaling.type": "none",
    "rope.scaling.factor": 1.0,
    "rope.scaling.attn_factor": 1.0,
}


class Gguf(NamedTuple):
    """An open file: metadata by key, and gguf's ReaderTensors by name, which are read when they are used."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Any]


def open_gguf(file: str | os.PathLike) -> Gguf:
    """Reads the metadata and the table of tensors. Raises ValueError for a file that is no whole GGUF."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ValueError("GGUF files are read by the package gguf: pip install gguf==0.19.0.") from None
    if not Path(file).is_file():
        raise ValueError(f"There is no file {file}: name a GGUF file.")
    try:
        reader = GGUFReader(file)
        metadata = {key: _value(field) for key, field in reader.fields.items()}
    except Exception as error:  # gguf raises whatever the bytes lead to
        raise ValueError(f"{file} is no whole GGUF file ({error}): download it again.") from error
    if metadata.get("split.count", 1) > 1:
        raise ValueError(f"{file} is one of {metadata['split.count']} parts: join them by llama-gguf-split.")
    return Gguf(Path(file), metadata, {tensor.name: tensor for tensor in reader.tensors})


def _value(field: Any) -> Any:
    value = field.contents()
    if isinstance(value, float) and field.types[0].name == "FLOAT32":
        return float(str(np.float32(value)))  # 1e-05 instead of 9.999999747378752e-06
    return value


def dequantized(tensor: Any) -> np.ndarray:
    """Reads a tensor in float32. Raises ValueError for a type that gguf cannot dequantise."""
    from gguf.quants import dequantize

    try:
        return dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
    except NotImplementedError:
        raise ValueError(
            f"{tensor.name} has type {tensor.tensor_type.name}, which gguf cannot dequantise: take "
            "another file."
        ) from None


def config_of(model: Gguf) -> ModelConfig:
    """The architecture that the metadata describe. Raises ValueError for one that is not implemented."""
    kind = model.metadata.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"general.architecture {kind!r} of {model.path} is not supported; only "
            f"{', '.join(ARCHITECTURES)} are."
        )
    own = {k.removeprefix(f"{kind}."): v for k, v in model.metadata.items() if k.startswith(f"{kind}.")}
    fields = {field: own[key] for field, key in KEYS.items() if key in own}
    lacking = [f"{kind}.{KEYS[field]}" for field in KEYS if field not in fields and field not in OPTIONAL]
    lacking += ["token_embd.weight"] if "token_embd.weight" not in model.tensors else []
    if lacking:
        raise ValueError(f"{model.path} lacks {', '.join(lacking)}: take a whole language model.")
    if uneven := [KEYS[field] for field, value in fields.items() if isinstance(value, list)]:
        raise ValueError(f"{', '.join(uneven)} of {model.path} differ by layer, which is not supported.")
    heads = fields["num_attention_heads"]
    fields = {
        "num_key_value_heads": heads,
        "head_dim": fields["hidden_size"] // heads,
        "rope_theta": 10000.0,
        **fields,
    }
    width = fields["head_dim"]
    neutral = {**NEUTRAL, "rope.dimension_count": width, "attention.value_length": width}
    yarn = own.get("rope.scaling.type") == "yarn"
    used = {*KEYS.values(), *IGNORED, *(("rope.scaling.type", *YARN_KEYS.values()) if yarn else ())}
    if wrong := [f"{kind}.{k} = {v!r}" for k, v in own.items() if k not in used and neutral.get(k) != v]:
        raise ValueError(f"{model.path} asks for {', '.join(wrong)}, which is not supported.")
    ids = gguf_tokenizer.special_ids(model.metadata)
    config = ModelConfig(
        model_type=kind,
        vocab_size=int(model.tensors["token_embd.weight"].shape[-1]),
        tie_word_embeddings="output.weight" not in model.tensors,
        attention_bias=kind != "qwen2" and "blk.0.attn_q.bias" in model.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in model.tensors,
        rope_scaling=_yarn(own) if yarn else _llama3(model, width, fields["rope_theta"]),
        **{f"{name}_token_id": ids.get(name) for name in ("bos", "eos", "pad")},
        **fields,
    )
    return ModelConfig.from_hf(config.to_hf())  # checks that the sizes fit each other


def _yarn(own: Mapping[str, Any]) -> Yarn:
    given = {field: own[key] for field, key in YARN_KEYS.items() if key in own}
    if "factor" not in given:
        raise ValueError("The GGUF file asks for yarn and lacks rope.scaling.factor: take another.")
    return Yarn(**{"original_max_position_embeddings": own["context_length"], **given})


def _llama3(model: Gguf, head_dim: int, theta: float) -> Scaling | None:
    """Recovers Llama 3's scaling from the factors that stand in its place; None without factors.

    The published models differ in the factor alone, which divides the slowest frequency.
    """
    if ROPE_FACTORS not in model.tensors:
        return None
    factors = dequantized(model.tensors[ROPE_FACTORS]).ravel()
    scaling = Llama3Rope(float(factors[-1]), 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    frequencies = theta ** -(jnp.arange(0, head_dim, 2) / head_dim)
    expected = frequencies / scaling.slow(frequencies, theta)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ValueError(
            f"{ROPE_FACTORS} of {model.path} is no scaling of a published Llama 3 (low_freq_factor 1, "
            "high_freq_factor 4, 8192 tokens originally), and no other is supported."
        )
    return scaling
