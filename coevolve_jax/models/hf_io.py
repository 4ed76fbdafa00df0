"""Hugging Face checkpoints: safetensors to parameters and back.

The modules of `qwen` bear the checkpoint's names, so one rule maps a parameter to its tensor: linear
kernels are transposed, and what lies under layers/ is the stack of one tensor per layer.
"""
from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from coevolve_jax import sharding
from coevolve_jax.models.qwen import Qwen, QwenConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}


def load(path: str | os.PathLike, dtype: Any = jnp.float32, mesh: jax.sharding.Mesh | None = None):
    """Reads a Hugging Face folder: config.json and safetensors, in one file or several with an index.

    Returns (config, params); params in `dtype`, each device reading only its own shard where a mesh is given.
    Raises ValueError where the folder is no model or the architecture is not supported, and one that
    lists every tensor that is missing, unknown or of another shape than config.json says.
    """
    path = Path(path)
    config = load_config(path)
    abstract = abstract_params(config, dtype)
    shardings = sharding.param_shardings(mesh, abstract) if mesh else None
    with contextlib.ExitStack() as stack:
        tensors = _open(path, stack)
        _check_tensors(path, config, abstract, tensors)

        def read(key_path, leaf, place=None):
            part = _reader(config, _names(key_path), tensors, leaf)
            if place is None:
                return jnp.asarray(part((slice(None),) * leaf.ndim))
            return jax.make_array_from_callback(leaf.shape, place, part)

        trees = (abstract,) if shardings is None else (abstract, shardings)
        return config, jax.tree_util.tree_map_with_path(read, *trees)


def load_config(path: str | os.PathLike) -> QwenConfig:
    """The architecture that a folder's config.json describes; ValueError where there is none."""
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(f"{path} is not a Hugging Face model folder, for it has no config.json; pass a "
                         "folder with config.json and *.safetensors.")
    try:
        data = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON ({error}); restore it from the checkpoint.") from error
    return QwenConfig.from_hf(data)


def abstract_params(config: QwenConfig, dtype: Any = jnp.float32) -> Any:
    """The parameter tree of `config` as shapes, without memory."""
    model = Qwen(config, param_dtype=dtype)
    return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]


