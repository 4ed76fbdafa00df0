"""One jitted update with donated state: policy gradient, KL and cross-entropy, each over the tokens that have it."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict, FrozenConfigDict

from coevolve_jax.distributed import sharding
from coevolve_jax.grpo import lora, losses, operations
from coevolve_jax.grpo.logprobs import token_logprobs
from coevolve_jax.grpo.moments import step_by_layer
from coevolve_jax.grpo.optimizer import make_optimizer
from coevolve_jax.grpo.packing import Batch
from coevolve_jax.models import context_parallel, moe
from coevolve_jax.models.qwen import Qwen, QwenConfig

SUMS = ("loss", "policy_loss", "kl", "entropy", "clip_fraction", "mismatch_mean", "mismatch_k3")
PEAKS = ("mismatch_max", "ratio_max")
CE = "ce"  # one of the sums, where the batch has cross-entropy weights
WEIGHTS = ("tis_weight_mean", "tis_capped")  # of the sums, with config.tis_cap


class TrainState(NamedTuple):
    """params: the policy, or with LoRA its adapters. opt_state: optax's. step: int32 scalar, updates done."""

    params: Any
    opt_state: Any
    step: jax.Array


class _Totals(NamedTuple):
    """What sums over the whole batch are divided by, scalars of at least 1. loss: policy gradient and KL
    (`losses.denominator`). ce: tokens with a cross-entropy weight, None where the batch has none."""

    loss: jax.Array
    policy_tokens: jax.Array
    real_tokens: jax.Array
    ce: jax.Array | None


