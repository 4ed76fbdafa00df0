"""Hugging Face checkpoints: safetensors to parameters and back, one tensor at a time.

The modules of `decoder` bear the checkpoint's names, so a table of rules maps a parameter to its tensors.
Linear kernels are transposed. A parameter under layers/ stacks one tensor per layer, or per layer and expert.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import itertools
import json
import os
import re
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from coevolve_jax import shipped
from coevolve_jax.distributed import sharding
from coevolve_jax.models.decoder import Decoder, ModelConfig

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = "model-*-of-*.safetensors"
BLOCK = 2**30  # most bytes fetched from the devices at once, unless one tensor has more
WRITERS = 4  # files written at once
STORED = ("float32", "bfloat16", "float16")  # dtypes of weights in files
COMPUTED = ".rotary_emb.inv_freq"  # the end of names in old folders, for what follows from config.json
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

# Parameter path -> tensor; the first match wins. The names in braces run over the parameter's leading axes:
# all layers, those with experts or those without, and the experts.
NAMES = (
    (r"lm_head\.kernel", HEAD),
    (r"layers\.mlp\.experts\.(\w+)\.kernel", r"model.layers.{sparse}.mlp.experts.{expert}.\1.weight"),
    (r"layers\.mlp\.gate\.kernel", r"model.layers.{sparse}.mlp.gate.weight"),
    (r"layers\.mlp\.(\w+)\.kernel", r"model.layers.{dense}.mlp.\1.weight"),
    (r"layers\.(.*)\.(?:kernel|scale)", r"model.layers.{layer}.\1.weight"),
    (r"layers\.(.*)\.bias", r"model.layers.{layer}.\1.bias"),
    (r"(.*)\.(?:embedding|scale)", r"model.\1.weight"),
)


@dataclasses.dataclass(frozen=True)
class Deferred:
    """A parameter for `save` that is made when its tensors are written, and is let go after them."""

    shape: tuple[int, ...]
    dtype: Any
    make: Callable[[], jax.Array]


class Entry(NamedTuple):
    """A parameter and its tensors.

    Attributes:
      path: such as "layers.mlp.up_proj.kernel".
      leaf: array, ShapeDtypeStruct or Deferred.
      names: the tensors' names, in an array of the shape of the parameter's leading axes.
    """

    path: str
    leaf: Any
    names: np.ndarray

    @property
    def transposed(self) -> bool:
        return self.path.endswith(".kernel")

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each of its tensors in the file."""
        shape = tuple(self.leaf.shape[self.names.ndim :])
        return shape[::-1] if self.transposed else shape


def load(path: str | os.PathLike, dtype: Any = jnp.float32, mesh: jax.sharding.Mesh | None = None):
    """Reads a Hugging Face folder: config.json and safetensors, in one file or several with an index.

    Returns (config, params). params are in `dtype`, and lie by distributed/sharding.py's rules where a mesh
    is given. Each process reads only what its devices hold. Host memory holds at most two tensors besides the
    parameters.

    Raises:
      ValueError: the folder is no model, or the architecture is not supported. One error lists every tensor
        that is missing, unknown or of another shape than config.json says.
    """
    config = load_config(path)
    path, abstract, tied = shipped.folder(path), abstract_params(config, dtype), config.tie_word_embeddings
    entries = entries_of(config, abstract)
    shardings = jax.tree.leaves(sharding.param_shardings(mesh, abstract)) if mesh else [None] * len(entries)
    with contextlib.ExitStack() as stack:
        tensors = open_tensors(path, stack)
        # A tied model's file may repeat the embedding under the head's name, or have it only there.
        if tied and EMBEDDING not in tensors and HEAD in tensors:
            tensors[EMBEDDING] = tensors.pop(HEAD)
        _check_tensors(path, entries, tensors, tied)
        leaves = [_stream(entry, tensors, where) for entry, where in zip(entries, shardings)]
    return config, jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def load_config(path: str | os.PathLike) -> ModelConfig:
    """The architecture that a folder's config.json describes. Raises ValueError where there is none."""
    return ModelConfig.from_hf(_read_config(path))


def dtype_of(path: str | os.PathLike) -> str:
    """The dtype of the weights as a folder's config.json tells it, float32 where it names none of STORED.

    Raises ValueError where there is no config.json.
    """
    data = _read_config(path)
    told = data.get("dtype") or data.get("torch_dtype")
    return told if told in STORED else "float32"


def _read_config(path: str | os.PathLike) -> dict[str, Any]:
    file = shipped.folder(path) / "config.json"
    if not file.is_file():
        raise ValueError(
            f"{path} is not a Hugging Face model folder, for it has no config.json; pass a "
            f"folder with config.json and *.safetensors{shipped.made_by(path)}."
        )
    try:
        return json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not valid JSON ({error}); restore it from the checkpoint.") from error


