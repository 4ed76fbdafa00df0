"""Trajectories of uneven length -> one batch of fixed shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from coevolve_jax.types import Trajectory


class Batch(NamedTuple):
    """M micro-batches of R rows of L tokens. Arrays are [M, R, L] where not said otherwise.

    tokens: int32. positions: int32, from 0 in each segment. segment_ids: int32, from 1 in each
    row; 0 is padding. targets: int32, the next token of the segment. mask: bool, the target is a token that the
    policy sampled. sampler_logprobs, advantages: float32, of the target.
    used: int32 scalar, the first `used` micro-batches hold data; the rest is padding.
    routing: int16 [M, R, L, A, K], the experts that the sampler's sparse layers used for the token, -1 on padding;
    without elements where the learner replays none.
    """

    tokens: np.ndarray
    positions: np.ndarray
    segment_ids: np.ndarray
    targets: np.ndarray
    mask: np.ndarray
    sampler_logprobs: np.ndarray
    advantages: np.ndarray
    used: np.ndarray
    routing: np.ndarray = np.zeros((0,) * 5, np.int16)


def assign_rows(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """First-fit decreasing: indices of the items in each row. Items longer than a row raise ValueError."""
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[i] > row_length:
            raise ValueError(
                f"A trajectory of {lengths[i]} tokens does not fit a row of {row_length}: raise "
                "config.learner.row_length to at least config.rollout.max_length."
            )
        row = next((r for r in range(len(rows)) if room[r] >= lengths[i]), None)
        if row is None:
            rows.append([])
            room.append(row_length)
            row = len(rows) - 1
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows


def pack(
    trajectories: Sequence[Trajectory],
    advantages: np.ndarray,
    *,
    row_length: int,
    rows_per_microbatch: int,
    max_rows: int,
    routing: tuple[int, int] = (0, 0),
) -> Batch:
    """Packs the valid trajectories; one call's shape is that of every other call with the same settings.

    Args:
      advantages: [N], one per trajectory.
      max_rows: rows of the batch, rounded up to whole micro-batches. Every row holds at least one
        trajectory, so the number of trajectories per step is enough.
      routing: A and K of the routing that every trajectory has and the learner replays; zeros for none.

    Raises:
      ValueError: a trajectory is longer than row_length or lacks the routing, or all of them need more than
        max_rows.
    """
    keep = [i for i, t in enumerate(trajectories) if t.outcome.valid]
    rows = assign_rows([len(trajectories[i].ids) for i in keep], row_length)
    micro = -(-max_rows // rows_per_microbatch)
    if len(rows) > micro * rows_per_microbatch:
        raise ValueError(
            f"{len(keep)} trajectories need {len(rows)} rows of {row_length} tokens and max_rows is {max_rows}: "
            "raise it to the number of trajectories."
        )
    shape = (micro * rows_per_microbatch, row_length)
    batch = Batch(
        tokens=np.zeros(shape, np.int32),
        positions=np.zeros(shape, np.int32),
        segment_ids=np.zeros(shape, np.int32),
        targets=np.zeros(shape, np.int32),
        mask=np.zeros(shape, bool),
        sampler_logprobs=np.zeros(shape, np.float32),
        advantages=np.zeros(shape, np.float32),
        used=np.int32(-(-len(rows) // rows_per_microbatch)),
        routing=np.full((*shape, *routing), -1, np.int16),
    )
    for r, row in enumerate(rows):
        start = 0
        for segment, k in enumerate(row, start=1):
            t, n = trajectories[keep[k]], len(trajectories[keep[k]].ids)
            here = slice(start, start + n)
            predicts = slice(start, start + n - 1)
            batch.tokens[r, here] = t.ids
            batch.positions[r, here] = np.arange(n)
            batch.segment_ids[r, here] = segment
            batch.targets[r, predicts] = t.ids[1:]
            batch.mask[r, predicts] = t.mask[1:]
            batch.sampler_logprobs[r, predicts] = t.logprobs[1:]
            batch.advantages[r, here] = advantages[keep[k]]
            if batch.routing.size:
                batch.routing[r, here] = _routing(t, routing)
            start += n
    split = lambda x: x.reshape(micro, rows_per_microbatch, *x.shape[1:]) if x.ndim else x
    return Batch(*(split(np.asarray(x)) for x in batch))


def _routing(t: Trajectory, layers_and_experts: tuple[int, int]) -> np.ndarray:
    """[T, A, K]. Raises ValueError where the trajectory has no such routing."""
    found = None if t.routing is None else t.routing.shape[1:]
    if found != layers_and_experts:
        raise ValueError(
            f"A trajectory of task {t.task_id} has routing of layers and experts {found}, the learner replays "
            f"{layers_and_experts}: have the engine record it, or set config.learner.replay_routing to False."
        )
    return t.routing
