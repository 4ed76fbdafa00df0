"""TRL's GRPO update and transformers' generate, as a worker of benchmarks/compare.py.

The Python with TRL runs it. The trainer is the real one, but for the method that samples and scores. Its
replacement returns the case's completions with the log-probabilities of the reference, computed like the
original does.
"""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path

import cases
import datasets
import numpy as np
import protocol
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from trl import GRPOConfig, GRPOTrainer


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer for the trainer, which demands one; no text passes through it."""
    words = Tokenizer(WordLevel({"<pad>": cases.PAD, "<eos>": cases.EOS}, unk_token="<eos>"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


class Trainer(GRPOTrainer):
    """GRPOTrainer with ready rollouts: tensors [N, ...] by name."""

    rollouts: dict[str, torch.Tensor]

    def _generate_and_score_completions(self, inputs):
        r = self.rollouts
        if self.ref_model is None:
            return r
        ids = torch.cat([r["prompt_ids"], r["completion_ids"]], dim=1)
        mask = torch.cat([r["prompt_mask"], r["completion_mask"]], dim=1)
        with torch.no_grad():
            reference, *_ = self._get_per_token_logps_and_entropies(
                self.ref_model,
                ids,
                mask,
                r["completion_ids"].size(1),
                batch_size=self.args.per_device_train_batch_size,
            )
        return {**r, "ref_per_token_logps": reference}


def prepare_update(folder: Path, case: cases.Case, data: dict, setting: dict):
    """setting: micro, the sequences of a micro-batch; dtype, bfloat16 for TRL's mixed precision.

    It computes the groups without spread too: TRL has no setting that leaves them out.
    """
    micro, adamw = setting["micro"], cases.ADAMW
    steps = case.rows // micro
    trainer = Trainer(
        model=str(folder / "policy"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(dir=folder),
            use_cpu=True,
            bf16="dtype" in setting,
            report_to="none",
            model_init_kwargs={"dtype": torch.float32},
            gradient_checkpointing=False,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=steps,
            num_generations=8,
            max_completion_length=case.completion,
            temperature=1.0,
            loss_type="dapo",
            beta=case.kl,
            epsilon=cases.CLIP,
            use_bias_correction_kl=False,  # k3 itself, as in the other implementations
            learning_rate=adamw["learning_rate"],
            adam_beta1=adamw["b1"],
            adam_beta2=adamw["b2"],
            weight_decay=adamw["weight_decay"],
            max_grad_norm=adamw["max_grad_norm"],
        ),
        train_dataset=datasets.Dataset.from_list([{"prompt": "<eos>"}] * case.rows),
        processing_class=tokenizer(),
    )
    if case.given:
        trainer.ref_model = None  # frees its memory
    elif case.kl:
        reference = load_file(folder / "reference" / "model.safetensors")
        trainer.ref_model.load_state_dict(reference, strict=not case.tied)
        del reference
    completions = torch.tensor(data["completions"], dtype=torch.long)
    prompts = torch.tensor(data["prompts"], dtype=torch.long)
    trainer.rollouts = {
        "prompt_ids": prompts,
        "prompt_mask": (prompts != cases.PAD).long(),
        "completion_ids": completions,
        "completion_mask": (completions != cases.PAD).long(),
        "advantages": torch.tensor(data["advantages"]),
        "old_per_token_logps": torch.tensor(data["sampler_logprobs"]),
        "num_items_in_batch": torch.tensor(data["scored"][cases.learned(case, data)].sum()),
    }
    if case.group:
        trainer.rollouts["tool_mask"] = torch.tensor(data["scored"], dtype=torch.long)
    if case.given:
        trainer.rollouts["ref_per_token_logps"] = torch.tensor(data["reference_logprobs"])
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = steps

    def update() -> dict:  # the inner part of transformers.Trainer's loop
        loss = sum(trainer.training_step(trainer.model, None, None) for _ in range(steps))
        norm = trainer._clip_grad_norm(trainer.model)
        trainer.optimizer.step()
        trainer.model.zero_grad()
        return {"loss": float(loss), "grad_norm": float(norm)}

    return [
        *(
            []
            if trainer.ref_model is None
            else ["trl.GRPOTrainer._get_per_token_logps_and_entropies (reference)"]
        ),
        "trl.GRPOTrainer.training_step (dapo)",
        "trl.GRPOTrainer._clip_grad_norm",
        f"{type(trainer.optimizer).__name__}.step",
    ], {"run": update}


def prepare_generate(folder: Path, case: cases.Case, data: dict, setting: dict):
    """setting: dtype of weights and computation; further options of generate."""
    setting = dict(setting)
    dtype = getattr(torch, setting.pop("dtype", "float32"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=dtype).eval()
    model.generation_config.eos_token_id = None  # all completions have their full length
    prompts = torch.tensor(data["prompts"], dtype=torch.long)

    def generate(**sampling) -> np.ndarray:
        with torch.inference_mode():
            ids = model.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=case.completion,
                **sampling,
                **setting,
            )
        return ids[:, case.prompt :].numpy()

    name = type(model).__name__
    return [f"transformers.{name}.generate (temperature 1, no top-k, no log-probabilities)"], {
        "run": lambda: {"tokens": generate(do_sample=True, temperature=1.0, top_p=1.0, top_k=0).size},
        "greedy": lambda: {"ids": generate(do_sample=False).tolist()},
    }


def prepare(job: dict):
    torch.manual_seed(0)
    folder = Path(job["folder"])
    case, data = cases.read(folder)
    calls, functions = (prepare_update if case.kind == "update" else prepare_generate)(
        folder, case, data, job["setting"]
    )
    versions = {name: version(name) for name in ("trl", "transformers", "torch")}
    return {"versions": versions, "calls": calls}, functions


if __name__ == "__main__":
    protocol.serve(prepare)