def abstract_params(config: ModelConfig, dtype: Any = jnp.float32) -> Any:
    """The parameter tree of `config` as shapes, without memory."""
    shapes = _abstract_params(config, jnp.dtype(dtype))
    return jax.tree.map(lambda shape: shape, shapes)  # a tree of the caller's own


@functools.lru_cache(64)  # a plan tries many meshes for one model
def _abstract_params(config: ModelConfig, dtype: Any) -> Any:
    model = Decoder(config, param_dtype=dtype)
    return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]


def save(
    path: str | os.PathLike,
    config: ModelConfig,
    params: Any,
    dtype: Any = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes config.json and the weights, which transformers and SGLang load.

    Everything goes to a temporary folder beside `path`, which is then renamed. So a reader sees either
    nothing or a whole model. In a folder that exists, the model's files are replaced and the others (a
    tokenizer) are kept. Several files are replaced while the folder has no index.

    If parameters lie on several processes, all of them call this and the first one writes. Host memory holds
    at most WRITERS + 1 files, and a device at most BLOCK bytes of them.

    Args:
      params: arrays, some of which may be Deferred.
      dtype: dtype of the tensors in the file. None keeps that of `params`.
      max_shard_bytes: larger weights are split over files of at most this size, with an index. A larger
        tensor has a file of its own.
    """
    path = Path(path)
    leaves = jax.tree.leaves(params)
    dtype = np.dtype(dtype or leaves[0].dtype)
    shared = any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in leaves)
    writes = not shared or jax.process_index() == 0
    with (
        folder_beside(path) if writes else contextlib.nullcontext() as temporary,
        ThreadPoolExecutor(WRITERS) as pool,
    ):
        weight_map, total = {}, 0
        writing: deque[Future] = deque()
        files = split(entries_of(config, flax.core.unfreeze(params)), dtype, max_shard_bytes)
        for number, file in enumerate(files, start=1):
            tensors = dict(_fetch(file, dtype))
            name = WEIGHTS if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
            weight_map |= dict.fromkeys(tensors, name)
            total += sum(t.nbytes for t in tensors.values())
            if temporary:
                # Wait for the oldest file: this bounds the files in host memory.
                if len(writing) == WRITERS:
                    writing.popleft().result()
                writing.append(pool.submit(save_tensors, tensors, temporary / name))
            del tensors
        for file in writing:
            file.result()
        if temporary:
            if len(files) > 1:
                write_json(temporary / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
            write_json(
                temporary / "config.json", {**config.to_hf(), "dtype": dtype.name, "torch_dtype": dtype.name}
            )
            _replace(temporary, path) if path.exists() else temporary.rename(path)
    if shared:
        multihost_utils.sync_global_devices("model is saved")


def check_tokenizer(config: ModelConfig, tokenizer: Any) -> None:
    """Raises ValueError where the tokenizer can produce ids for which the model has no embedding."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= config.vocab_size:
        raise ValueError(
            f"The tokenizer holds token id {largest}, but the model's vocab_size is "
            f"{config.vocab_size}; use the tokenizer that belongs to this model."
        )


def entries_of(config: ModelConfig, params: Any) -> list[Entry]:
    """Lists the parameters in the order of the tree's leaves."""
    numbers = {
        "layer": range(config.num_hidden_layers),
        "dense": config.dense_layers,
        "sparse": config.sparse_layers,
        "expert": range(config.num_experts or 0),
    }
    entries = []
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(params):
        path = jax.tree_util.keystr(key_path, simple=True, separator=".")
        matches = ((re.fullmatch(pattern, path), name) for pattern, name in NAMES)
        template = next((match.expand(name) for match, name in matches if match), None)
        if template is None:
            raise ValueError(
                f"No rule of coevolve_jax/models/hf_io.py names parameter {path!r}; add one to NAMES."
            )
        axes = re.findall(r"\{(\w+)\}", template)
        names = np.empty(leaf.shape[: len(axes)], object)
        for index in np.ndindex(names.shape):
            names[index] = template.format(**{axis: numbers[axis][i] for axis, i in zip(axes, index)})
        entries.append(Entry(path, leaf, names))
    return entries


def rows(entry: Entry, index: tuple[int, ...], count: int, dtype: np.dtype) -> jax.Array | np.ndarray:
    """Slices `count` tensors from `index` on, along the last leading axis, in the form of the file.

    Returns [count, *entry.tensor_shape] in `dtype`. One program slices and casts where the parameter lies, so
    that nothing else travels.
    """
    if isinstance(entry.leaf, jax.Array):
        return _rows(entry.leaf, index, count, entry.transposed, dtype)
    block = entry.leaf[index[:-1]][index[-1] : index[-1] + count] if index else entry.leaf[None]
    return np.ascontiguousarray(block.swapaxes(-1, -2) if entry.transposed else block, dtype)


