"""GGUF files of random models, written as llama.cpp's convert_hf_to_gguf.py writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from coevolve_jax.models import hf_io
from coevolve_jax.models.decoder import ModelConfig

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "The rain in Spain, it's 1234567 times the RAIN of Málaga: été, 雨 и дождь!\n\n  We'll say so.\n"
WORDS = ("12", "123", ".\n", "LL", "'LL", "\n\n", " the", " rain", "é", "2024", "'s", "  ")
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}


def vocabulary() -> tuple[list[str], list[str], list[int]]:
    """Trains byte-level BPE. Returns tokens, merges and token types, one of each kind."""
    tokenizer = Tokenizer(models.BPE())
    # Merges go across words here, so that ids show how a tokenizer splits a text.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        min_frequency=2,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT, *WORDS * 9], trainer)
    made = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    tokens = [token for token, _ in made]
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    types = [3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL))
    return [*tokens, "<tool_call>", "[PAD0]"], merges, [*types, 4, 5]


TOKENS, MERGES, TYPES = vocabulary()


def config_of(kind: str, **changes: Any) -> ModelConfig:
    """A small model whose rows are whole blocks of 32, with biases where the architecture may have some."""
    fields: dict[str, Any] = dict(
        model_type=kind,
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32 if kind == "qwen3" else 16,
        rope_theta=5e5,
        rms_norm_eps=1e-5,
        tie_word_embeddings=kind == "qwen2",
        max_position_embeddings=16384,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return ModelConfig(**{**fields, **changes})


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Random weights under their names in a Hugging Face checkpoint."""
    rng = np.random.default_rng(seed)
    entries = hf_io.entries_of(config, hf_io.abstract_params(config))
    draw = lambda shape: rng.normal(0, 0.2, shape).astype(np.float32)
    return {name: draw(entry.tensor_shape) for entry in entries for name in entry.names.flat}


def as_stored(tensors: Mapping[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    """The values that a file in this quantisation holds: vectors stay float32."""
    type = gguf.GGMLQuantizationType[kind]
    stored = lambda w: dequantize(quantize(w, type), type) if w.ndim > 1 else w
    return {name: stored(w) for name, w in tensors.items()}


def write(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    kind: str = "F32",
    pre: str = "smollm",
    more: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    leave_out: tuple[str, ...] = (),
    architecture: str = "",
) -> Path:
    """Writes a GGUF file.

    more: further metadata by key, bool, int, float or str; None leaves a key of below out. extra: further
    tensors by their names in GGUF. leave_out: names in GGUF of tensors that the file lacks.
    """
    name = architecture or config.model_type
    writer = gguf.GGUFWriter(path, name)
    data: dict[str, Any] = {
        f"{name}.context_length": config.max_position_embeddings,
        f"{name}.embedding_length": config.hidden_size,
        f"{name}.block_count": config.num_hidden_layers,
        f"{name}.feed_forward_length": config.intermediate_size,
        f"{name}.attention.head_count": config.num_attention_heads,
        f"{name}.attention.head_count_kv": config.num_key_value_heads,
        f"{name}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{name}.rope.freq_base": config.rope_theta,
        f"{name}.rope.dimension_count": config.head_dim,
        f"{name}.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }
    if config.model_type == "qwen3":
        data |= {f"{name}.attention.{part}_length": config.head_dim for part in ("key", "value")}
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
    }
    for key, value in {**data, **(more or {})}.items():
        if value is not None:
            adders[type(value)](key, value)
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_token_types(TYPES)
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    for hf_name, weight in tensors.items():
        own = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        if config.model_type == "llama" and (count := heads.get(hf_name.split(".")[-2])):
            rows, *rest = weight.shape
            weight = weight.reshape(count, 2, rows // count // 2, *rest).swapaxes(1, 2).reshape(weight.shape)
        stored = gguf.GGMLQuantizationType[kind if weight.ndim > 1 else "F32"]
        if own not in leave_out:
            writer.add_tensor(own, quantize(weight, stored), raw_dtype=stored)
    for own, weight in (extra or {}).items():
        writer.add_tensor(own, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
