"""The GRPO pieces against formulas written out in numpy, and the jitted update against a plain one."""

import dataclasses
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coevolve_jax.distributed import sharding
from coevolve_jax.grpo import logprobs, losses
from coevolve_jax.grpo.advantages import group_advantages
from coevolve_jax.grpo.layout import assign_rows
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.grpo.packing import pack
from coevolve_jax.models.decoder import Decoder
from tests.support.grpo_cases import (
    MODEL,
    learner_config,
    make_learner,
    moved,
    samples,
    trajectory,
)
from tests.support.update_programs import EXPERTS

pytestmark = pytest.mark.slow


def test_advantages_are_standardised_within_each_group():
    a = np.array([1, 0, 0.0])
    np.testing.assert_allclose(group_advantages([1, 0, 0]), (a - a.mean()) / a.std(), rtol=1e-4)
    np.testing.assert_array_equal(group_advantages([1, 1, 1]), [0, 0, 0])
    assert group_advantages([]).shape == (0,)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40))
def test_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_rewards(rewards):
    got = group_advantages(rewards)
    assert np.isfinite(got).all() and got.dtype == np.float32
    assert abs(got.sum()) < 1e-3
    for r, a in zip(rewards, got):
        for other, b in zip(rewards, got):
            assert r <= other or a >= b


def test_surrogate_and_kl_follow_their_formulas():
    rng = np.random.default_rng(0)
    new, old, ref, adv = rng.normal(size=(4, 200))
    r = np.exp(new - old)
    loss, clipped = losses.clipped_surrogate(jnp.asarray(r), adv, 0.2, 0.3)
    want = -np.minimum(r * adv, np.clip(r, 0.8, 1.3) * adv)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_array_equal(clipped, ((adv > 0) & (r > 1.3)) | ((adv < 0) & (r < 0.8)))
    assert 0 < np.mean(clipped) < 1
    np.testing.assert_allclose(
        losses.kl(new, ref, "k3"), np.exp(ref - new) - (ref - new) - 1, rtol=1e-4, atol=1e-6
    )


