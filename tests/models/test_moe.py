"""Experts: the grouped product against a loop, router statistics, replay, experts over several devices."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coevolve_jax.models import hf_io, moe
from coevolve_jax.models.decoder import Decoder

pytestmark = pytest.mark.slow

TOKENS, HIDDEN, EXPERTS, TOP_K, WIDTH = 12, 8, 4, 2, 6


@pytest.fixture
def config(tiny_config):
    """A dense layer between two sparse ones."""
    return dataclasses.replace(
        tiny_config,
        model_type="qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        mlp_only_layers=(1,),
    )


def random_params(config, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda path, p: rng.normal(path[-1].key == "scale", 0.2, p.shape).astype(np.float32)
    return jax.tree_util.tree_map_with_path(draw, hf_io.abstract_params(config))


def loop(x, weights, experts, gate, up, down):
    """Every expert on every token; a token's output is the weighted sum over its chosen experts."""
    out = jnp.zeros_like(x)
    for e in range(EXPERTS):
        weight = jnp.sum(jnp.where(experts == e, weights, 0), axis=1)
        out += weight[:, None] * ((jax.nn.silu(x @ gate[e]) * (x @ up[e])) @ down[e])
    return out


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradient(function, experts, x, weights, *kernels):
    def loss(x, weights, *kernels):
        out = function(x, weights, experts, *kernels)
        return jnp.sum(jnp.sin(out)), out

    return jax.grad(loss, argnums=range(5), has_aux=True)(x, weights, *kernels)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(-1, EXPERTS - 1), min_size=24, max_size=24), st.integers(0, 9))
def test_equals_a_loop_over_the_experts(experts, seed):
    """Forward and gradient for any routing: all tokens to one expert, idle experts, none (-1)."""
    rng = np.random.default_rng(seed)
    experts = np.array(experts, np.int32).reshape(TOKENS, TOP_K)
    draw = lambda *shape: rng.normal(0, 0.5, shape).astype(np.float32)
    wide, narrow = (EXPERTS, HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN)
    arrays = draw(TOKENS, HIDDEN), draw(TOKENS, TOP_K), draw(*wide), draw(*wide), draw(*narrow)
    ours, expected = (value_and_gradient(f, experts, *arrays) for f in (moe.mix, loop))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, expected)


@functools.partial(jax.jit, static_argnums=0)
def apply(layer, params, *args):
    return layer.apply({"params": params}, *args)


def sparse_layer(config, logits, real, routing=None, normalise=False):
    """A MoE layer whose router sees exactly these logits [N, E]; returns its output and Routing."""
    config = dataclasses.replace(config, hidden_size=EXPERTS, norm_topk_prob=normalise)
    rng, wide = np.random.default_rng(0), (EXPERTS, EXPERTS, config.moe_intermediate_size)
    experts = {f"{name}_proj": {"kernel": rng.normal(0, 0.5, wide)} for name in ("gate", "up")}
    experts["down_proj"] = {"kernel": rng.normal(0, 0.5, (EXPERTS, wide[2], EXPERTS))}
    params = {"gate": {"kernel": np.eye(EXPERTS)}, "experts": experts}
    return apply(moe.MoE(config, jnp.float32, jnp.float32), params, logits, real, routing)


@pytest.fixture
def logits():
    return np.random.default_rng(0).normal(0, 1.5, (2, TOKENS, EXPERTS)).astype(np.float32)


def test_statistics_count_every_choice_and_no_padding(config, logits):
    real = np.arange(TOKENS) % 3 > 0
    out, routing = sparse_layer(config, logits[0], real)
    probs = np.exp(logits[0]) / np.exp(logits[0]).sum(axis=1, keepdims=True)
    chosen = np.argsort(-probs, axis=1)[:, :2]
    np.testing.assert_array_equal(np.sort(routing.experts[real]), np.sort(chosen[real]))
    np.testing.assert_array_equal(routing.experts[~real], -1)
    np.testing.assert_array_equal(out[~real], 0)
    np.testing.assert_array_equal(routing.load, np.bincount(chosen[real].ravel(), minlength=EXPERTS))
    np.testing.assert_allclose(routing.probability, probs[real].sum(axis=0), rtol=1e-5)
    np.testing.assert_allclose(routing.entropy, -(probs * np.log(probs))[real].sum(), rtol=1e-5)
    assert routing.tokens == real.sum()


