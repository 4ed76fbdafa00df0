"""Batches for the estimate of an update's time: passes through its loops, and attention's products."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.grpo import logprobs
from coevolve_jax.grpo.packing import Batch, pack
from coevolve_jax.models import context_parallel, flash, splash
from coevolve_jax.models.packed import Row, Segments
from coevolve_jax.types import Outcome, TrainingSample, Trajectory


class Lengths(NamedTuple):
    """Mean lengths in tokens. prompt: a group's shared start. rest: what follows it in each rollout."""

    prompt: int
    rest: int


class Load(NamedTuple):
    """The work of a batch for each device; where devices differ, for the one with most.

    Attributes:
      rows: rows of the whole batch that hold tokens.
      full: the share of their tokens that is no padding.
      microbatches: micro-batches that are computed.
      blocks: blocks of positions whose log-probabilities are computed, in all.
      pairs: a word in an attention kernel's name -> mean number of query-key pairs that a call multiplies for
        one head.
    """

    rows: int
    full: float
    microbatches: int
    blocks: int
    pairs: dict[str, float]


def made_up(groups: int, group_size: int, lengths: Lengths, pack_length: int) -> list[TrainingSample]:
    """Invents rollouts that fit a row. All that follows the prompts is learned from.

    Prompts have a standard deviation of a fifth of their mean, what follows a twelfth. BFCL's are like this
    along the reference calls.
    """
    rng = np.random.default_rng(0)
    draw = lambda mean, spread: max(1, round(rng.normal(mean, spread)))
    found = []
    for group in range(groups):
        prompt = min(draw(lengths.prompt, lengths.prompt / 5), pack_length - 1)
        for _ in range(group_size):
            rest = min(draw(lengths.rest, lengths.rest / 12), pack_length - prompt)
            found.append(_sample(group, prompt, prompt + rest))
    return found


def full_rows(rollouts: int, pack_length: int) -> list[TrainingSample]:
    """Invents rollouts that each fill a row. All but the first token is learned from."""
    return [_sample(i, 1, pack_length) for i in range(rollouts)]


def _sample(group: int, prompt: int, length: int) -> TrainingSample:
    t = Trajectory(
        task_id=str(group),
        rollout_index=0,
        ids=np.full(length, group, np.int32),
        mask=np.arange(length) >= prompt,
        logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        turn_starts=(0,),
        steps=(),
        stop="done",
        outcome=Outcome(0.0, False),
    )
    return TrainingSample(t, np.ones(length, np.float32))


def load(
    config: ConfigDict,
    holders: int,
    rows: int,
    pack_length: int,
    platform: str,
    lengths: Lengths | None,
    context: int = 1,
) -> Load:
    """The load of a step of the config's rollouts, packed as the run packs them.

    Args:
      holders: devices with rows of their own, or groups of devices that split these.
      rows: rows of a micro-batch on each of them.
      platform: of the devices.
      lengths: of the rollouts. None: each fills a row.
      context: devices of a group.
    """
    c = config.rollout
    count = c.tasks_per_step * c.group_size
    batch = pack(
        full_rows(count, pack_length)
        if lengths is None
        else made_up(c.tasks_per_step, c.group_size, lengths, pack_length),
        pack_length=pack_length,
        rows_per_microbatch=rows * holders,
        max_rows=count,
        prefix_sharing=config.learner.prefix_sharing,
    )
    used = int(batch.used)
    of_device = lambda x: x.reshape(used, holders, rows, context).sum(axis=2).max(axis=(1, 2))
    chunk, devices = config.learner.logprob_chunk, holders * context
    columns = logprobs.block_columns(devices, rows * pack_length // context, chunk, platform)
    learned = np.stack(
        [batch.mask[:used, :, own].sum(axis=2) for own in _places(context, pack_length)], axis=-1
    )
    real = batch.segment_ids[:used] > 0
    held = int(real.any(axis=2).sum())
    calls = 1 if platform == "gpu" else rows * (2 if config.learner.prefix_sharing else 1)
    return Load(
        rows=held,
        full=float(real.sum()) / (held * pack_length),
        microbatches=used,
        blocks=int(np.sum(-(-of_device(learned) // columns))),
        pairs={
            word: float(of_device(n).mean()) / calls
            for word, n in multiplied(batch, platform, context).items()
        },
    )


def multiplied(batch: Batch[np.ndarray], platform: str, context: int = 1) -> dict[str, np.ndarray]:
    """Counts the query-key pairs that the platform's attention kernels multiply for one head.

    Returns a word in each kernel's name -> int [rows, context], for each part of each row. Only micro-batches
    that are used count. It is empty where the platform has no kernel.
    """
    kernels = {"gpu": flash.pairs, "tpu": splash.pairs}
    if platform not in kernels:
        return {}
    flat = lambda x: x[: int(batch.used)].reshape(-1, x.shape[-1])
    ids, parents = flat(batch.segment_ids), flat(batch.parents) if batch.parents.size else None
    of_parts = [
        kernels[platform](Segments(ids[:, own], None if parents is None else parents[:, own]), Row(ids, own))
        for own in _places(context, ids.shape[1])
    ]
    return {word: np.stack([pairs[word] for pairs in of_parts], axis=1) for word in of_parts[0]}


def _places(context: int, length: int) -> list[Any]:
    """The places of the tokens of each part of a row."""
    if context == 1:
        return [np.arange(length)]
    return [np.asarray(context_parallel.places(part, context, length)) for part in range(context)]