# ---- Reading -------------------------------------------------------------------------------------------


def open_tensors(path: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Maps tensor name -> safetensors slice, which reads only what is indexed."""
    if (path / WEIGHTS).is_file():
        files = [path / WEIGHTS]
    elif (index := path / INDEX).is_file():
        try:
            files = sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(
                f"{index} is no index with a weight_map ({error!r}); restore the checkpoint."
            ) from error
    else:
        raise ValueError(f"{path} holds neither {WEIGHTS} nor {INDEX}; pass a folder with safetensors.")
    tensors = {}
    for file in files:
        tensors |= open_file(file, stack)
    return tensors


def open_file(file: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Maps the names of one file's tensors to their slices, without what is COMPUTED.

    Raises ValueError where it cannot be read.
    """
    try:
        handle = stack.enter_context(safe_open(file, framework="np"))
    except Exception as error:  # safetensors raises its own type, or OSError, on a damaged or absent file
        raise ValueError(f"{file} cannot be read ({error}); restore the checkpoint.") from error
    return {name: handle.get_slice(name) for name in handle.keys() if not name.endswith(COMPUTED)}


def _check_tensors(path: Path, entries: list[Entry], tensors: Mapping, tied: bool) -> None:
    expected = {name: entry.tensor_shape for entry in entries for name in entry.names.flat}
    shapes = {name: tuple(tensor.get_shape()) for name, tensor in tensors.items()}
    surplus = shapes.keys() - expected.keys()
    faults = [f"{name} is missing" for name in expected.keys() - shapes.keys()]
    for name in expected.keys() & shapes.keys():
        if shapes[name] != expected[name]:
            faults.append(f"{name} has shape {shapes[name]} instead of {expected[name]}")
    if tied and HEAD in surplus:
        surplus.remove(HEAD)
        if shapes.get(EMBEDDING) != shapes[HEAD] or not _equal(tensors[EMBEDDING], tensors[HEAD]):
            faults.append(f"{HEAD} is not {EMBEDDING}, though tie_word_embeddings says so (set it to false)")
    faults += [f"{name} is unknown" for name in surplus]
    if faults:
        raise ValueError(f"The weights in {path} do not fit its config.json: {'; '.join(sorted(faults))}.")


def _equal(a: Any, b: Any, rows: int = 4096) -> bool:
    """Compares the values of two tensors of one shape, some rows at a time."""
    size = a.get_shape()[0]
    parts = [slice(start, min(start + rows, size)) for start in range(0, size, rows)]
    return all(np.array_equal(a[part], b[part]) for part in parts)


def _stream(entry: Entry, tensors: Mapping, where: jax.sharding.Sharding | None) -> jax.Array:
    """Reads the parameter of `entry` from the file into the devices' memory, tensor by tensor.

    A stack of layers is never in host memory. Each device's part begins as zeros on the device. The tensors,
    or the device's part of them, are then written into it in place.
    """
    leaf = entry.leaf
    if where is None:
        return _fill(entry, tensors, [slice(0, n) for n in leaf.shape], None)
    holders: dict[tuple, list] = {}  # devices by the part that they hold; replicas hold the same one
    for device, index in where.addressable_devices_indices_map(leaf.shape).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index or (), leaf.shape))
        holders.setdefault(bounds, []).append(device)
    parts = []
    for bounds, devices in holders.items():
        first = _fill(entry, tensors, [slice(*b) for b in bounds], devices[0])
        parts += [first, *(jax.device_put(first, device) for device in devices[1:])]
    return jax.make_array_from_single_device_arrays(leaf.shape, where, parts)


def _fill(entry: Entry, tensors: Mapping, index: list[slice], device: Any) -> jax.Array:
    """Reads the part `index` of a parameter onto one device."""
    depth = entry.names.ndim
    part = jnp.zeros([s.stop - s.start for s in index], entry.leaf.dtype, device=device)
    inner = tuple(index[depth:][::-1] if entry.transposed else index[depth:])
    for place in np.ndindex(part.shape[:depth]):
        name = entry.names[tuple(s.start + i for s, i in zip(index, place))]
        part = _write(part, tensors[name][inner], place, entry.transposed)
        part.block_until_ready()  # else reading runs ahead of writing, and host memory fills
    return part


@functools.partial(jax.jit, donate_argnums=0, static_argnames="transposed")
def _write(part: jax.Array, tensor: jax.Array, place: tuple, transposed: bool) -> jax.Array:
    """Sets part[place] = tensor in the memory of `part`, which is donated."""
    tensor = (tensor.T if transposed else tensor).astype(part.dtype)
    start = (*place, *[0] * tensor.ndim)
    return jax.lax.dynamic_update_slice(part, tensor.reshape((1,) * len(place) + tensor.shape), start)


