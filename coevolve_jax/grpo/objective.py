"""The loss of a micro-batch, and its metrics. Pure: parameters are arguments, everything else is a setting.

R: rows; L: tokens of a row. The formulas are in losses.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import FrozenConfigDict

from coevolve_jax.distributed import sharding
from coevolve_jax.grpo import lora, losses, surrogates
from coevolve_jax.grpo.logprobs import token_logprobs
from coevolve_jax.grpo.packing import Batch
from coevolve_jax.models import context_parallel, moe, products
from coevolve_jax.models.decoder import Decoder, ModelConfig

LOSSES = ("loss", "policy_loss")
MEANS = ("entropy", "clip_fraction", "mismatch_mean", "mismatch_k3")  # over the policy's tokens
PEAKS = ("mismatch_max", "ratio_max")
KL = "kl"  # among the means, where the loss has a KL term; nats, whatever config.aggregate
CE = "ce"  # among the losses, where the batch has cross-entropy weights
WEIGHTS = ("tis_weight_mean", "tis_capped")  # among the means, with config.tis_cap
BALANCE = "router_balance_loss"  # among the losses, for a model with experts

Metrics = tuple[dict[str, jax.Array], dict[str, jax.Array], Any]  # sums, peaks, what the routers did


class Totals(NamedTuple):
    """Denominators of the whole batch, scalars of at least 1.

    loss: of the policy gradient and the KL (`losses.denominator`). ce: tokens with a cross-entropy weight,
    None where the batch has none.
    """

    loss: jax.Array
    policy_tokens: jax.Array
    real_tokens: jax.Array
    ce: jax.Array | None


class _Surrogate(NamedTuple):
    """[R, L] each. shares: the metrics of the truncated weights; empty without them."""

    loss: jax.Array
    ratio: jax.Array
    clipped: jax.Array
    shares: dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Objective:
    """The objective of one model on one mesh. Equal settings are equal objects, which share programs.

    config: the `learner` section of the run's config, without the learning rate. temperature: the sampler's;
    logits are divided by it.
    """

    model_config: ModelConfig
    config: FrozenConfigDict
    temperature: float
    mesh: Mesh

    @functools.cached_property
    def model(self) -> Decoder:
        c = self.config
        return Decoder(
            self.model_config,
            dtype=jnp.dtype(c.dtype),
            param_dtype=jnp.dtype(c.param_dtype),
            remat=c.remat,
            attention=c.attention,
            mesh=self.mesh,
            platform=sharding.platform(self.mesh),
            matmul_dtype=products.checked(c.matmul_dtype, c.dtype, sharding.platform(self.mesh)),
        )

    @property
    def lora(self) -> bool:
        """Whether the parameters that learn are adapters of the reference."""
        return bool(self.config.lora_rank)

    @property
    def lora_scale(self) -> float:
        return self.config.lora_alpha / self.config.lora_rank

    @property
    def uses_kl(self) -> bool:
        return losses.uses_kl(self.config)

    @property
    def keeps_reference(self) -> bool:
        return self.uses_kl or self.lora

    def totals(self, batch: Batch[jax.Array]) -> Totals:
        """Counted over the whole batch, so that the loss does not depend on how micro-batches cut it.

        The balance of the routers alone does: it is a product of two means, both over a micro-batch.
        """
        c = self.config
        total = losses.denominator(batch.mask, batch.segment_ids, c.aggregate, c.constant_length)
        policy_tokens = jnp.maximum(jnp.sum(batch.mask), 1).astype(jnp.float32)
        real_tokens = jnp.maximum(jnp.sum(batch.segment_ids > 0), 1).astype(jnp.float32)
        ce_tokens = losses.ce_denominator(batch.ce_weights) if batch.ce_weights.size else None
        return Totals(total, policy_tokens, real_tokens, ce_tokens)

    def no_metrics(self, totals: Totals) -> Metrics:
        """The metrics of no micro-batch at all, to which those of each are added."""
        zeros = lambda names: {name: jnp.zeros(()) for name in names}
        weights, ce = WEIGHTS if self.config.tis_cap else (), (CE,) if totals.ce is not None else ()
        kl = (KL,) if self.uses_kl else ()
        routing = moe.no_routing(self.model.config)
        balance = () if routing is None else (BALANCE,)
        return zeros((*LOSSES, *MEANS, *weights, *kl, *ce, *balance)), zeros(PEAKS), routing

    def asks_for_change(self, batch: Batch[jax.Array]) -> jax.Array:
        """Whether any token of the batch has something to say about the parameters."""
        pulls = batch.mask if self.uses_kl else batch.mask & (batch.advantages != 0)
        if batch.ce_weights.size:
            pulls |= batch.ce_weights != 0
        return jnp.any(pulls)

    def loss(
        self,
        params: Any,
        reference: Any,
        micro: Batch[jax.Array],
        old_logprobs: jax.Array | None,
        totals: Totals,
    ) -> tuple[jax.Array, Metrics]:
        """The micro-batch's part of the loss: weighted token losses, each divided by its total of the whole
        batch.

        old_logprobs: [R, L], what the ratio compares with; None: those of `params`, without gradient.
        """
        c = self.config
        logprobs, entropy, routing = self.policy_logprobs(params, reference, micro, _learned(micro))
        ce = None
        if totals.ce is not None:
            ce = losses.cross_entropy(logprobs, micro.ce_weights) / totals.ce
            logprobs = jnp.where(micro.mask, logprobs, 0)
        frozen = jax.lax.stop_gradient(logprobs)
        if c.aggregate == "token":
            weighted = lambda x: jnp.sum(jnp.where(micro.mask, x, 0)) / totals.loss
        else:
            weights = losses.token_weights(micro.mask, micro.segment_ids, c.aggregate)
            weighted = lambda x: jnp.sum(jnp.where(micro.mask, x * weights, 0)) / totals.loss

        surrogate = self._surrogate(logprobs, frozen, old_logprobs, entropy, micro, totals)
        loss = policy_loss = weighted(surrogate.loss)
        sums, peaks = _metrics(frozen, entropy, surrogate, micro, totals)
        if self.uses_kl:
            kl = self._kl(logprobs, frozen, reference, micro)
            loss += c.kl_coef * weighted(kl)
            sums[KL] = _share(kl, micro, totals)
        if ce is not None:
            loss += ce
            sums[CE] = ce
        if routing:
            routing = routing._replace(experts=None)
            share_of_batch = jnp.mean(routing.tokens) / totals.real_tokens
            balance = share_of_batch * moe.load_balancing_loss(routing)
            loss += c.router_balance * balance
            sums[BALANCE] = balance
        return loss, (sums | {"loss": loss, "policy_loss": policy_loss}, peaks, routing)

    def _surrogate(
        self,
        logprobs: jax.Array,
        frozen: jax.Array,
        old_logprobs: jax.Array | None,
        entropy: jax.Array,
        micro: Batch[jax.Array],
        totals: Totals,
    ) -> _Surrogate:
        """The surrogate of each token, with config.tis_cap times its truncated weight."""
        c, cap = self.config, self.config.tis_cap
        decoupled = old_logprobs is None and micro.ages.size > 0
        if old_logprobs is None:
            old_logprobs = frozen
        if decoupled:
            old_logprobs = losses.proximal_logprobs(frozen, micro.sampler_logprobs, micro.ages)
        log_ratio = losses.log_ratio(logprobs, old_logprobs, micro.mask, micro.segment_ids, c.ratio)
        if decoupled:
            # The ratio starts at pi / pi_prox: the token's own, or its trajectory's mean. Weight and ratio
            # together are tis_cap at most, as for a fresh token.
            cap = c.tis_cap * jnp.exp(-log_ratio)
        ratio, entropy = jnp.exp(log_ratio), jax.lax.stop_gradient(entropy)
        seen = surrogates.Tokens(ratio, log_ratio, micro.advantages, entropy, micro.mask, micro.segment_ids)
        surrogate, clipped = surrogates.find(c.surrogate)(seen, c)
        if not c.tis_cap:
            return _Surrogate(surrogate, ratio, clipped, {})
        weight = losses.truncated_weight(old_logprobs, micro.sampler_logprobs, cap)
        surrogate *= weight
        capped = jnp.exp(old_logprobs - micro.sampler_logprobs) > cap
        shares = [_share(x, micro, totals) for x in (weight, capped)]
        return _Surrogate(surrogate, ratio, clipped, dict(zip(WEIGHTS, shares)))

    def _kl(
        self, logprobs: jax.Array, frozen: jax.Array, reference: Any, micro: Batch[jax.Array]
    ) -> jax.Array:
        """[R, L] KL to the log-probabilities that the batch gives, else to those of the reference."""
        pulled_to = micro.ref_logprobs
        if not pulled_to.size:
            pulled_to, *_ = self._logprobs(reference, micro, micro.mask)
        # Where no token counts the two are made equal: an overflow there would be 0 * inf in the gradient.
        pulled_to = jnp.where(micro.mask, jax.lax.stop_gradient(pulled_to), frozen)
        return losses.kl(logprobs, pulled_to, self.config.kl, self.config.kl_bound)

    def policy_logprobs(
        self, params: Any, reference: Any, micro: Batch[jax.Array], mask: jax.Array
    ) -> tuple[jax.Array, jax.Array, moe.Routing | None]:
        """`_logprobs` of the policy: of `params`, or of the reference with `params` as its adapters.

        The policy uses the sampler's routing where the batch has it (arXiv 2510.11370); the KL's reference
          its own.
        """
        routing = micro.routing if micro.routing.size else None
        if not self.lora:
            return self._logprobs(params, micro, mask, routing)
        with lora.adapted(self.lora_scale):
            return self._logprobs(lora.attach(reference, params), micro, mask, routing)

    def _logprobs(
        self, params: Any, micro: Batch[jax.Array], mask: jax.Array, routing: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, moe.Routing | None]:
        """[R, L] log-probabilities of the targets and entropies, 0 where not mask; the routers' record."""
        variables = {"params": params}
        split = functools.partial(context_parallel.split, self.mesh)
        if routing is not None:
            routing = jnp.moveaxis(split(routing), 2, 0).astype(jnp.int32)
        hidden, recorded = self.model.apply(
            variables,
            split(micro.tokens),
            split(micro.positions),
            split(micro.segment_ids),
            routing,
            split(micro.parents) if micro.parents.size else None,
            method=Decoder.hidden,
            mutable=["intermediates"],
        )
        # A device's tokens as one row: `token_logprobs` gathers from each row the positions that are trained
        # on.
        joined = lambda x: x.reshape(sharding.token_parts(self.mesh), -1, *x.shape[2:])
        unembedding, axis = self.model.apply(variables, method=Decoder.unembedding)
        scores = token_logprobs(
            joined(hidden),
            unembedding,
            joined(split(micro.targets)),
            vocab_axis=axis,
            mask=joined(split(mask)),
            temperature=self.temperature,
            chunk=self.config.logprob_chunk,
            frozen=self.lora,
            platform=sharding.platform(self.mesh),
            mesh=self.mesh if self.mesh.size > 1 else None,
            matmul_dtype=self.model.matmul_dtype,
        )
        own = hidden.shape[:2]
        logprobs, entropy = (context_parallel.join(self.mesh, x.reshape(own)) for x in scores)
        return logprobs, entropy, recorded.get("intermediates", {}).get("routing")


