"""The mesh, where each array lies on it, and what each process holds. The only file that names mesh axes.

  data: rows of the batch.
  fsdp: rows of the batch, one axis of every matrix, and the number of experts.
  expert: the same, but its part of the experts stays in place and tokens travel there.
  context: the tokens of a row, and matrices as fsdp does.
  tensor: heads, the hidden layer of the MLP, the vocabulary.

A parameter whose axis does not divide by its mesh axis is refused. A silent replica would cost the memory
that the mesh was chosen to save. Heads may be cut: only the product heads * head_dim must divide.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Tensor last: its devices communicate most, so they are neighbours.
AXES = ("data", "fsdp", "expert", "context", "tensor")
ROWS = ("data", "fsdp", "expert")  # split the rows of a batch
CONTEXT = "context"  # splits each row
PARTS = (*ROWS, CONTEXT)  # split the parts of rows
MATRICES = ("fsdp", "expert", CONTEXT)  # split one axis of a matrix; tensor splits the other
EXPERTS = ("expert", "fsdp", CONTEXT)  # split the number of experts

# Parameter path -> spec; the first match wins. Parameters under layers/ have a leading layer axis. Those of
# experts have a second one. They are gathered along that, so no compiler has to transpose them.
RULES = (
    (r"embed_tokens/embedding", P("tensor", MATRICES)),
    (r"lm_head/kernel", P(MATRICES, "tensor")),
    (r"layers/.*/experts/(gate|up)_proj/kernel", P(None, EXPERTS, None, "tensor")),
    (r"layers/.*/experts/down_proj/kernel", P(None, EXPERTS, "tensor")),
    (r"layers/.*/(q|k|v|gate|up)_proj/kernel", P(None, MATRICES, "tensor")),
    (r"layers/.*/(q|k|v|gate|up)_proj/bias", P(None, "tensor")),
    (r"layers/.*/(o|down)_proj/kernel", P(None, "tensor", MATRICES)),
    (r".*/scale|.*/(o|down)_proj/bias|layers/mlp/gate/kernel", P()),
)


# Seconds without a sign of life after which a process counts as dead and the others are ended. A process
# that has ended waits as long for the others. Accelerators should not idle for long, and a live migration of
# a host takes less. (JAX's own values are 100 and 300.)
PATIENCE = 60


def start_processes(spec: str) -> None:
    """Joins this process to the others of a run. Call it before any other use of JAX.

    spec: "auto" where the cluster tells each process its place (TPU pods, Slurm, Kubernetes, Open MPI).
    Otherwise "HOST:PORT,PROCESSES,INDEX" with the address of process 0. Raises ValueError for anything else.
    """
    match = re.fullmatch(r"([^,]+:\d+),(\d+),(\d+)", spec)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # lets CPU devices reach other processes
    jax.config.update("jax_enable_preemption_service", False)  # preemption.py handles SIGTERM
    initialize = partial(
        jax.distributed.initialize, heartbeat_timeout_seconds=PATIENCE, shutdown_timeout_seconds=PATIENCE
    )
    if spec == "auto":
        initialize()
    elif match and int(match[3]) < int(match[2]):
        initialize(match[1], int(match[2]), int(match[3]))
    else:
        raise ValueError(
            f"{spec!r} names no process's place in a run: use 'auto' or "
            "HOST:PORT,PROCESSES,INDEX with an index below PROCESSES: 10.0.0.1:1234,2,0."
        )


def make_mesh(
    data: int = 1,
    fsdp: int = 1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    *,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Makes a mesh over the first data * fsdp * expert * context * tensor devices.

    devices: by default JAX's. Raises ValueError where there are fewer, or where they are of several TPU
    slices.
    """
    shape = (data, fsdp, expert, context, tensor)
    devices = jax.devices() if devices is None else devices
    if min(shape) < 1 or math.prod(shape) > len(devices):
        sizes = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, shape))
        raise ValueError(
            f"A mesh of {sizes} does not fit {len(devices)} device(s); choose sizes of at least "
            "1 whose product is at most that."
        )
    slices = {d.slice_index for d in devices if d.platform == "tpu" and hasattr(d, "slice_index")}
    if len(slices) > 1:
        raise ValueError(
            f"These {len(devices)} chips are of {len(slices)} TPU slices, and a run takes one: start it on "
            "one slice's hosts."
        )
    # Not jax.make_mesh: it refuses GPUs and CPUs of several hosts, and a mesh axis that is part of an axis of
    # a TPU's torus.
    grid = mesh_utils.create_device_mesh(shape, devices[: math.prod(shape)], allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def param_shardings(mesh: Mesh, abstract_params: Any) -> Any:
    """A NamedSharding for each parameter of a tree. Scalars are replicated.

    The tree may hold several trees of parameters, as an optimiser's state does. Raises ValueError for a
    parameter that no rule names or whose shape the mesh does not divide.
    """
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _sharding(mesh, name(path), leaf.shape), abstract_params
    )


