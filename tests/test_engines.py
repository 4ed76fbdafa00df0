"""What every engine must do: the in-process one and a real SGLang server pass the same tests."""

import asyncio
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from coevolve_jax import build
from coevolve_jax.models.qwen import Qwen
from coevolve_jax.rollout import loop
from coevolve_jax.rollout.engine import Request, Sampling
from coevolve_jax.rollout.sglang.fleet import Member
from coevolve_jax.rollout.native.engine import NativeEngine
from coevolve_jax.rollout.sglang.push import Pusher
from coevolve_jax.rollout.sglang.engine import SGLangEngine

FOLDER = Path(__file__).parent.parent / "models" / "tiny_qwen3"
LENGTH, NEW = 128, 64
LIMITS = {"max_length": LENGTH, "max_new_tokens": NEW}


@pytest.fixture(scope="module")
def policy():
    return build.policy(FOLDER)


@pytest.fixture(scope="module", params=["native", "sglang"])
def engine(request, policy):
    """With the policy's weights as version 0; a test that brings others brings those back."""
    if request.param == "native":
        made = NativeEngine(policy.config, policy.params, slots=4, seed=1, **LIMITS)
    else:
        server = request.getfixturevalue("sglang_server")
        pusher = Pusher(policy.config, FOLDER)
        made = SGLangEngine(
            policy.config, policy.params, members=[Member(server.url)], pusher=pusher, **LIMITS
        )
    yield made
    made.close()


def generate(engine, requests):
    return loop.run(engine.generate(requests))


def ask(session, ids, *, temperature=1.0, seed=0, new=8, stop=(2,)):
    return Request(session, np.asarray(ids, np.int32), Sampling(temperature, new, stop), seed)


@pytest.fixture(scope="module")
def forward(policy):
    """ids, params, temperature -> log-probabilities [len(ids), V] of the whole sequence at once."""
    apply = jax.jit(
        lambda params, tokens: jax.nn.log_softmax(Qwen(policy.config).apply({"params": params}, tokens))
    )
    scaled = jax.jit(lambda logp, temperature: jax.nn.log_softmax(logp / temperature))

    def run(ids, params=policy.params, temperature=1.0):
        tokens = np.zeros((1, LENGTH), np.int32)
        tokens[0, : len(ids)] = ids
        return np.asarray(scaled(apply(params, tokens)[0], temperature))[: len(ids)]

    return run


def check(forward, prompt, completion, *, temperature=1.0, weights=None, atol=1e-4):
    """Each reported log-probability is the learner's, of the weights that the token's version names."""
    ids = np.concatenate([prompt, completion.ids])
    assert len(completion.ids) == len(completion.logprobs) == len(completion.versions)
    for version in np.unique(completion.versions):
        logp = forward(
            ids, **({"params": weights[version]} if weights else {}), temperature=temperature or 1.0
        )
        here = np.flatnonzero(completion.versions == version)
        want = logp[len(prompt) - 1 + here, completion.ids[here]]
        np.testing.assert_allclose(completion.logprobs[here], want, atol=atol)


