"""The in-process engine and a real SGLang server pass coevolve_jax/testing/engine.py, which finds faults."""

import asyncio
import contextlib
import dataclasses
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coevolve_jax import build, event_loop
from coevolve_jax.models import hf_io
from coevolve_jax.rollout.engine import EngineError, Request, Sampling
from coevolve_jax.rollout.native import engine as native_engine
from coevolve_jax.rollout.native import row_store
from coevolve_jax.rollout.native.engine import NativeEngine
from coevolve_jax.rollout.native.lockstep import Lockstep, LockstepEngine
from coevolve_jax.rollout.native.programs import Programs
from coevolve_jax.rollout.sglang.engine import SGLangEngine
from coevolve_jax.rollout.sglang.fleet import Member
from coevolve_jax.rollout.sglang.push import Pusher
from coevolve_jax.testing import engine as suite
from coevolve_jax.testing.engine import ask, check_engine
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

FOLDER = ROOT / "models" / "tiny_qwen3"
LIMITS = {"max_length": suite.MAX_LENGTH, "max_new_tokens": suite.MAX_NEW_TOKENS}


@pytest.fixture(scope="module")
def policy():
    return build.policy(FOLDER)


@pytest.fixture(scope="module", params=["native", "paged", "sglang"])
def subject(request, policy):
    """An engine with the policy's weights as version 0; a test that changes them restores them."""
    if request.param in (
        "native",
        "paged",
    ):  # pages for at most three of the four conversations with a place
        tokens = 3 * 64 * -(-suite.MAX_LENGTH // 64) * (request.param == "paged")
        made = NativeEngine(
            policy.config,
            policy.params,
            slots=4,
            cache_tokens=tokens,
            seed=1,
            tokenizer=policy.tokenizer,
            **LIMITS,
        )
    else:
        server = request.getfixturevalue("sglang_server")
        pusher = Pusher(policy.config, FOLDER)
        made = SGLangEngine(
            policy.config, policy.params, members=[Member(server.url)], pusher=pusher, **LIMITS
        )
    yield suite.Subject(made, policy)
    made.close()


def generate(engine, requests):
    return event_loop.run(engine.generate(requests))


@pytest.mark.parametrize("check", suite.CHECKS)
def test_every_engine(subject, check):
    suite.CHECKS[check](subject)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 60), min_size=1, max_size=4), st.integers(0, 10**6))
def test_every_sampled_token_is_in_the_vocabulary_with_a_finite_logprob(subject, lengths, seed):
    suite.check_tokens(subject, lengths, seed)


def test_in_lockstep_questions_beside_rollouts_are_answered_and_both_end(policy):
    """Rollouts take all places, as when the policy is asked for tasks beside the next step's rollouts."""
    engine, ticks = NativeEngine(policy.config, policy.params, slots=4, seed=1, **LIMITS), []

    class Calls(Lockstep):
        def tick(self, *told):
            ticks.append(told)
            assert (
                len(ticks) <= 10
            )  # one, four for the questions, four for those that they pushed out; and the release
            return super().tick(*told)

    together = LockstepEngine(Calls(engine), engine)
    asked = [ask(i, np.arange(5 + i, 25), seed=i, stop=(), new=64) for i in range(6)]

    async def roll_out(going):
        done = {}
        while going:
            answers = await together.advance(going)
            done |= {r.conversation_id: c for r, c in zip(going, answers) if c}
            going = [r for r in going if r.conversation_id not in done]
        return [done[i] for i in range(4)]

    async def both():
        return await asyncio.gather(roll_out(asked[:4]), together.generate(asked[4:]))

    rollouts, answers = event_loop.run(both())
    together.release(range(6))
    for got, request in zip([*rollouts, *answers], asked, strict=True):
        (want,) = generate(engine, [request])
        np.testing.assert_array_equal(got.ids, want.ids)
        engine.release([request.conversation_id])


def test_a_server_that_cannot_constrain_says_so_at_the_start(policy, sglang_server):
    with pytest.raises(EngineError, match="cannot constrain answers to a schema: start it with .*--words"):
        SGLangEngine(
            policy.config,
            policy.params,
            members=[Member(sglang_server.url)],
            pusher=Pusher(policy.config, FOLDER),
            constrains=True,
            **LIMITS,
        )


# ---- What only the in-process engine promises ----------------------------------------------------------


def test_the_native_engine_repeats_itself_bit_by_bit(policy):
    """A token depends on the weights, the ids before it and the request's seed; not on earlier work."""
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


HOT = (
    1e4  # a temperature at which all tokens are alike, so that a token shows the noise that it was drawn with
)


