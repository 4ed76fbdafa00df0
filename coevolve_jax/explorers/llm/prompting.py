"""Prompts from files, and the values that all roles put into them."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from coevolve_jax.explorers.llm.answers import Question, whole
from coevolve_jax.types import Call, Context, Task, Triplet

# Characters that JSON may hold but a line or a request may not: line separators, lone surrogates.
ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")
ANSWER = 1200  # characters of an environment's answer that a prompt shows
SHOWN = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "prompts"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def question(name: str, seed: int, about: Mapping[str, Any], **values) -> Question:
    """Renders prompts/NAME.md: the system prompt, a line of ---, then the user prompt.

    seed: below 2**31. about: see explorers.base.LLMCall. values: of the template's variables.
    """
    system, _, user = _template(name).render(**values).partition("\n---\n")
    return Question(whole(system.strip()), whole(user.strip()), seed, about)


@functools.cache
def _template(name: str) -> jinja2.Template:
    return SHOWN.get_template(f"{name}.md")


def seed_of(*parts: object) -> int:
    """Derives a seed below 2**31 from names, for roles that have no generator of their own."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1


def step_line(index: int, call: Call, answer: str, error: bool) -> str:
    """Puts one step into one line of JSON, so that the environment's text stays within quotes."""
    row = {"step": index, "tool": call.name, "arguments": dict(call.arguments), "answer": answer[:ANSWER]}
    return _in_a_line({**row, "failed": True} if error else row)


def _in_a_line(row: dict) -> str:
    """Writes JSON in one line and fit to be encoded. Unicode's own line separators are escaped too."""
    text = json.dumps(row, ensure_ascii=False)
    return ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def line(text: str) -> str:
    """Puts a model's or a user's words into one line, so that they cannot pass for a part of the prompt."""
    return " ".join(text.split())


def history(triplets: Sequence[Triplet]) -> list[str]:
    return [step_line(t.index, t.call, t.observation.text, t.observation.error) for t in triplets]


def call_lines(calls: Iterable[Call]) -> list[str]:
    """One line of JSON per call."""
    return [_in_a_line({"tool": call.name, "arguments": dict(call.arguments)}) for call in calls]


def plan_lines(context: Context) -> list[str]:
    """One line per item of the context's plan: a call as JSON, or an action pattern."""
    return [line(item) if isinstance(item, str) else call_lines([item])[0] for item in context.plan]


def tool_lines(tools: Iterable[dict]) -> list[str]:
    """One line of JSON per function schema."""
    return [_in_a_line(tool["function"]) for tool in tools]


def requests(task: Task) -> list[str]:
    """The user's messages of a task, turn by turn; none for a bare scenario."""
    return [line(turn.query) for turn in task.turns]


def lead(context: Context) -> dict:
    """The findings of reflection, as values for a prompt."""
    return {
        "signal": context.signal or "free",
        "requests": requests(context.task),
        "summary": line(context.summary),
        "failure_cause": line(context.failure_cause),
        "instability_pattern": line(context.instability_pattern),
        "focus": list(context.focus_pattern),
        "avoid": list(map(line, context.avoid)),
        "must": list(map(line, context.must)),
        "plan": plan_lines(context),
    }
