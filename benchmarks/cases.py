"""The compared cases: shapes, random weights in Hugging Face format, data, and their operation counts.

Numpy only, because the workers of every virtual environment read it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

PAD, EOS = 0, 1  # never drawn as data: some peers infer their masks from these ids
CLIP, KL = 0.2, 0.001
ADAMW = {"learning_rate": 1e-5, "b1": 0.9, "b2": 0.95, "weight_decay": 0.0, "max_grad_norm": 1.0}


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison.

    kind: "update" (one GRPO step) or "generate". vocab_size, tied: of the Qwen3 model. rows: sequences.
    prompt, completion: tokens of each; ragged: completions are uniform in completion / 16 .. completion.
    given: the data hold the log-probabilities of the KL term's reference. Otherwise each implementation runs
    the reference within the step.
    """

    name: str
    kind: str
    vocab_size: int
    tied: bool
    rows: int
    prompt: int
    completion: int
    ragged: bool = False
    given: bool = False
    layers: int = 4

    def shrunk(self) -> Case:
        """The same case in small, to try the machinery; its times mean nothing."""
        return dataclasses.replace(
            self, vocab_size=self.vocab_size // 16, rows=8, prompt=32, completion=32, layers=2
        )


def _both(size: str, vocab_size: int, tied: bool) -> list[Case]:
    update = Case(f"{size}-even", "update", vocab_size, tied, rows=32, prompt=128, completion=128)
    ragged = dataclasses.replace(update, name=f"{size}-ragged", ragged=True)
    generate = Case(f"generate-{size}", "generate", vocab_size, tied, rows=64, prompt=64, completion=64)
    given = [dataclasses.replace(case, name=f"{case.name}-given", given=True) for case in (update, ragged)]
    return [update, ragged, *given, generate]


CASES = {c.name: c for c in _both("small", 4096, False) + _both("large", 151936, True)}


def model_config(case: Case) -> dict:
    """The config.json. rope_theta stands where transformers 4 and where transformers 5 look for it."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": case.vocab_size,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": case.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": case.tied,
        "rope_theta": 1e6,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "use_sliding_window": False,
        "dtype": "float32",
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": None,
    }


def random_weights(case: Case, seed: int) -> dict[str, np.ndarray]:
    """float32 tensors under their Hugging Face names.

    Matrices have deviation 0.02 (0.06 within the layers, so that attention is not flat), norms are near 1.
    """
    rng = np.random.default_rng(seed)
    c = model_config(case)
    d, f, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    matrix = lambda *shape, scale=0.06: (scale * rng.standard_normal(shape)).astype(np.float32)
    norm = lambda size: (1 + 0.1 * rng.standard_normal(size)).astype(np.float32)
    table = lambda: matrix(case.vocab_size, d, scale=0.02)
    weights = {"model.embed_tokens.weight": table(), "model.norm.weight": norm(d)}
    if not case.tied:
        weights["lm_head.weight"] = table()
    for i in range(case.layers):
        layer = {
            "input_layernorm": norm(d),
            "post_attention_layernorm": norm(d),
            "self_attn.q_proj": matrix(q, d),
            "self_attn.k_proj": matrix(kv, d),
            "self_attn.v_proj": matrix(kv, d),
            "self_attn.o_proj": matrix(d, q),
            "self_attn.q_norm": norm(head),
            "self_attn.k_norm": norm(head),
            "mlp.gate_proj": matrix(f, d),
            "mlp.up_proj": matrix(f, d),
            "mlp.down_proj": matrix(d, f),
        }
        weights |= {f"model.layers.{i}.{name}.weight": tensor for name, tensor in layer.items()}
    return weights


def random_data(case: Case, seed: int) -> dict[str, np.ndarray]:
    """prompts [N, P] and, for an update, completions [N, C] (PAD after lengths [N]) with their numbers.

    These are sampler_logprobs [N, C], advantages [N] and, where they are given, reference_logprobs [N, C].
    The sampler's log-probabilities scatter around those of an untrained model, which random weights are, so
    that some ratios are clipped.
    """
    rng = np.random.default_rng(seed)
    draw = lambda width: rng.integers(EOS + 1, case.vocab_size, (case.rows, width), dtype=np.int32)
    data = {"prompts": draw(case.prompt)}
    if case.kind == "generate":
        return data
    shape = case.rows, case.completion
    lengths = np.full(case.rows, case.completion)
    if case.ragged:
        lengths = rng.integers(case.completion // 16, case.completion + 1, case.rows)
    inside = np.arange(case.completion) < lengths[:, None]
    logprobs = -np.log(case.vocab_size) + 0.2 * rng.standard_normal(shape)
    data |= {
        "completions": np.where(inside, draw(case.completion), PAD).astype(np.int32),
        "lengths": lengths.astype(np.int32),
        "sampler_logprobs": np.where(inside, logprobs, 0).astype(np.float32),
        "advantages": rng.standard_normal(case.rows).astype(np.float32),
    }
    if case.given:
        logprobs = -np.log(case.vocab_size) + 0.2 * rng.standard_normal(shape)
        data["reference_logprobs"] = np.where(inside, logprobs, 0).astype(np.float32)
    return data


def write(case: Case, folder: Path) -> None:
    """Writes folder/policy and folder/reference (two models), folder/data.npz and folder/case.json."""
    for name, seed in (("policy", 1), ("reference", 2)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(model_config(case), indent=2))
        save_file(random_weights(case, seed), folder / name / "model.safetensors", metadata={"format": "pt"})
    np.savez(folder / "data.npz", **random_data(case, seed=3))
    (folder / "case.json").write_text(json.dumps(dataclasses.asdict(case)))


def read(folder: Path) -> tuple[Case, dict[str, np.ndarray]]:
    """Reads the case and its data, as `write` saves them."""
    with np.load(folder / "data.npz") as data:
        return Case(**json.loads((folder / "case.json").read_text())), dict(data)


def useful_tokens(case: Case, data: dict[str, np.ndarray]) -> int:
    """Update: prompt and completion tokens without padding. Generation: sampled tokens."""
    if case.kind == "generate":
        return case.rows * case.completion
    return case.rows * case.prompt + int(data["lengths"].sum())


def operations(case: Case, data: dict[str, np.ndarray]) -> float:
    """Floating-point operations that the useful tokens need: products with weights and of attention.

    2 per weight and token forward, 4 more backward. Update: the policy forward and backward and, unless it is
    given, the reference forward; the unembedding on completion tokens only. Generation: forward, and the
    unembedding once per sampled token.
    """
    c = model_config(case)
    d, f, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    layers = case.layers * (2 * d * q + 2 * d * kv + 3 * d * f)
    lengths = data.get("lengths", np.full(case.rows, case.completion)).astype(np.float64)
    tokens = case.prompt + lengths
    pairs = np.sum(tokens * (tokens + 1) / 2)  # pairs of a query and a key, causal
    attention = case.layers * pairs * 2 * q  # scores and weighted sum, multiply-adds
    forward = 2 * (layers * np.sum(tokens) + case.vocab_size * d * np.sum(lengths) + attention)
    passes = 1 if case.kind == "generate" else 3 if case.given else 4
    return float(passes * forward)