def test_the_router_of_a_bfloat16_model_computes_in_float32(config):
    """Logits closer than bfloat16's resolution give the choice and the weights of float64."""
    rng, experts, hidden = np.random.default_rng(4), 8, 64
    config = dataclasses.replace(config, hidden_size=hidden, num_experts=experts)
    layer = moe.MoE(config, jnp.bfloat16, jnp.float32)
    x = jnp.asarray(rng.normal(0, 1, (200, hidden)), jnp.bfloat16)
    gate = np.tile(rng.normal(0, 1, (hidden, 1)), experts) + rng.normal(0, 1e-3, (hidden, experts))
    params = jax.tree.map(
        jnp.zeros_like, jax.jit(layer.init)(jax.random.key(0), x, jnp.ones(200, bool))["params"]
    )
    params["gate"]["kernel"] = jnp.asarray(gate, jnp.float32)
    _, routing = apply(layer, params, x, np.ones(200, bool))

    logits = np.asarray(x, np.float64) @ gate.astype(np.float32).astype(np.float64)
    best = np.sort(logits, axis=1)[:, ::-1]
    clear = best[:, 1] - best[:, 2] > 1e-4  # clear for float32 sums
    chosen = np.sort(np.argsort(-logits, axis=1)[:, :2])
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(np.sort(routing.experts)[clear], chosen[clear])
    probs = np.exp(logits - best[:, :1])
    probs /= probs.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(routing.probability, probs.sum(axis=0), rtol=1e-5)
    np.testing.assert_allclose(routing.entropy, -(probs * np.log(probs)).sum(), rtol=1e-5)

    rounded = [np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for a in (x, gate)]
    coarse = np.sort(np.argsort(-(rounded[0] @ rounded[1]), axis=1)[:, :2])
    assert (coarse != chosen).any(axis=1).mean() > 0.3  # the test would notice a router in bfloat16


def test_load_balancing_loss_is_that_of_transformers(config, logits):
    torch = pytest.importorskip("torch")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    real = np.arange(TOKENS) % 3 > 0
    layers = [sparse_layer(config, layer, real)[1] for layer in logits]
    routing = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    theirs = load_balancing_loss_func(tuple(map(torch.tensor, logits)), EXPERTS, 2, torch.tensor(real)[None])
    np.testing.assert_allclose(moe.load_balancing_loss(routing), theirs.numpy(), rtol=1e-5)

    metrics = moe.router_metrics(routing)
    load = np.stack([layer.load for layer in layers]) / (real.sum() * 2 / EXPERTS)
    assert metrics["router_load_max"] == pytest.approx(load.max(), rel=1e-5)
    assert metrics["router_load_min"] == pytest.approx(load.min(), rel=1e-5)
    entropy = sum(float(layer.entropy) for layer in layers) / (2 * real.sum())
    assert metrics["router_entropy"] == pytest.approx(entropy, rel=1e-5)


