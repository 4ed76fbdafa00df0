"""Which trajectories lie in which row, and which of them share a copy of their prompt."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from coevolve_jax.types import Trajectory


class Span(NamedTuple):
    """Tokens `start` to `stop` (exclusive) of one of the trajectories, by its index."""

    trajectory: int
    start: int
    stop: int


# Spans that lie side by side in one row: a whole trajectory, or a prompt and then what follows it in each trajectory.
Piece = list[Span]


def length(piece: Piece) -> int:
    """Tokens of it."""
    return sum(span.stop - span.start for span in piece)


def assign_rows(lengths: Sequence[int], pack_length: int) -> list[list[int]]:
    """First-fit decreasing: indices of the items in each row. Items longer than a row raise ValueError."""
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[i] > pack_length:
            raise ValueError(
                f"A trajectory of {lengths[i]} tokens does not fit a row of {pack_length}: raise "
                "config.learner.pack_length to at least config.rollout.max_length."
            )
        row = next((r for r in range(len(rows)) if room[r] >= lengths[i]), None)
        if row is None:
            rows.append([])
            room.append(pack_length)
            row = len(rows) - 1
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows


def arrange(
    trajectories: Sequence[Trajectory], pack_length: int, *, prefix_sharing: bool, replayed: bool
) -> list[list[Piece]]:
    """The pieces of each row. replayed: the sampler's routing is. Raises ValueError where one does not fit a row."""
    pieces = shared_prompts(trajectories, pack_length, replayed) if prefix_sharing else alone(trajectories)
    rows = assign_rows([length(piece) for piece in pieces], pack_length)
    return [[pieces[k] for k in row] for row in rows]


def alone(trajectories: Sequence[Trajectory]) -> list[Piece]:
    """Each trajectory whole."""
    return [[Span(i, 0, len(t.ids))] for i, t in enumerate(trajectories)]


def shared_prompts(trajectories: Sequence[Trajectory], pack_length: int, replayed: bool) -> list[Piece]:
    """Trajectories that begin with the same prompt after one copy of it, in pieces of pack_length tokens at most.

    A prompt is what comes before the first sampled token. Its last token is not shared: what it predicts is another
    token in each trajectory. Prompts are the same where their tokens are, and, where routing is replayed, the experts
    that the sampler used for each: a copy can go one way only.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, t in enumerate(trajectories):
        shared = _shared(t)
        experts = t.routing[:shared].tobytes() if replayed and t.routing is not None else b""
        fits = shared and len(t.ids) <= pack_length
        groups.setdefault((t.ids[: shared + 1].tobytes(), experts) if fits else i, []).append(i)
    pieces: list[Piece] = []
    for members in groups.values():
        spans = [Span(i, 0, len(trajectories[i].ids)) for i in members]
        pieces += (
            _after_one_prompt(spans, _shared(trajectories[members[0]]), pack_length)
            if len(spans) > 1
            else [spans]
        )
    return pieces


def _after_one_prompt(trajectories: list[Span], shared: int, pack_length: int) -> list[Piece]:
    """Whole trajectories that begin with the same `shared` tokens, in as few pieces as fit rows."""
    pieces = []
    for part in assign_rows([span.stop - shared for span in trajectories], pack_length - shared):
        first, *others = (trajectories[k] for k in part)
        branches = [span._replace(start=shared) for span in (first, *others)]
        pieces.append([first._replace(stop=shared), *branches] if others else [first])
    return pieces


def _shared(t: Trajectory) -> int:
    """Tokens of a trajectory that others may share: all of its prompt but the last one."""
    return max(0, int(np.argmax(t.mask)) - 1)
