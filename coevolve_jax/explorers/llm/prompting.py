"""Prompts from files, and what all roles put into them."""

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

# What JSON may hold and a line or a request may not: separators of lines, halves of surrogate pairs.
ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")
ANSWER = 1200  # characters of an environment's answer that a model is shown
SHOWN = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "prompts"),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def question(name: str, seed: int, about: Mapping[str, Any], **values) -> Question:
    """The prompt prompts/NAME.md: what the model is, a line of ---, what it is asked. seed: below 2**31. about: see
    explorers.base.LLMCall."""
    system, _, user = _template(name).render(**values).partition("\n---\n")
    return Question(whole(system.strip()), whole(user.strip()), seed, about)


@functools.cache
def _template(name: str) -> jinja2.Template:
    return SHOWN.get_template(f"{name}.md")


def seed_of(*parts: object) -> int:
    """A seed from names, for roles that have no generator of their own."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1


def step_line(index: int, call: Call, answer: str, error: bool) -> str:
    """One step as one line of JSON: what comes from an environment stays within its quotes."""
    row = {"step": index, "tool": call.name, "arguments": dict(call.arguments), "answer": answer[:ANSWER]}
    return _in_a_line({**row, "failed": True} if error else row)


def _in_a_line(row: dict) -> str:
    """JSON that no separator of lines ends, not even one of Unicode's own, and that can be encoded."""
    text = json.dumps(row, ensure_ascii=False)
    return ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def line(text: str) -> str:
    """Words of a model or a user for a prompt: in one line, so that they cannot pass for a part of it."""
    return " ".join(text.split())


def history(triplets: Sequence[Triplet]) -> list[str]:
    return [step_line(t.index, t.call, t.observation.text, t.observation.error) for t in triplets]


def call_lines(calls: Iterable[Call]) -> list[str]:
    """One call in a line of JSON."""
    return [_in_a_line({"tool": call.name, "arguments": dict(call.arguments)}) for call in calls]


def tool_lines(tools: Iterable[dict]) -> list[str]:
    """One function schema in a line of JSON."""
    return [_in_a_line(tool["function"]) for tool in tools]


def requests(task: Task) -> list[str]:
    """What the user of a task says, turn by turn; a bare scenario has no user."""
    return [line(turn.query) for turn in task.turns]


def lead(context: Context) -> dict:
    """What reflection found, for a prompt."""
    return {
        "signal": context.signal or "free",
        "requests": requests(context.task),
        "summary": line(context.summary),
        "failure_cause": line(context.failure_cause),
        "instability_pattern": line(context.instability_pattern),
        "focus": list(context.focus_pattern),
        "avoid": list(map(line, context.avoid)),
        "must": list(context.must),
    }
