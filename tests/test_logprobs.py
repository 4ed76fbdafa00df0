"""Blocks of positions and tiles of the vocabulary give what the whole softmax gives."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coevolve_jax.grpo import logprobs

ROWS, LENGTH, WIDTH, VOCABULARY = 2, 21, 5, 37


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(logprobs, "CPU_BLOCK", 3)


@pytest.mark.parametrize("tile, axis", [(16, 1), (16, 0), (48, 0)])
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), share=st.floats(0, 1), chunk=st.sampled_from([2, 6, 64]))
def test_any_mask_gives_the_softmax_and_its_gradients(monkeypatch, tile, axis, seed, share, chunk):
    """Of 37 entries the third tile of 16 repeats 11; those of 48 are one tile."""
    monkeypatch.setattr(logprobs, "CPU_TILE", tile)
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    hidden, table = draw(ROWS, LENGTH, WIDTH), draw(*((VOCABULARY, WIDTH) if axis == 0 else (WIDTH, VOCABULARY)))
    targets, mask = rng.integers(0, VOCABULARY, (ROWS, LENGTH)), rng.random((ROWS, LENGTH)) < share
    weights = draw(ROWS, LENGTH)

    def full(h, w):
        logp = jax.nn.log_softmax(h @ (w.T if axis == 0 else w) / 0.7)
        picked = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
        return jnp.where(mask, picked, 0), jnp.where(mask, -jnp.sum(jnp.exp(logp) * logp, -1), 0)

    def tiled(h, w):
        return logprobs.token_logprobs(
            h, w, targets, vocab_axis=axis, mask=mask, temperature=0.7, chunk=chunk)

    for got, want in zip(jax.jit(tiled)(hidden, table), full(hidden, table), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    gradients = lambda f: jax.grad(lambda h, w: jnp.sum(f(h, w)[0] * weights), argnums=(0, 1))
    for got, want in zip(jax.jit(gradients(tiled))(hidden, table), gradients(full)(hidden, table), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


@given(st.integers(1, 200_000), st.integers(1, 4096))
def test_tiles_cover_the_vocabulary_and_none_is_idle(size, limit):
    tile = logprobs._even(size, limit)
    assert 1 <= tile <= min(size, limit + 15)
    assert tile * (-(-size // tile) - 1) < size


def test_an_unembedding_in_bfloat16_gets_a_gradient_of_its_own_type():
    rng = np.random.default_rng(0)
    hidden, table = jnp.asarray(rng.normal(size=(LENGTH, WIDTH)), jnp.bfloat16), rng.normal(size=(WIDTH, VOCABULARY))
    targets = rng.integers(0, VOCABULARY, LENGTH)
    total = lambda h, w: jnp.sum(logprobs.token_logprobs(h, w, targets)[0])
    for kind in (jnp.float32, jnp.bfloat16):
        grads = jax.grad(total, argnums=(0, 1))(hidden, jnp.asarray(table, kind))
        assert [g.dtype for g in grads] == [jnp.bfloat16, kind]
        want = jax.grad(total, argnums=(0, 1))(hidden.astype(jnp.float32), table.astype(np.float32))
        for got, exact in zip(grads, want, strict=True):
            np.testing.assert_allclose(np.asarray(got, np.float32), exact, atol=0.1)
