"""Low-rank adapters (LoRA, arXiv 2106.09685): W + (alpha / rank) A B with W frozen.

Adapters are a tree of parameters like the policy's own. Beside each adapted kernel it has the leaves `lora_a`
[layers, in, rank] and `lora_b` [layers, rank, out]. The layers' scan hands each layer its slice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict


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


def merge(base: Any, adapters: Any, scale: float) -> Any:
    """Plain parameters with kernel + scale * A B, in the base's dtype. The sum is taken in float32."""
    flat = flatten_dict(base)
    for path, kernel, change in _changes(flat, adapters, scale):
        flat[path] = (kernel + change).astype(flat[path].dtype)
    return unflatten_dict(flat)


def rounded_away(base: Any, adapters: Any, scale: float, dtype: Any) -> float:
    """The share of the entries which the adapters change that `dtype` rounds to what the base's round to."""
    changed = lost = 0
    count = lambda entries: int(np.asarray(entries.sum((1, 2))).sum(dtype=np.int64))  # int32 holds a layer's
    for _, kernel, change in _changes(flatten_dict(base), adapters, scale):
        moved = change != 0
        changed += count(moved)
        lost += count(moved & ((kernel + change).astype(dtype) == kernel.astype(dtype)))
    return lost / changed if changed else 0.0


def _changes(flat: dict, adapters: Any, scale: float) -> Iterator[tuple[tuple, jax.Array, jax.Array]]:
    """Yields (path, kernel, scale * A B) of each adapted kernel of the flat base, in float32."""
    pairs = flatten_dict(adapters)
    for *path, leaf in pairs:
        if leaf == "lora_a":
            a, b = (pairs[*path, name].astype(jnp.float32) for name in ("lora_a", "lora_b"))
            yield (*path, "kernel"), flat[*path, "kernel"].astype(jnp.float32), scale * (a @ b)
