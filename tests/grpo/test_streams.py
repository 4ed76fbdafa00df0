"""Policy gradient, KL and cross-entropy, each with its own tokens and denominator; and `learn`."""

import dataclasses
import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from coevolve_jax import build
from coevolve_jax.grpo.learn import learn
from coevolve_jax.grpo.packing import pack
from coevolve_jax.loop.trainer import Trainer
from coevolve_jax.models import hf_io
from coevolve_jax.models.decoder import Decoder
from coevolve_jax.types import TrainingSample
from tests.distributed.test_sharding import first_moment
from tests.grpo.test_grpo import pad, padded_logprobs, states_equal
from tests.support.grpo_cases import (
    MODEL,
    learner_config,
    make_learner,
    moved,
    samples,
    trajectory,
)

pytestmark = pytest.mark.slow

NONE = dict(kl="none", kl_coef=0.0)
GSPO = dict(ratio="sequence", aggregate="sequence", clip_low=3e-2, clip_high=4e-2)


def packed(found, max_rows=8):
    return pack(found, pack_length=32, rows_per_microbatch=2, max_rows=max_rows)


@functools.cache
def program(gradients):
    return jax.jit(gradients)


def gradient(learner, start, reference, batch, old="sampler"):
    """Gradient and metrics. old: the ratio's denominator, or "sampler"."""
    old = batch.sampler_logprobs if isinstance(old, str) else old
    grads, metrics = jax.device_get(program(learner.gradients)(start, reference, batch, old))
    return grads, {name: value.item() for name, value in metrics.items()}


def assert_close(got, want, limit=1e-5):
    """Bounds the difference of two gradients by the norm of the second, which must not be zero."""
    norm = optax.tree.norm(want)
    assert norm > 1e-3
    assert optax.tree.norm(jax.tree.map(np.subtract, got, want)) < limit * norm


def added(a, b):
    return jax.tree.map(np.add, a, b)


def imitated(rng, length, **changes):
    """A sample for cross-entropy alone.

    Some of its weights are 0. Tokens that were not sampled have other weights, and its sampler's
    log-probabilities are NaN: neither may count.
    """
    t = trajectory(rng, length)
    t = dataclasses.replace(t, logprobs=np.full(length, np.nan, np.float32))
    weights = np.where(rng.random(length) < 0.7, rng.uniform(0.2, 2, length), 0).astype(np.float32)
    return dataclasses.replace(TrainingSample(t, None, weights), **changes)


def test_cross_entropy_alone_is_supervised_learning(params):
    rng = np.random.default_rng(0)
    found, start = [imitated(rng, n) for n in (20, 11, 28)], moved(params)

    def by_hand(p):
        total = count = 0
        for s in found:
            t = s.trajectory
            weights = pad(np.where(t.mask, s.ce_weights, 0))[1:]
            total -= jnp.sum(weights * padded_logprobs(p, pad(t.ids)))
            count += np.sum(weights != 0)
        return total / count

    want_loss, want = jax.value_and_grad(by_hand)(start)
    # A KL term without tokens ignores the reference.
    for changes in (NONE, dict(kl_coef=0.5)):
        learner = make_learner(params, **changes)
        got, metrics = gradient(learner, start, params, packed(found))
        assert_close(got, jax.device_get(want))
        assert metrics["ce"] == metrics["loss"] == pytest.approx(float(want_loss), rel=1e-5)
        assert metrics["policy_loss"] == metrics["mismatch_max"] == metrics.get("kl", 0) == 0


@pytest.mark.parametrize(
    "changes", [dict(kl="none"), dict(kl_coef=0.0), dict(kl_coef=0.1), dict(kl_coef=0.0, lora_rank=2)]
)
def test_the_policy_before_rl_is_held_where_something_asks_for_it(params, changes):
    policy = build.Policy(MODEL, jax.tree.map(jnp.copy, params), None, None)
    first = weakref.ref(policy.params["norm"]["scale"])
    learner = make_learner(policy.params, **changes)
    engine = {"name": "native", "dtype": "float32", "sharded": False}
    trainer = Trainer(learner, policy, ConfigDict({"engine": engine}))
    state = trainer.init(policy.params)
    gc.collect()
    assert (first() is not None) == (changes.get("kl_coef") == 0.1 or "lora_rank" in changes)
    state, metrics = trainer.update(state, packed(rollouts_of(np.random.default_rng(0))))
    assert metrics["applied"] and jax.tree.leaves(trainer.policy(state))


