"""Routing replay: the sampler's expert choices, from the engine's cache to the update's forward."""

import base64
import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coevolve_jax import event_loop
from coevolve_jax.distributed import sharding
from coevolve_jax.grpo import losses
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.grpo.packing import pack
from coevolve_jax.models.cache import KVCache
from coevolve_jax.models.decoder import Decoder, ModelConfig
from coevolve_jax.rollout.agent import _Rollout
from coevolve_jax.rollout.engine import Completion, Request, Sampling
from coevolve_jax.rollout.native.engine import NativeEngine
from coevolve_jax.rollout.routing import read_routing
from coevolve_jax.types import Outcome, Task
from tests.models.test_moe import random_params
from tests.support.grpo_cases import MODEL as DENSE
from tests.support.grpo_cases import init_params, learner_config, programs_of, samples, trajectory
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

MODEL = ModelConfig(  # a dense layer between two sparse ones
    "qwen3_moe",
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    rope_theta=1e4,
    tie_word_embeddings=True,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=12,
    mlp_only_layers=(1,),
    norm_topk_prob=True,
)
A, K = 2, 2
LENGTH = 128


def make_engine(record=True, cache_tokens=0):
    limits = {"slots": 4, "cache_tokens": cache_tokens, "max_length": LENGTH, "max_new_tokens": 24}
    return NativeEngine(MODEL, random_params(MODEL), seed=1, record_routing=record, **limits)


def converse(engine, between=lambda turn: None):
    """Three turns of three conversations, the first two with the same prompt.

    Observations are long or short, so that prefill, extend and decode all feed tokens. One conversation is
    evicted and comes back.
    """
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(0, MODEL.vocab_size, n).tolist()
    shared = draw(70)
    task = Task(id="t", environment="bfcl", scenario={})
    rollouts = [_Rollout(task, i, i) for i in range(3)]
    for i, r in enumerate(rollouts):
        r.conversation_id = i
    for r, ids in zip(rollouts, (shared, shared, draw(9)), strict=True):
        r.feed(ids)
    for turn, observed in enumerate(((40, 3, 5), (3, 33, 5), (2, 0, 0))):
        between(turn)
        asked = [
            Request(r.conversation_id, np.asarray(r.ids, np.int32), Sampling(1.0, 4 + i), r.seed)
            for i, r in enumerate(rollouts)
        ]
        for r, completion, n in zip(rollouts, event_loop.run(engine.generate(asked)), observed):
            r.sampled(completion)
            r.feed(draw(n))
            r.stop = "done"
        engine.release([2])
    return [r.finish(Outcome(float(r.rollout_index), r.rollout_index > 0)) for r in rollouts]


@pytest.fixture(scope="module")
def trajectories():
    return converse(make_engine())


@jax.jit
def whole(params, tokens, segments, routing):
    """Log-probabilities and routing of whole sequences; tokens after a sequence are its padding."""
    model = Decoder(MODEL)
    logits, told = model.apply({"params": params}, tokens, None, segments, routing, mutable=["intermediates"])
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1)[..., 0]
    return logprobs, told["intermediates"]["routing"].experts


def forward(params, t, routing=None):
    """logprobs [T] (of the first token 0) and routing [T, A, K]. routing: to be replayed, or None."""
    n = len(t.ids)
    row = lambda x: np.pad(np.asarray(x, np.int32), (0, LENGTH - n))[None]
    given = np.full((A, 1, LENGTH, K), -1, np.int32)
    if routing is not None:
        given[:, 0, :n] = routing.swapaxes(0, 1)
    logprobs, experts = whole(params, row(t.ids), row(np.ones(n)), given)
    return np.concatenate([[0], logprobs[0, : n - 1]]), np.asarray(experts)[:, 0, :n].swapaxes(0, 1)


def other_routers(params):
    """The same weights, with routers that choose the least chosen experts."""
    change = lambda path, p: (
        -p if jax.tree_util.keystr(path, simple=True, separator="/").endswith("gate/kernel") else p
    )
    return jax.tree_util.tree_map_with_path(change, params)


def make_learner(params, mesh=None, **changes):
    config = learner_config(pack_length=LENGTH, **{"replay_routing": True, **changes})
    return Learner(MODEL, config, params, temperature=1.0, mesh=mesh or sharding.make_mesh())


def pack_for(learner, trajectories):
    advantages = np.arange(1.0, 1 + len(trajectories), dtype=np.float32)
    return pack(
        samples(trajectories, advantages),
        pack_length=LENGTH,
        rows_per_microbatch=2,
        max_rows=4,
        routing=learner.routing,
    )


