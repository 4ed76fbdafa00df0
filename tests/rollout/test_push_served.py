"""Weights pushed to a real SGLang server: it samples from them, and broken ones never reach it."""

import asyncio
import contextlib
import dataclasses
import functools
import json
import math

import aiohttp
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coevolve_jax.models import hf_io
from coevolve_jax.models.decoder import Decoder
from coevolve_jax.rollout.engine import EngineError
from coevolve_jax.rollout.sglang import push, weights

pytestmark = pytest.mark.server

LONG = 300  # tokens: the generation is still running when the weights change
PROMPT = list(range(5, 45))


@pytest.fixture(scope="module")
def policy(sglang_server):
    """The model that the server started with: (config, parameters)."""
    return hf_io.load(sglang_server.model_path)


def perturbed(params, seed):
    """Other weights, whose log-probabilities differ clearly."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(p * rng.uniform(0.6, 1.4, p.shape), p.dtype), params)


@pytest.fixture(scope="module")
def versions(policy):
    return {version: perturbed(policy[1], version) for version in (1, 2, 3)}


@pytest.fixture
def pushed(sglang_server, policy):
    """Runs `body(session, pusher)` on the server, which first gets its initial weights again."""

    def run(body, **settings):
        async def main():
            pusher = push.Pusher(policy[0], sglang_server.model_path, **settings)
            original = push.Pusher(policy[0], sglang_server.model_path)
            async with aiohttp.ClientSession() as session:
                try:
                    await original.push(session, sglang_server.url, original.write(policy[1], 0))
                    return await body(session, pusher)
                finally:
                    await pusher.close(session)
                    await original.close(session)

        return asyncio.run(main())

    return run


class Altering:
    """A session that changes the bodies of requests to one path: another host, a fault, an old client."""

    def __init__(self, session, path, **changes):
        self._session, self._path, self._changes = session, path, changes
        self.posted = []

    def request(self, method, url, json=None, **kwargs):
        self.posted += [url] if method == "POST" else []
        if self._changes and url.endswith(self._path):
            json = json | self._changes
        return self._session.request(method, url, json=json, **kwargs)


def request(count):
    return {
        "input_ids": PROMPT,
        "return_logprob": True,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": count, "ignore_eos": True},
    }


async def generate(session, url, count=16):
    async with session.post(url + "/generate", json=request(count)) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def logprobs(policy, params, ids):
    """Log-probabilities of ids[1:] by one forward pass; padded at the end, so that few lengths compile."""
    padded = np.zeros(len(PROMPT) + LONG * max(1, math.ceil((len(ids) - len(PROMPT)) / LONG)), np.int32)
    padded[: len(ids)] = ids
    return np.asarray(_forward(Decoder(policy[0]), params, padded))[: len(ids) - 1]


@functools.partial(jax.jit, static_argnums=0)
def _forward(model, params, ids):
    logits = model.apply({"params": params}, ids[None, :-1])[0]
    return jnp.take_along_axis(jax.nn.log_softmax(logits), ids[1:, None], axis=1)[:, 0]


def sampled_by(policy, params, answer, start=0, end=None):
    """How far the server's log-probabilities of output tokens start:end are from those of `params`."""
    ids = PROMPT + answer["output_ids"]
    theirs = np.array([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    ours = logprobs(policy, params, ids)[len(PROMPT) - 1 :]
    return np.abs(theirs - ours)[start:end].max()


# ---- New weights ----------------------------------------------------------------------------------------


def test_what_is_sampled_before_a_push_comes_from_the_old_weights(sglang_server, policy, pushed):
    async def body(session, pusher):
        assert sampled_by(policy, policy[1], await generate(session, sglang_server.url)) < 1e-4

    pushed(body)


@pytest.mark.parametrize("transport", ["disk", "distributed"])
def test_what_is_sampled_after_a_push_comes_from_the_new_weights(
    sglang_server, policy, versions, pushed, transport
):
    url = sglang_server.url

    async def body(session, pusher):
        sums = [await push.checksum(session, url)]
        for version, params in versions.items():
            sums.append(await pusher.push(session, url, pusher.write(params, version)))
            assert sums[-1] == await push.checksum(session, url)
            answer = await generate(session, url)
            assert pusher.version_of(url, answer["meta_info"]["weight_version"]) == version
            assert sampled_by(policy, params, answer) < 1e-4
            assert sampled_by(policy, policy[1], answer) > 0.1
        assert len(set(sums)) == 4

    pushed(body, transport=transport)


@pytest.mark.parametrize("transport", ["disk", "distributed"])
def test_requests_under_way_change_over_at_the_switch(sglang_server, policy, versions, pushed, transport):
    url = sglang_server.url

    async def switched(session, pusher, tokens):
        await pusher.push(session, url, pusher.write(versions[1], 1))
        prepared = pusher.write(versions[2], 2)
        running = [await start(session, url, tokens) for _ in range(3)]
        await pusher.push(session, url, prepared)
        return await asyncio.gather(*running)

    async def body(session, pusher):
        for tokens in (LONG, 2 * LONG, 4 * LONG):  # on a busy machine they may end before the switch
            answers = await switched(session, pusher, tokens)
            if all(len(answer["meta_info"]["weight_versions"]) > 1 for answer in answers):
                break
        for answer in answers:
            assert len(answer["output_ids"]) == tokens
            assert answer["meta_info"]["finish_reason"]["type"] == "length"
            first, second = answer["meta_info"]["weight_versions"]
            assert [pusher.version_of(url, span["version"]) for span in (first, second)] == [1, 2]
            assert 0 == first["start"] < first["end"] == second["start"] < second["end"] == tokens
            assert sampled_by(policy, versions[1], answer, 0, first["end"]) < 1e-4
            assert sampled_by(policy, versions[2], answer, second["start"]) < 1e-4

    pushed(body, transport=transport)


async def start(session, url, tokens=LONG):
    """A generation whose first token has been sampled: a task that gives the answer."""
    loop = asyncio.get_running_loop()
    begun = loop.create_future()

    async def stream():
        body = request(tokens) | {"stream": True}
        async with session.post(url + "/generate", json=body, read_bufsize=2**20) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    last = line
                    begun.done() or begun.set_result(None)
        return json.loads(last[len("data: ") :])

    task = asyncio.create_task(stream())
    await begun
    return task


def test_keys_and_values_of_old_weights_are_dropped(sglang_server, policy, versions, pushed):
    url = sglang_server.url

    async def body(session, pusher):
        await generate(session, url)  # fills the cache
        await pusher.push(session, url, pusher.write(versions[1], 1))
        answer = await generate(session, url)
        assert answer["meta_info"]["cached_tokens"] == 0 and sampled_by(policy, versions[1], answer) < 1e-4
        # The failure without it.
        forgetful = Altering(session, "/update_weights_from_disk", flush_cache=False)
        await pusher.push(forgetful, url, pusher.write(versions[2], 2))
        answer = await generate(session, url)
        assert answer["meta_info"]["cached_tokens"] > 0 and sampled_by(policy, versions[2], answer) > 0.1

    pushed(body)


def test_another_client_and_a_restart_do_not_confuse_it(sglang_server, versions, pushed):
    url = sglang_server.url

    async def body(session, pusher):
        await pusher.push(session, url, pusher.write(versions[1], 1))
        other = push.Pusher(pusher._config, sglang_server.model_path)
        await other.push(session, url, other.write(versions[2], 8))
        with pytest.raises(EngineError, match="still serves version 8-"):
            await pusher.push(elsewhere(session), url, pusher.write(versions[3], 3))
        await other.close(session)

    pushed(body)


# ---- What must not reach a server -----------------------------------------------------------------------


def elsewhere(session):
    return Altering(session, "/update_weights_from_disk", model_path="/not/on/this/host")


def edited(change):
    """A fault of the folder's weights; `change` edits {name: array}."""

    def fault(folder):
        file = folder / hf_io.WEIGHTS
        with contextlib.ExitStack() as stack:
            arrays = {name: np.array(t[:]) for name, t in hf_io.open_tensors(folder, stack).items()}
        change(arrays)
        hf_io.save_file(arrays, file)

    return fault


def truncated(folder):
    file = folder / hf_io.WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])


