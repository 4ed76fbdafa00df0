"""The decoupled objective on tokens of mixed ages, against numpy that goes token by token."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict, FrozenConfigDict

from coevolve_jax.distributed import sharding
from coevolve_jax.grpo import losses
from coevolve_jax.grpo.learn import learn
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.grpo.objective import Objective, microbatch
from coevolve_jax.grpo.packing import pack
from coevolve_jax.types import TrainingSample
from tests.distributed.test_sharding import named
from tests.distributed.test_sharding import start as process
from tests.grpo.test_grpo import next_logprobs, pad, padded_logprobs
from tests.support.grpo_cases import MODEL, init_params, learner_config, make_learner, moved, trajectory

pytestmark = pytest.mark.slow

NOW = 7  # the version that learns
CAP = 1.5
SETTINGS = dict(tis_cap=CAP, clip_low=0.2, clip_high=0.28, kl="none", kl_coef=0.0)
SHAPE = dict(pack_length=32, rows_per_microbatch=2, max_rows=8)


def aged(rng, params, length, ages, spread=0.5):
    """A sample whose tokens cycle through these ages. spread: nats between the sampler and `params`."""
    t = trajectory(rng, length)
    versions = np.where(t.mask, NOW - np.resize(ages, length), -1).astype(np.int32)
    sampler = np.concatenate([[0], next_logprobs(params, t)]) - rng.normal(0, spread, length)
    logprobs = np.where(t.mask, np.minimum(sampler, 0), 0).astype(np.float32)
    t = dataclasses.replace(t, versions=versions, logprobs=logprobs)
    return TrainingSample(t, np.full(length, rng.normal(), np.float32))


def mixed(params, seed=0):
    """Samples of mixed ages; the last has a later version, like another run's, and counts as fresh."""
    rng = np.random.default_rng(seed)
    ages = ([0], [1], [2, 1], [3, 0, 5], [1, 1, 4, 0], [-2])
    return [aged(rng, params, n, a) for n, a in zip((20, 30, 12, 9, 25, 8), ages, strict=True)]


def packed(found, **changes):
    return pack(found, **{**SHAPE, "version": NOW, **changes})


def gradient(learner, start, batch, old=None):
    grads, metrics = jax.device_get(jax.jit(learner.gradients)(start, start, batch, old))
    return grads, {name: float(value) for name, value in metrics.items()}


def by_hand(start, found, c):
    """Loss, its gradient by each sample's log-probabilities, and metrics, token by token in numpy."""
    total, count, per_token, weights, cut, capped, ratios = 0.0, 0, [], [], 0, 0, []
    for s in found:
        t = s.trajectory
        new, slopes = next_logprobs(start, t).astype(float), np.zeros(31)
        tokens = np.flatnonzero(t.mask)
        share = [1 / (NOW - t.versions[i]) if t.versions[i] < NOW else 0.0 for i in tokens]
        prox = [a * t.logprobs[i] + (1 - a) * new[i - 1] for i, a in zip(tokens, share)]
        ratio = [np.exp(new[i - 1] - p) for i, p in zip(tokens, prox)]
        if c.ratio == "sequence":
            ratio = [np.exp(np.mean([np.log(r) for r in ratio]))] * len(tokens)
        part = 1 / len(tokens) if c.aggregate == "sequence" else 1.0
        for i, p, r in zip(tokens, prox, ratio):
            a = float(s.advantages[i])
            weight = min(np.exp(p - t.logprobs[i]), c.tis_cap / r)
            outside = (a > 0 and r > 1 + c.clip_high) or (a < 0 and r < 1 - c.clip_low)
            bounded = 1 + c.clip_high if a > 0 else 1 - c.clip_low
            total -= part * weight * a * (bounded if outside else r)
            if not outside and c.ratio == "sequence":
                for j in tokens:
                    slopes[j - 1] -= part * weight * a * r / len(tokens)
            elif not outside:
                slopes[i - 1] -= part * weight * a * r
            weights.append(weight)
            ratios.append(r)
            cut += outside
            capped += r * np.exp(p - t.logprobs[i]) > c.tis_cap
        count += 1 if c.aggregate == "sequence" else len(tokens)
        per_token.append(slopes)
    metrics = {
        "policy_loss": total / count,
        "tis_weight_mean": np.mean(weights),
        "tis_capped": capped / len(weights),
        "clip_fraction": cut / len(weights),
        "ratio_max": max(ratios),
    }
    return [x / count for x in per_token], metrics


