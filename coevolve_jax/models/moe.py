"""The mixture of experts of Qwen3-MoE: router, sorted grouped matmul, expert parallelism, statistics.

N: tokens; D: hidden size; E: experts; K: experts per token; F: hidden size of an expert; A: the layers that
have experts; B, L: rows and tokens per row.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from coevolve_jax.distributed import sharding
from coevolve_jax.models.config import ModelConfig
from coevolve_jax.models.expert_all_to_all import exchanged
from coevolve_jax.models.grouped_matmul import grouped_matmul


class Routing(NamedTuple):
    """Statistics of the routers in a forward pass. Padding counts in none of them.

    All but `experts` are sums, not means, so that several micro-batches can be added.

    Attributes:
      experts: int32 [A, B, L, K], the experts of each token, -1 on padding. `Decoder.hidden` takes them as
        `routing`.
      load: float32 [A, E], how often each expert was chosen.
      probability: float32 [A, E], the router's probability of each expert.
      entropy: float32 [A], the entropy of the router's distribution, in nats.
      tokens: float32 [A], how many tokens were routed.
    """

    experts: jax.Array | None
    load: jax.Array
    probability: jax.Array
    entropy: jax.Array
    tokens: jax.Array


def no_routing(config: ModelConfig) -> Routing | None:
    """Sums of nothing, without `experts`. None for a model without experts."""
    if not config.sparse_layers:
        return None
    layers = len(config.sparse_layers)
    per_expert, per_layer = jnp.zeros((layers, config.num_experts)), jnp.zeros(layers)
    return Routing(None, per_expert, per_expert, per_layer, per_layer)


def load_balancing_loss(routing: Routing) -> jax.Array:
    """E * sum over experts of (choices per token) * (mean probability), over all layers together; float32.

    It is K where the load is even, and more elsewhere. The gradient flows through the probabilities alone.
    Source: Switch Transformer (arXiv 2101.03961), eq. 4 to 6, in the form of transformers'
    load_balancing_loss_func.

    A product of means is not the mean of products. The learner takes it of each micro-batch and adds their
    mean, weighed by tokens, to the loss with the weight config.learner.router_balance. So each micro-batch is
    asked for an even load, and how rows are cut into micro-batches changes loss and gradient.
    """
    tokens = jnp.maximum(jnp.sum(routing.tokens), 1)
    load = jax.lax.stop_gradient(jnp.sum(routing.load, axis=0)) / tokens
    return load.shape[0] * jnp.sum(load * jnp.sum(routing.probability, axis=0) / tokens)


def router_metrics(routing: Routing) -> dict[str, jax.Array]:
    """Scalars for the log: mean entropy in nats, and extremes of the load.

    router_load_max and router_load_min are the largest and smallest share of the load that any expert of any
    one layer has. They are multiples of the even share.
    """
    even = jnp.sum(routing.load, axis=-1, keepdims=True) / routing.load.shape[-1]
    share = routing.load / jnp.maximum(even, 1)
    return {
        "router_entropy": jnp.sum(routing.entropy) / jnp.maximum(jnp.sum(routing.tokens), 1),
        "router_load_max": jnp.max(share),
        "router_load_min": jnp.min(share),
    }


class Kernel(nn.Module):
    """A matrix, or a stack of matrices, under the parameter name that a linear layer would give it."""

    shape: tuple[int, ...]
    scale: float
    param_dtype: Any

    @nn.compact
    def __call__(self):
        return self.param("kernel", nn.initializers.normal(self.scale), self.shape, self.param_dtype)


class Experts(nn.Module):
    """The matrices of all experts; gate_proj and up_proj [E, D, F], down_proj [E, F, D]."""

    config: ModelConfig
    param_dtype: Any

    def setup(self):
        c = self.config
        wide = (c.num_experts, c.hidden_size, c.moe_intermediate_size)
        kernel = lambda *shape: Kernel(shape, c.initializer_range, self.param_dtype)
        self.gate_proj, self.up_proj = kernel(*wide), kernel(*wide)
        self.down_proj = kernel(wide[0], wide[2], wide[1])

    def __call__(self):
        return self.gate_proj(), self.up_proj(), self.down_proj()


class MoE(nn.Module):
    """The sparse block in place of the MLP. mesh: the mesh over which it is spread, if it is."""

    config: ModelConfig
    dtype: Any
    param_dtype: Any
    mesh: Mesh | None = None
    platform: str = "cpu"

    def setup(self):
        c = self.config
        self.gate = Kernel((c.hidden_size, c.num_experts), c.initializer_range, self.param_dtype)
        self.experts = Experts(c, self.param_dtype)

    def __call__(self, x, real, routing=None):
        """Routes the tokens and mixes their experts' outputs.

        Args:
          x: [N, D].
          real: bool [N], False on padding, which goes to no expert and gives 0.
          routing: int32 [N, K], experts to use instead of the router's choice. -1 leaves the choice to the
            router.

        Returns:
          [N, D], and the Routing of this layer: experts [N, K], the others without their axis A.
        """
        c = self.config
        logits = jnp.dot(
            x.astype(jnp.float32), self.gate().astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
        probs = jax.nn.softmax(logits)
        experts = jax.lax.top_k(jax.lax.stop_gradient(probs), c.num_experts_per_tok)[1]
        if routing is not None:
            experts = jnp.where(routing < 0, experts, routing)
        weights = jnp.take_along_axis(probs, experts, axis=-1)
        if c.norm_topk_prob:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        experts = jnp.where(real[:, None], experts, -1)
        kernels = [k.astype(self.dtype) for k in self.experts()]
        out = mix(x.astype(self.dtype), weights, experts, *kernels, mesh=self.mesh, platform=self.platform)
        return out, _statistics(probs, logits, experts, real)


def _statistics(probs, logits, experts, real) -> Routing:
    E = probs.shape[-1]
    counted = real.astype(jnp.float32)
    load = jnp.sum(experts[..., None] == jnp.arange(E), axis=(0, 1), dtype=jnp.float32)
    entropy = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(probs * logits, axis=-1)
    return Routing(experts, load, counted @ probs, counted @ entropy, jnp.sum(counted))


def mix(x, weights, experts, gate, up, down, *, mesh: Mesh | None = None, platform: str = "cpu") -> jax.Array:
    """The weighted sum of each token's experts: y_n = sum_k weights[n, k] * MLP_{experts[n, k]}(x_n).

    Args:
      x: [N, D].
      weights: float32 [N, K].
      experts: int32 [N, K], negative for none.
      gate, up: [E, D, F].
      down: [E, F, D].
      platform: the program's target, as JAX names it.

    Returns:
      [N, D] in x's dtype.

    On a mesh with an expert axis, tokens travel to the devices of their experts (`expert_all_to_all.py`).
    Where N does not divide by the devices, and without such an axis, no token travels. Each device then holds
    the tokens of its data shard and the experts of its expert shard. It sorts its own (token, expert) pairs
    to the front and sums what its experts give. The sum over the expert shards completes it. No pair is ever
    dropped, however uneven the routing.

    On TPUs the grouped products are jax.lax.ragged_dot, an instruction of its own. On CPUs that is a masked
    product that costs E times the operations. On GPUs it would take E times the memory too, so they use the
    kernels of `grouped_matmul`.
    """
    product = grouped_matmul if platform == "gpu" else jax.lax.ragged_dot
    if mesh is None:
        return _mix(product, x, weights, experts, gate, up, down)
    if axes := sharding.expert_axes(mesh, len(x)):
        one = functools.partial(_mix, product)
        return exchanged(one, mesh, axes, x, weights, experts, gate, up, down)
    rows, wide, narrow, shards = sharding.expert_specs(mesh, len(x))

    def one_device(x, weights, experts, *kernels):
        # Each shard has its own part of x's gradient. The transpose of pcast adds them here, as [N, D].
        x = jax.lax.pcast(x, shards, to="varying")
        first = jax.lax.axis_index(shards[0]) * len(kernels[0])
        return jax.lax.psum(_mix(product, x, weights, experts - first, *kernels), shards)

    return jax.shard_map(
        one_device, mesh=mesh, in_specs=(rows, rows, rows, wide, wide, narrow), out_specs=rows
    )(x, weights, experts, gate, up, down)


def _mix(product, x, weights, experts, gate, up, down) -> jax.Array:
    """Computes `mix` for the given experts, 0 to E - 1. Pairs of other experts add nothing."""
    E, K = gate.shape[0], experts.shape[1]
    group = jnp.where((experts >= 0) & (experts < E), experts, E).reshape(-1)
    order = jnp.argsort(group, stable=True)
    inverse = jnp.argsort(order)
    sizes = jnp.sum(group[:, None] == jnp.arange(E), axis=0, dtype=jnp.int32)
    # A grouped product leaves rows beyond its groups undefined, forward and backward, so zero them.
    ours = (jnp.arange(len(order)) < jnp.sum(sizes))[:, None]
    rows = jnp.where(ours, _permute(jnp.repeat(x, K, axis=0), order, inverse), 0)
    hidden = nn.silu(product(rows, gate, sizes)) * product(rows, up, sizes)
    out = jnp.where(ours, product(hidden, down, sizes), 0)
    out = _permute(out, inverse, order).reshape(*experts.shape, -1)
    return jnp.einsum("nkd,nk->nd", out, weights, preferred_element_type=jnp.float32).astype(x.dtype)


@jax.custom_vjp
def _permute(x, order, inverse):
    """x[order], with a gather as its gradient too. JAX would make that a scatter."""
    return x[order]


_permute.defvjp(lambda x, order, inverse: (x[order], inverse), lambda inverse, g: (g[inverse], None, None))