NORM, EMBEDDING = "model.norm.weight", hf_io.EMBEDDING
FAULTS = {
    "wrong shape": (edited(lambda a: a.update({NORM: a[NORM][:-1]})), r"norm\.weight has shape \(\d+,\)"),
    "missing": (edited(lambda a: a.pop(NORM)), r"model\.norm\.weight is missing"),
    "unknown": (edited(lambda a: a.update(more=a[NORM])), "more is unknown there"),
    "dtype": (edited(lambda a: a.update({NORM: a[NORM].astype("f2")})), "dtype float16 instead of float32"),
    "vocabulary": (edited(lambda a: a.update({EMBEDDING: a[EMBEDDING][:-1]})), "the vocabulary has"),
    "truncated": (truncated, "cannot be read"),
    "empty": (lambda folder: (folder / hf_io.WEIGHTS).unlink(), "neither model.safetensors nor"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_folder_never_reaches_the_server(sglang_server, versions, pushed, fault):
    damage, said = FAULTS[fault]
    url = sglang_server.url

    async def body(session, pusher):
        before = await push.checksum(session, url)
        prepared = pusher.write(versions[1], 1)
        damage(prepared.folder)
        watched = Altering(session, "nothing")
        with pytest.raises(ValueError, match=said):
            await pusher.push(watched, url, prepared)
        assert [path for path in watched.posted if not path.endswith("/weights_checker")] == []
        assert await push.checksum(session, url) == before
        assert len((await generate(session, url, 2))["output_ids"]) == 2  # alive

    pushed(body)


def test_another_model_is_refused_with_both_transports(sglang_server, policy, pushed):
    config = dataclasses.replace(policy[0], num_hidden_layers=1)
    params = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), hf_io.abstract_params(config))

    async def body(session, pusher):
        with pytest.raises(ValueError, match=r"layers\.1\..* is missing; .* Nothing was sent"):
            await pusher.push(session, sglang_server.url, weights.from_params(config, params, 1, "float32"))

    pushed(body)


