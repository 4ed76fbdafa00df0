"""The contents of Task.scenario in this family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def scenario(
    toolsets: Sequence[str],
    initial_state: Mapping[str, Any] | None = None,
    excluded: Sequence[str] = (),
    announced: Sequence[str] = (),
    documents: str = "",
) -> dict:
    """Returns the scenario of a BFCL task.

    toolsets: names of the classes that are offered. initial_state: by class.
    excluded: withheld tools of those classes, neither offered nor callable.
    announced: tools that only a later turn offers (multi_turn_miss_func). As in the official executor, they
        are callable all the time.
    documents: "official" shows BFCL's own documentation as its Qwen handler does; "" shows JSON schema.
    """
    rarer = {"announced": list(announced), "documents": documents}
    return {
        "toolsets": list(toolsets),
        "initial_state": dict(initial_state or {}),
        "excluded": list(excluded),
        **{name: value for name, value in rarer.items() if value},
    }
