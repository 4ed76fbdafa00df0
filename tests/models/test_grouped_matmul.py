"""The grouped product's kernels, interpreted, against jax.lax.ragged_dot; and compiled for an H100."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coevolve_jax.models import grouped_matmul as gp
from coevolve_jax.planning.aot import devices
from tests.support.paths import ROOT

TOKENS, EXPERTS, DEPTH, COLUMNS = 40, 4, 20, 12  # the blocks divide none of them
BLOCKS = gp.Blocks(16, 16, 16)
interpreted = functools.partial(gp.grouped_matmul, blocks=BLOCKS, interpret=True)
cuts = st.lists(st.integers(0, TOKENS), min_size=EXPERTS, max_size=EXPERTS)


def sizes_of(ends) -> np.ndarray:
    """Random group sizes whose sum is at most TOKENS."""
    return np.diff(sorted(ends), prepend=0).astype(np.int32)


def value_and_gradients(function, x, matrices, sizes, g):
    """Value and gradients; rows outside all groups do not count."""
    real = (jnp.arange(TOKENS) < jnp.sum(sizes))[:, None]

    def total(x, matrices):
        y = jnp.where(real, function(jnp.where(real, x, 0), matrices, sizes), 0)
        return jnp.sum(y * g), y

    gradients, y = jax.grad(total, argnums=(0, 1), has_aux=True)(x, matrices)
    return y, *gradients


ours, theirs = (jax.jit(functools.partial(value_and_gradients, f)) for f in (interpreted, jax.lax.ragged_dot))
tiles = jax.jit(gp._tiles, static_argnums=(1, 2))


@settings(max_examples=20, deadline=None)
@given(cuts, st.integers(0, 10**6), st.sampled_from(["float32", "bfloat16"]))
@example([0, 0, 0, 0], 0, "float32")  # no token has an expert
@example([0, 0, 40, 40], 0, "bfloat16")  # all have one
@example([16, 32, 32, 39], 0, "float32")  # whole blocks, an empty group, and a part of a block
def test_equals_ragged_dot_and_its_gradients(ends, seed, dtype):
    rng = np.random.default_rng(seed)
    shapes = (TOKENS, DEPTH), (EXPERTS, DEPTH, COLUMNS), (TOKENS, COLUMNS)
    x, matrices, g = (jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)
    exact = (a.astype(jnp.float32) for a in (x, matrices))
    for got, want in zip(
        ours(x, matrices, sizes_of(ends), g), theirs(*exact, sizes_of(ends), g), strict=True
    ):
        assert got.dtype == dtype
        tolerance = 1e-4 if dtype == "float32" else 0.1  # bfloat16 has 8 bits, and sums are of size 10
        np.testing.assert_allclose(got.astype(jnp.float32), want, atol=tolerance, rtol=0.01)


@given(cuts, st.sampled_from([1, 3, 16, 64]))
def test_each_token_of_an_expert_is_in_one_tile_of_that_expert(ends, rows):
    sizes = sizes_of(ends)
    found = np.full(TOKENS, -1)
    for expert, first, end in zip(*map(np.asarray, tiles(sizes, TOKENS, rows))):
        place = np.arange(first, min(first + rows, end))
        assert np.all(found[place] == -1)
        found[place] = expert
    np.testing.assert_array_equal(found[: sizes.sum()], np.repeat(np.arange(EXPERTS), sizes))
    assert np.all(found[sizes.sum() :] == -1)


PROGRAM = """
import re
import jax, jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from coevolve_jax.planning.aot import devices
from coevolve_jax.models.grouped_matmul import grouped_matmul
from coevolve_jax.planning.topologies import TOPOLOGIES
place = SingleDeviceSharding(devices.describe(TOPOLOGIES["h100-4"])[0])
M, K, N, E = 25600, 2048, 768, 128  # a layer of Qwen3-30B-A3B, \
an eighth of a row's tokens for their eight experts
of = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
def both(x, matrices, sizes, g):
    y, back = jax.vjp(lambda x, matrices: grouped_matmul(x, matrices, sizes), x, matrices)
    return y, back(g)
compiled = jax.jit(both).lower(of(M, K), of(E, K, N), of(E, dtype=jnp.int32), of(M, N)).compile()
assert len(re.findall(r'custom_call_target="__gpu.xla.gpu.triton"', compiled.as_text())) == 3
memory = compiled.memory_analysis()
results = 2 * (M * N + M * K + E * K * N)
assert memory.output_size_in_bytes - results < 1000 and memory.temp_size_in_bytes < 2**20, memory
"""


@pytest.mark.skipif(
    not devices.installed(), reason="the compilers for accelerators are not installed: run make aot"
)
def test_an_h100s_compiler_takes_the_kernels_and_expands_nothing(environ):
    """Product and both gradients are one kernel each, and take no memory but for their results."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, cwd=ROOT, env=environ)
