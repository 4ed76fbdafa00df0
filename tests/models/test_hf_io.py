"""Checkpoints: round trips, transformers reading our files, and refusals."""

import dataclasses
import filecmp
import json
import os
import resource
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from coevolve_jax.distributed import sharding
from coevolve_jax.models import hf_io
from coevolve_jax.models.decoder import Decoder, ModelConfig
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


def random_params(config):
    rng = np.random.default_rng(0)
    draw = lambda p: jnp.asarray(rng.normal(0, 0.15, p.shape), p.dtype)
    return jax.tree.map(draw, hf_io.abstract_params(config))


@pytest.fixture
def params(tiny_config):
    return random_params(tiny_config)


@pytest.fixture
def folder(tmp_path, tiny_config, params):
    hf_io.save(tmp_path / "model", tiny_config, params)
    return tmp_path / "model"


def assert_equal_trees(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def hf_config(**changes) -> dict:
    """A config.json in the form of transformers 4."""
    return {
        "model_type": "qwen2",
        "vocab_size": 88,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "use_sliding_window": False,
    } | changes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "attention_bias": True, "eos_token_id": (3, 4), "bos_token_id": 1},
        {"model_type": "qwen2", "head_dim": 8},
        {"model_type": "llama", "mlp_bias": True, "attention_bias": True},
    ],
)
def test_round_trip(tiny_config, tmp_path, changes):
    config = dataclasses.replace(tiny_config, **changes)
    params = random_params(config)
    hf_io.save(tmp_path / "new" / "model", config, params)
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["model"]  # no temporary folder remains
    loaded, again = hf_io.load(tmp_path / "new" / "model")
    assert loaded == config
    assert_equal_trees(again, params)


