"""Tool schemas as the scripted explorer reads them: values of parameters, and tools that are neighbours."""

from __future__ import annotations

import dataclasses
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
    span = re.search(r"(?:between|from) (-?[\d.]*\d)[^\d-]*?(?:and|to) (-?[\d.]*\d)", text)
    unit = re.search(r"multiple of (\d+)", text)
    return Param(
        name=name,
        type=type_,
        required=required,
        default=schema.get("default"),
        choices=tuple(schema.get("enum") or (named_values(text) if type_ == "string" else ())),
        low=float(span[1]) if span else None,
        high=float(span[2]) if span else None,
        unit=float(unit[1]) if unit else 0.0,
        words=tokens(name),
        hints=tokens(text) - IGNORED,
        description=text,
        new=bool(re.search(r"\bnew (?:file|directory|folder)\b", text)),
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


def named_values(text: str) -> tuple[str, ...]:
    """Allowed values that a description lists, as in `[Enum]: USD, EUR` or `'l' flines, 'w' fwords`."""
    text = text.partition("such as")[0]  # what follows are examples
    listed = re.search(r"(?:\[Enum\]|[Oo]ptions(?: are)?|[Oo]ne of)\s*:\s*(.+)", text)
    if listed:
        values = re.findall(r'"([^"]+)"', listed[1]) or [v.strip(" .[]'") for v in listed[1].split(",")]
        return tuple(v for v in values if v and v not in ("None", "etc"))
    two = re.search(r"\((\w+)/(\w+)\)", text) or re.search(r"either '([^']+)' or '([^']+)'", text)
    if two:
        return two.groups()
    return tuple(v for v in re.findall(r"'([\w.#-]+)'", text) if "YY" not in v)


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