@pytest.mark.parametrize("normalise", [False, True])
def test_replayed_experts_are_used_with_the_routers_weights(config, logits, normalise):
    real = np.ones(TOKENS, bool)
    own, routing = sparse_layer(config, logits[0], real, normalise=normalise)
    again, _ = sparse_layer(config, logits[0], real, routing.experts, normalise)
    left, _ = sparse_layer(config, logits[0], real, np.full((TOKENS, 2), -1, np.int32), normalise)
    np.testing.assert_allclose(again, own, atol=1e-6)
    np.testing.assert_allclose(left, own, atol=1e-6)
    alone = lambda e: sparse_layer(config, logits[0], real, np.full((TOKENS, 2), e, np.int32), True)[0]
    probs = np.exp(logits[0]) / np.exp(logits[0]).sum(axis=1, keepdims=True)
    weights = probs[:, [0, 3]]
    if normalise:
        weights /= weights.sum(axis=1, keepdims=True)
    given = np.tile(np.array([0, 3], np.int32), (TOKENS, 1))
    out, told = sparse_layer(config, logits[0], real, given, normalise)
    np.testing.assert_array_equal(told.experts, given)
    expected = weights[:, :1] * alone(0) + weights[:, 1:] * alone(3)
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_a_forwards_routing_can_be_replayed_in_the_whole_model(config):
    """Covers gradient, remat and padding; decode reports the routing of the full forward."""
    model, params = Decoder(config, remat=True), random_params(config)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 10), dtype=np.int32)
    segments = np.array([[1] * 8 + [0] * 2, [1] * 10], np.int32)

    @jax.jit
    def run(params, routing):
        def loss(params):
            hidden, state = model.apply(
                {"params": params},
                tokens,
                None,
                segments,
                routing,
                method=Decoder.hidden,
                mutable=["intermediates"],
            )
            routed = state["intermediates"]["routing"]
            return moe.load_balancing_loss(routed), (hidden, routed)

        return jax.grad(loss, has_aux=True)(params)

    left = np.full((2, 2, 10, 2), -1, np.int32)
    gradient, (hidden, routed) = run(params, left)
    assert routed.experts.shape == left.shape and routed.load.shape == (2, 4)
    assert (np.asarray(routed.experts[:, 0, 8:]) == -1).all() and routed.tokens.tolist() == [18, 18]
    assert np.abs(gradient["layers"]["mlp"]["gate"]["kernel"]).max() > 1e-3
    _, (same, _) = run(params, routed.experts)
    np.testing.assert_allclose(same, hidden, atol=1e-6)
    other = jnp.where(routed.experts < 0, -1, (routed.experts + 1) % 4)
    _, (changed, told) = run(params, other)
    np.testing.assert_array_equal(told.experts, other)
    assert np.abs(changed - hidden)[segments > 0].max() > 1e-2
    check_decode_tells(model, params, tokens, routed)


def check_decode_tells(model, params, tokens, routed):
    from coevolve_jax.models.cache import init_cache

    cache = init_cache(model.config, 2, 10)
    positions = np.array([[*range(8), 10, 10], range(10)], np.int32)
    decode = functools.partial(model.apply, method=Decoder.decode, mutable=["intermediates"])
    _, state = jax.jit(decode)({"params": params}, tokens, positions, cache)
    np.testing.assert_array_equal(state["intermediates"]["routing"].experts, routed.experts)


def test_transformers_loads_the_experts_that_we_save(config, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    config = dataclasses.replace(config, tie_word_embeddings=False, norm_topk_prob=True)
    params = random_params(config)
    hf_io.save(tmp_path / "model", config, params)
    loaded, again = hf_io.load(tmp_path / "model")
    assert loaded == config
    jax.tree.map(np.testing.assert_array_equal, again, params)
    reference, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager", output_loading_info=True
    )
    assert type(reference).__name__ == "Qwen3MoeForCausalLM" and not any(report.values()), report
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, 10))
    with torch.no_grad():
        expected = reference.float()(torch.tensor(tokens)).logits.numpy()
    logits = jax.jit(Decoder(config).apply)({"params": params}, tokens.astype(np.int32))
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


def test_a_tpu_program_has_grouped_products(config):
    """Lowered, not run: three per sparse layer, and none of every token with every expert."""
    config = dataclasses.replace(config, mlp_only_layers=())
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    forward = jax.jit(lambda params, tokens: Decoder(config).apply({"params": params}, tokens))
    traced = forward.trace(hf_io.abstract_params(config), tokens)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert len(re.findall(r'= "?chlo\.ragged_dot\b', text)) == 3


