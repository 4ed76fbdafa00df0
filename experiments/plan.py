"""Prints what an update needs of each device's memory, and whether it fits, before a machine is rented.

    python experiments/plan.py --config=configs/bfcl_qwen3_4b.py --topology=gpu-8x80
    python experiments/plan.py --config=configs/bfcl_qwen3_4b.py --topology=all --row_length=16384,32768
    python experiments/plan.py --config=configs/bfcl_qwen2_5_7b.py --topology=v5e-16 --config.mesh.tensor=4

docs/memory.md says how the numbers come about. Nothing is allocated.
"""

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from absl import app, flags
from ml_collections import config_flags

TOPOLOGIES = ("gpu-1x16", "gpu-1x24", "gpu-8x80", "gpu-8x141", "v5e-16", "v5p-8", "v6e-16", "all")
_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, e.g. configs/bfcl_qwen3_4b.py.", lock_config=True
)
_TOPOLOGY = flags.DEFINE_enum("topology", "all", TOPOLOGIES, "Which machine.")
_LENGTH = flags.DEFINE_list("row_length", ["16384", "32768"], "Tokens of a row, separated by commas.")
_ROWS = flags.DEFINE_integer("rows", 1, "Rows of a micro-batch on each device.", lower_bound=1)
flags.mark_flags_as_required(["config"])


def main(argv) -> None:
    if len(argv) > 1:
        sys.exit(f"Error: unexpected argument {argv[1]!r}: options begin with --, see --help.")
    from coevolve_jax import plan  # after the flags are known: --help needs no JAX

    names = list(plan.TOPOLOGIES) if _TOPOLOGY.value == "all" else [_TOPOLOGY.value]
    try:
        lengths = [int(text) for text in _LENGTH.value]
        print(plan.table(_CONFIG.value, names, lengths, _ROWS.value))
    except ValueError as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    app.run(main)
