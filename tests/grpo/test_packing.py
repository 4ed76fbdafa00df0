"""Packing: every token once, whole segments, few programs, little padding."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coevolve_jax.grpo.packing import pack
from coevolve_jax.types import TrainingSample
from tests.support.grpo_cases import init_params, make_learner, moved, programs_of, samples, trajectory


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(4, 30), st.booleans()), max_size=12),
    st.integers(30, 50),
    st.integers(1, 4),
    st.lists(st.integers(1, 29), max_size=3),
    st.integers(0, 10**6),
)
def test_segments_are_the_trajectories_whole_and_in_order(
    items, pack_length, rows_per_microbatch, buckets, seed
):
    rng = np.random.default_rng(seed)
    trajectories = [trajectory(rng, n, valid=valid) for n, valid in items]
    advantages = rng.normal(size=len(items)).astype(np.float32)
    of_length = lambda pack_length, **options: pack(
        samples(trajectories, advantages),
        pack_length=pack_length,
        rows_per_microbatch=rows_per_microbatch,
        max_rows=12,
        **options,
    )
    batch = of_length(pack_length, pack_length_buckets=buckets)
    longest = max((t.ids.size for t in trajectories if t.outcome.valid), default=0)
    allowed = [pack_length, *(n for n in buckets if n >= longest)]
    computed = {n: int(of_length(n).used) * n for n in allowed}
    pack_length = batch.tokens.shape[2]
    assert pack_length == max(n for n in allowed if computed[n] == min(computed.values()))
    flat = type(batch)(*(x.reshape(-1, pack_length) if x.ndim else x for x in batch))
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
    """Returns the index of the trajectory in this segment, after checking its values and their places."""
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
    """Lengths like a step's of the demo: 60 to 128 rollouts of 120 to 512 tokens, mean 215 to 280."""
    n = 120 + rng.gamma(2.0, rng.uniform(50, 90), rng.integers(60, 129))
    return np.clip(n, 120, 512).astype(int)


@pytest.mark.parametrize("pack_length, rows_per_microbatch", [(512, 4), (512, 2), (1024, 2)])
def test_less_than_a_tenth_of_what_is_computed_is_padding(pack_length, rows_per_microbatch):
    rng = np.random.default_rng(0)
    tokens = computed = 0
    for _ in range(30):
        trajectories = [trajectory(rng, n) for n in demo_lengths(rng)]
        batch = pack(
            samples(trajectories, np.ones(len(trajectories))),
            pack_length=pack_length,
            rows_per_microbatch=rows_per_microbatch,
            max_rows=128,
        )
        tokens += (batch.segment_ids > 0).sum()
        computed += batch.used * rows_per_microbatch * pack_length
    assert 1 - tokens / computed < 0.10


@pytest.mark.slow
def test_a_hundred_steps_of_random_lengths_compile_one_program_for_each_length_of_rows():
    rng = np.random.default_rng(1)
    params = init_params()
    learner = make_learner(params, kl_coef=0.0)
    state, used, lengths, compiled = learner.init(params), set(), set(), programs_of(learner)
    for _ in range(100):
        longest = rng.choice([22, 33])
        trajectories = [
            trajectory(rng, n, valid=rng.random() < 0.9) for n in rng.integers(5, longest, rng.integers(1, 9))
        ]
        batch = pack(
            samples(trajectories, np.ones(len(trajectories))),
            pack_length=32,
            rows_per_microbatch=2,
            max_rows=8,
            pack_length_buckets=(24,),
        )
        used.add(int(batch.used))
        lengths.add(batch.tokens.shape[2])
        state, _ = learner.update(state, batch)
    assert len(used) >= 4
    assert lengths == {24, 32}
    assert programs_of(learner) - compiled <= 2
    # The program is shared
    assert programs_of(make_learner(moved(params), kl_coef=0.0)) == programs_of(learner)
    assert programs_of(make_learner(params, kl_coef=0.0123)) == 0


