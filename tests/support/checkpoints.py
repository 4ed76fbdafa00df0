"""Helpers for a folder of checkpoints."""

from __future__ import annotations

from etils import epath

from coevolve_jax.records import checkpoint


def latest_step(directory: epath.PathLike) -> int | None:
    """Step of the newest committed checkpoint, or None."""
    return max(checkpoint.steps(directory), default=None)
