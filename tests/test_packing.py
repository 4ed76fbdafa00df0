"""Packing: every token once, segments whole, few programs, little padding."""

import numpy as np
import pytest
from grpo_cases import init_params, make_learner, samples, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from coevolve_jax.grpo.packing import pack


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(4, 30), st.booleans()), max_size=12),
    st.integers(30, 50),
    st.integers(1, 4),
    st.integers(0, 10**6),
)
def test_segments_are_the_trajectories_whole_and_in_order(items, row_length, rows_per_microbatch, seed):
    rng = np.random.default_rng(seed)
    trajectories = [trajectory(rng, n, valid=valid) for n, valid in items]
    advantages = rng.normal(size=len(items)).astype(np.float32)
    batch = pack(
        samples(trajectories, advantages),
        row_length=row_length,
        rows_per_microbatch=rows_per_microbatch,
        max_rows=12,
    )
    flat = type(batch)(*(x.reshape(-1, row_length) if x.ndim else x for x in batch))
    found = []
    for row in range(len(flat.tokens)):
        ids = flat.segment_ids[row]
        changes = np.flatnonzero(np.diff(ids)) + 1
        runs = [(int(run[0]), len(run)) for run in np.split(ids, changes)]
        segments = [s for s, _ in runs if s]
        assert segments == list(
            range(1, len(segments) + 1)
        )  # each contiguous, counted from 1, padding at the end
        assert all(s for s, _ in runs[:-1])
        start = 0
        for segment, n in runs:
            here = slice(start, start + n)
            if segment:
                found.append(check_segment(flat, row, here, trajectories, advantages))
            else:
                for name in ("tokens", "targets", "mask", "sampler_logprobs", "advantages", "positions"):
                    assert not getattr(flat, name)[row, here].any()
            start += n
    assert sorted(found) == [i for i, t in enumerate(trajectories) if t.outcome.valid]
    filled = flat.segment_ids.any(axis=1)
    assert not filled[int(batch.used) * rows_per_microbatch :].any()
    assert int(batch.used) == -(-filled.sum() // rows_per_microbatch)


def check_segment(flat, row, here, trajectories, advantages) -> int:
    """Index of the trajectory that this segment is, with everything where it belongs."""
    i = next(
        i
        for i, t in enumerate(trajectories)
        if np.array_equal(t.ids, flat.tokens[row, here])
        and np.isclose(advantages[i], flat.advantages[row, here], rtol=0).any()
    )
    t = trajectories[i]
    np.testing.assert_array_equal(flat.positions[row, here], np.arange(len(t.ids)))
    np.testing.assert_array_equal(flat.targets[row, here], [*t.ids[1:], 0])  # the last token has no target
    np.testing.assert_array_equal(flat.mask[row, here], [*t.mask[1:], False])
    np.testing.assert_array_equal(flat.sampler_logprobs[row, here], [*t.logprobs[1:], 0])
    np.testing.assert_array_equal(flat.advantages[row, here], [*np.where(t.mask, advantages[i], 0)[1:], 0])
    return i


def demo_lengths(rng) -> np.ndarray:
    """Lengths like those of one step of the demo: 60 to 128 of 120 to 512 tokens, mean 215 to 280."""
    n = 120 + rng.gamma(2.0, rng.uniform(50, 90), rng.integers(60, 129))
    return np.clip(n, 120, 512).astype(int)


@pytest.mark.parametrize("row_length, rows_per_microbatch", [(512, 4), (512, 2), (1024, 2)])
def test_less_than_a_tenth_of_what_is_computed_is_padding(row_length, rows_per_microbatch):
    rng = np.random.default_rng(0)
    tokens = computed = 0
    for _ in range(30):
        trajectories = [trajectory(rng, n) for n in demo_lengths(rng)]
        batch = pack(
            samples(trajectories, np.ones(len(trajectories))),
            row_length=row_length,
            rows_per_microbatch=rows_per_microbatch,
            max_rows=128,
        )
        tokens += (batch.segment_ids > 0).sum()
        computed += batch.used * rows_per_microbatch * row_length
    assert 1 - tokens / computed < 0.10


def test_a_hundred_steps_of_random_lengths_compile_one_program():
    rng = np.random.default_rng(1)
    params = init_params()
    learner = make_learner(params, kl_coef=0.0)
    state, used = learner.init(params), set()
    for _ in range(100):
        trajectories = [
            trajectory(rng, n, valid=rng.random() < 0.9) for n in rng.integers(5, 33, rng.integers(1, 9))
        ]
        batch = pack(
            samples(trajectories, np.ones(len(trajectories))),
            row_length=32,
            rows_per_microbatch=2,
            max_rows=8,
        )
        used.add(int(batch.used))
        state, _ = learner.update(state, batch)
    assert len(used) >= 4
    assert learner._update._cache_size() == 1