def test_bfloat16_in_the_file_and_in_memory(tiny_config, params, tmp_path):
    hf_io.save(tmp_path / "model", tiny_config, params, dtype=jnp.bfloat16)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert {str(t.dtype) for t in stored.values()} == {"bfloat16"}
    rounded = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    assert_equal_trees(hf_io.load(tmp_path / "model", dtype=jnp.bfloat16)[1], rounded)
    widened = jax.tree.map(lambda p: p.astype(jnp.float32), rounded)
    assert_equal_trees(hf_io.load(tmp_path / "model")[1], widened)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_type": "qwen2", "head_dim": 8, "tie_word_embeddings": False},
        {"model_type": "llama", "hidden_size": 32, "mlp_bias": True},
    ],
    ids=["qwen3", "qwen2", "llama"],
)
def test_transformers_loads_what_we_save(tiny_config, tmp_path, dtype, changes):
    torch = pytest.importorskip("torch")
    import transformers

    config = dataclasses.replace(tiny_config, **changes)
    params = random_params(config)
    hf_io.save(tmp_path / "model", config, params, dtype=dtype)
    reference, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    assert type(reference).__name__.lower() == f"{config.model_type}forcausallm"
    assert str(reference.dtype) == f"torch.{dtype}"
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 11))
    with torch.no_grad():
        expected = reference.float()(torch.tensor(tokens)).logits.numpy()
    loaded, params = hf_io.load(tmp_path / "model")
    logits = jax.jit(Decoder(loaded).apply)({"params": params}, tokens)
    np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [{}, {"model_type": "qwen2", "head_dim": 8, "tie_word_embeddings": False}],
    ids=["qwen3", "qwen2"],
)
def test_transformers_loads_a_model_of_several_files(tiny_config, tmp_path, changes):
    torch = pytest.importorskip("torch")
    import transformers

    config = dataclasses.replace(tiny_config, **changes)
    params = random_params(config)
    hf_io.save(tmp_path / "model", config, params, max_shard_bytes=30_000)
    files = sorted(p.name for p in (tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((tmp_path / "model" / f).stat().st_size < 30_000 + 4_000 for f in files)  # and the header
    reference, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not any(report.values()), report
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 11))
    with torch.no_grad():
        expected = reference.float()(torch.tensor(tokens)).logits.numpy()
    loaded, again = hf_io.load(tmp_path / "model")
    assert_equal_trees(again, params)
    logits = jax.jit(Decoder(loaded).apply)({"params": again}, tokens)
    np.testing.assert_allclose(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("limit", [1, 3_000, 30_000, 10**9])
def test_files_hold_every_tensor_once_and_no_more_than_asked(tiny_config, limit):
    entries = hf_io.entries_of(tiny_config, hf_io.abstract_params(tiny_config))
    files = hf_io.split(entries, np.dtype(np.float32), limit)
    names = [name for file in files for name in file]
    assert sorted(names) == sorted(name for entry in entries for name in entry.names.flat)
    size = lambda name, file: 4 * int(np.prod(file[name][0].tensor_shape))
    assert all(len(f) == 1 or sum(size(n, f) for n in f) <= limit for f in files)


def test_several_files_take_the_place_of_one_and_one_of_several(folder, tiny_config, params):
    hf_io.save(folder, tiny_config, params, max_shard_bytes=60_000)
    few = {p.name for p in folder.iterdir()}
    assert hf_io.WEIGHTS not in few and hf_io.INDEX in few
    doubled = jax.tree.map(lambda p: 2 * p, params)
    hf_io.save(folder, tiny_config, doubled, max_shard_bytes=20_000)
    assert len(list(folder.iterdir())) > len(few) and not few & {p.name for p in folder.glob(hf_io.SHARDS)}
    assert_equal_trees(hf_io.load(folder)[1], doubled)
    hf_io.save(folder, tiny_config, params)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert_equal_trees(hf_io.load(folder)[1], params)


def test_a_replacement_cut_short_leaves_no_mixture(folder, tiny_config, params, monkeypatch):
    hf_io.save(folder, tiny_config, params, max_shard_bytes=20_000)
    replace, seen = os.replace, []

    def stopping(source, target):
        seen.append(source)
        if len(seen) == 3:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", stopping)
    with pytest.raises(KeyboardInterrupt):
        hf_io.save(folder, tiny_config, jax.tree.map(lambda p: 2 * p, params), max_shard_bytes=20_000)
    with pytest.raises(ValueError, match="holds neither"):
        hf_io.load(folder)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_any_dtype_of_the_file(folder, params, dtype):
    tensors = {k: v.astype(dtype) for k, v in load_file(folder / "model.safetensors").items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float64)  # files may mix types
    save_file(tensors, folder / "model.safetensors")
    rounded = jax.tree.map(lambda p: p.astype(dtype).astype(jnp.bfloat16), params)
    rounded["norm"]["scale"] = params["norm"]["scale"].astype(dtype).astype(jnp.bfloat16)
    assert_equal_trees(hf_io.load(folder, dtype=jnp.bfloat16)[1], rounded)


def test_experts_are_stacked_by_layer_and_expert(tmp_path, tiny_config):
    config = dataclasses.replace(
        tiny_config,
        model_type="qwen3_moe",
        attention_bias=False,
        num_hidden_layers=4,
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=5,
        decoder_sparse_step=2,
        mlp_only_layers=(1,),
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), hf_io.abstract_params(config)
    )
    hf_io.save(tmp_path / "model", config, params)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    up = params["layers"]["mlp"]["experts"]["up_proj"]["kernel"]
    assert up.shape[:2] == (1, 3)  # the first of layers 1 and 3 is dense
    for e in range(3):
        np.testing.assert_array_equal(tensors[f"model.layers.3.mlp.experts.{e}.up_proj.weight"], up[0, e].T)
    np.testing.assert_array_equal(
        tensors["model.layers.2.mlp.up_proj.weight"], params["layers"]["mlp"]["up_proj"]["kernel"][2].T
    )
    for mesh in (None, sharding.make_mesh()):
        assert_equal_trees(hf_io.load(tmp_path / "model", mesh=mesh)[1], params)