def moved(params, scale=0.05):
    keys = jax.random.split(jax.random.key(0), len(jax.tree.leaves(params)))
    return jax.tree.unflatten(
        jax.tree.structure(params),
        [x + scale * jax.random.normal(k, x.shape) for x, k in zip(jax.tree.leaves(params), keys)],
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_are_those_of_the_learner(engine, forward, temperature):
    prompt = np.arange(30, 51)
    (c,) = generate(engine, [ask(100, prompt, temperature=temperature, new=24)])
    engine.release([100])
    check(forward, prompt, c, temperature=temperature)
    if temperature == 0:
        logp = forward(np.concatenate([prompt, c.ids]))
        np.testing.assert_array_equal(c.ids, logp[len(prompt) - 1 : -1].argmax(-1))


def test_turns_reuse_the_prefix_and_stay_exact(engine, forward):
    rng = np.random.default_rng(0)
    ids, served = rng.integers(5, 900, 20), 0
    for _ in range(3):
        before = getattr(engine, "cached_tokens", None)
        (c,) = generate(engine, [ask(1, ids, seed=9)])
        check(forward, ids, c)
        if before is not None and served:  # SGLang says how much it had: all of the last turn
            assert engine.cached_tokens - before >= served - 1
        served = len(ids) + len(c.ids) - 1
        ids = np.concatenate([ids, c.ids, rng.integers(5, 900, 7)])
    engine.release([1])


def test_uneven_batches_are_served_and_what_shares_them_does_not_matter(engine, forward):
    rng = np.random.default_rng(1)
    prompts = [
        rng.integers(5, 900, n) for n in (3, 40, 11, 26, 9, 33)
    ]  # more than the native engine has slots
    budgets = [8, 1, 20, 3, 16, 5]
    greedy = lambda session, p, n: ask(session, p, temperature=0.0, new=n)
    together = generate(engine, [greedy(10 + i, p, n) for i, (p, n) in enumerate(zip(prompts, budgets))])
    engine.release(range(10, 16))
    for i, (p, n) in enumerate(zip(prompts, budgets)):
        check(forward, p, together[i])
        (alone,) = generate(engine, [greedy(50 + i, p, n)])
        engine.release([50 + i])
        np.testing.assert_array_equal(alone.ids, together[i].ids)
        np.testing.assert_allclose(alone.logprobs, together[i].logprobs, atol=1e-4)


def test_samples_of_one_prompt_differ(engine, forward):
    prompt = np.arange(40, 60)
    members = generate(engine, [ask(i, prompt, seed=i, new=16) for i in range(4)])
    engine.release(range(4))
    assert len({tuple(m.ids) for m in members}) > 1
    for m in members:
        check(forward, prompt, m)


def test_stop_ids_and_budgets_are_kept(engine):
    prompt = np.arange(40, 60)
    (free,) = generate(engine, [ask(7, prompt, temperature=0.0, stop=(), new=40)])
    assert len(free.ids) == 40 and free.finish == "length"
    stop = int(free.ids[3])
    first = free.ids.tolist().index(stop)
    (stopped,) = generate(engine, [ask(8, prompt, temperature=0.0, stop=(stop,), new=40)])
    assert stopped.finish == "stop" and stopped.ids.tolist() == free.ids[: first + 1].tolist()
    assert len(stopped.logprobs) == len(stopped.versions) == first + 1
    engine.release([7, 8])


def test_no_other_token_stops_not_even_the_models_own_end(engine, policy, forward):
    """The server of a model whose config names an end of text stops there, whatever it is asked."""
    end = policy.chat.stop_ids[0]
    prompt = policy.chat.prompt([], "Done.")
    (free,) = generate(engine, [ask(7, prompt, temperature=0.0, stop=(), new=40)])
    assert end in free.ids[:-1]
    never = next(i for i in range(5, policy.config.vocab_size) if i not in free.ids)
    (same,) = generate(engine, [ask(8, prompt, temperature=0.0, stop=(never,), new=40)])
    engine.release([7, 8])
    assert same.finish == "length"
    np.testing.assert_array_equal(same.ids, free.ids)
    check(forward, prompt, same)


def test_new_weights_are_used_at_once_and_old_caches_dropped(engine, policy, forward):
    prompt, other = np.arange(40, 60), moved(policy.params)
    (old,) = generate(engine, [ask(1, prompt, seed=2)])
    check(forward, prompt, old)
    engine.update_weights(other, 7)
    try:
        ids = np.concatenate([prompt, old.ids, [9, 10]])
        (new,) = generate(engine, [ask(1, ids, temperature=0.0, stop=())])
    finally:
        engine.update_weights(policy.params, 0)
    assert (old.versions == 0).all() and (new.versions == 7).all()
    check(forward, ids, new, weights={7: other})
    assert (
        np.abs(forward(np.concatenate([ids, new.ids]))[len(ids) - 1 : -1].max(-1) - new.logprobs).max() > 0.1
    )


def test_a_request_that_meets_new_weights_says_from_where(engine, policy, forward):
    other, prompts = moved(policy.params, 0.02), [np.arange(40 + i, 60) for i in range(3)]

    async def meet():
        asked = asyncio.ensure_future(
            engine.generate([ask(i, p, stop=(), new=NEW) for i, p in enumerate(prompts)])
        )
        await asyncio.sleep(wait)
        await asyncio.to_thread(engine.update_weights, other, 1)
        return await asked

    met = set()
    for wait in (0.02, 0.05, 0.1, 0.15, 0.2, 0.3):  # until the switch has fallen into the sampling
        try:
            completions = loop.run(meet())
        finally:
            engine.release(range(3))
            engine.update_weights(policy.params, 0)
        for p, c in zip(prompts, completions):
            assert len(c.ids) == NEW and (np.diff(c.versions) >= 0).all()
            check(forward, p, c, weights={0: policy.params, 1: other})
        met |= {len(set(c.versions.tolist())) for c in completions}
        if engine.batches or 2 in met:  # one that serves batches finishes them first
            return
    pytest.fail("no request met the new weights")


def test_what_is_cancelled_leaves_nothing_behind(engine, forward):
    prompt = np.arange(40, 60)

    async def cancel():
        asked = asyncio.ensure_future(engine.generate([ask(i, prompt, stop=(), new=NEW) for i in range(4)]))
        await asyncio.sleep(0.01)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    loop.run(cancel())
    engine.release(range(4))
    (c,) = generate(engine, [ask(0, prompt[5:], new=12)])
    engine.release([0])
    check(forward, prompt[5:], c)


@pytest.mark.parametrize(
    "ids, new, why",
    [
        ([], 4, "no tokens"),
        ([5, 10**6], 4, "vocabulary has"),
        ([5, -1], 4, "token id -1"),
        (list(range(120)), 16, "exceed the engine's max_length"),
        ([5], NEW + 1, "max_new_tokens"),
    ],
)
def test_requests_that_cannot_be_served_are_refused_before_anything_runs(engine, ids, new, why):
    with pytest.raises(ValueError, match=why):
        generate(engine, [ask(0, [5, 6]), ask(1, ids, new=new)])
    assert generate(engine, [ask(2, [5, 6])])[0].finish in ("stop", "length")
    engine.release([2])


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 60), min_size=1, max_size=4), st.integers(0, 10**6))
def test_every_sampled_token_is_in_the_vocabulary_with_a_finite_logprob(engine, lengths, seed):
    rng = np.random.default_rng(seed)
    out = generate(engine, [ask(i, rng.integers(0, 1000, n), seed=seed + i) for i, n in enumerate(lengths)])
    engine.release(range(4))
    for c in out:
        assert 1 <= len(c.ids) <= 8 and (c.ids >= 0).all() and (c.ids < 1280).all()
        assert np.isfinite(c.logprobs).all() and (c.logprobs <= 0).all()
        assert c.finish == "stop" if c.ids[-1] == 2 else c.finish == "length" and len(c.ids) == 8