@pytest.mark.parametrize("pages", [0, 3 * 64 * -(-suite.MAX_LENGTH // 64)], ids=["rows", "pages"])
def test_noise_belongs_to_the_seed_and_to_the_position_in_the_conversation(policy, pages):
    engine = NativeEngine(policy.config, policy.params, slots=4, cache_tokens=pages, seed=1, **LIMITS)
    prompt = np.arange(40, 60)
    hot = lambda conversation_id, ids, seed: ask(
        conversation_id, ids, seed=seed, temperature=HOT, new=40, stop=()
    )
    (first,) = generate(engine, [hot(1, prompt, 5)])
    assert len(set(first.ids.tolist())) > 35  # each position draws anew
    (second,) = generate(engine, [hot(1, np.concatenate([prompt, first.ids]), 5)])
    assert (second.ids == first.ids).mean() < 0.2  # and so does each message
    (again,) = generate(engine, [hot(2, np.concatenate([prompt, first.ids[:7]]), 5)])
    np.testing.assert_array_equal(again.ids[:33], first.ids[7:])  # wherever a message begins
    others = generate(engine, [hot(3 + i, prompt, seed) for i, seed in enumerate((5, 6, 2**32 - 1))])
    np.testing.assert_array_equal(others[0].ids, first.ids)
    assert max((o.ids == first.ids).mean() for o in others[1:]) < 0.2
    (other,) = generate(
        NativeEngine(policy.config, policy.params, slots=4, seed=2, **LIMITS), [hot(1, prompt, 5)]
    )
    assert (other.ids == first.ids).mean() < 0.2  # the engine's own seed counts too


def test_noise_under_a_schema_belongs_to_the_position_too(policy):
    """Inside a string a schema leaves characters free: constant noise would repeat one character."""
    engine = NativeEngine(policy.config, policy.params, slots=4, seed=1, tokenizer=policy.tokenizer, **LIMITS)
    sampling = Sampling(HOT, 40, (2,), json.dumps({"type": "string", "minLength": 200}))
    prompts = [np.arange(40, 60), np.arange(40, 60), np.arange(40, 61)]
    said = generate(
        engine, [Request(i, p, sampling, seed=s) for i, (p, s) in enumerate(zip(prompts, (5, 6, 5)))]
    )
    for c in said:
        assert len(set(c.ids.tolist())) > 25
    assert (said[0].ids == said[1].ids).mean() < 0.3
    np.testing.assert_array_equal(said[0].ids[5:30], said[2].ids[4:29])


def test_the_cores_change_no_bit_of_what_is_sampled(tiny_config, monkeypatch):
    """One array for a layer's heads on one core, one for each head on two."""
    params = suite.moved(jax.tree.map(lambda x: jnp.zeros(x.shape), hf_io.abstract_params(tiny_config)), 0.15)
    monkeypatch.setattr(native_engine, "Programs", Programs.__wrapped__)  # as in a process that starts
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1}, raising=False)
    said = {}
    for cores in (1, 2):
        monkeypatch.setenv("NPROC", str(cores))
        engine = NativeEngine(tiny_config, params, slots=4, seed=1, **LIMITS)
        asked = [ask(i, np.arange(5 + i, 40), seed=i, stop=()) for i in range(4)]
        said[cores] = generate(engine, asked)
        assert len(engine._store.cache.k[0]) == cores
    for one, two in zip(said[1], said[2], strict=True):
        np.testing.assert_array_equal(one.ids, two.ids)
        np.testing.assert_array_equal(one.logprobs, two.logprobs)


def advance(engine, requests):
    return event_loop.run(engine.advance(requests))


def test_a_message_that_has_ended_does_not_wait_for_a_longer_one(policy):
    """Completions arrive as messages end, each as if its request had been alone."""
    engine = NativeEngine(policy.config, policy.params, slots=4, seed=1, **LIMITS)
    budgets = [2, 40, 20, 3, 30]  # one more than there are slots
    waiting = {i: ask(i, np.arange(40 + i, 60), seed=i, new=n, stop=()) for i, n in enumerate(budgets)}
    alone = generate(engine, [dataclasses.replace(r, conversation_id=10 + i) for i, r in waiting.items()])
    engine.release(range(10, 15))
    ended = []
    while waiting:
        for i, c in zip(list(waiting), advance(engine, list(waiting.values())), strict=True):
            if c:
                np.testing.assert_array_equal(c.ids, alone[i].ids)
                np.testing.assert_allclose(c.logprobs, alone[i].logprobs, atol=1e-4)
                ended.append(i)
                del waiting[i]
                engine.release([i])
    assert ended == [0, 3, 2, 4, 1]


def test_a_message_goes_on_with_weights_that_come_between_two_ticks(policy):
    engine = NativeEngine(policy.config, policy.params, slots=4, seed=1, **LIMITS)
    prompt, other = np.arange(40, 60), suite.moved(policy.params, 0.02)
    requests = [ask(i, prompt, seed=i, new=n, stop=()) for i, n in enumerate((40, 50))]
    assert advance(engine, requests) == [None, None]
    engine.update_weights(other, 7)
    for r, c in zip(requests, generate(engine, requests), strict=True):
        assert len(c.ids) == r.sampling.max_new_tokens and set(np.unique(c.versions)) == {0, 7}
        assert (np.diff(c.versions) >= 0).all()
        weights = {0: policy.params, 7: other}
        suite.check_completion(suite.Subject(engine, policy), prompt, c, weights=weights)


def test_what_is_lost_before_it_is_used_is_not_counted_as_cached(policy):
    """Five pages: the first conversation returns with four and takes the second one's, which returns too."""
    limits = {"max_length": 256, "max_new_tokens": 8}
    engine = NativeEngine(policy.config, policy.params, slots=4, cache_tokens=5 * 64, seed=1, **limits)
    rng = np.random.default_rng(0)
    first = [ask(i, rng.integers(5, 900, 100), stop=()) for i in range(2)]
    said = generate(engine, first)
    more = lambda i, n: ask(i, np.concatenate([first[i].ids, said[i].ids, rng.integers(5, 900, n)]), stop=())
    again, before = [more(0, 130), more(1, 7)], engine.counts.copy()
    generate(engine, again)
    counted = engine.counts - before
    assert counted["cached_tokens"] == 107  # the first conversation's
    assert counted["cached_tokens"] + counted["prefill_tokens"] == sum(len(r.ids) - 1 for r in again)


def test_the_cache_is_given_back_when_no_conversation_is_left(policy):
    engine = NativeEngine(policy.config, policy.params, slots=4, seed=1, **LIMITS)
    before = generate(engine, [ask(i, np.arange(40, 60), seed=3) for i in range(2)])
    engine.release([0])
    assert engine._store.cache is not None
    engine.release([1])
    assert engine._store.cache is None
    (again,) = generate(engine, [ask(2, np.arange(40, 60), seed=3)])
    np.testing.assert_array_equal(again.ids, before[0].ids)


def test_a_request_that_comes_again_is_answered_again(policy):
    engine = NativeEngine(policy.config, policy.params, slots=4, seed=1, **LIMITS)
    request = ask(1, np.arange(40, 60), seed=3)
    (first,), (second,) = generate(engine, [request]), generate(engine, [request])
    np.testing.assert_array_equal(first.ids, second.ids)
    np.testing.assert_array_equal(first.logprobs, second.logprobs)


def test_another_request_of_a_conversation_drops_the_message_that_was_under_way(policy):
    engine = NativeEngine(policy.config, policy.params, slots=4, seed=1, **LIMITS)
    assert advance(engine, [ask(1, np.arange(40, 60), new=64, stop=())]) == [None]
    prompt = np.arange(40, 55)
    (c,) = generate(engine, [ask(1, prompt, new=5, stop=())])
    assert len(c.ids) == 5
    suite.check_completion(suite.Subject(engine, policy), prompt, c)


@pytest.mark.parametrize(
    "check",
    [
        "turns_reuse_the_prefix_and_stay_exact",
        "what_shares_a_batch_does_not_matter",
        "new_weights_are_used_at_once_and_old_caches_dropped",
    ],
)
def test_a_cache_that_grows_and_shrinks_stays_exact(policy, monkeypatch, check):
    monkeypatch.setattr(row_store, "COLUMNS", 32)
    monkeypatch.setattr(row_store, "ROWS", 1)
    made = NativeEngine(policy.config, policy.params, slots=4, seed=1, **LIMITS)
    shapes, store, share = set(), made._store, made._store.share
    monkeypatch.setattr(store, "share", lambda: (share(), shapes.add((store.rows, store.columns))))
    check_engine(lambda: made, policy, only=[check])
    assert len(shapes) > 1


# ---- Faults that the suite finds: the in-process engine, each time with something wrong around it ------


class Sound:
    """An engine that passes its requests on to another one."""

    batches = True

    def __init__(self, inner, policy):
        self.inner, self.policy, self.constrains = inner, policy, inner.constrains

    def request(self, r):
        return r

    def completion(self, r, c):
        return c

    async def generate(self, requests):
        done = await self.inner.generate([self.request(r) for r in requests])
        return [self.completion(r, c) for r, c in zip(requests, done, strict=True)]

    def update_weights(self, params, version):
        self.inner.update_weights(params, version)

    def release(self, conversation_ids):
        self.inner.release(conversation_ids)

    def close(self):
        pass


def sampling(r, **changes):
    return dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, **changes))


