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

    kind: "update" (one GRPO step) or "generate". vocab_size, tied: of the model. rows: sequences.
    prompt, completion: tokens of each; ragged: completions are uniform in completion / 16 .. completion.
    given: the data hold the log-probabilities of the KL term's reference. Otherwise each implementation runs
    the reference within the step.
    family: of the model, "qwen3" or "llama". The latter has the sizes of SmolLM2-135M.
    kl: weight of the KL term; 0: there is no reference.
    group: rollouts of an agent that follow one prompt; 0: every sequence has a prompt of its own and is
    sampled from there on. Such a completion alternates messages that were sampled with observations.
    `prompt` and `completion` are then the longest. half: every other group has advantages of 0.
    trial: sequences of the updates that choose a setting. Such a case is so large that memory holds one
    implementation at a time. 0: all sequences, and all implementations take turns.
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
    family: str = "qwen3"
    kl: float = KL
    group: int = 0
    half: bool = False
    trial: int = 0

    def shrunk(self) -> Case:
        """The same case in small, to try the machinery; its times mean nothing."""
        size = {"vocab_size": self.vocab_size // 16, "prompt": 32, "completion": 32, "layers": 2}
        return dataclasses.replace(self, rows=8, group=min(self.group, 4), trial=min(self.trial, 8), **size)


def _both(size: str, vocab_size: int, tied: bool) -> list[Case]:
    update = Case(f"{size}-even", "update", vocab_size, tied, rows=32, prompt=128, completion=128)
    ragged = dataclasses.replace(update, name=f"{size}-ragged", ragged=True)
    generate = Case(f"generate-{size}", "generate", vocab_size, tied, rows=64, prompt=64, completion=64)
    given = [dataclasses.replace(case, name=f"{case.name}-given", given=True) for case in (update, ragged)]
    return [update, ragged, *given, generate]


def _smollm2() -> list[Case]:
    sizes = {"vocab_size": 49152, "tied": True, "rows": 64, "layers": 30, "family": "llama", "kl": 0.0}
    agent = {"prompt": 550, "completion": 350, "ragged": True, "group": 8, "trial": 16}
    return [
        Case("smollm2-agent", "update", **sizes, **agent),
        Case("smollm2-agent-half", "update", **sizes, **agent, half=True),
        Case("generate-smollm2", "generate", **sizes, prompt=180, completion=64),
    ]


CASES = {c.name: c for c in _both("small", 4096, False) + _both("large", 151936, True) + _smollm2()}


FAMILIES = {
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
    },
}


