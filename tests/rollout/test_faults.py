"""Faults of servers and networks cost a request at most, and never fabricate a failure of the policy."""

import asyncio
import dataclasses
import gc
import itertools
import math
import os
import resource
import signal
import threading
import time
import weakref

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coevolve_jax import event_loop
from coevolve_jax.envs import bfcl
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.models import hf_io
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.rollout.engine import EngineError
from coevolve_jax.rollout.limits import Limits
from coevolve_jax.rollout.sglang import engine as sglang
from coevolve_jax.rollout.sglang.answer import read_answer, read_counts
from coevolve_jax.rollout.sglang.engine import SGLangEngine
from coevolve_jax.rollout.sglang.fleet import FIRST_PAUSE, Fault, Fleet, Member
from coevolve_jax.rollout.sglang.push import Pusher, call
from coevolve_jax.testing.engine import Subject, ask, check_completion, moved
from tests.rollout.test_engines import FOLDER, LIMITS, generate, policy  # noqa: F401 (fixtures)
from tests.rollout.test_rollout import TASK
from tests.rollout.test_server import started_by
from tests.support.faults import Proxy

pytestmark = pytest.mark.server

PROMPT = np.arange(40, 60)


@pytest.fixture(scope="module")
def ready():
    """Process ids of the second server that have generated; asking again takes a second."""
    return set()


@pytest.fixture
def second(to_be_struck, ready):
    server = to_be_struck()
    if server._process.pid not in ready:
        ready.add(server.wait_until_ready()._process.pid)
    return server


@pytest.fixture
def proxies(sglang_server, second):
    """A proxy before each of two servers."""
    with Proxy(sglang_server.url) as one, Proxy(second.url) as two:
        yield one, two


@pytest.fixture
def make(policy, tmp_path):
    made = []

    def engine(*members, **settings):
        pusher = Pusher(policy.config, FOLDER, root=tmp_path / "push", ahead=settings.get("ahead", False))
        settings = {"timeout": 120.0, "probe_timeout": 10.0, "patience": 120.0, **LIMITS, **settings}
        made.append(SGLangEngine(policy.config, policy.params, members=members, pusher=pusher, **settings))
        return made[-1]

    yield engine
    for one in made:
        one.close()


@pytest.fixture
def held(make, sglang_server):
    """An engine whose caller continues while the server takes weights, and the gate of its pushes."""
    engine, gate = make(Member(sglang_server.url), ahead=True), threading.Event()
    push = engine._pusher.push

    async def later(*arguments):
        async with asyncio.timeout(60):  # otherwise a caller that has to wait would hang
            while not gate.is_set():
                await asyncio.sleep(0.001)
        return await push(*arguments)

    engine._pusher.push = later
    yield engine, gate
    gate.set()


def test_while_the_server_takes_new_weights_conversations_go_on_and_new_ones_wait(held, policy):
    engine, gate = held
    weights = {0: policy.params, 1: moved(policy.params), 2: moved(policy.params, 0.1)}
    subject, other = Subject(engine, policy), np.arange(60, 90)
    (first,) = generate(engine, [ask(0, PROMPT, stop=(), new=8)])
    engine.update_weights(weights[1], 1)  # returns, with the gate closed
    waiting = event_loop.start(engine.generate([ask(1, other, stop=(), new=8)]))
    ids = np.concatenate([PROMPT, first.ids, [7, 9]])
    (second,) = generate(engine, [ask(0, ids, stop=(), new=8)])
    assert (first.versions == 0).all() and (second.versions == 0).all() and not waiting.done()
    under_way = event_loop.start(engine.generate([ask(0, PROMPT, stop=(), new=64)]))
    gate.set()
    (new,), (across,) = waiting.result(120), under_way.result(120)
    assert (new.versions == 1).all() and (np.diff(across.versions) >= 0).all()
    engine.update_weights(weights[2], 2)
    (last,) = generate(engine, [ask(2, other, stop=(), new=8)])
    assert (last.versions == 2).all()
    for prompt, c in ((PROMPT, first), (ids, second), (other, new), (PROMPT, across), (other, last)):
        check_completion(subject, prompt, c, weights=weights)


