"""The values that all roles put into their prompts: steps, tools, requests and reflections, line by line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from coevolve_jax.llm.prompting import Prompts, call_line, json_line, line, step_line
from coevolve_jax.types import Call, Context, Task, Triplet

question = Prompts(Path(__file__).parent / "prompts").question


def history(triplets: Sequence[Triplet]) -> list[str]:
    return [step_line(t.index, t.call, t.observation.text, t.observation.error) for t in triplets]


def call_lines(calls: Iterable[Call]) -> list[str]:
    """One line of JSON per call."""
    return [call_line(call) for call in calls]


def plan_lines(context: Context) -> list[str]:
    """One line per item of the context's plan: a call as JSON, or an action pattern."""
    return [line(item) if isinstance(item, str) else call_line(item) for item in context.plan]


def tool_lines(tools: Iterable[dict]) -> list[str]:
    """One line of JSON per function schema."""
    return [json_line(tool["function"]) for tool in tools]


def requests(task: Task) -> list[str]:
    """The user's messages of a task, turn by turn; none for a bare scenario."""
    return [line(turn.query) for turn in task.turns]


def lead(context: Context) -> dict:
    """The task and the findings of reflection, as values for a prompt."""
    return {
        "system": line(context.task.system),
        "signal": context.signal or "free",
        "requests": requests(context.task),
        "summary": line(context.summary),
        "failure_cause": line(context.failure_cause),
        "instability_pattern": line(context.instability_pattern),
        "focus": list(map(line, context.focus_pattern)),
        "avoid": list(map(line, context.avoid)),
        "must": list(map(line, context.must)),
        "plan": plan_lines(context),
    }