def test_clipping_acts_on_the_gradient():
    grad = jax.grad(lambda ratio: losses.clipped_surrogate(ratio, jnp.ones(()), 0.2, 0.2)[0])
    assert grad(1.1) != 0
    assert grad(1.3) == 0


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_logprobs_equal_the_full_softmax_forward_and_backward(chunk):
    rng = np.random.default_rng(1)
    hidden, table = rng.normal(size=(23, 5)).astype(np.float32), rng.normal(size=(5, 31)).astype(np.float32)
    targets = rng.integers(0, 31, 23)

    def full(h, w):
        logp = jax.nn.log_softmax(h @ w / 0.7)
        return logp[np.arange(23), targets]

    def chunked(h, w):
        return logprobs.token_logprobs(h, w, targets, temperature=0.7, chunk=chunk)[0]

    weights = rng.normal(size=23)
    for f in (full, chunked):
        f.grad = jax.jit(jax.grad(lambda h, w: jnp.sum(f(h, w) * weights), argnums=(0, 1)))(hidden, table)
    np.testing.assert_allclose(jax.jit(chunked)(hidden, table), full(hidden, table), atol=1e-5)
    for a, b in zip(chunked.grad, full.grad):
        np.testing.assert_allclose(a, b, atol=1e-4)
    logp = jax.nn.log_softmax(hidden @ table)
    entropy = jax.jit(lambda h, w: logprobs.token_logprobs(h, w, targets, chunk=chunk)[1])(hidden, table)
    np.testing.assert_allclose(entropy, -jnp.sum(jnp.exp(logp) * logp, -1), atol=1e-5)


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(50, 90))
def test_rows_hold_every_item_once_and_never_overflow(lengths, pack_length):
    rows = assign_rows(lengths, pack_length)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= pack_length for row in rows)
    assert len(rows) <= max(1, 2 * sum(lengths) // pack_length + 1)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(5, 30), st.booleans()), min_size=1, max_size=9), st.integers(0, 10**6))
def test_packing_keeps_every_policy_token_with_its_own_logprob_and_advantage(items, seed):
    rng = np.random.default_rng(seed)
    trajectories = [trajectory(rng, n, valid=valid) for n, valid in items]
    advantages = rng.normal(size=len(items)).astype(np.float32)
    batch = pack(
        samples(trajectories, advantages), pack_length=32, rows_per_microbatch=2, max_rows=len(items)
    )
    packed = sorted(
        zip(*(x[batch.mask].tolist() for x in (batch.targets, batch.sampler_logprobs, batch.advantages)))
    )
    wanted = sorted(
        (int(t.ids[i]), float(t.logprobs[i]), float(advantages[n]))
        for n, t in enumerate(trajectories)
        if t.outcome.valid
        for i in np.flatnonzero(t.mask)
    )
    assert packed == wanted
    assert not batch.mask[batch.segment_ids == 0].any()
    assert not batch.mask[int(batch.used) :].any()
    starts = (batch.positions == 0) & (batch.segment_ids > 0)
    assert starts.sum() == sum(t.outcome.valid for t in trajectories)


def test_a_trajectory_that_fits_no_row_is_named():
    with pytest.raises(ValueError, match="40 tokens does not fit a row of 32.*pack_length"):
        pack(
            samples([trajectory(np.random.default_rng(0), 40)], np.ones(1)),
            pack_length=32,
            rows_per_microbatch=1,
            max_rows=1,
        )


def pad(x: np.ndarray) -> np.ndarray:
    """Pads to one shape, so that each operation compiles once; nothing attends to the padding."""
    return np.pad(x, (0, 32 - len(x)))


@jax.jit
def padded_logprobs(params, ids, temperature=1.0) -> jax.Array:
    """Log-probabilities [31] of ids[1:]."""
    logp = jax.nn.log_softmax(Decoder(MODEL).apply({"params": params}, ids[None])[0] / temperature)
    return logp[jnp.arange(31), ids[1:]]


def next_logprobs(params, t) -> np.ndarray:
    """Log-probabilities [T - 1] of t.ids[1:]."""
    return np.asarray(padded_logprobs(params, pad(t.ids)))[: len(t.ids) - 1]


def plain_loss(params, reference, trajectories, advantages, c) -> jax.Array:
    """The objective, sample by sample, without packing, chunks or micro-batches."""
    total, count = 0.0, 0
    for t, a in zip(trajectories, advantages):
        if not t.outcome.valid:
            continue
        ids, sampled, mask = map(pad, (t.ids, t.logprobs, t.mask))
        new, ref = (padded_logprobs(p, ids) for p in (params, reference))
        r = jnp.exp(new - sampled[1:])
        token = -jnp.minimum(r * a, jnp.clip(r, 1 - c.clip_low, 1 + c.clip_high) * a)
        token += c.kl_coef * (jnp.exp(ref - new) - (ref - new) - 1)
        total += jnp.sum(jnp.where(mask[1:], token, 0))
        count += mask[1:].sum()
    return total / count


@pytest.mark.parametrize("rows_per_microbatch", [1, 4])
def test_the_update_is_the_plain_objective_whatever_the_packing(params, rows_per_microbatch):
    rng = np.random.default_rng(3)
    trajectories = [trajectory(rng, n, valid=n != 9) for n in (8, 20, 9, 13, 30, 6, 6)]
    advantages = rng.normal(size=7).astype(np.float32)
    c = learner_config(rows_per_microbatch=rows_per_microbatch, kl_coef=0.3)
    learner = Learner(MODEL, c, params, temperature=1.0, mesh=sharding.make_mesh())
    start = moved(params)
    want_loss, want_grads = jax.value_and_grad(plain_loss)(start, params, trajectories, advantages, c)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(1e-2, b1=0.9, b2=0.95, weight_decay=0.0)
    )
    updates, _ = jax.jit(optimizer.update)(want_grads, optimizer.init(start), start)
    want = optax.apply_updates(start, updates)
    batch = pack(
        samples(trajectories, advantages),
        pack_length=32,
        rows_per_microbatch=rows_per_microbatch,
        max_rows=7,
    )
    state, metrics = learner.update(learner.init(start), batch)
    np.testing.assert_allclose(metrics["loss"], want_loss, rtol=1e-4)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(want_grads), rtol=1e-3)
    # Adam's first step is about the sign of the gradient: compare only where the sign is clear.
    for got, ref, g in zip(*map(jax.tree.leaves, (state.params, want, want_grads))):
        sure = np.abs(g) > 1e-4
        np.testing.assert_allclose(np.asarray(got)[sure], np.asarray(ref)[sure], atol=2e-4)