def _sharding(mesh: Mesh, path: str, shape: tuple[int, ...]) -> NamedSharding:
    if not shape:
        return replicated(mesh)
    spec = next((spec for pattern, spec in RULES if re.search(rf"(^|/)({pattern})$", path)), None)
    if spec is None:
        raise ValueError(
            f"No rule of coevolve_jax/distributed/sharding.py matches parameter {path!r}; add one to RULES."
        )
    for size, axes in zip(shape, spec):
        axes = (axes,) if isinstance(axes, str) else axes or ()
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if size % parts:
            raise ValueError(
                f"Parameter {path} of shape {shape} does not divide by the mesh's "
                f"{' * '.join(axis for axis in axes if mesh.shape[axis] > 1)} axis "
                f"of {parts}; choose a size of that axis that divides {size}."
            )
    return NamedSharding(mesh, spec)


def batch_sharding(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """For arrays whose `axis` is rows and whose next axis is their tokens. All other axes are whole."""
    return NamedSharding(mesh, P(*[None] * axis, ROWS, CONTEXT))


def part_sharding(mesh: Mesh) -> NamedSharding:
    """For arrays whose first axis is parts of rows (`models/context_parallel.py`) or their tokens."""
    return NamedSharding(mesh, P(PARTS))


def head_sharding(mesh: Mesh) -> NamedSharding:
    """For queries, keys and values [parts of rows, length, heads, head_dim]: heads over tensor."""
    return NamedSharding(mesh, P(PARTS, None, "tensor", None))


# How arrays lie while tokens are sampled. Weights stay where the learner has them, and activations, which are
# small then, move. Each device computes its own weights' part of a product (arXiv 2211.05102, section 3.2.2,
# 2D weight-stationary). Only the cache is large: it lies on all devices, by rows and heads.
DECODED_ROWS = ("data", *EXPERTS)
DECODED = {
    "stream": P("data", MATRICES),  # [tokens, hidden size]
    "heads": P(DECODED_ROWS, None, "tensor"),  # [rows, T, heads, head_dim], against the cache
    "features": P("data", None, "tensor"),  # the same, against the weights
    "cache": P(DECODED_ROWS, "tensor"),  # keys and values [rows, heads, ...]
    "pages": P("tensor", DECODED_ROWS),  # keys and values in pages [heads, pages, ...]
    "vocabulary": P("data", "tensor"),  # logits [rows, vocabulary], as a product with the weights
    "rows": P(DECODED_ROWS),  # [rows, ...], such as the logits that tokens are sampled from
}


def place_decoded(mesh: Mesh | None, kind: str, x: jax.Array) -> jax.Array:
    """Places x, inside a program, where arrays of that kind of DECODED lie during sampling."""
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, DECODED[kind]))


