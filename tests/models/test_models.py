"""The model against transformers, and the properties that training and decoding rely on."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from coevolve_jax.distributed import sharding
from coevolve_jax.grpo import lora
from coevolve_jax.models import hf_io
from coevolve_jax.models.attention import attention
from coevolve_jax.models.cache import init_cache
from coevolve_jax.models.decoder import Decoder, ModelConfig
from coevolve_jax.models.rope_scaling import Llama3Rope, Yarn

pytestmark = pytest.mark.slow

YARN = (
    {"factor": 4.0, "original_max_position_embeddings": 16},
    {
        "factor": 8.0,
        "original_max_position_embeddings": 40,
        "beta_fast": 8.0,
        "beta_slow": 0.5,
        "attention_factor": 1.3,
    },
    {
        "factor": 2.5,
        "original_max_position_embeddings": 24,
        "mscale": 2.0,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
)
KINDS = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
LLAMA3 = dict(factor=8.0, original_max_position_embeddings=24, low_freq_factor=0.5, high_freq_factor=2.0)
SEEDS = range(80, 104)  # chosen so that they vary everything; a test checks this
LLAMA_SEEDS = range(96, 104)


def random_hf_config(seed: int) -> dict:
    """The fields of a random config.json: a Llama for LLAMA_SEEDS, else Qwen2, Qwen3 or Qwen3-MoE."""
    rng = np.random.default_rng(seed)
    pick = lambda *options: options[rng.integers(len(options))]
    kind = ("qwen2", "qwen3", "qwen3_moe", "qwen3_moe")[seed % 4]
    kind = "llama" if seed in LLAMA_SEEDS else kind
    kv_heads, head_dim = pick(1, 2, 3), pick(8, 12, 20)
    heads = kv_heads * pick(1, 2, 3)
    scaling = pick(None, *YARN)
    rope = {"rope_type": "yarn", **scaling} if scaling else {"rope_type": "default"}
    if kind == "llama":
        rope = {"rope_type": "llama3", **LLAMA3} if pick(True, False) else {"rope_type": "default"}
    fields = dict(
        model_type=kind,
        vocab_size=88,
        hidden_size=heads * head_dim if kind == "qwen2" else pick(24, 40),
        intermediate_size=pick(36, 56),
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        rms_norm_eps=pick(1e-6, 1e-3),
        tie_word_embeddings=pick(True, False),
        max_position_embeddings=64,
        rope_parameters={**rope, "rope_theta": pick(1e3, 1e6)},
    )
    if kind != "qwen2":
        fields |= dict(head_dim=head_dim, attention_bias=pick(True, False))
    if kind == "llama":
        fields |= dict(mlp_bias=pick(True, False), hidden_size=heads * pick(4, 8))
    if kind == "qwen3_moe":
        fields |= dict(
            num_hidden_layers=pick(2, 4),
            num_experts=pick(4, 6),
            num_experts_per_tok=pick(1, 2, 3),
            moe_intermediate_size=pick(12, 16),
            norm_topk_prob=pick(True, False),
            decoder_sparse_step=pick(1, 2),
            mlp_only_layers=pick([], [0], [1]),
        )
    return fields


@functools.partial(jax.jit, static_argnums=0)
def forward(model, params, tokens, positions=None, segment_ids=None):
    return model.apply({"params": params}, tokens, positions, segment_ids)


def random_params(config: ModelConfig, seed: int = 0):
    """Every parameter random: an untouched bias or scale would hide a mistake."""
    rng = np.random.default_rng(seed)
    center = {"scale": 1.0}
    return jax.tree_util.tree_map_with_path(
        lambda path, p: rng.normal(center.get(path[-1].key, 0.0), 0.15, p.shape).astype(np.float32),
        hf_io.abstract_params(config),
    )


def tokens_of(config: ModelConfig, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape, dtype=np.int32)


def test_the_random_configurations_vary_everything():
    configs = [ModelConfig.from_hf(random_hf_config(seed)) for seed in SEEDS]
    by_kind = {kind: [c for c in configs if c.model_type == kind] for kind in KINDS}
    for kind, some in by_kind.items():
        varied = {"rope_theta", "rms_norm_eps", "tie_word_embeddings", "num_key_value_heads", "rope_scaling"}
        if kind == "llama":
            varied |= {"attention_bias", "mlp_bias"}
        if kind == "qwen3_moe":
            varied |= {
                "attention_bias",
                "norm_topk_prob",
                "decoder_sparse_step",
                "mlp_only_layers",
                "num_experts",
                "num_experts_per_tok",
            }
        for name in varied:
            assert len({getattr(c, name) for c in some}) > 1, (kind, name)
    assert {c.rope_scaling for c in configs} == {None, Llama3Rope(**LLAMA3), *(Yarn(**y) for y in YARN)}
    assert {c.attention_bias for c in by_kind["qwen3"]} == {True, False}
    for kind in ("llama", "qwen3"):
        assert any(c.head_dim != c.hidden_size // c.num_attention_heads for c in by_kind[kind])
    mixed = [bool(c.sparse_layers and c.dense_layers) for c in by_kind["qwen3_moe"]]
    assert any(mixed) and not all(mixed)


@pytest.mark.parametrize("seed", SEEDS)
def test_logits_agree_with_transformers(seed, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    config = transformers.AutoConfig.for_model(**random_hf_config(seed))
    reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    for parameter in reference.parameters():  # the norms' ones and the biases' zeros too
        parameter.data += 0.15 * torch.randn(parameter.shape, generator=generator)
    reference.save_pretrained(tmp_path)
    ours, params = hf_io.load(tmp_path)
    tokens = tokens_of(ours, 2, 33)  # beyond the unscaled length of some
    with torch.no_grad():
        expected = reference.float().eval()(torch.tensor(tokens.astype(np.int64))).logits.numpy()
    logits = forward(Decoder(ours), params, tokens)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_config_leaves_out_is_what_transformers_takes_and_absent_ids_stay_absent(kind):
    transformers = pytest.importorskip("transformers")
    fields = next(c for c in map(random_hf_config, SEEDS) if c["model_type"] == kind)
    bare = {k: v for k, v in fields.items() if k not in ("head_dim", "rms_norm_eps")}
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    ours, theirs = ModelConfig.from_hf(bare | ids), transformers.AutoConfig.for_model(**bare | ids)
    implied = theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or implied)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    again = transformers.AutoConfig.for_model(**ours.to_hf())
    assert [getattr(again, name) for name in ids] == [None] * 3


@pytest.mark.parametrize("seed", SEEDS)
def test_config_round_trip(seed):
    """Ours -> ours, and transformers' reading of ours: every field, the architecture's name too."""
    transformers = pytest.importorskip("transformers")
    fields = random_hf_config(seed)
    config = ModelConfig.from_hf(fields)
    written = config.to_hf()
    assert ModelConfig.from_hf(json.loads(json.dumps(written))) == config
    assert written["architectures"] == [KINDS[fields["model_type"]]]
    assert ("num_experts" in written) == (fields["model_type"] == "qwen3_moe")
    theirs = transformers.AutoConfig.for_model(**written)
    for name, value in fields.items():
        got = getattr(theirs, name)
        assert (got.items() >= value.items()) if name == "rope_parameters" else got == value, name


def test_yarn_of_an_older_config():
    """rope_scaling beside a top-level rope_theta, and the defaults of its missing fields."""
    old = random_hf_config(1) | {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    del old["rope_parameters"]
    config = ModelConfig.from_hf(old)
    assert (config.rope_theta, config.rope_scaling) == (5e5, Yarn(4.0, 64))
    assert config.rope_scaling.scale == pytest.approx(0.1 * np.log(4.0) + 1)
    old["original_max_position_embeddings"] = 32
    assert ModelConfig.from_hf(old).rope_scaling == Yarn(4.0, 32)
    old["rope_scaling"]["factor"] = None
    assert ModelConfig.from_hf(old).rope_scaling == Yarn(2.0, 32)
    old["rope_scaling"]["partial_rotary_factor"] = 0.5
    with pytest.raises(ValueError, match="partial_rotary_factor 0.5"):
        ModelConfig.from_hf(old)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 .* num_experts"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step 0"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config \(fp8\).*bfloat16"),
        ({"num_experts": None}, "lacks num_experts"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "type 'dynamic'"),
    ],
)
def test_config_refuses_what_does_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(random_hf_config(2) | changes)


@pytest.fixture(params=["dense", "experts", "llama"])
def any_config(request, tiny_config):
    if request.param == "dense":
        return tiny_config
    if request.param == "llama":
        return dataclasses.replace(
            tiny_config,
            model_type="llama",
            attention_bias=True,
            mlp_bias=True,
            rope_scaling=Llama3Rope(**LLAMA3),
        )
    return dataclasses.replace(
        tiny_config,
        model_type="qwen3_moe",
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        norm_topk_prob=True,
        mlp_only_layers=(0,),
    )


def test_rope_theta_of_the_checkpoint_matters(tiny_config):
    model, params = Decoder(tiny_config), random_params(tiny_config)
    tokens = tokens_of(tiny_config, 2, 23)
    other = Decoder(dataclasses.replace(tiny_config, rope_theta=1e4))
    difference = forward(model, params, tokens) - forward(other, params, tokens)
    assert np.abs(difference).max() > 1e-3


def packed_row(config):
    """Three sequences, and one row that packs them with padding between and after."""
    parts = [tokens_of(config, n, seed=n) for n in (9, 1, 14)]
    row = np.zeros(32, np.int32)
    segments = np.zeros(32, np.int32)
    starts = (0, 9, 12)
    for i, (start, part) in enumerate(zip(starts, parts, strict=True)):
        row[start : start + len(part)] = part
        segments[start : start + len(part)] = i + 1
    return parts, starts, row[None], segments[None]


@pytest.mark.parametrize("remat", [False, True])
def test_packed_equals_unpacked(any_config, remat):
    model, params = Decoder(any_config), random_params(any_config)
    parts, starts, row, segments = packed_row(any_config)
    packed = forward(Decoder(any_config, remat=remat), params, row, segment_ids=segments)[0]
    for start, part in zip(starts, parts, strict=True):
        alone = forward(model, params, part[None])[0]
        np.testing.assert_allclose(packed[start : start + len(part)], alone, atol=1e-5, rtol=0)


def test_given_positions_are_used(tiny_config):
    model, params = Decoder(tiny_config), random_params(tiny_config)
    parts, starts, row, segments = packed_row(tiny_config)
    positions = np.zeros_like(row)
    for start, part in zip(starts, parts, strict=True):
        positions[0, start : start + len(part)] = np.arange(len(part))
    default = forward(model, params, row, segment_ids=segments)
    given = forward(model, params, row, positions, segments)
    np.testing.assert_allclose(given[segments > 0], default[segments > 0], atol=1e-6, rtol=0)
    doubled = forward(model, params, row, 2 * positions, segments)
    assert np.abs(doubled - given)[segments > 0].max() > 1e-3


def test_pads_do_not_matter_and_stay_finite(any_config):
    model, params = Decoder(any_config), random_params(any_config)
    _, _, row, segments = packed_row(any_config)

    def loss(params, row):
        logits = forward(model, params, row, segment_ids=segments)
        return jnp.sum(jnp.where(segments[..., None] > 0, logits, 0.0) ** 2), logits

    other = np.where(segments > 0, row, 5)
    (value, logits), gradient = jax.value_and_grad(loss, has_aux=True)(params, row)
    (value_2, _), gradient_2 = jax.value_and_grad(loss, has_aux=True)(params, other)
    assert np.isfinite(logits).all()
    np.testing.assert_allclose(value, value_2, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3, rtol=1e-4), gradient, gradient_2)


@pytest.mark.parametrize("change", [0, 3, 11, 22])
def test_nothing_leaks_from_the_future(any_config, change):
    model, params = Decoder(any_config), random_params(any_config)
    tokens = tokens_of(any_config, 1, 23)
    other = tokens.copy()
    other[0, change] = (other[0, change] + 1) % any_config.vocab_size
    a, b = (forward(model, params, t)[0] for t in (tokens, other))
    np.testing.assert_array_equal(a[:change], b[:change])
    assert np.abs(a[change:] - b[change:]).max(axis=-1).min() > 1e-4  # every later token sees the change


@pytest.mark.parametrize("length", [1, 3, 8, 13])
def test_attention_agrees_with_the_obvious_loop(length):
    rng = np.random.default_rng(length)
    q = rng.normal(size=(2, length, 6, 4)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, length, 2, 4)).astype(np.float32)
    segments = np.sort(rng.integers(0, 3, (2, length)))
    ours = np.asarray(jax.jit(functools.partial(attention, platform="cpu"))(q, k, v, segments))
    for b, t, h in np.ndindex(2, length, 6):
        seen = [s for s in range(t + 1) if segments[b, s] == segments[b, t]]
        weights = np.exp(k[b, seen, h // 3] @ q[b, t, h] / 2)
        expected = weights @ v[b, seen, h // 3] / weights.sum()
        np.testing.assert_allclose(ours[b, t, h], expected, atol=1e-5)


def test_decode_equals_the_full_forward(any_config):
    check_decode(any_config, jnp.float32, tolerance=1e-5)


def test_decode_equals_the_full_forward_in_bfloat16(tiny_config):
    check_decode(tiny_config, jnp.bfloat16, tolerance=0.15)


def test_decode_equals_the_full_forward_with_the_cache_of_accelerators(tiny_config):
    check_decode(tiny_config, jnp.float32, tolerance=1e-5, platform="tpu")


def test_decode_equals_the_full_forward_with_each_head_in_an_array_of_its_own(tiny_config):
    check_decode(tiny_config, jnp.float32, tolerance=1e-5, parts=tiny_config.num_key_value_heads)


def check_decode(config, dtype, tolerance, **layout):
    """Ragged prefill, then one token at a time, then a ragged chunk, over a cache full of garbage."""
    params = random_params(config)
    model = Decoder(config, dtype=dtype)
    tokens, capacity = tokens_of(config, 3, 20), 24
    full = forward(model, params, tokens)
    decode = jax.jit(functools.partial(model.apply, method=Decoder.decode))
    unembed = jax.jit(functools.partial(model.apply, method=Decoder.unembed))
    cache = jax.tree.map(lambda x: x + 7.0, init_cache(config, 3, capacity, dtype, **layout))
    lengths = np.zeros(3, int)
    for counts in ([7, 2, 5], *[[1, 1, 1]] * 4, [3, 6, 0], [1, 0, 1]):
        width = max(counts)
        fed, positions = np.zeros((3, width), np.int32), np.full((3, width), capacity, np.int32)
        for row, count in enumerate(counts):
            place = np.arange(lengths[row], lengths[row] + count)
            fed[row, :count], positions[row, :count] = tokens[row, place], place
        hidden, cache = decode({"params": params}, fed, positions, cache)
        logits = unembed({"params": params}, hidden)
        for row, count in enumerate(counts):
            expected = full[row, lengths[row] : lengths[row] + count]
            np.testing.assert_allclose(logits[row, :count], expected, atol=tolerance, rtol=0)
        lengths += counts
    assert lengths.tolist() == [15, 12, 10]


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_padding_is_not_written_to_the_cache(tiny_config, platform):
    model, params = Decoder(tiny_config), random_params(tiny_config)
    cache = jax.tree.map(lambda x: x + 7.0, init_cache(tiny_config, 2, 8, platform=platform))
    positions = np.array([[0, 1], [8, 9]], np.int32)
    decode = jax.jit(functools.partial(model.apply, method=Decoder.decode))
    _, after = decode({"params": params}, np.ones((2, 2), np.int32), positions, cache)
    for before, now in zip(jax.tree.leaves(cache), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(now[1], before[1])
        changed = (now != before)[0].any(axis=-2 if now.shape[-1] == 8 else -1)  # for each head and column
        assert changed[:, :2].all() and not changed[:, 2:].any()


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_cache_rows_are_taken_and_put(tiny_config, platform):
    cache = init_cache(tiny_config, 3, 6, platform=platform)
    keys = lambda columns: (3, 2, 12, columns) if platform == "cpu" else (3, 2, columns, 12)
    numbered = jax.tree.map(lambda x: x + jnp.arange(3.0)[:, None, None, None], cache)
    part = numbered.take(jnp.array([2, 1, 3])).resize(4)
    assert part.k[0][0].shape == keys(4) and part.v[0][0].shape == (3, 2, 4, 12) and len(part.v) == 3
    assert [float(row.max()) for row in part.v[2][0]] == [2.0, 1.0, 0.0]  # row 3 does not exist
    after = cache.put(jnp.array([0, 3, 1]), part.resize(6))
    assert [float(row.max()) for row in after.k[1][0]] == [2.0, 0.0, 0.0]
    beyond = after.k[1][0][0, :, :, 4:] if platform == "cpu" else after.k[1][0][0, :, 4:]
    assert float(beyond.max()) == float(after.v[1][0][0, :, 4:].max()) == 0.0
    wider = after.resize(9)
    assert wider.k[0][0].shape == keys(9) and wider.v[0][0].shape == (3, 2, 9, 12)
    for now, before in zip(jax.tree.leaves(wider.resize(6)), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(now, before)


def test_norms_and_logits_are_float32_in_bfloat16(tiny_config):
    params = random_params(tiny_config)
    model = Decoder(tiny_config, dtype=jnp.bfloat16)
    tokens = tokens_of(tiny_config, 2, 9)
    hidden = jax.jit(functools.partial(model.apply, method=Decoder.hidden))({"params": params}, tokens)
    assert hidden.dtype == jnp.bfloat16
    assert forward(model, params, tokens).dtype == jnp.float32


def test_remat_gives_the_same_gradient(any_config):
    params = random_params(any_config)
    tokens = tokens_of(any_config, 2, 9)

    def gradient(remat):
        model = Decoder(any_config, remat=remat)
        loss = lambda p: jnp.mean(jax.nn.logsumexp(forward(model, p, tokens), axis=-1))
        return jax.jit(jax.grad(loss))(params)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradient(False), gradient(True))


@pytest.mark.parametrize("adapted", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_layers_that_are_opaque_to_the_compiler_for_tpus_compute_the_same(any_config, adapted):
    params, tokens = random_params(any_config), tokens_of(any_config, 2, 9)
    adapters = lora.init(jax.random.key(0), params, 2, "(q|o)_proj")
    adapters = jax.tree.map(lambda x: x + 0.1, adapters)

    def gradient(platform):
        model = Decoder(any_config, remat=True, attention="plain", platform=platform)
        logits = lambda p: model.apply({"params": p}, tokens)
        loss = lambda p: jnp.mean(jax.nn.logsumexp(logits(p), axis=-1))
        if not adapted:
            return jax.jit(jax.value_and_grad(loss))(params)
        lora.check_reached(logits, params, adapters)
        with lora.adapted(2.0):
            return jax.jit(jax.value_and_grad(lambda a: loss(lora.attach(params, a))))(adapters)

    made = jax.eval_shape(
        Decoder(any_config, platform="tpu", attention="plain").init, jax.random.key(0), tokens
    )
    assert jax.tree.map(jnp.shape, made["params"]) == jax.tree.map(jnp.shape, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradient("cpu"), gradient("tpu"))


def test_a_mesh_of_eight_devices_gives_the_same_logits(tiny_config, tmp_path):
    """The program runs in a process of its own: JAX fixes the number of devices at its start."""
    model, params = Decoder(tiny_config), random_params(tiny_config)
    tokens = tokens_of(tiny_config, 4, 16)
    hf_io.save(tmp_path / "model", tiny_config, params)
    np.save(tmp_path / "tokens.npy", tokens)
    program = """
