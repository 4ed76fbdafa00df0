"""Labelled paraphrases: tasks with the same request in another way, and tasks that only look alike.

A leak keeps the task's values: in synonyms, in other templates, in another order, with one more call. Other
values, in the same or other words, are no leak. Paraphrases are compared, never executed: a new order may not
run.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from coevolve_jax.envs.base import wording
from coevolve_jax.explorers.scripted.abstractor import value_text, word
from coevolve_jax.types import Call, Task, Turn

Tools = Callable[[Task], list[dict]]
Values = Mapping[tuple[str, str], Sequence[Any]]  # by tool and parameter
Say = Callable[[Sequence[Call]], str]

SYNONYMS = {
    "add": "append",
    "after": "once",
    "change": "switch",
    "close": "finish",
    "compare": "contrast",
    "contents": "text",
    "copy": "duplicate",
    "create": "make",
    "current": "present",
    "delete": "remove",
    "directory": "folder",
    "display": "show",
    "edit": "modify",
    "file": "document",
    "find": "locate",
    "first": "to begin with",
    "folder": "directory",
    "get": "fetch",
    "lines": "rows",
    "list": "enumerate",
    "message": "note",
    "messages": "notes",
    "move": "relocate",
    "name": "title",
    "number": "count",
    "post": "publish",
    "remove": "delete",
    "retrieve": "fetch",
    "return": "give back",
    "search": "look",
    "send": "dispatch",
    "specified": "named",
    "then": "next",
    "ticket": "request",
    "update": "revise",
    "user": "person",
    "view": "look at",
    "with": "using",
    "working": "active",
}
OPENINGS = ("Could you please", "I would like you to", "Your job now:", "Kindly", "What I need is to")
JOINS = (" and afterwards ", ". Next, ", "\n- ", ", and when that is done, ")
ARGUMENTS = ("{value} as the {name}", "{name}: {value}", "{value}")


def paraphrases(
    task: Task, tools: Tools, values: Values, rng: np.random.Generator
) -> list[tuple[str, bool, Task]]:
    """(kind, whether it is a leak, the task in another way), for each kind that the task allows.

    tools: function schemas of a task, as its environment family gives them. values: see `values_of`.
    """
    calls = task.calls
    ours: Say = lambda calls: word(calls, tools(task), rng, wording)
    theirs: Say = lambda calls: in_other_words(calls, rng)
    made = [
        ("synonyms", True, _reworded(task, synonymous)),
        ("templates", True, _worded(task, calls, theirs)),
    ]
    order = [calls[i] for i in rng.permutation(len(calls))]
    if order != list(calls):
        made.append(("order", True, _worded(task, order, ours)))
        other = _reworded(_worded(task, order, theirs), synonymous)
        made.append(("order, templates, synonyms", True, other))
    tool, parameter = sorted(values)[rng.integers(len(values))]
    further = Call(tool, {parameter: _drawn(values[tool, parameter], rng)})
    made.append(("one call more, templates", True, _worded(task, [*calls, further], theirs)))
    if any(call.arguments for call in calls):
        own = values_of([task])
        elsewhere = {key: [v for v in found if v not in own.get(key, ())] for key, found in values.items()}
        changed = [other_values(call, elsewhere, rng) for call in calls]
        made.append(("other values", False, _worded(task, changed, ours)))
        made.append(("other values, templates", False, _worded(task, changed, theirs)))
    named = lambda kind, made: dataclasses.replace(made, id=f"{task.id}, {kind}")
    return [(kind, leak, named(kind, made)) for kind, leak, made in made]


def values_of(tasks: Sequence[Task]) -> Values:
    """The distinct values that the tasks' calls give each parameter of each tool, in order of their text."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for call in (call for task in tasks for call in task.calls):
        for name, value in call.arguments.items():
            found.setdefault((call.name, name), {})[json.dumps(value, sort_keys=True)] = value
    return {key: [own[text] for text in sorted(own)] for key, own in found.items()}


def other_values(call: Call, values: Values, rng: np.random.Generator) -> Call:
    """The call with another value for each argument: one from elsewhere, or a made-up one."""
    changed = {}
    for name, value in call.arguments.items():
        others = [v for v in values.get((call.name, name), ()) if v != value]
        changed[name] = _drawn(others, rng) if others else _made_up(value)
    return Call(call.name, changed)


def synonymous(query: str) -> str:
    """Replaces words of the tools' documentation by synonyms; quoted values stay."""
    parts = query.split("'")
    for i in range(0, len(parts), 2):
        parts[i] = " ".join(_synonym(w) for w in parts[i].split(" "))
    return "'".join(parts)


def in_other_words(calls: Sequence[Call], rng: np.random.Generator) -> str:
    """A user's message from tool names and values, by templates that no explorer of ours uses."""
    say = lambda options: options[rng.integers(len(options))]
    clauses = []
    for call in calls:
        style = say(ARGUMENTS)
        given = [
            style.format(name=n.replace("_", " "), value=value_text(v)) for n, v in call.arguments.items()
        ]
        clauses.append(" ".join([call.name.replace("_", " "), *(["for", "; ".join(given)] if given else [])]))
    return f"{say(OPENINGS)} {say(JOINS).join(clauses)}, thanks!"


def _worded(task: Task, calls: Sequence[Call], say: Say) -> Task:
    """The task with these calls over its turns, and further ones in the last, in other words."""
    ends = list(itertools.accumulate(len(turn.calls) for turn in task.turns))
    parts = [calls[a:b] for a, b in itertools.pairwise([0, *ends[:-1], len(calls)])]
    turns = tuple(Turn(say(part), tuple(part)) for part in parts)
    return dataclasses.replace(task, turns=turns)


def _reworded(task: Task, say: Callable[[str], str]) -> Task:
    return dataclasses.replace(task, turns=tuple(Turn(say(turn.query), turn.calls) for turn in task.turns))


def _synonym(written: str) -> str:
    bare = written.lower().strip(".,;()")
    return written.lower().replace(bare, SYNONYMS[bare], 1) if bare in SYNONYMS else written


def _drawn(options: Sequence[Any], rng: np.random.Generator) -> Any:
    return options[rng.integers(len(options))]


def _made_up(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 7
    if isinstance(value, str):
        return f"{value[::-1]}x"
    return [_made_up(v) for v in value] if isinstance(value, list) else None