def cut(c, length, finish):
    parts = {name: getattr(c, name)[:length] for name in ("ids", "logprobs", "versions")}
    return dataclasses.replace(c, **parts, finish=finish)


class WrongLogprobs(Sound):
    def completion(self, r, c):
        return dataclasses.replace(c, logprobs=c.logprobs - np.float32(0.001))


class LogprobsOfTemperatureOne(Sound):
    def request(self, r):
        return sampling(r, temperature=min(1.0, r.sampling.temperature / 0.7))


class NeverGreedy(Sound):
    def request(self, r):
        return sampling(r, temperature=r.sampling.temperature or 1.0)


class LeavesOutTheStopId(Sound):
    def completion(self, r, c):
        return cut(c, len(c.ids) - 1, "stop") if c.finish == "stop" else c


class StopsAtTheModelsEnd(Sound):
    def completion(self, r, c):
        ends = np.flatnonzero(c.ids == self.policy.chat.stop_ids[0])
        return cut(c, ends[0] + 1, "stop") if len(ends) else c


class SaysLengthWhereItStopped(Sound):
    def completion(self, r, c):
        return dataclasses.replace(c, finish="length")


class OneTokenTooMany(Sound):
    def request(self, r):
        return sampling(r, max_new_tokens=r.sampling.max_new_tokens + 1)


