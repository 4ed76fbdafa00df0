"""Packing: samples of uneven length become one batch of fixed shape."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Bool, Float32, Int16, Int32
from ml_collections import ConfigDict

from coevolve_jax.grpo import layout
from coevolve_jax.types import TrainingSample, Trajectory

# The type of a batch's arrays: np.ndarray as packed, jax.Array on devices and in programs.
Array = TypeVar("Array")


def _none(axes: int, dtype: type) -> Any:
    """An array without elements: a constant that stands for any kind of array."""
    return np.zeros((0,) * axes, dtype)


class Batch(NamedTuple, Generic[Array]):
    """M micro-batches of R rows of L tokens.

    Some arrays have no elements where nothing needs them.

    Attributes:
      positions: counted from 0 in each trajectory.
      segment_ids: counted from 1 in each row; 0 is padding.
      targets: the next token of the trajectory.
      mask: True where the policy sampled the target, in a sample with advantages.
      sampler_logprobs, advantages: of the target, as in `TrainingSample`; 0 where mask is False.
      used: the first `used` micro-batches hold data; the rest is padding.
      routing: the experts that the sampler's A sparse layers used for the token, K per layer, -1 on padding.
        No elements where the learner replays none.
      ce_weights, ref_logprobs: of the target, as in `TrainingSample`. No elements where no sample has any.
      parents: the segment before a token's own in its trajectory: a prompt that it shares with others. A
        token without one repeats its own. No elements where every segment is a whole trajectory.
      ages: how many updates ago the target's weights were the newest; 0 where mask is False. No elements
        where the learner does not ask.
    """

    tokens: Int32[Array, "M R L"]
    positions: Int32[Array, "M R L"]
    segment_ids: Int32[Array, "M R L"]
    targets: Int32[Array, "M R L"]
    mask: Bool[Array, "M R L"]
    sampler_logprobs: Float32[Array, "M R L"]
    advantages: Float32[Array, "M R L"]
    used: Int32[Array, ""]
    routing: Int16[Array, "M R L A K"] = _none(5, np.int16)
    ce_weights: Float32[Array, "M R L"] = _none(3, np.float32)
    ref_logprobs: Float32[Array, "M R L"] = _none(3, np.float32)
    parents: Int32[Array, "M R L"] = _none(3, np.int32)
    ages: Int32[Array, "M R L"] = _none(3, np.int32)


def pack_for(
    learner: ConfigDict,
    samples: Sequence[TrainingSample],
    *,
    max_rows: int,
    routing: tuple[int, int] = (0, 0),
    version: int | None = None,
) -> Batch[np.ndarray]:
    """Does `pack` as a learner's config says. learner: that section of the config."""
    return pack(
        samples,
        pack_length=learner.pack_length,
        pack_length_buckets=learner.pack_length_buckets,
        rows_per_microbatch=learner.rows_per_microbatch,
        max_rows=max_rows,
        routing=routing,
        prefix_sharing=learner.prefix_sharing,
        version=version,
    )


