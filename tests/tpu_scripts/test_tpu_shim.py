"""The shim around sglang-jax's app, over a real small model (tests/support/sglang_jax_fake.py)."""

import asyncio
import dataclasses
import functools
import hashlib
import re
import shutil
import sys
from types import ModuleType, SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from coevolve_jax.models import hf_io
from coevolve_jax.models.decoder import ModelConfig
from tests.support import sglang_jax_fake as fake
from tests.support.paths import ROOT
from tpu_scripts import sglang_jax_server as server
from tpu_scripts.served_weights import ServedWeights
from tpu_scripts.shim import Refused, check_prompts, mend

CONFIG = ModelConfig(
    model_type="qwen3",
    vocab_size=88,
    hidden_size=32,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    rope_theta=1e6,
    tie_word_embeddings=False,
    initializer_range=0.4,
)
PROMPT = [5, 7, 11]


def policy(config, seed):
    random = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: random.normal(size=leaf.shape, scale=0.4).astype(np.float32),
        hf_io.abstract_params(config),
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two policies on disk: the server's initial one, and an update."""
    root = tmp_path_factory.mktemp("policies")
    for seed, name in enumerate(("old", "new")):
        hf_io.save(root / name, CONFIG, policy(CONFIG, seed))
    return root


def serve(folder, repeats=1, drain=60.0, config=CONFIG):
    module = fake.http_server(folder, config, repeats)
    server.install(module, "step-0", drain)
    module.launch(SimpleNamespace(model_path=str(folder)))
    return module


def body(prompt=PROMPT, tokens=6, **more):
    sampling = {"max_new_tokens": tokens}
    return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, **more}


def update(app, folder, version="step-1", **more):
    return fake.request(
        app,
        "/update_weights_from_disk",
        {"model_path": str(folder), "weight_version": version, "flush_cache": True, **more},
    )


load = functools.cache(hf_io.load)


def greedy(folder, prompt, tokens):
    """Ids and log-probabilities from the learner's own model."""
    config, params = load(folder)
    ids, logprobs = list(prompt), []
    for _ in range(tokens):
        padded = np.array([ids + [0] * (fake.LENGTH - len(ids))], np.int32)
        row = np.asarray(fake.forward(config)(params, padded))[len(ids) - 1]
        ids.append(int(row.argmax()))
        logprobs.append(float(row[ids[-1]]))
    return ids[len(prompt) :], logprobs


def is_answer_of(answer, version, folder, prompt=PROMPT, tokens=6):
    ids, logprobs = greedy(folder, prompt, tokens)
    meta = answer["meta_info"]
    assert answer["output_ids"] == ids
    np.testing.assert_allclose([entry[0] for entry in meta["output_token_logprobs"]], logprobs, atol=1e-5)
    assert meta["weight_version"] == version
    assert meta["weight_versions"] == [{"version": version, "start": 0, "end": tokens}]


@pytest.mark.parametrize("repeats", [1, 2])
def test_an_update_makes_the_server_answer_as_the_new_policy(folders, repeats):
    async def run():
        app = serve(folders / "old", repeats).app
        status, answer = await fake.request(app, "/generate", body())
        assert status == 200
        is_answer_of(answer, "step-0", folders / "old")
        assert (await update(app, folders / "new"))[0] == 200
        info = (await fake.request(app, "/model_info", method="GET"))[1]
        assert info["weight_version"] == "step-1" and info["model_path"] == str(folders / "new")
        status, answer = await fake.request(app, "/generate", body())  # as before: a stale cache would show
        is_answer_of(answer, "step-1", folders / "new")

    asyncio.run(run())


def test_checksums_are_those_of_the_tensors_in_the_folder(folders):
    async def run():
        app = serve(folders / "old", repeats=2).app
        await update(app, folders / "new")
        return await fake.request(app, "/weights_checker", {"action": "checksum"})

    status, answer = asyncio.run(run())
    tensors = load_file(folders / "new" / "model.safetensors")
    assert answer["ranks"][0]["checksums"] == {
        name: hashlib.sha256(tensor.tobytes()).hexdigest() for name, tensor in tensors.items()
    }


def test_a_served_model_that_is_not_the_folder_is_refused_at_the_start(folders, tmp_path):
    tensors = load_file(folders / "old" / "model.safetensors")
    name = "model.layers.1.self_attn.q_norm.weight"
    shutil.copytree(folders / "old", tmp_path / "other")
    save_file({**tensors, name: tensors[name] + 1e-3}, tmp_path / "other" / "model.safetensors")
    runner = server.SglangJax({"scheduler": fake.http_server(folders / "old", CONFIG).scheduler})
    ServedWeights(runner, folders / "old")
    with pytest.raises(ValueError, match=f"serves for {name} is not the tensor in"):
        ServedWeights(runner, tmp_path / "other")


