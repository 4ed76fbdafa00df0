"""The layout of a batch: which trajectories lie in which row, and which share a copy of their prompt."""

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


# Adjacent spans of one row: a whole trajectory, or a prompt and then each trajectory's part after it.
Piece = list[Span]


def length(piece: Piece) -> int:
    """The number of tokens in the piece."""
    return sum(span.stop - span.start for span in piece)


def assign_rows(lengths: Sequence[int], pack_length: int) -> list[list[int]]:
    """Packs items by first-fit decreasing. Returns the indices of the items in each row.

    Raises ValueError for an item longer than a row.
    """
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
    """Arranges the trajectories in rows. Returns the pieces of each row.

    replayed: the learner replays the sampler's routing. Raises ValueError where one does not fit a row.
    """
    pieces = shared_prompts(trajectories, pack_length, replayed) if prefix_sharing else alone(trajectories)
    rows = assign_rows([length(piece) for piece in pieces], pack_length)
    return [[pieces[k] for k in row] for row in rows]


def alone(trajectories: Sequence[Trajectory]) -> list[Piece]:
    """Makes each whole trajectory a piece."""
    return [[Span(i, 0, len(t.ids))] for i, t in enumerate(trajectories)]


def shared_prompts(trajectories: Sequence[Trajectory], pack_length: int, replayed: bool) -> list[Piece]:
    """Lays trajectories that begin with the same prompt after one copy of it.

    Pieces have at most pack_length tokens. A prompt is all before the first sampled token. Its last token is
    not shared, because each trajectory has its own target there. Prompts are the same if their tokens are. If
    routing is replayed, the experts that the sampler used must match too: a copy can go one way only.
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
    """Puts whole trajectories that begin with the same `shared` tokens in as few pieces as fit rows."""
    pieces = []
    for part in assign_rows([span.stop - shared for span in trajectories], pack_length - shared):
        first, *others = (trajectories[k] for k in part)
        branches = [span._replace(start=shared) for span in (first, *others)]
        pieces.append([first._replace(stop=shared), *branches] if others else [first])
    return pieces


def _shared(t: Trajectory) -> int:
    """The tokens of a trajectory that others may share: all of its prompt but the last."""
    return max(0, int(np.argmax(t.mask)) - 1)
