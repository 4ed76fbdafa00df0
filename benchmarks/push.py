"""Measures a weight push before any server sees it: writing and hashing a model with many experts.

    python benchmarks/push.py

The model is made up: 24 layers of 32 experts, 0.3 GB in float32, servers in bfloat16. It prints medians, and
the peak of the process's memory beside the parameters.
"""

import os
import statistics
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from coevolve_jax.models import hf_io
from coevolve_jax.models.decoder import ModelConfig
from coevolve_jax.planning import plan
from coevolve_jax.rollout.sglang import checksum, weights

FULL_SIZE = "Qwen3-30B-A3B-Instruct-2507"
_DTYPE = flags.DEFINE_string("dtype", "bfloat16", "Of the servers.")
_LAYERS = flags.DEFINE_integer("layers", 24, "Layers.")
_EXPERTS = flags.DEFINE_integer("experts", 32, "Experts of each layer.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Pushes.")


def model() -> ModelConfig:
    return ModelConfig.from_hf(
        {
            "model_type": "qwen3_moe",
            "vocab_size": 8192,
            "hidden_size": 256,
            "intermediate_size": 512,
            "moe_intermediate_size": 128,
            "num_hidden_layers": _LAYERS.value,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_experts": _EXPERTS.value,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
            "bos_token_id": 0,
            "max_position_embeddings": 1024,
        }
    )


def transfers(config: ModelConfig, params, dtype: str) -> int:
    """Transfers from the devices to the host, for one push."""
    files = hf_io.split(hf_io.entries_of(config, params), np.dtype(dtype), weights.FILE)
    return sum(1 for file in files for _ in hf_io.blocks(file, np.dtype(dtype)))


def memory(name: str) -> int:
    """Bytes in the kernel's account of this process."""
    return 1024 * int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0])


def timed(function):
    """(result, seconds, bytes by which the memory's peak exceeds its start)."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before, start = memory("VmRSS"), time.perf_counter()
    result = function()
    return result, time.perf_counter() - start, memory("VmHWM") - before


def main(argv) -> None:
    config = model()
    shapes = hf_io.abstract_params(config)
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(shapes))))
    params = jax.tree.map(lambda x: jax.random.normal(next(keys), x.shape, jnp.float32), shapes)
    nbytes = sum(x.nbytes for x in jax.tree.leaves(jax.block_until_ready(params)))
    took = {"write": [], "hash": []}
    root = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    folders = weights.Folders(root)
    for version in range(_ROUNDS.value + 1):
        written, *write = timed(lambda: folders.write(config, params, version, _DTYPE.value))
        tensors = written.tensors()
        with written.reader() as read:
            _, *hashed = timed(lambda: checksum.checksums(tensors, read, "cpu"))
        took["write"].append(write)
        took["hash"].append(hashed)
    size = sum(file.stat().st_size for file in written.folder.iterdir())
    blocks = transfers(config, params, _DTYPE.value)
    print(
        f"{len(tensors)} tensors in {blocks} transfers, {nbytes / 1e6:.0f} MB of parameters, "
        f"{size / 1e6:.0f} MB written"
    )
    for name, rounds in took.items():
        seconds, peaks = zip(*rounds)
        print(
            f"{name}: {statistics.median(seconds[1:]):.2f} s, {max(peaks) / 1e6:.0f} MB more in memory at "
            f"most"
        )
    for file in sorted(root.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    root.rmdir()
    config = plan.load_model(FULL_SIZE)
    print(f"{FULL_SIZE}: {transfers(config, hf_io.abstract_params(config), 'bfloat16')} transfers")


if __name__ == "__main__":
    app.run(main)