def test_weights_that_no_server_took_beside_the_rollouts_are_told(held, policy):
    engine, gate = held
    smaller = dataclasses.replace(policy.config, num_hidden_layers=1)
    engine._pusher._config = smaller
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), hf_io.abstract_params(smaller))
    engine.update_weights(params, 1)
    gate.set()
    with pytest.raises(ValueError, match="Version 1 is not the model that .* Nothing was sent"):
        generate(engine, [ask(0, PROMPT)])
    engine._pusher._config = policy.config
    (before,) = generate(engine, [ask(0, PROMPT)])  # the server keeps its weights
    engine.update_weights(policy.params, 2)
    (after,) = generate(engine, [ask(1, PROMPT)])  # a new conversation waits for them
    assert (before.versions == 0).all() and (after.versions == 2).all()


def test_an_engine_that_is_closed_gives_up_a_push(held, policy):
    engine, _ = held
    engine.update_weights(policy.params, 1)
    engine.close()
    assert engine._switching.cancelled()


def test_a_full_disk_is_told_at_the_next_message_so_that_the_step_is_saved_before(
    make, sglang_server, policy
):
    engine = make(Member(sglang_server.url))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        engine.update_weights(moved(policy.params), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    told = "weights of version 1 cannot be written .*too large.*: give config.engine.push_folder a folder"
    with pytest.raises(EngineError, match=told):
        generate(engine, [ask(0, PROMPT, new=4)])


@pytest.fixture
def saver(sglang_server):
    """The server, presented as started with the flag to save memory; a CPU has nothing to save."""
    with Proxy(sglang_server.url) as proxy:
        proxy.pretended["/server_info"] = {"enable_memory_saver": True}
        yield proxy


def test_servers_on_the_learners_devices_sleep_during_the_update(saver, make, policy):
    engine, weights = make(Member(saver.url), sleeps=True), {1: moved(policy.params)}
    generate(engine, [ask(0, PROMPT, new=4)])
    engine.release([0])
    saver.posted.clear()
    engine.sleep()
    assert not engine._fleet.awake.is_set()
    saver.posted.append("the update")
    engine.update_weights(weights[1], 1)
    assert engine._fleet.awake.is_set()
    told = [path for path in saver.posted if path != "/weights_checker"]
    asleep = ["/pause_generation", "/release_memory_occupation", "the update", "/resume_memory_occupation"]
    assert told == [*asleep, "/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    (c,) = generate(engine, [ask(1, PROMPT, new=4)])
    check_completion(Subject(engine, policy), PROMPT, c, weights=weights)
    saver.posted.clear()
    engine.sleep()
    engine.close()  # in mid-step
    assert saver.posted == [*asleep[:2], asleep[3], "/continue_generation"]


def test_a_server_that_did_not_wake_up_is_woken_before_it_comes_back(saver, make, policy):
    engine, weights = make(Member(saver.url), sleeps=True), {1: moved(policy.params)}
    engine.sleep()
    saver.always_at["/resume_memory_occupation"] = "500"
    saver.posted.clear()
    engine.update_weights(weights[1], 1)
    del saver.always_at["/resume_memory_occupation"]
    (c,) = generate(engine, [ask(0, PROMPT, new=4)])
    check_completion(Subject(engine, policy), PROMPT, c, weights=weights)
    assert saver.posted.count("/resume_memory_occupation") >= 2 and not engine._asleep


def test_a_server_that_is_out_stays_out_while_the_others_sleep():
    """The learner has its memory then: no requests, no start and no weights before the next push."""

    async def scene():
        asked, well = [], asyncio.Event()

        async def probe(member):
            asked.append(member.url)
            await well.wait()
            fleet.check_awake()  # like the engine's own call, which waited for a push

        async def refresh(member):
            asked.append("weights")

        fleet = Fleet([Member("a"), Member("b")], probe=probe, refresh=refresh, patience=60.0, restarts=1)
        fleet.put_out(fleet.members[1], "reset")
        await until(lambda: asked == ["b"])
        fleet.awake.clear()  # in mid-probe
        well.set()
        await asyncio.sleep(3 * FIRST_PAUSE)
        assert asked == ["b"] and fleet.serving == fleet.members[:1]
        fleet.awake.set()
        await until(lambda: fleet.members[1].serving)
        assert asked == ["b", "b", "weights"]

    event_loop.run(scene())


def test_a_server_that_cannot_sleep_is_refused(saver, sglang_server, make):
    with pytest.raises(EngineError, match="start it with --enable-memory-saver, or set config.engine.sleep"):
        make(Member(sglang_server.url), sleeps=True)
    engine = make(Member(saver.url), sleeps=True)
    saver.always_at["/release_memory_occupation"] = "500"
    with pytest.raises(EngineError, match="did not give back its memory .* set config.engine.sleep to False"):
        engine.sleep()
    assert generate(engine, [ask(0, PROMPT, new=4)])[0].finish != "abort"  # the server released it


@pytest.mark.parametrize("fault", ["reset", "500", "truncate", "abort", "garbage", "hang"])
def test_one_fault_costs_nothing_but_time(proxies, make, policy, fault):
    proxy, _ = proxies
    engine = make(Member(proxy.url), **({"timeout": 5.0} if fault == "hang" else {}))
    proxy.faults = [fault]
    (c,) = generate(engine, [ask(0, PROMPT, stop=(), new=12)])
    assert c.finish == "length" and len(c.ids) == 12 and engine.faults == 1
    assert (engine.counts["messages"], engine.counts["slow_retries"]) == (1, fault == "hang")
    check_completion(Subject(None, policy), PROMPT, c)
    if fault == "abort":  # the sampled tokens are kept: the rest is requested
        assert len(proxy.seen) == 2 and proxy.seen[1]["sampling_params"]["max_new_tokens"] == 6
        assert proxy.seen[1]["input_ids"] == PROMPT.tolist() + c.ids[:6].tolist()


def test_a_message_that_cannot_be_had_makes_its_trajectory_invalid_and_no_other(proxies, make, policy):
    proxy, _ = proxies
    engine = make(Member(proxy.url), attempts=3, max_length=1000)
    with ProcessPool("bfcl", workers=1) as env_pool:
        agent = Agent(engine, policy.chat, env_pool, bfcl.tools, Limits(900, 32), concurrency=1)
        proxy.faults = ["pass"] + ["500"] * 3
        lost, whole = agent.rollout_groups([TASK], [[0, 1]], 0.0)[0].trajectories
    assert lost.stop == "engine" and not lost.outcome.valid and "500" in lost.outcome.reason
    assert lost.mask.any()  # the message before remains
    assert whole.outcome.valid and whole.stop != "engine"
    assert engine.faults == 3


def test_a_server_that_fails_is_left_out_until_it_is_well_and_up_to_date(proxies, make, policy):
    one, two = proxies
    engine = make(Member(one.url), Member(two.url))
    generate(engine, [ask(i, PROMPT + i, new=4) for i in range(4)])
    assert one.seen and two.seen  # both serve
    one.always = "reset"
    generate(engine, [ask(i, PROMPT + i, new=4) for i in range(4)])
    before = len(one.seen)
    completions = generate(engine, [ask(i, PROMPT + i, new=4) for i in range(4)])
    assert len(one.seen) == before and all(c.finish != "abort" for c in completions)
    other = moved(policy.params)
    engine.update_weights(other, 5)  # while it is out
    one.always = ""
    deadline, new = time.monotonic() + 120, itertools.count(4)  # pending conversations stay where they are
    while len(one.seen) == before and time.monotonic() < deadline:
        (c, d) = generate(engine, [ask(next(new), PROMPT, new=4) for _ in range(2)])
        for x in (c, d):
            assert (x.versions == 5).all()
            check_completion(Subject(None, policy), PROMPT, x, weights={5: other})
    assert len(one.seen) > before


def test_conversations_are_spread_over_the_servers_and_each_stays_with_its_own(proxies, make):
    one, two = proxies
    engine = make(Member(one.url), Member(two.url))
    of = lambda proxy: sorted(body["input_ids"][0] - PROMPT[0] for body in proxy.seen)
    generate(engine, [ask(i, PROMPT + i, new=4) for i in range(8)])
    first = of(one), of(two)
    assert [len(served) for served in first] == [4, 4]
    for i in (5, 2, 7, 0, 1, 6, 3, 4):  # one at a time, when both servers are equally free
        generate(engine, [ask(i, PROMPT + i, new=4)])
    assert (of(one), of(two)) == tuple(sorted(2 * served) for served in first)
    engine.release(first[1])
    generate(engine, [ask(i, PROMPT + i, new=4) for i in range(8, 12)])
    assert of(one) == sorted(2 * first[0]) and of(two) == sorted([*2 * first[1], *range(8, 12)])


def test_when_nothing_answers_any_more_one_sentence_says_so(proxies, make):
    proxy, _ = proxies
    engine = make(Member(proxy.url), patience=1.0)
    proxy.always = "reset"
    with pytest.raises(
        EngineError, match="No SGLang server has answered for 1 s .*goes on from the last checkpoint"
    ):
        generate(engine, [ask(0, PROMPT)])


def test_faults_without_end_stop_the_run_although_the_server_is_well(proxies, make, monkeypatch):
    proxy, _ = proxies
    monkeypatch.setattr(sglang, "GIVEN_UP", 3)
    engine = make(Member(proxy.url), attempts=1)
    proxy.faults = ["garbage"] * 3
    first = generate(engine, [ask(i, PROMPT) for i in range(2)])
    assert [c.finish for c in first] == ["abort", "abort"]
    with pytest.raises(EngineError, match="3 messages in a row could not be had"):
        generate(engine, [ask(0, PROMPT)])


def test_messages_given_up_count_in_a_row_over_all_conversations(proxies, make, monkeypatch):
    """An answer resets the count; a fault that a second attempt repairs does not count."""
    proxy, _ = proxies
    monkeypatch.setattr(sglang, "GIVEN_UP", 3)
    engine, conversation_id = make(Member(proxy.url), attempts=2), itertools.count()
    one = lambda: generate(engine, [ask(next(conversation_id), PROMPT, new=2)])[0].finish
    for _ in range(2):
        proxy.faults = ["garbage"] * 4
        assert [one(), one()] == ["abort", "abort"]
        proxy.faults = ["garbage", "pass"]
        assert one() in ("stop", "length")
    proxy.faults = ["garbage"] * 6
    assert [one(), one()] == ["abort", "abort"]
    with pytest.raises(EngineError, match="3 messages in a row could not be had, each after 2 attempts"):
        one()


def test_every_message_reaches_the_server_with_its_conversations_seed(proxies, make):
    """Every attempt has the same seed, and conversations never share one; servers take 31 bits."""
    proxy, _ = proxies
    engine = make(Member(proxy.url))
    seeds = {40: 0, 41: 7, 42: 2**31 - 1, 43: 2**31 + 5, 44: 2**32 - 2}  # by the first token of the prompt
    proxy.faults = ["garbage"]
    asked = [ask(i, PROMPT + first - 40, seed=seed, new=2) for i, (first, seed) in enumerate(seeds.items())]
    said = generate(engine, asked)
    generate(
        engine,
        [dataclasses.replace(r, ids=np.concatenate([r.ids, c.ids, [9]])) for r, c in zip(asked, said)],
    )
    got = {(b["input_ids"][0], b["sampling_params"]["sampling_seed"]) for b in proxy.seen}
    assert got == {(40, 0), (41, 7), (42, 2**31 - 1), (43, 5), (44, 2**31 - 2)}
    assert len(proxy.seen) >= 11


def test_what_is_no_server_is_refused_at_once(make, proxies):
    with pytest.raises(EngineError, match="at http://127.0.0.1:9 cannot be reached .*experiments/serve.py"):
        make(Member("http://127.0.0.1:9"))
    with pytest.raises(EngineError, match="max_length is 100000"):
        make(Member(proxies[0].url), max_length=100_000)


def test_a_cancelled_request_is_cancelled_on_the_server_too(proxies, make):
    proxy, _ = proxies
    engine = make(Member(proxy.url))

    async def cancel():
        asked = asyncio.ensure_future(engine.generate([ask(0, PROMPT, stop=(), new=64)]))
        await until(lambda: proxy.seen)
        asked.cancel()
        await asyncio.wait([asked])
        await until(lambda: proxy.aborted)

    event_loop.run(cancel())
    assert proxy.aborted == [body["rid"] for body in proxy.seen]


def test_what_tells_a_server_to_stop_outlives_a_collection_of_garbage(monkeypatch):
    """An event loop holds its tasks weakly, so an abort that nobody else holds may vanish unsent."""
    engine, collected = SGLangEngine.__new__(SGLangEngine), []
    engine._timeout, engine._probe_timeout, engine._record_routing = 1.0, 1.0, False
    engine._aborts = set()

    async def call(self, member, method, path, *arguments, **named):
        if path == "/generate":
            raise Fault("no")
        waits = asyncio.get_running_loop().create_future()  # nobody else holds it either
        weakref.finalize(waits, collected.append, path)
        await waits

    async def ask_and_collect():
        with pytest.raises(Fault):
            await engine._ask(Member("http://s"), ask(0, PROMPT), PROMPT, 0)
        await asyncio.sleep(0)
        gc.collect()
        assert not collected
        (abort,) = engine._aborts
        abort.cancel()
        await asyncio.wait([abort])
        await asyncio.sleep(0)
        assert not engine._aborts

    monkeypatch.setattr(SGLangEngine, "_call", call)
    event_loop.run(ask_and_collect())


async def until(holds, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came to that point"
        await asyncio.sleep(0.001)


def test_conversations_that_lose_patience_together_all_end():
    """The first to give up cancels the others while their own patience ends."""

    async def unwell(member):
        raise Fault("it is gone")

    async def lose():
        fleet = Fleet([Member("one")], probe=unwell, refresh=unwell, patience=0.05, restarts=0)
        fleet.put_out(fleet.members[0], "it is gone")
        waiting = [asyncio.ensure_future(fleet.take(conversation_id)) for conversation_id in range(8)]
        with pytest.raises(EngineError, match="No SGLang server has answered"):
            await asyncio.gather(*waiting)
        for one in waiting:
            one.cancel()
        async with asyncio.timeout(60):
            ended = await asyncio.gather(*waiting, return_exceptions=True)
        await fleet.close()
        return ended

    assert all(isinstance(end, EngineError | asyncio.CancelledError) for end in event_loop.run(lose()))


def test_a_server_whose_push_failed_does_not_serve_under_the_new_label(proxies, make, policy):
    """The verified weights count, not the server's own label."""
    proxy, _ = proxies
    engine = make(Member(proxy.url))
    other = moved(policy.params)
    proxy.always_at["/weights_checker"] = "500"  # the new weights are there, and nobody can tell
    engine.update_weights(other, 4)
    assert not engine._fleet.serving
    proxy.always_at.clear()
    (c,) = generate(engine, [ask(0, PROMPT, new=6)])
    assert (c.versions == 4).all() and engine._pusher.holds(proxy.url, engine._weights)
    check_completion(Subject(None, policy), PROMPT, c, weights={4: other})


def test_weights_that_this_engine_did_not_push_are_not_sampled_from(make, sglang_server, policy, tmp_path):
    """Another program's end the run. A server that was started anew gets the engine's own again."""
    engine, url = make(Member(sglang_server.url)), sglang_server.url
    other = Pusher(policy.config, FOLDER, root=tmp_path / "other")
    event_loop.run(other.push(engine._http, url, other.write(moved(policy.params), 0)))
    with pytest.raises(EngineError, match=f"Another program .* at {url}, as '0-.*each run its own servers"):
        generate(engine, [ask(0, PROMPT)])
    event_loop.run(other.close(engine._http))
    engine.update_weights(policy.params, 1)
    (c,) = generate(engine, [ask(1, PROMPT)])
    assert (c.versions == 1).all() and engine.faults == 0
    launched = {"model_path": str(FOLDER), "weight_version": "1", "flush_cache": True}
    event_loop.run(call(engine._http, url, "POST", "/update_weights_from_disk", launched))
    (c,) = generate(engine, [ask(2, PROMPT)])
    assert (c.versions == 1).all() and engine.faults == 1


def test_a_first_push_that_fails_ends_the_start(proxies, make):
    proxy, _ = proxies
    proxy.always_at["/update_weights_from_disk"] = "500"
    with pytest.raises(EngineError, match="did not take version 0"):
        make(Member(proxy.url))


def test_a_server_left_paused_is_woken(proxies, make):
    """A push with a broken connection leaves it paused: it would never report health."""
    proxy, _ = proxies
    engine = make(Member(proxy.url))
    event_loop.run(call(engine._http, proxy.url, "POST", "/pause_generation", {"mode": "retract"}))
    proxy.faults = ["reset"]
    (c,) = generate(engine, [ask(0, PROMPT, new=6)])
    assert c.finish in ("stop", "length")


@pytest.mark.nightly
def test_a_launched_server_that_hangs_or_dies_comes_back_with_the_newest_weights(second, make, policy):
    """One server hangs and is restarted; the new one is killed during its start; the next one serves."""
    member = Member(second.url, second)
    engine = make(member, timeout=10.0, probe_timeout=2.0, patience=600.0)
    other = moved(policy.params, 0.02)
    engine.update_weights(other, 3)
    striking = threading.Thread(target=stop_and_kill_the_next, args=(second,))
    striking.start()
    completions = generate(engine, [ask(i, PROMPT + i, stop=(), new=64) for i in range(4)])
    striking.join()
    for i, c in enumerate(completions):
        assert c.finish == "length", c.reason
        assert (c.versions == 3).all()
        check_completion(Subject(None, policy), PROMPT + i, c, weights={3: other})
    assert member.restarts == 2 and engine.faults >= 1
    engine.close()
    assert not second.alive() and not second.healthy(1)
    second.stop()


def stop_and_kill_the_next(server):
    """Stops all processes of a server while it generates, and kills the next one that starts."""
    supervisor = server._process.pid
    time.sleep(0.02)
    os.killpg(started_by(supervisor), signal.SIGSTOP)
    while server._process.pid == supervisor or not started_by(server._process.pid):
        time.sleep(0.01)
    os.kill(started_by(server._process.pid), signal.SIGKILL)


# ---- Reading answers -----------------------------------------------------------------------------------


def answer(ids, finish="stop", **meta):
    spans = [{"version": "4", "start": 0, "end": len(ids)}]
    return {
        "output_ids": list(ids),
        "meta_info": {
            "output_token_logprobs": [[-0.5, i, None] for i in ids],
            "finish_reason": {"type": finish},
            "weight_version": "4",
            "weight_versions": spans,
            **meta,
        },
    }


read = lambda data, budget=8: read_answer(data, 100, budget, (2,), int)


def test_an_answer_is_read_token_by_token():
    c = read(answer([7, 8, 2]))
    assert c.ids.tolist() == [7, 8, 2] and c.finish == "stop" and c.versions.tolist() == [4, 4, 4]
    spans = [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 3}]
    assert read(answer([7, 8, 9], weight_versions=spans)).versions.tolist() == [4, 5, 5]
    assert read(answer([7, 8, 9])).finish == ""  # the model's own end of text, which no request had as a stop
    assert read(answer([7] * 8, "length")).finish == "length"
    # What was given up after the message's own end is whole.
    assert read(answer([7, 2], "abort")).finish == "stop" and read(answer([7, 8], "abort")).finish == "abort"


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        None,
        answer([]),
        answer([100]),
        answer([-1]),
        answer([7] * 9),
        answer([7], weight_version="", weight_versions=[]),
        answer([7, 8], output_token_logprobs=[[-0.5, 7, None]]),
        answer([7], output_token_logprobs=[[-0.5, 8, None]]),
        answer([7, 8], weight_versions=[{"version": "4", "start": 0, "end": 1}]),
        answer([7], finish_reason=None),
        *(answer([7], output_token_logprobs=[[p, 7, None]]) for p in (None, math.nan, -math.inf, 0.7)),
    ],
)
def test_what_is_no_answer_is_a_fault(data):
    with pytest.raises(Fault):
        read(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries(
        {
            "output_ids": json_values,
            "meta_info": st.fixed_dictionaries(
                {
                    "output_token_logprobs": json_values,
                    "finish_reason": json_values,
                    "weight_versions": json_values,
                }
            ),
        }
    )
)
def test_nothing_that_a_server_writes_breaks_the_reader(data):
    try:
        read(data)
    except Fault:
        pass


@given(
    st.dictionaries(
        st.sampled_from(["prompt_tokens", "cached_tokens", "queue_time"]), st.one_of(json_values, st.floats())
    )
)
def test_what_a_server_says_of_its_costs_is_a_number_or_left_out(meta):
    counts = read_counts(meta)
    assert all(0 <= n < np.inf for n in counts.values())
    assert counts.keys() >= {"prefill_tokens", "cached_tokens"}


def test_what_a_message_has_cost():
    told = {"prompt_tokens": 40, "cached_tokens": 30}
    assert read_counts(told) == {"prefill_tokens": 10, "cached_tokens": 30}
    more = {"queued": 1, "queue_seconds": 0.25}
    assert read_counts({**told, "queue_time": 0.25}) == {"prefill_tokens": 10, "cached_tokens": 30, **more}
