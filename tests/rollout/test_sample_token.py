"""Sampling from logits by the inverse distribution function, with one random number and with two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coevolve_jax.rollout.native import sample_token

ROWS = 4096
SIZES = pytest.mark.parametrize("size", [40, sample_token.ONE_NUMBER + 77])


def drawn_from(logits, temperature=1.0, rows=ROWS):
    numbers = sample_token.draw(jax.random.split(jax.random.key(5), rows), len(logits))
    temperatures, wanted = jnp.full(rows, temperature), jnp.ones(rows, bool)
    spread = lambda x: jnp.broadcast_to(x, (rows, len(x)))
    token, logprob = jax.jit(lambda x: sample_token.sample(spread(x), temperatures, numbers, wanted))(logits)
    return np.asarray(token), np.asarray(logprob)


def peaked(size):
    """Half of the mass lies on a few tokens of different blocks, half on all others."""
    logits = 0.1 * np.random.default_rng(1).normal(size=size)
    logits[[3, 4, size // 2, size - 1]] += np.log(size / 4) + np.array([0, 0.5, 1, -1])
    return logits.astype(np.float32)


@SIZES
def test_tokens_come_as_often_as_the_softmax_says(size):
    logits = peaked(size)
    p = np.exp(jax.nn.log_softmax(logits / 0.8))
    token, logprob = drawn_from(logits, 0.8)
    np.testing.assert_allclose(logprob, np.log(p)[token], atol=1e-4)
    bins = np.arange(size) * 16 // size  # the tail, in 16 parts
    bins[[3, 4, size // 2, size - 1]] = 16 + np.arange(4)
    share, want = np.bincount(bins[token], minlength=20) / ROWS, np.bincount(bins, p, minlength=20)
    assert np.all(np.abs(share - want) <= 5 * np.sqrt(want / ROWS))


@SIZES
def test_temperature_0_takes_the_likeliest_token(size):
    logits = peaked(size)
    token, logprob = drawn_from(logits, 0.0, rows=3)
    np.testing.assert_array_equal(token, logits.argmax())
    np.testing.assert_allclose(logprob, jax.nn.log_softmax(logits).max(), atol=1e-5)


@SIZES
def test_what_has_no_probability_is_never_drawn(size):
    allowed = np.random.default_rng(2).permutation(size)[:5]
    logits = np.full(size, -np.inf, np.float32)
    logits[allowed] = np.arange(5)
    token, logprob = drawn_from(logits)
    assert set(token) <= set(allowed.tolist()) and len(set(token)) > 3
    assert np.all(np.isfinite(logprob))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-7, 0.3, 1.0]), min_size=8, max_size=8),
    st.floats(2**-23, 1, width=32),
)
def test_the_first_weight_that_reaches_a_share_is_not_0(weights, u):
    if not sum(weights):
        weights[0] = 1.0
    index = int(
        sample_token._first_reaching(jnp.asarray([weights], jnp.float32), jnp.asarray([u], jnp.float32))[0]
    )
    assert weights[index] > 0
    total = sum(weights)
    assert sum(weights[:index]) <= u * total * (1 + 1e-5) and sum(weights[: index + 1]) >= u * total * (
        1 - 1e-5
    )
