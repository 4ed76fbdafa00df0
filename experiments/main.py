"""Runs CoEvolve, or goes on with a run that was interrupted.

    python experiments/main.py --config=configs/bfcl_tiny.py --workdir=runs/demo
    python experiments/main.py --config=configs/bfcl_tiny.py:strategy=random --workdir=runs/random --config.steps=30
    python experiments/main.py --workdir=runs/random    (goes on with a run, by its own config.json)

On several hosts, the same command on each of them, with --processes=auto or, on host I of N,
--processes=HOST:PORT,N,I (the address of host 0), and a --workdir that all of them share.
"""

import os
import sys

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from absl import app, flags, logging
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, e.g. configs/bfcl_tiny.py.", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for everything that the run writes.")
_PROCESSES = flags.DEFINE_string(
    "processes",
    None,
    "This process's place among several: auto (TPU pods, Slurm, ...) or HOST:PORT,PROCESSES,INDEX.",
)
_UNTIL = flags.DEFINE_integer(
    "until", None, "Stop with a checkpoint after so many steps in all; 0: with the beginning.", lower_bound=0
)
flags.mark_flags_as_required(["workdir"])


def main(argv) -> None:
    if len(argv) > 1:
        sys.exit(f"Error: unexpected argument {argv[1]!r}: options begin with --, see --help.")
    logging.set_verbosity(logging.WARNING)
    from coevolve_jax import config as configs
    from coevolve_jax.distributed import hosts, sharding  # after the flags are known: --help needs no JAX
    from coevolve_jax.rollout.engine import EngineError
    from coevolve_jax.train import train

    try:
        if _PROCESSES.value:
            sharding.start_processes(_PROCESSES.value)
        config = _CONFIG.value or configs.of_run(_WORKDIR.value)
        with hosts.together(config):
            train(config, _WORKDIR.value, _UNTIL.value)
    except (ValueError, FloatingPointError, EngineError, hosts.Failed) as error:
        sys.exit(f"Error: {error}")


def parse_flags(argv):
    """absl's parser, with one sentence instead of a traceback for a config key or value that is wrong."""
    from coevolve_jax.config import RENAMED

    for argument in argv[1:]:
        key = argument.lstrip("-").partition("=")[0].removeprefix("config.")
        if argument.startswith("--config.") and key in RENAMED:
            sys.exit(f"Error: the config key {key!r} is called {RENAMED[key]!r} now.")
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(
            f"Error: {str(error).strip().splitlines()[-1].strip().removeprefix('ValueError: ')} (--help lists the options)"
        )
    except (AttributeError, KeyError) as error:
        key = str(error.args[0] if error.args else error).splitlines()[0].strip("'\"")
        sys.exit(
            f"Error: the config has no key {key!r}: the keys and their meaning stand in the config file."
        )
    except (TypeError, ValueError) as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