# ---- The engine ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache_tokens", [0, 256, 192], ids=["rows", "pages", "too few pages"])
def test_the_engine_records_what_the_whole_forward_chooses(trajectories, cache_tokens):
    """With pages, the first two conversations share the prompt's; with too few, conversations lose theirs."""
    found = converse(make_engine(cache_tokens=cache_tokens)) if cache_tokens else trajectories
    assert [len(t.ids) for t in found] == [127, 121, 37]
    for t in found:
        unfed = {0: 3, 1: 1, 2: 1}[t.rollout_index]  # the last sampled token, and the observation after it
        assert t.routing.shape == (len(t.ids), A, K) and t.routing.dtype == np.int16
        assert (t.routing[-unfed:] == -1).all()
        _, chosen = forward(random_params(MODEL), t)
        np.testing.assert_array_equal(np.sort(t.routing[:-unfed]), np.sort(chosen[:-unfed]))
        assert len(np.unique(np.sort(t.routing[:-unfed]), axis=0)) > 10  # there was a choice


def test_recording_changes_nothing_else_and_costs_nothing_when_off(trajectories):
    engine = make_engine(record=False)
    for t, expected in zip(converse(engine), trajectories, strict=True):
        assert t.routing is None
        np.testing.assert_array_equal(t.ids, expected.ids)
        np.testing.assert_array_equal(t.logprobs, expected.logprobs)
    assert type(engine._store.cache) is KVCache


def test_what_was_recorded_stays_when_the_weights_change_between_messages(trajectories):
    engine = make_engine()
    again = converse(
        engine, lambda turn: turn == 2 and engine.update_weights(other_routers(random_params(MODEL)), 1)
    )
    for t, before in zip(again, trajectories, strict=True):
        known = np.flatnonzero(t.versions == 1)[
            0
        ]  # the first token of the third message; one before is newly fed
        start = {0: known - 4, 1: known - 34, 2: known - 6}[t.rollout_index]  # with its observation
        np.testing.assert_array_equal(t.routing[:start], before.routing[:start])
        assert (np.sort(t.routing[start:known]) != np.sort(before.routing[start:known])).any()


def test_what_was_recorded_stays_when_the_weights_change_within_a_message():
    engine = make_engine()
    request = Request(0, np.arange(40, dtype=np.int32), Sampling(1.0, 24))
    assert event_loop.run(engine.advance([request])) == [None]
    engine.update_weights(other_routers(random_params(MODEL)), 1)
    (c,) = event_loop.run(engine.generate([request]))
    known = 40 + int(np.argmax(c.versions)) - 1  # tokens fed by the first weights
    (before,) = event_loop.run(make_engine().generate([request]))
    np.testing.assert_array_equal(c.routing[:known], before.routing[:known])
    assert c.routing.shape == (63, A, K) and (c.routing[known:] != before.routing[known:]).any()


def test_what_was_recorded_stays_when_pages_are_lost_within_a_message():
    """Two pages: the second conversation loses its own, and is fed again after the routers changed."""
    engine = make_engine(cache_tokens=128)
    asked = [Request(i, np.arange(i, 44 + i, dtype=np.int32), Sampling(1.0, 24), i) for i in range(2)]
    assert event_loop.run(engine.advance(asked)) == [None, None]
    first, second = event_loop.run(engine.advance(asked))
    assert len(first.ids) == 24 and second is None and engine._held[1].pages == []
    engine.release([0])
    engine.update_weights(other_routers(random_params(MODEL)), 1)
    (c,) = event_loop.run(engine.generate(asked[1:]))
    assert c.versions.tolist() == [0] * 16 + [1] * 8 and c.routing.shape == (67, A, K)
    (before,) = event_loop.run(make_engine().generate(asked[1:]))
    np.testing.assert_array_equal(c.routing[:59], before.routing[:59])
    assert (c.routing[59:] != before.routing[59:]).any()


def test_nothing_that_was_recorded_stays_when_the_weights_change_before_a_message():
    """Two pages: the second conversation waits, holding the prompt's page that it shares."""
    engine, other = make_engine(cache_tokens=128), other_routers(random_params(MODEL))
    asked = [Request(i, np.arange(70, dtype=np.int32) % 61, Sampling(1.0, 24), i) for i in range(2)]
    assert event_loop.run(engine.advance(asked)) == [None, None]
    assert engine._held[1].cached == 64
    engine.update_weights(other, 1)
    engine.release([0])
    (c,) = event_loop.run(engine.generate(asked[1:]))
    fresh = make_engine()
    fresh.update_weights(other, 1)
    (want,) = event_loop.run(fresh.generate(asked[1:]))
    np.testing.assert_array_equal(c.ids, want.ids)
    np.testing.assert_array_equal(c.routing, want.routing)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=4), st.integers(0, 3))
