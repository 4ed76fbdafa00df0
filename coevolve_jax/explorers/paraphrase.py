"""Checks of a paraphrase by its text alone, cheapest first.

    same       it is the query
    too_long   it has more than TIMES the query's characters
    control    it holds a control token, or a control character that the query lacks, such as a new line
    markup     it holds a character of markup or code that the query lacks
    value      it lacks an argument of the reference calls that stands in the query, or adds a number
    tool_name  it names a tool that the query does not name

They do not see whether it leaves out a request without arguments: solving the task does (wording.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from coevolve_jax.types import Turn

TIMES = 2.0
MARKUP = frozenset("<>{}[]|\\=`*#@~^$%&/+")
_NUMBER = re.compile(r"\d+")


def fault(turn: Turn, answer: str, tools: Sequence[str], controls: Callable[[str], bool]) -> str:
    """Returns the first check that a paraphrase fails; "" for none.

    turn: with the rule-made query and its calls. tools: names of all tools on offer. controls: whether a text
    holds a control token.
    """
    plain = lambda text: " ".join(text.split()).rstrip(".").lower()
    values = {leaf for call in turn.calls for value in call.arguments.values() for leaf in _leaves(value)}
    new_tools = (t for t in tools if _stands(t, answer) and not _stands(t.lower(), turn.query.lower()))
    checks = (
        ("same", plain(answer) == plain(turn.query)),
        ("too_long", len(answer) > TIMES * len(turn.query)),
        ("control", controls(answer) or not all(c.isprintable() or c in turn.query for c in answer)),
        ("markup", not MARKUP.intersection(answer) <= set(turn.query)),
        ("value", not all(_survives(v, turn.query, answer) for v in values)),
        ("value", not set(_NUMBER.findall(answer)) <= set(_NUMBER.findall(turn.query))),
        ("tool_name", any(new_tools)),
    )
    return next((name for name, failed in checks if failed), "")


def _leaves(value: Any) -> Iterator[str]:
    """The parts of a value, as a query writes them: texts, numbers, true, false, null, and keys."""
    if isinstance(value, Mapping | list | tuple):
        for part in (*value, *value.values()) if isinstance(value, Mapping) else value:
            yield from _leaves(part)
    else:
        yield value if isinstance(value, str) else json.dumps(value)


def _survives(value: str, query: str, answer: str) -> bool:
    """Whether a value that stands in the query stands in the answer: in quotes, if the query quotes it."""
    quoted = re.compile(rf"""['"‘“`]{re.escape(value)}['"’”`]""")
    if quoted.search(query):
        return bool(quoted.search(answer))
    return not _stands(value, query) or _stands(value, answer)


def _stands(value: str, text: str) -> bool:
    """Whether a value stands in a text, and not as a part of a longer word or number."""
    return bool(value) and bool(re.search(rf"(?<![\w.-]){re.escape(value)}(?!\w|[.-]\w)", text))