def backward(start, found, slopes):
    """The gradient by the parameters from those by each sample's log-probabilities."""
    total = jax.tree.map(jnp.zeros_like, start)
    for s, slope in zip(found, slopes, strict=True):
        _, pull = jax.vjp(lambda p, s=s: padded_logprobs(p, pad(s.trajectory.ids)), start)
        total = jax.tree.map(jnp.add, total, pull(jnp.asarray(slope, jnp.float32))[0])
    return jax.device_get(total)


GSPO = dict(ratio="sequence", aggregate="sequence", clip_low=0.03, clip_high=0.04)


@pytest.mark.parametrize("prefix_sharing", [False, True])
@pytest.mark.parametrize("changes", [{}, GSPO], ids=["token", "GSPO"])
def test_loss_and_gradient_are_those_of_a_slow_computation(params, changes, prefix_sharing):
    start = moved(params)
    found = mixed(start)
    learner = make_learner(params, **{**SETTINGS, **changes})
    got, metrics = gradient(learner, start, packed(found, prefix_sharing=prefix_sharing))
    slopes, want = by_hand(start, found, learner_config(**{**SETTINGS, **changes}))
    assert {name: metrics[name] for name in want} == pytest.approx(want, rel=1e-4, abs=1e-6)
    assert 0.05 < want["clip_fraction"] < 0.9 and 0.05 < want["tis_capped"] < 0.9
    expected = backward(start, found, slopes)
    norm = optax.tree.norm(expected)
    assert norm > 1e-2
    assert optax.tree.norm(jax.tree.map(np.subtract, got, expected)) < 1e-4 * norm


@pytest.mark.parametrize("age", [1, 2, 5])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_stale_token_outside_the_trust_region_is_not_pushed_further(age, advantage):
    """Its gradient is zero exactly where the ratio has moved too far in the advantage's direction."""
    moved_by = np.linspace(-4, 4, 41)  # log pi / pi_sampler

    def loss(logprobs):
        old = losses.proximal_logprobs(logprobs, jnp.zeros(41), jnp.full(41, age))
        ratio = jnp.exp(logprobs - old)
        return jnp.sum(losses.clipped_surrogate(ratio, jnp.full(41, advantage), 0.2, 0.28)[0])

    gradient, ratio = np.asarray(jax.grad(loss)(jnp.asarray(moved_by))), np.exp(moved_by / age)
    outside = ratio > 1.28 if advantage > 0 else ratio < 0.8
    np.testing.assert_array_equal(gradient == 0, outside)
    assert 0 < outside.sum() < 41


def test_weight_and_ratio_together_are_the_truncated_weight_of_a_fresh_token(params):
    """Without the clip age changes nothing: no token weighs more than tis_cap, however far it moved."""
    start, rng = moved(params), np.random.default_rng(1)
    open_clip = make_learner(params, **{**SETTINGS, "clip_low": 1.0, "clip_high": 1e9})
    found = [aged(rng, start, n, [1, 2, 7], spread=3.0) for n in (30, 25)]
    stale, of_stale = gradient(open_clip, start, packed(found))
    fresh, of_fresh = gradient(open_clip, start, packed(found, version=0))
    norm = optax.tree.norm(fresh)
    assert optax.tree.norm(jax.tree.map(np.subtract, stale, fresh)) < 1e-5 * norm
    assert of_stale["loss"] == pytest.approx(of_fresh["loss"], rel=1e-5)
    assert of_stale["tis_capped"] == of_fresh["tis_capped"] > 0.2
    assert of_stale["ratio_max"] > 3 and of_fresh["ratio_max"] == 1


