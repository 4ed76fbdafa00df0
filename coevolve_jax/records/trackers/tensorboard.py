"""Scalars for TensorBoard under workdir/tensorboard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict


class TensorBoard:
    def __init__(self, folder: Path):
        self._folder, self._events = folder, None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._events = self._events or self._begin(step)
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        if self._events:
            self._events.close()

    def _begin(self, step: int) -> Any:
        import tensorboardX  # here, since it imports torch if installed, which takes seconds

        # purge_step hides the steps that an interrupted run wrote after its checkpoint.
        purge = step if self._folder.exists() else None
        return tensorboardX.SummaryWriter(str(self._folder), purge_step=purge, flush_secs=10)


def make(config: ConfigDict, workdir: Path) -> TensorBoard:
    return TensorBoard(workdir / "tensorboard")
