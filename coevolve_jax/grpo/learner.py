"""One jitted update with donated state: policy gradient, KL and cross-entropy, each over its own tokens.

The way to a gradient: `learn` (learn.py) -> `Learner.update` -> `_update_step`, jitted -> `gradients` ->
`jax.vjp` of `Objective.loss` (objective.py).
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict, FrozenConfigDict

from coevolve_jax.distributed import sharding
from coevolve_jax.grpo import flops, influence, lora, surrogates
from coevolve_jax.grpo.objective import Objective, microbatch
from coevolve_jax.grpo.optimizer import make_optimizer
from coevolve_jax.grpo.optimizer_offload import step_by_layer
from coevolve_jax.grpo.packing import Batch
from coevolve_jax.models import moe
from coevolve_jax.models.decoder import ModelConfig, in_float32


class TrainState(NamedTuple):
    """params: the policy, or with LoRA its adapters. opt_state: optax's. step: int32 scalar, updates done."""

    params: Any
    opt_state: Any
    step: jax.Array


class Learner:
    """The update for one model on one mesh. It knows no method: a batch says of each token what it is for.

        loss = policy gradient + config.kl_coef * KL + cross-entropy (+ config.router_balance * balance)

    Policy gradient and KL are over the tokens of batch.mask, with the denominator of config.aggregate. The
    cross-entropy is over those with a ce_weight, with its own denominator (`losses.cross_entropy`). The KL
    term pulls to batch.ref_logprobs where the batch has them, else to the reference, which runs only then.

    Args:
      model_config: the policy's architecture.
      config: the `learner` section of the run's config.
      reference: the policy before RL. The KL term pulls to it, and LoRA adapts it. It is kept `frozen` in
        config.dtype, which changes nothing in what the update computes. But the policy that LoRA samples and
        exports is then the rounded base with adapters. Without KL term and adapters its shapes alone are
        kept.
      temperature: the sampler's. Logits are divided by it, so that ratios compare equals.
      mesh: where it runs. Parameters and optimiser state follow the rules of distributed/sharding.py.
        Adapters are on every device.
      seed: of LoRA's first adapters.

    Attributes:
      routing: sparse layers and experts per token of the routing that it replays, for `pack`; zeros for none.
      scores: whether the updates on a batch compare with what `score` gave before the first of them.
      keeps_reference: whether it needs the reference after `init`.
      init: parameters -> the first `TrainState`, which owns a copy of them.
      gradients: the function `gradients` for this objective; pure, to be jitted by the caller.
      abstract_state: shapes, types and shardings of the state.

    Raises:
      ValueError: config.lora_targets names nothing, or something that cannot be adapted;
        config.replay_routing is on and the model has no experts; or config.surrogate is none.
    """

    def __init__(
        self,
        model_config: ModelConfig,
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
        self._own_logprobs = config.tis_cap > 0
        # Arguments of the programs and no part of them: one program serves all rates and seeds.
        self._rate, first = np.float32(config.learning_rate), np.uint32(seed % 2**32)
        settings = {key: value for key, value in config.items() if key != "learning_rate"}
        self._objective = Objective(model_config, FrozenConfigDict(settings), temperature, mesh)
        surrogates.check(self._objective.config)
        shapes, tree = jax.tree.flatten(jax.eval_shape(lambda params: params, reference))
        self._programs = _programs(self._objective, tree, tuple(shapes))
        self.keeps_reference = self._objective.keeps_reference
        # So the caller can let the policy before RL go once it has a state.
        self._reference = frozen(reference, config.dtype) if self.keeps_reference else None
        self.init, self.abstract_state = partial(self._programs.init, first), self._programs.abstract_state
        self.gradients = partial(gradients, self._objective)
        self._goal: Any = None  # of `influence`

    def policy(self, state: TrainState, dtype: str = "float32") -> Any:
        """The policy's whole parameters. LoRA's adapters are merged into the base.

        dtype: of the merged kernels, the one that they are used in. Parameters that nothing was merged into
        are in the dtype that they have here.
        """
        if not self._objective.lora:
            return state.params
        return self._programs.merge(state.params, self._reference, dtype)

    def policy_to_save(self, state: TrainState, dtype: str) -> Any:
        """Returns what `policy` does, for `hf_io.save`, without memory for all merged kernels at once."""
        if not self._objective.lora:
            return state.params
        return lora.merged_in_turn(self._reference, state.params, self._objective.lora_scale, dtype)

    def rounded_away(self, state: TrainState, dtype: str) -> float:
        """The share of the weights changed by LoRA's adapters that `dtype` rounds to the base's own."""
        return lora.rounded_away(self._reference, state.params, self._objective.lora_scale, dtype)

    def flops(self, batch: Batch[np.ndarray], updates: int) -> float:
        """Operations of so many updates on the batch, with `score` and the reference where they need them."""
        pulls = self._objective.uses_kl and not batch.ref_logprobs.size
        passes = updates * ((2 if self._objective.lora else 3) + pulls) + self.scores
        return passes * flops.of_batch(self._objective.model_config, batch)

    def score(self, state: TrainState, batch: Batch[np.ndarray]) -> jax.Array:
        """[M, R, L] log-probabilities of the batch's targets, as the update computes them; 0 where not
        batch.mask. The updates on the batch need them where `scores` is True."""
        batch = sharding.place_batch(self._objective.mesh, batch, axis=1)
        return self._programs.score_step(state.params, self._reference, batch)

    def score_merged(self, state: TrainState, batch: Batch[np.ndarray]) -> jax.Array:
        """Returns what `score` does, by the policy with LoRA's adapters merged into the base in its dtype.

        So a learner scores that has the merged policy as its base, and fresh adapters.
        """
        if not self._objective.lora:
            return self.score(state, batch)
        batch = sharding.place_batch(self._objective.mesh, batch, axis=1)
        merged = self._programs.merge(state.params, self._reference, self._objective.config.dtype)
        return self._programs.score_step(jax.tree.map(jnp.zeros_like, state.params), merged, batch)

    def update(
        self, state: TrainState, batch: Batch[np.ndarray], old_logprobs: jax.Array | None = None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimiser step on the whole batch. `state` is donated.

        old_logprobs: [M, R, L], the denominator of the ratio. By default they are the sampler's, and with
        config.tis_cap those of this update's own forward pass, without gradient. With config.tis_cap, several
        updates on one batch need those that `score` gave before the first update. For the first update the
        two are equal. Tokens with an age above 0 (`Batch.ages`) are compared with a proximal policy
        (`losses.proximal_logprobs`).

        Metrics are scalars on the device:

            applied   False if the returned state equals the given one. Either the loss or the gradient is
                      not finite, or nothing asks for a change: no advantage, KL term or cross-entropy weight.
            finite    False if the loss, the gradient or the norm of the new parameters is not finite. In the
                      last case the step itself has broken the policy.
        """
        batch = sharding.place_batch(self._objective.mesh, batch, axis=1)
        old = batch.sampler_logprobs if old_logprobs is None and not self._own_logprobs else old_logprobs
        return self._programs.update_step(state, self._reference, batch, old, self._rate)

    def aim(self, state: TrainState, batch: Batch[np.ndarray]) -> jax.Array:
        """Keeps the batch's gradient as the goal of `influence`. Returns its norm, a scalar."""
        batch = sharding.place_batch(self._objective.mesh, batch, axis=1)
        self._goal = self._programs.gradient_step(state.params, self._reference, batch)
        return optax.tree.norm(self._goal)

    def influence(self, state: TrainState, batch: Batch[np.ndarray], preconditioned: bool) -> jax.Array:
        """Cosine between the goal of the last `aim` and the batch's gradient, a scalar (influence.py).

        preconditioned: take the direction of Adam's step in place of the gradient.
        """
        batch = sharding.place_batch(self._objective.mesh, batch, axis=1)
        return self._programs.influence_step(state, self._reference, batch, self._goal, preconditioned)

    def lower(self, batch: Batch) -> jax.stages.Lowered:
        """The update's program for batches of this shape; `.compile().memory_analysis()` is its memory.

        Neither the batch nor the reference need hold numbers: shapes and types do.
        """
        old = batch.sampler_logprobs if self.scores or not self._own_logprobs else None
        return self._programs.update_step.lower(self.abstract_state, self._reference, batch, old, self._rate)

    def lower_score(self, batch: Batch) -> jax.stages.Lowered:
        """The program of `score`, as `lower` has the update's."""
        return self._programs.score_step.lower(self.abstract_state.params, self._reference, batch)


def frozen(params: Any, dtype: Any) -> Any:
    """The parameters in `dtype`, as a learner keeps those that it does not change.

    Every product casts its operands to that dtype anyway. Norms and routers, which no product casts, stay as
    they are. Parameters are cast one by one, and those that need no cast are not copied.

    params: arrays or shapes. dtype: of the computation.
    """

    def one(path: tuple, x: Any) -> Any:
        if x.dtype == dtype or in_float32(path):
            return x
        return x.update(dtype=dtype) if isinstance(x, jax.ShapeDtypeStruct) else x.astype(dtype)

    dtype = jnp.dtype(dtype)
    return jax.tree_util.tree_map_with_path(one, params)


def gradients(
    objective: Objective, params: Any, reference: Any, batch: Batch[jax.Array], old_logprobs: jax.Array | None
) -> tuple[Any, dict[str, jax.Array]]:
    """float32 gradient of the batch's loss by `params`, and the metrics.

    old_logprobs: [M, R, L]; None: those of `params`, without gradient.
    """
    totals = objective.totals(batch)
    # Sharded like the parameters: what is added to it is then reduced and scattered, not gathered.
    no_grads = jax.lax.with_sharding_constraint(
        jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params), _param_shardings(objective, params)
    )

    def add_microbatch(i, carry):
        micro = microbatch(batch, i)
        old = None if old_logprobs is None else old_logprobs[i]
        total_grads, total_sums, total_peaks, total_routing = carry
        loss_of = lambda params: objective.loss(params, reference, micro, old, totals)
        _, backward, (sums, peaks, routing) = jax.vjp(loss_of, params, has_aux=True)
        return (
            _add_gradient(total_grads, params, backward),
            jax.tree.map(jnp.add, total_sums, sums),
            jax.tree.map(jnp.maximum, total_peaks, peaks),
            jax.tree.map(jnp.add, total_routing, routing),
        )

    start = no_grads, *objective.no_metrics(totals)
    # A loop of unknown length, so that micro-batches of padding take no time.
    grads, sums, peaks, routing = jax.lax.fori_loop(0, batch.used, add_microbatch, start)
    routers = moe.router_metrics(routing) if routing else {}
    return grads, {**sums, **peaks, **routers, "policy_tokens": jnp.sum(batch.mask)}


def _add_gradient(total: Any, params: Any, backward: Any) -> Any:
    """`total`, float32, and the gradient by `params`. backward: of a loss, as `jax.vjp` gives it."""
    if all(p.dtype == jnp.float32 for p in jax.tree.leaves(params)):
        # In place, layer by layer: the gradient by itself, as large as the sum, is never there.
        sums = jax.tree.map(jax.new_ref, total)
        backward.with_refs(sums)(jnp.ones(()))
        return jax.tree.map(jax.freeze, sums)
    (grads,) = backward(jnp.ones(()))
    return jax.tree.map(jnp.add, total, grads)


def _update_step(
    objective: Objective,
    state: TrainState,
    reference: Any,
    batch: Batch[jax.Array],
    old_logprobs: jax.Array | None,
    peak_rate: jax.Array,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """`Learner.update` as a pure function of its arrays."""
    optimizer = make_optimizer(objective.config, peak_rate)
    grads, metrics = gradients(objective, state.params, reference, batch, old_logprobs)
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(grad_norm)
    # Chosen on the device: a decision in Python would wait for the update and read it back, at every step.
    choose = lambda applied, stepped, old: jax.tree.map(
        lambda new, old: jnp.where(applied, new, old), stepped, old
    )
    if _offloads(objective):
        applied = finite & objective.asks_for_change(batch)

        def step(params: Any, grads: Any, opt_state: Any) -> tuple[Any, Any]:
            # The norm is the whole gradient's, which one layer does not know.
            updates, new = optimizer.update(grads, opt_state, params, norm=grad_norm)
            return choose(applied, (optax.apply_updates(params, updates), new), (params, opt_state))

        params, opt_state = step_by_layer(step, state.params, grads, state.opt_state)
        state = TrainState(params, opt_state, choose(applied, state.step + 1, state.step))
    else:
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        applied = finite & objective.asks_for_change(batch)
        stepped = TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1)
        state = choose(applied, stepped, state)
    # The new parameters are checked last, behind a barrier. If the answer decided which state is returned,
    # the new state could not be written over the donated one. Both would be in memory, each three times the
    # size of the parameters.
    finite &= jnp.isfinite(optax.tree.norm(jax.lax.optimization_barrier(state.params)))
    return state, {**metrics, "grad_norm": grad_norm, "finite": finite, "applied": applied}


def _score_step(objective: Objective, params: Any, reference: Any, batch: Batch[jax.Array]) -> jax.Array:
    def one_microbatch(i, scores):
        micro = microbatch(batch, i)
        return scores.at[i].set(objective.policy_logprobs(params, reference, micro, micro.mask)[0])

    return jax.lax.fori_loop(0, batch.used, one_microbatch, jnp.zeros(batch.mask.shape))


def _gradient_step(objective: Objective, params: Any, reference: Any, batch: Batch[jax.Array]) -> Any:
    return gradients(objective, params, reference, batch, None)[0]


def _influence_step(
    objective: Objective,
    state: TrainState,
    reference: Any,
    batch: Batch[jax.Array],
    goal: Any,
    preconditioned: bool,
) -> jax.Array:
    grads = _gradient_step(objective, state.params, reference, batch)
    if preconditioned:
        grads = influence.preconditioned(grads, state.opt_state, objective.config.adam_b2)
    return influence.cosine(goal, grads)


def _fresh(objective: Objective, seed: jax.Array, params: Any) -> TrainState:
    c = objective.config
    if objective.lora:
        params = lora.init(jax.random.key(seed), params, c.lora_rank, c.lora_targets, c.param_dtype)
    else:  # copied, since the state is donated and the reference kept
        params = jax.tree.map(lambda p: jnp.array(p, c.param_dtype, copy=True), params)
    return TrainState(params, make_optimizer(c, peak=0.0).init(params), jnp.zeros((), jnp.int32))


def _merge(objective: Objective, adapters: Any, base: Any, dtype: str) -> Any:
    return lora.merge(base, adapters, objective.lora_scale, dtype)


class _Programs(NamedTuple):
    """The jitted functions of learners of equal settings. They hold no parameters.

    init: LoRA's seed, params -> state.
    update_step: state, reference, batch, old_logprobs, peak learning rate -> state, metrics; the state is
    donated.
    """

    init: Any
    update_step: Any
    score_step: Any
    gradient_step: Any
    influence_step: Any
    merge: Any
    abstract_state: TrainState


@lru_cache(8)
def _programs(objective: Objective, tree: Any, shapes: tuple[jax.ShapeDtypeStruct, ...]) -> _Programs:
    """Learners of equal settings share their programs, traced and compiled: a notebook makes many, a test
    file too.

    tree, shapes: structure and leaves of the reference, a jax.tree_util.PyTreeDef and jax.ShapeDtypeStruct.
    """
    mesh, reference = objective.mesh, jax.tree.unflatten(tree, shapes)
    init = partial(_fresh, objective)
    abstract = jax.eval_shape(init, np.uint32(0), reference)
    if objective.lora:
        tokens = jnp.zeros((sharding.token_parts(mesh), 2), jnp.int32)
        apply = lambda p: objective.model.apply({"params": p}, tokens)
        lora.check_reached(apply, reference, abstract.params)
    everywhere, rows = sharding.replicated(mesh), sharding.batch_sharding(mesh, axis=1)
    whole = sharding.param_shardings(mesh, reference) if objective.keeps_reference else None
    shardings = _param_shardings(objective, abstract)
    if _offloads(objective):
        opt_state = sharding.in_host_memory(shardings.opt_state, abstract.opt_state)
        shardings = shardings._replace(opt_state=opt_state)
    batch = Batch._make(everywhere if name == "used" else rows for name in Batch._fields)
    return _Programs(
        init=jax.jit(init, out_shardings=shardings),
        update_step=jax.jit(
            partial(_update_step, objective),
            in_shardings=(shardings, whole, batch, rows, everywhere),
            out_shardings=(shardings, everywhere),
            # The new state is written over the old one: parameters and moments are in memory once.
            donate_argnums=0,
        ),
        score_step=jax.jit(
            partial(_score_step, objective),
            in_shardings=(shardings.params, whole, batch),
            out_shardings=rows,
        ),
        gradient_step=jax.jit(
            partial(_gradient_step, objective),
            in_shardings=(shardings.params, whole, batch),
            out_shardings=shardings.params,
        ),
        influence_step=jax.jit(
            partial(_influence_step, objective),
            in_shardings=(shardings, whole, batch, shardings.params),
            out_shardings=everywhere,
            static_argnums=4,
        ),
        merge=jax.jit(
            partial(_merge, objective),
            in_shardings=(shardings.params, whole),
            out_shardings=whole,
            static_argnums=2,
        ),
        abstract_state=jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings
        ),
    )


def _param_shardings(objective: Objective, tree: Any) -> Any:
    """Shardings of a tree of the parameters that learn. Adapters are small, and on every device."""
    if objective.lora:
        return jax.tree.map(lambda _: sharding.replicated(objective.mesh), tree)
    return sharding.param_shardings(objective.mesh, tree)


def _offloads(objective: Objective) -> bool:
    return objective.config.optimizer_offload