import sys, jax, numpy as np
from coevolve_jax.distributed import sharding
from coevolve_jax.models import hf_io
from coevolve_jax.models.decoder import Decoder
folder = sys.argv[1]
mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
config, params = hf_io.load(folder + "/model", mesh=mesh)
kernel = params["layers"]["mlp"]["up_proj"]["kernel"]
assert kernel.addressable_shards[0].data.shape == (3, 16, 28), kernel.sharding
tokens = jax.device_put(np.load(folder + "/tokens.npy"), sharding.batch_sharding(mesh))
assert tokens.addressable_shards[0].data.shape == (1, 16)
np.save(folder + "/logits.npy", jax.jit(Decoder(config).apply)({"params": params}, tokens))
hf_io.save(folder + "/again", config, params)
"""
    flags = os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"}
    root = Path(hf_io.__file__).parents[2]
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, cwd=root, env=flags)
    logits = np.load(tmp_path / "logits.npy")
    np.testing.assert_allclose(logits, forward(model, params, tokens), atol=1e-5, rtol=0)
    names = [tmp_path / name / "model.safetensors" for name in ("model", "again")]
    assert names[0].read_bytes() == names[1].read_bytes()


def test_mesh_and_rules_refuse_what_does_not_fit(tiny_config):
    with pytest.raises(ValueError, match="fsdp=2.*does not fit 1 device"):
        sharding.make_mesh(fsdp=2)
    mesh = jax.sharding.AbstractMesh((1, 3, 1, 1, 1), sharding.AXES)
    with pytest.raises(ValueError, match="embed_tokens/embedding of shape .88, 32. .*fsdp axis of 3"):
        sharding.param_shardings(mesh, hf_io.abstract_params(tiny_config))
    with pytest.raises(ValueError, match="No rule .* 'layers/router/kernel'"):
        sharding.param_shardings(mesh, {"layers": {"router": {"kernel": jnp.zeros((2, 2))}}})


def test_optimiser_state_is_sharded_like_its_parameters(tiny_config):
    mesh = sharding.make_mesh()
    params = hf_io.abstract_params(tiny_config)
    state = {"count": jnp.zeros(()), "mu": params}
    shardings = sharding.param_shardings(mesh, state)
    assert shardings["count"].spec == P()
    assert shardings["mu"] == sharding.param_shardings(mesh, params)
    assert shardings["mu"]["layers"]["mlp"]["up_proj"]["kernel"].spec == P(None, sharding.MATRICES, "tensor")