# ---- What only the in-process engine promises ----------------------------------------------------------


def test_the_native_engine_repeats_itself_bit_by_bit(policy):
    """A token depends on weights, ids before it and the request's seed, not on what was computed before."""
    fresh = lambda: NativeEngine(policy.config, policy.params, slots=4, seed=1, **LIMITS)
    engine, rng = fresh(), np.random.default_rng(0)
    ids = rng.integers(5, 900, 20)
    for _ in range(3):
        (c,) = generate(engine, [ask(1, ids, seed=9)])
        (again,) = generate(fresh(), [ask(5, ids, seed=9)])
        np.testing.assert_array_equal(c.ids, again.ids)
        np.testing.assert_allclose(c.logprobs, again.logprobs, atol=1e-4)
        ids = np.concatenate([ids, c.ids, rng.integers(5, 900, 7)])
    members = generate(engine, [ask(i, ids[:20], seed=i % 3) for i in range(4)])
    np.testing.assert_array_equal(members[0].ids, members[3].ids)
    prompts = [rng.integers(5, 900, n) for n in (3, 40, 11, 26, 9, 33)]
    together = generate(engine, [ask(10 + i, p, seed=i) for i, p in enumerate(prompts)])
    for i, p in enumerate(prompts):
        (alone,) = generate(engine, [ask(50 + i, p, seed=i)])
        np.testing.assert_array_equal(alone.ids, together[i].ids)
