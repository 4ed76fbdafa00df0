"""Low-rank adapters (LoRA, arXiv 2106.09685): W + (alpha / rank) A B with W frozen.

Adapters are a tree of parameters like the policy's own. Beside each adapted kernel it has the leaves `lora_a`
[layers, in, rank] and `lora_b` [layers, rank, out]. The layers' scan hands each layer its slice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from coevolve_jax.models.hf_io import Deferred


def init(key: jax.Array, params: Any, rank: int, targets: str, dtype: Any = jnp.float32) -> dict:
    """Makes fresh adapters: A normal with variance 1 / in, B zero, so that the policy starts as the base.

    Args:
      params: the base, arrays or shapes.
      targets: regular expression, searched in the path of each kernel, such as
        "layers/self_attn/q_proj/kernel".

    Raises:
      ValueError: no kernel matches, or one that does is not a stack of matrices.
    """
    kernels = {
        path: leaf
        for path, leaf in flatten_dict(params).items()
        if path[-1] == "kernel" and re.search(targets, "/".join(path))
    }
    if not kernels:
        raise ValueError(
            f"config.learner.lora_targets {targets!r} matches no kernel of the policy: "
            "use an expression that finds some, such as '(q|k|v|o)_proj'."
        )
    adapters = {}
    for path, own in zip(sorted(kernels), jax.random.split(key, len(kernels))):
        if kernels[path].ndim != 3:
            raise ValueError(
                f"config.learner.lora_targets {targets!r} matches {'/'.join(path)} of shape "
                f"{kernels[path].shape}: only [layers, in, out] kernels can have adapters; "
                "narrow it, for instance to '(q|k|v|o)_proj'."
            )
        layers, width, out = kernels[path].shape
        adapters[*path[:-1], "lora_a"] = jax.random.normal(own, (layers, width, rank), dtype) * width**-0.5
        adapters[*path[:-1], "lora_b"] = jnp.zeros((layers, rank, out), dtype)
    return unflatten_dict(adapters)


def attach(base: Any, adapters: Any) -> dict:
    """The base with the adapters beside its kernels: the parameters for a model applied inside `adapted`."""
    return unflatten_dict({**flatten_dict(base), **flatten_dict(adapters)})


def adapted(scale: float, seen: Callable[[tuple], None] = lambda path: None) -> AbstractContextManager:
    """A context in which every Dense layer that has an adapter adds scale * (x A) B to its output.

    Both terms and their sum are in the layer's dtype. So in bfloat16 an adapter shows once it changes the
    output by half a step of that type. Until then its parameters move all the same, unseen.

    seen: called with the path of each such layer. `check_reached` uses it to find adapters without a layer.
    """

    def add_adapter(call, args, kwargs, context):
        module = context.module
        y = call(*args, **kwargs)
        if not (
            type(module) is nn.Dense
            and context.method_name == "__call__"
            and module.has_variable("params", "lora_a")
        ):
            return y
        seen(module.path)
        a, b = (module.get_variable("params", name).astype(y.dtype) for name in ("lora_a", "lora_b"))
        return y + scale * ((args[0].astype(y.dtype) @ a) @ b)

    return nn.intercept_methods(add_adapter)


def check_reached(forward: Callable[[Any], Any], base: Any, adapters: Any) -> None:
    """Raises ValueError where an adapter would never be trained.

    That is so where its layer does not run as a Dense layer.

    forward: params -> anything. It is traced without memory.
    """
    reached: set[tuple] = set()
    with adapted(1.0, reached.add):
        jax.eval_shape(forward, attach(base, adapters))
    # A model that mixes two kinds of layers applies one run of a kind at a time, so its paths lack "layers".
    reached |= {("layers", *path) for path in reached}
    missed = sorted({path[:-1] for path in flatten_dict(adapters)} - reached)
    if missed:
        raise ValueError(
            "config.learner.lora_targets names layers that cannot have adapters: "
            f"{', '.join('/'.join(path) for path in missed)}; narrow the expression."
        )


def merge(base: Any, adapters: Any, scale: float, dtype: Any = jnp.float32) -> Any:
    """Plain parameters with kernel + scale * A B, summed in float32 and then cast to `dtype`.

    bfloat16 keeps only what changes a kernel by half a step of that type, some 0.3% of it. Parameters without
    an adapter are returned as they are.
    """
    return _with_each(base, adapters, lambda kernel, a, b: _merged(kernel, a, b, scale, dtype))


def merged_in_turn(base: Any, adapters: Any, scale: float, dtype: Any) -> Any:
    """Returns what `merge` does, for `hf_io.save`: each kernel is merged when it is written.

    So no two merged kernels are in memory at once.
    """
    program = jax.jit(partial(_merged, scale=scale, dtype=dtype))
    return _with_each(
        base, adapters, lambda kernel, a, b: Deferred(kernel.shape, dtype, partial(program, kernel, a, b))
    )


def rounded_away(base: Any, adapters: Any, scale: float, dtype: Any) -> float:
    """The share of the entries which the adapters change that `dtype` rounds to what the base's round to.

    Memory holds one layer's matrices besides the arguments.
    """
    changed = lost = 0
    for _, *stacks in _adapted_kernels(base, adapters):
        for layer in range(stacks[0].shape[0]):
            kernel, a, b = (stack[layer] for stack in stacks)
            whole = kernel.astype(jnp.float32)
            merged = _merged(whole, a, b, scale, jnp.float32)
            moved = scale * (a.astype(jnp.float32) @ b.astype(jnp.float32)) != 0
            changed += int(moved.sum())
            lost += int((moved & (merged.astype(dtype) == whole.astype(dtype))).sum())
    return lost / changed if changed else 0.0


def _with_each(base: Any, adapters: Any, made: Callable[[Any, Any, Any], Any]) -> Any:
    """The base with made(kernel, A, B) in place of each kernel that has an adapter."""
    flat = flatten_dict(base)
    for path, *own in _adapted_kernels(base, adapters):
        flat[path] = made(*own)
    return unflatten_dict(flat)


def _adapted_kernels(base: Any, adapters: Any) -> Iterator[tuple[tuple, Any, Any, Any]]:
    """Yields (path, kernel, A, B) of each kernel that has an adapter."""
    flat, pairs = flatten_dict(base), flatten_dict(adapters)
    for *path, leaf in pairs:
        if leaf == "lora_a":
            kernel = (*path, "kernel")
            yield kernel, flat[kernel], pairs[*path, "lora_a"], pairs[*path, "lora_b"]


def _merged(kernel: jax.Array, a: jax.Array, b: jax.Array, scale: float, dtype: Any) -> jax.Array:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return (kernel.astype(jnp.float32) + scale * (a @ b)).astype(dtype)