@pytest.mark.parametrize("block", [10**9, 1_000])
def test_a_stack_comes_from_the_device_in_blocks(tmp_path, tiny_config, monkeypatch, block):
    """Few transfers give the bytes of host arrays, which are cast as views."""
    config = dataclasses.replace(
        tiny_config, model_type="qwen3_moe", num_experts=3, num_experts_per_tok=2, moe_intermediate_size=5
    )
    params, to_host, sizes = random_params(config), hf_io._to_host, []
    hf_io.save(tmp_path / "host", config, jax.tree.map(np.asarray, params), jnp.bfloat16)

    def counting(*arguments):
        sizes.append((arguments[2], (array := to_host(*arguments)).nbytes))
        return array

    monkeypatch.setattr(hf_io, "BLOCK", block)
    monkeypatch.setattr(hf_io, "_to_host", counting)
    hf_io.save(tmp_path / "device", config, params, jnp.bfloat16)
    names = ["config.json", "model.safetensors"]
    assert filecmp.cmpfiles(tmp_path / "host", tmp_path / "device", names, shallow=False)[0] == names
    assert all(nbytes <= block or count == 1 for count, nbytes in sizes)
    stacks = len(jax.tree.leaves(params)) - 3 + 3 * config.num_hidden_layers  # experts come by the layer
    assert len(sizes) == stacks if block > 1_000 else len(sizes) > stacks


MEMORY = """
import mmap, sys, jax
from coevolve_jax.models import hf_io
def status(name):
    text = open("/proc/self/status").read()
    return 1024 * int(text.split(name + ":")[1].split()[0])
hf_io.load(sys.argv[1])  # compiles, and starts all threads
# The kernel keeps the peak. Reserved addresses bring the size up to it, \
so that what is more from now on moves it.
reserved = mmap.mmap(-1, status("VmPeak") - status("VmSize") + 4096, flags=mmap.MAP_PRIVATE, prot=0)
before = status("VmSize")
assert before == status("VmPeak")
_, params = hf_io.load(sys.argv[1])
print(status("VmPeak") - before, sum(p.nbytes for p in jax.tree.leaves(params)))
"""