def test_a_model_whose_names_the_table_does_not_know_is_refused_at_the_start(folders):
    module = fake.http_server(folders / "old", CONFIG)
    module.runner.model.model.extra = fake.Holder(weight=np.ones(3, np.float32))
    module.runner.__init__(module.runner.model)
    with pytest.raises(ValueError, match="no tensor fills the leaf model.extra.weight"):
        ServedWeights(server.SglangJax({"scheduler": module.scheduler}), folders / "old")


def damage(kind, name, tensors, folder):
    """Breaks a checkpoint. Returns the words that the refusal must contain."""
    if kind == "missing":
        del tensors[name]
    elif kind == "extra":
        tensor, name = tensors[name], "model.layers.9.mlp.up_proj.weight"
        tensors[name] = tensor
    elif kind == "shape":
        tensors[name] = np.concatenate([tensors[name], tensors[name]])
    elif kind == "dtype":
        tensors[name] = tensors[name].astype(np.int32)
    save_file(tensors, folder / "model.safetensors")
    if kind == "truncated":
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
        return "model.safetensors"
    if kind == "config":
        (folder / "config.json").write_text("[1")
        return "config.json"
    return name


@pytest.fixture(scope="module")
def served(folders):
    return serve(folders / "old")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(["missing", "extra", "shape", "dtype", "truncated", "config"]))
def test_a_damaged_folder_is_refused_by_name_and_the_old_weights_stay(folders, served, tmp_path, data, kind):
    tensors = load_file(folders / "new" / "model.safetensors")
    name = data.draw(st.sampled_from(sorted(tensors)))
    folder = tmp_path / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(folders / "new", folder)
    named = damage(kind, name, tensors, folder)
    before = list(served.runner.model_state_leaves)
    status, answer = asyncio.run(update(served.app, folder))
    assert status == 400 and answer["success"] is False and named in answer["message"]
    assert all(a is b for a, b in zip(before, served.runner.model_state_leaves, strict=True))
    info = asyncio.run(fake.request(served.app, "/model_info"))[1]
    assert info["weight_version"] == "step-0" and info["model_path"] == str(folders / "old")


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"model_path": "/nowhere"}, "/nowhere/config.json cannot be read"),
        ({"model_path": 7}, "needs model_path and weight_version as strings"),
        ({"flush_cache": False}, "flush_cache must be true"),
    ],
)
def test_an_update_that_cannot_be_meant_is_refused(folders, change, sentence):
    status, answer = asyncio.run(update(serve(folders / "old").app, folders / "new", **change))
    assert status == 400 and sentence in answer["message"]


def test_a_tied_model_may_repeat_its_embedding_but_not_change_it(tmp_path):
    config = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    hf_io.save(tmp_path, config, policy(config, 0))
    module = serve(tmp_path, config=config)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding}, tmp_path / "model.safetensors")
    assert asyncio.run(update(module.app, tmp_path))[0] == 200
    save_file({**tensors, "lm_head.weight": embedding + 1}, tmp_path / "model.safetensors")
    status, answer = asyncio.run(update(module.app, tmp_path))
    assert status == 400 and "lm_head.weight is not model.embed_tokens.weight" in answer["message"]


def test_a_request_never_sees_two_versions(folders):
    async def run():
        app = serve(folders / "old").app
        prompts = [[i, i + 1] for i in range(6)]
        first = [asyncio.create_task(fake.request(app, "/generate", body(p, 12))) for p in prompts]
        await asyncio.sleep(0.01)
        change = asyncio.create_task(update(app, folders / "new"))
        while not change.done():  # requests keep arriving while the update reads, waits and switches
            prompt = prompts[len(first) % 6]
            first.append(asyncio.create_task(fake.request(app, "/generate", body(prompt, 12))))
            await asyncio.sleep(0.02)
        assert change.result()[0] == 200
        first.append(asyncio.create_task(fake.request(app, "/generate", body(prompts[len(first) % 6], 12))))
        return prompts, [(await task)[1] for task in first]

    prompts, answers = asyncio.run(run())
    expected = {("step-0", i): greedy(folders / "old", p, 12) for i, p in enumerate(prompts)}
    expected |= {("step-1", i): greedy(folders / "new", p, 12) for i, p in enumerate(prompts)}
    versions = set()
    for i, answer in enumerate(answers):
        version = answer["meta_info"]["weight_version"]
        versions.add(version)
        ids, logprobs = expected[version, i % 6]
        assert answer["output_ids"] == ids
        got = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        np.testing.assert_allclose(got, logprobs, atol=1e-5)
    assert versions == {"step-0", "step-1"}


