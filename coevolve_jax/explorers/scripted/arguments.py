"""Arguments for tool calls without an LLM: from tool schemas and from values seen in the environment."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from coevolve_jax.explorers.scripted.tools import Param, Tool, named_values, stem, stems, tokens
from coevolve_jax.types import Call, Observation, Triplet

MAX_STRING = 40  # characters; a user would not type more
NOUNS = (
    "amber apple arrow autumn bridge candle canyon castle cedar cloud copper coral cotton delta ember "
    "falcon forest garden garnet harbor hazel island ivory jasmine lantern lemon linen maple marble "
    "meadow mirror ocean olive orchid panda paper pearl pepper pine planet prairie quartz raven "
    "ribbon river saddle silver spruce summer sunset timber tulip valley velvet violet winter"
).split()
PHRASES = (
    "meeting report budget plan weekly update project review final draft sales forecast travel notes "
    "urgent request team schedule customer feedback annual summary quick question new idea good "
    "morning great progress price alert"
).split()
CITIES = ("San Francisco", "Los Angeles", "New York", "Chicago", "Boston", "London", "Paris")
UNITS = ("m", "cm", "mm", "km", "in", "ft", "kg", "g", "lb", "oz")
KNOWN = 0.8  # probability of using a value that the scenario names
OPTIONAL = 0.25  # probability of giving an optional parameter
TEXT = stems("message", "content", "text", "title", "description", "resolution", "comment")
REFUSALS = stems("status", "success")  # keys whose value false says that the tool did not do its work


@dataclasses.dataclass(frozen=True)
class Entry:
    """A value seen in the environment.

    words: the stems of its key and of the name above it. path: the names above it, outermost first. fresh:
    whether this round has shown it.
    """

    value: Any
    key: str
    words: frozenset[str]
    path: tuple[str, ...]
    fresh: bool = False


def harvest(data: Any, key: str = "", path: tuple[str, ...] = (), fresh: bool = False) -> Iterable[Entry]:
    """Yields the values of a JSON tree, and as values too the names in a collection (files, symbols).

    A text above MAX_STRING characters gives up to five of its words instead.
    """
    if isinstance(data, Mapping):
        # The keys of a mapping of records are names, and so are capitalised ones: {"Al": "USR1"}, {"Al": 5}.
        collection = all(isinstance(v, Mapping) for v in data.values()) or all(
            isinstance(v, str | int | float) and k[:1].isupper() for k, v in data.items()
        )
        for name, value in data.items():
            if collection:
                kind = value.get("type", "") if isinstance(value, Mapping) else ""
                yield from harvest(name, f"{key} {kind} id name", path, fresh)
            yield from harvest(value, name, (*path, key), fresh)
    elif isinstance(data, (list, tuple)):
        for value in data:
            yield from harvest(value, key, path, fresh)
    elif isinstance(data, str) and len(data) > MAX_STRING:
        for word in re.findall(r"\b[A-Za-z]{4,12}\b", data)[:5]:
            yield Entry(word, "keyword", frozenset(("keyword", "pattern")), path, fresh)
    elif data is not None and data != "":
        words = tokens(" ".join((*path[-1:], key)))
        yield Entry(data, key, words, path, fresh)
        if isinstance(data, str) and data.isdecimal():
            yield Entry(int(data), key, words, path, fresh)


def harvest_state(state: Mapping[str, Any]) -> Iterable[Entry]:
    """Yields the values of an initial state, a mapping by toolset. Names of attributes are no values."""
    for part, attributes in state.items():
        for name, value in attributes.items() if isinstance(attributes, Mapping) else [(part, attributes)]:
            yield from harvest(value, name)


class Bank:
    """Values of one environment: from the scenario's initial state and from later observations.

    near: names in use, such as an entered folder. Values directly below such a name get more weight.
    failed: arguments of failed calls; they get less weight.
    known: values by parameter, or by TOOL.PARAMETER, where the scenario names them ("values").
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        near: frozenset = frozenset(),
        failed: frozenset = frozenset(),
        known: Mapping[str, Sequence[Any]] | None = None,
    ):
        self.entries, self.near, self.failed = tuple(dict.fromkeys(entries)), near, failed
        self.known = known or {}

    def extended(self, history: Sequence[Triplet]) -> Bank:
        """Returns a bank with the values of a round's successful steps added: answers and arguments."""
        seen, near, failed = [], set(), set()
        for step in history:
            arguments = {v for v in step.call.arguments.values() if isinstance(v, (str, int, float))}
            if not succeeded(step.observation):
                failed |= arguments
                continue
            near |= arguments
            seen.extend(harvest(json_value(step.observation.text), step.call.name, fresh=True))
            seen.extend(harvest(dict(step.call.arguments), fresh=True))
        return Bank((*self.entries, *seen), frozenset(near), frozenset(failed - near), self.known)

    def weigh(self, param: Param) -> tuple[list[Any], np.ndarray]:
        """Returns values of the right type, each once, and weights by how well their names fit [values]."""
        total: dict[Any, float] = {}
        for entry in self.entries:
            value = cast(entry.value, param.type)
            if value is None or (param.given and not _in_range(param, value)):
                continue
            overlap = len(param.words & entry.words) / max(len(param.words), 1)
            hinted = min(len(param.hints & entry.words), 2)
            weight = 3.0 * (entry.key == param.name) + 2.0 * overlap + 0.7 * hinted
            weight *= 3.0 if entry.fresh else 1.0
            weight *= 4.0 if self.near.intersection(entry.path[-1:]) else 1.0
            weight *= (0.2 if value in self.failed else 1.0) / (1 + 0.3 * len(entry.path))
            total[value] = total.get(value, 0.0) + weight
        return list(total), np.array(list(total.values()))


