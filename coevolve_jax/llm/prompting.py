"""Questions to a model: prompts from files, and values that stay within their line of a prompt."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from coevolve_jax.types import Call

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")  # C0, C1, and of direction

# Characters that JSON may hold but a line or a request may not: line separators, lone surrogates.
ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")
ANSWER = 1200  # characters of an environment's answer that a prompt shows


class Question(NamedTuple):
    """A prompt for a model.

    seed: goes to the model, so that equal questions may get different answers and each is reproducible.
    about: the purpose of the question, for the log alone (llm.calls.LLMCall).
    """

    system: str
    user: str
    seed: int
    about: Mapping[str, Any] = {}


class Prompts:
    """The prompts of a folder: files NAME.md with the system prompt, a line of ---, then the user prompt.

    They may include the files of llm/prompts/.
    """

    def __init__(self, folder: Path):
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader([folder, Path(__file__).parent / "prompts"]),
            undefined=jinja2.StrictUndefined,
            auto_reload=False,
            trim_blocks=True,
            lstrip_blocks=True,
        )

    def question(self, name: str, seed: int, about: Mapping[str, Any], **values) -> Question:
        """Renders NAME.md.

        seed: below 2**31. about: see calls.LLMCall. values: of the template's variables.
        """
        system, _, user = self._environment.get_template(f"{name}.md").render(**values).partition("\n---\n")
        return Question(whole(system.strip()), whole(user.strip()), seed, about)


def seed_of(*parts: object) -> int:
    """Derives a seed below 2**31 from names, for roles that have no generator of their own."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "big") >> 1


def whole(text: str) -> str:
    """Makes text fit to be encoded: lone surrogates, which JSON may hold, become U+FFFD."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def call_line(call: Call) -> str:
    """Puts one call into one line of JSON."""
    return json_line({"tool": call.name, "arguments": dict(call.arguments)})


def step_line(index: int, call: Call, answer: str, error: bool) -> str:
    """Puts one step into one line of JSON, so that the environment's text stays within quotes."""
    row = {"step": index, "tool": call.name, "arguments": dict(call.arguments), "answer": answer[:ANSWER]}
    return json_line({**row, "failed": True} if error else row)


def json_line(row: dict) -> str:
    """Writes JSON in one line and fit to be encoded. Unicode's own line separators are escaped too."""
    text = json.dumps(row, ensure_ascii=False)
    return ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def visible(text: str) -> str:
    """Leaves out the characters that a terminal would obey, except new lines and tabs."""
    return CONTROL.sub(lambda found: found[0] if found[0] in "\n\t" else "", text)


def line(text: str) -> str:
    """Puts a model's or a user's words into one line, so that they cannot pass for a part of the prompt.

    Characters that a terminal would obey are left out.
    """
    return " ".join(CONTROL.sub("", " ".join(text.split())).split())
