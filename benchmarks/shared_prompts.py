"""Measures what one copy of a group's prompt saves an update: operations, and seconds on this machine.

    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 JAX_PLATFORMS=cpu python benchmarks/shared_prompts.py
    JAX_PLATFORMS=cpu python benchmarks/shared_prompts.py --config=configs/bfcl_qwen3_4b.py --repeats=0

The batch is made up, with the lengths of BFCL's trajectories along their reference calls. Prompts have 1,500
to 3,800 tokens (2,600 in the mean). Each of --group_size rollouts adds 430 sampled tokens and 270 of tools,
in turns. Model and learner are those of --config. It counts operations of matrix products in the compiled
program, each loop's as often as it runs.
"""

import math
import os
import statistics
import time

import jax
import numpy as np
from absl import app, flags

from coevolve_jax.config import load_file
from coevolve_jax.distributed import sharding
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.grpo.logprobs import block_columns
from coevolve_jax.grpo.packing import Batch, pack
from coevolve_jax.models import blockwise, hf_io
from coevolve_jax.models.packed import Row, Segments
from coevolve_jax.planning.aot import work
from coevolve_jax.planning.aot.hlo import Loop
from coevolve_jax.planning.plan import load_model
from coevolve_jax.types import Outcome, TrainingSample, Trajectory

_CONFIG = flags.DEFINE_string("config", "configs/bfcl_tiny.py", "Whose model and learner.")
_GROUPS = flags.DEFINE_integer("groups", 3, "Prompts.", lower_bound=1)
_SIZE = flags.DEFINE_integer("group_size", 8, "Rollouts of each.", lower_bound=2)
_ROW = flags.DEFINE_integer("pack_length", 25600, "Tokens of a row; a micro-batch is one.")
_REPEATS = flags.DEFINE_integer(
    "repeats", 3, "Updates of each kind; 0: none, for which weights need not be there."
)


def rollouts(vocabulary: int) -> list[TrainingSample]:
    rng = np.random.default_rng(0)
    return [
        rollout(rng, ids)
        for ids in (prompt(rng, vocabulary) for _ in range(_GROUPS.value))
        for _ in range(_SIZE.value)
    ]


def prompt(rng: np.random.Generator, vocabulary: int) -> np.ndarray:
    return rng.integers(3, vocabulary, int(np.clip(rng.normal(2600, 500), 1500, 3800)))


def rollout(rng: np.random.Generator, prompt: np.ndarray) -> TrainingSample:
    """Messages of 20 to 66 tokens, and 8 to 46 of tools after each but the last."""
    mask = [np.zeros(len(prompt), bool)]
    for turn in range(10):
        mask += [np.zeros(rng.integers(8, 53), bool)] * (turn > 0) + [np.ones(rng.integers(20, 67), bool)]
    mask = np.concatenate(mask)
    ids = np.concatenate([prompt, rng.integers(3, prompt.max() + 1, len(mask) - len(prompt))]).astype(
        np.int32
    )
    t = Trajectory(
        task_id="made up",
        rollout_index=0,
        ids=ids,
        mask=mask,
        logprobs=np.where(mask, rng.normal(-1, 0.3, len(ids)), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turn_starts=(0,),
        steps=(),
        stop="done",
        outcome=Outcome(0.0, False),
    )
    return TrainingSample(t, np.full(len(ids), rng.normal(), np.float32))


def operations(learner: Learner, batch: Batch, chunk: int) -> float:
    """Operations of the matrix products of an update on the batch."""
    tokens, used = _ROW.value, int(batch.used)
    masked = batch.mask[:used].sum(axis=(1, 2))
    blocks = float(np.mean(-(-masked // block_columns(1, tokens, chunk, "cpu"))))
    visits = float(np.mean([key_blocks(batch, i) for i in range(used)]))

    def times(depth: int, loop: Loop) -> float:
        return loop.trips or (used if depth == 0 else blocks if "logprobs" in loop.kind else visits)

    found = work.by_loop(learner.lower(batch).compile().as_text() or "", lambda path: path)
    return sum(w.operations * math.prod(map(times, range(len(loops)), loops)) for loops, w in found.items())


def key_blocks(batch: Batch, i: int) -> float:
    """The mean number of blocks of keys that a block of queries of the i-th micro-batch visits."""
    parents = batch.parents[i] if batch.parents.size else None
    size = blockwise.block_size(parents is not None)
    segments, row = Segments(batch.segment_ids[i], parents), Row.of(batch.segment_ids[i])
    return float(blockwise._visited(segments.blocks(size), row.blocks(size))[1].mean())


def main(_) -> None:
    config = load_file(_CONFIG.value)
    config.learner.pack_length, config.learner.rows_per_microbatch = _ROW.value, 1
    model = load_model(config.model)
    params = hf_io.load(config.model)[1] if _REPEATS.value else hf_io.abstract_params(model)
    learner = Learner(model, config.learner, params, temperature=1.0, mesh=sharding.make_mesh())
    found = rollouts(model.vocab_size)
    batches = {
        share: pack(
            found, pack_length=_ROW.value, rows_per_microbatch=1, max_rows=len(found), prefix_sharing=share
        )
        for share in (False, True)
    }
    seconds: dict[bool, list[tuple[float, float]]] = {share: [] for share in batches}
    for _ in range(_REPEATS.value + 1 if _REPEATS.value else 0):
        for share, batch in batches.items():
            state = jax.block_until_ready(learner.init(params))
            clock, processor = time.perf_counter(), time.process_time()
            jax.block_until_ready(learner.update(state, batch))
            seconds[share].append((time.perf_counter() - clock, time.process_time() - processor))
    sampled = sum(int(s.trajectory.mask.sum()) for s in found)
    print(
        f"{len(found)} rollouts of {_GROUPS.value} prompts, {sum(len(s.trajectory.ids) for s in found):,} "
        f"tokens, {sampled:,} sampled; "
        f"rows of {_ROW.value:,}; {os.cpu_count()} cores, jax {jax.__version__}\n\n"
        "| prompts | tokens computed | rows | operations | seconds | of processors |\n"
        "|---|---:|---:|---:|---:|---:|"
    )
    for share, batch in batches.items():
        cells = [
            "once for a group" if share else "in every rollout",
            f"{np.sum(batch.segment_ids > 0):,}",
            f"{int(batch.used)}",
            f"{operations(learner, batch, config.learner.logprob_chunk):.3g}",
            *([f"{statistics.median(times):.1f}" for times in zip(*seconds[share][1:])] or ["-", "-"]),
        ]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    app.run(main)