# ---- Writing -------------------------------------------------------------------------------------------


def split(entries: list[Entry], dtype: np.dtype, max_bytes: int) -> list[dict[str, tuple]]:
    """Divides the tensors into files, in the tree's order: tensor name -> (parameter, index into it)."""
    files, room = [{}], max_bytes
    for entry in entries:
        size = int(np.prod(entry.tensor_shape)) * dtype.itemsize
        for index in np.ndindex(entry.names.shape):
            if size > room and files[-1]:
                files.append({})
                room = max_bytes
            files[-1][entry.names[index]] = (entry, index)
            room -= size
    return files


def blocks(file: Mapping[str, tuple], dtype: np.dtype) -> Iterator[tuple[Entry, tuple[int, ...], list[str]]]:
    """Yields what to fetch from the devices at once, for one of the files of `split`.

    Each block is (parameter, index of the first tensor, names of the tensors). Its tensors follow each other
    along the last of the parameter's leading axes.
    """
    stack_of = lambda item: (item[1][0].path, item[1][1][:-1])
    for _, run in itertools.groupby(file.items(), key=stack_of):
        names, places = zip(*run)
        entry, first = places[0]
        most = max(1, BLOCK // (int(np.prod(entry.tensor_shape)) * dtype.itemsize))
        for start in range(0, len(names), most):
            index = (*first[:-1], first[-1] + start) if first else ()
            yield entry, index, list(names[start : start + most])


def _fetch(file: Mapping[str, tuple], dtype: np.dtype) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of a file by name, as views of the blocks that they came in."""
    made = None
    for entry, index, names in blocks(file, dtype):
        if isinstance(entry.leaf, Deferred):
            if made is None or made.path != entry.path:
                made = None  # let go before the next one is made
                made = entry._replace(leaf=entry.leaf.make())
            entry = made
        yield from zip(names, _to_host(entry, index, len(names), dtype))


def _to_host(entry: Entry, index: tuple[int, ...], count: int, dtype: np.dtype) -> np.ndarray:
    """Fetches `rows` to the host. This is a collective where the parameter lies on several processes."""
    block = rows(entry, index, count, dtype)
    if isinstance(block, jax.Array) and not block.is_fully_addressable:
        block = multihost_utils.process_allgather(block, tiled=True)
    return np.asarray(block)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _rows(leaf: jax.Array, index: tuple, count: int, transposed: bool, dtype: np.dtype) -> jax.Array:
    inner = leaf.shape[len(index) :]
    sizes = (*[1] * (len(index) - 1), count, *inner) if index else inner
    block = jax.lax.dynamic_slice(leaf, (*index, *[0] * len(inner)), sizes).reshape(count, *inner)
    return (block.swapaxes(-1, -2) if transposed else block).astype(dtype)


@contextlib.contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """Makes a temporary folder in the folder of `path`, and deletes it at the end if it is still there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    temporary.chmod(0o755)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def discard_halves(path: Path) -> None:
    """Deletes what killed processes left of `folder_beside(path)`. No living one may have such a folder."""
    for left in path.parent.glob(f".{glob.escape(path.name)}-????????"):
        shutil.rmtree(left, ignore_errors=True)


def save_tensors(tensors: dict[str, np.ndarray], file: Path, **metadata: str) -> None:
    """Writes a new file of safetensors, readable by whom the umask lets read.

    save_file alone would make it private to its owner. metadata: text for the file's header.

    Raises OSError where it cannot be written.
    """
    file.touch()
    mode = file.stat().st_mode & 0o777
    try:
        save_file(tensors, file, metadata={"format": "pt", **metadata})
    except SafetensorError as error:
        raise OSError(f"{file} cannot be written: {error}") from error
    file.chmod(mode)


def write_json(file: Path, content: Mapping) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")


def _replace(source: Path, target: Path) -> None:
    """Moves a model's files into a folder that may hold another model.

    A single file of weights is exchanged in one step. Several cannot be: the old index and weights go first,
    and the new index comes last. So no reader takes a mixture of two models for one.
    """
    new = {file.name for file in source.iterdir()}
    old = [target / WEIGHTS, target / INDEX, *target.glob(SHARDS)]
    if INDEX in new:
        for file in old:
            file.unlink(missing_ok=True)
    for name in sorted(new - {INDEX, "config.json"}) + ["config.json"] + sorted(new & {INDEX}):
        os.replace(source / name, target / name)
    for file in old:
        if file.name not in new:
            file.unlink(missing_ok=True)
