"""The work of a compiled program: operations, bytes and collectives, by the loops around them.

XLA's own account of a program (`cost_analysis`) counts a loop's body once. So it says nothing of a program of
loops. Here every instruction belongs to the loops around it.
"""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from coevolve_jax.planning.aot.groups import groups
from coevolve_jax.planning.aot.hlo import Computations, Instruction, Loop, parse, shapes, size_of, walk

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
# Instructions that give another view of an array, or stand for the work of other instructions.
_FREE = {
    *(
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "iota",
        "partition-id",
        "replica-id",
    ),
    *("while", "conditional", "call", "async-start", "async-update", "async-done", "optimization-barrier"),
}


class Work(NamedTuple):
    """The work of one device in one pass through a loop's body, without the loops in it.

    Attributes:
      operations: those of matrix products, two for each multiply-add.
      bytes: operands and results of all instructions: the most that goes to and from memory.
      collectives: name -> (how many, bytes of the whole arrays).
      kernels: name -> calls of hand-written kernels, whose work XLA does not know.
      within: bytes that a device sends in collectives among one host's devices.
      between: bytes that it sends in collectives among several hosts' devices.
    """

    operations: float
    bytes: float
    collectives: dict[str, tuple[int, float]]
    kernels: dict[str, int]
    within: float = 0
    between: float = 0


def by_loop(
    text: str, kinds: Callable[[str], str], hosts: Sequence[int] = ()
) -> dict[tuple[Loop, ...], Work]:
    """Maps loops, outermost first, to the work directly inside them.

    kinds: maps a loop's path in the traced program to its kind. hosts: the host of each of the program's
    devices. Without them the bytes that devices send are not counted.
    """
    entry, computations = parse(text)
    types = {i.name: i.type for body in computations.values() for i in body}
    found: dict[tuple[Loop, ...], list[Work]] = collections.defaultdict(list)
    chains: set[str] = set()
    for loops, instruction, fused in walk(computations, entry, (), kinds):
        # On TPUs a collective may overlap with several products, each of which then names it. Count it where
        # it starts.
        if chain := instruction.attribute(r'\bchain_id="(\d+)"'):
            if chain in chains:
                continue
            chains.add(chain)
        found[loops].append(_one(instruction, fused, types, computations, hosts))
    return {loops: total((1, part) for part in parts) for loops, parts in found.items()}


def _one(
    i: Instruction, fused: bool, types: Mapping[str, str], computations: Computations, hosts: Sequence[int]
) -> Work:
    base = i.opcode.removesuffix("-start")
    if base in COLLECTIVES:
        whole = _whole(i, types)
        sent = _sent(base, whole, groups(i.rest, len(hosts)), hosts) if hosts else (0.0, 0.0)
        return Work(0, 0, {base: (1, whole)}, {}, *sent)
    if i.opcode in ("dot", "convolution"):
        operations = _product(i, types)
        return Work(operations, 0 if fused else _moved(i, types, computations), {}, {})
    kernels = {}
    if i.opcode == "custom-call":
        path = i.attribute(r'op_name="([^"]*)"') or ""
        if "pallas_call" in path or 'custom_call_target="tpu_custom_call"' in i.rest:
            kernels = {f"{path}/{i.name}": 1}
    moves = not fused and i.opcode not in _FREE and not i.opcode.endswith("-done")
    return Work(0, _moved(i, types, computations) if moves else 0, {}, kernels)


def total(parts: Iterable[tuple[int, Work]]) -> Work:
    """Sums work, each part as often as it is done."""
    operations, moved, within, between = 0.0, 0.0, 0.0, 0.0
    collectives: dict[str, tuple[int, float]] = {}
    kernels: collections.Counter[str] = collections.Counter()
    for times, part in parts:
        operations += times * part.operations
        moved += times * part.bytes
        within += times * part.within
        between += times * part.between
        for name, (count, size) in part.collectives.items():
            before = collectives.get(name, (0, 0.0))
            collectives[name] = before[0] + times * count, before[1] + times * size
        kernels.update({name: times * calls for name, calls in part.kernels.items()})
    return Work(operations, moved, collectives, dict(kernels), within, between)