class OneBudgetForAll(Sound):
    async def generate(self, requests):
        most = max(r.sampling.max_new_tokens for r in requests)
        return await self.inner.generate([sampling(r, max_new_tokens=most) for r in requests])


class OneTemperatureForAll(Sound):
    async def generate(self, requests):
        first = requests[0].sampling.temperature
        return await self.inner.generate([sampling(r, temperature=first) for r in requests])


class OneStopIdForAll(Sound):
    async def generate(self, requests):
        first = requests[0].sampling.stop_ids
        return await self.inner.generate([sampling(r, stop_ids=first) for r in requests])


class AllStopIdsForAll(Sound):
    async def generate(self, requests):
        known = tuple({i for r in requests for i in r.sampling.stop_ids})
        return await self.inner.generate([sampling(r, stop_ids=known) for r in requests])


class AnotherOrder(Sound):
    async def generate(self, requests):
        return (await self.inner.generate(requests))[::-1]


class LosesOne(Sound):
    async def generate(self, requests):
        return (await self.inner.generate(requests))[: max(1, len(requests) - 1)]


class OneSeedForAll(Sound):
    def request(self, r):
        return dataclasses.replace(r, seed=0)


class SamplesSharper(Sound):
    """Samples at a lower temperature, with the log-probabilities of the one that was asked for."""

    def request(self, r):
        return sampling(r, temperature=0.6 * r.sampling.temperature)

    def completion(self, r, c):
        logp = suite.Subject(self, self.policy).logprobs(np.concatenate([r.ids, c.ids]))
        return dataclasses.replace(c, logprobs=logp[len(r.ids) - 1 + np.arange(len(c.ids)), c.ids])


class IgnoresNewWeights(Sound):
    version = 0

    def update_weights(self, params, version):
        self.version = version

    def completion(self, r, c):
        return dataclasses.replace(c, versions=np.full_like(c.versions, self.version))


class TakesAnyWeights(Sound):
    """Keeps the old weights where it is given those of another model, but says nothing."""

    def update_weights(self, params, version):
        with contextlib.suppress(ValueError):
            self.inner.update_weights(params, version)


class SaysVersionZero(Sound):
    def completion(self, r, c):
        return dataclasses.replace(c, versions=np.zeros_like(c.versions))


class KeepsCachesOfOldWeights(Sound):
    def update_weights(self, params, version):
        kept = {name: getattr(self.inner, name) for name in ("_cache", "_held", "_shape")}
        self.inner.update_weights(params, version)
        vars(self.inner).update(kept)


class ContinuesAnotherConversation(Sound):
    """Forgets no conversation, and assumes that its first tokens are unchanged."""

    def __init__(self, inner, policy):
        super().__init__(inner, policy)
        self.known = {}

    def request(self, r):
        ids = r.ids.copy()
        known = self.known.setdefault(r.conversation_id, ids)[: len(ids)]
        ids[: len(known)] = known
        return dataclasses.replace(r, ids=ids)


