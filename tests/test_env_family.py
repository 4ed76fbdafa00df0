"""Environment families: what a worker may import, and families other than BFCL."""

import os
import subprocess
import sys

ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path if p)}
BLOCKED = "import sys; sys.modules.update(dict.fromkeys(('numpy', 'jax', 'ml_collections', 'bfcl_eval')))\n"


def test_what_every_worker_imports_is_the_standard_library():
    code = BLOCKED + "import coevolve_jax, coevolve_jax.types, coevolve_jax.envs, coevolve_jax.envs.base"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRON)
    assert done.returncode == 0, done.stderr
