"""The formats of a policy's calls: Qwen's JSON tool calls, or Python code. Nothing is evaluated here."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from coevolve_jax.types import Call

MAX_DEPTH = 64  # levels of a call's arguments: code that logs and compares them recurses

END = "<|im_end|>"
_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_BLOCK = re.compile(r"```python\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class ParsedCall:
    """One block of a message: its text, and its call or the error that makes it none."""

    text: str
    call: Call | None
    error: str = ""


def _refuse_constant(name: str):
    raise ValueError(f"{name} is not JSON")


def _parse_json(body: str, closed: bool) -> ParsedCall:
    text = body.strip()
    if not closed:
        return ParsedCall(text, None, "malformed tool call: no </tool_call>")
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as e:
        return ParsedCall(text, None, f"malformed tool call: {type(e).__name__}")
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return ParsedCall(text, None, 'malformed tool call: needs {"name": string, "arguments": object}')
    arguments = data.get("arguments", {})
    if not isinstance(arguments, dict):
        return ParsedCall(text, None, "malformed tool call: arguments is not an object")
    if _deeper(arguments, MAX_DEPTH):
        return ParsedCall(text, None, f"malformed tool call: arguments are more than {MAX_DEPTH} levels deep")
    return ParsedCall(text, Call(data["name"], arguments))


def _deeper(value: Any, most: int) -> bool:
    """Says whether lists and objects are nested more than `most` times."""
    level = [value]
    for _ in range(most):
        level = [
            x for v in level if isinstance(v, list | dict) for x in (v if isinstance(v, list) else v.values())
        ]
    return any(isinstance(v, list | dict) for v in level)


def parse_calls(text: str) -> list[ParsedCall]:
    """Parses Qwen's tool calls in an assistant message, in order. JSON only: nothing is ever evaluated."""
    return [_parse_json(m.group(1), bool(m.group(2))) for m in _CALL.finditer(text)]


def render_call(call: Call) -> str:
    """Writes the text that `parse_calls` reads back as `call`."""
    return f"<tool_call>\n{json.dumps(call.to_json(), ensure_ascii=False)}\n</tool_call>"


def parse_block(text: str) -> list[ParsedCall]:
    """Parses the first Python block of an assistant message, as a call execute(code=...). It is not run."""
    block = _BLOCK.search(text.removesuffix(END))
    return [ParsedCall(block[0], Call("execute", {"code": block[1].strip()}))] if block else []


def render_block(call: Call) -> str:
    """Writes the text that `parse_block` reads back as `call`."""
    return f"```python\n{call.arguments['code']}\n```"


class Writing(NamedTuple):
    """A format of calls.

    templated: True where the chat template lists the tools and has a role for their answers. Otherwise the
    first message says how to write a block, and its output comes back as a user's message.
    """

    parse: Callable[[str], list[ParsedCall]]
    render: Callable[[Call], str]
    templated: bool


WRITINGS = {
    "json": Writing(parse_calls, render_call, True),
    "python": Writing(parse_block, render_block, False),
}
HOW = """{description}
To run code, write one block in a message:
```python
...
```
Only the first block of a message is run, and its output follows. A message without a block ends your turn.

"""
OUTPUT = "Output:\n```\n{text}\n```"