def test_experts_spread_over_devices_give_the_same(config, tmp_path):
    """A mesh of eight gives one device's loss, gradient and routing; it runs in a process of its own."""
    program = """
import functools, sys
import jax, numpy as np
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from coevolve_jax.models import moe
from coevolve_jax.models.config import ModelConfig
from coevolve_jax.models import grouped_matmul as gp
from coevolve_jax.models.decoder import Decoder
from tests.models.test_moe import random_params
config = ModelConfig.from_hf(eval(sys.argv[1]))
params = random_params(config)
rng = np.random.default_rng(0)
tokens = rng.integers(0, config.vocab_size, (4, 6), dtype=np.int32)
segments = np.array([[1] * 4 + [0] * 2] + [[1] * 3 + [2] * 3] * 3, np.int32)

def run(mesh, params, tokens, segments):
    def loss(params):
        model = Decoder(config, remat=True, mesh=mesh)
        logits, state = model.apply({"params": params}, tokens, None, segments, mutable=["intermediates"])
        routing = state["intermediates"]["routing"]
        logits = jnp.where(segments[..., None] > 0, logits, 0)
        return jnp.mean(jnp.sin(logits)) + 0.01 * moe.load_balancing_loss(routing), (logits, routing)
    return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

expected = run(None, params, tokens, segments)
names = "data", "fsdp", "tensor", "expert", "context"
mesh = jax.make_mesh((2, 1, 2, 2, 1), names, axis_types=(AxisType.Auto,) * 5)
place = lambda path, p: jax.device_put(p, NamedSharding(
    mesh, P(None, "expert") if any(k.key == "experts" for k in path) else P()))
spread = jax.tree_util.tree_map_with_path(place, params)
kernel = spread["layers"]["mlp"]["experts"]["down_proj"]["kernel"]
assert kernel.addressable_shards[0].data.shape[1] == 2
got = run(mesh, spread, *jax.device_put((tokens, segments), NamedSharding(mesh, P(("data", "fsdp")))))
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), got, expected)
args = jnp.ones((3, 8)), jnp.ones((3, 2)), jnp.zeros((3, 2), jnp.int32)  # rows that the mesh does not divide
kernels = jnp.ones((4, 8, 6)), jnp.ones((4, 8, 6)), jnp.ones((4, 6, 8))
whole = jax.jit(lambda *a: moe.mix(*a, mesh=mesh))(*args, *kernels)
np.testing.assert_allclose(whole, np.full((3, 8), 2 * 6 * 8 * jax.nn.silu(8.0)), rtol=1e-5)

# As on GPUs, but for the kernels, which JAX interprets on one device only: their formulas are in their place.
def of_expert(sizes, rows):
    end, m = jnp.cumsum(sizes), jnp.arange(rows)[:, None]
    return ((m >= end - sizes) & (m < end)).astype(jnp.float32)
gp._product = lambda x, matrices, sizes, *_, transposed: jnp.einsum(
    "me,mk,enk->mn" if transposed else "me,mk,ekn->mn", of_expert(sizes, len(x)), x, matrices)
gp._outer = lambda x, g, sizes, *_: jnp.einsum("me,mk,mn->ekn", of_expert(sizes, len(x)), x, g)
args = rng.normal(size=(8, 8)), rng.normal(size=(8, 2)), rng.integers(-1, 4, (8, 2))
kernels = tuple(rng.normal(size=shape) for shape in ((4, 8, 6), (4, 8, 6), (4, 6, 8)))
def loss(x, weights, experts, *kernels, mesh, platform):
    return jnp.sum(jnp.sin(moe.mix(x, weights, experts, *kernels, mesh=mesh, platform=platform)))
results = [
    jax.jit(jax.value_and_grad(functools.partial(loss, mesh=m, platform=p), argnums=(0, 1, 3, 4, 5)))\
(*args, *kernels)
    for m, p in ((mesh, "gpu"), (None, "cpu"))
]
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4), *results)
"""
    flags = os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"}
    root = Path(hf_io.__file__).parents[2]
    config = dataclasses.replace(config, num_hidden_layers=2, mlp_only_layers=())
    done = subprocess.run(
        [sys.executable, "-c", program, repr(config.to_hf())],
        cwd=root,
        env=flags,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
