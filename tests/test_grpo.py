"""The GRPO pieces against formulas written out in numpy, and the jitted update against a plain one."""
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st
from ml_collections import ConfigDict

from coevolve_jax import sharding
from coevolve_jax.grpo import losses
from coevolve_jax.grpo.advantages import group_advantages
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.grpo.logprobs import token_logprobs
from coevolve_jax.grpo.packing import assign_rows, pack
from coevolve_jax.models.qwen import Qwen, QwenConfig
from coevolve_jax.types import Outcome, Trajectory

MODEL = QwenConfig(
    "qwen3", vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, rope_theta=1e4, tie_word_embeddings=True, initializer_range=0.3,
)


def learner_config(**changes) -> ConfigDict:
    return ConfigDict({
        **dict(
            learning_rate=1e-2, warmup_steps=0, adam_b1=0.9, adam_b2=0.95, weight_decay=0.0, max_grad_norm=1.0,
            clip_low=0.2, clip_high=0.2, kl_coef=0.1, row_length=32, rows_per_microbatch=2, logprob_chunk=16,
            remat=False, dtype="float32", attention="auto",
        ),
        **changes,
    })


def trajectory(rng, length: int, *, prompt: int = 3, reward: float = 0.0, valid: bool = True) -> Trajectory:
    mask = np.zeros(length, bool)
    mask[prompt:] = rng.random(length - prompt) < 0.7
    mask[-1] = True
    return Trajectory(
        task_id="t", member=0, ids=rng.integers(0, MODEL.vocab_size, length).astype(np.int32), mask=mask,
        logprobs=np.where(mask, rng.normal(-3, 0.3, length), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32), turn_starts=(0,), steps=(), stop="done",
        outcome=Outcome(reward, reward >= 0.5, valid),
    )


@pytest.fixture(scope="module")
def params():
    return Qwen(MODEL).init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]


def test_advantages_are_standardised_within_each_group():
    rewards, groups = [1, 0, 0, 1, 1, 1], ["a", "a", "a", "b", "b", "b"]
    got = group_advantages(rewards, groups, [True] * 6)
    a = np.array([1, 0, 0.0])
    np.testing.assert_allclose(got[:3], (a - a.mean()) / a.std(), rtol=1e-4)
    np.testing.assert_array_equal(got[3:], 0)


def test_an_invalid_rollout_moves_nobody():
    with_it = group_advantages([1, 0, 0.7], ["a"] * 3, [True, True, False])
    without = group_advantages([1, 0], ["a"] * 2, [True, True])
    np.testing.assert_array_equal(with_it, [*without, 0])


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3), st.booleans()), min_size=1, max_size=40))
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_rewards(items):
    rewards, groups, valid = map(list, zip(*items))
    got = group_advantages(rewards, groups, valid)
    assert np.isfinite(got).all()
    for g in set(groups):
        index = [i for i in range(len(items)) if groups[i] == g and valid[i]]
        assert abs(got[index].sum()) < 1e-3
        for i in index:
            for j in index:
                assert rewards[i] <= rewards[j] or got[i] >= got[j]


def test_surrogate_and_kl_follow_their_formulas():
    rng = np.random.default_rng(0)
    new, old, ref, adv = rng.normal(size=(4, 200))
    loss, ratio, clipped = losses.clipped_surrogate(new, old, adv, 0.2, 0.3)
    r = np.exp(new - old)
    want = -np.minimum(r * adv, np.clip(r, 0.8, 1.3) * adv)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(ratio, r, rtol=1e-5)
    np.testing.assert_array_equal(clipped, ((adv > 0) & (r > 1.3)) | ((adv < 0) & (r < 0.8)))
    assert 0 < np.mean(clipped) < 1
    np.testing.assert_allclose(losses.kl_k3(new, ref), np.exp(ref - new) - (ref - new) - 1, rtol=1e-4, atol=1e-6)
    assert (losses.kl_k3(new, ref) >= 0).all()


