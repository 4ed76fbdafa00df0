"""Macros as tools of one rollout (types.Macro): which of them a task can offer, and their schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coevolve_jax.rollout.chat import tool_name
from coevolve_jax.types import Hint, Macro


def offered(hint: Hint | None, tools: Sequence[Mapping]) -> dict[str, Macro]:
    """Returns the hint's macros by name. tools: function schemas of the task's tools.

    One that has no calls, calls a tool that is not there, or has the name of one, is left out.
    """
    known = {tool_name(tool) for tool in tools}
    fit = lambda m: m.calls and m.name not in known and {call.name for call in m.calls} <= known
    return {macro.name: macro for macro in (hint.macros if hint else ()) if fit(macro)}


def document(macro: Macro, tools: Sequence[Mapping]) -> dict:
    """The function schema of a macro, for chat templates. Its parameters are those of its calls."""
    schemas = {tool_name(tool): tool.get("function", tool).get("parameters", {}) for tool in tools}
    properties, required = {}, set()
    for call in macro.calls:
        own = schemas[call.name]
        for argument, parameter in call.arguments.items():
            properties.setdefault(parameter, own.get("properties", {}).get(argument, {}))
            required |= {parameter} if argument in own.get("required", ()) else set()
    does = f"Calls {', then '.join(call.name for call in macro.calls)}."
    order = [name for name in properties if name in required]
    parameters = {"type": "object", "properties": properties, "required": order}
    return {
        "type": "function",
        "function": {"name": macro.name, "description": does, "parameters": parameters},
    }
