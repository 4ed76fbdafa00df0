"""Starts a CoEvolve run, or resumes one.

    python experiments/main.py --config=configs/bfcl_tiny.py --workdir=runs/demo
    python experiments/main.py --config=configs/bfcl_tiny.py:strategy=random --workdir=runs/random \\
        --config.steps=30
    python experiments/main.py --workdir=runs/random     (resumes a run, by its own config.json)

--config.SECTION.KEY=VALUE sets a key of the config. coevolve_jax/config/keys.py explains every key.

On several hosts, run the same command on each, with a --workdir that all of them share. Add --processes=auto,
or on host I of N --processes=HOST:PORT,N,I with the address of host 0.

On SIGTERM or SIGUSR1 the run saves and exits with status 75. The same command resumes it.
"""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from absl import flags
from ml_collections import config_flags

from coevolve_jax.config import command_line

_CONFIG = config_flags.DEFINE_config_file(
    "config",
    None,
    "Config file, e.g. configs/bfcl_tiny.py. coevolve_jax/config/keys.py explains every key: meaning, "
    "default and allowed values.",
    lock_config=True,
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for everything that the run writes.")
_PROCESSES = flags.DEFINE_string(
    "processes",
    None,
    "This process's place among several: auto (TPU pods, Slurm, ...) or HOST:PORT,PROCESSES,INDEX.",
)
_UNTIL = flags.DEFINE_integer(
    "until",
    None,
    "Stop with a checkpoint after this many steps in all; 0: after the initial state.",
    lower_bound=0,
)
flags.mark_flags_as_required(["workdir"])


def main() -> None:
    from coevolve_jax import config as configs
    from coevolve_jax import preemption
    from coevolve_jax.distributed import sharding
    from coevolve_jax.loop import rendezvous
    from coevolve_jax.rollout.engine import EngineError
    from coevolve_jax.train import train

    errors = FloatingPointError, EngineError, rendezvous.Failed
    with command_line.exits(*errors, interrupted=command_line.GOES_ON):
        if _PROCESSES.value:
            sharding.start_processes(_PROCESSES.value)
        config = _CONFIG.value if _CONFIG.present else configs.of_run(_WORKDIR.value)
        with preemption.handle_signals(), rendezvous.coordinated(config):
            train(config, _WORKDIR.value, _UNTIL.value)


if __name__ == "__main__":
    command_line.start(main)
