"""An optimiser's step with its state in host memory: one layer's state on the device at a time.

Moved as a whole, the state of all layers would be on the device together, and nothing would be saved. So a
loop moves one layer at a time. The compilers for TPUs and NVIDIA GPUs copy slices from and to host memory
only in the body of a loop.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

Step = Callable[[Any, Any, Any], tuple[Any, Any]]
SCOPE = "moments"  # in the names of the loops in programs
_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def step_by_layer(step: Step, params: Any, grads: Any, opt_state: Any) -> tuple[Any, Any]:
    """Runs `step(params, grads, opt_state)`, which returns new params and a new opt_state, both in place.

    Args:
      step: takes every number by itself, with the scalars of opt_state; it gets parts of the trees.
      params: a dict of parameters, those under "layers" stacked [layers, ...], in device memory.
      grads: likewise.
      opt_state: optax's. Scalars are in device memory; all else, dicts like params, in host memory.
    """
    opt_state = _move(opt_state, _HOST)  # it is there; devices that are only described do not say so (aot/)
    stacks: dict[int, list[tuple]] = collections.defaultdict(list)  # by layers; 0: of no layer
    for path, leaf in flatten_dict(params).items():
        stacks[leaf.shape[0] if path[0] == "layers" else 0].append(path)
    others = stacks.pop(0, [])
    made = [
        _through(layers, step, *(_part(tree, paths) for tree in (params, grads, opt_state)))
        for layers, paths in stacks.items()
    ]
    own, own_grads, own_state = (_part(tree, others) for tree in (params, grads, opt_state))
    new_params, new_state = step(own, own_grads, _move(own_state, _DEVICE))
    made.append((new_params, _move(new_state, _HOST)))
    return tuple(_join(trees) for trees in zip(*made))


def _through(layers: int, step: Step, params: Any, grads: Any, opt_state: Any) -> tuple[Any, Any]:
    """Runs `step` on each layer. Scalars of opt_state stay as they were."""

    def one_layer(i: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        at = lambda tree: _each(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1), tree)
        params, opt_state = step(at(carry[0]), at(grads), _move(at(carry[1]), _DEVICE))
        new = params, _move(opt_state, _HOST)
        return _each(lambda x, own: jax.lax.dynamic_update_slice_in_dim(x, own, i, 0), carry, new)

    with jax.named_scope(SCOPE):
        return jax.lax.fori_loop(0, layers, one_layer, (params, opt_state))


def _each(f: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Maps f over all leaves but scalars."""
    return jax.tree.map(lambda x, *more: f(x, *more) if x.ndim else x, tree, *others)


def _move(opt_state: Any, space: Any) -> Any:
    return _each(lambda x: jax.device_put(x, space), opt_state)


def _is_dict(x: Any) -> bool:
    return isinstance(x, dict)


def _part(tree: Any, paths: Iterable[tuple]) -> Any:
    """The tree with those entries of each dict of parameters whose path is among `paths`."""

    def of(x: Any) -> Any:
        if not _is_dict(x):
            return x
        flat = flatten_dict(x)
        return unflatten_dict({path: flat[path] for path in paths})

    return jax.tree.map(of, tree, is_leaf=_is_dict)


def _join(trees: Any) -> Any:
    """Joins the parts of a tree; scalars are the last part's."""

    def of(*parts: Any) -> Any:
        if not _is_dict(parts[0]):
            return parts[-1]
        return unflatten_dict({path: x for part in parts for path, x in flatten_dict(part).items()})

    return jax.tree.map(of, *trees, is_leaf=_is_dict)
