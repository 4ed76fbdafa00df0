"""What Task.scenario holds in this family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def scenario(
    toolsets: Sequence[str], initial_state: Mapping[str, Any] | None = None, excluded: Sequence[str] = ()
) -> dict:
    """The scenario of a BFCL task. toolsets: names of the classes offered. initial_state: by class.
    excluded: names of tools of those classes that are withheld."""
    return {
        "toolsets": list(toolsets),
        "initial_state": dict(initial_state or {}),
        "excluded": list(excluded),
    }
