"""Fine-tunes a model on the solutions of tasks, with the prompts and masks of RL: a supervised warm start.

    python experiments/sft.py --config=configs/bfcl_tiny.py --workdir=runs/sft \\
        --config.warm_start.steps=100 --config.warm_start.learning_rate=3e-4 --config.warm_start.eval_tasks=24
    python experiments/sft.py --workdir=runs/sft     (resumes it, by its own config.json)

The tasks are explored in the training scenarios, or come from --config.warm_start.source.
coevolve_jax/config/keys.py explains every key, coevolve_jax/loop/warm_start.py the files in the workdir.

--config.model=runs/sft/policy starts a run from the result. A run whose config sets warm_start.steps does all
of this by itself.

On SIGTERM or SIGUSR1 it saves and exits with status 75. The same command resumes it.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from absl import flags
from ml_collections import config_flags

from coevolve_jax.config import command_line
from coevolve_jax.rollout.engine import EngineError

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, with its argument if any.", lock_config=True
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder for everything that it writes.")
flags.mark_flags_as_required(["workdir"])


def main() -> None:
    from coevolve_jax import config as configs
    from coevolve_jax.analysis.summary import warm_start_line
    from coevolve_jax.loop.warm_start import notes, warm_start

    config = _CONFIG.value if _CONFIG.present else configs.of_run(_WORKDIR.value)
    for note in notes(config):
        print(note, file=sys.stderr)
    print(warm_start_line(warm_start(config, Path(_WORKDIR.value))))


if __name__ == "__main__":
    command_line.start(main, FloatingPointError, EngineError, resumes=True)
