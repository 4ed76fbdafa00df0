"""Described devices: targets for XLA's TPU and NVIDIA compilers on any machine, without the hardware.

`make aot` installs the compilers (libtpu and the CUDA plugin) in a folder of their own. JAX takes them from
there only when this module asks. Installed beside JAX, libtpu would make it look for a TPU at every start.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

from coevolve_jax import shipped
from coevolve_jax.planning.topologies import Topology

FOLDER = Path(__file__).parents[3] / ".aot"
# An H100 SXM as XLA describes it (xla/stream_executor/device_description.proto), by NVIDIA's data sheet and
# its tuning guide.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  l2_cache_size: 52428800 memory_bandwidth: 3350000000000 device_memory_size: 80000000000
}
platform_name: "CUDA"
runtime_version { major: 13 }
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def installed(folder: Path = FOLDER) -> bool:
    """True once they are installed."""
    return (folder / "libtpu").is_dir() and (folder / "jax_plugins").is_dir()


def describe(topology: Topology, folder: Path = FOLDER) -> list[Any]:
    """The topology's devices, for a mesh whose programs are lowered and compiled but never run.

    Call it before any other use of JAX, which looks for its plugins once. Only one process at a time can
    compile for TPUs.

    Raises:
      ValueError: the compilers are not installed, nothing is compiled for the topology, or another process
        compiles for TPUs.
    """
    if not topology.compiler:
        raise ValueError(
            "Nothing is compiled for this topology: choose one of v5e, v5p, v6e or h100, or leave --compile "
            "out."
        )
    if not installed(folder):
        raise ValueError(
            f"The compilers are not in {folder}: run {sys.executable} -m pip install --no-deps "
            f"--target {folder} -r {shipped.ROOT / 'requirements' / 'aot.txt'}."
        )
    if str(folder) not in sys.path:  # at the end, so that JAX's own environment wins
        sys.path.append(str(folder))
    if topology.platform == "tpu":
        os.environ.setdefault("TPU_LIBRARY_PATH", str(folder / "libtpu" / "libtpu.so"))
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # do not ask a cloud what machine this is
        # Any type will do: there is no such host.
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-16")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        try:
            return topologies.get_topology_desc(topology.compiler, "tpu").devices
        except jax.errors.JaxRuntimeError as error:
            if "lockfile" not in str(error):
                raise
            raise ValueError(
                "Another process compiles for TPUs, and only one can: wait until it has ended, or remove "
                "/tmp/libtpu_lockfile where none does."
            ) from None
    cuda = folder / "nvidia" / "cu13"
    os.environ["PATH"] = f"{cuda / 'bin'}{os.pathsep}{os.environ['PATH']}"  # ptxas
    # Without a device no kernel can be timed, so autotuning is off.
    flags = f"--xla_gpu_cuda_data_dir={cuda} --xla_gpu_autotune_level=0"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    options = {"target_config": H100, "topology": topology.compiler}
    return topologies.get_topology_desc(platform="cuda", **options).devices