def both(rng, n: int, **changes) -> TrainingSample:
    """A sample with all three numbers per token."""
    numbers = rng.normal(size=(3, n)).astype(np.float32)
    return dataclasses.replace(TrainingSample(trajectory(rng, n), *numbers), **changes)


SIZES = dict(pack_length=32, rows_per_microbatch=2, max_rows=4)


def test_every_sampled_token_keeps_its_own_numbers_and_no_other_has_any():
    rng = np.random.default_rng(2)
    found = [both(rng, 20), both(rng, 12), both(rng, 30, ce_weights=None)]
    found.append(both(rng, 25, advantages=None, ref_logprobs=None))
    batch = pack(found, **SIZES)
    names = "advantages", "ce_weights", "ref_logprobs"
    packed = [np.concatenate([getattr(batch, name)[getattr(batch, name) != 0]]) for name in names]
    for name, got in zip(names, packed):
        values = [(getattr(s, name), s.trajectory.mask) for s in found if getattr(s, name) is not None]
        assert sorted(got) == sorted(np.concatenate([x[mask] for x, mask in values]))
    for s in found:  # each beside its own token
        at = np.argwhere(batch.tokens == s.trajectory.ids[0])
        here = next(
            (m, r, slice(c, c + len(s.trajectory.ids) - 1))
            for m, r, c in at
            if np.array_equal(batch.tokens[m, r, c : c + len(s.trajectory.ids)], s.trajectory.ids)
        )
        for name in names:
            values = getattr(s, name)
            want = 0 if values is None else np.where(s.trajectory.mask, values, 0)[1:]
            np.testing.assert_array_equal(
                getattr(batch, name)[here], want + np.zeros(len(s.trajectory.ids) - 1)
            )
        learns = s.advantages is not None
        np.testing.assert_array_equal(batch.mask[here], s.trajectory.mask[1:] & learns)


def test_streams_that_no_sample_has_have_no_elements():
    rng = np.random.default_rng(3)
    plain = samples([trajectory(rng, 20), trajectory(rng, 30)], [1, 2])
    batch = pack(plain, **SIZES)
    assert batch.ce_weights.size == batch.ref_logprobs.size == 0
    unpulled = both(rng, 9, advantages=None)  # a sample outside the KL term needs no reference
    batch = pack([*plain, unpulled], **SIZES)
    assert batch.ce_weights.shape == batch.mask.shape and batch.ref_logprobs.size == 0


@pytest.mark.parametrize(
    "change, why",
    [
        (dict(ref_logprobs=None), "1 of 2 samples with advantages have ref_logprobs: give them to every one"),
        (dict(advantages=np.ones(())), r"advantages of rollout 0 of task t have shape \(\), its ids \(20,\)"),
        (dict(ce_weights=np.ones(19)), r"ce_weights of rollout 0 of task t have shape \(19,\)"),
        (
            dict(trajectory=trajectory(np.random.default_rng(0), 20, valid=False)),
            r"Rollout 0 of task t is invalid \(done\).*leave it out",
        ),
    ],
)
def test_what_no_batch_may_hold_is_named(change, why):
    rng = np.random.default_rng(4)
    with pytest.raises(ValueError, match=why):
        pack([both(rng, 12), both(rng, 20, **change)], **SIZES)


def test_replayed_samples_double_the_capacity_so_that_few_shapes_exist():
    rng = np.random.default_rng(5)
    shapes = set()
    for n in range(34):
        batch = pack([both(rng, 30, ref_logprobs=None) for _ in range(n)], **SIZES)
        assert (batch.mask.any(axis=2).sum(), int(batch.used)) == (n, -(-n // 2))
        shapes.add(batch.mask.shape)
        assert len(batch.mask) == (2 if n <= 4 else 4 if n <= 8 else 8 if n <= 16 else 16 if n <= 32 else 32)
    assert len(shapes) == 5
