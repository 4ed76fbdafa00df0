"""Finds what comes with the package beside its modules: programs, configs, requirements, a tiny policy.

In a checkout these are the folders experiments/, configs/, requirements/ and models/. A wheel has copies of
them in coevolve_jax/checkout/ (setup.py). It needs the standard library only.
"""

from __future__ import annotations

import os
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
COPIES = PACKAGE / "checkout"
IN_WHEEL = COPIES.is_dir()
ROOT = COPIES if IN_WHEEL else PACKAGE.parent


def folder(path: str | os.PathLike) -> Path:
    """Returns `path` if it exists here, or as it is shipped: models/tiny_qwen3 is found from everywhere."""
    here, there = Path(path), ROOT / path
    return there if there.is_dir() and not here.exists() else here


def config_file(name: str | os.PathLike) -> Path:
    """Returns the path of a config file.

    name: a path; configs/bfcl_tiny.py is found from everywhere. Or the name of a shipped config, bfcl_tiny.
    """
    here = Path(name)
    for there in (ROOT / here, ROOT / "configs" / f"{name}.py"):
        if there.is_file() and not here.is_file():
            return there
    return here
