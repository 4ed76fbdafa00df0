"""LoRA: starts as the base, trains adapters alone, and merges into the adapted policy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict
from safetensors import safe_open

from coevolve_jax import build
from coevolve_jax.distributed import sharding
from coevolve_jax.grpo import lora
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.grpo.packing import pack
from coevolve_jax.loop.trainer import Trainer
from coevolve_jax.models import hf_io, peft_io
from coevolve_jax.models.decoder import Decoder
from tests.support.grpo_cases import MODEL, learner_config, make_learner, samples, trajectory

TOKENS = np.random.default_rng(0).integers(0, MODEL.vocab_size, (2, 32)).astype(np.int32)


@jax.jit
def plain(params):
    return Decoder(MODEL).apply({"params": params}, TOKENS)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(2)
    return pack(
        samples([trajectory(rng, n) for n in (20, 30, 12)], rng.normal(size=3)),
        pack_length=32,
        rows_per_microbatch=2,
        max_rows=3,
    )


@pytest.fixture(scope="module")
def trained(params, batch):
    """A learner with adapters of rank 3, its base, its first state and its state after two updates."""
    base = jax.tree.map(np.array, params)
    learner = make_learner(
        params, lora_rank=3, lora_alpha=6.0, lora_targets="self_attn/(q|o)_proj|mlp/up_proj"
    )
    first = jax.device_get(learner.init(params))
    before = learner.score(learner.init(params), batch)
    state, metrics = learner.update(learner.init(params), batch)
    state, _ = learner.update(state, batch)
    assert metrics["applied"] and metrics["kl"] == pytest.approx(0, abs=1e-6)
    return learner, base, first, before, state


@pytest.mark.slow
def test_the_first_forward_is_the_bases(params, batch, trained):
    _, _, first, before, _ = trained
    np.testing.assert_allclose(np.where(batch.mask, before, 0), base_scores(params, batch), atol=1e-5)
    flat = flatten_dict(first.params)
    assert {path[-2] for path in flat} == {"q_proj", "o_proj", "up_proj"}
    for path, leaf in flat.items():
        assert leaf.any() == (path[-1] == "lora_a")
    assert flat["layers", "mlp", "up_proj", "lora_a"].shape == (2, 16, 3)
    assert flat["layers", "mlp", "up_proj", "lora_b"].shape == (2, 3, 24)


def base_scores(params, batch):
    """The base model's log-probabilities of the batch's policy tokens, 0 elsewhere."""
    flat = type(batch)(*(x.reshape(-1, 32) if x.ndim else x for x in batch))
    apply = jax.jit(
        lambda p: Decoder(MODEL).apply({"params": p}, flat.tokens, flat.positions, flat.segment_ids)
    )
    logp = np.asarray(jax.nn.log_softmax(apply(params)))
    chosen = np.take_along_axis(logp, flat.targets[..., None], axis=-1)[..., 0]
    return np.where(flat.mask, chosen, 0).reshape(batch.mask.shape)


def test_first_adapters_have_the_variance_1_by_in_and_differ():
    base = {"layers": {name: {"kernel": np.zeros((2, 64, 8), np.float32)} for name in ("q_proj", "k_proj")}}
    q, k = (own["lora_a"] for own in lora.init(jax.random.key(0), base, 4, "proj")["layers"].values())
    assert q.std() == pytest.approx(1 / 8, rel=0.2) and (q != k).all()


def test_only_adapters_are_trained_and_kept_by_the_optimiser(params, trained):
    _, base, first, _, state = trained
    for a, b in zip(jax.tree.leaves(base), jax.tree.leaves(params)):
        np.testing.assert_array_equal(a, b)
    for old, new in zip(jax.tree.leaves(first.params), jax.tree.leaves(state.params)):
        assert (old != np.asarray(new)).any()
    adapters = sum(x.size for x in jax.tree.leaves(first.params))
    assert sum(x.size for x in jax.tree.leaves(first.opt_state)) <= 2 * adapters + 3
    assert adapters < sum(x.size for x in jax.tree.leaves(base)) / 2


def test_merged_logits_equal_the_adapters(params, batch, trained):
    learner, _, _, before, state = trained
    merged = learner.policy(state)
    assert jax.tree.structure(merged) == jax.tree.structure(params)
    np.testing.assert_allclose(
        np.where(batch.mask, learner.score(state, batch), 0), base_scores(merged, batch), atol=1e-5
    )
    np.testing.assert_allclose(
        np.where(batch.mask, learner.score_merged(state, batch), 0), base_scores(merged, batch), atol=1e-5
    )
    assert np.abs(np.where(batch.mask, learner.score(state, batch) - before, 0)).max() > 1e-2
    kernel = lambda tree: np.asarray(tree["layers"]["mlp"]["up_proj"]["kernel"])
    a, b = (np.asarray(state.params["layers"]["mlp"]["up_proj"][name]) for name in ("lora_a", "lora_b"))
    for layer in range(2):
        np.testing.assert_allclose(
            kernel(merged)[layer] - kernel(params)[layer], 2.0 * a[layer] @ b[layer], atol=1e-6
        )


@pytest.mark.slow
def test_a_model_of_dense_and_sparse_layers_has_adapters_on_both(batch):
    """Attention of all layers and the MLP of dense ones: adding adapters equals merging them."""
    mixed = dataclasses.replace(
        MODEL,
        model_type="qwen3_moe",
        num_hidden_layers=3,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        mlp_only_layers=(0, 2),
    )
    params = jax.jit(Decoder(mixed).init)(jax.random.key(0), TOKENS)["params"]
    config = learner_config(lora_rank=2, lora_targets="self_attn/(q|o)_proj|mlp/(gate|down)_proj")
    learner = Learner(mixed, config, params, temperature=1.0, mesh=sharding.make_mesh())
    first = learner.init(params)
    before, adapters = learner.score(first, batch), flatten_dict(jax.device_get(first.params))
    state, metrics = learner.update(first, batch)
    assert metrics["applied"] and len(adapters) == 8
    assert adapters["layers", "mlp", "down_proj", "lora_a"].shape == (2, 24, 2)
    assert adapters["layers", "self_attn", "o_proj", "lora_b"].shape == (3, 2, 16)
    for path, leaf in flatten_dict(jax.device_get(state.params)).items():
        assert (leaf != adapters[path]).any(axis=(1, 2)).all() or path[-1] == "lora_a"  # in every layer
    plainly = Learner(mixed, learner_config(kl_coef=0.0), params, temperature=1.0, mesh=sharding.make_mesh())
    merged = learner.policy(state)
    got, expected = learner.score(state, batch), plainly.score(plainly.init(merged), batch)
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert np.abs(got - before).max() > 1e-2


def test_a_merged_export_is_an_ordinary_checkpoint(tmp_path, trained):
    learner, _, _, _, state = trained
    merged = jax.device_get(learner.policy(state))
    hf_io.save(tmp_path / "policy", MODEL, merged)
    _, loaded = hf_io.load(tmp_path / "policy")
    np.testing.assert_array_equal(plain(loaded), plain(merged))


def test_the_share_of_changes_that_a_dtype_rounds_away():
    a, b = np.array([[1.0, 0.0], [0.5, 0.0]], np.float32), np.array([[1.0, 1.0, 0.0], [7.0, 7.0, 7.0]])
    base = {"layers": {"q": {"kernel": jnp.ones((1, 2, 3), jnp.bfloat16)}, "o": {"kernel": jnp.ones(())}}}
    share = lambda scale, dtype: lora.rounded_away(
        base, {"layers": {"q": {"lora_a": jnp.asarray([a]), "lora_b": jnp.asarray([b])}}}, scale, dtype
    )
    # Of the six entries four change, by scale or half of it. The next number after 1 is 1 + 2 ** -7.
    assert share(2.0**-7, jnp.bfloat16) == 2 / 4  # half a step rounds to even, which is 1
    assert [share(2.0**-n, jnp.bfloat16) for n in (6, 8, 9)] == [0, 1, 1]
    assert share(2.0**-9, jnp.float32) == 0 == share(0.0, jnp.bfloat16)


def test_what_bfloat16_would_round_away_is_sampled_and_exported(params, tmp_path):
    """Adapters change kernels by some 1e-4 of their size, on a base in bfloat16 that is float32 on disk."""
    changes = dict(dtype="bfloat16", lora_rank=3, lora_alpha=6.0, lora_targets="up_proj")
    learner = make_learner(params, **changes)
    state = learner.init(params)
    move = lambda path, x: x if path[-1].key == "lora_a" else x + 1e-4
    state = state._replace(params=jax.tree_util.tree_map_with_path(move, state.params))
    a, b = (np.asarray(state.params["layers"]["mlp"]["up_proj"][name]) for name in ("lora_a", "lora_b"))
    kernel = lambda tree: tree["layers"]["mlp"]["up_proj"]["kernel"]
    base = np.asarray(kernel(params).astype(jnp.bfloat16), np.float32)
    want = base + 2.0 * np.einsum("nir,nro->nio", a, b)
    hf_io.save(tmp_path / "base", MODEL, params)
    policy = build.Policy(MODEL, params, None, None, str(tmp_path / "base"))
    engine = lambda dtype: {"name": "native", "sharded": False, "dtype": dtype}
    trainer = lambda dtype: Trainer(
        learner, policy, ConfigDict({"engine": engine(dtype), "learner": learner_config(**changes).to_dict()})
    )
    exact, rounded = (kernel(trainer(dtype).policy(state)) for dtype in ("float32", "bfloat16"))
    np.testing.assert_allclose(exact, want, rtol=1e-6, atol=1e-9)
    assert (np.asarray(exact) != base).mean() > 0.9
    assert rounded.dtype == jnp.bfloat16 and (np.asarray(rounded, np.float32) == base).mean() > 0.9
    left = [tmp_path / ".policy-0123abcd", tmp_path / "policy" / ".adapter-_abcd012"]  # by killed processes
    for path in (*left, tmp_path / ".policy-of-mine"):
        path.mkdir(parents=True)
    trainer("bfloat16").save_policy(state, tmp_path / "policy")
    assert not any(path.exists() for path in left) and (tmp_path / ".policy-of-mine").exists()
    with safe_open(tmp_path / "policy" / hf_io.WEIGHTS, framework="np") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(kernel(hf_io.load(tmp_path / "policy")[1]), exact)
    own = peft_io.load(tmp_path / "policy" / "adapter", MODEL)
    sum_on = lambda dtype: kernel(lora.merge(hf_io.load(own.base, dtype)[1], own.params, own.scale))
    np.testing.assert_allclose(sum_on(own.base_dtype), exact, rtol=1e-6, atol=1e-9)
    assert own.base_dtype == "bfloat16" and not np.allclose(sum_on("float32"), exact, rtol=1e-4)


def test_without_adapters_the_policy_is_the_state_itself(params):
    learner = make_learner(params)
    state = learner.init(params)
    assert learner.policy(state) is state.params


def test_targets_that_match_nothing_or_no_stack_of_matrices_are_named(params):
    with pytest.raises(ValueError, match="lora_targets 'w_proj' matches no kernel"):
        lora.init(jax.random.key(0), params, 2, "w_proj")
    experts = {"layers": {"mlp": {"experts": {"kernel": jnp.zeros((2, 4, 8, 8))}}}}
    with pytest.raises(ValueError, match="layers/mlp/experts/kernel of shape"):
        lora.init(jax.random.key(0), experts, 2, "experts")


def test_an_adapter_that_no_dense_layer_runs_is_refused(params):
    strange = {"layers": {**params["layers"], "router": {"kernel": jnp.zeros((2, 16, 4))}}}
    adapters = lora.init(jax.random.key(0), strange, 2, "router|q_proj")
    forward = lambda p: Decoder(MODEL).apply({"params": p}, TOKENS)
    with pytest.raises(ValueError, match="cannot have adapters: layers/router; narrow"):
        lora.check_reached(forward, params, adapters)


def test_learners_that_differ_in_the_seed_share_their_programs(params):
    config, mesh = learner_config(lora_rank=2), sharding.make_mesh()
    made = [Learner(MODEL, config, params, temperature=1.0, mesh=mesh, seed=n) for n in (1, 2, 1)]
    assert made[0]._programs is made[1]._programs
    first = [jax.tree.leaves(jax.device_get(learner.init(params).params)) for learner in made]
    one, two, again = (np.concatenate([x.ravel() for x in leaves]) for leaves in first)
    assert (one != two).any() and (one == again).all()