def test_the_ratio_is_against_the_sampler_and_not_one_off_policy(params):
    rng = np.random.default_rng(4)
    t = trajectory(rng, 20)
    batch = pack(samples([t], np.ones(1)), pack_length=32, rows_per_microbatch=2, max_rows=1)
    learner = make_learner(params)
    _, metrics = learner.update(learner.init(params), batch)
    assert metrics["mismatch_max"] > 0.1 and metrics["ratio_max"] > 1.1 and metrics["clip_fraction"] > 0
    exact = np.concatenate([[0], next_logprobs(params, t)]).astype(np.float32)
    batch = pack(
        samples([dataclasses.replace(t, logprobs=exact)], np.ones(1)),
        pack_length=32,
        rows_per_microbatch=2,
        max_rows=1,
    )
    _, metrics = learner.update(learner.init(params), batch)
    np.testing.assert_allclose(metrics["ratio_max"], 1, atol=1e-5)
    assert metrics["mismatch_max"] < 1e-5 and metrics["kl"] < 1e-6


def test_the_learner_divides_logits_by_the_samplers_temperature(params):
    t = trajectory(np.random.default_rng(4), 20)
    sampled = padded_logprobs(params, pad(t.ids), 0.8)[:19]
    t = dataclasses.replace(t, logprobs=np.concatenate([[0], sampled]).astype(np.float32))
    batch = pack(samples([t], np.ones(1)), pack_length=32, rows_per_microbatch=2, max_rows=1)
    learner = Learner(MODEL, learner_config(), params, temperature=0.8, mesh=sharding.make_mesh())
    _, metrics = learner.update(learner.init(params), batch)
    assert metrics["mismatch_max"] < 1e-5
    np.testing.assert_allclose(metrics["ratio_max"], 1, atol=1e-5)


def test_a_loss_that_is_not_finite_leaves_the_state_as_it_was(params):
    rng = np.random.default_rng(6)
    t = trajectory(rng, 20)
    t = dataclasses.replace(t, logprobs=np.full(20, -np.inf, np.float32))
    batch = pack(samples([t], -np.ones(1)), pack_length=32, rows_per_microbatch=2, max_rows=1)
    learner = make_learner(params)
    state, metrics = learner.update(learner.init(params), batch)
    assert not metrics["finite"]
    for got, before in zip(jax.tree.leaves(state), jax.tree.leaves(learner.init(params))):
        np.testing.assert_array_equal(got, before)


def test_learners_of_equal_settings_share_their_programs(params):
    """Their parameters and learning rates may differ, since programs hold none."""
    one, other = (
        make_learner(params, lora_rank=2),
        make_learner(moved(params), lora_rank=2, learning_rate=0.1),
    )
    assert one._programs is other._programs and one._reference is not other._reference
    assert make_learner(params, lora_rank=3)._programs is not one._programs


def policy_batch(rng, advantages, lengths=(20, 30, 12, 9), rows_per_microbatch=2):
    trajectories = [trajectory(rng, n) for n in lengths]
    return pack(
        samples(trajectories, advantages),
        pack_length=32,
        rows_per_microbatch=rows_per_microbatch,
        max_rows=4,
    )


