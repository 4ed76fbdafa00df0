"""llama.cpp's decoding of a batch of sequences, as a worker of benchmarks/compare.py.

The Python with llama-cpp-python runs it. The weights are the case's, in a GGUF file of the setting's dtype.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import cases
import gguf
import llama_cpp
import numpy as np
import protocol
from gguf.quants import quantize
from safetensors.numpy import load_file

STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "q8_0": "Q8_0"}
BLOCK = 128  # tokens whose weights are summed first when one is sampled


def write_gguf(path: Path, folder: Path, case: cases.Case, kind: gguf.GGMLQuantizationType) -> None:
    """Writes the policy without a tokenizer; vectors stay float32."""
    c = cases.model_config(case)
    writer = gguf.GGUFWriter(path, case.family)
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_block_count(case.layers)
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(c["rope_theta"])
    writer.add_rope_dimension_count(c["head_dim"])
    writer.add_vocab_size(case.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, case.layers)
    heads = {"q_proj": c["num_attention_heads"], "k_proj": c["num_key_value_heads"]}
    for name, weight in load_file(folder / "policy" / "model.safetensors").items():
        if count := heads.get(name.split(".")[-2]):  # ggml's rotary layout has a head's halves interleaved
            weight = weight.reshape(count, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        stored = kind if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        own = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(own, quantize(weight, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Sequences:
    """`case.rows` sequences in one llama.cpp context, all fed and decoded at once."""

    def __init__(self, path: Path, case: cases.Case, exact: bool):
        tokens = case.rows * case.prompt
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        p = llama_cpp.llama_context_default_params()
        p.n_seq_max, p.n_outputs_max, p.n_batch = case.rows, case.rows, tokens
        p.n_ctx = case.rows * (-(-(case.prompt + case.completion) // 256) * 256)  # in whole blocks of 256
        p.n_threads = p.n_threads_batch = os.cpu_count()
        if exact:
            p.type_k = p.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(self._model, p)
        if not self._context:
            raise RuntimeError("llama.cpp made no context: its log says why.")
        self._batch = llama_cpp.llama_batch_init(tokens, 0, 1)
        self._shape = case.rows, case.vocab_size

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)

    def feed(self, ids: np.ndarray, start: int) -> np.ndarray:
        """Appends ids [N, T] at position `start`. Returns the logits of each last one, [N, V], a view."""
        batch, (rows, length) = self._batch, ids.shape
        batch.n_tokens = ids.size
        array = lambda pointer: np.ctypeslib.as_array(pointer, (ids.size,))
        array(batch.token)[:] = ids.ravel()
        array(batch.pos)[:] = np.tile(np.arange(start, start + length), rows)
        array(batch.n_seq_id)[:] = 1
        array(batch.logits)[:] = np.arange(ids.size) % length == length - 1
        for i in range(ids.size):
            batch.seq_id[i][0] = i // length
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode ended with code {code}: its log says why.")
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self._context), self._shape)


def sampled(rng: np.random.Generator, logits: np.ndarray) -> np.ndarray:
    """One token of each row of logits [N, V], at temperature 1: a block by its weight, then one within it."""
    weights = np.exp(logits - logits.max(axis=1, keepdims=True)).reshape(len(logits), -1, BLOCK)
    block = _drawn(rng, weights.sum(axis=2))
    return block * BLOCK + _drawn(rng, weights[np.arange(len(block)), block])


def _drawn(rng: np.random.Generator, weights: np.ndarray) -> np.ndarray:
    sums = np.cumsum(weights, axis=1, dtype=np.float64)
    return np.sum(sums[:, :-1] <= rng.random((len(sums), 1)) * sums[:, -1:], axis=1)


def prepare(job: dict):
    folder, dtype = Path(job["folder"]), job["setting"]["dtype"]
    case, data = cases.read(folder)
    path = folder / f"{dtype}.gguf"
    write_gguf(path, folder, case, gguf.GGMLQuantizationType[STORED[dtype]])
    sequences, rng = Sequences(path, case, exact=dtype == "float32"), np.random.default_rng(0)

    def generate(choose) -> np.ndarray:
        sequences.clear()
        ids = [choose(sequences.feed(data["prompts"], 0))]
        for start in range(case.prompt, case.prompt + case.completion - 1):
            ids.append(choose(sequences.feed(ids[-1][:, None], start)))
        return np.stack(ids, axis=1)

    functions = {
        "run": lambda: {"tokens": generate(lambda logits: sampled(rng, logits)).size},
        "greedy": lambda: {"ids": generate(lambda logits: logits.argmax(axis=1)).tolist()},
    }
    calls = ["llama_cpp.llama_decode (all sequences in a batch, temperature 1 in numpy)"]
    return {"versions": {"llama-cpp-python": version("llama-cpp-python")}, "calls": calls}, functions


if __name__ == "__main__":
    protocol.serve(prepare)
