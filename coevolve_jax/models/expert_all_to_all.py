"""Experts on several devices: tokens travel to the devices of their experts and back, in rounds.

A device sorts its (token, expert) pairs by the device that holds the expert. In each round it sends at most C
of them to every device of the expert axis, and receives as many results. Rounds go on until the busiest
device has sent all its pairs. So none is dropped, however uneven the routing. The backward pass sends the
tokens again, with their gradients.

S: devices of the expert axis; N: tokens of a device; K: experts per token; C: pairs that one device sends
another in a round; D: hidden size; E: experts of a device; F: hidden size of an expert, of which a device has
a part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from coevolve_jax.distributed import sharding

ROOM = 2**15  # most pairs that a device receives from all others in a round
SCOPE = "exchange"  # names the loops over rounds in a compiled program


class _Plan(NamedTuple):
    """The static part of an exchange.

    Attributes:
      experts_of: what `moe.mix` computes on one device, x [M, D], weights [M, 1], experts [M, 1] and matrices
        -> [M, D].
      columns: C.
    """

    experts_of: Callable[..., jax.Array]
    mesh: Mesh
    axes: sharding.ExpertAxes
    columns: int


class _Route(NamedTuple):
    """The pairs of a device, by the device that each goes to.

    Attributes:
      order: int32 [N * K], the pairs sorted by expert.
      first, count: int32 [S], where the pairs for each device begin in `order`, and how many there are.
      rounds: int32, the same on all devices.
    """

    order: jax.Array
    first: jax.Array
    count: jax.Array
    rounds: jax.Array


def room(pairs: int, devices: int) -> int:
    """S * C, the pairs that a device receives in a round, if each device has `pairs` of them."""
    return devices * -(-min(ROOM, pairs) // devices)


def even_rounds(pairs: int, devices: int) -> int:
    """The rounds that are needed if each device has `pairs` pairs, equally many for every device."""
    return -(-pairs // room(pairs, devices))


def exchanged(
    experts_of: Callable[..., jax.Array], mesh: Mesh, axes: sharding.ExpertAxes, x, weights, experts, *kernels
) -> jax.Array:
    """Computes `moe.mix` with the experts where they lie on the mesh.

    experts_of: a device's computation on the pairs that it receives (`_Plan`).
    """
    pairs = experts.size // sharding.token_parts(mesh)
    devices = mesh.shape[axes.expert]
    plan = _Plan(experts_of, mesh, axes, room(pairs, devices) // devices)
    return _exchanged(plan, x, weights, experts, *kernels)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchanged(plan: _Plan, x, weights, experts, *kernels):
    a = plan.axes

    def one_device(x, weights, experts, *kernels):
        kernels = _gathered(a, kernels)
        route = _route(plan, experts, len(kernels[0]))

        def one_round(r, out):
            pairs = _pairs(plan, route, r)
            there = plan.experts_of(*_sent(a, pairs, x, weights, experts, len(kernels[0])), *kernels)
            return _added(out, pairs, experts.shape[1], _swap(a, there.reshape(*pairs.shape, -1)))

        with jax.named_scope(SCOPE):
            out = jax.lax.fori_loop(0, route.rounds, one_round, jnp.zeros(x.shape, jnp.float32))
        return jax.lax.psum(out, a.hidden).astype(x.dtype)

    given = (a.rows, a.rows, a.rows, a.wide, a.wide, a.narrow)
    return _spread(plan, one_device, given, a.rows)(x, weights, experts, *kernels)


def _forward(plan: _Plan, *given):
    return _exchanged(plan, *given), given


def _backward(plan: _Plan, given, g):
    a = plan.axes

    def one_device(g, x, weights, experts, *kernels):
        kernels = _gathered(a, kernels)
        route = _route(plan, experts, len(kernels[0]))

        def one_round(r, carry):
            d_x, d_weights, d_kernels = carry
            pairs = _pairs(plan, route, r)
            rows, share, own = _sent(a, pairs, x, weights, experts, len(kernels[0]))
            there = lambda rows, share, *kernels: plan.experts_of(rows, share, own, *kernels)
            _, back = jax.vjp(there, rows, share, *kernels)
            d_rows, d_share, *more = back(_swap(a, _taken(g, pairs // experts.shape[1])).reshape(rows.shape))
            d_x = _added(d_x, pairs, experts.shape[1], _swap(a, d_rows.reshape(*pairs.shape, -1)))
            d_weights = d_weights.at[pairs].add(_swap(a, d_share.reshape(pairs.shape)), mode="drop")
            return d_x, d_weights, [total + one for total, one in zip(d_kernels, more)]

        zeros = jnp.zeros(x.shape, jnp.float32), jnp.zeros(weights.size), _zeros(kernels)
        with jax.named_scope(SCOPE):
            d_x, d_weights, d_kernels = jax.lax.fori_loop(0, route.rounds, one_round, zeros)
        d_x, d_weights = jax.lax.psum((d_x, d_weights), a.hidden)
        # The forward pass gathered the kernels over `a.gathered`: each device gets its part's gradient back.
        scattered = [jax.lax.psum_scatter(d, a.gathered, scatter_dimension=0, tiled=True) for d in d_kernels]
        d_kernels = [jax.lax.psum(d, a.others).astype(k.dtype) for d, k in zip(scattered, kernels)]
        return d_x.astype(x.dtype), d_weights.reshape(weights.shape), *d_kernels

    kinds = (a.rows, a.rows, a.wide, a.wide, a.narrow)
    specs = (a.rows, *kinds[:2], a.rows, *kinds[2:])
    d_x, d_weights, *d_kernels = _spread(plan, one_device, specs, kinds)(g, *given)
    return d_x, d_weights, None, *d_kernels


_exchanged.defvjp(_forward, _backward)


def _route(plan: _Plan, experts: jax.Array, own: int) -> _Route:
    """Sorts the pairs by the device of their expert. experts: [N, K], negative for none. own: E."""
    devices = plan.mesh.shape[plan.axes.expert]
    expert = jnp.where(experts < 0, devices * own, experts).reshape(-1)
    count = jnp.sum(expert[:, None] // own == jnp.arange(devices), axis=0, dtype=jnp.int32)
    rounds = jax.lax.pmax(-(-jnp.max(count) // plan.columns), sharding.PARTS)
    return _Route(jnp.argsort(expert, stable=True), jnp.cumsum(count) - count, count, rounds)


def _pairs(plan: _Plan, route: _Route, r: jax.Array) -> jax.Array:
    """The pairs [S, C] that go to each device in round r. N * K stands for none."""
    rank = r * plan.columns + jnp.arange(plan.columns)
    place = jnp.minimum(route.first[:, None] + rank, len(route.order) - 1)
    return jnp.where(rank < route.count[:, None], route.order[place], len(route.order))


def _sent(a: sharding.ExpertAxes, pairs, x, weights, experts, own: int) -> tuple[jax.Array, ...]:
    """Sends each pair to its expert's device.

    Returns what this device receives: tokens [S * C, D], weights [S * C, 1] and experts [S * C, 1]. Experts
    count from the device's first one; a negative one is none.
    """
    wanted = jnp.where(pairs < experts.size, _taken(experts.reshape(-1), pairs) % own, -1)
    given = _taken(x, pairs // experts.shape[1]), _taken(weights.reshape(-1), pairs), wanted
    return tuple(_swap(a, values).reshape(pairs.size, -1) for values in given)


def _swap(a: sharding.ExpertAxes, values: jax.Array) -> jax.Array:
    """All-to-all over the expert axis: entry s of `values` [S, C, ...] goes to device s."""
    return jax.lax.all_to_all(values, a.expert, 0, 0, tiled=True)


def _taken(values: jax.Array, places: jax.Array) -> jax.Array:
    return values.at[places].get(mode="fill", fill_value=0)


def _added(total: jax.Array, pairs: jax.Array, each: int, values: jax.Array) -> jax.Array:
    """Adds `values` [S, C, D] to their tokens in `total` [N, D], float32. each: pairs per token."""
    return total.at[pairs // each].add(values.astype(jnp.float32), mode="drop")


def _gathered(a: sharding.ExpertAxes, kernels) -> list[jax.Array]:
    return [jax.lax.all_gather(k, a.gathered, axis=0, tiled=True) for k in kernels]


def _zeros(kernels) -> list[jax.Array]:
    return [jnp.zeros(k.shape, jnp.float32) for k in kernels]


def _spread(plan: _Plan, one_device: Callable, given, results) -> Callable:
    return jax.shard_map(one_device, mesh=plan.mesh, in_specs=given, out_specs=results, check_vma=False)
