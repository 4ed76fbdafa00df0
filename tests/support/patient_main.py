"""experiments/main.py, whose first argument says how many seconds one process of a run waits for another that is dead."""

import runpy
import sys
from pathlib import Path

from coevolve_jax.distributed import sharding

sharding.PATIENCE = int(sys.argv.pop(1))
sys.argv[0] = str(Path(__file__).parents[2] / "experiments" / "main.py")
runpy.run_path(sys.argv[0], run_name="__main__")
