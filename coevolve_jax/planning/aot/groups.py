"""The groups of devices that a collective brings together, read from the text of its instruction."""

from __future__ import annotations

import re

import numpy as np

_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]+\},?)+)\}")
# A tile: [groups, devices per group]<=[shape of all devices]T(order of its axes).
_TILED = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
# Axes of a mesh. Its devices may be listed as a tile.
_MESH = re.compile(
    r"replica_groups=mesh\[((?:'\w+'=\d+,?)+)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    r" \{((?:'\w+',?)+)\}"
)


def groups(rest: str, devices: int) -> np.ndarray:
    """The groups, int [groups, devices per group]; of a collective-permute, [pairs, 2].

    Numbers count the program's `devices`. rest: the text after an instruction's operands. If it names no
    groups, or names them in an unknown way, all devices are one group.
    """
    numbers = lambda text: [int(n) for n in text.split(",")]
    if pairs := _PAIRS.search(rest):
        found = [numbers(pair) for pair in re.findall(r"\d+,\d+", pairs[1])]
        return np.array([pair for pair in found if pair[0] != pair[1]], int).reshape(-1, 2)
    if listed := _LISTED.search(rest):
        return np.array([numbers(group) for group in re.findall(r"[\d,]+(?=\})", listed[1])])
    if tiled := _TILED.search(rest):
        count, each, shape, order = tiled.groups()
        return _tile(shape, order).reshape(int(count), int(each))
    if mesh := _MESH.search(rest):
        axes, shape, order, named = mesh.groups()
        names, sizes = zip(*re.findall(r"'(\w+)'=(\d+)", axes))
        sizes = [int(size) for size in sizes]
        ids = _tile(shape, order) if shape else np.arange(np.prod(sizes))
        over = [names.index(name) for name in re.findall(r"\w+", named)]
        moved = np.moveaxis(ids.reshape(sizes), over, range(-len(over), 0))
        return moved.reshape(-1, np.prod([sizes[axis] for axis in over]))
    return np.arange(devices)[None]


def _tile(shape: str, order: str | None) -> np.ndarray:
    """The numbers from 0 in this shape, with its axes in this order."""
    sizes = [int(n) for n in shape.split(",")]
    ids = np.arange(np.prod(sizes)).reshape(sizes)
    return ids.transpose([int(n) for n in order.split(",")]) if order else ids