class Learner:
    """The update for one model on one mesh. It knows no method: a batch says of each token what it is for.

        loss = policy gradient + config.kl_coef * KL + cross-entropy (+ config.router_balance * the routers' balance)

    The first two are over the tokens of batch.mask, with the denominator of config.aggregate; the third over those
    with a ce_weight, with its own (`losses.cross_entropy`). The KL term pulls to batch.ref_logprobs where there are
    any, and then the reference is not run; else to the reference's.

    Args:
      model_config: the policy's architecture.
      config: the `learner` section of the run's config.
      reference: frozen parameters: what the KL term pulls to and what LoRA adapts (the policy before RL); in
        config.dtype they are as good as in float32, but for norms and routers whose weights that rounds. Without
        KL term and adapters it keeps their shapes only.
      temperature: that of the sampler; logits are divided by it, so that ratios compare equals.
      mesh: where it runs. Parameters and optimiser state follow distributed/sharding.py's rules; adapters are on every device.
      seed: of LoRA's first adapters.

    Attributes:
      routing: sparse layers and experts per token of the routing that it replays, for `pack`; zeros for none.
      scores: the updates on a batch compare with what `score` gave before the first of them.
      keeps_reference: whether it needs the reference after `init`.

    Raises:
      ValueError: config.lora_targets names nothing, or what cannot be adapted; or config.replay_routing is on
        and the model has no experts.
    """

    def __init__(
        self,
        model_config: QwenConfig,
        config: ConfigDict,
        reference: Any,
        *,
        temperature: float,
        mesh: Mesh,
        seed: int = 0,
    ):
        if config.replay_routing and not model_config.sparse_layers:
            raise ValueError(
                "config.learner.replay_routing is True and the model has no experts: set it to False."
            )
        layers_and_experts = len(model_config.sparse_layers), model_config.num_experts_per_tok
        self.routing = layers_and_experts if config.replay_routing else (0, 0)
        self.scores = config.tis_cap > 0 and config.epochs > 1
        self._mesh, self._own_logprobs = mesh, config.tis_cap > 0
        shapes, tree = jax.tree.flatten(jax.eval_shape(lambda params: params, reference))
        settings = FrozenConfigDict(config)
        self._programs = _Programs(model_config, settings, tree, tuple(shapes), temperature, mesh, seed)
        self.keeps_reference = self._programs.keeps_reference
        self._reference = reference if self.keeps_reference else None
        self.init, self.gradients = self._programs.init, self._programs.gradients
        self.abstract_state = self._programs.abstract_state

    def policy(self, state: TrainState) -> Any:
        """The policy's parameters, for the engine and for export: LoRA's adapters are merged into the base."""
        return self._programs.policy(state.params, self._reference)

    def operations(self, batch: Batch[np.ndarray], updates: int) -> float:
        """That so many updates on the batch ask for, with `score` and the reference where they need them."""
        made = self._programs
        pulls = made.uses_kl and not batch.ref_logprobs.size
        passes = updates * ((2 if made.lora else 3) + pulls) + self.scores
        return passes * operations.of_batch(made.model.config, batch)

    def score(self, state: TrainState, batch: Batch[np.ndarray]) -> jax.Array:
        """[M, R, L] log-probabilities of the batch's targets under the state, as the update computes them; 0 where not
        batch.mask. Needed where `scores`."""
        batch = sharding.place_batch(self._mesh, batch, axis=1)
        return self._programs.score(state.params, self._reference, batch)

    def update(
        self, state: TrainState, batch: Batch[np.ndarray], old_logprobs: jax.Array | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimiser step on the whole batch. `state` is donated.

        old_logprobs: [M, R, L], what the ratio compares with: `score` before the first of several updates on this
        batch where config.tis_cap is above 0. By default the sampler's; with config.tis_cap those of this update's
        own forward pass, without gradient, which before the first update are what `score` would give. Tokens with
        an age above 0 (`Batch.ages`) are then compared with a proximal policy (`losses.proximal_logprobs`).

        The returned state equals the given one where the loss or the gradient is not finite, and where nothing
        asks for a change: no policy token has an advantage, there is no KL term and no cross-entropy weight
        (metrics["applied"] is False in both cases). metrics["finite"] is False in the first, and where the step itself has broken the policy: the
        norm of the new parameters is not finite. Metrics are scalars on the device.
        """
        batch = sharding.place_batch(self._mesh, batch, axis=1)
        old = batch.sampler_logprobs if old_logprobs is None and not self._own_logprobs else old_logprobs
        return self._programs.update(state, self._reference, batch, old)

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """The update's program for batches of this shape; `.compile().memory_analysis()` is its memory.

        Neither the batch nor the reference need hold numbers: shapes and types do.
        """
        old = batch.sampler_logprobs if self.scores or not self._own_logprobs else None
        return self._programs.update.lower(self.abstract_state, self._reference, batch, old)

    def lower_score(self, batch: Batch) -> jax.stages.Lowered:
        """The program of `score`, as `lower` has the update's."""
        return self._programs.score.lower(self.abstract_state.params, self._reference, batch)


@functools.lru_cache(8)
class _Programs:
    """The jitted functions of a learner, and what they compute. Learners of equal settings share them, traced and
    compiled: they hold no parameters.

    tree, shapes: structure and leaves of the reference, a jax.tree_util.PyTreeDef and jax.ShapeDtypeStruct.
    """

    def __init__(
        self,
        model_config: QwenConfig,
        config: FrozenConfigDict,
        tree: Any,
        shapes: tuple[jax.ShapeDtypeStruct, ...],
        temperature: float,
        mesh: Mesh,
        seed: int,
    ):
        self.model = Qwen(
            model_config,
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.dtype(config.param_dtype),
            remat=config.remat,
            attention=config.attention,
            mesh=mesh,
            platform=sharding.platform(mesh),
        )
        self._config, self._temperature, self._seed = config, temperature, seed
        self._optimizer, self.lora = make_optimizer(config), bool(config.lora_rank)
        self.uses_kl = losses.uses_kl(config)
        self.keeps_reference = self.uses_kl or self.lora
        reference = jax.tree.unflatten(tree, shapes)
        abstract = jax.eval_shape(self._fresh, reference)
        everywhere = sharding.replicated(mesh)
        whole = sharding.param_shardings(mesh, reference) if self.keeps_reference else None
        if self.lora:
            tokens = jnp.zeros((sharding.token_parts(mesh), 2), jnp.int32)
            lora.check_reached(lambda p: self.model.apply({"params": p}, tokens), reference, abstract.params)
            shardings = jax.tree.map(lambda _: everywhere, abstract)
        else:
            shardings = sharding.param_shardings(mesh, abstract)
        self._on_host = config.optimizer_offload
        if self._on_host:
            shardings = shardings._replace(
                opt_state=sharding.in_host_memory(shardings.opt_state, abstract.opt_state)
            )
        rows = sharding.batch_sharding(mesh, axis=1)
        batch = Batch._make(everywhere if name == "used" else rows for name in Batch._fields)
        self._mesh, self._shardings = mesh, shardings
        self.init = jax.jit(self._fresh, out_shardings=shardings)
        self.update = jax.jit(
            self._update_step,
            in_shardings=(shardings, whole, batch, rows),
            out_shardings=(shardings, everywhere),
            donate_argnums=0,
        )
        self.score = jax.jit(
            self._score_step, in_shardings=(shardings.params, whole, batch), out_shardings=rows
        )
        self._merge = jax.jit(self._merged, in_shardings=(shardings.params, whole), out_shardings=whole)
        self.abstract_state = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings
        )

    def _fresh(self, params: Any) -> TrainState:
        c = self._config
        if self.lora:
            params = lora.init(jax.random.key(self._seed), params, c.lora_rank, c.lora_targets, c.param_dtype)
        else:  # copied, since the state is donated and the reference kept
            params = jax.tree.map(lambda p: jnp.array(p, c.param_dtype, copy=True), params)
        return TrainState(params, self._optimizer.init(params), jnp.zeros((), jnp.int32))

    def policy(self, params: Any, reference: Any) -> Any:
        """The whole parameters: with LoRA those of the reference, with the adapters `params` merged into them."""
        return self._merge(params, reference) if self.lora else params

    def gradients(
        self, params: Any, reference: Any, batch: Batch[jax.Array], old_logprobs: jax.Array | None
    ) -> tuple[Any, dict[str, jax.Array]]:
        """float32 gradient of the batch's loss by `params`, and the metrics; pure, to be jitted by the caller.

        old_logprobs: [M, R, L]; None: those of `params`, without gradient.
        """
        c = self._config
        total = losses.denominator(batch.mask, batch.segment_ids, c.aggregate, c.constant_length)
        policy_tokens = jnp.maximum(jnp.sum(batch.mask), 1).astype(jnp.float32)
        real_tokens = jnp.maximum(jnp.sum(batch.segment_ids > 0), 1).astype(jnp.float32)
        learns_ce = batch.ce_weights.size > 0
        ce_tokens = losses.ce_denominator(batch.ce_weights) if learns_ce else None
        totals = _Totals(total, policy_tokens, real_tokens, ce_tokens)

        def one_microbatch(i, carry):
            micro = _micro(batch, i)
            old = None if old_logprobs is None else old_logprobs[i]
            total_grads, total_sums, total_peaks, total_routing = carry
            loss_of = lambda params: self._loss(params, reference, micro, old, totals)
            _, backward, (sums, peaks, routing) = jax.vjp(loss_of, params, has_aux=True)
            return (
                _add_gradient(total_grads, params, backward),
                jax.tree.map(jnp.add, total_sums, sums),
                jax.tree.map(jnp.maximum, total_peaks, peaks),
                jax.tree.map(jnp.add, total_routing, routing),
            )

        zeros = lambda names: {name: jnp.zeros(()) for name in names}
        # Sharded like the parameters: what is added to it is then reduced and scattered, not gathered.
        no_grads = jax.lax.with_sharding_constraint(
            jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params), self._shardings.params
        )
        sums = (*SUMS, *(WEIGHTS if c.tis_cap else ()), *((CE,) if learns_ce else ()))
        start = no_grads, zeros(sums), zeros(PEAKS), moe.no_routing(self.model.config)
        grads, sums, peaks, routing = jax.lax.fori_loop(0, batch.used, one_microbatch, start)
        routers = moe.router_metrics(routing) if routing else {}
        return grads, {**sums, **peaks, **routers, "policy_tokens": policy_tokens}

    def _policy_logprobs(self, params: Any, reference: Any, micro: Batch[jax.Array], mask: jax.Array):
        """`_logprobs` of the policy: of `params`, or of the reference with `params` as its adapters; with the
        sampler's routing, where there is one (arXiv 2510.11370). The KL's reference is left to its own router."""
        routing = micro.routing if micro.routing.size else None
        if not self.lora:
            return self._logprobs(params, micro, mask, routing)
        with lora.adapted(self._scale):
            return self._logprobs(lora.attach(reference, params), micro, mask, routing)

    @property
    def _scale(self) -> float:
        return self._config.lora_alpha / self._config.lora_rank

    def _merged(self, adapters: Any, base: Any) -> Any:
        return lora.merge(base, adapters, self._scale)

    def _logprobs(
        self, params: Any, micro: Batch[jax.Array], mask: jax.Array, routing: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, moe.Routing | None]:
        """[R, L] log-probabilities of the targets, and entropies, where the mask is True, else 0; and what the routers
        did, if there are any."""
        variables = {"params": params}
        split = functools.partial(context_parallel.split, self._mesh)
        if routing is not None:
            routing = jnp.moveaxis(split(routing), 2, 0).astype(jnp.int32)
        hidden, told = self.model.apply(
            variables,
            split(micro.tokens),
            split(micro.positions),
            split(micro.segment_ids),
            routing,
            split(micro.parents) if micro.parents.size else None,
            method=Qwen.hidden,
            mutable=["intermediates"],
        )
        # What a device has as one row, from which the positions that are trained on are gathered.
        joined = lambda x: x.reshape(sharding.token_parts(self._mesh), -1, *x.shape[2:])
        unembedding, axis = self.model.apply(variables, method=Qwen.unembedding)
        scores = token_logprobs(
            joined(hidden),
            unembedding,
            joined(split(micro.targets)),
            vocab_axis=axis,
            mask=joined(split(mask)),
            temperature=self._temperature,
            chunk=self._config.logprob_chunk,
            frozen=self.lora,
            platform=sharding.platform(self._mesh),
            mesh=self._mesh if self._mesh.size > 1 else None,
        )
        own = hidden.shape[:2]
        logprobs, entropy = (context_parallel.join(self._mesh, x.reshape(own)) for x in scores)
        return logprobs, entropy, told.get("intermediates", {}).get("routing")

    def _loss(
        self,
        params: Any,
        reference: Any,
        micro: Batch[jax.Array],
        old_logprobs: jax.Array | None,
        totals: _Totals,
    ):
        """Sum over the micro-batch of weighted token losses, each divided by its total of the whole batch."""
        c, total, policy_tokens = self._config, totals.loss, totals.policy_tokens
        logprobs, entropy, routing = self._policy_logprobs(params, reference, micro, _learned(micro))
        ce = None
        if totals.ce is not None:
            ce = losses.cross_entropy(logprobs, micro.ce_weights) / totals.ce
            logprobs = jnp.where(micro.mask, logprobs, 0)
        frozen = jax.lax.stop_gradient(logprobs)
        share = lambda x: jnp.sum(jnp.where(micro.mask, x, 0)) / policy_tokens
        if c.aggregate == "token":
            loss_of = lambda x: jnp.sum(jnp.where(micro.mask, x, 0)) / total
        else:
            weights = losses.token_weights(micro.mask, micro.segment_ids, c.aggregate)
            loss_of = lambda x: jnp.sum(jnp.where(micro.mask, x * weights, 0)) / total

        cap = c.tis_cap
        if old_logprobs is None:
            old_logprobs = frozen
            if micro.ages.size:
                old_logprobs = losses.proximal_logprobs(frozen, micro.sampler_logprobs, micro.ages)
                # The ratio starts at pi / pi_prox. Weight and ratio together are tis_cap at most, as for a fresh token.
                cap = c.tis_cap * jnp.exp(old_logprobs - frozen)
        log_ratio = losses.log_ratio(logprobs, old_logprobs, micro.mask, micro.segment_ids, c.ratio)
        surrogate, ratio, clipped = losses.clipped_surrogate(
            log_ratio, micro.advantages, c.clip_low, c.clip_high
        )
        weighed = {}
        if c.tis_cap:
            weight = losses.truncated_weight(old_logprobs, micro.sampler_logprobs, cap)
            surrogate *= weight
            capped = jnp.exp(old_logprobs - micro.sampler_logprobs) > cap
            weighed = dict(zip(WEIGHTS, (share(weight), share(capped))))
        policy_loss, kl = loss_of(surrogate), jnp.zeros(())
        if self.uses_kl:
            pulled_to = micro.ref_logprobs
            if not pulled_to.size:
                pulled_to, *_ = self._logprobs(reference, micro, micro.mask)
            # Where no token counts the two are made equal: an overflow there would be 0 * inf in the gradient.
            pulled_to = jnp.where(micro.mask, jax.lax.stop_gradient(pulled_to), frozen)
            kl = loss_of(losses.kl(logprobs, pulled_to, c.kl, c.kl_bound))
        loss = policy_loss + c.kl_coef * kl if self.uses_kl else policy_loss
        if ce is not None:
            loss += ce
        if routing:
            routing = routing._replace(experts=None)
            share_of_batch = jnp.mean(routing.tokens) / totals.real_tokens
            loss += c.router_balance * share_of_batch * moe.load_balancing_loss(routing)
        mismatch = jnp.abs(frozen - micro.sampler_logprobs)
        sums = {
            "loss": loss,
            "policy_loss": policy_loss,
            "kl": kl,
            "entropy": share(entropy),
            "clip_fraction": share(clipped),
            "mismatch_mean": share(mismatch),
            "mismatch_k3": share(losses.kl(micro.sampler_logprobs, frozen, "k3")),
            **weighed,
        }
        if ce is not None:
            sums[CE] = ce
        peaks = {
            "mismatch_max": jnp.max(jnp.where(micro.mask, mismatch, 0)),
            "ratio_max": jnp.max(jnp.where(micro.mask, ratio, 0)),
        }
        return loss, (sums, peaks, routing)

    def _update_step(
        self, state: TrainState, reference: Any, batch: Batch[jax.Array], old_logprobs: jax.Array
    ):
        grads, metrics = self.gradients(state.params, reference, batch, old_logprobs)
        grad_norm = optax.tree.norm(grads)
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(grad_norm)
        kept = lambda applied, stepped, old: jax.tree.map(
            lambda new, old: jnp.where(applied, new, old), stepped, old
        )
        if self._on_host:
            applied = finite & self._asks(batch)

            def step(params: Any, grads: Any, opt_state: Any) -> tuple[Any, Any]:
                updates, new = self._optimizer.update(grads, opt_state, params, norm=grad_norm)
                return kept(applied, (optax.apply_updates(params, updates), new), (params, opt_state))

            params, opt_state = step_by_layer(step, state.params, grads, state.opt_state)
            state = TrainState(params, opt_state, kept(applied, state.step + 1, state.step))
        else:
            updates, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
            applied = finite & self._asks(batch)
            stepped = TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1)
            state = kept(applied, stepped, state)
        # Asked afterwards: the new state could not be written over the old one, three times the size of the parameters,
        # if the old one might still be returned for it.
        finite &= jnp.isfinite(optax.tree.norm(jax.lax.optimization_barrier(state.params)))
        return state, {**metrics, "grad_norm": grad_norm, "finite": finite, "applied": applied}

    def _asks(self, batch: Batch[jax.Array]) -> jax.Array:
        """Whether anything in the batch asks for a change."""
        pulls = batch.mask if self.uses_kl else batch.mask & (batch.advantages != 0)
        if batch.ce_weights.size:
            pulls |= batch.ce_weights != 0
        return jnp.any(pulls)

    def _score_step(self, params: Any, reference: Any, batch: Batch[jax.Array]) -> jax.Array:
        def one_microbatch(i, scores):
            micro = _micro(batch, i)
            return scores.at[i].set(self._policy_logprobs(params, reference, micro, micro.mask)[0])

        return jax.lax.fori_loop(0, batch.used, one_microbatch, jnp.zeros(batch.mask.shape))


def _add_gradient(total: Any, params: Any, backward: Any) -> Any:
    """`total`, float32, and the gradient by `params`. backward: of a loss, as `jax.vjp` gives it."""
    if all(p.dtype == jnp.float32 for p in jax.tree.leaves(params)):
        # In place, layer by layer: the gradient by itself, as large as the sum, is never there.
        sums = jax.tree.map(jax.new_ref, total)
        backward.with_refs(sums)(jnp.ones(()))
        return jax.tree.map(jax.freeze, sums)
    (grads,) = backward(jnp.ones(()))
    return jax.tree.map(jnp.add, total, grads)


def _micro(batch: Batch[jax.Array], i: jax.Array) -> Batch[jax.Array]:
    """The i-th micro-batch, arrays [R, L]."""
    return Batch(*(x[i] if x.ndim and x.size else x for x in batch))


def _learned(micro: Batch[jax.Array]) -> jax.Array:
    """[R, L], True where the policy's log-probability is needed."""
    return micro.mask | (micro.ce_weights != 0) if micro.ce_weights.size else micro.mask