def test_paused_requests_wait_and_are_answered_by_the_new_weights(folders):
    async def run():
        app = serve(folders / "old").app
        assert (await fake.request(app, "/pause_generation", {"mode": "retract"}))[0] == 200
        waiting = asyncio.create_task(fake.request(app, "/generate", body()))
        await asyncio.sleep(0.05)
        assert "/generate" not in app.calls
        assert (await fake.request(app, "/health_generate"))[0] == 200  # no watcher takes it for dead
        assert (await update(app, folders / "new"))[0] == 200
        assert not waiting.done()
        await fake.request(app, "/continue_generation")
        is_answer_of((await waiting)[1], "step-1", folders / "new")
        assert (await fake.request(app, "/pause_generation", {"mode": "in_place"}))[0] == 400

    asyncio.run(run())


def test_an_update_gives_up_on_a_request_that_does_not_end(folders):
    async def run():
        app = serve(folders / "old", drain=0.1).app
        app.stall = asyncio.Event()
        hanging = asyncio.create_task(fake.request(app, "/generate", body()))
        await asyncio.sleep(0.01)
        status, answer = await update(app, folders / "new")
        assert status == 503 and answer["message"].startswith("1 request(s) still ran after 0.1 s")
        app.stall.set()
        is_answer_of((await hanging)[1], "step-0", folders / "old")
        is_answer_of((await fake.request(app, "/generate", body()))[1], "step-0", folders / "old")

    asyncio.run(run())


def test_weights_are_put_back_where_the_cache_cannot_be_flushed(folders):
    async def run():
        app = serve(folders / "old").app
        shim, app.can_flush = app.stack, False
        shim.flush = 0.1
        status, answer = await update(app, folders / "new")
        assert status == 500 and "did not flush its cache" in answer["message"]
        app.can_flush = True
        is_answer_of((await fake.request(app, "/generate", body()))[1], "step-0", folders / "old")

    asyncio.run(run())


def test_more_than_fifty_tokens_have_one_logprob_each(folders):
    status, answer = asyncio.run(fake.request(serve(folders / "old").app, "/generate", body(tokens=60)))
    assert status == 200
    is_answer_of(answer, "step-0", folders / "old", tokens=60)


def test_a_reused_rid_does_not_bring_back_old_output(folders):
    async def run():
        app = serve(folders / "old").app
        for _ in range(2):
            status, answer = await fake.request(app, "/generate", body(rid="mine"))
            is_answer_of(answer, "step-0", folders / "old")
            assert answer["meta_info"]["id"] == "mine"
        many = (await fake.request(app, "/generate", body([PROMPT, [1, 2]], rid=["a", "b"])))[1]
        assert [one["meta_info"]["id"] for one in many] == ["a", "b"]
        is_answer_of(many[1], "step-0", folders / "old", [1, 2])
        assert (await fake.request(app, "/generate", body([PROMPT, [1, 2]], rid=["a"])))[0] == 400

    asyncio.run(run())


def test_abort_reaches_the_request_under_its_inner_id(folders):
    async def run():
        app = serve(folders / "old").app
        app.stall = asyncio.Event()
        task = asyncio.create_task(fake.request(app, "/generate", body(rid="mine")))
        await asyncio.sleep(0.01)
        await fake.request(app, "/abort_request", {"rid": "mine"})
        await fake.request(app, "/abort_request", {"rid": "unknown"})
        app.stall.set()
        answer = (await task)[1]
        assert len(app.aborted) == 1 and app.aborted[0]["rid"] in app.by_rid
        await fake.request(app, "/abort_request", {"abort_all": True})
        assert app.aborted[1] == {"rid": "", "abort_all": True}
        return answer

    asyncio.run(run())


WRONG = st.one_of(
    st.integers(max_value=-1), st.integers(min_value=88), st.booleans(), st.none(), st.text(), st.floats()
)


@given(good=st.lists(st.integers(0, 87)), wrong=WRONG, at=st.integers(0, 9), batch=st.booleans())
def test_no_id_outside_the_vocabulary_gets_through(good, wrong, at, batch):
    ids = [*good[:at], wrong, *good[at:]]
    with pytest.raises(Refused, match="is no token id of this model, whose vocabulary is 0 to 87"):
        check_prompts({"input_ids": [[1], ids] if batch else ids}, 88)


