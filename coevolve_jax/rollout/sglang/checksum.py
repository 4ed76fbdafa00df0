"""Computes, from Hugging Face tensors, the checksums that an SGLang server computes of its weights.

POST /weights_checker {"action": "checksum"} hashes each parameter in the server's layout. Query, key and
value are one matrix, gate and up are one, a layer's experts are stacked, the vocabulary is padded with zeros.
Equal checksums mean that every tensor arrived whole.

Source: SGLang 0.5.23, srt/utils/weight_checker.py, srt/managers/mm_utils.py (sha256, weights in host memory)
and kernels/ops/memory/gpu_tensor_hash.py (GPU).
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY_PADDING = 64  # rows; DEFAULT_VOCAB_PADDING_SIZE of layers/vocab_parallel_embedding.py
THREADS = min(8, os.cpu_count() or 1)  # each holds one parameter at a time in host memory
# The MLP's inner size on a CPU is a multiple of this; DEFAULT_MOE_PADDING_SIZE of configs/update_config.py.
CPU_PADDING = 32

# A Hugging Face name -> the server's. The first match wins. A parameter's parts are in the order of `_part`.
FUSED = (
    (r"(.*\.self_attn)\.[qkv]_proj\.(weight|bias)", r"\1.qkv_proj.\2"),
    (r"(.*\.mlp\.experts)\.\d+\.(?:gate|up)_proj\.weight", r"\1.w13_weight"),
    (r"(.*\.mlp\.experts)\.\d+\.down_proj\.weight", r"\1.w2_weight"),
    (r"(.*\.mlp)\.(?:gate|up)_proj\.weight", r"\1.gate_up_proj.weight"),
    (r"(.*)", r"\1"),
)
PARTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")


def checksums(names: Iterable[str], read: Callable[[str], np.ndarray], device: str) -> dict[str, str]:
    """Returns {parameter of the server: 16 hexadecimal digits}, for a server on one device.

    names: the Hugging Face tensors, without a tied lm_head. read: returns one of them in the server's dtype;
    several threads call it. device: the server's, "cpu" or "cuda". Raises ValueError for another.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"The checksums of a server on {device!r} are not known; verify by change instead.")
    parameters: dict[str, list[str]] = {}
    for name in names:
        parameters.setdefault(_parameter(name), []).append(name)
    digest = _digest_host if device == "cpu" else digest_gpu
    with ThreadPoolExecutor(THREADS) as pool:  # threads suffice: hashlib releases the GIL
        hashes = pool.map(lambda parts: digest(_arrays(parts, read, device)), parameters.values())
        return dict(zip(parameters, hashes))


def _parameter(name: str) -> str:
    return next(re.sub(pattern, new, name) for pattern, new in FUSED if re.fullmatch(pattern, name))


def _arrays(names: list[str], read: Callable[[str], np.ndarray], device: str) -> Iterator[np.ndarray]:
    """Yields the parts of one parameter, in their order in the server's memory."""
    for name in sorted(names, key=_part):
        array = read(name)
        multiples = [1] * array.ndim
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            multiples[0] = VOCABULARY_PADDING
        elif device == "cpu" and ".mlp." in name and ".gate." not in name:
            multiples["down_proj" in name] = CPU_PADDING
        missing = [-size % multiple for size, multiple in zip(array.shape, multiples)]
        yield np.pad(array, [(0, n) for n in missing]) if any(missing) else np.ascontiguousarray(array)


def _part(name: str) -> tuple[int, int]:
    """Returns the sort key of a part: (expert, place within the parameter)."""
    expert = re.search(r"\.experts\.(\d+)\.", name)
    place = next((i for i, part in enumerate(PARTS) if f".{part}." in name), 0)
    return (int(expert[1]) if expert else 0, place)


def _digest_host(arrays: Iterable[np.ndarray]) -> str:
    hasher = hashlib.sha256()
    for array in arrays:
        hasher.update(array.reshape(-1).view(np.uint8).data)
    return hasher.digest()[:8].hex()


# ---- On a GPU: sums of 32-bit hashes of (word, position) over tiles ---------------------------------------

TILE = 8192  # words
TILES = 128  # tiles of one call
SEED = 0x243F6A88
SEEDS = (SEED, ((SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
FACTORS, ROTATIONS = (0x27D4EB2D, 0x165667B1), (15, 13)
ONES = (1 << 64) - 1


def digest_gpu(arrays: Iterable[np.ndarray]) -> str:
    """Computes gpu_tensor_hash of a tensor with these arrays' bytes, one after the other."""
    data = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays])
    words = np.pad(data, (0, -len(data) % 4)).view(np.uint32)
    total = 0
    for start in range(0, len(words), TILE * TILES):
        chunk = np.zeros(TILE * TILES, np.uint32)
        part = words[start : start + TILE * TILES]
        chunk[: len(part)] = part
        high, low = jax.device_get(_tiles(chunk, np.uint32(start), np.uint32(len(words))))
        used = -(-len(part) // TILE)
        tiles = (high[:used].astype(np.uint64) << np.uint64(32)) | low[:used]
        total = (total + int(tiles.sum(dtype=np.uint64))) & ONES
    return f"{_splitmix(total):016x}"


@jax.jit
def _tiles(words: jax.Array, start: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Hashes tiles: returns uint32 [TILES] twice, for words uint32 [TILES * TILE] at `start` of `count`."""
    index = start + jnp.arange(TILE * TILES, dtype=jnp.uint32)
    hashes = []
    for seed, factor, rotation in zip(SEEDS, FACTORS, ROTATIONS):
        rotated = (index << rotation) | (index >> (32 - rotation))
        mixed = _mix(words ^ ((index * jnp.uint32(factor) + jnp.uint32(seed)) ^ rotated))
        sums = jnp.where(index < count, mixed, 0).reshape(TILES, TILE).sum(1, dtype=jnp.uint32)
        hashes.append(_mix(sums ^ (count * jnp.uint32(4))))
    return hashes[0], hashes[1]


def _mix(x: jax.Array) -> jax.Array:
    """Applies the finaliser of MurmurHash3, 32 bits."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _splitmix(x: int) -> int:
    """Applies the finaliser of SplitMix64."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & ONES
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & ONES
    return x ^ (x >> 31)