def test_each_token_keeps_the_first_routing_that_it_got(messages, left):
    task = Task(id="t", environment="bfcl", scenario={})
    r, expected = _Rollout(task, 0, 0), np.zeros((0, A, K))
    r.feed([7])
    for version, (observed, sampled) in enumerate(messages):
        r.feed([5] * observed)
        fed = len(r.ids) + sampled - 1
        routing = np.full((fed, A, K), version, np.int16)
        none = np.zeros(sampled)
        r.sampled(Completion(none.astype(np.int32), none, "stop", none.astype(np.int32), routing=routing))
        expected = np.concatenate([expected, routing[len(expected) :]])
    r.feed([5] * left)
    r.stop = "done"
    t = r.finish(Outcome(0.0, False))
    assert len(t.routing) == len(t.ids)
    np.testing.assert_array_equal(
        t.routing, np.pad(expected, ((0, left + 1), (0, 0), (0, 0)), constant_values=-1)
    )


# ---- Packing -------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(4, 30), st.booleans()), max_size=8),
    st.integers(30, 50),
    st.integers(0, 10**6),
)
def test_every_token_keeps_its_routing(items, pack_length, seed):
    rng = np.random.default_rng(seed)
    trajectories = [
        dataclasses.replace(
            trajectory(rng, n, valid=valid), routing=rng.integers(0, 99, (n, 3, 2)).astype(np.int16)
        )
        for n, valid in items
    ]
    advantages = 1.0 + np.arange(len(items), dtype=np.float32)  # identifies the trajectory
    batch = pack(
        samples(trajectories, advantages),
        pack_length=pack_length,
        rows_per_microbatch=2,
        max_rows=8,
        routing=(3, 2),
    )
    assert batch.routing.shape == (*batch.tokens.shape, 3, 2) and batch.routing.dtype == np.int16
    assert (batch.routing[batch.segment_ids == 0] == -1).all()
    for i, t in enumerate(trajectories):
        named = np.argwhere(batch.advantages == advantages[i])
        assert len(named) == t.mask.sum() * t.outcome.valid
        if t.outcome.valid:
            micro, row, column = named[0]
            here = batch.segment_ids[micro, row] == batch.segment_ids[micro, row, column]
            assert here.sum() == len(t.ids)
            np.testing.assert_array_equal(batch.routing[micro, row, here], t.routing)


def test_a_trajectory_without_the_routing_is_refused_and_without_replay_nothing_is_packed(trajectories):
    learner = make_learner(random_params(MODEL))
    for routing, found in ((None, "None"), (np.zeros((97, 3, 2), np.int16), r"\(3, 2\)")):
        bad = dataclasses.replace(trajectories[0], routing=routing)
        with pytest.raises(
            ValueError, match=rf"{found}, the learner replays \(2, 2\).*replay_routing to False"
        ):
            pack_for(learner, [bad])
    # Where the sampler was never asked, nothing is replayed.
    silent = dataclasses.replace(trajectories[0], routing=None, mask=np.zeros_like(trajectories[0].mask))
    assert (pack_for(learner, [silent]).routing == -1).all()
    off = make_learner(random_params(MODEL), replay_routing=False)
    assert off.routing == (0, 0) and pack_for(off, trajectories).routing.size == 0


# ---- The learner ---------------------------------------------------------------------------------------


def test_replay_gives_the_logprobs_of_an_explicit_routing(trajectories):
    """The sampler's weights give the sampler's log-probabilities; other routers give those of the replayed
    routing.

    Without replay other routers give other ones.
    """
    sampler = random_params(MODEL)
    for params, differs in ((sampler, 0), (other_routers(sampler), 0.1)):
        learner = make_learner(params)
        batch = pack_for(learner, trajectories)
        scores = np.asarray(learner.score(learner.init(params), batch))
        off = make_learner(params, replay_routing=False)
        own = np.asarray(off.score(off.init(params), pack_for(off, trajectories)))
        for i, t in enumerate(trajectories):
            here = (batch.advantages == i + 1) & batch.mask
            np.testing.assert_allclose(scores[here], forward(params, t, t.routing)[0][t.mask], atol=2e-5)
            np.testing.assert_allclose(own[here], forward(params, t)[0][t.mask], atol=2e-5)
            if not differs:
                np.testing.assert_allclose(scores[here], t.logprobs[t.mask], atol=2e-5)
            assert np.abs(scores[here] - own[here]).max() >= differs


def test_the_update_replays_for_the_policy_and_not_for_the_reference(trajectories):
    params = other_routers(random_params(MODEL))
    learner = make_learner(params, kl_coef=0.1)
    before = jax.tree.map(np.asarray, params)
    state, metrics = learner.update(learner.init(params), pack_for(learner, trajectories))
    policy, reference, sampler = (
        np.concatenate(x)
        for x in zip(
            *(
                (forward(params, t, t.routing)[0][t.mask], forward(params, t)[0][t.mask], t.logprobs[t.mask])
                for t in trajectories
            )
        )
    )
    assert metrics["applied"]
    np.testing.assert_allclose(metrics["mismatch_mean"], np.abs(policy - sampler).mean(), rtol=1e-4)
    np.testing.assert_allclose(metrics["kl"], losses.kl(policy, reference, "k3").mean(), rtol=1e-4)
    assert np.abs(policy - reference).max() > 0.1
    gates = [np.asarray(p["layers"]["mlp"]["gate"]["kernel"]) for p in (before, state.params)]
    assert np.abs(gates[0] - gates[1]).max() > 1e-3  # routers are trained through their experts' weights


