"""A model, a learner's config and trajectories, small and random, for tests of coevolve_jax/grpo."""

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from coevolve_jax.distributed import sharding
from coevolve_jax.grpo.learner import Learner
from coevolve_jax.models.decoder import Decoder, ModelConfig
from coevolve_jax.types import Outcome, TrainingSample, Trajectory

MODEL = ModelConfig(
    "qwen3",
    vocab_size=61,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    rope_theta=1e4,
    tie_word_embeddings=True,
    initializer_range=0.3,
)


def learner_config(**changes) -> ConfigDict:
    return ConfigDict(
        {
            **dict(
                learning_rate=1e-2,
                warmup_steps=0,
                schedule="constant",
                decay_steps=0,
                final_rate=0.0,
                adam_b1=0.9,
                adam_b2=0.95,
                weight_decay=0.0,
                decay_embeddings=False,
                max_grad_norm=1.0,
                ratio="token",
                aggregate="token",
                surrogate="clipped",
                constant_length=32,
                clip_low=0.2,
                clip_high=0.2,
                kl="k3",
                kl_coef=0.1,
                kl_bound=0.0,
                tis_cap=0.0,
                epochs=1,
                router_balance=0.0,
                replay_routing=False,
                pack_length=32,
                pack_length_buckets=(),
                rows_per_microbatch=2,
                prefix_sharing=False,
                logprob_chunk=16,
                remat=False,
                dtype="float32",
                param_dtype="float32",
                matmul_dtype="",
                moment_dtype="float32",
                optimizer_offload=False,
                attention="auto",
                lora_rank=0,
                lora_alpha=8.0,
                lora_targets="layers/.*_proj/kernel",
            ),
            **changes,
        }
    )


def make_learner(params, **changes) -> Learner:
    return Learner(MODEL, learner_config(**changes), params, temperature=1.0, mesh=sharding.make_mesh())


def programs_of(learner) -> int:
    """How many programs of the update it has compiled, shared with learners of equal settings."""
    return learner._programs.update_step._cache_size()


def init_params():
    return jax.jit(Decoder(MODEL).init)(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]


def moved(params, seed=5):
    """The parameters after small random steps."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(tree, [x + 0.02 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys)])


def samples(trajectories, advantages) -> list[TrainingSample]:
    """Samples of the valid trajectories, each with one advantage on all its tokens."""
    pairs = zip(trajectories, advantages, strict=True)
    return [TrainingSample(t, np.full(len(t.ids), a, np.float32)) for t, a in pairs if t.outcome.valid]


def trajectory(rng, length: int, *, prompt: int = 3, reward: float = 0.0, valid: bool = True) -> Trajectory:
    mask = np.zeros(length, bool)
    mask[prompt:] = rng.random(length - prompt) < 0.7
    mask[-1] = True
    return Trajectory(
        task_id="t",
        rollout_index=0,
        ids=rng.integers(0, MODEL.vocab_size, length).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, rng.normal(-3, 0.3, length), 0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        turn_starts=(0,),
        steps=(),
        stop="done",
        outcome=Outcome(reward, reward >= 0.5, valid),
    )
