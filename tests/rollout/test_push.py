"""Weight pushes, as far as they need no server."""

import asyncio
import dataclasses
import re
import sys

import aiohttp
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from aiohttp import web

from coevolve_jax.models import hf_io
from coevolve_jax.rollout.engine import EngineError
from coevolve_jax.rollout.sglang import checksum, push, weights
from coevolve_jax.rollout.sglang.weights import Tensor

SPECS = {name: Tensor("float32", (4, 2)) for name in ("model.embed_tokens.weight", "a.weight", "b.weight")}


def random_params(config, seed=0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    draw = lambda p: jnp.asarray(rng.normal(0, 0.15, p.shape), p.dtype)
    return jax.tree.map(draw, hf_io.abstract_params(config, dtype))


# ---- Checksums ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, dtype, expected",
    [
        (5, "float32", "3b2e36e59c8c16da"),
        (8192, "float32", "1b971f5055551094"),
        (20001, "float32", "96b07f72052153c0"),
        (70001, "float16", "1e28b2016e4c05bf"),
    ],
)
def test_gpu_digest_is_that_of_sglang(size, dtype, expected):
    """The expected values come from SGLang 0.5.23's gpu_tensor_hash in Triton's interpreter."""
    array = ((np.arange(size) * 0.37) % 3 - 1.5).astype(dtype)
    assert checksum.digest_gpu([array]) == expected


