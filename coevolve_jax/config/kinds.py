"""The specification of a config key: its default, its kind and its bounds."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

from ml_collections import ConfigDict

WHOLE, NUMBER, TRUTH, TEXT, TEXTS, WHOLES = (
    "a whole number below 2**63", "a finite number", "True or False", "a text", "a tuple of texts",
    "a tuple of whole numbers",
)  # fmt: skip
_OF_DEFAULT: dict[type, str] = {bool: TRUTH, int: WHOLE, float: NUMBER, str: TEXT}


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of the config.

    default: its type gives the kind of every value. None: another module defines the key and its default.
    of: all values that are allowed. least, above, most: bounds, of which `above` excludes its own value.
    why: the reason of a bound, for the error message.
    serving: the key says how a run is served, not what it computes, so it may change when a run goes on.
    kind: needed where the default is a tuple.
    """

    default: Any
    of: tuple[str, ...] = ()
    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    why: str = ""
    serving: bool = False
    kind: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raises ValueError for a value of another kind or outside the bounds. name: dotted."""
        check_kind(name, value, self.kind or kind_of(self.default))
        if self.of and value not in self.of:
            refuse(name, value, f"one of {', '.join(self.of)}")
        if isinstance(value, numbers.Real):
            size = float(value)
            if not self.least <= size <= self.most or size <= self.above:
                refuse(name, value, self.bounds)

    @property
    def bounds(self) -> str:
        """In words; "" where there are none."""
        low = f"at least {self.least}" if self.least > -math.inf else ""
        low = f"above {self.above}" if self.above > -math.inf else low
        high = f"at most {self.most}" if self.most < math.inf else ""
        words = " and ".join(filter(None, (low, high)))
        if -math.inf < self.least and self.most < math.inf:
            words = f"between {self.least} and {self.most}"
        return f"{words}: {self.why}" if words and self.why else words


def texts(*default: str) -> Key:
    """A key that holds a tuple of texts."""
    return Key(default, kind=TEXTS)


def wholes(*default: int) -> Key:
    """A key that holds a tuple of whole numbers."""
    return Key(default, kind=WHOLES)


def kind_of(default: Any) -> str:
    """The kind of a default; "" for one that allows anything."""
    return _OF_DEFAULT.get(type(default), "")


def check_kind(name: str, value: Any, kind: str) -> None:
    """Raises ValueError for a value of another kind. name: dotted, without "config". kind "": any value."""
    if kind and not _is(value, kind):
        refuse(name, value, kind)


def refuse(name: str, value: Any, must: str) -> None:
    """Raises the ValueError that every check of a value raises."""
    shown = "a section" if isinstance(value, ConfigDict) else repr(value)
    raise ValueError(f"config.{name} is {shown}: it must be {must}.")


def _is(value: Any, kind: str) -> bool:
    truth = isinstance(value, bool)
    if kind == TRUTH:
        return truth
    if kind == WHOLE:
        return isinstance(value, numbers.Integral) and not truth and abs(int(value)) < 2**63
    if kind == NUMBER:
        return isinstance(value, numbers.Real) and not truth and math.isfinite(value)
    if kind == TEXT:
        return isinstance(value, str) and "\0" not in value
    part = TEXT if kind == TEXTS else WHOLE
    return isinstance(value, tuple | list) and all(_is(each, part) for each in value)