def test_master_weights_begin_as_the_file_has_them_and_the_reference_computes_the_same(params, tmp_path):
    start = moved(params)  # no numbers of bfloat16
    hf_io.save(tmp_path, MODEL, start)
    changes = dict(dtype="bfloat16", kl_coef=0.1)
    loaded = hf_io.load(tmp_path, build.trained_dtype(learner_config(**changes)))[1]
    policy, learner = build.Policy(MODEL, loaded, None, None), make_learner(loaded, **changes)
    kernel = weakref.ref(loaded["layers"]["mlp"]["up_proj"]["kernel"])
    del loaded
    state = Trainer(learner, policy, ConfigDict({"engine": {"name": "native", "sharded": False}})).init(
        policy.params
    )
    jax.tree.map(np.testing.assert_array_equal, state.params, start)
    gc.collect()
    assert policy.params is None and kernel() is None  # one copy, and the reference
    kept = flatten_dict(learner._reference)
    assert {path[-1] for path, x in kept.items() if x.dtype == jnp.bfloat16} == {"kernel", "embedding"}
    assert {path[-1] for path, x in kept.items() if x.dtype == jnp.float32} == {"scale"}
    tokens = np.random.default_rng(0).integers(0, MODEL.vocab_size, (2, 16))
    logits = jax.jit(lambda p: Decoder(MODEL, dtype=jnp.bfloat16).apply({"params": p}, tokens))
    np.testing.assert_array_equal(logits(learner._reference), logits(state.params))
    assert build.trained_dtype(learner_config(**changes, lora_rank=2)) == "bfloat16"
    assert build.trained_dtype(learner_config(param_dtype="bfloat16")) == "bfloat16"


def test_a_kl_to_given_logprobs_is_the_kl_to_a_reference_that_gives_them(params):
    rng = np.random.default_rng(1)
    other, start, broken = moved(params, 6), moved(params), jax.tree.map(lambda p: p * jnp.nan, params)
    advantages = rng.normal(size=4)
    plain = samples([trajectory(rng, n) for n in (20, 30, 12, 9)], advantages)
    of_other = lambda t: np.asarray(padded_logprobs(other, pad(t.ids)))[: len(t.ids) - 1]
    given = [
        dataclasses.replace(s, ref_logprobs=np.concatenate([[np.nan], of_other(s.trajectory)])) for s in plain
    ]
    for estimator in ("k2", "k3"):
        learner = make_learner(params, kl=estimator, kl_coef=0.7)
        want, expected = gradient(learner, start, other, packed(plain))
        got, metrics = gradient(learner, start, broken, packed(given))  # the reference is not run
        assert_close(got, want)
        assert metrics["kl"] == pytest.approx(expected["kl"], rel=1e-4) and metrics["kl"] > 1e-3
        away, _ = gradient(learner, start, params, packed(plain))
        with pytest.raises(AssertionError):  # another reference gives another gradient
            assert_close(away, want, 1e-2)


@pytest.mark.parametrize(
    "changes",
    [
        dict(kl_coef=0.3),
        pytest.param(dict(**GSPO, kl_coef=0.3), marks=pytest.mark.nightly),
        pytest.param(NONE, marks=pytest.mark.nightly),
    ],
)
def test_no_stream_feels_the_samples_of_another(params, changes):
    """A mixed batch's gradient is the sum over its streams, each in a batch of its own."""
    rng = np.random.default_rng(2)
    rollouts = samples([trajectory(rng, n) for n in (20, 30, 12)], rng.normal(size=3))
    both = dataclasses.replace(rollouts[0], ce_weights=rng.uniform(0, 1, 20).astype(np.float32))
    replayed = [imitated(rng, n) for n in (25, 8, 17, 6)]
    learner, start = make_learner(params, **changes), moved(params)
    policy, of_policy = gradient(learner, start, params, packed(rollouts))
    alone = [dataclasses.replace(both, advantages=None), *replayed]
    imitation, of_imitation = gradient(learner, start, params, packed(alone))
    mixed, metrics = gradient(learner, start, params, packed([both, *replayed, *rollouts[1:]]))
    assert_close(mixed, added(policy, imitation))
    for name, value in of_policy.items():
        if name != "loss":
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert metrics["ce"] == pytest.approx(of_imitation["ce"], rel=1e-5)
    assert metrics["loss"] == pytest.approx(of_policy["loss"] + of_imitation["ce"], rel=1e-4)
    assert "ce" not in of_policy


