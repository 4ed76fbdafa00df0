"""GGUF files against their originals and against transformers' own reader, and refusals."""

import builtins
import dataclasses
import json
import math

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from coevolve_jax.models import gguf_file, gguf_io, hf_io
from coevolve_jax.models.decoder import Decoder
from coevolve_jax.models.rope_scaling import Llama3Rope, Yarn
from tests.support import gguf_files
from tests.support.gguf_files import as_stored, config_of, random_tensors, write
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

KINDS = ("llama", "qwen2", "qwen3")
BIASED = {"attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, BIASED], ids=["plain", "tied", "biased"]
)
@pytest.mark.parametrize("quantisation", ["F32", "F16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_and_config_are_the_originals(tmp_path, kind, quantisation, changes):
    if kind != "llama":
        changes = {name: value for name, value in changes.items() if name == "tie_word_embeddings"}
    config = config_of(kind, **changes)
    tensors = random_tensors(config)
    file = write(tmp_path / "model.gguf", config, tensors, quantisation)
    done = gguf_io.convert(file, tmp_path / "new" / "model")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["model"]  # no temporary folder remains
    made, expected = (
        load_file(tmp_path / "new" / "model" / "model.safetensors"),
        as_stored(tensors, quantisation),
    )
    assert made.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(made[name], tensor, err_msg=name)
    loaded, _ = hf_io.load(tmp_path / "new" / "model")
    assert loaded == done.config == config
    assert done.bytes == (tmp_path / "new" / "model" / "model.safetensors").stat().st_size
    assert done.types.total() == len(tensors) and done.types[quantisation] >= 7 * config.num_hidden_layers


def test_a_quantised_tensor_is_not_the_original():
    """The equality above would show nothing if quantising changed nothing."""
    tensors = random_tensors(config_of("llama"))
    name = "model.layers.0.self_attn.q_proj.weight"
    errors = [
        np.abs(as_stored(tensors, kind)[name] - tensors[name]).max() for kind in ("F16", "Q8_0", "Q4_1")
    ]
    assert 0 < errors[0] < errors[1] < errors[2] < 0.1


def test_bfloat16_rounds(tmp_path):
    config = config_of("llama")
    tensors = random_tensors(config)
    gguf_io.convert(write(tmp_path / "a.gguf", config, tensors), tmp_path / "model", "bfloat16")
    made = load_file(tmp_path / "model" / "model.safetensors")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(made[name], tensor.astype(ml_dtypes.bfloat16))
    with open(tmp_path / "model" / "model.safetensors", "rb") as weights:
        assert int.from_bytes(weights.read(8), "little") % 8 == 0  # else they cannot be mapped to memory
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(tmp_path, kind):
    """The reference gets the original tensors, and reads the folder too."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    config = config_of(kind, **(BIASED if kind == "llama" else {}))
    tensors = random_tensors(config)
    folder = tmp_path / "model"
    gguf_io.convert(write(tmp_path / "a.gguf", config, tensors, "Q4_1"), folder)
    reference, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert type(reference).__name__.lower() == f"{kind}forcausallm"
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, 40))
    with torch.no_grad():
        read = reference(torch.tensor(ids)).logits.numpy()
        original = {name: torch.tensor(w) for name, w in as_stored(tensors, "Q4_1").items()}
        reference.load_state_dict(original, strict=not config.tie_word_embeddings)
        expected = reference(torch.tensor(ids)).logits.numpy()
    np.testing.assert_array_equal(read, expected)
    loaded, params = hf_io.load(folder)
    logits = jax.jit(Decoder(loaded).apply)({"params": params}, ids)
    np.testing.assert_allclose(logits, expected, atol=3e-5, rtol=0)
    assert np.std(expected) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("quantisation", ["F16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_the_same_from_the_file(tmp_path, kind, quantisation):
    pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = config_of(kind)
    file = write(tmp_path / "a.gguf", config, random_tensors(config), quantisation)
    gguf_io.convert(file, tmp_path / "model")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    theirs = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=ours)["tensors"]
    for name, tensor in load_file(tmp_path / "model" / "model.safetensors").items():
        np.testing.assert_array_equal(tensor, np.asarray(theirs[name]), err_msg=name)
    read = AutoConfig.from_pretrained(tmp_path, gguf_file="a.gguf")
    for name in ("hidden_size", "num_key_value_heads", "vocab_size", "max_position_embeddings", "model_type"):
        assert getattr(read, name) == getattr(ours.config, name), name
    text = "The rain of Spain, we'll say\n so."  # without digits, which transformers does not split here
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.encode(text) == again.encode(text)


# ---- Rotary embeddings -----------------------------------------------------------------------------------


def test_yarn(tmp_path):
    scaling = Yarn(4.0, 4096, beta_fast=24.0, beta_slow=2.0)
    more = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 4096,
        "qwen2.rope.scaling.yarn_beta_fast": 24.0,
        "qwen2.rope.scaling.yarn_beta_slow": 2.0,
    }
    config = config_of("qwen2")
    gguf_io.convert(write(tmp_path / "a.gguf", config, random_tensors(config), more=more), tmp_path / "model")
    assert hf_io.load_config(tmp_path / "model") == dataclasses.replace(config, rope_scaling=scaling)


def llama3_factors(factor: float, head_dim: int, theta: float, high: float = 4.0) -> np.ndarray:
    """By what llama.cpp's converter says that each frequency is divided."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < 8192 / high:
            factors.append(1.0)
        elif wavelength > 8192 / 1.0:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (high - 1.0)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("head_dim", [16, 128])
def test_llama_3s_scaling_is_recovered_from_its_factors(tmp_path, factor, head_dim):
    config = config_of("llama", head_dim=head_dim)
    factors = {"rope_freqs.weight": llama3_factors(factor, head_dim, config.rope_theta)}
    more = {"llama.attention.key_length": head_dim}
    gguf_io.convert(
        write(tmp_path / "a.gguf", config, random_tensors(config), more=more, extra=factors),
        tmp_path / "model",
    )
    scaling = Llama3Rope(factor, 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    assert hf_io.load_config(tmp_path / "model") == dataclasses.replace(config, rope_scaling=scaling)


@pytest.mark.parametrize(
    "factors", [llama3_factors(8.0, 16, 5e5, high=3.0), np.zeros(8, np.float32), np.ones(4, np.float32)]
)
def test_other_factors_are_refused(tmp_path, factors):
    config = config_of("llama")
    file = write(tmp_path / "a.gguf", config, random_tensors(config), extra={"rope_freqs.weight": factors})
    with pytest.raises(ValueError, match="rope_freqs.weight of .* is no scaling of a published Llama 3"):
        gguf_io.convert(file, tmp_path / "model")


# ---- Refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"architecture": "gemma"}, "'gemma' of .* is not supported; only llama, qwen2, qwen3 are"),
        ({"pre": "gpt-2"}, "ggml.pre 'gpt-2' .* not supported; only smollm, qwen2, llama-bpe are"),
        ({"more": {"tokenizer.ggml.model": "llama"}}, "tokenizer.ggml.model 'llama' .* only gpt2"),
        ({"more": {"tokenizer.ggml.pre": None}}, "lacks tokenizer.ggml.pre: "),
        ({"more": {"tokenizer.ggml.eos_token_id": 5000}}, "'eos': 5000.* do not fit"),
        ({"more": {"llama.block_count": None}}, "lacks llama.block_count: "),
        ({"leave_out": ("token_embd.weight",)}, "lacks token_embd.weight: "),
        ({"more": {"llama.attention.sliding_window": 4096}}, "llama.attention.sliding_window = 4096"),
        ({"more": {"llama.rope.dimension_count": 8}}, "asks for llama.rope.dimension_count = 8, "),
        ({"more": {"llama.rope.scaling.type": "linear"}}, "asks for llama.rope.scaling.type = 'linear', "),
        ({"more": {"llama.expert_count": 8}}, "asks for llama.expert_count = 8, "),
        ({"more": {"llama.rope.scaling.type": "yarn"}}, "lacks rope.scaling.factor: "),
        ({"more": {"split.count": 3}}, "is one of 3 parts: join them"),
        ({"more": {"llama.attention.head_count_kv": 3}}, "heads 4 .* multiple of num_key_value_heads 3"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_told_by_name(tmp_path, changes, why):
    config = config_of("llama")
    file = write(tmp_path / "a.gguf", config, random_tensors(config), **changes)
    with pytest.raises(ValueError, match=why):
        gguf_io.convert(file, tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]


def test_one_error_lists_all_tensors_that_do_not_fit(tmp_path):
    config = config_of("qwen2")
    tensors = random_tensors(config)
    tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((96, 32), np.float32)
    lacking = ("blk.0.attn_q.bias", "blk.1.ffn_norm.weight")
    extra = {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}
    file = write(tmp_path / "a.gguf", config, tensors, leave_out=lacking, extra=extra)
    with pytest.raises(ValueError) as error:
        gguf_io.convert(file, tmp_path / "model")
    assert str(error.value).endswith(
        "do not fit its metadata: blk.0.attn_q.bias is missing; blk.0.attn_q_norm.weight is unknown; "
        "blk.1.ffn_norm.weight is missing; blk.1.ffn_up.weight has shape (96, 32) instead of (96, 64)."
    )


def test_a_damaged_file_is_one_sentence(tmp_path):
    config = config_of("llama")
    whole = write(tmp_path / "a.gguf", config, random_tensors(config)).read_bytes()
    cut = tmp_path / "cut.gguf"
    sizes = [0, 3, 10, 100, 1000, len(whole) // 2, len(whole) - 4000]
    for data in [*(whole[:size] for size in sizes), b"PK" + whole[2:]]:
        cut.write_bytes(data)
        with pytest.raises(ValueError, match="cut.gguf is no whole GGUF file .*: download it again"):
            gguf_io.convert(cut, tmp_path / "model")
    with pytest.raises(ValueError, match="There is no file .*none.gguf"):
        gguf_io.convert(tmp_path / "none.gguf", tmp_path / "model")


def test_a_tensor_that_cannot_be_read_leaves_nothing_behind(tmp_path):
    config = config_of("llama")
    extra = {"output_norm.weight": np.ones(64, np.int8)}
    file = write(tmp_path / "a.gguf", config, random_tensors(config), leave_out=tuple(extra), extra=extra)
    with pytest.raises(ValueError, match="output_norm.weight has type I8"):
        gguf_io.convert(file, tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]


def test_a_folder_is_never_overwritten(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match="model is already there: name a new folder, or delete it"):
        gguf_io.convert(tmp_path / "a.gguf", tmp_path / "model")
    with pytest.raises(ValueError, match="dtype 'float16' is not supported; only float32 and bfloat16 are"):
        gguf_io.convert(tmp_path / "a.gguf", tmp_path / "new", "float16")


def test_without_gguf_it_says_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "gguf":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="pip install gguf==0.19.0"):
        gguf_io.convert(tmp_path / "a.gguf", tmp_path / "model")


def test_the_version_named_is_the_one_that_make_installs():
    assert "gguf==0.19.0" in (ROOT / "requirements" / "gguf.txt").read_text()
    assert gguf_files.ARCHITECTURES.keys() == set(gguf_file.ARCHITECTURES)
