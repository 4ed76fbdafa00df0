"""Formulas over rows: a small part of CEL (the Common Expression Language), checked before it is compiled.

A language model may write a formula, so none is trusted. Only the tokens below pass: fields of the row, a few
functions, numbers and names of tools, stop reasons and actions. CEL itself has no loops but comprehensions,
no attributes and no files. A comprehension goes over a list or map of the row and over none that the formula
made, so its steps are bounded. This file alone knows the binding, cel-expr-python.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from coevolve_jax.diagnosis.features import LABELS, UNITS, fields

if TYPE_CHECKING:
    from cel_expr_python import cel

LENGTH = 300  # characters
LOOPS = 2  # comprehensions of a formula
LONGEST = 512  # elements that a comprehension goes over; the binding's time grows with their square
MACROS = ("all", "exists", "exists_one", "filter", "map")  # comprehensions: tools.filter(t, t == 'x')
MEMBERS = (*MACROS, "size")  # called as tools.size()
FUNCTIONS = ("size", "double", "int")
WORDS = ("true", "false", "in")
_TOKEN = re.compile(
    r"""\s+ | (?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?) | (?P<word>[A-Za-z_]\w*)
    | (?P<text>'[^'"\\\n]*'|"[^'"\\\n]*") | (?P<sign>[=!<>]=|&&|\|\||/(?!/)|[-+*%<>!?:.,()\[\]])""",
    re.VERBOSE | re.ASCII,
)


class ExpressionError(ValueError):
    """A formula is refused; one sentence says why."""


class Expression:
    """A compiled formula over the rows of a unit.

    looped: the lists and maps of a row that its comprehensions go over.
    """

    def __init__(self, source: str, unit: str, program: cel.Expression, looped: Collection[str]):
        self.source, self.unit, self._program, self._looped = source, unit, program, looped

    def value(self, row: Mapping[str, Any]) -> float | None:
        """The value; True is 1.

        It is None, for missing, on an error, no finite number, an unknown field, or a comprehension over more
        than LONGEST elements.
        """
        if any(len(row.get(name, ())) > LONGEST for name in self._looped):
            return None
        try:
            found = self._program.eval(data=row).plain_value()
        except RuntimeError:  # the binding's own bound on steps
            return None
        return float(found) if isinstance(found, bool | float) and math.isfinite(found) else None

    def values(self, rows: Iterable[Mapping[str, Any]]) -> np.ndarray:
        """The values of rows, float64 [n]; NaN where one is missing."""
        return np.array([self.value(row) for row in rows], np.float64)


def compile(source: str, unit: str, names: Collection[str] | None = None) -> Expression:
    """Checks and compiles a formula.

    Args:
      source: at most 300 characters with two comprehensions one deep, whose result is a double or a bool.
      unit: "trajectory", "step" or "trend": whose rows it reads (`features.fields`).
      names: the texts that may stand in it: names of tools, stop reasons and actions. None allows any text.

    Raises:
      ExpressionError: the formula is refused.
    """
    if unit not in UNITS:
        raise ExpressionError(f"There is no unit {unit!r}: a formula is about one of {', '.join(UNITS)}.")
    if not isinstance(source, str) or not source.strip():
        raise ExpressionError("A formula is missing: write one, such as double(errors) / double(calls).")
    if len(source) > LENGTH:
        raise ExpressionError(f"A formula has {len(source)} characters: {LENGTH} are the most.")
    looped = _check_tokens(source, unit, names)
    try:
        program = _environment(unit).compile(source)
    except RuntimeError as error:
        raise ExpressionError(f"{source[:60]!r} is no formula: {_reason(str(error))}.") from None
    if (kind := program.return_type().name()) not in ("DOUBLE", "BOOL"):
        raise ExpressionError(f"{source[:60]!r} is of type {kind.lower()}: wrap it in double(...).")
    return Expression(source, unit, program, looped)


def check_installed() -> None:
    """Raises ExpressionError where the package that reads formulas is missing."""
    _environment("trajectory")


def _check_tokens(source: str, unit: str, names: Collection[str] | None) -> list[str]:
    """Returns the field that each comprehension goes over.

    Raises ExpressionError for anything but the known tokens, for a comprehension within another or over
    anything but a field, and for a sum or a whole list or map within one.
    """
    known, tokens = fields(unit), _tokens(source)
    many = {name for name, field in known.items() if field.type.startswith(("list", "map"))}
    at = lambda i: tokens[i][1] if 0 <= i < len(tokens) else ""
    looped: list[str] = []
    opened: list[str] = []  # of each open bracket the variable of its comprehension, or ""
    for i, (kind, text) in enumerate(tokens):
        if kind == "text" and names is not None and text[1:-1] not in names:
            raise ExpressionError(f"{text} is no name of a tool, a stop reason or an action that is known.")
        if kind == "number" and not math.isfinite(float(text)):
            raise ExpressionError(f"{text} is too large a number.")
        called = at(i + 1) == "(" and text in (MEMBERS if at(i - 1) == "." else FUNCTIONS)
        read = at(i - 1) != "." and (text in known or text in opened or text in WORDS)
        if kind == "word" and not (called or read):
            raise ExpressionError(_unknown(text, unit, known))
        if text in many and any(opened) and at(i + 1) not in ("[", "."):
            raise ExpressionError(
                f"A comprehension cannot read {text} as a whole: read {text}[...] or {text}.size() there."
            )
        if text == "+" and any(opened):
            raise ExpressionError(
                "A comprehension cannot hold a +, which would join texts: add outside of it."
            )
        if text in ("(", "["):
            loop = at(i - 1) in MACROS and at(i - 2) == "."
            opened.append(at(i + 1) if loop else "")
            if loop and (at(i + 1) in known or at(i + 2) != ","):
                raise ExpressionError(
                    f"{at(i - 1)} needs a variable of its own first, as in filter(t, t == 'x')."
                )
            if sum(map(bool, opened)) > 1:
                raise ExpressionError("The formula has a comprehension within another: one is the most.")
            if loop and at(i - 3) not in many:
                raise ExpressionError(
                    f"{at(i - 1)} goes over {at(i - 3)!r}, which is no list or map of a {unit}: put such a "
                    "field before it, as in tools.filter(t, t == 'x')."
                )
            if loop:
                looped.append(at(i - 3))
            if len(looped) > LOOPS:
                raise ExpressionError(f"The formula has more than {LOOPS} comprehensions: leave some out.")
        if text in (")", "]") and opened:
            opened.pop()
    return looped


def _tokens(source: str) -> list[tuple[str, str]]:
    """Splits a formula into tokens (kind, text).

    Raises ExpressionError where there is none, and for a text that touches another token than a sign. CEL
    takes three quotes for one, and a letter before a quote for its prefix, so it would split these otherwise.
    """
    found, at, before = [], 0, None
    while at < len(source):
        token = _TOKEN.match(source, at)
        if token is None:
            raise ExpressionError(f"A formula cannot have {source[at]!r}, as at character {at + 1}.")
        kinds = {token.lastgroup, before and before.lastgroup}
        if before and "text" in kinds and kinds <= {"text", "number", "word"}:
            raise ExpressionError(
                f"{token.group()[:60]} touches {before.group()[:60]}: put a space or a sign between the two."
            )
        if token.lastgroup:
            found.append((token.lastgroup, token.group()))
        at, before = token.end(), token
    return found


def _unknown(word: str, unit: str, known: Collection[str]) -> str:
    if unit == "trajectory" and word in LABELS:
        return f"{word} is the outcome, which a formula about a trajectory cannot read."
    near = difflib.get_close_matches(word[:40], known, n=1)
    hint = f": did you mean {near[0]}?" if near else "."
    return f"{word[:40]} is no field of a {unit}, and no function in this place{hint}"


def _reason(error: str) -> str:
    """The binding's first complaint, without the place and what else it would have taken there."""
    first = re.sub(r"^([A-Z_]+: )+(<input>:-?\d+:-?\d+: )?", "", error.splitlines()[0])
    return re.split(r" expecting | \[[A-Z_]+\]", first)[0].rstrip(".")


@functools.cache
def _environment(unit: str) -> cel.Env:
    """The binding's environment, with the unit's fields declared."""
    try:
        from cel_expr_python import cel
    except ImportError:
        raise ExpressionError(
            "A formula needs the package cel-expr-python: pip install 'coevolve_jax[harness]'."
        ) from None
    kinds: Mapping[str, Any] = {
        "int": cel.Type.INT, "double": cel.Type.DOUBLE, "bool": cel.Type.BOOL, "string": cel.Type.STRING,
        "list(string)": cel.Type.List(cel.Type.STRING),
        "map(string, int)": cel.Type.Map(cel.Type.STRING, cel.Type.INT),
    }  # fmt: skip
    return cel.NewEnv(variables={name: kinds[field.type] for name, field in fields(unit).items()})