@pytest.mark.nightly
def test_with_adapters_too(params):
    rng = np.random.default_rng(3)
    rollouts = samples([trajectory(rng, n) for n in (20, 30)], rng.normal(size=2))
    replayed = [imitated(rng, 25)]
    learner = make_learner(params, lora_rank=2, kl_coef=0.3)
    adapters = moved(learner.init(params).params)
    parts = [gradient(learner, adapters, params, packed(found))[0] for found in (rollouts, replayed)]
    assert_close(gradient(learner, adapters, params, packed(rollouts + replayed))[0], added(*parts))


def test_cross_entropy_is_applied_where_it_has_a_weight(params):
    learner = make_learner(params, **NONE)
    sample = imitated(np.random.default_rng(4), 20)
    state, metrics = learner.update(learner.init(params), packed([sample]))
    assert metrics["applied"] and metrics["finite"] and state.step == 1
    before = jax.device_get(state)
    unweighted = dataclasses.replace(sample, ce_weights=np.zeros(20, np.float32))
    state, metrics = learner.update(state, packed([unweighted]))
    assert not metrics["applied"] and metrics["ce"] == 0 and states_equal(before, state)


# ---- learn -----------------------------------------------------------------------------------------------


def run_config(**changes) -> ConfigDict:
    return ConfigDict(
        dict(rollout=dict(tasks_per_step=2, group_size=2), learner=learner_config(**changes).to_dict())
    )


class Scored:
    """A learner that records the batches passed to `score`."""

    def __init__(self, learner):
        self.learner, self.asked = learner, []
        self.routing, self.scores, self.update = learner.routing, learner.scores, learner.update
        self.flops = learner.flops

    def score(self, state, batch):
        self.asked.append(batch)
        return self.learner.score(state, batch)


def rollouts_of(rng):
    return samples([trajectory(rng, n) for n in (20, 30, 12, 9)], [1, -1, 0.5, 2])


@pytest.mark.parametrize("changes", [pytest.param({}, marks=pytest.mark.nightly), GSPO])
def test_one_epoch_with_truncated_weights_needs_no_pass_of_its_own(params, changes):
    """The update computes the old log-probabilities itself; the result equals that of two passes."""
    found, start = rollouts_of(np.random.default_rng(5)), moved(params)
    learner = Scored(make_learner(params, tis_cap=1.2, epochs=1, **changes))
    batch = packed(found, max_rows=4)
    old = learner.learner.score(learner.learner.init(start), batch)
    want, expected = gradient(learner.learner, start, params, batch, old)
    state, learned = learn(run_config(tis_cap=1.2, **changes), learner, learner.learner.init(start), found)
    assert learner.asked == [] and learned["applied"] and state.step == 1
    # Adam's first moment after one step is (1 - b1) times the clipped gradient.
    c = learner_config()
    share = (1 - c.adam_b1) * min(1.0, c.max_grad_norm / optax.tree.norm(want))
    assert_close(first_moment(state), jax.tree.map(lambda x: share * x, want), 1e-6)
    assert {name: learned[name] for name in expected} == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert learned["ratio_max"] == 1 and learned["clip_fraction"] == 0 and learned["mismatch_max"] > 0.1
    # Without the cap the ratio still compares with the sampler.
    _, plain = learn(
        run_config(**changes), make_learner(params, **changes), learner.learner.init(start), found
    )
    assert abs(plain["ratio_max"] - 1) > 0.05


