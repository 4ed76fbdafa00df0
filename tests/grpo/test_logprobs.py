"""Blocks of positions and tiles of the vocabulary give the whole softmax, on one device and on eight."""

import functools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from coevolve_jax.distributed import sharding
from coevolve_jax.grpo import logprobs
from coevolve_jax.planning.aot import work
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

ROWS, LENGTH, WIDTH, VOCABULARY = 2, 21, 5, 37


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(logprobs, "CPU_BLOCK", 12)


@pytest.mark.parametrize("tile, axis", [(16, 1), (16, 0), pytest.param(48, 0, marks=pytest.mark.nightly)])
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1), chunk=st.sampled_from([2, 6, 64]))
@example(seed=0, share=0.0, chunk=6)
@example(seed=0, share=1.0, chunk=64)
def test_any_mask_gives_the_softmax_and_its_gradients(monkeypatch, tile, axis, seed, share, chunk):
    """The third tile of 16 repeats 11 of 37 entries; a vocabulary of 48 fills its tiles."""
    monkeypatch.setattr(logprobs, "CPU_TILE", tile)
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    hidden, table = (
        draw(ROWS, LENGTH, WIDTH),
        draw(*((VOCABULARY, WIDTH) if axis == 0 else (WIDTH, VOCABULARY))),
    )
    targets, mask = rng.integers(0, VOCABULARY, (ROWS, LENGTH)), rng.random((ROWS, LENGTH)) < share
    weights = draw(ROWS, LENGTH)

    given = hidden, table, targets, mask, weights
    for got, want in zip(tiled(*given, tile, axis, chunk), full(*given, axis), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    gradients = tiled_gradients(*given, tile, axis, chunk), full_gradients(*given, axis)
    for got, want in zip(*gradients, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


@functools.partial(jax.jit, static_argnames=("axis",))
def full(h, w, targets, mask, weights, axis):
    logp = jax.nn.log_softmax(h @ (w.T if axis == 0 else w) / 0.7)
    picked = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
    return jnp.where(mask, picked, 0), jnp.where(mask, -jnp.sum(jnp.exp(logp) * logp, -1), 0)


@functools.partial(jax.jit, static_argnames=("tile", "axis", "chunk"))
def tiled(h, w, targets, mask, weights, tile, axis, chunk):
    """tile: the size that is set; an argument, so that each size is traced."""
    return logprobs.token_logprobs(h, w, targets, vocab_axis=axis, mask=mask, temperature=0.7, chunk=chunk)


def gradients_of(f):
    return jax.grad(lambda h, w, *rest: jnp.sum(f(h, w, *rest)[0] * rest[2]), argnums=(0, 1))


tiled_gradients = jax.jit(gradients_of(tiled), static_argnums=(5, 6, 7))
full_gradients = jax.jit(gradients_of(full), static_argnums=5)


@given(st.integers(1, 200_000), st.integers(1, 4096))
def test_tiles_cover_the_vocabulary_and_none_is_idle(size, limit):
    tile = logprobs._even(size, limit)
    assert 1 <= tile <= min(size, limit + 15)
    assert tile * (-(-size // tile) - 1) < size


def test_an_unembedding_in_bfloat16_gets_a_gradient_of_its_own_type(monkeypatch):
    monkeypatch.setattr(logprobs, "CPU_TILE", 16)
    rng = np.random.default_rng(0)
    hidden, table = rng.normal(size=(LENGTH, WIDTH)), rng.normal(size=(WIDTH, VOCABULARY))
    targets = rng.integers(0, VOCABULARY, LENGTH)
    total = lambda h, w: jnp.sum(logprobs.token_logprobs(h, w, targets)[0])
    grads_of = jax.jit(jax.grad(total, argnums=(0, 1)))
    round = lambda x: jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)
    want = grads_of(round(hidden), round(table))
    for kind in (jnp.float32, jnp.bfloat16):
        grads = grads_of(jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(table, kind))
        assert [g.dtype for g in grads] == [jnp.bfloat16, kind]
        for got, exact in zip(grads, want, strict=True):
            np.testing.assert_allclose(np.asarray(got, np.float32), exact, rtol=0.02, atol=0.03)


@pytest.mark.parametrize("tile", [16, 48])
def test_a_frozen_unembedding_costs_no_product(monkeypatch, tile):
    monkeypatch.setattr(logprobs, "CPU_TILE", tile)
    rng = np.random.default_rng(0)
    hidden, table = (
        rng.normal(size=shape).astype(np.float32) for shape in ((LENGTH, WIDTH), (WIDTH, VOCABULARY))
    )
    targets = rng.integers(0, VOCABULARY, LENGTH)

    def grads_of(frozen):
        f = lambda h, w: jnp.sum(logprobs.token_logprobs(h, w, targets, frozen=frozen)[0])
        return jax.jit(jax.grad(f, argnums=(0, 1)))

    trained, frozen = grads_of(False)(hidden, table), grads_of(True)(hidden, table)
    np.testing.assert_array_equal(frozen[0], trained[0])
    assert np.any(trained[1]) and not np.any(frozen[1])
    products = [str(jax.make_jaxpr(grads_of(f))(hidden, table)).count("dot_general") for f in (False, True)]
    assert products == [4, 3]


def test_large_logits_cost_no_accuracy_that_their_differences_have(monkeypatch):
    """Raises all logits by 2**20, where float32 has three bits left after the binary point."""
    monkeypatch.setattr(logprobs, "CPU_TILE", 16)
    rng = np.random.default_rng(0)
    table = rng.integers(-8, 8, (WIDTH, VOCABULARY)) / 8.0
    raised = np.concatenate([table, np.full((1, VOCABULARY), 2.0**20)]).astype(np.float32)
    hidden, targets = rng.integers(-2, 3, (LENGTH, WIDTH)), rng.integers(0, VOCABULARY, LENGTH)
    scores, entropy = logprobs.token_logprobs(
        np.pad(hidden, ((0, 0), (0, 1)), constant_values=1).astype(np.float32), jnp.asarray(raised), targets
    )
    logp = jax.nn.log_softmax(hidden @ table)
    np.testing.assert_allclose(entropy, -np.sum(np.exp(logp) * logp, -1), atol=1e-5)
    np.testing.assert_allclose(scores, np.asarray(logp)[np.arange(LENGTH), targets], atol=1e-5)


def test_what_is_not_a_number_where_nothing_is_trained_stays_there(monkeypatch):
    monkeypatch.setattr(logprobs, "CPU_TILE", 16)
    rng = np.random.default_rng(0)
    hidden, table = (
        rng.normal(size=(ROWS, LENGTH, WIDTH)),
        rng.normal(size=(WIDTH, VOCABULARY)).astype(np.float32),
    )
    targets, mask = rng.integers(0, VOCABULARY, (ROWS, LENGTH)), rng.random((ROWS, LENGTH)) < 0.5
    f = lambda h, w: jnp.sum(logprobs.token_logprobs(h, w, targets, mask=mask)[0])
    f = jax.jit(jax.value_and_grad(f, argnums=(0, 1)))
    spoiled, clean = (f(np.where(mask[..., None], hidden, x).astype(np.float32), table) for x in (np.nan, 0))
    jax.tree.map(np.testing.assert_array_equal, spoiled, clean)


@pytest.mark.parametrize("target", [-1, VOCABULARY])
def test_a_target_outside_the_vocabulary_is_not_a_number(monkeypatch, target):
    monkeypatch.setattr(logprobs, "CPU_TILE", 16)
    rng = np.random.default_rng(0)
    hidden, table = rng.normal(size=(3, WIDTH)), rng.normal(size=(WIDTH, VOCABULARY))
    scores, _ = logprobs.token_logprobs(jnp.asarray(hidden), jnp.asarray(table), np.array([0, target, 36]))
    np.testing.assert_array_equal(np.isnan(scores), [False, True, False])


def test_no_array_holds_a_block_of_the_whole_vocabulary_on_a_cpu(monkeypatch):
    monkeypatch.setattr(logprobs, "CPU_TILE", 16)
    hidden, table = jnp.zeros((LENGTH, WIDTH)), jnp.zeros((WIDTH, VOCABULARY))
    targets = np.zeros(LENGTH, int)
    f = jax.grad(lambda h, w: jnp.sum(logprobs.token_logprobs(h, w, targets)[0]), argnums=(0, 1))
    text = jax.jit(f).lower(hidden, table).compile().as_text()
    shapes = set(re.findall(rf"f32\[([\d,]*\b{VOCABULARY}\b[\d,]*)\]", text))
    assert shapes == {f"{WIDTH},{VOCABULARY}"}


@pytest.mark.nightly
def test_on_a_mesh_the_loop_over_blocks_has_no_collective_and_nothing_else_changes():
    """The program runs in a process of its own: JAX fixes the number of devices at its start."""
    environment = os.environ | {
        "XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(ROOT),
        "NPROC": "16",  # threads, so that waiting collectives do not take all
    }
    program = "from tests.grpo import test_logprobs; test_logprobs.check_meshes()"
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def check_meshes():
    logprobs.CPU_BLOCK, logprobs.CPU_TILE = (
        16,
        16,
    )  # half of the vocabulary is two tiles, and one repeats entries
    rows, length, width, vocabulary = 8, 11, 8, 38
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    targets = rng.integers(0, vocabulary, (rows, length))
    mask = rng.random((rows, length)) < np.linspace(0, 1, rows)[:, None]
    given = draw(rows, length, width), draw(vocabulary, width), targets, mask, draw(rows, length)
    meshes = dict(data=8), dict(fsdp=8), dict(data=2, fsdp=2, tensor=2), dict(fsdp=2, expert=2, tensor=2)
    for sizes, axis, frozen in zip(meshes, (0, 1, 0, 1), (False, False, False, True)):
        mesh = sharding.make_mesh(**sizes)
        table = given[1] if axis == 0 else given[1].T
        arguments = given[0], table, *given[2:]
        own = jax.NamedSharding(mesh, sharding.logprob_axes(axis).own)
        place = sharding.batch_sharding(mesh)
        spread = [jax.device_put(x, own if i == 1 else place) for i, x in enumerate(arguments)]
        f = functools.partial(scores_and_gradients, axis, frozen)
        want = jax.jit(functools.partial(f, None))(*arguments)
        program = jax.jit(functools.partial(f, mesh)).lower(*spread).compile()
        for got, exact in zip(jax.tree.leaves(program(*spread)), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got, exact, atol=2e-5, err_msg=str(sizes))
        found = work.by_loop(program.as_text(), lambda path: path)
        inside = {loops: part.collectives for loops, part in found.items() if loops and part.operations}
        assert len(inside) == 2 and not any(inside.values()), (sizes, inside)
        outside = found[()].collectives
        gathered, reduced = (outside.get(name, (0, 0))[0] for name in ("all-gather", "reduce-scatter"))
        assert (gathered, reduced) == (1, not frozen), (sizes, outside)


def scores_and_gradients(axis, frozen, mesh, hidden, table, targets, mask, weights):
    def total(hidden, table):
        both = logprobs.token_logprobs(
            hidden,
            table,
            targets,
            vocab_axis=axis,
            mask=mask,
            temperature=0.7,
            chunk=32,
            frozen=frozen,
            mesh=mesh,
        )
        return jnp.sum(both[0] * weights), both

    return jax.grad(total, argnums=(0, 1), has_aux=True)(hidden, table)