def save(path: str | os.PathLike, config: QwenConfig, params: Any, dtype: Any = None) -> None:
    """Writes config.json and model.safetensors, which transformers and SGLang load.

    dtype: of the tensors in the file; None keeps that of `params`. Everything is written to a temporary
    folder beside `path` and renamed, so that a reader sees either nothing or a whole model. In a folder that
    exists already the two files are replaced, weights first, and the others (a tokenizer) are kept.
    """
    path = Path(path)
    dtype = np.dtype(dtype or jax.tree.leaves(params)[0].dtype)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        # An array of the file must be contiguous: safetensors writes memory as it lies.
        tensors = {name: np.ascontiguousarray(t) for name, t in _tensors(config, params, dtype)}
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
        text = json.dumps({**config.to_hf(), "dtype": dtype.name, "torch_dtype": dtype.name}, indent=2)
        (temporary / "config.json").write_text(text + "\n")
        if path.exists():
            _replace(temporary, path)
        else:
            temporary.chmod(0o755)
            temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_tokenizer(config: QwenConfig, tokenizer: Any) -> None:
    """Raises ValueError where the tokenizer can produce ids that the model has no embedding for."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= config.vocab_size:
        raise ValueError(f"The tokenizer holds token id {largest}, but the model's vocab_size is "
                         f"{config.vocab_size}; use the tokenizer that belongs to this model.")


def _replace(source: Path, target: Path) -> None:
    os.replace(source / WEIGHTS, target / WEIGHTS)
    os.replace(source / "config.json", target / "config.json")
    for shard in (*target.glob("model-*-of-*.safetensors"), target / INDEX):
        shard.unlink(missing_ok=True)


def _names(key_path) -> tuple[str, ...]:
    return tuple(key.key for key in key_path)


def _hf_names(config: QwenConfig, names: tuple[str, ...]) -> np.ndarray:
    """The checkpoint's names of one parameter, in the shape of its stacked axes: [] outside of layers/,
    [layers that have it] or, of experts, [layers that have it, experts].

    ('layers', 'mlp', 'experts', 'up_proj', 'kernel') -> 'model.layers.{i}.mlp.experts.{e}.up_proj.weight'.
    """
    *modules, leaf = names
    if modules[0] == "lm_head":
        return np.array("lm_head.weight")
    path = ".".join(("model", *modules, LEAVES[leaf]))
    if modules[0] != "layers":
        return np.array(path)
    layers = range(config.num_hidden_layers)
    if modules[1] == "mlp":
        layers = config.sparse_layers if modules[2] in ("gate", "experts") else config.dense_layers
    paths = [path.replace(".layers.", f".layers.{i}.") for i in layers]
    if modules[2:3] != ["experts"]:
        return np.array(paths)
    experts = range(config.num_experts)
    return np.array([[path.replace(".experts.", f".experts.{e}.") for e in experts] for path in paths])


def _hf_shape(config: QwenConfig, names: tuple[str, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    shape = shape[_hf_names(config, names).ndim :]
    return shape[::-1] if names[-1] == "kernel" else shape


def _open(path: Path, stack: contextlib.ExitStack) -> dict[str, Callable]:
    """Tensor name -> safetensors slice, read only where it is indexed."""
    if (path / WEIGHTS).is_file():
        files = [WEIGHTS]
    elif (path / INDEX).is_file():
        files = sorted(set(json.loads((path / INDEX).read_text())["weight_map"].values()))
    else:
        raise ValueError(f"{path} holds neither {WEIGHTS} nor {INDEX}; pass a folder with safetensors.")
    tensors = {}
    for file in files:
        try:
            handle = stack.enter_context(safe_open(path / file, framework="np"))
        except Exception as error:  # safetensors raises its own type, or OSError, on a damaged or absent file
            raise ValueError(f"{path / file} cannot be read ({error}); restore the checkpoint.") from error
        tensors |= {name: handle.get_slice(name) for name in handle.keys()}
    return tensors


def _check_tensors(path: Path, config: QwenConfig, abstract: Any, tensors: dict) -> None:
    expected = {}
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(abstract):
        names = _names(key_path)
        expected |= dict.fromkeys(_hf_names(config, names).flat, _hf_shape(config, names, leaf.shape))
    # A tied model's file may hold the embedding a second time under this name; transformers ignores it too.
    surplus = {"lm_head.weight"} if config.tie_word_embeddings else set()
    faults = [f"{name} is missing" for name in expected if name not in tensors]
    faults += [f"{name} is unknown" for name in tensors if name not in expected and name not in surplus]
    for name in expected.keys() & tensors.keys():
        if (shape := tuple(tensors[name].get_shape())) != expected[name]:
            faults.append(f"{name} has shape {shape} instead of {expected[name]}")
    if faults:
        raise ValueError(f"The weights in {path} do not fit its config.json: {'; '.join(sorted(faults))}.")


def _reader(config: QwenConfig, names: tuple[str, ...], tensors: dict, leaf: jax.ShapeDtypeStruct):
    """A function from an index into the parameter to that part of it, read from the file."""
    hf_names = _hf_names(config, names)
    transposed = names[-1] == "kernel"

    def part(index: tuple[slice, ...]) -> np.ndarray:
        chosen, inner = hf_names[index[: hf_names.ndim]], index[hf_names.ndim :]
        parts = [tensors[n][inner[::-1]].T if transposed else tensors[n][inner] for n in chosen.flat]
        return np.asarray(np.stack(parts).reshape(*chosen.shape, *parts[0].shape), leaf.dtype)

    return part


def _tensors(config: QwenConfig, params: Any, dtype: np.dtype):
    """(name in the checkpoint, array) for every tensor of `params`."""
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(flax.core.unfreeze(params)):
        names = _names(key_path)
        hf_names = _hf_names(config, names)
        leaf = np.asarray(leaf).astype(dtype).reshape(hf_names.size, *leaf.shape[hf_names.ndim :])
        for name, array in zip(hf_names.flat, leaf, strict=True):
            yield str(name), array.T if names[-1] == "kernel" else array