def states_equal(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
def test_a_dead_batch_takes_no_step_on_momentum(params, offload):
    learner = make_learner(params, kl_coef=0.0, weight_decay=0.1, optimizer_offload=offload)
    state, metrics = learner.update(
        learner.init(params), policy_batch(np.random.default_rng(8), [1, -1, 0.5, 2])
    )
    assert metrics["applied"] and state.step == 1
    before = jax.device_get(state)
    for dead in (
        policy_batch(np.random.default_rng(8), [0, 0, 0, 0]),
        pack([], pack_length=32, rows_per_microbatch=2, max_rows=4),
    ):
        state, metrics = learner.update(state, dead)
        assert not metrics["applied"] and metrics["finite"]
        assert states_equal(before, state)


def test_with_a_kl_term_tokens_without_an_advantage_have_a_gradient(params):
    learner = make_learner(params, kl_coef=0.5)
    state, metrics = learner.update(
        learner.init(moved(params)), policy_batch(np.random.default_rng(8), [0, 0, 0, 0])
    )
    assert metrics["applied"] and state.step == 1


def test_the_balance_of_the_routers_that_is_logged_is_the_one_in_the_loss():
    """Both are the mean over micro-batches, by their tokens, of E * sum of load * probability."""
    params = jax.jit(Decoder(EXPERTS).init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    c = learner_config(router_balance=0.5, kl="none", kl_coef=0.0)
    learner = Learner(EXPERTS, c, params, temperature=1.0, mesh=sharding.make_mesh())
    batch = policy_batch(np.random.default_rng(8), [1, -1, 0.5, 2], rows_per_microbatch=1)
    _, metrics = jax.jit(learner.gradients)(params, None, batch, batch.sampler_logprobs)
    forward = jax.jit(partial(Decoder(EXPERTS).apply, method=Decoder.hidden, mutable=["intermediates"]))
    balance = lambda n, load, p: float(EXPERTS.num_experts / n**2 * np.sum(load * p))
    sums = []
    for i in range(int(batch.used)):
        _, told = forward({"params": params}, batch.tokens[i], batch.positions[i], batch.segment_ids[i])
        routed = told["intermediates"]["routing"]
        sums.append((np.sum(routed.tokens), np.sum(routed.load, 0), np.sum(routed.probability, 0)))
    want = np.average([balance(*own) for own in sums], weights=[float(n) for n, *_ in sums])
    assert len(sums) == 3 and float(metrics["router_balance_loss"]) == pytest.approx(want, rel=1e-5)
    assert abs(balance(*map(sum, zip(*sums))) - want) > 1e-3  # that of the whole batch is another one
    assert float(metrics["loss"] - metrics["policy_loss"]) == pytest.approx(0.5 * want, rel=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(dict(aggregate="token"), marks=pytest.mark.nightly),
        dict(aggregate="sequence", ratio="sequence"),
        pytest.param(dict(aggregate="constant", kl="k2"), marks=pytest.mark.nightly),
    ],
)
def test_accumulated_microbatches_equal_the_big_batch(params, changes):
    """Metrics and gradient (to 3e-6 of its norm) agree for micro-batches of one row and one of all rows."""
    results = []
    for rows in (1, 4):
        learner = make_learner(params, rows_per_microbatch=rows, logprob_chunk=4096, **changes)
        batch = policy_batch(np.random.default_rng(9), [1, -1, 0.5, 2], (20, 30, 25, 28), rows)
        assert int(batch.used) == 4 // rows
        grads, metrics = jax.jit(learner.gradients)(moved(params), params, batch, batch.sampler_logprobs)
        results.append(jax.device_get((grads, metrics)))
    (one, metrics), (big, wanted) = results
    difference = optax.tree.norm(jax.tree.map(np.subtract, one, big))
    assert difference < 3e-6 * optax.tree.norm(big)
    one, big = (jax.tree.map(float, m) for m in (metrics, wanted))
    assert one == pytest.approx(big, rel=3e-6, abs=1e-7)  # the loss may be a small difference


def test_truncated_importance_sampling_weighs_by_the_mismatch_and_clips_by_the_learners_own_ratio(params):
    """With advantage 1 the loss of the first update is the mean of -min(learner / sampler, cap)."""
    rng = np.random.default_rng(10)
    batch = policy_batch(rng, [1, 1, 1, 1])
    learner = make_learner(params, tis_cap=1.2, kl="none")
    state = learner.init(params)
    old = np.asarray(learner.score(state, batch))
    weights = np.minimum(np.exp(old - batch.sampler_logprobs), 1.2)[batch.mask]
    state, metrics = learner.update(state, batch, old)
    assert metrics["loss"] == pytest.approx(-np.mean(weights), rel=1e-5)
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5) and metrics["clip_fraction"] == 0
    delta = (old - batch.sampler_logprobs)[batch.mask]
    assert metrics["mismatch_mean"] == pytest.approx(np.abs(delta).mean(), rel=1e-4)
    assert metrics["mismatch_max"] == pytest.approx(np.abs(delta).max(), rel=1e-4)
    assert metrics["mismatch_k3"] == pytest.approx((np.exp(delta) - 1 - delta).mean(), rel=1e-4)
    # A second epoch is off-policy: its ratio to the same old log-probabilities is not 1, and the clip acts.
    for _ in range(3):
        state, metrics = learner.update(state, batch, old)
    assert metrics["ratio_max"] > 1.2 and metrics["clip_fraction"] > 0


def intermediate_sizes(jaxpr) -> list[tuple]:
    """Shapes of all that a jaxpr computes, including its loops and calls."""
    shapes = []
    for eqn in jaxpr.eqns:
        shapes += [v.aval.shape for v in eqn.outvars]
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "jaxpr"):
                inner = inner.jaxpr
            if hasattr(inner, "eqns"):
                shapes += intermediate_sizes(inner)
    return shapes