def model_config(case: Case) -> dict:
    """The config.json. rope_theta stands where transformers 4 and where transformers 5 look for it."""
    family = FAMILIES[case.family]
    return {
        **family,
        "model_type": case.family,
        "vocab_size": case.vocab_size,
        "num_hidden_layers": case.layers,
        "tie_word_embeddings": case.tied,
        "rope_parameters": {"rope_theta": family["rope_theta"], "rope_type": "default"},
        "max_position_embeddings": 4096,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
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

    The embedding has deviation 0.02, matrices of the layers 0.96 / sqrt(hidden size), so that attention is
    not flat. Norms are near 1.
    """
    rng = np.random.default_rng(seed)
    c = model_config(case)
    d, f, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    matrix = lambda *shape, scale=0.96 / d**0.5: (scale * rng.standard_normal(shape)).astype(np.float32)
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
            **({f"self_attn.{x}_norm": norm(head) for x in "qk"} if case.family == "qwen3" else {}),
            "mlp.gate_proj": matrix(f, d),
            "mlp.up_proj": matrix(f, d),
            "mlp.down_proj": matrix(d, f),
        }
        weights |= {f"model.layers.{i}.{name}.weight": tensor for name, tensor in layer.items()}
    return weights


def random_data(case: Case, seed: int) -> dict[str, np.ndarray]:
    """prompts [N, P] (PAD before the prompt of an agent) and, for an update, completions with their numbers.

    completions [N, C] (PAD after lengths [N]), scored (True on sampled tokens) and sampler_logprobs [N, C],
    advantages [N] and, where they are given, reference_logprobs [N, C]. The sampler's log-probabilities
    scatter around those of an untrained model, which random weights are, so that some ratios are clipped.
    """
    rng = np.random.default_rng(seed)
    draw = lambda width: rng.integers(EOS + 1, case.vocab_size, (case.rows, width), dtype=np.int32)
    data = {"prompts": draw(case.prompt)}
    if case.kind == "generate":
        return data
    shape = case.rows, case.completion
    lengths = np.full(case.rows, case.completion)
    if case.group:
        lengths = rng.integers(case.completion * 3 // 7, case.completion + 1, case.rows)
    elif case.ragged:
        lengths = rng.integers(case.completion // 16, case.completion + 1, case.rows)
    inside = np.arange(case.completion) < lengths[:, None]
    logprobs = -np.log(case.vocab_size) + 0.2 * rng.standard_normal(shape)
    data |= {
        "completions": np.where(inside, draw(case.completion), PAD).astype(np.int32),
        "lengths": lengths.astype(np.int32),
        "sampler_logprobs": np.where(inside, logprobs, 0).astype(np.float32),
        "advantages": rng.standard_normal(case.rows).astype(np.float32),
        "scored": inside,
    }
    if case.given:
        logprobs = -np.log(case.vocab_size) + 0.2 * rng.standard_normal(shape)
        data["reference_logprobs"] = np.where(inside, logprobs, 0).astype(np.float32)
    return _as_agent(case, data, rng) if case.group else data


def _as_agent(case: Case, data: dict[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Gives each group one prompt and each completion its observations.

    At full size prompts have 250 to 550 tokens, sampled messages 20 to 45 and observations 15 to 60.
    """
    group = np.arange(case.rows) // case.group
    longest = rng.integers(case.prompt * 5 // 11, case.prompt + 1, case.rows)[group]
    before = np.arange(case.prompt) < case.prompt - longest[:, None]
    part = lambda tokens: max(1, tokens * case.completion // 350)
    scored = np.zeros_like(data["scored"])
    for row in scored:
        start = 0
        while start < case.completion:
            stop = start + rng.integers(part(20), part(45) + 1)
            row[start:stop], start = True, stop + rng.integers(part(15), part(60) + 1)
    scored &= data["scored"]
    return {
        **data,
        "prompts": np.where(before, PAD, data["prompts"][group * case.group]),
        "scored": scored,
        "sampler_logprobs": np.where(scored, data["sampler_logprobs"], 0),
        "advantages": np.where(case.half & (group % 2 == 1), 0, data["advantages"]),
    }


def write(case: Case, folder: Path) -> None:
    """Writes folder/policy and folder/reference (two models), folder/data.npz and folder/case.json.

    Without a KL term there is no reference.
    """
    for name, seed in (("policy", 1), ("reference", 2))[: 2 if case.kl else 1]:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(model_config(case), indent=2))
        save_file(random_weights(case, seed), folder / name / "model.safetensors", metadata={"format": "pt"})
    np.savez(folder / "data.npz", **random_data(case, seed=3))
    (folder / "case.json").write_text(json.dumps(dataclasses.asdict(case)))


def read(folder: Path) -> tuple[Case, dict[str, np.ndarray]]:
    """Reads the case and its data, as `write` saves them."""
    with np.load(folder / "data.npz") as data:
        return Case(**json.loads((folder / "case.json").read_text())), dict(data)


def learned(case: Case, data: dict[str, np.ndarray]) -> np.ndarray:
    """[N], True for the sequences that the loss pulls at: those with an advantage or a KL term."""
    return (data["advantages"] != 0) | bool(case.kl)


def useful_tokens(case: Case, data: dict[str, np.ndarray]) -> int:
    """Update: tokens of each group's prompt, once, and of completions without padding. Generation: sampled.

    Sequences that nothing is learned from do not count.
    """
    if case.kind == "generate":
        return case.rows * case.completion
    rows = learned(case, data)
    return int((data["prompts"][rows][:: case.group or 1] != PAD).sum() + data["lengths"][rows].sum())


def operations(case: Case, data: dict[str, np.ndarray]) -> float:
    """Floating-point operations that the useful tokens need: products with weights and of attention.

    2 per weight and token forward, 4 more backward. Update: the policy forward and backward and, where there
    is one that is not given, the reference forward; the unembedding on scored tokens only. Generation:
    forward, and the unembedding once per sampled token.
    """
    c = model_config(case)
    d, f, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
    layers = case.layers * (2 * d * q + 2 * d * kv + 3 * d * f)
    rows = learned(case, data) if case.kind == "update" else np.ones(case.rows, bool)
    lengths = data.get("lengths", np.full(case.rows, case.completion))[rows].astype(np.float64)
    prompts = (data["prompts"][rows] != PAD).sum(axis=1).astype(np.float64)
    once = prompts[:: case.group or 1]
    unembedded = data["scored"][rows].sum() if case.kind == "update" else lengths.sum()
    triangle = lambda n: np.sum(n * (n + 1) / 2)
    pairs = triangle(once) + triangle(lengths) + lengths @ prompts  # of a query and a key, causal
    attention = case.layers * pairs * 2 * q  # scores and weighted sum, multiply-adds
    tokens = np.sum(once) + np.sum(lengths)
    forward = 2 * (layers * tokens + case.vocab_size * d * unembedded + attention)
    passes = 1 if case.kind == "generate" else 3 if case.given or not case.kl else 4
    return float(passes * forward)