def microbatch(batch: Batch[jax.Array], i: jax.Array | int) -> Batch[jax.Array]:
    """The i-th micro-batch, arrays [R, L]."""
    return Batch(*(x[i] if x.ndim and x.size else x for x in batch))


def _metrics(
    frozen: jax.Array, entropy: jax.Array, surrogate: _Surrogate, micro: Batch[jax.Array], totals: Totals
) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Sums and peaks beside the losses. frozen: the policy's log-probabilities, without gradient."""
    mismatch = jnp.abs(frozen - micro.sampler_logprobs)
    share = lambda x: _share(x, micro, totals)
    sums = {
        "entropy": share(entropy),
        "clip_fraction": share(surrogate.clipped),
        "mismatch_mean": share(mismatch),
        "mismatch_k3": share(losses.kl(micro.sampler_logprobs, frozen, "k3")),
        **surrogate.shares,
    }
    peaks = {
        "mismatch_max": jnp.max(jnp.where(micro.mask, mismatch, 0)),
        "ratio_max": jnp.max(jnp.where(micro.mask, surrogate.ratio, 0)),
    }
    return sums, peaks


def _share(x: jax.Array, micro: Batch[jax.Array], totals: Totals) -> jax.Array:
    """The micro-batch's part of the mean of x over the batch's policy tokens."""
    return jnp.sum(jnp.where(micro.mask, x, 0)) / totals.policy_tokens


def _learned(micro: Batch[jax.Array]) -> jax.Array:
    """[R, L], True where the policy's log-probability is needed."""
    return micro.mask | (micro.ce_weights != 0) if micro.ce_weights.size else micro.mask
