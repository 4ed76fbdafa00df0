"""This repository's update and generation, as a worker of benchmarks/compare.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import cases
import jax
import jax.numpy as jnp
import numpy as np
import protocol
from ml_collections import ConfigDict

from coevolve_jax import event_loop
from coevolve_jax.distributed import sharding
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.grpo.packing import Batch, pack_for
from coevolve_jax.models import hf_io
from coevolve_jax.rollout.engine import Request, Sampling
from coevolve_jax.rollout.native.engine import NativeEngine
from coevolve_jax.types import Outcome, TrainingSample, Trajectory
from configs.bfcl_tiny import get_config


def trajectories(data: dict[str, np.ndarray]) -> list[Trajectory]:
    """The case's sequences as rollouts, without their padding."""
    made = []
    for i, n in enumerate(data["lengths"]):
        prompt, completion = data["prompts"][i], data["completions"][i, :n]
        prompt = prompt[prompt != cases.PAD]
        nothing = np.zeros(len(prompt), np.float32)
        sampled = np.concatenate([nothing > 0, data["scored"][i, :n]])
        made.append(
            Trajectory(
                task_id=str(i),
                rollout_index=0,
                ids=np.concatenate([prompt, completion]),
                mask=sampled,
                logprobs=np.concatenate([nothing, data["sampler_logprobs"][i, :n]]),
                versions=np.where(sampled, 0, -1).astype(np.int32),
                turn_starts=(0,),
                steps=(),
                stop="done",
                outcome=Outcome(reward=1.0, success=True),
            )
        )
    return made


def make_learner(folder: Path, setting: dict) -> tuple[Learner, Any, ConfigDict]:
    """The learner of a case, the policy's parameters, and the learner's config.

    setting: keys of the learner's config, and dtype, that of products' operands.
    """
    c, case = get_config(), cases.read(folder)[0]
    setting = {**setting, "matmul_dtype": setting.get("dtype", "")}
    setting.pop("dtype", None)
    with c.learner.unlocked():
        c.learner.update(
            {
                **{k: cases.ADAMW[k] for k in ("learning_rate", "weight_decay", "max_grad_norm")},
                "adam_b1": cases.ADAMW["b1"],
                "adam_b2": cases.ADAMW["b2"],
                "clip_low": cases.CLIP,
                "clip_high": cases.CLIP,
                "kl_coef": case.kl,
                "warmup_steps": 0,
                **setting,
            }
        )
    model_config, params = hf_io.load(folder / "policy")
    # Where the reference does not run the policy stands in for its shapes.
    reference = params if case.given or not case.kl else hf_io.load(folder / "reference")[1]
    learner = Learner(model_config, c.learner, reference, temperature=1.0, mesh=sharding.make_mesh(**c.mesh))
    return learner, params, c.learner


def make_batch(
    case: cases.Case, data: dict[str, np.ndarray], rollouts: list[Trajectory], config: ConfigDict
) -> Batch:
    def reference(i: int) -> np.ndarray | None:
        if not case.given:
            return None
        completion = data["reference_logprobs"][i, : data["lengths"][i]]
        return np.concatenate([np.zeros(case.prompt, np.float32), completion])

    # As config.learner.skip_zero_variance_groups has it, groups without spread are left out.
    samples = [
        TrainingSample(
            rollouts[i],
            np.full(len(rollouts[i].ids), data["advantages"][i], np.float32),
            ref_logprobs=reference(i),
        )
        for i in np.flatnonzero(cases.learned(case, data))
    ]
    return pack_for(config, samples, max_rows=case.rows)


def prepare_update(folder: Path, case: cases.Case, data: dict, setting: dict):
    learner, params, config = make_learner(folder, setting)
    state = learner.init(params)
    del params
    rollouts = trajectories(data)

    def update() -> dict:
        nonlocal state
        state, metrics = learner.update(state, make_batch(case, data, rollouts, config))
        jax.block_until_ready(state)
        return {"loss": float(metrics["loss"])}

    return ["coevolve_jax.grpo.packing.pack_for", "coevolve_jax.grpo.learner.Learner.update"], {"run": update}


def prepare_generate(folder: Path, case: cases.Case, data: dict, setting: dict):
    model_config, params = hf_io.load(folder / "policy")
    engine = NativeEngine(
        model_config,
        params,
        slots=case.rows,
        max_length=case.prompt + case.completion,
        max_new_tokens=case.completion,
        seed=0,
        matmul_dtype=jnp.bfloat16 if setting.get("dtype") else None,
    )
    served = 0

    def generate(temperature: float) -> list:
        nonlocal served
        sampling = Sampling(temperature=temperature, max_new_tokens=case.completion)
        conversation_ids = range(served, served + case.rows)
        served += case.rows
        completions = event_loop.run(
            engine.generate(
                [
                    Request(s, ids, sampling, seed=s)
                    for s, ids in zip(conversation_ids, data["prompts"], strict=True)
                ]
            )
        )
        engine.release(conversation_ids)
        return [c.ids.tolist() for c in completions]

    return ["coevolve_jax.rollout.native.NativeEngine.generate"], {
        "run": lambda: {"tokens": sum(map(len, generate(1.0)))},
        "greedy": lambda: {"ids": generate(0.0)},
    }


def prepare(job: dict):
    folder = Path(job["folder"])
    case, data = cases.read(folder)
    calls, functions = (prepare_update if case.kind == "update" else prepare_generate)(
        folder, case, data, job["setting"]
    )
    return {"versions": {"jax": jax.__version__}, "calls": calls}, functions


if __name__ == "__main__":
    protocol.serve(prepare)
