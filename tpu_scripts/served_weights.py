"""The weights of a running sglang-jax model, replaced from a Hugging Face folder: all of them or none.

sglang-jax keeps its model's parameters as a flat list of arrays and passes that to the compiled forward pass.
Another list with the same shapes, dtypes and shardings is another policy, and nothing is compiled again.
`LEAVES` says which tensor of the checkpoint is which leaf. That table is checked before it is trusted. Its
first use reads the folder that the server has loaded and compares every leaf.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import ml_dtypes
import numpy as np
from safetensors import safe_open

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Tensor of the checkpoint -> path of the leaf, and whether it is transposed; the first match wins. The names
# are those of sgl_jax/srt/models/qwen2.py and qwen3.py.
LEAVES = (
    (r"(model\.embed_tokens|lm_head)\.weight", r"\1.embedding", False),
    (r"(.*norm)\.weight", r"\1.scale", False),
    (r"(.*_proj)\.weight", r"\1.weight", True),
    (r"(.*_proj\.bias)", r"\1", False),
)
PARAMETER = re.compile(r".*\.(weight|scale|embedding|bias)")  # other leaves (angle tables) are no weights
FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


class Runner(Protocol):
    """The part of sglang-jax that is needed here. `sglang_jax_server.SglangJax` implements it."""

    leaves: list[Any]  # of the model's state, in the tree's order; may be assigned

    def paths(self) -> list[str]:
        """The paths of the leaves, such as 'model.layers.0.self_attn.q_proj.weight'."""


class Entry(NamedTuple):
    """A tensor of the checkpoint and its leaf. repeats: how often the leaf holds each key-value head."""

    leaf: int
    shape: tuple[int, ...]
    transposed: bool
    repeats: int


class ServedWeights:
    """The weights that `runner` serves. Two updates at once are not safe: the caller must serialise them."""

    def __init__(self, runner: Runner, folder: str | Path, version: str = "default"):
        """folder: the one with which the server was started. Raises ValueError where it is not what is
        served."""
        self.runner, self.folder, self.version = runner, folder, version
        with _Folder(folder) as files:
            self.vocab_size = int(files.config["vocab_size"])
            self._head_dim = files.config.get("head_dim") or (
                files.config["hidden_size"] // files.config["num_attention_heads"]
            )
            self._tied = bool(files.config.get("tie_word_embeddings"))
            self._entries = self._match(files)
            for name, entry in self._entries.items():
                served = np.asarray(runner.leaves[entry.leaf])
                if not np.array_equal(served, self._as_leaf(files.read(name), entry, served.dtype)):
                    raise ValueError(
                        f"The leaf that sglang-jax serves for {name} is not the tensor in {folder}: this "
                        "version of sglang-jax stores its weights in another way, so updates would be wrong; "
                        "use the version named in docs/notes/tpu.md or correct LEAVES in served_weights.py."
                    )

    def read(self, folder: str | Path) -> list[jax.Array]:
        """Reads new leaves from `folder`, on the devices of the old ones, which stay in use until `replace`.

        Raises ValueError with every fault in one sentence. Faults are a tensor that is missing, unknown, of
        another shape or no float, and a damaged file.
        """
        with _Folder(folder) as files:
            self._check(files)
            leaves = list(self.runner.leaves)
            for name, entry in self._entries.items():
                old = leaves[entry.leaf]
                new = self._as_leaf(files.read(name), entry, old.dtype)
                leaves[entry.leaf] = jax.device_put(new, old.sharding)
        return jax.block_until_ready(leaves)

    def replace(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """Serves `leaves` from the next forward pass on. Returns the leaves that were served before."""
        old, self.runner.leaves = self.runner.leaves, leaves
        return old

    def checksums(self) -> dict[str, str]:
        """Maps tensor name -> SHA-256 of what is served, in the checkpoint's form and the served dtype."""
        return {
            name: hashlib.sha256(self._as_tensor(entry).tobytes()).hexdigest()
            for name, entry in sorted(self._entries.items())
        }

    def _match(self, files: _Folder) -> dict[str, Entry]:
        """Maps tensor name -> entry, for all tensors of the folder with which the server was started."""
        index = {path: i for i, path in enumerate(self.runner.paths())}
        entries, faults = {}, []
        for name, shape in files.shapes.items():
            rules = ((re.fullmatch(pattern, name), leaf, turn) for pattern, leaf, turn in LEAVES)
            path, transposed = next(((m.expand(leaf), turn) for m, leaf, turn in rules if m), (None, False))
            if name == HEAD and self._tied:
                continue
            if path not in index:
                faults.append(f"no leaf holds {name}")
                continue
            leaf_shape, expected = self.runner.leaves[index[path]].shape, shape[::-1] if transposed else shape
            repeats = leaf_shape[-1] // expected[-1] if re.search(r"\.[kv]_proj\.", name) else 1
            if leaf_shape != (*expected[:-1], expected[-1] * max(repeats, 1)):
                faults.append(f"{name} of shape {shape} has a leaf of shape {leaf_shape}")
            entries[name] = Entry(index[path], shape, transposed, repeats)
        held = {entry.leaf for entry in entries.values()}
        faults += [
            f"no tensor fills the leaf {path}"
            for path, i in index.items()
            if i not in held and PARAMETER.fullmatch(path)
        ]
        if faults:
            raise ValueError(
                f"{files.path} is not what this sglang-jax serves ({_some(faults)}), so its "
                "weights could not be updated; dense Qwen2, Qwen2.5 and Qwen3 models can be."
            )
        return entries

    def _check(self, files: _Folder) -> None:
        faults = [f"{name} is missing" for name in self._entries.keys() - files.shapes.keys()]
        for name, shape in files.shapes.items():
            entry = self._entries.get(name)
            if name == HEAD and self._tied:
                same = files.shapes.get(EMBEDDING) == shape
                if not same or not np.array_equal(files.read(HEAD), files.read(EMBEDDING)):
                    faults.append(f"{HEAD} is not {EMBEDDING}, which the served model uses for both")
            elif entry is None:
                faults.append(f"{name} is unknown")
            elif shape != entry.shape:
                faults.append(f"{name} has shape {shape} instead of {entry.shape}")
        if faults:
            raise ValueError(
                f"{files.path} does not fit the served model: {_some(sorted(faults))}; the old weights stay."
            )

    def _as_leaf(self, tensor: np.ndarray, entry: Entry, dtype: Any) -> np.ndarray:
        tensor = tensor.T if entry.transposed else tensor
        if entry.repeats > 1:  # more chips than key-value heads: sglang-jax gives each chip a copy of one
            heads = tensor.reshape(*tensor.shape[:-1], -1, self._head_dim)
            tensor = np.repeat(heads, entry.repeats, axis=-2).reshape(*tensor.shape[:-1], -1)
        return tensor.astype(dtype)

    def _as_tensor(self, entry: Entry) -> np.ndarray:
        leaf = np.asarray(self.runner.leaves[entry.leaf])
        if entry.repeats > 1:
            heads = leaf.reshape(*leaf.shape[:-1], -1, entry.repeats, self._head_dim)
            leaf = heads[..., 0, :].reshape(*leaf.shape[:-1], -1)
        return np.ascontiguousarray(leaf.T if entry.transposed else leaf)


