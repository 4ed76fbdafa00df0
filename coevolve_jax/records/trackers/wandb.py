"""Weights & Biases: one W&B run per workdir, also across interruptions.

W&B's own environment variables set the rest: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline, ...
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path

import wandb
from ml_collections import ConfigDict


class WeightsAndBiases:
    def __init__(self, run: wandb.Run):
        self._run = run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs a step. W&B ignores steps that a killed process had logged; their numbers are the same."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def make(config: ConfigDict, workdir: Path) -> WeightsAndBiases:
    named = workdir / "wandb" / "run_id"
    if not named.exists():
        named.parent.mkdir(parents=True, exist_ok=True)
        named.write_text(uuid.uuid4().hex)
    try:
        run = wandb.init(
            dir=workdir,
            id=named.read_text(),
            name=workdir.absolute().name,
            resume="allow",
            config=config.to_dict(),
            settings=wandb.Settings(console="off", silent=True),
        )
    except wandb.Error as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"Weights & Biases cannot be reached ({why}): log in with `wandb login`, "
            "set WANDB_MODE=offline, or leave wandb out of config.logging.trackers."
        ) from None
    return WeightsAndBiases(run)
