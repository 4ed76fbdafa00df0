"""One copy of a group's prompt in a row: its layout, and an update equal to the one without sharing."""

import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coevolve_jax.distributed import sharding
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.grpo.packing import pack
from coevolve_jax.models.decoder import Decoder
from coevolve_jax.types import TrainingSample
from tests.support.grpo_cases import MODEL, learner_config, moved, trajectory
from tests.support.update_programs import EXPERTS

pytestmark = pytest.mark.slow

# A step's groups: tokens of the prompt, and of each rollout after it.
GROUPS = st.lists(
    st.tuples(st.integers(1, 14), st.lists(st.integers(1, 18), min_size=1, max_size=5)),
    min_size=1,
    max_size=4,
)
SEEDS = st.integers(0, 2**31)
ROWS = 20  # the largest number of rollouts


def rollouts(
    groups, seed: int, *, streams: bool = True, routing: tuple[int, int] = (0, 0)
) -> list[TrainingSample]:
    """Rollouts of several groups, mixed; with all streams, or with advantages only."""
    rng = np.random.default_rng(seed)
    found = []
    for prompt, lengths in groups:
        ids = rng.integers(0, MODEL.vocab_size, prompt)
        for n in lengths:
            t = trajectory(rng, prompt + n, prompt=prompt)
            t.ids[:prompt] = ids
            t.mask[prompt] = True  # the prompt ends here
            experts = rng.integers(0, 4, (len(t.ids), *routing)).astype(np.int16)
            t = dataclasses.replace(t, routing=experts if any(routing) else None)
            numbers = rng.normal(size=(3, len(t.ids))).astype(np.float32)
            weights = np.where(rng.random(len(t.ids)) < 0.5, numbers[1], 0)
            found.append(
                TrainingSample(
                    t, numbers[0], weights if streams else None, numbers[2] - 3 if streams else None
                )
            )
    return [found[i] for i in rng.permutation(len(found))]


def packed(found, prefix_sharing: bool, *, pack_length=32, **changes):
    sizes = dict(pack_length=pack_length, rows_per_microbatch=2, max_rows=ROWS, prefix_sharing=prefix_sharing)
    return pack(found, **{**sizes, **changes})


def rows_of(batch):
    """The batch's arrays by name, for each row with any token."""
    arrays = {n: x.reshape(-1, *x.shape[2:]) for n, x in batch._asdict().items() if x.size > 1}
    return [{n: x[r] for n, x in arrays.items()} for r in np.flatnonzero(arrays["segment_ids"].any(1))]


def whole(row, segment: int) -> np.ndarray:
    """Positions in a row of the trajectory that ends in this segment."""
    own = row["segment_ids"] == segment
    parent = row["parents"][own][0]
    return np.flatnonzero(own | (row["segment_ids"] == parent))


@settings(max_examples=60, deadline=None)
@given(GROUPS, SEEDS)
@example([(2, [1, 11, 3, 18, 4]), (2, [1, 1])], 0)  # the two prompts differ in their last token
def test_every_trajectory_is_there_once_and_a_prompt_once_in_a_row(groups, seed):
    found = rollouts(groups, seed)
    batch = packed(found, True)
    names = (
        "tokens",
        "positions",
        "targets",
        "mask",
        "sampler_logprobs",
        "advantages",
        "ce_weights",
        "ref_logprobs",
    )
    left = [s.trajectory.ids.tolist() for s in found]
    tokens = 0
    for row in rows_of(batch):
        segments = np.unique(row["segment_ids"][row["segment_ids"] > 0])
        assert segments.tolist() == list(range(1, len(segments) + 1))
        first = [row["parents"][row["segment_ids"] == s][0] for s in segments]
        shared = {p for s, p in zip(segments, first) if p != s}
        for s in set(segments) - shared:
            at = whole(row, s)
            left.remove(row["tokens"][at].tolist())
            np.testing.assert_array_equal(row["positions"][at], np.arange(len(at)))
            np.testing.assert_array_equal(row["targets"][at[:-1]], row["tokens"][at[1:]])
        # Each branch has the prompt's last token for itself.
        branch = lambda s: next(b for b in segments if b != s and first[b - 1] == s)
        prompts = [
            row["tokens"][whole(row, branch(s))[: np.sum(row["segment_ids"] == s) + 1]] for s in shared
        ]
        assert len({prompt.tobytes() for prompt in prompts}) == len(prompts)
        for s in shared:
            own = row["segment_ids"] == s
            assert first[s - 1] == s and not row["mask"][own].any() and not row["ce_weights"][own].any()
            assert first.count(s) >= 3  # itself and two branches
        tokens += np.sum(row["segment_ids"] > 0)
    assert left == []
    assert tokens <= sum(len(s.trajectory.ids) for s in found)
    # The same tokens are learned from, each with the same numbers.
    learned = lambda b: sorted(
        zip(*(getattr(b, n)[b.mask | (b.ce_weights != 0)].tolist() for n in names[1:])), key=repr
    )
    assert learned(batch) == learned(packed(found, False))


