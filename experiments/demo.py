"""Runs the demo: a tiny policy and its training set evolve together in BFCL's environment.

    python experiments/demo.py
    python experiments/demo.py --steps=6 --workdir=runs/short

    --steps=N    GRPO steps, 60 by default; the training set evolves every N / 6 of them
    --yes        install what is missing, outside a virtual environment too

It takes minutes on two CPU cores and writes runs/demo; open runs/demo/report.html. Further flags are those of
experiments/main.py. Where BFCL's packages are missing, it installs them into a virtual environment.
"""

import argparse
import importlib
import importlib.util
import runpy
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGES = ("bfcl_eval", "mpmath", "filelock")


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__, add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--yes", action="store_true")
    parser.add_argument("--steps", type=int)
    parser.error = lambda message: sys.exit(f"Error: {message}.")
    given, further = parser.parse_known_args()
    if given.help:
        print(__doc__)
        return
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        install(missing, given.yes)
    flags = ["--config=configs/bfcl_tiny.py", "--workdir=runs/demo"]
    if given.steps is not None:
        every = max(given.steps // 6, 1)
        values = {"steps": given.steps, "evolution.every": every, "evolution.freeze_last_steps": every}
        flags += [f"--config.{key}={value}" for key, value in values.items()]
    program = str(HERE / "main.py")
    sys.argv = [program, *flags, *further]
    runpy.run_path(program, run_name="__main__")


def install(missing: list[str], anywhere: bool) -> None:
    """Installs BFCL's packages. anywhere: also outside a virtual environment."""
    if sys.prefix == sys.base_prefix and not anywhere:
        sys.exit(
            f"Error: the demo needs {', '.join(missing)}, and {sys.executable} is in no virtual environment: "
            "run `coevolve setup bfcl`, or pass --yes to install them here."
        )
    print(f"Installing {', '.join(missing)} into {sys.prefix} (coevolve setup bfcl) ...", flush=True)
    done = subprocess.run([sys.executable, str(HERE / "set_up.py"), "bfcl"])
    if done.returncode:
        sys.exit(done.returncode)
    importlib.invalidate_caches()


if __name__ == "__main__":
    main()
