"""Measures the cost of row lengths: keys that attention multiplies with a query, and computed tokens.

    JAX_PLATFORMS=cpu python benchmarks/rows.py

The batch is made up: --groups times --group_size rollouts with BFCL's lengths, seed 0
(`coevolve_jax.planning.aot.batches.made_up`). Nothing is compiled for a device and no weights are needed.
"""

import numpy as np
from absl import app, flags

from coevolve_jax.grpo.packing import Batch, pack
from coevolve_jax.planning.aot import batches

_GROUPS = flags.DEFINE_integer("groups", 32, "Prompts.", lower_bound=1)
_SIZE = flags.DEFINE_integer("group_size", 8, "Rollouts of each.", lower_bound=1)
_LENGTHS = flags.DEFINE_list(
    "lengths", ["2600", "700"], "Tokens of a prompt and of what follows it, in the mean."
)
_ROWS = flags.DEFINE_list("pack_length", ["8192", "12800", "16384", "25600"], "Tokens of a row.")
_DEVICES = flags.DEFINE_list("devices", ["8", "16", "64"], "Rows of a micro-batch, one on each device.")

PLATFORMS = {"gpu": "flash", "tpu": "splash"}


def packed(pack_length: int, rows: int, share: bool) -> Batch[np.ndarray]:
    lengths = batches.Lengths(*map(int, _LENGTHS.value))
    found = batches.made_up(_GROUPS.value, _SIZE.value, lengths, pack_length)
    return pack(
        found, pack_length=pack_length, rows_per_microbatch=rows, max_rows=len(found), prefix_sharing=share
    )


def keys(batch: Batch[np.ndarray]) -> list[str]:
    """For each kernel, the mean number of keys that it multiplies with a token's query."""
    tokens = int(np.sum(batch.segment_ids > 0))
    found = (batches.multiplied(batch, platform) for platform in PLATFORMS)
    return [f"{pairs.sum() / tokens:,.0f}" for kernels in found for pairs in kernels.values()]


def main(_) -> None:
    lengths, devices = ([int(n) for n in flag.value] for flag in (_ROWS, _DEVICES))
    names = [f"{name}, {kernel}" for name in PLATFORMS.values() for kernel in ("forward", "dq", "dkv")]
    print(
        f"{_GROUPS.value * _SIZE.value} rollouts of {_GROUPS.value} prompts, {' and '.join(_LENGTHS.value)} "
        f"tokens\n\n"
        f"| tokens of a row | prompts | half of a row | {' | '.join(names)} |\n"
        f"|---:|---|---:|{'---:|' * len(names)}"
    )
    for share in (False, True):
        for length in lengths:
            where = "once for a group" if share else "in every rollout"
            print(
                f"| {length:,} | {where} | {length / 2:,.0f} | {' | '.join(keys(packed(length, 1, share)))} |"
            )
    heads = [f"{n} devices: micro-batches, tokens computed" for n in devices]
    print(
        f"\n| tokens of a row | prompts | tokens | {' | '.join(heads)} |\n"
        f"|---:|---|---:|{'---:|' * len(devices)}"
    )
    for share in (False, True):
        for length in lengths:
            cells = []
            for rows in devices:
                batch = packed(length, rows, share)
                used, tokens = int(batch.used), int(np.sum(batch.segment_ids > 0))
                cells.append(f"{used}, {used * rows * length:,}")
            where = "once for a group" if share else "in every rollout"
            print(f"| {length:,} | {where} | {tokens:,} | {' | '.join(cells)} |")


if __name__ == "__main__":
    app.run(main)