def test_no_array_of_all_logits_exists_forward_or_backward(params):
    """No array of the whole update, traced or compiled, is as large as the logits [R, L, V]."""
    batch = policy_batch(np.random.default_rng(11), [1, 1, 1, 1])
    state = make_learner(params).init(params)
    limit = 2 * 32 * MODEL.vocab_size
    largest = {}
    for chunk in (16, 64):
        learner = make_learner(params, logprob_chunk=chunk)
        traced = learner._programs.update_step.trace(state, params, batch, batch.sampler_logprobs, 0.1)
        text = traced.lower().compile().as_text()
        compiled = [tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", text)]
        shapes = [s for s in [*intermediate_sizes(traced.jaxpr.jaxpr), *compiled] if MODEL.vocab_size in s]
        largest[chunk] = max(map(math.prod, shapes))
    assert largest[64] == limit  # the measure sees logits that are whole
    assert largest[16] <= max(limit // 4, params["embed_tokens"]["embedding"].size)


def test_positions_that_the_policy_did_not_sample_cost_no_logits(monkeypatch):
    rng = np.random.default_rng(12)
    hidden, table = (
        rng.normal(size=(3, 24, 5)).astype(np.float32),
        rng.normal(size=(5, 31)).astype(np.float32),
    )
    targets, mask = rng.integers(0, 31, (3, 24)), np.zeros((3, 24), bool)
    mask[0, 20:], mask[1, 3], mask[2, [1, 2, 9]] = True, True, True
    calls, logits_of = [], logprobs._logits

    def counted(*args):
        jax.debug.callback(lambda: calls.append(1))
        return logits_of(*args)

    monkeypatch.setattr(logprobs, "_logits", counted)

    def loss(hidden):
        scores, entropy = logprobs.token_logprobs(hidden, table, targets, mask=mask, chunk=12)
        return jnp.sum(scores), (scores, entropy)

    (_, (scores, entropy)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(hidden)
    jax.effects_barrier()
    # Four columns of a row hold every masked position: one block of 3 x 4 suffices, forward and backward.
    assert len(calls) == 2
    logp = jax.nn.log_softmax(hidden @ table)
    full = lambda h: jnp.sum(
        jnp.where(mask, jnp.take_along_axis(jax.nn.log_softmax(h @ table), targets[..., None], -1)[..., 0], 0)
    )
    want = np.take_along_axis(np.asarray(logp), targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(scores, np.where(mask, want, 0), atol=1e-5)
    np.testing.assert_allclose(entropy, np.where(mask, -np.sum(np.exp(logp) * logp, -1), 0), atol=1e-5)
    np.testing.assert_allclose(grads, jax.grad(full)(hidden), atol=1e-5)


def test_precision_of_weights_moments_and_computation(params):
    batch = policy_batch(np.random.default_rng(13), [1, -1, 0.5, 2])
    _, exact = make_learner(params).update(make_learner(params).init(params), batch)
    learner = make_learner(params, dtype="bfloat16", moment_dtype="bfloat16")
    state, metrics = learner.update(learner.init(params), batch)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    floats = {x.dtype for x in jax.tree.leaves(state.opt_state) if jnp.issubdtype(x.dtype, jnp.floating)}
    assert floats == {jnp.dtype("bfloat16")}
    assert metrics["loss"] == pytest.approx(float(exact["loss"]), abs=0.05)
    assert metrics["loss"] != exact["loss"]
    learner = make_learner(params, param_dtype="bfloat16")
    state, _ = learner.update(learner.init(params), batch)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(state.opt_state)} == {jnp.dtype("float32"), jnp.dtype("int32")}


def test_reward_moves_the_policy_towards_what_was_rewarded(params):
    rng = np.random.default_rng(7)
    good, bad = trajectory(rng, 16, reward=1.0), trajectory(rng, 16)
    learner = make_learner(params, kl_coef=0.0)
    state = learner.init(params)

    def logprob(p, t):
        logp = next_logprobs(p, t)
        return float(jnp.sum(jnp.where(t.mask[1:], logp, 0))), np.concatenate([[0], logp]).astype(np.float32)

    before = logprob(params, good)[0] - logprob(params, bad)[0]
    for _ in range(3):
        fresh = [dataclasses.replace(t, logprobs=logprob(state.params, t)[1]) for t in (good, bad)]
        batch = pack(samples(fresh, [1, -1]), pack_length=32, rows_per_microbatch=2, max_rows=2)
        state, _ = learner.update(state, batch)
    assert logprob(state.params, good)[0] - logprob(state.params, bad)[0] > before + 1
