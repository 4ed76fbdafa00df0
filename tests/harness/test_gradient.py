"""Checks of gradients against slow ones, by jax.grad of the decoder's own log-probabilities."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coevolve_jax import config as configs
from coevolve_jax.distributed import sharding
from coevolve_jax.harness.backtest import backtest
from coevolve_jax.harness.gradient import gradient_checks
from coevolve_jax.models.decoder import Decoder
from coevolve_jax.types import Group, Outcome
from tests.support.grpo_cases import MODEL, init_params, moved
from tests.support.method_cases import a_rollout, a_task, config_of

START = config_of(
    "static",
    **{
        "learner.pack_length": 32, "learner.pack_length_buckets": (), "learner.rows_per_microbatch": 2,
        "learner.kl_coef": 0.1, "learner.kl_bound": 0.0, "learner.aggregate": "token", "learner.tis_cap": 0.0,
        "rollout.temperature": 1.0, "rollout.max_length": 32, "rollout.max_new_tokens": 8,
    },
)  # fmt: skip


@jax.jit
def logprobs(params, ids):
    """[T] log-probability of each token after those before it; 0 for the first."""
    logits = Decoder(MODEL).apply({"params": params}, ids[None])[0].astype(jnp.float32)
    found = jax.nn.log_softmax(logits[:-1])[jnp.arange(len(ids) - 1), ids[1:]]
    return jnp.concatenate([jnp.zeros(1), found])


def group(name, params, rewards):
    """Rollouts of 8 sampled tokens after 4 others, with the policy's own log-probabilities."""
    task, rng = a_task(name, "ls"), np.random.default_rng(len(name))
    made = []
    for i, reward in enumerate(rewards):
        t = a_rollout(task, i, reward >= 0.5, [], tokens=8 + (reward < 0.5))
        ids = rng.integers(0, MODEL.vocab_size, 16).astype(np.int32)[: len(t.ids)]
        own = np.where(t.mask, np.asarray(logprobs(params, ids)), 0).astype(np.float32)
        outcome = Outcome(reward, reward >= 0.5)
        made.append(dataclasses.replace(t, ids=ids, logprobs=own, outcome=outcome))
    return Group(task, tuple(made))


def flat(tree):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


@pytest.mark.slow
def test_gradients_are_compared_with_those_of_the_parent():
    reference = init_params()
    params = moved(reference)
    steps = [[group("a", params, (1.0, 0.0, 0.0, 1.0))], [group("bb", params, (0.0, 1.0, 0.0, 0.0))]]
    check = lambda changes, steps=steps: gradient_checks(
        START, configs.override(START, changes), MODEL, params, reference, steps, sharding.make_mesh()
    )
    free = check({"learner.kl_coef": 0.0})

    def advantage(group):
        r = np.array(group.rewards)
        return (r - r.mean()) / (r.std() + 1e-6)

    def mean_logprob(params, t):
        return jnp.mean(logprobs(params, t.ids)[t.mask])

    def gained(params):  # the surrogate whose ascent GRPO's step is, at ratios of 1
        pairs = [(a, t) for (g,) in steps for a, t in zip(advantage(g), g.trajectories)]
        return sum(a * mean_logprob(params, t) * t.mask.sum() for a, t in pairs)

    def margin(params):
        own = lambda g, won: [mean_logprob(params, t) for t in g.trajectories if t.outcome.success == won]
        return sum(
            sum(own(g, won)) / len(own(g, won)) * (1 if won else -1)
            for (g,) in steps
            for won in (True, False)
        )

    a, b = (flat(jax.grad(f)(params)) for f in (gained, margin))
    assert free["margin"].value == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-3)
    assert free["margin"].ok and free["kl_share"].value == 0 and 0.5 < free["cos"].value < 1
    leash = check({"learner.kl_coef": 300.0})
    assert leash["kl_share"].value > 0.9 and not leash["kl_share"].ok
    told = backtest(START, configs.override(START, {"learner.kl_coef": 300.0}), [steps], gradient=leash)
    assert told.refused.startswith("The KL term has 9") and told.not_covered == ()
    # Here successes are worth 0.05 more than failures, and the term pays failures, which are longer, for it.
    close = [[group("c", params, (0.5, 0.45, 0.45, 0.5))]]
    against = check({"reward.terms": ("length:0.9", "tokens > 12:0.09")}, close)
    assert against["margin"].value < 0 and not against["margin"].ok
    same = check({}, close)
    assert same["cos"].value == pytest.approx(1) and same["margin"].ok and same["kl_share"].ok
