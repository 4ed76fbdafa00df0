"""Lowering for a GPU on a machine that has none: JAX from 0.12 on asks which GPU a Triton kernel is for."""

from contextlib import AbstractContextManager

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

H100 = AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")


def as_gpus(mesh: Mesh) -> AbstractMesh:
    """A mesh of the same axes whose devices are GPUs."""
    return mesh.abstract_mesh.update(abstract_device=H100)


def one_gpu() -> AbstractContextManager:
    """Within it, programs without a mesh are lowered for a GPU."""
    return jax.sharding.use_abstract_mesh(
        AbstractMesh((1,), ("gpu",), (AxisType.Explicit,), abstract_device=H100)
    )
