"""Machines for which an update is planned and compiled: their devices and their makers' published figures.

TPUs: docs.cloud.google.com/tpu/docs/v5e, /v5p and /v6e. GPUs: NVIDIA's data sheets of H100 SXM and H200 SXM.
The network between two hosts is that of DGX H100: one 400 Gb/s port for each GPU. Host links: for H100 the
data sheet's PCIe 5 (128 GB/s, both directions together). Google states none for TPUs, so they have 16 GB/s,
the lowest in "How to Scale Your Model" (jax-ml.github.io/scaling-book).
"""

from __future__ import annotations

import dataclasses

GB = 10**9
TERA = 10**12


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices of a machine, their memory and their peak rates.

    Peaks are those of one device. They are 0 where nothing is compiled for it.

    Attributes:
      devices: their number, as JAX counts them.
      memory: bytes of each, as its vendor states it.
      platform: as JAX names it.
      compiler: the name of the topology for XLA's compiler; "" where it is only planned.
      operations: per second, of bfloat16 products with float32 sums.
      bandwidth: bytes per second of its memory.
      link: bytes per second that it sends to the other devices, in one direction.
      host_link: bytes per second that it sends to its host.
      hosts: the number of hosts.
      hosts_link: bytes per second that it sends to devices of another host; 0 where that is no other link.
    """

    devices: int
    memory: int
    platform: str = "tpu"
    compiler: str = ""
    operations: float = 0
    bandwidth: float = 0
    link: float = 0
    host_link: float = 16 * GB
    hosts: int = 1
    hosts_link: float = 0


def _hosts(chips: int) -> int:
    """The hosts of a v5e or v6e slice: one for up to 8 chips, otherwise one for every 4."""
    return 1 if chips <= 8 else chips // 4


def _v5e(devices: int, grid: str) -> Topology:
    return Topology(
        devices, 16 * GB, "tpu", f"v5e:{grid}", 197 * TERA, 819 * GB, 200 * GB, hosts=_hosts(devices)
    )


def _v6e(devices: int, grid: str) -> Topology:
    return Topology(
        devices, 32 * GB, "tpu", f"v6e:{grid}", 918 * TERA, 1600 * GB, 400 * GB, hosts=_hosts(devices)
    )


def _h100(hosts: int, each: int) -> Topology:
    rates = 450 * GB, 64 * GB, hosts, 50 * GB  # NVLink; between hosts, InfiniBand
    return Topology(hosts * each, 80 * GB, "gpu", f"1x{hosts}x{each}", 989 * TERA, 3350 * GB, *rates)


# Name of a device in JAX -> its peak of operations. v4: docs.cloud.google.com/tpu/docs/v4.
PEAKS = {
    "TPU v4": 275 * TERA,
    **dict.fromkeys(("TPU v5 lite", "TPU v5e"), 197 * TERA),
    **dict.fromkeys(("TPU v5", "TPU v5p"), 459 * TERA),
    **dict.fromkeys(("TPU v6 lite", "TPU v6e"), 918 * TERA),
    **dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H200"), 989 * TERA),
}

TOPOLOGIES = {
    "gpu-1x16": Topology(1, 16 * GB, "gpu"),
    "gpu-1x24": Topology(1, 24 * GB, "gpu"),
    "h100-4": _h100(1, 4),
    "h100-8": _h100(1, 8),
    "h100-16": _h100(2, 8),
    "h200-1": Topology(1, 141 * GB, "gpu"),
    "h200-8": Topology(8, 141 * GB, "gpu"),
    "v5e-4": _v5e(4, "2x2"),
    "v5e-16": _v5e(16, "4x4"),
    "v5e-64": _v5e(64, "8x8"),
    # The name counts cores; two make a chip, which is one device.
    "v5p-8": Topology(4, 95 * GB, "tpu", "v5p:2x2x1", 459 * TERA, 2765 * GB, 600 * GB),
    "v6e-4": _v6e(4, "2x2"),  # also half of a v6e-8 that is shared with the server
    "v6e-8": _v6e(8, "2x4"),
    "v6e-16": _v6e(16, "4x4"),
    "v6e-64": _v6e(64, "8x8"),
}
