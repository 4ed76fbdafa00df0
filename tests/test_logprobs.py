"""Blocks that are kept and blocks that are computed again give what the whole softmax gives."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coevolve_jax.grpo import logprobs

ROWS, LENGTH, WIDTH, VOCABULARY = 2, 21, 5, 31


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(logprobs, "BLOCK", 3)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1), st.sampled_from([6, 14, 64]))
def test_any_mask_gives_the_softmax_and_its_gradients(seed, share, chunk):
    """Of 7 blocks a row, 1, 2 and all are kept."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    hidden, table = draw(ROWS, LENGTH, WIDTH), draw(WIDTH, VOCABULARY)
    targets, mask = rng.integers(0, VOCABULARY, (ROWS, LENGTH)), rng.random((ROWS, LENGTH)) < share
    weights = draw(ROWS, LENGTH)

    def full(h, w):
        logp = jax.nn.log_softmax(h @ w / 0.7)
        picked = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
        return jnp.where(mask, picked, 0), jnp.where(mask, -jnp.sum(jnp.exp(logp) * logp, -1), 0)

    def blocks(h, w):
        return logprobs.token_logprobs(lambda x: x @ w, h, targets, mask=mask, temperature=0.7, chunk=chunk)

    for got, want in zip(jax.jit(blocks)(hidden, table), full(hidden, table), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    gradients = lambda f: jax.grad(lambda h, w: jnp.sum(f(h, w)[0] * weights), argnums=(0, 1))
    for got, want in zip(jax.jit(gradients(blocks))(hidden, table), gradients(full)(hidden, table), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.parametrize("chunk, again", [(64, False), (6, True)])
def test_what_the_chunk_holds_is_not_computed_again(chunk, again):
    rng = np.random.default_rng(0)
    hidden, table = rng.normal(size=(1, LENGTH, WIDTH)), rng.normal(size=(WIDTH, VOCABULARY))
    targets = rng.integers(0, VOCABULARY, (1, LENGTH))
    f = lambda h: logprobs.token_logprobs(lambda x: x @ table, h, targets, chunk=chunk)[0]
    _, pull = jax.vjp(f, hidden)
    assert (" = exp " in str(jax.make_jaxpr(pull)(np.ones((1, LENGTH), np.float32)))) == again
