"""experiments/main.py; the first argument is how many seconds a process waits for a dead one of its run."""

import runpy
import sys
from pathlib import Path

from coevolve_jax.distributed import sharding

sharding.PATIENCE = int(sys.argv.pop(1))
sys.argv[0] = str(Path(__file__).parents[2] / "experiments" / "main.py")
runpy.run_path(sys.argv[0], run_name="__main__")