@hypothesis.settings(deadline=None, max_examples=20)
@hypothesis.given(st.binary(min_size=1, max_size=60_000), st.data())
def test_gpu_digest_depends_on_every_byte_and_on_no_boundary(data, draw):
    array = np.frombuffer(data, np.uint8)
    cut = draw.draw(st.integers(0, len(array)))
    assert checksum.digest_gpu([array[:cut], array[cut:]]) == checksum.digest_gpu([array])
    other = array.copy()
    other[draw.draw(st.integers(0, len(array) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    assert checksum.digest_gpu([other]) != checksum.digest_gpu([array])


def test_checksums_need_a_known_device():
    with pytest.raises(ValueError, match="'xpu'"):
        checksum.checksums([], None, "xpu")


# ---- Folders and arrays ---------------------------------------------------------------------------------


VARIANTS = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "experts": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
    },
    "biases": {"model_type": "qwen2"},
    "llama": {"model_type": "llama"},
}


@pytest.mark.parametrize(
    "variant, dtype",
    [
        ("tied", "float32"),
        ("untied", "bfloat16"),
        ("experts", "bfloat16"),
        ("biases", "float32"),
        ("llama", "bfloat16"),
    ],
)
def test_both_transports_carry_the_same_tensors(tiny_config, tmp_path, variant, dtype):
    config = dataclasses.replace(tiny_config, **VARIANTS[variant])
    params = random_params(config)
    folder = weights.Folders(tmp_path).write(config, params, 3, dtype)
    arrays = weights.from_params(config, params, 3, dtype)
    assert folder.tensors() == arrays.tensors()
    assert (hf_io.HEAD in folder.tensors()) == (not config.tie_word_embeddings)
    with folder.reader() as left, arrays.reader() as right:
        for name, tensor in folder.tensors().items():
            value = np.asarray(right(name))
            assert (value.dtype.name, value.shape) == tensor
            np.testing.assert_array_equal(left(name), value)
        for size in (1, 5_000, 2**30):  # bytes of a bucket: one tensor, some, all
            buckets = [(names, list(blocks)) for names, blocks in arrays.buckets(size)]
            assert [name for names, _ in buckets for name in names] == list(arrays.tensors())
            assert len(buckets) == {1: len(folder.tensors()), 2**30: 1}.get(size, len(buckets))
            for names, blocks in buckets:
                expected = b"".join(left(name).tobytes() for name in names)
                assert b"".join(np.asarray(block).tobytes() for block in blocks) == expected
                assert len(names) == 1 or len(expected) <= size
        assert len(blocks) < len(names)  # layers and experts of a parameter together


def test_a_tied_head_in_the_file_is_no_tensor_of_its_own(tiny_config, tmp_path):
    params = random_params(tiny_config)
    folder = weights.Folders(tmp_path).write(tiny_config, params, 0, "float32")
    plain = folder.tensors()
    with folder.reader() as read:
        arrays = {name: np.array(read(name)) for name in plain}
    for name in (hf_io.HEAD, hf_io.EMBEDDING):  # repeated; then only under the head's name
        arrays[hf_io.HEAD] = arrays[hf_io.EMBEDDING]
        hf_io.save_file(arrays, folder.folder / hf_io.WEIGHTS)
        assert folder.tensors() == plain
        arrays.pop(name, None)


def test_the_last_two_versions_stay(tiny_config, tmp_path):
    folders, params = weights.Folders(tmp_path / "push"), random_params(tiny_config)
    for version in (7, 8, 9, 3):  # the run resumed from an older checkpoint
        written = folders.write(tiny_config, params, version, "float32")
        assert written.folder == tmp_path / "push" / f"version-{version}" and written.version == version
    assert sorted(path.name for path in (tmp_path / "push").iterdir()) == ["owner", "version-3", "version-9"]


def test_a_version_written_again_replaces_its_folder(tiny_config, tmp_path):
    folders = weights.Folders(tmp_path)
    old = folders.write(tiny_config, random_params(tiny_config, 0), 1, "float32")
    (old.folder / "more.safetensors").write_bytes(b"which a server would load")
    params = random_params(tiny_config, 1)
    written = folders.write(tiny_config, params, 1, "float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["owner", "version-1"]
    assert not (written.folder / "more.safetensors").exists()
    jax.tree.map(np.testing.assert_array_equal, hf_io.load(written.folder)[1], params)


def test_a_root_takes_the_weights_of_one_process_at_a_time(tiny_config, tmp_path):
    one, other = weights.Folders(tmp_path), weights.Folders(tmp_path)
    params = random_params(tiny_config, 0)
    written = one.write(tiny_config, params, 1, "float32")
    with pytest.raises(ValueError, match=f"Another process writes its weights to {tmp_path}: name another"):
        other.write(tiny_config, random_params(tiny_config, 1), 1, "float32")
    jax.tree.map(np.testing.assert_array_equal, hf_io.load(written.folder)[1], params)
    one.write(tiny_config, params, 2, "float32")
    one.close()
    for version in (3, 4):  # which deletes those that the first left
        other.write(tiny_config, params, version, "float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["owner", "version-3", "version-4"]


def test_a_temporary_root_is_deleted(tiny_config):
    folders = weights.Folders()
    root = folders.write(tiny_config, random_params(tiny_config), 1, "float32").folder.parent
    assert root.is_dir()
    folders.close()
    assert not root.exists()


def test_what_a_killed_process_left_is_deleted_by_the_next(tiny_config, tmp_path):
    params = random_params(tiny_config)
    for left in (".version-5-x1y2", ".old-z3"):  # killed in mid-write, and in mid-deletion
        (tmp_path / left).mkdir()
        (tmp_path / left / "model.safetensors").write_bytes(b"half")
    weights.Folders(tmp_path).write(tiny_config, params, 6, "float32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["owner", "version-6"]

    alive, killed = weights.Folders(), weights.Folders()
    kept, gone = (f.write(tiny_config, params, 1, "float32").folder.parent for f in (alive, killed))
    killed._owned.close()  # the system does this for a process that ends
    other = weights.Folders()
    assert other.write(tiny_config, params, 1, "float32").folder.exists()
    assert kept.exists() and not gone.exists()
    for folders in (alive, other):
        folders.close()
    assert not kept.exists()


# ---- What does not fit ----------------------------------------------------------------------------------


@hypothesis.given(
    name=st.sampled_from(sorted(SPECS)),
    shape=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    dtype=st.sampled_from(["float32", "bfloat16", "F8_E4M3"]),
)
def test_differences_name_what_differs(name, shape, dtype):
    faults = weights.differences(SPECS | {name: Tensor(dtype, shape)}, SPECS)
    assert len(faults) >= (shape != (4, 2)) + (dtype != "float32")
    assert bool(faults) == ((dtype, shape) != SPECS[name])
    assert all(name in fault or "vocabulary" in fault for fault in faults)


def test_differences_name_missing_and_unknown_tensors_and_the_vocabulary():
    ours = {
        "a.weight": SPECS["a.weight"],
        "c.weight": SPECS["a.weight"],
        "model.embed_tokens.weight": Tensor("float32", (5, 2)),
    }
    assert weights.differences(ours, SPECS) == [
        "the vocabulary has 5 tokens instead of 4",
        "b.weight is missing",
        "c.weight is unknown there",
        "model.embed_tokens.weight has shape (5, 2) instead of (4, 2)",
    ]
    many = {f"{i}.weight": SPECS["a.weight"] for i in range(20)}
    assert weights.differences({}, many)[-1] == "and 12 more"


def test_settings_that_cannot_work(tiny_config, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="'carrier pigeon' of weights is unknown"):
        push.Pusher(tiny_config, tmp_path, transport="carrier pigeon")
    monkeypatch.delitem(sys.modules, "coevolve_jax.rollout.sglang.broadcast", raising=False)
    monkeypatch.delattr("coevolve_jax.rollout.sglang.broadcast", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="needs torch .* set the transport to 'disk'"):
        push.Pusher(tiny_config, tmp_path, transport="distributed")


# ---- Servers that are none ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer, said",
    [
        (
            web.Response(text="<html>proxy</html>", content_type="text/html"),
            "status 200: '<html>proxy</html>'",
        ),
        (web.Response(status=500, text="boom"), "status 500: 'boom'"),
        (web.json_response([1]), r"status 200: '\[1\]'"),
        (
            web.Response(body=b"\xff\xfe", content_type="application/json", charset="utf-8"),
            "cannot be reached",
        ),
        (web.json_response({"success": False, "message": "no"}, status=400), "status 400: 'no'"),
        (web.json_response({"weight_version": "0"}), "no SGLang server of a known version"),
        (None, "unanswered for 0.2 s"),
    ],
)
def test_a_server_that_answers_nonsense_is_told_so_and_gets_nothing(
    tiny_config, tmp_path, monkeypatch, answer, said
):
    if answer is None:
        monkeypatch.setattr(push, "CONTROL_TIMEOUT", 0.2)
    posted, over = [], None

    async def handle(request):
        posted.append(request.method)
        if answer is None:
            await over.wait()
        return web.Response(status=answer.status, body=answer.body, headers=answer.headers.copy())

    async def run():
        nonlocal over
        over = asyncio.Event()
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(application, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        pusher = push.Pusher(tiny_config, tmp_path / "version-1", root=tmp_path)
        prepared = pusher.write(random_params(tiny_config), 1)
        try:
            async with aiohttp.ClientSession() as session:
                await pusher.push(session, f"http://127.0.0.1:{port}", prepared)
        finally:
            over.set()
            await runner.cleanup()

    with pytest.raises(EngineError, match=said) as error:
        asyncio.run(run())
    assert "\n" not in str(error.value)
    assert set(posted) == {"GET"}


SENT = {"a": "0" * 16, "b": "1" * 16, "c": "2" * 16}
OTHER = SENT | {"b": "f" * 16}
MISSING = {name: digest for name, digest in SENT.items() if name != "b"}
MORE = SENT | {"lora.b": "3" * 16}


@pytest.mark.parametrize(
    "ranks, wrong",
    [
        ([SENT], None),
        ([SENT, SENT], None),
        ([OTHER], "1 of 3 parameters .* checksums: b[.]"),
        ([MISSING], "1 of 3 parameters .* checksums: b[.]"),
        ([MORE], "1 of 4 parameters .* checksums: lora.b[.]"),
        ([SENT, MORE], "1 of 4 parameters .* checksums: lora.b[.]"),
        ([MISSING, SENT], "1 of 3 parameters .* checksums: b[.]"),
        ([OTHER | {"lora.b": ""}, SENT], "2 of 4 parameters .* checksums: b, lora.b[.]"),
        ([{}], "3 of 3 parameters .* checksums: a, b, c[.]"),
    ],
)
def test_a_server_holds_the_tensors_that_were_sent_and_no_others(tiny_config, tmp_path, ranks, wrong):
    """On every rank, a missing and an additional tensor both mean that the weights did not arrive."""

    async def handle(request):
        assert request.path == "/weights_checker"
        return web.json_response(
            {"per_engine_checksum": "total", "ranks": [{"checksums": rank} for rank in ranks]}
        )

    async def verified(url):
        pusher = push.Pusher(tiny_config, tmp_path, root=tmp_path)
        prepared = pusher.write(random_params(tiny_config), 4)
        known = push.Server({}, "cpu", (), len(ranks), True, None, "3", "before")
        async with aiohttp.ClientSession() as session:
            return await pusher._verify(session, url, known, prepared, SENT)

    if wrong:
        with pytest.raises(EngineError, match=wrong):
            asyncio.run(beside(handle, verified))
    else:
        server = asyncio.run(beside(handle, verified))
        assert server.version.startswith("4-") and server.checksum == "total" and server.content is not None


def test_a_label_is_a_version_to_its_own_pusher_alone(tiny_config, tmp_path):
    one, other = (push.Pusher(tiny_config, tmp_path) for _ in range(2))
    label = one.label(weights.FolderWeights(tmp_path, 7))
    assert one.version_of("http://h", label) == 7
    with pytest.raises(EngineError, match="to the SGLang server at http://h, as '7-.*its own servers"):
        other.version_of("http://h", label)
    for launched in ("launched", "default", "7", "", "-" + label, label + "\n"):
        with pytest.raises(ValueError, match="no push gave the label"):
            one.version_of("http://h", launched)


async def beside(handle, body):
    """Runs `body` with the address of a server that answers by `handle`; returns its result."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(application, shutdown_timeout=0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return await body(f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


def test_a_server_that_is_not_there(tiny_config, tmp_path):
    async def run():
        pusher = push.Pusher(tiny_config, tmp_path / "version-1", root=tmp_path)
        async with aiohttp.ClientSession() as session:
            await pusher.push(session, "http://127.0.0.1:9", pusher.write(random_params(tiny_config), 1))

    with pytest.raises(EngineError, match=re.escape("server at http://127.0.0.1:9 cannot be reached")):
        asyncio.run(run())
