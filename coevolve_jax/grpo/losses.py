"""The losses: pure functions on arrays, in nats. M: micro-batches; R: rows; L: tokens of a row.

    loss = policy gradient + kl_coef * KL + cross-entropy

The policy gradient is that of a surrogate (surrogates.py), which may be a function of yours. It and the KL
are sums over the policy's tokens, weighed by `token_weights` and divided by `denominator`. The third is
`cross_entropy` / `ce_denominator`.

Each paper's method as settings of `config.learner`:

| method | advantage | ratio | aggregate | clip_low, clip_high | kl | also |
|---|---|---|---|---|---|---|
| GRPO, arXiv 2402.03300 | group_std | token | sequence | 0.2, 0.2 | k3 | |
| Dr. GRPO, arXiv 2503.20783 | group_mean | token | constant | 0.2, 0.2 | none | constant_length (1) |
| DAPO, arXiv 2503.14476 | group_std | token | token | 0.2, 0.28 | none | dynamic_sampling (2) |
| GSPO, arXiv 2507.18071 | group_std | sequence | sequence | 3e-4, 4e-4 | none | |
| CISPO, arXiv 2506.13585 | group_std | token | token | 1, tuned | none | surrogate = cispo |
| RLOO, arXiv 2402.14740 | leave_one_out | token | constant | - | none | constant_length = 1 (3) |
| CoEvolve and the demo | group_std | token | token | see configs/ | k3 | skip_zero_variance_groups |

(1) Set skip_zero_variance_groups=False: Dr. GRPO divides by all trajectories. Otherwise N counts only those
of the active groups.
(2) A truncated trajectory has reward 0. DAPO's soft punishment (section 3.4) is config.reward.terms =
("overlong:-0.5",), and its overlong filtering is overlong_filtering=True.
(3) RLOO's clip is never reached in one update on fresh rollouts. The KL that it puts into the reward is not
there.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num
from ml_collections import ConfigDict


def segment_sums(values: Num[Array, "R L"], segment_ids: Int[Array, "R L"]) -> Num[Array, "R L+1"]:
    """Sums of `values` over the segments of each row. Column s belongs to segment s."""
    columns = values.shape[1] + 1
    return jax.vmap(lambda v, s: jax.ops.segment_sum(v, s, columns))(values, segment_ids)


def sequence_mean(
    values: Float[Array, "R L"], mask: Bool[Array, "R L"], segment_ids: Int[Array, "R L"]
) -> Float[Array, "R L"]:
    """At each token the mean of `values` over its own segment's masked tokens (0 where it has none)."""
    total = segment_sums(jnp.where(mask, values, 0), segment_ids)
    count = segment_sums(mask.astype(values.dtype), segment_ids)
    return jnp.take_along_axis(total / jnp.maximum(count, 1), segment_ids, axis=1)


def log_ratio(
    logprobs: Float[Array, "R L"],
    old_logprobs: Float[Array, "R L"],
    mask: Bool[Array, "R L"],
    segment_ids: Int[Array, "R L"],
    level: str,
) -> Float[Array, "R L"]:
    """log of pi(token) / pi_old(token), by which a surrogate weighs a token.

    level: "token" gives PPO's ratio. "sequence" gives each token the mean over its trajectory's policy
    tokens. That is the log of GSPO's s_i = (pi(y_i) / pi_old(y_i))^(1 / |y_i|) (arXiv 2507.18071, eq. 7).
    """
    delta = logprobs - old_logprobs
    return {"token": lambda: delta, "sequence": lambda: sequence_mean(delta, mask, segment_ids)}[level]()


def clipped_surrogate(
    ratio: Float[Array, "*shape"], advantages: Float[Array, "*shape"], clip_low: float, clip_high: float
) -> tuple[Float[Array, "*shape"], Bool[Array, "*shape"]]:
    """PPO's clipped objective, to be minimised (arXiv 1707.06347, eq. 7); elementwise.

    clip_low, clip_high: equal in PPO and GRPO. DAPO's clip-higher is clip_high > clip_low (arXiv 2503.14476,
    eq. 10).

    Returns:
      loss: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).
      clipped: bool, where the clip cuts the gradient.
    """
    bounded = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    clipped = ratio * advantages > bounded * advantages
    return -jnp.minimum(ratio * advantages, bounded * advantages), clipped


def truncated_weight(
    old_logprobs: Float[Array, "*shape"],
    sampler_logprobs: Float[Array, "*shape"],
    cap: float | Float[Array, "*shape"],
) -> Float[Array, "*shape"]:
    """min(pi_old / pi_sampler, cap): the weight of truncated importance sampling.

    It corrects for a sampler whose numerics differ from the learner's. No gradient flows through it. The
    source is Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025.
    """
    return jax.lax.stop_gradient(jnp.minimum(jnp.exp(old_logprobs - sampler_logprobs), cap))


def uses_ages(config: ConfigDict) -> bool:
    """True where stale tokens have a proximal policy of their own (`proximal_logprobs`). config: of the run.

    Without tis_cap the ratio compares with the sampler. With several epochs it compares with the policy
    before the first.
    """
    c = config.learner
    return c.tis_cap > 0 and c.epochs == 1 and config.rollout.max_staleness > 0


