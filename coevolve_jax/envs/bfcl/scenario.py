"""The contents of Task.scenario in this family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coevolve_jax.types import Task

SINGLE_TURN_ENVIRONMENT = "bfcl_single_turn"  # Task.environment of single-turn tasks


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


def single_turn_scenario(
    category: str, functions: Sequence[Mapping], answers: Sequence[Mapping], documents: str = ""
) -> dict:
    """Returns the scenario of a single-turn task.

    category: BFCL's name, such as simple_python. functions: BFCL's documents of the functions offered.
    answers: of each call, {function: {parameter: [possible values]}}; "" says that one may be left out.
    documents: as in `scenario`.
    """
    start = {"category": category, "functions": list(functions), "answers": list(answers)}
    return start | ({"documents": documents} if documents else {})


def alike(task: Task) -> str:
    """Labels single-turn tasks whose reference calls the same functions.

    Some requests stand in two categories, word for word: 97 of simple_python are in multiple too.
    """
    return ", ".join(sorted({call.name for call in task.calls}))