def test_a_group_that_does_not_fit_a_row_has_a_copy_of_its_prompt_in_each():
    found = rollouts([(11, [10] * 5)], 0)
    rows = rows_of(packed(found, True))
    assert [np.sum(row["segment_ids"] > 0) for row in rows] == [32, 32, 21]  # 10 and two times 11; one whole
    assert [row["segment_ids"].max() for row in rows] == [3, 3, 1]
    assert len(rows_of(packed(found, False))) == 5


def test_prompts_are_the_same_by_their_tokens_and_by_the_experts_that_are_replayed():
    found = rollouts([(9, [3, 4])], 0, routing=(2, 2))
    shared = lambda samples, **how: sum(
        np.sum(b["segment_ids"] > 0) for b in rows_of(packed(samples, True, **how))
    )
    assert shared(found) == 2 * 9 + 3 + 4 - 8  # ids alone say nothing: both have one task_id
    assert shared(found, routing=(2, 2)) == 2 * 9 + 3 + 4  # a shared token can have one routing only
    experts = found[0].trajectory.routing.copy()
    experts[:9] = found[1].trajectory.routing[:9]
    same = dataclasses.replace(found[0], trajectory=dataclasses.replace(found[0].trajectory, routing=experts))
    assert shared([same, found[1]], routing=(2, 2)) == 2 * 9 + 3 + 4 - 8
    other = dataclasses.replace(
        found[0].trajectory, ids=found[0].trajectory.ids + (np.arange(len(experts)) == 4)
    )
    assert shared([dataclasses.replace(found[0], trajectory=other), found[1]]) == 2 * 9 + 3 + 4


def test_what_does_not_fit_a_row_is_named_by_its_own_length():
    with pytest.raises(ValueError, match="A trajectory of 40 tokens does not fit a row of 32"):
        packed(rollouts([(20, [20, 20])], 0), True)


# name -> model, changes of the learner's config, tokens of a row, all streams
UPDATES = {
    "all streams": (MODEL, dict(kl_coef=0.3), 32, True),
    "GSPO, blockwise": (
        MODEL,
        dict(ratio="sequence", aggregate="sequence", kl="k2", kl_coef=0.2, attention="chunked"),
        96,
        False,
    ),
    "experts, a constant length": (EXPERTS, dict(aggregate="constant", kl="none", kl_coef=0.0), 32, True),
}


@functools.cache
def programs(name: str):
    model, changes, *_ = UPDATES[name]
    tokens = np.zeros((1, 4), np.int32)
    params = jax.jit(Decoder(model).init)(jax.random.key(0), tokens)["params"]
    learner = Learner(model, learner_config(**changes), params, temperature=1.0, mesh=sharding.make_mesh())
    return jax.jit(learner.gradients), moved(params), params


@pytest.mark.parametrize(
    "name", ["all streams", *(pytest.param(n, marks=pytest.mark.nightly) for n in [*UPDATES][1:])]
)
@settings(max_examples=8, deadline=None)
@given(GROUPS, SEEDS)
def test_the_update_is_the_one_without_sharing(name, groups, seed):
    """Compares loss, metrics and gradient, for groups of any size, split over rows or not."""
    *_, pack_length, streams = UPDATES[name]
    gradients, start, reference = programs(name)
    found = rollouts(groups, seed, streams=streams)
    results = []
    for share in (False, True):
        batch = packed(found, share, pack_length=pack_length)
        results.append(jax.device_get(gradients(start, reference, batch, batch.sampler_logprobs)))
    (want, expected), (got, metrics) = results
    norm = optax.tree.norm(want)
    assert norm > 1e-3
    assert optax.tree.norm(jax.tree.map(np.subtract, got, want)) < 1e-5 * norm
    for metric, value in expected.items():
        if not metric.startswith("router"):  # means over the computed tokens
            np.testing.assert_allclose(metrics[metric], value, rtol=1e-4, atol=1e-5, err_msg=metric)
