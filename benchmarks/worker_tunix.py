"""Tunix's GRPO update and sampler, as a worker of benchmarks/compare.py.

The Python with Tunix runs it. The update is GRPOLearner's, once the rollouts are there: log-probabilities of
the reference, then the trainer over micro-batches. It averages their mean losses. The loss function weights
each by its tokens, which gives the mean over all tokens. Its sequence packing is off: without the TPU's flash
attention its models do not mask such rows.
"""

from __future__ import annotations

import functools
from importlib.metadata import version
from pathlib import Path

import cases
import jax
import jax.numpy as jnp
import numpy as np
import optax
import protocol
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.llama3 import model as llama3
from tunix.models.llama3 import params as llama3_params
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as qwen3_params
from tunix.rl.function_registry import get_policy_loss_fn
from tunix.rl.grpo.grpo_learner import GRPOConfig, TrainExample
from tunix.rl.inference.inference_worker import InferenceWorker
from tunix.rl.trainer import Trainer
from tunix.sft.peft_trainer import TrainingConfig

_APPLY_ROPE = llama3.apply_rope


def load(folder: Path, case: cases.Case) -> nnx.Module:
    c = cases.model_config(case)
    sizes = {
        "num_layers": c["num_hidden_layers"],
        "vocab_size": c["vocab_size"],
        "embed_dim": c["hidden_size"],
        "hidden_dim": c["intermediate_size"],
        "num_heads": c["num_attention_heads"],
        "head_dim": c["head_dim"],
        "num_kv_heads": c["num_key_value_heads"],
        "rope_theta": int(c["rope_theta"]),
        "norm_eps": c["rms_norm_eps"],
    }
    if case.family == "llama":
        config, params = llama3.ModelConfig(**sizes, weight_tying=case.tied), llama3_params
        # Its Llama never reads rope_theta of its config, and would rotate by 1e6.
        llama3.apply_rope = functools.partial(_APPLY_ROPE, rope_theta=c["rope_theta"])
    else:
        config, params = qwen3.ModelConfig(**sizes, use_tied_embedding=case.tied), qwen3_params
    return params.create_model_from_safe_tensors(str(folder), config, dtype=jnp.float32)


def prepare_update(folder: Path, case: cases.Case, data: dict, setting: dict):
    """setting: micro, the sequences of a micro-batch."""
    adamw = dict(cases.ADAMW)
    optimizer = optax.chain(optax.clip_by_global_norm(adamw.pop("max_grad_norm")), optax.adamw(**adamw))
    algorithm = GRPOConfig(
        num_generations=8,
        beta=case.kl,
        epsilon=cases.CLIP,
        kl_loss_mode="low_var_kl",
        loss_agg_mode="token-mean",
    )
    algorithm.temperature = 1.0  # as GRPOLearner sets it
    actor, micro = load(folder / "policy", case), setting["micro"]
    trainer = Trainer(
        actor,
        optimizer,
        TrainingConfig(eval_every_n_steps=10**9, gradient_accumulation_steps=case.rows // micro),
        custom_checkpoint_metadata_fn=dict,
    )
    trainer.is_managed_externally = True  # as in RLCluster
    loss_fn, tokens = get_policy_loss_fn("grpo"), data["scored"][cases.learned(case, data)].sum()

    def weighted(model, train_example, algo_config):
        loss, more = loss_fn(model, train_example, algo_config=algorithm, pad_id=cases.PAD, eos_id=cases.EOS)
        return loss * train_example.completion_mask.sum() * (case.rows // micro / tokens), more

    trainer.with_loss_fn(weighted, has_aux=True)
    trainer.with_gen_model_input_fn(lambda x: {"train_example": x, "algo_config": algorithm})
    scores = case.kl and not case.given
    reference = None if not scores else InferenceWorker({"reference": load(folder / "reference", case)})

    def update() -> dict:
        examples = []
        for start in range(0, case.rows, micro):
            rows = {name: jnp.asarray(x[start : start + micro]) for name, x in data.items()}
            prompts, completions = rows["prompts"], rows["completions"]
            examples.append(
                TrainExample(
                    prompt_ids=prompts,
                    prompt_mask=prompts != cases.PAD,
                    completion_ids=completions,
                    completion_mask=rows["scored"],
                    advantages=rows["advantages"],
                    ref_per_token_logps=rows.get("reference_logprobs")
                    if reference is None
                    else reference.get_ref_per_token_logps(prompts, completions, cases.PAD, cases.EOS),
                    old_per_token_logps=rows["sampler_logprobs"],
                )
            )
        trainer.train(examples)
        jax.block_until_ready(nnx.state(actor))
        # It reports losses one step late, and keeps the newest here.
        return {"loss": float(trainer._prev_buffered_train_metrics.loss)}

    scored = ["tunix.rl.inference.inference_worker.InferenceWorker.get_ref_per_token_logps"]
    return [
        *(scored if scores else []),
        "tunix.rl.trainer.Trainer.train",
        "tunix.rl.algo_core.grpo_loss_fn (token-mean)",
    ], {"run": update}


class Tokens:
    """A tokenizer whose text is the ids themselves."""

    def encode(self, text: str, **_) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids, **_) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 0  # none precedes the prompt

    def eos_id(self) -> int:
        return cases.EOS

    def pad_id(self) -> int:
        return cases.PAD


def prepare_generate(folder: Path, case: cases.Case, data: dict, setting: dict):
    model, length = load(folder / "policy", case), case.prompt + case.completion
    c = cases.model_config(case)
    sampler = Sampler(
        model,
        Tokens(),
        CacheConfig(
            cache_size=length,
            num_layers=case.layers,
            num_kv_heads=c["num_key_value_heads"],
            head_dim=c["head_dim"],
        ),
    )
    texts = [Tokens().decode(row) for row in data["prompts"]]
    seed = 0

    def generate(**sampling) -> list:
        nonlocal seed
        seed += 1
        # No id of the vocabulary ends a completion, so that all have their full length.
        answer = sampler(
            texts,
            max_generation_steps=case.completion,
            max_prompt_length=case.prompt,
            eos_tokens=[case.vocab_size],
            seed=seed,
            **sampling,
        )
        return [np.asarray(ids).tolist() for ids in answer.tokens]

    return ["tunix.generate.sampler.Sampler (temperature 1, top_p 1, no log-probabilities)"], {
        "run": lambda: {"tokens": sum(map(len, generate(temperature=1.0, top_p=1.0)))},
        "greedy": lambda: {"ids": generate()},
    }


def prepare(job: dict):
    folder = Path(job["folder"])
    case, data = cases.read(folder)
    calls, functions = (prepare_update if case.kind == "update" else prepare_generate)(
        folder, case, data, job["setting"]
    )
    versions = {name: version(name) for name in ("google-tunix", "jax")}
    return {"versions": versions, "calls": calls}, functions


if __name__ == "__main__":
    protocol.serve(prepare)
