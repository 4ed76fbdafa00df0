"""The LLM calls of an explorer as rows of llm_calls.jsonl. Each prompt line is stored once.

A row holds the fields of llm.calls.LLMCall, with "system" and "user" as lists of line numbers. Its
"lines" are the texts of the lines that no earlier row has. Lines are numbered from 0 over all rows.

Prompts repeat the tools and the steps so far again and again; storing each line once keeps the file small.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from coevolve_jax.llm.calls import LLMCall

PROMPTS = ("system", "user")


class Packer:
    """Packs LLM calls into rows. rows: those that the file already has."""

    def __init__(self, rows: Iterable[Mapping] = ()):
        self._numbers: dict[str, int] = {}
        for row in rows:
            for line in row["lines"]:
                self._numbers[line] = len(self._numbers)

    def pack(self, llm_calls: Iterable[LLMCall | Mapping]) -> Iterator[dict]:
        """Yields the row of each call."""
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
    """All lines of a file's rows, by number."""
    return [line for row in rows for line in row["lines"]]


def whole(row: Mapping, lines: Sequence[str]) -> dict:
    """Unpacks a row: the call with its prompts as text. lines: from `all_lines`."""
    fields = {name: value for name, value in row.items() if name != "lines"}
    return {**fields, **{name: "\n".join(map(lines.__getitem__, row[name])) for name in PROMPTS}}