def test_clipping_acts_on_the_gradient():
    grad = jax.grad(lambda lp: losses.clipped_surrogate(lp, jnp.zeros(()), jnp.ones(()), 0.2, 0.2)[0])
    assert grad(jnp.log(1.1)) != 0
    assert grad(jnp.log(1.3)) == 0


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_logprobs_equal_the_full_softmax_forward_and_backward(chunk):
    rng = np.random.default_rng(1)
    hidden, table = rng.normal(size=(23, 5)).astype(np.float32), rng.normal(size=(5, 31)).astype(np.float32)
    targets = rng.integers(0, 31, 23)

    def full(h, w):
        logp = jax.nn.log_softmax(h @ w / 0.7)
        return logp[np.arange(23), targets]

    def chunked(h, w):
        return token_logprobs(lambda x: x @ w, h, targets, temperature=0.7, chunk=chunk)[0]

    weights = rng.normal(size=23)
    for f in (full, chunked):
        f.grad = jax.grad(lambda h, w: jnp.sum(f(h, w) * weights), argnums=(0, 1))(hidden, table)
    np.testing.assert_allclose(chunked(hidden, table), full(hidden, table), atol=1e-5)
    for a, b in zip(chunked.grad, full.grad):
        np.testing.assert_allclose(a, b, atol=1e-4)
    logp = jax.nn.log_softmax(hidden @ table)
    entropy = token_logprobs(lambda x: x @ table, hidden, targets, chunk=chunk)[1]
    np.testing.assert_allclose(entropy, -jnp.sum(jnp.exp(logp) * logp, -1), atol=1e-5)


@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 90))
def test_rows_hold_every_item_once_and_never_overflow(lengths, row_length):
    rows = assign_rows(lengths, row_length)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= row_length for row in rows)
    assert len(rows) <= max(1, 2 * sum(lengths) // row_length + 1)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(5, 30), st.booleans()), min_size=1, max_size=9), st.integers(0, 10**6))
def test_packing_keeps_every_policy_token_with_its_own_logprob_and_advantage(items, seed):
    rng = np.random.default_rng(seed)
    trajectories = [trajectory(rng, n, valid=valid) for n, valid in items]
    advantages = rng.normal(size=len(items)).astype(np.float32)
    batch = pack(trajectories, advantages, row_length=32, rows_per_microbatch=2, max_rows=len(items))
    packed = sorted(zip(*(x[batch.mask].tolist() for x in (batch.targets, batch.sampler_logprobs, batch.advantages))))
    wanted = sorted(
        (int(t.ids[i]), float(t.logprobs[i]), float(advantages[n]))
        for n, t in enumerate(trajectories) if t.outcome.valid for i in np.flatnonzero(t.mask)
    )
    assert packed == wanted
    assert not batch.mask[batch.segment_ids == 0].any()
    assert not batch.mask[int(batch.used):].any()
    starts = (batch.positions == 0) & (batch.segment_ids > 0)
    assert starts.sum() == sum(t.outcome.valid for t in trajectories)


def test_a_trajectory_that_fits_no_row_is_named():
    with pytest.raises(ValueError, match="40 tokens does not fit a row of 32.*row_length"):
        pack([trajectory(np.random.default_rng(0), 40)], np.ones(1), row_length=32, rows_per_microbatch=1, max_rows=1)


@jax.jit
def padded_logprobs(params, ids):
    return jax.nn.log_softmax(Qwen(MODEL).apply({"params": params}, ids[None])[0])


def next_logprobs(params, t) -> jax.Array:
    """[T - 1], of t.ids[1:]; one compiled shape serves all lengths, since nothing attends to what follows."""
    logp = padded_logprobs(params, np.pad(t.ids, (0, 32 - len(t.ids))))
    return logp[np.arange(len(t.ids) - 1), t.ids[1:]]


def plain_loss(params, reference, trajectories, advantages, c) -> jax.Array:
    """The objective written sample by sample, without packing, chunks or micro-batches."""
    total, count = 0.0, 0
    for t, a in zip(trajectories, advantages):
        if not t.outcome.valid:
            continue
        new, ref = (next_logprobs(p, t) for p in (params, reference))
        r = jnp.exp(new - t.logprobs[1:])
        token = -jnp.minimum(r * a, jnp.clip(r, 1 - c.clip_low, 1 + c.clip_high) * a)
        token += c.kl_coef * (jnp.exp(ref - new) - (ref - new) - 1)
        total += jnp.sum(jnp.where(t.mask[1:], token, 0))
        count += t.mask[1:].sum()
    return total / count


def moved(params, seed=5):
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(tree, [x + 0.02 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys)])


