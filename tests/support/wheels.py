"""The wheel of this checkout, built from a copy, since a build writes beside its sources."""

import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

MODELS = [f"models/tiny_qwen3{kind}" for kind in ("", "_seldom", "_tau2", "_textworld", "_weak")]
SOURCES = ("coevolve_jax", "experiments", "configs", "examples", "requirements", "docs", *MODELS)
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")


def build(folder: Path) -> Path:
    """Builds the wheel in a folder. Returns its path."""
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / "src" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, folder / "src" / name)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, folder / "src")
    (found,) = folder.glob("coevolve_jax-*.whl")
    shutil.rmtree(folder / "src")
    return found


def pip(*arguments: object) -> None:
    """Runs pip of this interpreter, without a network."""
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--no-index", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
