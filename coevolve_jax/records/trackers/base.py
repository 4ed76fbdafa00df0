"""The tracker protocol: numbers by name, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Tracker(Protocol):
    """A module defines make(config, workdir) -> Tracker, called before a run begins or goes on.

    Raises ValueError, in one sentence, where it cannot be had.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """values: names such as "seconds/update". The first step after a kill may be one that was logged before it."""

    def close(self) -> None:
        """Everything is kept on return."""
