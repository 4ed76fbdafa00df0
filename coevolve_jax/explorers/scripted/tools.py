"""Tool schemas as the scripted explorer reads them: values of parameters, and tools that are neighbours."""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

SYNONYMS = {"dir": "directory", "folder": "directory", "zipcod": "zip"}
STOP = (
    "the of a an to in from for or and is be can if no not by with this that will name value type list "
    "user current only new given specified format default example enum string number"
).split()


NAME = 100  # characters; stems of longer texts are not cached: names come again, long answers do not


@lru_cache(maxsize=16384)
def stem(word: str) -> str:
    for suffix in ("ing", "ed", "es", "s", "e"):
        if word.endswith(suffix) and len(word) - len(suffix) >= 3:
            word = word[: -len(suffix)]
            break
    return SYNONYMS.get(word, word)


def tokens(text: str) -> frozenset[str]:
    """Splits a snake_case name, a camelCase name or a sentence into lower-case stems."""
    return _tokens_of_name(text) if len(text) <= NAME else _tokens(text)


def _tokens(text: str) -> frozenset[str]:
    text = re.sub(r"\blog(?:ged)? in\b|\bauthenticat\w*", "login", text, flags=re.IGNORECASE)
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)
    return frozenset(stem(w.lower()) for w in words)


_tokens_of_name = lru_cache(maxsize=16384)(_tokens)


def stems(*words: str) -> frozenset[str]:
    return frozenset(map(stem, words))


IGNORED = stems(*STOP)


@dataclasses.dataclass(frozen=True)
class Param:
    """One parameter as its schema and its description define it.

    choices: the allowed values, where they are listed.
    low, high, unit: range and granularity of a number.
    given: whether the schema itself limits the values, and not its description alone.
    words, hints: stems of its name and of its description.
    new: whether it names something that does not exist yet.
    item: the items of an array, or the values of an object whose keys are free. places: the items of an array
      of fixed length. fields: the properties of an object.
    """

    name: str
    type: str
    required: bool
    default: Any
    choices: tuple[Any, ...]
    low: float | None
    high: float | None
    unit: float
    words: frozenset[str]
    hints: frozenset[str]
    description: str
    new: bool
    given: bool = False
    item: Param | None = None
    places: tuple[Param, ...] = ()
    fields: tuple[Param, ...] = ()


@dataclasses.dataclass(frozen=True)
class Tool:
    """A tool as the scripted explorer sees it. words: the stems of its name."""

    name: str
    params: tuple[Param, ...]
    words: frozenset[str]

    @property
    def required(self) -> frozenset[str]:
        return frozenset(p.name for p in self.params if p.required)


TYPES = {
    "float": "number",
    "double": "number",
    "int": "integer",
    "dict": "object",
    "tuple": "array",
    "list": "array",
    "bool": "boolean",
}


WIDE = 2.0**31 - 1  # an end of a range from here on tells how a number is stored, and not what it means
_NUMBER = r"(-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+)"
_SPAN = re.compile(rf"(?:between|from) {_NUMBER}[^\d-]*?(?:and|to) {_NUMBER}", re.IGNORECASE)
_ENDS = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}


def parse(name: str, schema: Mapping[str, Any], required: bool = True) -> Param:
    """Reads a JSON schema, and limits that only its description gives ("[Enum]: ...", "from 0 to 100")."""
    text, schema = schema.get("description", ""), _of_one_type(schema)
    written: str = schema.get("type", "string")
    type_ = TYPES.get(written, written)
    described = lambda inner: parse(name, {**inner, "description": inner.get("description", text)})
    item, places, fields = None, (), ()
    if type_ == "array":
        item = described(schema.get("items", {}))
        places = tuple(map(described, schema.get("prefixItems", ())))
    if type_ == "object":
        needed, values = schema.get("required", ()), schema.get("additionalProperties")
        item = described(values) if isinstance(values, Mapping) else None
        fields = tuple(parse(k, v, k in needed) for k, v in schema.get("properties", {}).items())
    low, high, given = _range(schema, text, type_)
    listed = _allowed_values(schema)
    unit = re.search(r"multiple of (\d+)", text)
    return Param(
        name=name,
        type=type_,
        required=required,
        default=schema.get("default"),
        choices=listed or _named(text, type_),
        low=low,
        high=high,
        unit=float(unit[1]) if unit else 0.0,
        words=tokens(name),
        hints=tokens(text) - IGNORED,
        description=text,
        new=bool(re.search(r"\bnew (?:file|directory|folder)\b", text)),
        given=given or bool(listed),
        item=item,
        places=places,
        fields=fields,
    )