class _Folder:
    """A Hugging Face folder, open for reading. Raises ValueError where it is none.

    shapes: tensor name -> shape.
    """

    def __init__(self, path: str | Path):
        self.path, self.shapes, self._files = Path(path), {}, {}
        self.config = self._json(CONFIG)
        single = (self.path / WEIGHTS).is_file()
        files = [WEIGHTS] if single else sorted(set(self._json(INDEX).get("weight_map", {}).values()))
        for file in files:
            if Path(file).name != file:
                raise ValueError(f"{self.path / INDEX} names {file!r}, which is no file of that folder.")
            try:
                handle = safe_open(self.path / file, framework="np")
                slices = {name: handle.get_slice(name) for name in handle.keys()}
            except Exception as error:  # safetensors raises its own type, or OSError
                path = self.path / file
                raise ValueError(f"{path} cannot be read ({error}); write the folder again.") from error
            for name, tensor in slices.items():
                if tensor.get_dtype() not in FLOATS:
                    raise ValueError(
                        f"{name} in {self.path} has dtype {tensor.get_dtype()}; write one of "
                        f"{', '.join(FLOATS)}."
                    )
                self.shapes[name], self._files[name] = tuple(tensor.get_shape()), handle

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, *error) -> None:
        self._files.clear()

    def read(self, name: str) -> np.ndarray:
        tensor = self._files[name].get_tensor(name)
        return tensor.view(ml_dtypes.bfloat16) if tensor.dtype.kind == "V" else tensor

    def _json(self, file: str) -> dict[str, Any]:
        try:
            content = json.loads((self.path / file).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.path / file} cannot be read ({error}); pass a Hugging Face folder with "
                "config.json and safetensors that this server can see."
            ) from error
        if not isinstance(content, dict):
            raise ValueError(f"{self.path / file} holds no JSON object; write the folder again.")
        return content


def _some(faults: list[str], most: int = 8) -> str:
    rest = f", and {len(faults) - most} more" if len(faults) > most else ""
    return "; ".join(faults[:most]) + rest
