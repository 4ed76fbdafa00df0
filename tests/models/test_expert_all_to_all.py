"""Tokens that travel to their experts give the result of one device, however uneven the routing.

The mesh needs eight devices, and JAX fixes their number at its start: this file is also a program.
"""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coevolve_jax.distributed import sharding
from coevolve_jax.models import expert_all_to_all, moe
from coevolve_jax.planning.aot import programs, work
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

TOKENS, HIDDEN, EXPERTS, TOP_K, WIDTH = 16, 8, 4, 2, 6
ROOM = 4  # a device may have to send all of its 8 pairs to one other: this takes one to four rounds


def loss(x, weights, experts, *kernels, mesh=None):
    out = moe.mix(x, weights, experts, *kernels, mesh=mesh)
    return jnp.sum(jnp.sin(out)), out


def program(mesh=None):
    return jax.jit(
        jax.value_and_grad(functools.partial(loss, mesh=mesh), argnums=(0, 1, 3, 4, 5), has_aux=True)
    )


def main():
    expert_all_to_all.ROOM = ROOM
    alone, spread = program(), program(sharding.make_mesh(fsdp=2, expert=2, tensor=2))
    pairs = TOKENS * TOP_K

    @settings(max_examples=12, deadline=None)
    @given(st.lists(st.integers(-1, EXPERTS - 1), min_size=pairs, max_size=pairs), st.integers(0, 9))
    @example([0] * pairs, 0)  # all to one expert, the others empty
    @example([3] * pairs, 0)
    @example([-1] * pairs, 0)  # none anywhere
    @example([0, 3] * TOKENS, 1)
    def compare(experts, seed):
        rng = np.random.default_rng(seed)
        draw = lambda *shape: rng.normal(0, 0.5, shape).astype(np.float32)
        wide, narrow = (EXPERTS, HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN)
        experts = np.array(experts, np.int32).reshape(TOKENS, TOP_K)
        given = draw(TOKENS, HIDDEN), draw(TOKENS, TOP_K), experts, draw(*wide), draw(*wide), draw(*narrow)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), spread(*given), alone(*given)
        )

    compare()
    # The program's account finds both loops over rounds, and assumes as many rounds as an even routing needs.
    text = spread.lower(*(np.zeros(s, t) for s, t in SHAPES)).compile().as_text()
    found = work.by_loop(text, programs.kind)
    rounds = expert_all_to_all.even_rounds(pairs // 4, 2)
    assert rounds == 2 == pairs // 4 // ROOM
    in_one = [part for loops, part in found.items() if loops and loops[-1].kind == programs.ROUND]
    in_all = programs.by_kind(found, rounds)[programs.ONCE]
    count = lambda *parts: sum(part.collectives.get("all-to-all", (0, 0.0))[0] for part in parts)
    assert count(*in_one) >= 3 + 5 and count(in_all) == rounds * count(*in_one)


SHAPES = (
    ((TOKENS, HIDDEN), np.float32),
    ((TOKENS, TOP_K), np.float32),
    ((TOKENS, TOP_K), np.int32),
    *(((EXPERTS, HIDDEN, WIDTH), np.float32),) * 2,
    ((EXPERTS, WIDTH, HIDDEN), np.float32),
)


def test_values_and_gradients_are_those_of_one_device():
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(ROOT),
        "NPROC": "16",  # threads, so that waiting collectives do not take all
    }
    run = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]


if __name__ == "__main__":
    main()
