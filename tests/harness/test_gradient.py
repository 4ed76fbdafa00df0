"""Checks of gradients against slow ones, by jax.grad of the decoder's own log-probabilities."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coevolve_jax import config as configs
from coevolve_jax.distributed import sharding
from coevolve_jax.harness.backtest import Check, backtest
from coevolve_jax.harness.gradient import gradient_checks
from coevolve_jax.models.decoder import Decoder
from coevolve_jax.types import Group, Outcome
from tests.support.grpo_cases import MODEL, init_params, moved
from tests.support.method_cases import a_rollout, a_step, a_task, config_of

START = config_of(
    "static",
    **{
        "learner.pack_length": 32, "learner.pack_length_buckets": (), "learner.rows_per_microbatch": 2,
        "learner.kl_coef": 0.0, "learner.kl_bound": 0.0, "learner.aggregate": "token", "learner.tis_cap": 0.0,
        "rollout.temperature": 1.0, "rollout.max_length": 32, "rollout.max_new_tokens": 8,
    },
)  # fmt: skip


def group(name, params, rewards):
    """Rollouts of 8 sampled tokens after 4 others, with the policy's own log-probabilities. Failures call."""
    task, rng = a_task(name, "ls"), np.random.default_rng(len(name))
    made = []
    for i, reward in enumerate(rewards):
        t = a_rollout(task, i, reward >= 0.5, [] if reward >= 0.5 else [a_step("ls")], tokens=8)
        t = dataclasses.replace(t, ids=rng.integers(0, MODEL.vocab_size, 12).astype(np.int32))
        own = np.where(t.mask, logprobs(params, t.ids), 0).astype(np.float32)
        made.append(dataclasses.replace(t, logprobs=own, outcome=Outcome(reward, reward >= 0.5)))
    return Group(task, tuple(made))


@jax.jit
def logprobs(params, ids):
    """[T] log-probability of each token after those before it; 0 for the first."""
    logits = Decoder(MODEL).apply({"params": params}, ids[None])[0].astype(jnp.float32)
    found = jax.nn.log_softmax(logits[:-1])[jnp.arange(len(ids) - 1), ids[1:]]
    return jnp.concatenate([jnp.zeros(1), found])


def flat(tree):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


@pytest.mark.nightly
@pytest.mark.slow
def test_gradients_are_compared_with_those_of_the_parent():
    reference = init_params()
    params = moved(reference)
    steps = [[group("a", params, (1.0, 0.0, 0.0, 1.0))], [group("bb", params, (0.0, 1.0, 0.0, 0.0))]]
    leash = configs.override(START, {"learner.kl_coef": 300.0})

    def check(parent, child, steps):
        return gradient_checks(parent, child, MODEL, params, reference, steps, sharding.make_mesh())

    free = check(leash, START, steps)
    rollouts = [t for (g,) in steps for t in g.trajectories]
    mean = jax.jit(jax.grad(lambda params, ids: jnp.mean(logprobs(params, ids)[4:])))
    of_each = np.stack([flat(mean(params, t.ids)) for t in rollouts])  # [8, parameters]
    rewards = [np.array(g.rewards) for (g,) in steps]
    step = np.concatenate([(r - r.mean()) / (r.std() + 1e-6) for r in rewards]) @ of_each
    aim = np.concatenate([np.where(r > 0.5, 1 / r.sum(), -1 / (4 - r.sum())) for r in rewards]) @ of_each
    cosine = step @ aim / np.linalg.norm(step) / np.linalg.norm(aim)
    assert free["margin"].value == pytest.approx(cosine, rel=1e-3)
    assert free["margin"].ok and free["kl_share"].value == 0 and free["cos"].value < 0.9

    tight = check(START, leash, steps)
    assert tight["kl_share"].value > 0.9 and not tight["kl_share"].ok
    told = backtest(START, leash, [steps], gradient=lambda: tight)
    assert told.refused.startswith("The KL term has") and told.not_covered == ()

    # Successes are worth 0.05 more than failures, and the term pays failures, which call, for it.
    close = [[group(name, params, (0.5, 0.45, 0.45, 0.5))] for name in ("c", "dd")]
    against = check(START, configs.override(START, {"reward.terms": ("calls > 0:0.9",)}), close)
    broken = configs.override(START, {"learner.kl_coef": float("inf")})
    assert check(START, broken, steps) == {"finite": Check(0.0, 1.0, False)}
    assert check(START, leash, [[group("dead", params, (1.0, 1.0))]]) == {}
    assert against["margin"].value < 0 and not against["margin"].ok and against["cos"].value < 0
