"""Trackio: one run per workdir, also across interruptions. `trackio show` opens its page.

Trackio's own environment variables set the rest: TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL, ... The
project is coevolve_jax, or what TRACKIO_PROJECT names.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path

import trackio
from ml_collections import ConfigDict
from trackio.run import Run


class Trackio:
    def __init__(self, run: Run):
        self._run = run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs a step. One that a killed process had logged is there twice, with the same numbers."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def make(config: ConfigDict, workdir: Path) -> Trackio:
    named = workdir / "trackio" / "run_id"
    if not named.exists():
        named.parent.mkdir(parents=True, exist_ok=True)
        named.write_text(f"{workdir.absolute().name}-{uuid.uuid4().hex[:8]}")
    try:
        run = trackio.init(
            os.environ.get("TRACKIO_PROJECT", "coevolve_jax"),
            name=named.read_text(),
            resume="allow",
            config=config.to_dict(),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
    except Exception as error:  # it raises what its storage and its servers raise
        why = " ".join(str(error).split())
        raise ValueError(
            f"Trackio cannot be reached ({why}): correct its environment variables, or leave trackio out of "
            "config.logging.trackers."
        ) from None
    return Trackio(run)