# ---- What goes wrong on the way -------------------------------------------------------------------------


def test_a_missing_tensor_is_found_by_checksum_and_the_old_weights_come_back(
    sglang_server, policy, versions, pushed, monkeypatch
):
    """The server itself reports success."""
    url = sglang_server.url

    async def body(session, pusher):
        await pusher.push(session, url, pusher.write(versions[1], 1))
        prepared = pusher.write(versions[2], 2)
        edited(lambda arrays: arrays.pop(NORM))(prepared.folder)
        monkeypatch.setattr(weights, "differences", lambda ours, theirs: [])
        running = await start(session, url)
        said = "did not take version 2 and still serves version 1-.* checksums: model.norm.weight"
        with pytest.raises(EngineError, match=said):
            await pusher.push(session, url, prepared)
        answer = await generate(session, url)
        assert pusher.version_of(url, answer["meta_info"]["weight_version"]) == 1
        assert sampled_by(policy, versions[1], answer) < 1e-4
        assert len((await running)["output_ids"]) == LONG  # the server released it

    pushed(body)


def test_a_folder_that_the_server_cannot_see(sglang_server, policy, versions, pushed):
    url = sglang_server.url

    async def body(session, pusher):
        await pusher.push(session, url, pusher.write(versions[1], 1))
        running = await start(session, url)
        with pytest.raises(EngineError, match="still serves version 1-.*/not/on/this/host"):
            await pusher.push(elsewhere(session), url, pusher.write(versions[2], 2))
        assert sampled_by(policy, versions[1], await running) < 1e-4
        await pusher.push(session, url, pusher.write(versions[2], 2))
        assert sampled_by(policy, versions[2], await generate(session, url)) < 1e-4

    pushed(body)


def test_stale_weights_are_found_also_where_only_a_change_can_be_seen(sglang_server, versions, pushed):
    url = sglang_server.url

    async def body(session, pusher):
        first = pusher.write(versions[1], 1)
        sums = [await pusher.push(session, url, first), await pusher.push(session, url, first)]
        sums.append(await pusher.push(session, url, pusher.write(versions[2], 2)))
        assert sums[0] == sums[1] != sums[2]
        second = str(first.folder.parent / "version-2")
        stale = Altering(session, "/update_weights_from_disk", model_path=second)
        with pytest.raises(EngineError, match="still serves version 2-.* is the same, the weights changed"):
            await pusher.push(stale, url, pusher.write(versions[3], 3))

    pushed(body, exact=False)


def test_a_broadcast_that_the_server_refuses(sglang_server, policy, versions, pushed):
    url = sglang_server.url

    async def body(session, pusher):
        await pusher.push(session, url, pusher.write(versions[1], 1))
        wrong = Altering(session, "/update_weights_from_distributed", group_name="another")
        with pytest.raises(EngineError, match="still serves version 1-.*Group another not in"):
            await pusher.push(wrong, url, pusher.write(versions[2], 2))
        await pusher.push(session, url, pusher.write(versions[3], 3))
        assert sampled_by(policy, versions[3], await generate(session, url)) < 1e-4

    pushed(body, transport="distributed")