def test_loading_takes_no_more_host_memory_than_the_parameters_and_two_tensors(tmp_path, tiny_config):
    """On the CPU the parameters are host memory themselves; a second copy of a stack would add a third.

    The test counts the peak of the process's mapped memory beside the files. Each tensor is a mapping of its
    own (glibc's thresholds fixed, one arena), so neither the allocator's habits nor other processes matter.
    """
    config = dataclasses.replace(tiny_config, num_hidden_layers=12, hidden_size=512, intermediate_size=2048)
    params = jax.tree.map(lambda p: np.ones(p.shape, np.float32), hf_io.abstract_params(config))
    hf_io.save(tmp_path / "model", config, params, max_shard_bytes=10**8)
    files = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    env |= {"PYTHONPATH": str(ROOT)}
    env |= {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    program = [sys.executable, "-c", MEMORY, str(tmp_path / "model")]
    grown, target = map(int, subprocess.run(program, check=True, capture_output=True, env=env).stdout.split())
    largest = 512 * 2048 * 4
    stack = 12 * largest
    assert target > 3 * stack
    assert target <= grown - files < target + 2 * largest + 10 * 2**20 < target + stack


def test_sharded_safetensors(folder, params):
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in names if files[n] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert_equal_trees(hf_io.load(folder)[1], params)

    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00002.safetensors cannot be read"):
        hf_io.load(folder)


def test_saving_again_replaces_the_weights_and_keeps_the_tokenizer(folder, tiny_config, params):
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model-00001-of-00002.safetensors").write_text("stale")
    (folder / "model.safetensors.index.json").write_text("stale")
    doubled = jax.tree.map(lambda p: 2 * p, params)
    hf_io.save(folder, tiny_config, doubled)
    assert_equal_trees(hf_io.load(folder)[1], doubled)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_weights_are_readable_as_the_umask_says(tiny_config, params, tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        hf_io.save(tmp_path / "model", tiny_config, params, max_shard_bytes=60_000)
    finally:
        os.umask(before)
    files = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert len(files) > 3 and set(files.values()) == {mode}, files


@pytest.mark.parametrize(
    "told, dtype",
    [
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float8_e4m3fn"}, "float32"),
        ({}, "float32"),
    ],
)
def test_the_dtype_of_a_folder_is_that_of_its_config(tmp_path, told, dtype):
    (tmp_path / "config.json").write_text(json.dumps(told))
    assert hf_io.dtype_of(tmp_path) == dtype
    with pytest.raises(ValueError, match="has no config.json"):
        hf_io.dtype_of(tmp_path / "none")


def test_a_save_that_fails_leaves_the_old_model(folder, tiny_config, params, monkeypatch):
    def full_disk(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(hf_io, "save_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        hf_io.save(folder, tiny_config, jax.tree.map(lambda p: 2 * p, params))
    assert_equal_trees(hf_io.load(folder)[1], params)
    assert [p.name for p in folder.parent.iterdir()] == ["model"]


def test_all_wrong_tensors_are_listed_at_once(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"]
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    tensors["model.norm.weight"] = np.zeros(31, np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError) as error:
        hf_io.load(folder)
    text = str(error.value)
    assert "model.layers.3.mlp.up_proj.weight is unknown" in text
    assert "model.layers.1.self_attn.q_norm.weight is missing" in text
    assert "model.norm.weight has shape (31,) instead of (32,)" in text
    assert text.count(";") == 2


def test_the_frequencies_of_old_folders_are_passed_over(folder, params):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    save_file(tensors, folder / "model.safetensors")
    assert_equal_trees(hf_io.load(folder)[1], params)


def test_a_tied_model_may_repeat_its_embedding(folder, params):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert_equal_trees(hf_io.load(folder)[1], params)
    del tensors["model.embed_tokens.weight"]  # transformers takes the other one then
    save_file(tensors, folder / "model.safetensors")
    assert_equal_trees(hf_io.load(folder)[1], params)


def test_a_tied_model_with_another_head_is_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="lm_head.weight is not model.embed_tokens.weight, though"):
        hf_io.load(folder)


def test_a_folder_that_is_no_model(tmp_path, folder):
    with pytest.raises(ValueError, match="is not a Hugging Face model folder"):
        hf_io.load(tmp_path / "nowhere")
    (folder / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ValueError, match="model.safetensors cannot be read"):
        hf_io.load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds neither model.safetensors nor"):
        hf_io.load(folder)
    for index in ("{", "[]", '{"metadata": {}}', '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'):
        (folder / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ValueError, match="model.safetensors.index.json is no index .*; restore the chec"):
            hf_io.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        hf_io.load(folder)


def test_config_in_both_places_of_rope_theta():
    old = ModelConfig.from_hf(hf_config())
    assert (old.rope_theta, old.head_dim, old.rms_norm_eps) == (1e6, 8, 1e-5)
    new = hf_config(rope_parameters={"rope_type": "default", "rope_theta": 5e6})
    assert ModelConfig.from_hf(new).rope_theta == 5e6
    del new["rope_theta"]
    assert ModelConfig.from_hf(new).rope_theta == 5e6
    assert ModelConfig.from_hf(hf_config(head_dim=20)).head_dim == 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen3_moe"}, "lacks num_experts, num_experts_per_tok, moe_intermediate_size"),
        ({"model_type": "gemma3"}, "model_type 'gemma3'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling type 'linear'"),
        ({"rope_scaling": {"type": "llama3", "factor": 4.0}}, "llama3 rope .* lacks low_freq_factor"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6}}, "rope_parameters type 'linear'"),
        ({"rope_theta": None}, "names no rope_theta"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"hidden_size": None, "vocab_size": None}, "lacks vocab_size, hidden_size"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 .* num_key_value_heads 3"),
    ],
)
def test_config_refuses_what_is_not_implemented(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        ModelConfig.from_hf(hf_config(**changes))
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


class Vocabulary:
    def __init__(self, largest: int):
        self.ids = {"a": 0, "b": largest}

    def get_vocab(self) -> dict[str, int]:
        return self.ids


def test_tokenizer_and_vocabulary_must_match(tiny_config):
    hf_io.check_tokenizer(tiny_config, Vocabulary(87))
    with pytest.raises(ValueError, match="token id 88, but the model's vocab_size is 88"):
        hf_io.check_tokenizer(tiny_config, Vocabulary(88))


def test_tensors_that_cannot_be_written_are_an_error_of_the_system(tmp_path):
    """A full disk raises safetensors' own error, which nobody who waits for OSError would see."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(OSError, match="big.safetensors cannot be written: .*File too large"):
            hf_io.save_tensors({"a": np.zeros(100_000, np.float32)}, tmp_path / "big.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
