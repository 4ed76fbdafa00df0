"""GGUF files to Hugging Face folders. Quantised tensors are dequantised.

Source of names and layouts: llama.cpp's convert_hf_to_gguf.py.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from coevolve_jax.models import gguf_tokenizer, hf_io
from coevolve_jax.models.config import ModelConfig
from coevolve_jax.models.gguf_file import ROPE_FACTORS, Gguf, config_of, dequantized, open_gguf

DTYPES = {"float32": "F32", "bfloat16": "BF16"}  # of the tensors written -> safetensors' name

# Module of the Hugging Face checkpoint -> its name in GGUF, outside and inside of a layer.
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class Converted(NamedTuple):
    """The architecture, the number of tensors by type in the GGUF file, and the bytes of the weights."""

    config: ModelConfig
    types: Counter[str]
    bytes: int


def convert(
    file: str | os.PathLike,
    folder: str | os.PathLike,
    dtype: str = "float32",
    progress: Callable[[list[str]], Iterable[str]] = iter,
) -> Converted:
    """Writes a GGUF file as a Hugging Face folder: weights, config, tokenizer and chat template.

    Everything goes to a temporary folder beside `folder`, which is then renamed. Memory holds one tensor.

    Args:
      dtype: one of DTYPES. float32 holds what every quantisation stands for exactly; bfloat16 rounds it.
      progress: gets the tensors' names and yields them.

    Raises:
      ValueError: `folder` exists, the file is damaged, or it asks for what this code does not implement. One
        error lists every tensor that is missing, unknown or of another shape.
    """
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} is already there: name a new folder, or delete it.")
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; only {' and '.join(DTYPES)} are.")
    model = open_gguf(file)
    config = config_of(model)
    shapes = _check_tensors(model, config)
    tokenizer = gguf_tokenizer.build(model.metadata, config.max_position_embeddings)
    hf_io.check_tokenizer(config, tokenizer)
    with hf_io.folder_beside(folder) as temporary:
        size = _write_weights(temporary / hf_io.WEIGHTS, model, config, shapes, dtype, progress)
        tokenizer.save_pretrained(temporary)
        hf_io.write_json(temporary / "config.json", {**config.to_hf(), "dtype": dtype, "torch_dtype": dtype})
        hf_io.write_json(temporary / "generation_config.json", _generation(model.metadata))
        temporary.rename(folder)
    return Converted(config, Counter(t.tensor_type.name for t in model.tensors.values()), size)


def _generation(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The ids of generation_config.json. A message also ends at the end of a turn."""
    ids = gguf_tokenizer.special_ids(metadata)
    data: dict[str, Any] = {f"{name}_token_id": ids[name] for name in ("bos", "eos", "pad") if name in ids}
    turn = metadata.get("tokenizer.ggml.eot_token_id")
    if turn not in (None, ids.get("eos")):
        data["eos_token_id"] = [*([ids["eos"]] if "eos" in ids else []), turn]
    return data


# ---- Tensors -------------------------------------------------------------------------------------------


def _gguf_name(name: str) -> str:
    """Returns the GGUF name of a tensor of the Hugging Face checkpoint."""
    module, _, kind = name.rpartition(".")
    if inner := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module):
        return f"blk.{inner[1]}.{INNER[inner[2]]}.{kind}"
    return f"{OUTER[module]}.{kind}"


def _check_tensors(model: Gguf, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each tensor to write, by its name. One error lists all that does not fit."""
    entries = hf_io.entries_of(config, hf_io.abstract_params(config))
    shapes = {name: entry.tensor_shape for entry in entries for name in entry.names.flat}
    given = {
        name: tuple(map(int, t.shape[::-1])) for name, t in model.tensors.items() if name != ROPE_FACTORS
    }
    wanted = {_gguf_name(name): shape for name, shape in shapes.items()}
    faults = [f"{name} is missing" for name in wanted.keys() - given.keys()]
    faults += [f"{name} is unknown" for name in given.keys() - wanted.keys()]
    for name in wanted.keys() & given.keys():
        if given[name] != wanted[name]:
            faults.append(f"{name} has shape {given[name]} instead of {wanted[name]}")
    if faults:
        raise ValueError(f"The tensors in {model.path} do not fit its metadata: {'; '.join(sorted(faults))}.")
    return shapes


def tensor_of(model: Gguf, config: ModelConfig, name: str) -> np.ndarray:
    """Reads the tensor of a Hugging Face name, in float32 and in the order of that checkpoint.

    Llama's rows of q and k are paired for ggml's rotary embedding in GGUF, and halved in Hugging Face.
    """
    value = dequantized(model.tensors[_gguf_name(name)])
    projection = re.search(r"\.([qk])_proj\.", name)
    if config.model_type != "llama" or not projection:
        return value
    heads = config.num_attention_heads if projection[1] == "q" else config.num_key_value_heads
    rows, *rest = value.shape
    return value.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(value.shape)


def _write_weights(
    file: Path,
    model: Gguf,
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    progress: Callable[[list[str]], Iterable[str]],
) -> int:
    """Writes a safetensors file one tensor after the other, and returns its bytes.

    The safetensors package would take all tensors at once. Source of the format: its README.
    """
    kind, end = jnp.dtype(dtype), 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, shape in shapes.items():
        begin, end = end, end + int(np.prod(shape)) * kind.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for name in progress(list(shapes)):
            out.write(np.ascontiguousarray(tensor_of(model, config, name), kind).view(np.uint8).data)
    return file.stat().st_size