def _of_one_type(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema with the first of the types that it allows, other than null."""
    first = lambda options: next((one for one in options if one not in ("null", {"type": "null"})), None)
    if options := schema.get("anyOf") or schema.get("oneOf"):
        schema = {**schema, **_of_one_type(first(options) or {})}
    if isinstance(written := schema.get("type"), list):
        schema = {**schema, "type": first(written) or "string"}
    return schema


def _range(schema: Mapping[str, Any], text: str, type_: str) -> tuple[float | None, float | None, bool]:
    """Returns the ends of a number's range, and whether the schema gives them. Else its description may."""
    least, most, above, below = (_end(schema.get(key)) for key in _ENDS)
    given = any(end is not None for end in (least, most, above, below))
    if given:
        step = 1.0 if type_ == "integer" else 0.1  # from an end that is not in the range itself
        lows = (least, None if above is None else above + step)
        highs = (most, None if below is None else below - step)
        low = max((end for end in lows if end is not None), default=None)
        high = min((end for end in highs if end is not None), default=None)
        low = min(1.0, high) if low is None and high is not None else low
    else:
        span = _SPAN.search(text)
        low, high = sorted(float(end.replace(",", "")) for end in span.groups()) if span else (None, None)
        low, high = (None, None) if _end(low) is None or _end(high) is None else (low, high)
    if low is not None and high is not None and low > high:  # narrower than two steps
        low = high = (low + high) / 2
    if type_ == "integer":
        low, high = low and float(math.ceil(low)), high and float(math.floor(high))
    return low, high, given


def _end(value: Any) -> float | None:
    """Returns an end of a range; None for what is none, also since it is WIDE."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and -WIDE < value < WIDE else None


def _allowed_values(schema: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns the values that a schema itself lists."""
    listed = schema.get("enum")
    if listed and isinstance(listed, list):
        return tuple(listed)
    return (schema["const"],) if "const" in schema else ()


def allows(schema: Any, value: Any) -> bool:
    """Says whether a value keeps the lists and ranges of values that a JSON schema names, at all levels."""
    if not isinstance(schema, Mapping) or (value is None and schema.get("nullable")):
        return True
    for several in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(several), list):
            return any(_is_a(value, option) and allows(option, value) for option in options)
    if (listed := _allowed_values(schema)) and value not in listed:
        return False
    if isinstance(value, Mapping):
        named, rest = schema.get("properties"), schema.get("additionalProperties")
        named = named if isinstance(named, Mapping) else {}
        return all(allows(named.get(key, rest), part) for key, part in value.items())
    if isinstance(value, list):
        places = schema.get("prefixItems")
        places = places[: len(value)] if isinstance(places, list) else []
        kinds = [*places, *[schema.get("items")] * (len(value) - len(places))]
        return all(map(allows, kinds, value))
    if not isinstance(value, int | float) or isinstance(value, bool):
        return True
    return all(
        holds(value, end) for key, holds in _ENDS.items() if (end := _end(schema.get(key))) is not None
    )


_KINDS = {"string": str, "integer": int, "number": (int, float), "object": Mapping, "array": list}


def _is_a(value: Any, schema: Any) -> bool:
    """Says whether a value may have the type of a schema."""
    written = schema.get("type") if isinstance(schema, Mapping) else None
    if written == "null" or value is None:
        return written in ("null", None) and value is None
    if isinstance(value, bool):
        return written in ("boolean", None)
    kind = _KINDS.get(written) if isinstance(written, str) else None
    return kind is None or isinstance(value, kind)


def named_values(text: str) -> tuple[str, ...]:
    """Allowed values that a description lists, as in `[Enum]: USD, EUR` or `'l' flines, 'w' fwords`."""
    text = text.partition("such as")[0]  # what follows are examples
    if (listed := _listed(text)) is not None:
        return listed
    two = re.search(r"\((\w+)/(\w+)\)", text) or re.search(r"either '([^']+)' or '([^']+)'", text)
    if two:
        return two.groups()
    return tuple(v for v in re.findall(r"'([\w.#-]+)'", text) if "YY" not in v)


def _listed(text: str) -> tuple[str, ...] | None:
    """Returns the values of a list that a description announces; None where it announces none."""
    found = re.search(r"(?:\[Enum\]|[Oo]ptions(?: are)?|[Oo]ne of)\s*:\s*(.+)", text)
    if not found:
        return None
    sentence = re.split(r"\.\s|;", found[1])[0]
    values = re.findall(r'"([^"]+)"', sentence)
    if not values:
        *first, last = re.sub(r"\s\([^()]*\)", "", sentence).split(",")
        values = [v.strip(" .[]'`") for v in (*first, *re.split(r"(?:^|\s)(?:or|and)\s", last))]
    return tuple(v for v in values if v and v not in ("None", "etc"))


def _named(text: str, type_: str) -> tuple[Any, ...]:
    """Returns the values that a description lists for a type: texts, or numbers where all are numbers."""
    if type_ not in ("integer", "number"):
        return named_values(text) if type_ == "string" else ()
    listed = _listed(text.partition("such as")[0]) or ()
    if not all(re.fullmatch(r"-?\d+" if type_ == "integer" else r"-?\d+(?:\.\d+)?", v) for v in listed):
        return ()
    return tuple(int(v) if type_ == "integer" else float(v) for v in listed)


def toolbox(tools: Sequence[dict]) -> dict[str, Tool]:
    """Reads function schemas into tools by name. Parameters of equal name and type share what they say."""
    box = {}
    for tool in tools:
        function = tool["function"]
        schema = function.get("parameters", {})
        required = schema.get("required", ())
        params = tuple(parse(k, v, k in required) for k, v in schema.get("properties", {}).items())
        box[function["name"]] = Tool(function["name"], params, tokens(function["name"]))
    return {
        name: dataclasses.replace(tool, params=tuple(share(p, box) for p in tool.params))
        for name, tool in box.items()
    }


def share(param: Param, box: dict[str, Tool]) -> Param:
    """Adds choices and hints to a parameter from parameters of the same name and type in all tools."""
    same = [p for t in box.values() for p in t.params if (p.name, p.type) == (param.name, param.type)]
    choices = param.choices or next((p.choices for p in same if p.choices), ())
    return dataclasses.replace(param, choices=choices, hints=frozenset().union(*(p.hints for p in same)))


def related(a: Tool, b: Tool) -> bool:
    """Whether two tools are neighbours: they share a required parameter or a word of their names.

    They are neighbours also if the name of `a` mentions a required parameter of `b`. An example is
    get_zipcode_based_on_city for estimate_distance.
    """
    needs = frozenset().union(*(p.hints for p in b.params if p.required))
    return a.name != b.name and bool(a.required & b.required or a.words & (b.words | needs))
