"""The tracker protocol: numbers by name, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Tracker(Protocol):
    """A tracker module defines make(config, workdir) -> Tracker, called when a run starts or resumes.

    `make` raises ValueError, in one sentence, if the tracker is not available.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs a step's numbers, under names such as "seconds/update".

        After a resume, steps may come that a killed process had already logged.
        """

    def close(self) -> None:
        """Flushes: everything is stored on return."""
