"""What a model that explores was asked and answered, as rows of llm_calls.jsonl: each line of a prompt is stored once.

A row is a question: the fields of explorers.base.LLMCall, where "system" and "user" are lists of line numbers, and
"lines", the texts of those that no row before it has. Numbers count the lines of all rows from the first one's.
Prompts repeat the tools, and the steps so far, again and again: this is what keeps the file small.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from coevolve_jax.explorers.base import LLMCall

PROMPTS = ("system", "user")


class Packer:
    """rows: those that the file holds already."""

    def __init__(self, rows: Iterable[Mapping] = ()):
        self._numbers: dict[str, int] = {}
        for row in rows:
            for line in row["lines"]:
                self._numbers[line] = len(self._numbers)

    def pack(self, llm_calls: Iterable[LLMCall | Mapping]) -> Iterator[dict]:
        """The rows of whole calls."""
        for llm_call in llm_calls:
            fields = dataclasses.asdict(llm_call) if isinstance(llm_call, LLMCall) else llm_call
            fresh: list[str] = []
            numbers = {
                name: [self._number(line, fresh) for line in fields[name].split("\n")] for name in PROMPTS
            }
            yield {**fields, **numbers, "lines": fresh}

    def _number(self, line: str, fresh: list[str]) -> int:
        if line not in self._numbers:
            self._numbers[line] = len(self._numbers)
            fresh.append(line)
        return self._numbers[line]


def all_lines(rows: Iterable[Mapping]) -> list[str]:
    """The lines of a file's rows, by number."""
    return [line for row in rows for line in row["lines"]]


def whole(row: Mapping, lines: Sequence[str]) -> dict:
    """The call of a row, with its prompts as text. lines: of all rows."""
    fields = {name: value for name, value in row.items() if name != "lines"}
    return {**fields, **{name: "\n".join(map(lines.__getitem__, row[name])) for name in PROMPTS}}