def test_one_program_serves_every_batch_and_can_be_lowered(trajectories):
    learner = make_learner(random_params(MODEL))
    state, compiled = learner.init(random_params(MODEL)), programs_of(learner)
    for some in ([], trajectories[:1], trajectories):
        state, _ = learner.update(state, pack_for(learner, some))
    assert programs_of(learner) - compiled <= 1
    assert "i16" in learner.lower(pack_for(learner, [])).as_text()
    off = make_learner(random_params(MODEL), replay_routing=False)
    assert "i16" not in off.lower(pack_for(off, [])).as_text()


def test_a_model_without_experts_is_refused():
    with pytest.raises(ValueError, match="replay_routing is True and the model has no experts"):
        Learner(
            DENSE,
            learner_config(replay_routing=True),
            init_params(),
            temperature=1.0,
            mesh=sharding.make_mesh(),
        )


def spread_over_two_devices(path: str) -> None:
    """The update of a saved trajectory, on one device and on two, which split rows and experts."""
    data = dict(np.load(path))
    expected = data.pop("expected")
    t = dataclasses.replace(trajectory(np.random.default_rng(0), len(data["ids"]), reward=1.0), **data)
    params, results = other_routers(random_params(MODEL)), []
    for devices in (1, 2):
        learner = make_learner(params, sharding.make_mesh(expert=devices), kl_coef=0.0)
        state, metrics = learner.update(learner.init(params), pack_for(learner, [t, t]))
        results.append(jax.device_get((state.params, metrics["mismatch_mean"])))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *results)
    np.testing.assert_allclose(results[1][1], expected, rtol=1e-3)


@pytest.mark.nightly
def test_the_update_replays_on_a_mesh(trajectories, tmp_path):
    t = trajectories[0]
    mismatch = np.abs(forward(other_routers(random_params(MODEL)), t, t.routing)[0] - t.logprobs)[
        t.mask
    ].mean()
    np.savez(
        tmp_path / "t.npz", ids=t.ids, mask=t.mask, logprobs=t.logprobs, routing=t.routing, expected=mismatch
    )
    program = (
        "import sys; from tests.rollout import test_routing; "
        "test_routing.spread_over_two_devices(sys.argv[1])"
    )
    flags = os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=2"}
    flags["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "t.npz")], env=flags, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


# ---- What a server tells -------------------------------------------------------------------------------


def told(routing) -> str:
    return base64.b64encode(np.asarray(routing, "<i4").tobytes()).decode()


def answer(seed, tokens) -> np.ndarray:
    """[tokens, layers, K] like a server's: zeros for the dense layer."""
    rng = np.random.default_rng(seed)
    routing = np.array([[rng.permutation(4)[:K] for _ in range(3)] for _ in range(tokens)]).reshape(
        tokens, 3, K
    )
    routing[:, 1] = 0
    return routing


@settings(deadline=None)
@given(st.integers(0, 99), st.integers(0, 9))
def test_a_servers_routing_is_that_of_the_sparse_layers(seed, tokens):
    routing = answer(seed, tokens)
    found = read_routing(told(routing), MODEL, tokens)
    assert found.dtype == np.int16
    np.testing.assert_array_equal(found, routing[:, [0, 2]])


@pytest.mark.parametrize(
    "text, why",
    [
        (None, "no routing.*--enable-return-routed-experts"),
        ([1], "no routing"),
        ("%%%%", "no base64"),
        ("\u00e9", "no base64"),
        (told(answer(0, 4)), "has 96 bytes, and 5 tokens of 3 layers and 2 experts have 120"),
        (told(answer(0, 5) + 3), "experts 0 to 3"),
        (told(answer(0, 5) - 1), "names expert -1"),
        (told(np.zeros((5, 3, 2))), "twice for one token"),
    ],
)
def test_what_is_no_routing_is_refused(text, why):
    with pytest.raises(ValueError, match=why):
        read_routing(text, MODEL, 5)


@settings(deadline=None)
@given(st.text() | st.binary().map(lambda b: base64.b64encode(b).decode()))
def test_no_text_breaks_the_reader(text):
    try:
        found = read_routing(text, MODEL, 1)
    except ValueError:
        return
    assert found.shape == (1, A, K) and found.min() >= 0 and found.max() < 4