def test_in_a_sequence_a_token_whose_probability_rose_more_weighs_no_less():
    """Weight and the trajectory's ratio are the policy's change by the weight, but at most tis_cap."""
    rng = np.random.default_rng(4)
    t = trajectory(rng, 30)
    versions = np.where(t.mask, NOW - 2, -1).astype(np.int32)
    batch = packed([TrainingSample(dataclasses.replace(t, versions=versions), np.ones(30, np.float32))])
    micro = microbatch(batch, 0)
    moves = rng.normal(0.4, 1, micro.mask.shape).astype(np.float32)  # log pi / pi_sampler
    logprobs = jnp.where(micro.mask, micro.sampler_logprobs + moves, 0)
    c = learner_config(**{**SETTINGS, **GSPO, "clip_low": 1.0, "clip_high": 1e9})
    objective = Objective(MODEL, FrozenConfigDict(c), 1.0, sharding.make_mesh())
    found = objective._surrogate(logprobs, logprobs, None, logprobs * 0, micro, objective.totals(batch))
    moved_by = moves[micro.mask]
    ratio = np.exp(
        np.mean(moved_by / 2)
    )  # at age 2 the proximal policy is half-way, and the rest is the ratio
    weighed = -np.asarray(found.loss)[micro.mask]
    np.testing.assert_allclose(weighed, np.minimum(np.exp(moved_by / 2) * ratio, CAP), rtol=1e-5)
    assert (np.diff(weighed[np.argsort(moved_by)]) > -1e-5).all() and 0.1 < np.mean(
        weighed > CAP - 1e-4
    ) < 0.9


def test_fresh_tokens_keep_their_bits(params):
    """A batch of fresh tokens gives the numbers of one without ages."""
    start, rng = moved(params), np.random.default_rng(2)
    found = [aged(rng, start, n, [0]) for n in (20, 30, 12, 9)]
    for changes in ({}, GSPO):
        learner = make_learner(params, **{**SETTINGS, **changes})
        told, untold = (gradient(learner, start, packed(found, version=v)) for v in (NOW, None))
        jax.tree.map(np.testing.assert_array_equal, told, untold)
        assert told[1]["ratio_max"] == 1 and told[1]["clip_fraction"] == 0


def test_the_policy_before_the_first_of_several_updates_is_their_proximal_policy(params):
    start = moved(params)
    found = mixed(start)
    learner = make_learner(params, **SETTINGS, epochs=2)
    old = learner.score(learner.init(start), packed(found))
    told, untold = (gradient(learner, start, packed(found, version=v), old) for v in (NOW, None))
    jax.tree.map(np.testing.assert_array_equal, told, untold)


def test_no_token_feels_the_age_of_another(params):
    """A sample's gradient does not depend on the ages of the samples beside it in its row."""
    start, rng = moved(params), np.random.default_rng(3)
    one, *others = (aged(rng, start, n, [2, 0, 1]) for n in (9, 8, 7))
    older = [
        dataclasses.replace(
            s,
            trajectory=dataclasses.replace(
                s.trajectory, versions=np.where(s.trajectory.mask, s.trajectory.versions - 3, -1)
            ),
        )
        for s in others
    ]
    silent = [dataclasses.replace(s, advantages=0 * s.advantages) for s in older]
    learner = make_learner(params, **SETTINGS)
    beside, _ = gradient(learner, start, packed([one, *silent]))
    fresh = [dataclasses.replace(s, advantages=0 * s.advantages) for s in others]
    again, _ = gradient(learner, start, packed([one, *fresh]))
    jax.tree.map(np.testing.assert_array_equal, beside, again)
    loud, _ = gradient(learner, start, packed([one, *others]))
    aged_loud, _ = gradient(learner, start, packed([one, *older]))
    assert (
        optax.tree.norm(jax.tree.map(np.subtract, loud, aged_loud)) > 1e-3
    )  # the ages do matter to their own samples


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(5, 30), st.booleans()), min_size=1, max_size=9),
    st.integers(0, 20),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_packing_keeps_the_age_of_every_token(items, version, prefix_sharing, seed):
    """Prompts may be own or shared; some samples have no policy gradient."""
    rng, prompt = np.random.default_rng(seed), np.arange(3, dtype=np.int32)
    found = []
    for length, learned in items:
        t = trajectory(rng, length)
        versions = np.where(t.mask, rng.integers(0, 21, length), -1).astype(np.int32)
        t = dataclasses.replace(t, ids=np.concatenate([prompt, t.ids[3:]]), versions=versions)
        found.append(
            TrainingSample(t, np.ones(length, np.float32) if learned else None, np.ones(length, np.float32))
        )
    batch = packed(found, max_rows=len(items), version=version, prefix_sharing=prefix_sharing)
    got = sorted(zip(*(x[batch.mask].tolist() for x in (batch.targets, batch.sampler_logprobs, batch.ages))))
    want = []
    for s in found:
        if s.advantages is not None:
            t = s.trajectory
            for i in np.flatnonzero(t.mask):
                want.append((int(t.ids[i]), float(t.logprobs[i]), max(0, version - int(t.versions[i]))))
    assert got == sorted(want)
    assert not batch.ages[~batch.mask].any()
    assert packed(found, max_rows=len(items), version=None).ages.size == 0


