"""The StableHLO text of the update's program, by setting.

The batch has no cross-entropy weights and no given reference log-probabilities.

    python -m tests.support.update_programs

writes update_programs.json beside this file: the SHA-256 of each text, and the versions of jax and flax.
A text is the result of `Learner.lower(batch).as_text()`. Run it on a commit whose programs are known to be
right. This file needs nothing else that is younger than it.
"""

import dataclasses
import hashlib
import json
from pathlib import Path

import flax
import jax

from coevolve_jax.distributed import sharding
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.models import hf_io
from coevolve_jax.planning.aot.programs import abstract_batch
from tests.support.grpo_cases import MODEL, learner_config

DIGESTS = Path(__file__).with_suffix(".json")
EXPERTS = dataclasses.replace(
    MODEL, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20
)
SHAPE = (3, 2, 32)  # micro-batches, rows, tokens

# name -> model, changes of the learner's config
CASES = {
    "plain": (MODEL, {}),
    "bfloat16, layers computed again": (MODEL, dict(dtype="bfloat16", remat=True, kl="k2")),
    "LoRA": (MODEL, dict(lora_rank=3)),
    "truncated importance sampling, two epochs": (MODEL, dict(tis_cap=2.0, epochs=2)),
    "experts with router balance": (EXPERTS, dict(router_balance=0.1)),
    "experts with the sampler's routing": (EXPERTS, dict(router_balance=0.1, replay_routing=True)),
    "GSPO": (
        MODEL,
        dict(ratio="sequence", aggregate="sequence", clip_low=3e-4, clip_high=4e-4, kl="none", kl_coef=0.0),
    ),
    "Dr. GRPO": (MODEL, dict(aggregate="constant", kl="none", kl_coef=0.0)),
    "DAPO": (MODEL, dict(clip_high=0.28, kl="none", kl_coef=0.0)),
}


def text(name: str, **mesh: int) -> str:
    """mesh: sizes of its axes, see `sharding.make_mesh`."""
    model, changes = CASES[name]
    learner = Learner(
        model,
        learner_config(**changes),
        hf_io.abstract_params(model),
        temperature=1.0,
        mesh=sharding.make_mesh(**mesh),
    )
    batch = abstract_batch(SHAPE, learner.routing)
    return learner.lower(batch).as_text()


def digests(**mesh: int) -> dict[str, str]:
    return {name: hashlib.sha256(text(name, **mesh).encode()).hexdigest() for name in CASES}


def versions() -> str:
    return f"jax {jax.__version__}, flax {flax.__version__}"


def recorded() -> dict[str, dict[str, str]]:
    """The digests by versions."""
    return json.loads(DIGESTS.read_text())


if __name__ == "__main__":
    DIGESTS.write_text(json.dumps(recorded() | {versions(): digests()}, indent=1) + "\n")