def json_value(text: str) -> Any:
    """Parses an answer: JSON, else a Python literal of that shape (BFCL writes lists so), else the text."""
    for read in (json.loads, lambda text: json.loads(json.dumps(ast.literal_eval(text)))):
        try:
            return read(text)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
    return text


def succeeded(observation: Observation) -> bool:
    """Whether a call worked. False also for refusals that are not marked: a false status, "not found"."""
    if observation.error or "not found" in observation.text:
        return False
    answer = json_value(observation.text)
    items = answer.items() if isinstance(answer, dict) else ()
    return not any(v is False and tokens(k) & REFUSALS for k, v in items)


def cast(value: Any, type_: str) -> Any:
    """The value if a parameter of this type takes it, else None. A number is rounded to 2 decimals."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300
    if type_ == "string":
        return value if isinstance(value, str) and value != "None" else None
    if type_ == "integer":
        return value if number and isinstance(value, int) else None
    return round(float(value), 2) if type_ == "number" and number else None


def draw(param: Param, bank: Bank, rng: np.random.Generator, tool: str = "") -> Any:
    """Draws a value for a parameter: known, allowed, seen under a similar name, or invented.

    The sources are tried in this order. Each is used with a probability only, so that values vary.
    """
    known = _known(param, bank, tool)
    if known and rng.random() < KNOWN:
        return known[rng.integers(len(known))]
    single = param.given and len(param.choices) == 1
    if param.choices and (single or rng.random() < 0.9):
        return param.choices[rng.integers(len(param.choices))]
    if param.type == "boolean":
        other_than_default = isinstance(param.default, bool) and not param.required
        return not param.default if other_than_default else bool(rng.random() < 0.5)
    if param.type == "object" and param.item and not param.fields:
        names = rng.choice(len(NOUNS), size=rng.integers(1, 3), replace=False)
        return {NOUNS[i]: draw(param.item, bank, rng, tool) for i in names}
    if param.type == "object":
        count = min(len(param.fields), 1 + int(rng.integers(2)))
        drawn = rng.choice(len(param.fields), size=count, replace=False).tolist() if count else []
        chosen = sorted({*drawn, *(i for i, field in enumerate(param.fields) if field.required)})
        return {param.fields[i].name: draw(param.fields[i], bank, rng, tool) for i in chosen}
    if param.type == "array":
        return _array(param, bank, rng, tool)
    if (param.low is None or param.given) and not param.new and "YY" not in param.description:
        values, weights = bank.weigh(param)
        best = weights.max(initial=0.0)
        trust = 0.1 if param.words & TEXT else 0.95 if best >= 2.0 else 0.8 if best >= 1.0 else 0.2
        if weights.size and weights.sum() > 0 and rng.random() < trust:
            weights = weights**2
            return values[rng.choice(len(values), p=weights / weights.sum())]
    return _number(param, rng) if param.type in ("integer", "number") else _string(param, rng)


def _known(param: Param, bank: Bank, tool: str) -> list[Any]:
    """Returns the values that the scenario names for a parameter: lists for an array, else no lists."""
    named = bank.known.get(f"{tool}.{param.name}", bank.known.get(param.name, ()))
    whole = param.type == "array"  # its items have the same name
    return [value for value in named if isinstance(value, list) == whole]


def _array(param: Param, bank: Bank, rng: np.random.Generator, tool: str) -> list:
    if param.places:
        return [draw(place, bank, rng, tool) for place in param.places]
    item = param.item
    assert item is not None  # `parse` gives every array one
    if item.type in ("integer", "number") and not _known(item, bank, tool):
        return [_number(item, rng) for _ in range(rng.integers(2, 5))]
    options = named_values(param.description)
    if options and rng.random() < 0.6:
        return list(options)
    drawn = [draw(item, bank, rng, tool) for _ in range(rng.integers(1, 4))]
    return list({json.dumps(value): value for value in drawn}.values())


def _in_range(param: Param, value: Any) -> bool:
    """Says whether a value keeps a parameter's range. A text has none."""
    low, high = param.low, param.high
    return isinstance(value, str) or not (
        (low is not None and value < low) or (high is not None and value > high)
    )


