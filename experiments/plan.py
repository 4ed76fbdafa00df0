"""Prints the memory that an update needs on each device, and whether it fits, before you rent a machine.

    python experiments/plan.py --config=configs/bfcl_qwen3_4b.py --topology=h100-8
    python experiments/plan.py --config=configs/bfcl_qwen3_4b.py --rows=1 --pack_length=16384,32768
    python experiments/plan.py --config=configs/bfcl_qwen2_5_7b.py --topology=v5e-16 --config.mesh.tensor=4

Rows are those of the config (learner.pack_length and rows_per_microbatch) unless --pack_length and --rows
say otherwise. The mesh has all devices of the machine: its axis fsdp takes what the other axes leave. A
--config.mesh.fsdp=N is kept, also where devices are left, as for four GPUs of eight.

--compile compiles the program with XLA's compiler for the machine, or says how to install that:

    python experiments/plan.py --config=configs/bfcl_qwen3_4b.py --topology=v6e-8 --compile
    python experiments/plan.py --config=configs/bfcl_qwen3_4b.py --topology=h100-4 --rows=64 \\
        --pack_length=16384 --compile --program=decode

It takes minutes, and prints the program's memory, FLOPs and collectives. Run one such process at a time.

Nothing is allocated. docs/notes/memory.md explains the numbers.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from absl import flags
from ml_collections import config_flags

from coevolve_jax import config as configs
from coevolve_jax.config import command_line
from coevolve_jax.planning.topologies import TOPOLOGIES

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, e.g. configs/bfcl_qwen3_4b.py.", lock_config=True
)
_TOPOLOGY = flags.DEFINE_enum("topology", "all", [*TOPOLOGIES, "all"], "The machine.")
_LENGTH = flags.DEFINE_list(
    "pack_length", None, "Tokens of a row, separated by commas; by default config.learner.pack_length."
)
_ROWS = flags.DEFINE_integer(
    "rows",
    None,
    "Rows of a micro-batch on each device; by default the share of config.learner.rows_per_microbatch.",
    lower_bound=1,
)
_COMPILE = flags.DEFINE_bool(
    "compile", False, "Compile the program for one machine; without its compiler this says how to install it."
)
_PROGRAM = flags.DEFINE_enum(
    "program",
    "update",
    ["update", "decode"],
    "With --compile: the program. decode: a token of the in-process engine with config.engine.sharded; "
    "--rows is then the number of conversations at once (by default config.engine.max_concurrency), and "
    "--pack_length the tokens of each (by default the most that one may have).",
)
_LENGTHS = flags.DEFINE_list(
    "lengths",
    None,
    "With --compile of the update: mean tokens of a rollout's prompt and of the rest, for the estimate of "
    "the time, e.g. 2600,700. By default each rollout fills a row.",
)
flags.register_validator(
    "pack_length",
    lambda given: given is None or (given and all(n.isdigit() and int(n) > 0 for n in given)),
    "pass numbers of tokens, as in --pack_length=16384,32768.",
)
flags.register_validator(
    "lengths",
    lambda given: not given or (len(given) == 2 and all(n.isdigit() and int(n) > 0 for n in given)),
    "pass two numbers of tokens, as in --lengths=2600,700.",
)
flags.mark_flags_as_required(["config"])
FSDP = "config.mesh.fsdp"  # counts where it is given; else that axis takes what the others leave


def main() -> None:
    names = list(TOPOLOGIES) if _TOPOLOGY.value == "all" else [_TOPOLOGY.value]
    config, lengths = _CONFIG.value, [int(text) for text in _LENGTH.value or ()]
    decodes = _PROGRAM.value == "decode"
    configs.check_values(config)
    if decodes and not _COMPILE.value:
        raise ValueError("--program=decode compiles that program: pass --compile too, or leave it out.")
    if _LENGTHS.value and (decodes or not _COMPILE.value):
        raise ValueError(
            f"--lengths={','.join(_LENGTHS.value)} estimates the time of a compiled update: pass "
            "--compile with --program=update, or leave it out."
        )
    own = flags.FLAGS[FSDP] if FSDP in flags.FLAGS else None  # registered where it is given
    fsdp = own.value if own is not None and own.present else 0
    from coevolve_jax.planning import plan, rollouts

    if not _COMPILE.value:
        print(plan.table(config, names, lengths, _ROWS.value or 0, fsdp))
        return
    if len(names) > 1 or len(lengths) > 1:
        raise ValueError("--compile takes one machine and one length: pass --topology and --pack_length.")
    from coevolve_jax.planning.aot import batches, programs, report

    if decodes:
        conversations = _ROWS.value or config.engine.max_concurrency
        tokens = lengths[0] if lengths else rollouts.longest(config)
        print(report.decoding(config, names[0], conversations, tokens, fsdp))
        return
    mesh = plan.make_mesh(TOPOLOGIES[names[0]], config.mesh, fsdp)
    rows = _ROWS.value or plan.device_rows(config.learner, mesh)
    size = programs.Size(rows, lengths[0] if lengths else config.learner.pack_length)
    mean = batches.Lengths(*map(int, _LENGTHS.value)) if _LENGTHS.value else None
    print(report.compiled(config, names[0], size, mean, fsdp))


if __name__ == "__main__":
    command_line.start(main)