@pytest.mark.parametrize("rows_per_microbatch", [1, 4])
def test_the_update_is_the_plain_objective_whatever_the_packing(params, rows_per_microbatch):
    rng = np.random.default_rng(3)
    trajectories = [trajectory(rng, n, valid=n != 9) for n in (8, 20, 9, 13, 30, 6, 6)]
    advantages = rng.normal(size=7).astype(np.float32)
    c = learner_config(rows_per_microbatch=rows_per_microbatch, kl_coef=0.3)
    learner = Learner(MODEL, c, params, temperature=1.0, mesh=sharding.make_mesh())
    start = moved(params)
    want_loss, want_grads = jax.value_and_grad(plain_loss)(start, params, trajectories, advantages, c)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, b1=0.9, b2=0.95, weight_decay=0.0))
    updates, _ = optimizer.update(want_grads, optimizer.init(start), start)
    want = optax.apply_updates(start, updates)
    batch = pack(trajectories, advantages, row_length=32, rows_per_microbatch=rows_per_microbatch, max_rows=7)
    state, metrics = learner.update(learner.init(start), batch)
    np.testing.assert_allclose(metrics["loss"], want_loss, rtol=1e-4)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(want_grads), rtol=1e-3)
    # Adam's first step is about the sign of the gradient: compare where that is not a coin toss.
    for got, ref, g in zip(*map(jax.tree.leaves, (state.params, want, want_grads))):
        sure = np.abs(g) > 1e-4
        np.testing.assert_allclose(np.asarray(got)[sure], np.asarray(ref)[sure], atol=2e-4)


def test_the_ratio_is_against_the_sampler_and_not_one_off_policy(params):
    rng = np.random.default_rng(4)
    t = trajectory(rng, 20)
    batch = pack([t], np.ones(1), row_length=32, rows_per_microbatch=2, max_rows=1)
    learner = Learner(MODEL, learner_config(), params, temperature=1.0, mesh=sharding.make_mesh())
    _, metrics = learner.update(learner.init(params), batch)
    assert metrics["mismatch_max"] > 0.1 and metrics["ratio_max"] > 1.1 and metrics["clip_fraction"] > 0
    exact = np.concatenate([[0], next_logprobs(params, t)]).astype(np.float32)
    batch = pack([dataclasses.replace(t, logprobs=exact)], np.ones(1), row_length=32, rows_per_microbatch=2, max_rows=1)
    _, metrics = learner.update(learner.init(params), batch)
    np.testing.assert_allclose(metrics["ratio_max"], 1, atol=1e-5)
    assert metrics["mismatch_max"] < 1e-5 and metrics["kl"] < 1e-6


def test_a_loss_that_is_not_finite_leaves_the_state_as_it_was(params):
    rng = np.random.default_rng(6)
    t = trajectory(rng, 20)
    t = dataclasses.replace(t, logprobs=np.full(20, -np.inf, np.float32))
    batch = pack([t], -np.ones(1), row_length=32, rows_per_microbatch=2, max_rows=1)
    learner = Learner(MODEL, learner_config(), params, temperature=1.0, mesh=sharding.make_mesh())
    state, metrics = learner.update(learner.init(params), batch)
    assert not metrics["finite"]
    for got, before in zip(jax.tree.leaves(state), jax.tree.leaves(learner.init(params))):
        np.testing.assert_array_equal(got, before)


def test_reward_moves_the_policy_towards_what_was_rewarded(params):
    rng = np.random.default_rng(7)
    good, bad = trajectory(rng, 16, reward=1.0), trajectory(rng, 16)
    learner = Learner(MODEL, learner_config(kl_coef=0.0), params, temperature=1.0, mesh=sharding.make_mesh())
    state = learner.init(params)

    def logprob(p, t):
        logp = next_logprobs(p, t)
        return float(jnp.sum(jnp.where(t.mask[1:], logp, 0))), np.concatenate([[0], logp]).astype(np.float32)

    before = logprob(params, good)[0] - logprob(params, bad)[0]
    for _ in range(3):
        fresh = [dataclasses.replace(t, logprobs=logprob(state.params, t)[1]) for t in (good, bad)]
        batch = pack(fresh, np.array([1, -1.0]), row_length=32, rows_per_microbatch=2, max_rows=2)
        state, _ = learner.update(state, batch)
    assert logprob(state.params, good)[0] - logprob(state.params, bad)[0] > before + 1