def _sent(name: str, size: float, groups: np.ndarray, hosts: Sequence[int]) -> tuple[float, float]:
    """Bytes that each device sends around a ring of its group: (within one host, between hosts).

    An all-reduce goes around twice.
    """
    if name == "collective-permute":
        sent = size if len(groups) else 0.0
    else:
        devices = groups.shape[1]
        sent = (2 if name == "all-reduce" else 1) * size * (devices - 1) / devices
    owners = np.asarray(hosts)[groups]
    return (0.0, sent) if (owners != owners[:, :1]).any() else (sent, 0.0)


def _whole(i: Instruction, types: Mapping[str, str]) -> float:
    """Bytes of a collective's arrays where they are whole: gathered, or yet to be scattered or added."""
    given = sum(size_of(types[name]) for name in i.operands)
    own = sum(bits * math.prod(shape) / 8 for bits, shape in shapes(i.type) if shape)  # semaphores have none
    started = i.opcode.endswith("-start") and i.type.startswith("(")  # its type lists the operands too
    return max(given, own - given if started else own)


def _product(i: Instruction, types: Mapping[str, str]) -> float:
    """Operations of a matrix product, which is a convolution on TPUs."""
    result = math.prod(shapes(i.type)[0][1])
    left, right = (shapes(types[name])[0][1] for name in i.operands[:2])
    if i.opcode == "dot":
        axes = i.attribute(r"lhs_contracting_dims=\{([\d,]*)\}") or ""
        return 2.0 * result * math.prod(left[int(axis)] for axis in axes.split(",") if axis)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.rest)
    if not labels:
        raise ValueError(f"Convolution {i.name} has no dim_labels.")
    arrays = zip(labels.groups(), (left, right, shapes(i.type)[0][1]))
    given, kernel, made = (dict(zip(names, sizes)) for names, sizes in arrays)
    taps = [_taps(i, int(axis), given[axis], kernel[axis], made[axis]) for axis in given if axis.isdigit()]
    return 2.0 * made["b"] * made["f"] * kernel["i"] * math.prod(taps)


def _taps(i: Instruction, axis: int, given: int, kernel: int, made: int) -> int:
    """Counts pairs of a result and a kernel place along one axis that meet a number, not padding."""
    window = i.attribute(r"window=\{([^}]*)\}") or ""

    def value(name: str, default: str) -> str:
        found = re.search(rf"\b{name}=([\d_x\-]+)", window)
        return found[1].split("x")[axis] if found else default

    stride, spread, holes = (int(value(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    low = int(value("pad", "0_0").split("_")[0])
    places = (r * stride + k * holes - low for r in range(made) for k in range(kernel))
    return sum(0 <= place <= (given - 1) * spread and place % spread == 0 for place in places)


def _moved(i: Instruction, types: Mapping[str, str], computations: Computations) -> float:
    """Bytes of an instruction's operands and results.

    If it takes or writes a slice of an array, the slice's bytes count.
    """
    if i.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * size_of(i.type)
    if i.opcode == "dynamic-update-slice":
        return 2 * size_of(types[i.operands[1]])
    called = i.attribute(r"calls=%?([\w.\-]+)") if i.opcode == "fusion" else None
    if not called:
        return size_of(i.type) + sum(size_of(types[name]) for name in i.operands)
    return _fusion(i, types, computations[called])


def _fusion(i: Instruction, types: Mapping[str, str], body: list[Instruction]) -> float:
    views = {x.name: x.operands[0] for x in body if x.opcode == "bitcast" and x.operands}

    def source(name: str) -> str:
        return source(views[name]) if name in views else name

    users: dict[str, list[Instruction]] = collections.defaultdict(list)
    for x in body:
        for name in x.operands if x.opcode != "bitcast" else ():
            users[source(name)].append(x)
    read = 0.0
    for p in (x for x in body if x.opcode == "parameter"):
        uses = users[p.name]
        if uses and all(
            source(x.operands[0]) == p.name and x.opcode in ("dynamic-slice", "slice", "gather") for x in uses
        ):
            read += sum(size_of(x.type) for x in uses)
        elif not all(x.opcode == "dynamic-update-slice" and source(x.operands[0]) == p.name for x in uses):
            read += size_of(p.type)
    root = next((x for x in body if x.root), None)
    written = size_of(i.type)
    while root is not None and root.opcode == "bitcast":
        root = next((x for x in body if x.name == views[root.name]), None)
    if root is not None and root.opcode == "dynamic-update-slice":
        written = size_of(types[root.operands[1]])
    return read + written
