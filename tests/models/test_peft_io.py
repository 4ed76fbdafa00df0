"""Adapters as folders of peft: round trips, the logits of peft itself in both directions, refusals."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from coevolve_jax.grpo import lora
from coevolve_jax.models import hf_io, peft_io
from coevolve_jax.models.decoder import Decoder

RANK, ALPHA = 3, 5.0
IDS = np.array([[3, 8, 1, 80, 2, 40]])


def random(tree, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(0, 0.15, p.shape), jnp.float32), tree)


def adapters(config, targets="_proj", seed=1) -> peft_io.Adapters:
    """Adapters whose B is not zero, as after training."""
    fresh = lora.init(jax.random.key(0), hf_io.abstract_params(config), RANK, targets)
    return peft_io.Adapters(random(fresh, seed), RANK, ALPHA, "models/base")


def logits(config, params, own: peft_io.Adapters):
    merged = lora.merge(params, own.params, own.scale)
    return Decoder(config).apply({"params": merged}, jnp.asarray(IDS))


@pytest.mark.slow
@pytest.mark.parametrize("targets", ["_proj", "self_attn/(q|v)_proj", "mlp"])
def test_round_trip(tiny_config, tmp_path, targets):
    own = adapters(tiny_config, targets)
    peft_io.save(tmp_path / "adapter", tiny_config, own)
    again = peft_io.load(tmp_path / "adapter", tiny_config)
    assert again._replace(params=None) == own._replace(params=None)
    assert peft_io.base_of(tmp_path / "adapter") == "models/base"
    jax.tree.map(np.testing.assert_array_equal, again.params, own.params)
    peft_io.save(tmp_path / "adapter", tiny_config, adapters(tiny_config, targets, seed=2))  # it replaces
    a = peft_io.load(tmp_path / "adapter", tiny_config)
    assert not jax.tree.all(jax.tree.map(jnp.array_equal, a.params, own.params))
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]  # no temporary folder remains


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"model_type": "qwen2", "head_dim": 8, "tie_word_embeddings": False}, {"model_type": "llama"}],
    ids=["qwen3", "qwen2", "llama"],
)
def test_peft_reads_ours_and_we_read_what_peft_writes(tiny_config, tmp_path, changes):
    import peft
    import torch
    import transformers

    config = dataclasses.replace(tiny_config, **changes)
    params = random(hf_io.abstract_params(config), 0)
    hf_io.save(tmp_path / "base", config, params)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    ids, plain = torch.tensor(IDS), base(torch.tensor(IDS)).logits.detach().numpy()

    own = adapters(config)
    peft_io.save(tmp_path / "ours", config, own)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "ours")
    ours = logits(config, params, own)
    np.testing.assert_allclose(theirs(ids).logits.detach().numpy(), ours, atol=2e-5)
    assert np.abs(np.asarray(ours) - plain).max() > 0.1  # the adapters matter
    base = theirs.unload()

    wanted = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"], layers_to_transform=[0, 2],
        use_rslora=True, init_lora_weights=False, task_type="CAUSAL_LM",
    )  # fmt: skip
    theirs = peft.get_peft_model(base, wanted)
    theirs.save_pretrained(tmp_path / "theirs")
    read = peft_io.load(tmp_path / "theirs", config)
    assert (read.rank, read.scale) == (4, pytest.approx(6 / 2))
    np.testing.assert_allclose(theirs(ids).logits.detach().numpy(), logits(config, params, read), atol=2e-5)


Q = "base_model.model.model.layers.1.self_attn.q_proj"
OTHER = Q.replace(".1.", ".7.")  # of a layer that the base lacks


@pytest.mark.parametrize(
    "edit, why",
    [
        ({"use_dora": True}, "has use_dora=True, which is not supported: only False is"),
        ({"modules_to_save": ["lm_head"]}, r"has modules_to_save=\['lm_head'\], which is not supported"),
        ({"peft_type": "IA3"}, "has peft_type='IA3'"),
        ({"layer_replication": [[1, 4]]}, r"has layer_replication=\[\[1, 4\]\], which is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4', by which"),
        ({"init_lora_weights": "OLoRA"}, "has init_lora_weights='olora'"),
        ({"alora_invocation_tokens": [1, 2]}, r"has alora_invocation_tokens=\[1, 2\], which"),
        (
            {"tensors": {"base_model.model.lm_head.base_layer.weight": np.ones((3, 3), np.float32)}},
            "holds base_model.model.lm_head.base_layer.weight, and the base has no such linear layer",
        ),
        ({"r": 0}, "has r=0 and lora_alpha=5.0: both must be finite numbers above 0"),
        ({"r": True}, "has r=True and lora_alpha=5.0: both must be finite numbers above 0"),
        ({"lora_alpha": None}, "has r=3 and lora_alpha=None"),
        ({"lora_alpha": True}, "has r=3 and lora_alpha=True"),
        ({"lora_alpha": 0}, "has r=3 and lora_alpha=0: both must be finite numbers above 0"),
        ({"lora_alpha": -16.0}, "adapter_config.json has r=3 and lora_alpha=-16.0"),
        ({"lora_alpha": float("nan")}, "has r=3 and lora_alpha=nan"),
        ({"lora_alpha": float("inf")}, "has r=3 and lora_alpha=inf"),
        ({"spoil": np.nan}, rf"{peft_io.WEIGHTS} holds numbers in {Q}.lora_B.weight that are not finite"),
        ({"spoil": -np.inf}, rf"{peft_io.WEIGHTS} holds numbers in {Q}.lora_B.weight that are not finite"),
        ({"r": 2}, r"has shape \(3, 56\) instead of \(2, 56\)"),
        ({"tensors": {f"{Q}.lora_A.weight": None}}, "has A or B of .*layers.1.self_attn.q_proj alone"),
        (
            {"tensors": {f"{OTHER}.lora_{half}.weight": np.ones((3, 3), np.float32) for half in "AB"}},
            "holds .*layers.7.self_attn.q_proj.*, and the base has no such linear layer",
        ),
    ],
)  # fmt: skip
def test_what_we_cannot_apply_is_refused_in_a_sentence(tiny_config, tmp_path, edit, why):
    peft_io.save(tmp_path, tiny_config, adapters(tiny_config))
    tensors = {**load_file(tmp_path / peft_io.WEIGHTS), **edit.pop("tensors", {})}
    tensors[f"{Q}.lora_B.weight"][1, 2] = edit.pop("spoil", 0.5)
    save_file({k: v for k, v in tensors.items() if v is not None}, tmp_path / peft_io.WEIGHTS)
    told = json.loads((tmp_path / peft_io.CONFIG).read_text())
    (tmp_path / peft_io.CONFIG).write_text(json.dumps({**told, **edit}))
    with pytest.raises(ValueError, match=why):
        peft_io.load(tmp_path, tiny_config)


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600)])
def test_adapters_are_readable_as_the_umask_says(tiny_config, tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        peft_io.save(tmp_path / "adapter", tiny_config, adapters(tiny_config))
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "adapter").iterdir()}
    assert modes == {peft_io.WEIGHTS: mode, peft_io.CONFIG: mode}


def test_what_is_no_folder_of_adapters_is_told(tiny_config, tmp_path):
    with pytest.raises(ValueError, match="holds no adapters of peft, for it has no adapter_config.json"):
        peft_io.load(tmp_path, tiny_config)
    (tmp_path / peft_io.CONFIG).write_text("[]")
    with pytest.raises(ValueError, match="is no config of LoRA adapters"):
        peft_io.load(tmp_path, tiny_config)
    zeros = adapters(tiny_config)
    zeros = zeros._replace(params=jax.tree.map(jnp.zeros_like, zeros.params), base="")
    peft_io.save(tmp_path, tiny_config, zeros)
    with pytest.raises(ValueError, match="holds zeros alone"):
        peft_io.load(tmp_path, tiny_config)
    with pytest.raises(ValueError, match="names no base model"):
        peft_io.base_of(tmp_path)