def _number(param: Param, rng: np.random.Generator) -> int | float:
    whole, low, high = param.type == "integer", param.low, param.high
    if low is not None and high is not None:
        unit = param.unit or (1.0 if whole or high - low > 2 else 0.1)
        if not param.unit and 0 < high - low < unit:
            unit = (high - low) / 10
        steps = math.floor((high - low) / unit + 1e-9)
        # The ends of a range are where tools change their behaviour (a brake fully pressed).
        end = rng.random() < 0.4
        value = low + unit * (steps if end else int(rng.integers(steps + 1)))
        value = high if end and not param.unit else value
        return int(value) if whole else round(float(value), 2 if unit >= 0.1 else 6)
    if whole:
        value = rng.integers(1, 11)
    else:
        value = rng.choice([rng.integers(1, 20), rng.integers(1, 20) * 5, rng.integers(10, 200) / 10])
    if low is not None and value < low:  # a range without an upper end
        value = value + low
    return int(value) if whole else round(float(value), 2)


def _string(param: Param, rng: np.random.Generator) -> str:
    if "YYYY-MM-DD" in param.description:
        return f"202{rng.integers(4, 7)}-{rng.integers(1, 13):02d}-{rng.integers(1, 29):02d}"
    if "MM/YYYY" in param.description:
        return f"{rng.integers(1, 13):02d}/20{rng.integers(27, 33)}"
    noun = NOUNS[rng.integers(len(NOUNS))]
    if param.words & TEXT:
        return " ".join(PHRASES[i] for i in rng.choice(len(PHRASES), size=rng.integers(2, 4), replace=False))
    for names, values in ((stems("city", "location"), CITIES), (stems("unit"), UNITS)):
        if names & param.words:
            return values[rng.integers(len(values))]
    if stem("file") in param.words:
        return f"{noun}.{('txt', 'md', 'csv')[rng.integers(3)]}"
    if "number" in param.words:
        return str(rng.integers(10_000_000, 99_999_999))
    return noun


def fill(tool: Tool, bank: Bank, rng: np.random.Generator) -> Call:
    """Makes a call with all required and some optional arguments. Optional defaults are left out."""
    given = [p for p in tool.params if p.required or rng.random() < OPTIONAL]
    arguments = {p.name: draw(p, bank, rng, tool.name) for p in given}
    return Call(
        tool.name,
        {
            p.name: arguments[p.name]
            for p in given
            if p.required or arguments[p.name] not in (p.default, None)
        },
    )


def vary(call: Call, tool: Tool, bank: Bank, rng: np.random.Generator) -> Call:
    """Returns the call with one argument drawn again."""
    params = [p for p in tool.params if p.name in call.arguments]
    if not params:
        return call
    param = params[rng.integers(len(params))]
    return Call(call.name, {**call.arguments, param.name: draw(param, bank, rng, tool.name)})