class Watched:
    """A learner that records the batches that it is given."""

    def __init__(self, learner):
        self.learner, self.batches = learner, []
        self.routing, self.scores, self.score = learner.routing, learner.scores, learner.score
        self.flops = learner.flops

    def update(self, state, batch, old_logprobs=None):
        self.batches.append(batch)
        return self.learner.update(state, batch, old_logprobs)


@pytest.mark.parametrize(
    ("max_staleness", "changes", "told"),
    [
        (5, {}, True),
        (0, {}, False),
        pytest.param(5, dict(tis_cap=0.0), False, marks=pytest.mark.nightly),
        pytest.param(5, dict(epochs=2), False, marks=pytest.mark.nightly),
    ],
)
def test_learn_tells_ages_where_something_asks_for_them(params, max_staleness, changes, told):
    c = learner_config(**{**SETTINGS, **changes})
    rollout = dict(tasks_per_step=4, group_size=2, max_staleness=max_staleness)
    learner = Watched(make_learner(params, **{**SETTINGS, **changes}))
    found = mixed(params)
    config = ConfigDict(dict(rollout=rollout, learner=c.to_dict()))
    _, learned = learn(config, learner, learner.learner.init(params), found, NOW)
    sizes = {batch.ages.size > 0 for batch in learner.batches}
    assert sizes == {told}
    assert ("tis_capped" in learned) == (c.tis_cap > 0)
    if told:
        ages = learner.batches[0].ages
        assert sorted(set(ages.ravel().tolist())) == [0, 1, 2, 3, 4, 5] and learned["clip_fraction"] > 0


MESHES = {"one": dict(), "fsdp and context": dict(fsdp=2, context=2)}


def main(folder):
    start = init_params()
    found = mixed(start)
    for name, sizes in MESHES.items():
        mesh = sharding.make_mesh(**sizes)
        place = lambda tree, mesh=mesh: jax.device_put(tree, sharding.param_shardings(mesh, tree))
        learner = Learner(MODEL, learner_config(**SETTINGS), place(start), temperature=1.0, mesh=mesh)
        batch = sharding.place_batch(mesh, packed(found), axis=1)
        gradients, metrics = jax.jit(learner.gradients)(place(start), place(start), batch, None)
        results = {}
        named(results, "gradient", gradients)
        named(results, "metric", metrics)
        np.savez(f"{folder}/{name}.npz", **results)


@pytest.mark.nightly
def test_devices_that_split_rows_and_parameters_compute_the_same(tmp_path):
    assert process([__file__, str(tmp_path)], devices=4).wait() == 0
    want, got = (dict(np.load(tmp_path / f"{name}.npz")) for name in MESHES)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert want["metric['tis_capped']"] > 0.05 and want["metric['clip_fraction']"] > 0.05


if __name__ == "__main__":
    main(sys.argv[1])