@given(prompts=st.lists(st.lists(st.integers(0, 87), min_size=1), min_size=1))
def test_ids_of_the_vocabulary_get_through(prompts):
    assert check_prompts({"input_ids": prompts}, 88) == prompts
    assert check_prompts({"input_ids": prompts[0]}, 88) == prompts[:1]


@pytest.mark.parametrize(
    "sent, sentence",
    [
        ({"text": "hello"}, "no text is tokenised here"),
        ({"input_ids": []}, "not empty"),
        ({"input_ids": [[1], []]}, "not empty"),
        ({"input_ids": [1], "stream": True}, "leave stream out"),
    ],
)
def test_prompts_that_are_none_never_reach_the_server(folders, sent, sentence):
    app = serve(folders / "old").app
    status, answer = asyncio.run(fake.request(app, "/generate", sent))
    assert status == 400 and sentence in answer["message"] and app.calls == []


@pytest.mark.parametrize(
    "ids, logprobs, sentence",
    [
        ([1, 2], [[-1.0, 1, None]], "are not those of its output_ids"),
        ([1, 2], [[-1.0, 2, None], [-1.0, 1, None]], "are not those of its output_ids"),
        ([1], [[-1.0, 1, None]], "completion_tokens=2 but gave 1 output_ids"),
    ],
)
def test_an_answer_that_contradicts_itself_is_an_error(ids, logprobs, sentence):
    answer = {"output_ids": ids, "meta_info": {"completion_tokens": 2, "output_token_logprobs": logprobs}}
    with pytest.raises(Refused, match=sentence):
        mend(answer, "v", None, True)


@pytest.mark.parametrize(
    "path",
    [
        "tp_worker",
        "tp_worker.worker.model_runner",
        "tp_worker.worker.model_runner.model",
        "tp_worker.worker.model_runner.model_state_leaves",
    ],
)
def test_another_build_of_sglang_jax_fails_by_name(folders, path):
    module = fake.http_server(folders / "old", CONFIG)
    *parents, name = path.split(".")
    owner = module.scheduler
    for parent in parents:
        owner = getattr(owner, parent)
    delattr(owner, name)
    with pytest.raises(RuntimeError, match=rf"no \w+\.{name}, which weight") as told:
        server.SglangJax({"scheduler": module.scheduler})
    (page,) = re.findall(r"commits named in (\S+) ", str(told.value))
    assert re.search(r"at commit [0-9a-f]{8}", (ROOT / page).read_text())
    with pytest.raises(RuntimeError, match=r"no scheduler_info\['scheduler'\]"):
        server.SglangJax({"status": "ready"})


@pytest.mark.parametrize("new", [True, False])
def test_main_starts_the_server_in_one_process_without_tokenizer(folders, monkeypatch, new):
    """Covers both ways in which versions of sglang-jax read their options."""
    seen = []

    def read(argv):
        seen.append(argv)
        off = {"enable_single_process": False, "skip_tokenizer_init": False}
        return SimpleNamespace(model_path=argv[0].split("=")[1], **off)

    args = ModuleType("sgl_jax.srt.server_args")
    args.ServerArgs = SimpleNamespace(from_cli=lambda: read(sys.argv[1:])) if new else object
    args.prepare_server_args = read
    http = fake.http_server(folders / "old", CONFIG)
    launched, launch = [], http.launch
    http.launch = lambda server_args: (launched.append(server_args), launch(server_args))
    monkeypatch.setitem(sys.modules, "sgl_jax.srt.server_args", args)
    monkeypatch.setitem(sys.modules, "sgl_jax.srt.entrypoints.http_server", http)
    for package in ("sgl_jax", "sgl_jax.srt", "sgl_jax.srt.entrypoints"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setattr(sys, "argv", ["server"])
    server.main([f"--model-path={folders / 'old'}", "--weight-version=step-7", "--tp-size=4"])
    assert seen == [[f"--model-path={folders / 'old'}", "--tp-size=4"]]
    assert launched[0].enable_single_process and launched[0].skip_tokenizer_init
    info = asyncio.run(fake.request(http.app, "/server_info"))[1]
    assert info == {
        "pp_size": 1,
        "quantization": None,
        "model_path": str(folders / "old"),
        "enable_single_process": True,
        "skip_tokenizer_init": True,
        "weight_version": "step-7",
    }


def test_main_without_sglang_jax_says_so():
    with pytest.raises(SystemExit, match=r"^Error: sgl_jax.srt.server_args cannot be imported"):
        server.main(["--model-path=x"])
