"""The mesh, and where each array lies on it. The only file that names mesh axes.

data: rows of the batch. fsdp: rows of the batch and one axis of every matrix.
tensor: heads, the hidden layer of the MLP, the vocabulary.
"""
from __future__ import annotations

import math
import re
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("data", "fsdp", "tensor")

# Parameter path -> spec; the first match wins. Parameters under layers/ have a leading layer axis.
RULES = (
    (r"embed_tokens/embedding", P("tensor", "fsdp")),
    (r"lm_head/kernel", P("fsdp", "tensor")),
    (r"layers/mlp/gate/kernel", P(None, "fsdp")),
    (r"layers/.*/(q|k|v|gate|up)_proj/kernel", P(None, "fsdp", "tensor")),
    (r"layers/.*/(q|k|v)_proj/bias", P(None, "tensor")),
    (r"layers/.*/(o|down)_proj/kernel", P(None, "tensor", "fsdp")),
    (r".*/scale|.*/o_proj/bias", P()),
)


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
    """A mesh over the first data * fsdp * tensor devices; raises ValueError where there are fewer."""
    shape = (data, fsdp, tensor)
    devices = jax.devices()
    if min(shape) < 1 or math.prod(shape) > len(devices):
        raise ValueError(f"A mesh of data={data}, fsdp={fsdp}, tensor={tensor} does not fit {len(devices)} "
                         "device(s); choose sizes of at least 1 whose product is at most that.")
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[: math.prod(shape)])


def param_shardings(mesh: Mesh, abstract_params: Any) -> Any:
    """A NamedSharding for each leaf of a tree of parameters, or of a tree that holds such trees, as an
    optimiser's state does; scalars are replicated.

    Raises ValueError for a parameter that no rule names or whose shape the mesh does not divide.
    """
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _sharding(mesh, name(path), leaf.shape), abstract_params)


def _sharding(mesh: Mesh, path: str, shape: tuple[int, ...]) -> NamedSharding:
    if not shape:
        return replicated(mesh)
    spec = next((spec for pattern, spec in RULES if re.search(rf"(^|/)({pattern})$", path)), None)
    if spec is None:
        raise ValueError(f"No rule of coevolve_jax/sharding.py matches parameter {path!r}; add one to RULES.")
    for size, axis in zip(shape, spec):
        if axis is not None and size % mesh.shape[axis]:
            raise ValueError(f"Parameter {path} of shape {shape} does not divide by the mesh's {axis} axis "
                             f"of {mesh.shape[axis]}; choose a size of that axis that divides {size}.")
    return NamedSharding(mesh, spec)


def batch_sharding(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """For arrays whose `axis` is rows: rows over data and fsdp, everything else whole."""
    return NamedSharding(mesh, P(*[None] * axis, ("data", "fsdp")))


def head_sharding(mesh: Mesh) -> NamedSharding:
    """For queries, keys and values [rows, length, heads, head_dim]: rows as in a batch, heads over tensor."""
    return NamedSharding(mesh, P(batch_sharding(mesh).spec[0], None, "tensor", None))


def replicated(mesh: Mesh) -> NamedSharding:
    """For arrays that every device holds whole (scalars, keys)."""
    return NamedSharding(mesh, P())
