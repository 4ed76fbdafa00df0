"""The formats of a policy's calls: Qwen's or Llama 3's JSON, or Python code. Nothing is evaluated here."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from coevolve_jax.types import Call

MAX_DEPTH = 64  # levels of a call's arguments: code that logs and compares them recurses

_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_BLOCK = re.compile(r"```python\n(.*?)(?:```|\Z)", re.DOTALL)
_OBJECTS = re.compile(r"\A(?:[\s;]|<\|python_tag\|>)*\{.*", re.DOTALL)
_BETWEEN = re.compile(r"(?:[\s;]|<\|python_tag\|>)*")  # what stands before and between Llama 3's calls
_BARE = {"name", "type", "id"}  # what a call without arguments may hold; other keys must not be lost
# Beginnings of control tokens and tags. In JSON they can only stand in a string.
_TAG = re.compile(r"<(?=\||/?(?:think|tool_call|tool_response)>)")


@dataclasses.dataclass(frozen=True)
class ParsedCall:
    """One block of a message: its text, and its call or the error that makes it none."""

    text: str
    call: Call | None
    error: str = ""


def _refuse_constant(name: str):
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):  # 1e999 would become Infinity, which records cannot hold
        raise ValueError(f"{text} is too large")
    return value


_JSON = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


def _malformed(text: str, why: str) -> ParsedCall:
    return ParsedCall(text, None, f"malformed tool call: {why}")


def _parse_json(body: str, closed: bool) -> ParsedCall:
    text = body.strip()
    if not closed:
        return _malformed(text, "no </tool_call>")
    try:
        data = _JSON.decode(text)
    except (ValueError, RecursionError) as e:
        return _malformed(text, type(e).__name__)
    return _checked(text, data, "arguments")


def _checked(text: str, data: Any, key: str) -> ParsedCall:
    """Returns the call that `data` is, with its arguments under `key`."""
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        return _malformed(text, f'needs {{"name": string, "{key}": object}}')
    arguments = data.get(key, data.get("arguments", {} if data.keys() <= _BARE else None))
    if not isinstance(arguments, dict):
        return _malformed(text, f"{key} is not an object")
    if _deeper(arguments, MAX_DEPTH):
        return _malformed(text, f"{key} are more than {MAX_DEPTH} levels deep")
    return ParsedCall(text, Call(data["name"], arguments))


def _deeper(value: Any, most: int) -> bool:
    """Says whether lists and objects are nested more than `most` times."""
    level = [value]
    for _ in range(most):
        level = [
            x for v in level if isinstance(v, list | dict) for x in (v if isinstance(v, list) else v.values())
        ]
    return any(isinstance(v, list | dict) for v in level)


def spoken(text: str, calls: re.Pattern = _CALL) -> str:
    """Returns what a message says after its thoughts, which end at the last </think>.

    A <think> that is left open leaves nothing: a thought is never acted upon. calls: a block of calls, in
    which both tags are text.
    """
    parts = re.compile(rf"(<think>.*?(?:</think>|\Z)|</think>)|{calls.pattern}", re.DOTALL)
    while thought := next((part for part in parts.finditer(text) if part[1]), None):
        if not thought[1].endswith("</think>"):
            return ""
        text = text[thought.end() :]  # begins anew, as calls of Llama 3 begin a text
    return text


def parse_calls(text: str) -> list[ParsedCall]:
    """Parses Qwen's tool calls in an assistant message, in order. JSON only: nothing is ever evaluated."""
    return [_parse_json(m.group(1), bool(m.group(2))) for m in _CALL.finditer(text)]


def _dumps(value: Any) -> str:
    """Writes JSON. A string's < is escaped where it would begin a control token or a tag."""
    return _TAG.sub(r"\\u003c", json.dumps(value, ensure_ascii=False))


def render_call(call: Call) -> str:
    """Writes the text that `parse_calls` reads back as `call`."""
    return f"<tool_call>\n{_dumps(call.to_json())}\n</tool_call>"


def render_short(call: Call) -> str:
    """Writes a call as templates/chatml_tools.jinja shows it, in one line."""
    return f"<tool_call>{_dumps(call.to_json())}</tool_call>"


def parse_objects(text: str) -> list[ParsedCall]:
    """Parses Llama 3's calls: a message that begins with a JSON object, or with <|python_tag|>.

    Semicolons, white space and <|python_tag|> may stand between the objects of several calls.
    """
    at = _between(text, 0)
    if not text.startswith("{", at) and "<|python_tag|>" not in text[:at]:
        return []
    found = []
    while at < len(text):
        try:
            data, end = _JSON.raw_decode(text, at)
        except (ValueError, RecursionError) as e:
            return [*found, _malformed(text[at:].strip(), type(e).__name__)]
        found.append(_checked(text[at:end], data, "parameters"))
        at = _between(text, end)
    return found


def _between(text: str, at: int) -> int:
    """Returns the end of what may stand before a call at `at`."""
    between = _BETWEEN.match(text, at)
    return between.end() if between else at


def render_object(call: Call) -> str:
    """Writes the text that `parse_objects` reads back as `call`."""
    return _dumps({"name": call.name, "parameters": dict(call.arguments)})


def parse_block(text: str) -> list[ParsedCall]:
    """Parses the first Python block of an assistant message, as a call execute(code=...). It is not run."""
    block = _BLOCK.search(text)
    return [ParsedCall(block[0], Call("execute", {"code": block[1].strip()}))] if block else []


def render_block(call: Call) -> str:
    """Writes the text that `parse_block` reads back as `call`."""
    return f"```python\n{call.arguments['code']}\n```"


class Writing(NamedTuple):
    """A format of calls.

    block: matches a block of calls.
    templated: True where the chat template lists the tools and has a role for their answers. Otherwise the
    first message says how to write a block, and its output comes back as a user's message.
    """

    parse: Callable[[str], list[ParsedCall]]
    render: Callable[[Call], str]
    block: re.Pattern
    templated: bool


WRITINGS = {
    "json": Writing(parse_calls, render_call, _CALL, True),
    "llama3": Writing(parse_objects, render_object, _OBJECTS, True),
    "python": Writing(parse_block, render_block, _BLOCK, False),
}
HOW = """{description}
To run code, write one block in a message:
```python
...
```
Only the first block of a message is run, and its output follows. A message without a block ends your turn.

"""
OUTPUT = "Output:\n```\n{text}\n```"