def place_everywhere(mesh: Mesh | None, tree: Any) -> Any:
    """Places the tree's arrays, inside a program, whole on every device, so each process can read them."""
    return tree if mesh is None else jax.lax.with_sharding_constraint(tree, replicated(mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    """For arrays that every device holds whole (scalars, keys)."""
    return NamedSharding(mesh, P())


def in_host_memory(shardings: Any, abstract: Any) -> Any:
    """Puts all arrays of the tree but scalars in pinned host memory, which devices read by themselves.

    Returns the shardings for that. abstract: the shapes of the tree.
    """
    moved = lambda s, x: s.with_memory_kind("pinned_host") if x.ndim else s
    return jax.tree.map(moved, shardings, abstract)


def check_host_memory(mesh: Mesh) -> None:
    """Raises ValueError where the devices cannot hold arrays in pinned host memory."""
    kinds = sorted(memory.kind for memory in mesh.local_devices[0].addressable_memories())
    if "pinned_host" not in kinds:
        raise ValueError(
            f"config.learner.optimizer_offload is True, and devices of the platform {platform(mesh)} have no "
            f"pinned host memory (they have {', '.join(kinds) or 'none that JAX names'}): set it to False."
        )


def platform(mesh: Mesh) -> str:
    """The platform of the mesh's devices, as JAX names it: cpu, gpu or tpu."""
    return mesh.devices.flat[0].platform


def device_memory(mesh: Mesh) -> int | None:
    """Bytes that JAX may take of each device. None where that is not known, as on CPUs."""
    return (mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")


def row_parts(mesh: Mesh | AbstractMesh) -> int:
    """The number of parts into which the rows of a batch are split."""
    return math.prod(mesh.shape[name] for name in ROWS)


def context_parts(mesh: Mesh | AbstractMesh) -> int:
    """The number of parts into which each row is split."""
    return mesh.shape[CONTEXT]


def token_parts(mesh: Mesh | AbstractMesh) -> int:
    """The number of parts into which the tokens of a batch are split."""
    return row_parts(mesh) * context_parts(mesh)


def place_batch(mesh: Mesh, batch: Any, axis: int = 0) -> Any:
    """Places a tree of numpy arrays on the mesh: rows (`axis`) by `batch_sharding`, scalars replicated.

    Every process passes the whole batch, equal everywhere, and copies to its devices the rows that they hold.
    Raises ValueError where the rows do not divide by the axes that split them.
    """
    parts = row_parts(mesh)

    def place(x):
        x = np.asarray(x)
        if x.ndim and x.shape[axis] % parts:
            sizes = " * ".join(f"{name} {mesh.shape[name]}" for name in ROWS)
            raise ValueError(
                f"{x.shape[axis]} rows do not divide by the mesh's {sizes} = {parts}; choose "
                f"config.learner.rows_per_microbatch as a multiple of {parts}."
            )
        where = batch_sharding(mesh, axis) if x.ndim else replicated(mesh)
        return jax.make_array_from_callback(x.shape, where, lambda index: x[index])

    return jax.tree.map(place, batch)


def expert_specs(mesh: Mesh, tokens: int) -> tuple[P, P, P, tuple[str, ...]]:
    """How `models/moe.py` lies on the mesh where no tokens are exchanged.

    Returns specs of arrays of `tokens` rows, of kernels [E, D, F] and of kernels [E, F, D]. The last result
    is the axes over which partial sums are added.

    The rows are gathered over the expert axis: each of its devices needs all of them for its own experts.
    Tokens that the other axes do not divide are held whole by every device.
    """
    rows = ("data", "fsdp", CONTEXT)
    rows = P(rows) if tokens % math.prod(mesh.shape[axis] for axis in rows) == 0 else P()
    return rows, P("expert", None, "tensor"), P("expert", "tensor"), ("expert", "tensor")


class ExpertAxes(NamedTuple):
    """How `models/expert_all_to_all.py` lies on a mesh.

    Attributes:
      rows: spec of tokens.
      wide, narrow: specs of the parameters [E, D, F] and [E, F, D].
      expert: the axis over which tokens are exchanged.
      gathered: the axes that split a device's experts in the parameters.
      hidden: the axis that splits F.
      others: the axes over which gradients of parameters are only added.
    """

    rows: P
    wide: P
    narrow: P
    expert: str
    gathered: tuple[str, ...]
    hidden: str
    others: tuple[str, ...]


def expert_axes(mesh: Mesh, tokens: int) -> ExpertAxes | None:
    """The axes of an exchange. None where `models/moe.py` exchanges nothing.

    That is where one device of the expert axis has all experts, or the tokens do not divide.
    """
    if mesh.shape["expert"] == 1 or tokens % token_parts(mesh):
        return None
    wide, narrow = P(EXPERTS, None, "tensor"), P(EXPERTS, "tensor")
    expert, *gathered = EXPERTS
    return ExpertAxes(P(PARTS), wide, narrow, expert, tuple(gathered), "tensor", ("data",))


class LogprobAxes(NamedTuple):
    """How `grpo/logprobs.py` lies on a mesh.

    Attributes:
      blocks: spec of arrays [N, rows * columns, ...].
      gathered: spec of the unembedding as the loops use it.
      own: spec of the parameter, and of its gradient.
      vocabulary: the axis that splits the vocabulary.
      fsdp: the axes that split the parameter besides.
      others: the axes over which the parameter's gradient is only added.
    """

    blocks: P
    gathered: P
    own: P
    vocabulary: str
    fsdp: tuple[str, ...]
    others: tuple[str, ...]


def logprob_axes(vocab_axis: int) -> LogprobAxes:
    """The axes for an unembedding. vocab_axis: 0 of [V, D] or 1 of [D, V]."""
    own = P("tensor", MATRICES) if vocab_axis == 0 else P(MATRICES, "tensor")
    gathered = P(*(axis if axis == "tensor" else None for axis in own))
    return LogprobAxes(P(None, PARTS), gathered, own, "tensor", MATRICES, ("data",))


def vocabulary_parts(mesh: Mesh) -> int:
    """The number of parts into which the vocabulary is split."""
    return mesh.shape["tensor"]
