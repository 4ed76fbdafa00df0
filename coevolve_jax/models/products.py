"""Matrix products with bfloat16 operands and float32 results, for CPUs.

A processor with AVX512-BF16 or AMX runs them at up to twice the rate of float32. XLA's CPU backend reaches
this where both operands lie in memory as the product walks them. The gradient by a kernel therefore gets its
left operand transposed first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import logging
from jax.experimental.layout import Layout, with_layout_constraint


def checked(matmul_dtype: str, dtype: str, platform: str) -> Any:
    """The `Decoder.matmul_dtype` that a config's "matmul_dtype" names. None for "".

    It is None on accelerators too, with a warning, so that a config for CPUs runs on them. Raises ValueError
    where the dtype of the computation gives it no sense.
    """
    if not matmul_dtype:
        return None
    if dtype != "float32":
        raise ValueError(
            f"matmul_dtype={matmul_dtype!r} is for float32 computation, and this is {dtype}: leave "
            "config.learner.matmul_dtype and config.engine.matmul_dtype empty."
        )
    if platform != "cpu":
        logging.log_first_n(
            logging.WARNING,
            "matmul_dtype=%s is for CPUs: a %s multiplies float32 in its own way, faster than a CPU.",
            1,
            matmul_dtype,
            platform,
        )
        return None
    return jnp.dtype(matmul_dtype)


def of(matmul_dtype: Any) -> Callable | None:
    """The `dot_general` of dense layers with operands of this dtype. None, for None: JAX's own."""
    return None if matmul_dtype is None else rounded_dot_general


def rounded_dot_general(
    lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, precision: Any = None
) -> jax.Array:
    """Multiplies [M, K] by [K, N] with operands rounded to bfloat16. `nn.Dense` calls it.

    Sums and the result [M, N] are float32. Both gradients are made in the same way.
    """
    return _rounded(lhs, rhs)


@jax.custom_vjp
def _rounded(x: jax.Array, w: jax.Array) -> jax.Array:
    return product(x, w, 1, 0)


def _forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return product(x, w, 1, 0), (x.astype(jnp.bfloat16), w)


def _backward(residuals: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    g = g.astype(jnp.bfloat16)
    return product(g, w, 1, 1), product(x, g, 0, 0).astype(w.dtype)


_rounded.defvjp(_forward, _backward)


def product(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """Multiplies matrices and sums over those axes: bfloat16 operands, float32 result."""
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    if a_axis == 0:
        # Written out: XLA would fold a plain transpose into the product, which then walks columns.
        a, a_axis = with_layout_constraint(a.T, Layout(major_to_minor=(0, 1))), 1
    dimensions = ((a_axis,), (b_axis,)), ((), ())
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)
