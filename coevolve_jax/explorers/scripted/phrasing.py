"""Words calls less like a list of calls: config.explorer.wording=varied.

Values take their place in the tool's documentation ("change the price of product 'mug'"), openings and joints
vary, and a value that an earlier answer singles out may be described by it ("the product with the lowest
price"). Such a request is solved only by reading that answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from coevolve_jax.explorers.scripted.abstractor import asked, value_text
from coevolve_jax.explorers.scripted.arguments import json_value
from coevolve_jax.types import Call, Triplet

OPENINGS = (
    "{}.",
    "Please {}.",
    "Could you {}?",
    "I need you to {}.",
    "Can you {}?",
    "I would like you to {}.",
)
JOINTS = (" and then ", ", then ", ", and ", "; after that ")
DESCRIBED = 0.5  # share of the values described, of those that an earlier answer singles out
FEWEST = 3  # records among which one is singled out


def phrase(
    earlier: Sequence[Triplet],
    steps: Sequence[Triplet],
    tools: Sequence[dict],
    rng: np.random.Generator,
    wording: Callable[[Call], str],
) -> str:
    """Words the calls of one user turn.

    earlier: the steps of the turns before it. wording: the family's words for a call, which come first.
    """
    docs = {t["function"]["name"]: t["function"].get("description") or "" for t in tools}
    clauses, seen = [], list(earlier)
    for step in steps:
        call = step.call
        clauses.append(wording(call) or clause(call, asked(call.name, docs[call.name]), seen, rng))
        seen.append(step)
    text = clauses[0]
    for following in clauses[1:]:
        text += JOINTS[rng.integers(len(JOINTS))] + following
    whole = OPENINGS[rng.integers(len(OPENINGS))].format(text)
    return whole[0].upper() + whole[1:]


def clause(call: Call, request: str, seen: Sequence[Triplet], rng: np.random.Generator) -> str:
    """Words one call: its request, with each value in place of "a PARAMETER", or after it."""
    left, nouns = [], {name: name.replace("_", " ") for name in call.arguments}
    places, said_at = _places(request, nouns), {}
    for name, value in call.arguments.items():
        noun = nouns[name]
        described = singled_out(value, seen, rng) if rng.random() < DESCRIBED else ""
        said = f"the {noun} with {described}" if described else f"{noun} {value_text(value)}"
        if name in places:
            said_at[places[name]] = said
        else:
            left.append(said)
    for (start, end), said in sorted(said_at.items(), reverse=True):
        request = request[:start] + said + request[end:]
    if not left:
        return request
    listed = ", ".join(left[:-1]) + " and " * (len(left) > 1) + left[-1]
    return f"{request}, with {listed}"


def _places(request: str, nouns: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """Returns where "a PARAMETER" stands in a request, by the parameter's name.

    nouns: each parameter's words. Places do not overlap: "a file name" is no place of "file".
    """
    places: dict[str, tuple[int, int]] = {}
    for name in sorted(nouns, key=lambda name: -len(nouns[name])):
        for found in re.finditer(rf"\b(?:a|an) {re.escape(nouns[name])}\b(?!')", request):
            if all(found.end() <= start or end <= found.start() for start, end in places.values()):
                places[name] = found.span()
                break
    return places


def singled_out(value: Any, seen: Sequence[Triplet], rng: np.random.Generator) -> str:
    """Says what singles a name out among the records of an earlier answer, as "the lowest price".

    Returns "" where no earlier answer does. The latest answer that has the name counts: older ones may hold
    no more. Nor does it, where a later call may have changed its records.
    """
    if not isinstance(value, str):
        return ""
    later: list[list[Any]] = []
    for step in reversed(seen):
        records = records_of(json_value(step.observation.text))
        if value in records:
            if not all(_is_about_others(given, records) for given in later):
                return ""
            found = [
                f"the {word} {field.replace('_', ' ')}"
                for field in sorted(_numbers(records[value]))
                for word, best in (("lowest", min), ("highest", max))
                if _alone(records, value, field, best)
            ]
            return found[rng.integers(len(found))] if found else ""
        later.append([*_leaves([*step.call.arguments.values()])])
    return ""


def _is_about_others(given: Sequence[Any], records: Mapping[str, Mapping[str, Any]]) -> bool:
    """Tells whether a call names something by a text, and nothing of these records.

    given: the leaves of its arguments. Without a text it may be about all records, and a number may be an id.
    """
    known = {*records, *map(str, _leaves([*records.values()]))}
    return any(isinstance(leaf, str) for leaf in given) and known.isdisjoint(map(str, given))


def _leaves(value: Any) -> Iterator[Any]:
    """Yields the keys, texts and numbers in a JSON value."""
    if isinstance(value, Mapping):
        yield from value
        yield from _leaves([*value.values()])
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, (str, int, float)) and not isinstance(value, bool):
        yield value


def records_of(answer: Any) -> dict[str, Mapping[str, Any]]:
    """Returns the records in an answer by their names, where there are FEWEST or more.

    They are a mapping of records, or a list of records whose first text field names each.
    """
    if isinstance(answer, Mapping) and all(isinstance(v, Mapping) for v in answer.values()):
        found = {str(key): record for key, record in answer.items()}
    elif isinstance(answer, list) and answer and all(isinstance(record, Mapping) for record in answer):
        field = next((key for key, v in answer[0].items() if isinstance(v, str)), None)
        names = [record.get(field) for record in answer]
        unique = all(isinstance(name, str) for name in names) and len(set(map(str, names))) == len(names)
        found = {str(name): record for name, record in zip(names, answer)} if unique else {}
    else:
        found = {}
    return found if len(found) >= FEWEST else {}


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {k: v for k, v in record.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}


def _alone(records: Mapping[str, Mapping], name: str, field: str, best: Callable) -> bool:
    """Tells whether one record alone has the best value of a field that all records have."""
    values = [_numbers(record).get(field) for record in records.values()]
    if any(value is None for value in values):
        return False
    own = records[name][field]
    return own == best(values) and values.count(own) == 1