def test_the_logged_kl_is_in_nats_per_token_whatever_the_aggregate(params):
    rng, start, reference = np.random.default_rng(5), moved(params), moved(params, 6)
    found = samples([trajectory(rng, n) for n in (20, 30, 12, 9)], np.zeros(4))
    own, other = (
        [np.asarray(padded_logprobs(p, pad(s.trajectory.ids)))[: len(s.trajectory.ids) - 1] for s in found]
        for p in (start, reference)
    )
    k3 = [np.exp(b - a) - 1 - (b - a) for a, b in zip(own, other)]
    k3 = [np.where(s.trajectory.mask[1:], x, 0) for s, x in zip(found, k3)]
    tokens = sum(s.trajectory.mask.sum() for s in found)
    want = sum(x.sum() for x in k3) / tokens
    by_sequence = np.mean([x.sum() / s.trajectory.mask.sum() for s, x in zip(found, k3)])
    constant = sum(x.sum() for x in k3) / (4 * 512)
    for aggregate, loss in (("sequence", by_sequence), ("constant", constant)):
        learner = make_learner(params, kl_coef=0.5, aggregate=aggregate, constant_length=512)
        _, metrics = gradient(learner, start, reference, packed(found))
        assert metrics["kl"] == pytest.approx(want, rel=1e-4) and want > 1e-3
        assert metrics["loss"] == pytest.approx(0.5 * loss, rel=1e-4) and abs(loss / want - 1) > 1e-3


def test_what_was_not_measured_is_no_zero(params):
    """A loss without a KL term has no KL, and a step without a sampled token no mean over tokens."""
    for changes in (dict(kl_coef=0.5), dict(tis_cap=1.2, **NONE)):
        learner = make_learner(params, **changes)
        _, learned = learn(run_config(**changes), learner, learner.init(params), [])
        assert learned["policy_tokens"] == 0 and not learned["applied"] and learned["loss"] == 0
        names = {"entropy", "clip_fraction", "mismatch_mean", "mismatch_k3", "mismatch_max", "ratio_max"}
        names |= {"kl"} if "kl_coef" in changes and changes["kl_coef"] else {"tis_weight_mean", "tis_capped"}
        assert {name for name, value in learned.items() if value is None} == names
        assert ("kl" in learned) == ("kl" in names)


def test_several_epochs_compare_with_one_pass_before_the_first(params):
    found = rollouts_of(np.random.default_rng(6))
    learner = Scored(make_learner(params, tis_cap=1.2, epochs=3, **NONE))
    state, learned = learn(
        run_config(tis_cap=1.2, epochs=3, **NONE), learner, learner.learner.init(params), found
    )
    assert len(learner.asked) == 1 and state.step == 3
    assert learned["ratio_max"] > 1.05  # in the last epoch, which is off-policy
    batch = packed(found, max_rows=4)
    assert learned["flops"] == learner.flops(batch, 3)
    old = learner.learner.score(learner.learner.init(params), batch)
    delta = np.abs(old - batch.sampler_logprobs)[batch.mask]
    assert learned["mismatch_mean"] == pytest.approx(delta.mean(), rel=1e-4)  # in the first epoch


def test_nothing_to_learn_from_changes_nothing(params):
    learner = make_learner(params, kl_coef=0.5)
    state, learned = learn(run_config(), learner, learner.init(params), rollouts_of(np.random.default_rng(7)))
    assert learned["applied"] is True and "finite" not in learned
    before = jax.device_get(state)
    state, learned = learn(run_config(), learner, state, [])
    assert learned["applied"] is False and states_equal(before, state)


def test_an_update_that_is_not_finite_ends_the_run(params):
    learner = make_learner(params, **NONE)
    (sample, *_) = rollouts_of(np.random.default_rng(8))
    broken = dataclasses.replace(sample.trajectory, logprobs=np.full(20, -np.inf, np.float32))
    sample = TrainingSample(broken, -sample.advantages)
    with pytest.raises(FloatingPointError, match="the last checkpoint is intact.*learning_rate"):
        learn(run_config(**NONE), learner, learner.init(params), [sample])
    far = make_learner(params, learning_rate=1e38, **NONE)  # only the new parameters are too large
    with pytest.raises(FloatingPointError, match=r"loss -?\d.*gradient norm \d.*or its step"):
        learn(run_config(**NONE), far, far.init(params), rollouts_of(np.random.default_rng(8)))