def proximal_logprobs(
    logprobs: Float[Array, "*shape"], sampler_logprobs: Float[Array, "*shape"], ages: Int[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """Log-probabilities under the proximal policy of a single update; no gradient flows through them.

    The decoupled objective weighs a token by pi_prox / pi_sampler and clips pi / pi_prox (arXiv 2110.00641;
    arXiv 2505.24298). A proximal policy that is the update's own start has ratio 1, and its clip never acts.
    So it is the policy one update earlier, as A-3PO estimates it (arXiv 2512.06547). For a token sampled d
    updates ago

        log pi_prox = 1/d log pi_sampler + (1 - 1/d) log pi,  and log pi where d = 0.

    The estimate assumes that the log-probability moved by equal steps. It needs no forward pass and no other
    weights. At d = 1 it is the sampler itself, and the objective is PPO's. The ratio holds 1/d of the change
    since sampling. So the clip stops a token that the last update alone has moved too far.

    ages: updates between the weights that sampled the token and those of `logprobs`.
    """
    moved = (1 - 1 / jnp.maximum(ages, 1)) * (logprobs - sampler_logprobs)
    return jax.lax.stop_gradient(jnp.where(ages > 0, sampler_logprobs + moved, logprobs))


def uses_kl(config: ConfigDict) -> bool:
    """True where the loss has a KL term. config: the `learner` section."""
    return config.kl != "none" and config.kl_coef > 0


def kl(
    logprobs: Float[Array, "*shape"], ref_logprobs: Float[Array, "*shape"], estimator: str, bound: float = 0.0
) -> Float[Array, "*shape"]:
    """Estimate of KL(policy || reference) at each sampled token.

    The source is Schulman, "Approximating KL divergence", 2020. With d = ref - policy the estimators are

      "k1": -d, unbiased.
      "k2": d^2 / 2, biased, never negative.
      "k3": exp(d) - 1 - d, unbiased, never negative.

    As loss terms on fresh samples they differ in expectation. The gradient of k2 is that of KL(policy ||
    reference). The gradient of k3 is that of KL(reference || policy). The gradient of k1 is zero.

    bound: nats beyond which a token's estimate continues as a straight line, with its slope there. 0 turns
    this off. k3 has an exp(d): without the line one token far from the reference can outweigh a whole batch.
    The line keeps the pull on such a token. The bound does not change k1, which is straight, nor k3 below 0,
    where it falls no faster than d.
    """
    delta = ref_logprobs - logprobs
    estimate = {
        "k1": lambda d: -d,
        "k2": lambda d: 0.5 * d**2,
        "k3": lambda d: jnp.exp(d) - 1 - d,
    }[estimator]
    if not bound or estimator == "k1":
        return estimate(delta)
    if estimator == "k2":  # bends on both sides, k3 above 0 alone
        delta = jnp.abs(delta)
    knee, slope = _knee(estimator, bound)
    curved = estimate(jnp.where(delta > knee, knee, delta))  # beyond the knee exp may be infinite
    return jnp.where(delta > knee, bound + slope * (delta - knee), curved)


def _knee(estimator: str, bound: float) -> tuple[float, float]:
    """The d > 0 at which the estimate is `bound`, and its slope by d there."""
    knee = math.sqrt(2 * bound)
    if estimator == "k2":
        return knee, knee
    knee = math.log1p(
        bound + knee
    )  # starts above the solution, so Newton's steps on a convex function descend to it
    for _ in range(20):
        knee -= (math.expm1(knee) - knee - bound) / math.expm1(knee)
    return knee, math.expm1(knee)


def token_weights(
    mask: Bool[Array, "R L"], segment_ids: Int[Array, "R L"], aggregate: str
) -> Float[Array, "R L"]:
    """Weights of the token losses.

    The loss is the sum of weighted token losses, divided by `denominator`.
    """
    ones = mask.astype(jnp.float32)
    count = lambda: jnp.take_along_axis(segment_sums(ones, segment_ids), segment_ids, axis=1)
    return {
        "token": lambda: ones,
        "constant": lambda: ones,
        "sequence": lambda: ones / jnp.maximum(count(), 1),
    }[aggregate]()


def denominator(
    mask: Bool[Array, "M R L"], segment_ids: Int[Array, "M R L"], aggregate: str, constant_length: int
) -> Float[Array, ""]:
    """The divisor of a whole batch's sum of weighted token losses; at least 1.

    "token": the policy tokens, so that each counts the same (DAPO, eq. 8).
    "sequence": the N trajectories that have policy tokens (GRPO, eq. 3).
    "constant": N * constant_length, which does not favour short wrong answers (Dr. GRPO, section 3.2).
    """
    rows = (-1, mask.shape[-1])
    counts = lambda: segment_sums(mask.astype(jnp.int32).reshape(rows), segment_ids.reshape(rows))
    total = {
        "token": lambda: jnp.sum(mask),
        "sequence": lambda: jnp.sum(counts() > 0),
        "constant": lambda: jnp.sum(counts() > 0) * constant_length,
    }[aggregate]()
    return jnp.maximum(total, 1).astype(jnp.float32)


def cross_entropy(logprobs: Float[Array, "*shape"], weights: Float[Array, "*shape"]) -> Float[Array, ""]:
    """Sum of -w log p over the tokens with a weight w other than 0.

    Divided by `ce_denominator` of the whole batch it is the loss of imitation. With weights of 1 that is the
    mean negative log-likelihood. A weight of 0.5 halves a token's part; it is not normalised away.
    """
    return -jnp.sum(jnp.where(weights != 0, weights * logprobs, 0))


def ce_denominator(weights: Float[Array, "M R L"]) -> Float[Array, ""]:
    """The number of tokens with a weight other than 0 in a whole batch; at least 1."""
    return jnp.maximum(jnp.sum(weights != 0), 1).astype(jnp.float32)