def pack(
    samples: Sequence[TrainingSample],
    *,
    pack_length: int,
    rows_per_microbatch: int,
    max_rows: int,
    pack_length_buckets: Sequence[int] = (),
    routing: tuple[int, int] = (0, 0),
    prefix_sharing: bool = False,
    version: int | None = None,
) -> Batch[np.ndarray]:
    """Packs all samples into one batch.

    Calls with the same settings give the same shape if none needs more than `max_rows` rows. With
    pack_length_buckets they must also choose the same row length.

    Args:
      max_rows: rows of the batch, rounded up to whole micro-batches. Every row holds at least one sample, so
        the number of rollouts per step is enough for them. Replay and demonstrations may need more rows. Then
        the micro-batches are doubled until they fit. With n times as many rows a run has at most log2(n),
        rounded up, more shapes and programs. Micro-batches that stay empty take a few bytes per token and no
        time.
      pack_length_buckets: other lengths that rows may have. Among these and pack_length, `pack` takes a
        length that fits every trajectory, with the fewest computed tokens, padding to whole micro-batches
        included. The longest wins a tie. So the trajectories' lengths alone decide, and each bucket is one
        more program.
      routing: A and K of the routing that every trajectory has and the learner replays; zeros for none.
      prefix_sharing: lay trajectories with the same prompt after one copy of it (`layout.shared_prompts`).
      version: that of the policy that learns, from which `Batch.ages` are counted. None: no ages.

    Raises:
      ValueError: a trajectory is invalid, longer than pack_length or lacks the routing. Numbers of a sample
        are not one per token. Some samples with advantages have ref_logprobs and others have not.
    """
    for s in samples:
        _check(s)
    pulled = [s.ref_logprobs is not None for s in samples if s.advantages is not None]
    if any(pulled) and not all(pulled):
        raise ValueError(
            f"{sum(pulled)} of {len(pulled)} samples with advantages have ref_logprobs: give them to every "
            "one, or to none and all are pulled to the frozen reference."
        )
    trajectories = [s.trajectory for s in samples]
    longest = max((len(t.ids) for t in trajectories), default=0)
    arrange = functools.partial(
        layout.arrange, trajectories, prefix_sharing=prefix_sharing, replayed=routing != (0, 0)
    )
    layouts = {n: arrange(n) for n in (pack_length, *(n for n in pack_length_buckets if n >= longest))}
    pack_length = min(layouts, key=lambda n: (-(-len(layouts[n]) // rows_per_microbatch) * n, -n))
    rows = layouts[pack_length]
    micro = max(1, -(-max_rows // rows_per_microbatch))
    while micro * rows_per_microbatch < len(rows):
        micro *= 2
    shape = (micro * rows_per_microbatch, pack_length)
    zeros = lambda dtype, wanted=True: np.zeros(shape if wanted else (shape[0], 0), dtype)
    batch = Batch(
        tokens=zeros(np.int32),
        positions=zeros(np.int32),
        segment_ids=zeros(np.int32),
        targets=zeros(np.int32),
        mask=zeros(bool),
        sampler_logprobs=zeros(np.float32),
        advantages=zeros(np.float32),
        used=np.asarray(-(-len(rows) // rows_per_microbatch), np.int32),
        routing=np.full((*shape, *routing), -1, np.int16),
        ce_weights=zeros(np.float32, any(s.ce_weights is not None for s in samples)),
        ref_logprobs=zeros(np.float32, any(pulled)),
        parents=zeros(np.int32, prefix_sharing),
        ages=zeros(np.int32, version is not None),
    )
    for r, row in enumerate(rows):
        start = segment = 0
        for piece in row:
            parent = segment + 1  # the piece's first segment, which precedes all others
            for span in piece:
                segment += 1
                here = slice(start, start + layout.length([span]))
                _write(batch, r, here, samples[span.trajectory], span, segment, version)
                if prefix_sharing:
                    batch.parents[r, here] = parent
                start = here.stop
    split = lambda x: x.reshape(micro, rows_per_microbatch, *x.shape[1:]) if x.ndim else x
    return Batch(*map(split, batch))


def _write(
    batch: Batch[np.ndarray],
    r: int,
    here: slice,
    sample: TrainingSample,
    span: layout.Span,
    segment: int,
    version: int | None,
) -> None:
    """Writes a span of a sample into row r of a batch [rows, L, ...], with the targets of its tokens."""
    t = sample.trajectory
    own, following = slice(span.start, span.stop), slice(span.start + 1, span.stop + 1)
    sampled = t.mask[following]
    predicts = slice(here.start, here.start + len(sampled))
    batch.tokens[r, here] = t.ids[own]
    batch.positions[r, here] = np.arange(span.start, span.stop)
    batch.segment_ids[r, here] = segment
    batch.targets[r, predicts] = t.ids[following]
    if sample.advantages is not None:
        batch.mask[r, predicts] = sampled
        batch.sampler_logprobs[r, predicts] = np.where(sampled, t.logprobs[following], 0)
        batch.advantages[r, predicts] = np.where(sampled, sample.advantages[following], 0)
        if version is not None:  # another run's sample may have a later version; it counts as fresh
            ages = np.maximum(version - t.versions[following], 0)
            batch.ages[r, predicts] = np.where(sampled, ages, 0)
        if sample.ref_logprobs is not None:
            batch.ref_logprobs[r, predicts] = np.where(sampled, sample.ref_logprobs[following], 0)
    if sample.ce_weights is not None:
        batch.ce_weights[r, predicts] = np.where(sampled, sample.ce_weights[following], 0)
    if batch.routing.size:
        batch.routing[r, here] = _routing(t, batch.routing.shape[2:])[own]


def _check(sample: TrainingSample) -> None:
    """Raises ValueError for a sample that no batch may hold."""
    t = sample.trajectory
    if not t.outcome.valid:
        raise ValueError(
            f"Rollout {t.rollout_index} of task {t.task_id} is invalid ({t.outcome.reason or t.stop}) and "
            "cannot be learned from: leave it out of the samples."
        )
    for name in ("advantages", "ce_weights", "ref_logprobs"):
        values = getattr(sample, name)
        if values is not None and np.shape(values) != t.ids.shape:
            raise ValueError(
                f"The {name} of rollout {t.rollout_index} of task {t.task_id} have shape "
                f"{np.shape(values)}, its ids {t.ids.shape}: give one number per token."
            )


def _routing(t: Trajectory, layers_and_experts: tuple[int, int]) -> np.ndarray:
    """The trajectory's routing, [T, A, K]. Raises ValueError where it has none of that shape.

    Where nothing was sampled, such as behind a prompt without room for a message, nothing is replayed.
    """
    if t.routing is None and not t.mask.any():
        return np.full((len(t.ids), *layers_and_experts), -1, np.int16)
    found = None if t.routing is None else t.routing.shape[1:]
    if t.routing is None or found != layers_and_experts:
        raise ValueError(
            f"A trajectory of task {t.task_id} has routing of layers and experts {found}, the learner "
            f"replays {layers_and_experts}: have the engine record it, or set config.learner.replay_routing "
            "to False."
        )
    return t.routing