class ServesWhatItCannot(Sound):
    async def generate(self, requests):
        return await super().generate(
            [dataclasses.replace(r, conversation_id=i) for i, r in enumerate(requests)]
        )

    def request(self, r):
        ids = np.clip(r.ids if len(r.ids) else [5], 0, self.policy.config.vocab_size - 1)[:60]
        return sampling(dataclasses.replace(r, ids=ids.astype(np.int32)), max_new_tokens=4)


class IgnoresTheSchema(Sound):
    def request(self, r):
        return sampling(r, json_schema=None)


class LogprobsAmongAllTokens(Sound):
    def completion(self, r, c):
        return dataclasses.replace(c, logprobs=c.logprobs - np.float32(1.0))


class SurvivesItsCancellation(Sound):
    async def generate(self, requests):
        asked = asyncio.ensure_future(super().generate(requests))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            return await asked


class Breaks(Sound):
    async def generate(self, requests):
        raise KeyError("slot 3")


FAULTS = {
    WrongLogprobs: "logprobs_are_those_of_the_learner_at_temperature_1.0",
    LogprobsOfTemperatureOne: "logprobs_are_those_of_the_learner_at_temperature_0.7",
    NeverGreedy: "logprobs_are_those_of_the_learner_at_temperature_0.0",
    LeavesOutTheStopId: "stop_ids_and_budgets_are_kept",
    SaysLengthWhereItStopped: "stop_ids_and_budgets_are_kept",
    OneTokenTooMany: "stop_ids_and_budgets_are_kept",
    StopsAtTheModelsEnd: "no_other_token_stops_not_even_the_models_own_end",
    OneBudgetForAll: "what_shares_a_batch_does_not_matter",
    OneTemperatureForAll: "what_shares_a_batch_does_not_matter",
    OneStopIdForAll: "what_shares_a_batch_does_not_matter",
    AllStopIdsForAll: "what_shares_a_batch_does_not_matter",
    AnotherOrder: "what_shares_a_batch_does_not_matter",
    LosesOne: "what_shares_a_batch_does_not_matter",
    OneSeedForAll: "samples_of_one_prompt_differ",
    SamplesSharper: "tokens_are_drawn_from_the_full_softmax",
    IgnoresNewWeights: "new_weights_are_used_at_once_and_old_caches_dropped",
    TakesAnyWeights: "weights_of_another_model_are_refused",
    SaysVersionZero: "new_weights_are_used_at_once_and_old_caches_dropped",
    KeepsCachesOfOldWeights: "new_weights_are_used_at_once_and_old_caches_dropped",
    ContinuesAnotherConversation: "what_is_cancelled_leaves_nothing_behind",
    IgnoresTheSchema: "a_schema_is_heeded_or_refused",
    LogprobsAmongAllTokens: "a_schema_is_heeded_or_refused",
    SurvivesItsCancellation: "what_is_cancelled_leaves_nothing_behind",
    Breaks: "every_sampled_token_is_in_the_vocabulary",
}
REFUSALS = [name for name in suite.CHECKS if name.startswith("refused")]


@pytest.fixture(scope="module")
def native(policy):
    return NativeEngine(policy.config, policy.params, slots=4, seed=1, tokenizer=policy.tokenizer, **LIMITS)


@pytest.fixture
def afresh(native, policy):
    native.update_weights(policy.params, 0)
    return native


def test_a_sound_engine_passes_the_whole_suite(afresh, policy):
    check_engine(lambda: Sound(afresh, policy), policy)


def test_a_cancelled_call_ends_with_its_tick(afresh, monkeypatch):
    ticks, gate, tick = [], threading.Event(), afresh._tick

    def held(requests):
        ticks.append(len(requests))
        gate.wait()
        return tick(requests)

    async def cancel():
        asked = asyncio.ensure_future(afresh.generate([ask(i, [5, 6], stop=(), new=48) for i in range(2)]))
        while not ticks:
            await asyncio.sleep(0.01)
        asked.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asked

    monkeypatch.setattr(afresh, "_tick", held)
    event_loop.run(cancel())
    gate.set()
    afresh.release(range(2))  # waits for the call that was cancelled
    assert ticks == [2]


@pytest.mark.parametrize(
    "fault, check", [*FAULTS.items(), *((ServesWhatItCannot, name) for name in REFUSALS)]
)
def test_the_suite_finds(afresh, policy, fault, check):
    with pytest.raises(AssertionError) as found:
        check_engine(lambda: fault(afresh, policy), policy, only=[check])
    message = str(found.value)
    assert message.startswith(f"{check}: ") and "\n" not in message
    assert fault is not Breaks or "raised KeyError: 'slot 3'" in message
