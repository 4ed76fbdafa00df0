"""What Task.scenario holds in this family."""

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
    """The scenario of a BFCL task. toolsets: names of the classes offered. initial_state: by class.

    excluded: tools of those classes that are withheld: neither offered nor callable. announced: tools that are not
    offered, but told of in a later turn (multi_turn_miss_func); callable all the time, as in the official executor.
    documents: "official" is BFCL's own documentation as its Qwen handler shows it; "" is JSON schema.
    """
    rarer = {"announced": list(announced), "documents": documents}
    return {
        "toolsets": list(toolsets),
        "initial_state": dict(initial_state or {}),
        "excluded": list(excluded),
        **{name: value for name, value in rarer.items() if value},
    }
