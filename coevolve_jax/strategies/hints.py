"""Advice that methods with a memory give: its one line, tools made of calls, and how alike two queries are.

A base policy can learn in pre-training to read this line (docs/notes/arena.md). Advice names actions, not
arguments: those are another task's.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

from coevolve_jax.types import Call, Macro

QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
WORD = re.compile(r"[a-z]+")
LONGEST = 64  # characters of a tool's name


def line(do: Sequence[str], avoid: Sequence[str] = (), most: int = 200) -> str:
    """Returns one line of advice, at most `most` characters long; "" for none.

    do, avoid: actions, most important first. Those without room are left out, and no action comes twice.
    """
    return _told(*said(do, avoid, most))


def said(do: Sequence[str], avoid: Sequence[str] = (), most: int = 200) -> tuple[list[str], list[str]]:
    """Returns the actions that `line` recommends, and those that it warns of."""
    do, avoid = list(dict.fromkeys(do)), [a for a in dict.fromkeys(avoid) if a not in do]
    while len(_told(do, avoid)) > most:
        max(do, avoid, key=len).pop()
    return do, avoid


def _told(do: Sequence[str], avoid: Sequence[str]) -> str:
    parts = [f"{word} {', '.join(names)}." for word, names in (("Use", do), ("Not", avoid)) if names]
    return " ".join(["Hint:", *parts]) if parts else ""


def alike(a: str, b: str) -> float:
    """Returns how alike two names are, from 0 to 1."""
    return 1.0 if a == b else SequenceMatcher(None, a, b).ratio()


def words(query: str) -> frozenset[str]:
    """Returns the words of a query in lower case. Quoted names are left out: they are the scenario's."""
    return frozenset(WORD.findall(QUOTED.sub(" ", query.lower())))


def overlap(a: Iterable[str], b: Iterable[str]) -> float:
    """Returns the share of all elements of two sets that both have, 0 for empty ones (Jaccard)."""
    one, other = set(a), set(b)
    return len(one & other) / len(one | other) if one | other else 0.0


def macro_of(calls: Sequence[Call]) -> Macro:
    """Makes a tool that stands for these calls, with their arguments as parameters.

    Equal texts become one parameter, which has the name of the first argument that it was given to. A name
    that is too long is cut, and ends with a digest of the whole.
    """
    names: dict[tuple[str, str], str] = {}

    def parameter(argument: str, value: object) -> str:
        key = ("", value) if isinstance(value, str) else (argument, json.dumps(value, sort_keys=True))
        more = itertools.chain([argument], (f"{argument}_{n}" for n in itertools.count(2)))
        return names.setdefault(key, next(name for name in more if name not in names.values()))

    made = tuple(Call(c.name, {k: parameter(k, v) for k, v in c.arguments.items()}) for c in calls)
    name = re.sub(r"\W", "_", whole := "_then_".join(c.name for c in calls))
    if len(name) > LONGEST:
        digest = hashlib.sha256(whole.encode()).hexdigest()[:6]
        name = f"{name[: LONGEST - 7]}_{digest}"
    return Macro(name, made)


def call_of(macro: Macro, calls: Sequence[Call]) -> Call:
    """The call of a macro that stands for these calls, those that it was made of."""
    pairs = zip(calls, macro.calls, strict=True)
    return Call(macro.name, {m.arguments[k]: v for c, m in pairs for k, v in c.arguments.items()})
