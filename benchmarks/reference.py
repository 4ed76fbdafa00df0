"""Qwen3, Llama and the GRPO loss in float64 numpy, slow and obvious: every implementation agrees with it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from cases import CLIP, PAD, Case, learned
from safetensors.numpy import load_file


class Model:
    """Reads a Hugging Face folder of a dense Qwen3 or Llama."""

    def __init__(self, folder: Path):
        self.config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        self._tensors = {name: x.astype(np.float64) for name, x in tensors.items()}

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        """ids [T] of one sequence -> log-probabilities of the next token, [T, V]."""
        c, w = self.config, self._tensors
        x = w["model.embed_tokens.weight"][ids]
        for i in range(c["num_hidden_layers"]):
            layer = lambda name: w[f"model.layers.{i}.{name}.weight"]
            x = x + self._attention(self._norm(x, layer("input_layernorm")), layer)
            h = self._norm(x, layer("post_attention_layernorm"))
            gate = h @ layer("mlp.gate_proj").T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ layer("mlp.up_proj").T)) @ layer("mlp.down_proj").T
        head = w["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"]
        logits = self._norm(x, w["model.norm.weight"]) @ head.T
        logits -= logits.max(axis=-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))

    def _norm(self, x, scale):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config["rms_norm_eps"]) * scale

    def _attention(self, x, layer):
        c, T = self.config, len(x)
        heads = lambda name: (x @ layer(name).T).reshape(T, -1, c["head_dim"])
        q, k, v = (heads(f"self_attn.{x}_proj") for x in "qkv")
        if c["model_type"] == "qwen3":
            q, k = self._norm(q, layer("self_attn.q_norm")), self._norm(k, layer("self_attn.k_norm"))
        q, k = self._rotate(q), self._rotate(k)
        group, future, outputs = q.shape[1] // k.shape[1], np.triu(np.ones((T, T), bool), 1), []
        for h in range(q.shape[1]):
            scores = q[:, h] @ k[:, h // group].T / np.sqrt(c["head_dim"])
            weights = np.exp(np.where(future, -np.inf, scores - scores.max(axis=-1, keepdims=True)))
            outputs.append(weights / weights.sum(axis=-1, keepdims=True) @ v[:, h // group])
        return np.concatenate(outputs, axis=-1) @ layer("self_attn.o_proj").T

    def _rotate(self, x):
        T, _, D = x.shape
        angles = np.arange(T)[:, None] * self.config["rope_theta"] ** (-np.arange(0, D, 2) / D)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = x[..., : D // 2], x[..., D // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def loss(folder: Path, case: Case, data: dict[str, np.ndarray]) -> float:
    """The GRPO loss before the first update: the mean over the scored tokens of sequences with an advantage.

    Each term is the clipped surrogate (arXiv 2402.03300, eq. 3) plus `case.kl` times Schulman's k3. With a KL
    term all sequences count.
    """
    policy, rows, total = Model(folder / "policy"), np.flatnonzero(learned(case, data)), 0.0
    reference = Model(folder / "reference") if case.kl and not case.given else None
    for i in rows:
        n, scored = data["lengths"][i], data["scored"][i]
        prompt = data["prompts"][i][data["prompts"][i] != PAD]
        ids = np.concatenate([prompt, data["completions"][i, :n]])
        targets = len(prompt) + np.flatnonzero(scored)
        logp = policy(ids)[targets - 1, ids[targets]]
        ratio, a = np.exp(logp - data["sampler_logprobs"][i][scored]), float(data["advantages"][i])
        total -= np.sum(np.minimum(ratio * a, np.clip(ratio, 1 - CLIP, 1 + CLIP) * a))
        if case.kl:
            given = data["reference_logprobs"][i][scored] if case.given else None
            ref = reference(ids)[targets - 1, ids[targets]] if given is None else given
            total += case.kl * np.sum(np.exp(ref - logp) - 1 - (ref - logp))
    return float(total / data["scored"][rows].sum())


def greedy_share(folder: Path, prompts: np.ndarray, completions: np.ndarray) -> float:
    """Share of `completions` [N, C] that are the likeliest token after `prompts` [N, P] and earlier
    completions.

    Ties within float32's resolution of the log-probability count.
    """
    policy, right = Model(folder / "policy"), []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = np.concatenate([prompt, completion])
        logp = policy(ids)[len(prompt) - 1 : -1]
        right.append(logp[np.arange(len(completion)), completion] >= logp.max(axis=-1) - 1e-4)
    return float(np.mean(right))


def updated(bounds: dict[str, float], first: dict, second: dict) -> dict[str, float | str]:
    """How far the loss after one update is from that of ours, or why it is not the same update.

    bounds: by implementation. first, second: the answers of each, with the loss before and after its first
    update.

    Raises ValueError if ours does not move its loss.
    """
    found: dict[str, float | str] = {}
    for name, bound in bounds.items():
        moved = abs(second[name]["loss"] - first[name]["loss"])
        apart = abs(second[name]["loss"] - second["ours"]["loss"])
        found[name] = apart
        if not moved > bound >= apart:
            found[name] = (
                f"an update moves the loss by {moved:.2g}, to {apart:.2g} off ours, beyond {bound:g}"
            )
    if isinstance(found["ours"], str):
        raise ValueError(f"ours: {found['ours']}.")
    return found
