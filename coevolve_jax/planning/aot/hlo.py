"""The HLO text of a compiled program: its instructions, and the loops around each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

_BITS = {"pred": 8, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"\b(pred|token|opaque|[a-z]+\d+\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*-> .*\{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?)\s([a-z][a-z0-9\-]*)\((.*)$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}"
)


class Instruction(NamedTuple):
    """One instruction of a computation.

    Attributes:
      type: as text, which names shapes.
      inside: the text in the brackets after the opcode.
      operands: the names in that text.
      rest: the text after the brackets.
    """

    name: str
    type: str
    opcode: str
    inside: str
    operands: tuple[str, ...]
    rest: str
    root: bool

    def attribute(self, pattern: str) -> str | None:
        """The first group of the pattern in the text after the operands."""
        found = re.search(pattern, self.rest)
        return found[1] if found else None


class Loop(NamedTuple):
    """A loop of a program.

    kind: what `kinds` gives for the loop's path in the traced program. trips: how often its body runs, None
    where the program decides.
    """

    kind: str
    trips: int | None


Computations = dict[str, list[Instruction]]


def parse(text: str) -> tuple[str, Computations]:
    """Returns the entry computation's name, and the instructions of each computation.

    Raises ValueError for a text that is no HLO module.
    """
    computations: Computations = {}
    entry, current = "", []
    for line in text.splitlines():
        if line and not line[0].isspace():
            found = _COMPUTATION.match(line)
            if found:
                current = computations.setdefault(found[2], [])
                entry = found[2] if found[1] else entry
        elif found := _INSTRUCTION.match(line):
            operands, rest = _closed(found[5])
            names = tuple(re.findall(r"%([\w.\-]+)", operands))
            current.append(Instruction(found[2], found[3], found[4], operands, names, rest, bool(found[1])))
    if not entry:
        raise ValueError(f"This is no text of an HLO module with an entry computation: {text[:80]!r}.")
    return entry, computations


def _closed(text: str) -> tuple[str, str]:
    """Splits the text at the bracket that closes one opened before it: (before, after)."""
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[:i], text[i + 1 :]
    return text, ""


def walk(
    computations: Computations,
    name: str,
    loops: tuple[Loop, ...],
    kinds: Callable[[str], str],
    fused: bool = False,
) -> Iterator[tuple[tuple[Loop, ...], Instruction, bool]]:
    """Yields each instruction that runs, with its loops, and whether it is inside a fusion.

    Results inside a fusion stay in the core.
    """
    for i in computations[name]:
        yield loops, i, fused
        inner = loops
        if i.opcode == "while":
            kind = kinds(i.attribute(r'op_name="([^"]*)"') or "")
            inner = (*loops, Loop(kind, _trips(i, computations)))
        elif i.opcode not in ("fusion", "call", "conditional", "async-start"):
            continue  # other opcodes call computations too, such as a reduction's operation
        for one, several in _CALLED.findall(i.rest):
            for called in [one] if one else re.findall(r"[\w.\-]+", several):
                yield from walk(computations, called, inner, kinds, fused or i.opcode == "fusion")


def _trips(i: Instruction, computations: Computations) -> int | None:
    """How often a loop's body runs. None where that is not known.

    The compiler may note it. Otherwise a counter from 0 must be compared with a constant.
    """
    if noted := i.attribute(r'"known_trip_count":\{"n":"(\d+)"'):
        return int(noted)
    condition, body = (
        {x.name: x for x in computations[i.attribute(rf"{part}=%?([\w.\-]+)") or ""]}
        for part in ("condition", "body")
    )
    test, result = (next(x for x in part.values() if x.root) for part in (condition, body))
    if test.opcode != "compare" or "direction=LT" not in test.rest:
        return None
    counter, end = (condition[name] for name in test.operands)
    place = counter.attribute(r"index=(\d+)")
    if not place or end.opcode != "constant" or result.opcode != "tuple":
        return None
    step, new = 0, body[result.operands[int(place)]]
    while new.opcode == "add":  # one add for each turn that the compiler has unrolled
        old, by = (body[name] for name in new.operands)
        if by.opcode != "constant":
            return None
        step, new = step + int(by.inside), old
    if not step or new.attribute(r"index=(\d+)") != place:
        return None
    return -(-int(end.inside) // step)


def shapes(type: str) -> list[tuple[int, tuple[int, ...]]]:
    """The bits per number and the shape of each array in a type."""
    bits = lambda name: (
        _BITS[name]
        if name in _BITS  # else the digits of its name
        else int(re.search(r"\d+", name)[0])  # pyright: ignore[reportOptionalSubscript]
    )
    return [
        (bits(name), tuple(map(int, filter(None, sizes.split(","))))) for name, sizes in _SHAPE.findall(type)
    ]


def size_of(type: str) -> float:
    """Bytes of all arrays in a type."""
    return sum(bits * math.prod(shape) / 8 for bits, shape in shapes(type))
