"""The mesh, where each array lies on it, and what each process holds. The only file that names mesh axes.

data: rows of the batch. fsdp: rows of the batch and one axis of every matrix, of experts their number. expert:
the same, but what it splits of the experts stays where it is, and tokens come there. context: the tokens of a row, and
matrices as fsdp does. tensor: heads, the hidden layer of the MLP, the vocabulary.

A parameter whose axis does not divide by its mesh axis is refused, for a silent replica would cost the
memory that the mesh was chosen to save. Heads may be cut: only the product heads * head_dim must divide.
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

AXES = (
    "data",
    "fsdp",
    "expert",
    "context",
    "tensor",
)  # tensor last: its devices, which talk most, are neighbours
ROWS = ("data", "fsdp", "expert")  # that the rows of a batch are split over
CONTEXT = "context"  # that each of them is split over
PARTS = (*ROWS, CONTEXT)  # so that these split its parts
MATRICES = ("fsdp", "expert", CONTEXT)  # that split one axis of a matrix, beside tensor
EXPERTS = ("expert", "fsdp", CONTEXT)  # that split their number

# Parameter path -> spec; the first match wins. Parameters under layers/ have a leading layer axis,
# those of experts a second one, along which they are gathered: no compiler has to turn them over for that.
RULES = (
    (r"embed_tokens/embedding", P("tensor", MATRICES)),
    (r"lm_head/kernel", P(MATRICES, "tensor")),
    (r"layers/.*/experts/(gate|up)_proj/kernel", P(None, EXPERTS, None, "tensor")),
    (r"layers/.*/experts/down_proj/kernel", P(None, EXPERTS, "tensor")),
    (r"layers/.*/(q|k|v|gate|up)_proj/kernel", P(None, MATRICES, "tensor")),
    (r"layers/.*/(q|k|v)_proj/bias", P(None, "tensor")),
    (r"layers/.*/(o|down)_proj/kernel", P(None, "tensor", MATRICES)),
    (r".*/scale|.*/o_proj/bias|layers/mlp/gate/kernel", P()),
)


# Seconds without a sign of life after which a process counts as dead and the others are ended; also how long a
# process that has ended waits for the others' end. Accelerators should not wait long, and a host that is moved
# live comes back sooner. (JAX's own values are 100 and 300.)
PATIENCE = 60


def start_processes(spec: str) -> None:
    """Joins this process to the others of a run; must come before anything else that JAX does.

    spec: "auto" where the cluster tells each process its place (TPU pods, Slurm, Kubernetes, Open MPI), else
    "HOST:PORT,PROCESSES,INDEX" with the address of process 0. Raises ValueError for anything else.
    """
    match = re.fullmatch(r"([^,]+:\d+),(\d+),(\d+)", spec)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # concerns CPU devices only
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is preemption.py's
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
    """A mesh over the first data * fsdp * expert * context * tensor devices; ValueError where there are fewer, and for
    several TPU slices. devices: by default JAX's."""
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
            f"These {len(devices)} chips are of {len(slices)} TPU slices, and a run takes one: start it on one slice's hosts."
        )
    # Not jax.make_mesh: it refuses GPUs and CPUs of several hosts, and an axis that is part of one of a TPU's torus.
    grid = mesh_utils.create_device_mesh(shape, devices[: math.prod(shape)], allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def param_shardings(mesh: Mesh, abstract_params: Any) -> Any:
    """A NamedSharding for each leaf of a tree of parameters, or of a tree that holds such trees, as an
    optimiser's state does; scalars are replicated.

    Raises ValueError for a parameter that no rule names or whose shape the mesh does not divide.
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
    """For arrays whose `axis` is rows and whose next is their tokens; everything else is whole."""
    return NamedSharding(mesh, P(*[None] * axis, ROWS, CONTEXT))


def part_sharding(mesh: Mesh) -> NamedSharding:
    """For arrays whose first axis is the parts of rows (`models/context_parallel.py`), or tokens in their order."""
    return NamedSharding(mesh, P(PARTS))


def head_sharding(mesh: Mesh) -> NamedSharding:
    """For queries, keys and values [parts of rows, length, heads, head_dim]: heads over tensor."""
    return NamedSharding(mesh, P(PARTS, None, "tensor", None))


# How arrays lie while tokens are sampled. Weights stay where the learner has them and what is computed, which is small
# then, moves: of a product each device has the part of its own weights (arXiv 2211.05102, section 3.2.2, 2D
# weight-stationary). The cache is the only large thing, and lies on all devices by rows and heads.
DECODED_ROWS = ("data", *EXPERTS)
DECODED = {
    "stream": P("data", MATRICES),  # [tokens, hidden size]
    "heads": P(DECODED_ROWS, None, "tensor"),  # [rows, T, heads, head_dim], against the cache
    "features": P("data", None, "tensor"),  # the same, against the weights
    "cache": P(DECODED_ROWS, "tensor"),  # keys and values [rows, heads, ...]
    "pages": P("tensor", DECODED_ROWS),  # keys and values in pages [heads, pages, ...]
    "vocabulary": P("data", "tensor"),  # logits [rows, vocabulary], as a product with the weights
    "rows": P(DECODED_ROWS),  # [rows, ...], those that are sampled from among them
}


def place_decoded(mesh: Mesh | None, kind: str, x: jax.Array) -> jax.Array:
    """x, inside of a program, where arrays of that kind of DECODED lie while tokens are sampled."""
    if mesh is None or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, DECODED[kind]))


def place_everywhere(mesh: Mesh | None, tree: Any) -> Any:
    """The tree's arrays, inside of a program, whole on every device, so that each process can read them."""
    return tree if mesh is None else jax.lax.with_sharding_constraint(tree, replicated(mesh))


def replicated(mesh: Mesh) -> NamedSharding:
    """For arrays that every device holds whole (scalars, keys)."""
    return NamedSharding(mesh, P())


def in_host_memory(shardings: Any, abstract: Any) -> Any:
    """The shardings, with all arrays of the tree but scalars in pinned host memory, which devices read by themselves."""
    moved = lambda s, x: s.with_memory_kind("pinned_host") if x.ndim else s
    return jax.tree.map(moved, shardings, abstract)


def check_host_memory(mesh: Mesh) -> None:
    """Raises ValueError where the devices cannot hold arrays in pinned host memory."""
    kinds = sorted(memory.kind for memory in mesh.local_devices[0].addressable_memories())
    if "pinned_host" not in kinds:
        raise ValueError(
            f"config.learner.optimizer_offload is True, and devices of the platform {platform(mesh)} have no pinned host memory "
            f"(they have {', '.join(kinds) or 'none that JAX names'}): set it to False."
        )


def platform(mesh: Mesh) -> str:
    """What the mesh's devices are, as JAX names it: cpu, gpu or tpu."""
    return mesh.devices.flat[0].platform


def device_memory(mesh: Mesh) -> int | None:
    """Bytes that JAX may take of each device; None where that is not known, as on CPUs."""
    return (mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")


def row_parts(mesh: Mesh | AbstractMesh) -> int:
    """Into how many parts the rows of a batch are split."""
    return math.prod(mesh.shape[name] for name in ROWS)


def context_parts(mesh: Mesh | AbstractMesh) -> int:
    """Into how many parts each of these rows is split."""
    return mesh.shape[CONTEXT]


def token_parts(mesh: Mesh | AbstractMesh) -> int:
    """How many devices have tokens of their own."""
    return row_parts(mesh) * context_parts(mesh)


def place_batch(mesh: Mesh, batch: Any, axis: int = 0) -> Any:
    """A tree of numpy arrays on the mesh: rows (`axis`) by `batch_sharding`, scalars replicated.

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
    """How `models/moe.py` lies on the mesh: specs of arrays of `tokens` rows, of the experts' kernels [E, D, F]
    and [E, F, D], and the axes over which partial sums are added.

    The rows are gathered over the expert axis, each of whose devices needs all of them for its own experts.
    Tokens that the other axes do not divide are held whole by every device.
    """
    rows = ("data", "fsdp", CONTEXT)
    rows = P(rows) if tokens % math.prod(mesh.shape[axis] for axis in rows) == 0 else P()
    return rows, P("expert", None, "tensor"), P("expert", "tensor"), ("expert", "tensor")


class ExpertAxes(NamedTuple):
    """How `models/expert_all_to_all.py` lies on a mesh.

    rows: spec of tokens. wide, narrow: of the parameters [E, D, F] and [E, F, D]. expert: the axis over which tokens are
    exchanged. gathered: those that split a device's experts in parameters. hidden: that splits F. others: those over
    which gradients of parameters are only added.
    """

    rows: P
    wide: P
    narrow: P
    expert: str
    gathered: tuple[str, ...]
    hidden: str
    others: tuple[str, ...]


def expert_axes(mesh: Mesh, tokens: int) -> ExpertAxes | None:
    """None where `models/moe.py` exchanges nothing: all experts meet all tokens of a device, or tokens do not divide."""
    if mesh.shape["expert"] == 1 or tokens % token_parts(mesh):
        return None
    wide, narrow = P(EXPERTS, None, "tensor"), P(EXPERTS, "tensor")
    expert, *gathered = EXPERTS
    return ExpertAxes(P(PARTS), wide, narrow, expert, tuple(gathered), "tensor", ("data",))


class LogprobAxes(NamedTuple):
    """How `grpo/logprobs.py` lies on a mesh.

    blocks: spec of arrays [N, rows * columns, ...]. gathered: of the unembedding as the loops use it. own: of the
    parameter, and of its gradient. vocabulary, fsdp, others: the axes that split the vocabulary, and beside it the
    parameter; and those over which its gradient is only added.
    """

    blocks: P
    gathered: P
    own: P
    vocabulary: str
    fsdp: tuple[str, ...]
    others: tuple[str, ...]


def logprob_axes(vocab_axis: int) -> LogprobAxes:
    """vocab_axis: the unembedding's, 0 of [V, D] or 1 of [D, V]."""
    own = P("tensor", MATRICES) if vocab_axis == 0 else P(MATRICES, "tensor")
    gathered = P(*(axis if axis == "tensor" else None for axis in own))
    return LogprobAxes(P(None, PARTS), gathered, own, "tensor", MATRICES, ("data",))


def vocabulary_parts(mesh: Mesh) -> int:
    """Into how many parts the vocabulary is split."""
    return mesh.shape["tensor"]
