"""Products with bfloat16 operands: values, gradients, the model, log-probabilities, refusals."""

from __future__ import annotations

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coevolve_jax.grpo.logprobs import token_logprobs
from coevolve_jax.models import products
from coevolve_jax.models.decoder import Decoder
from coevolve_jax.rollout.engine import Request, Sampling
from coevolve_jax.rollout.native.engine import NativeEngine
from tests.models.test_models import forward, random_params, tokens_of

pytestmark = pytest.mark.slow


def _rounded(x) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(jnp.bfloat16).astype(jnp.float32), np.float64)


@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 12, 5), (64, 33, 80)])
def test_products_are_those_of_rounded_operands(shape):
    m, k, n = shape
    rng = np.random.default_rng(m)
    x, w, g = (rng.normal(size=s).astype(np.float32) for s in ((m, k), (k, n), (m, n)))
    y, back = jax.vjp(jax.jit(lambda x, w: products.of("bfloat16")(x, w, (((1,), (0,)), ((), ())))), x, w)
    dx, dw = back(jnp.asarray(g))
    x, w, g = _rounded(x), _rounded(w), _rounded(g)
    for ours, exact in ((y, x @ w), (dx, g @ w.T), (dw, x.T @ g)):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-4)


def test_a_model_rounds_operands_alone(tiny_config):
    """Closer to float32 than a computation in bfloat16, and not equal to it."""
    params, tokens = random_params(tiny_config), tokens_of(tiny_config, 2, 23)
    exact = forward(Decoder(tiny_config), params, tokens)
    off = lambda **kwargs: float(
        np.abs(forward(Decoder(tiny_config, **kwargs), params, tokens) - exact).mean()
    )
    rounded, whole = off(matmul_dtype=jnp.bfloat16), off(dtype=jnp.bfloat16)
    assert 0 < rounded < whole


@pytest.mark.parametrize("tied", [True, False])
def test_logprobs_and_gradients_follow_the_model(tiny_config, tied):
    """`token_logprobs` with rounded operands is the log-softmax of the model's rounded logits."""
    config = dataclasses.replace(tiny_config, tie_word_embeddings=tied)
    params, tokens = random_params(config), tokens_of(config, 2, 19)
    model = Decoder(config, matmul_dtype=jnp.bfloat16)
    targets = np.roll(tokens, -1, axis=1)

    def ours(params):
        hidden = model.apply({"params": params}, tokens, method=Decoder.hidden)
        matrix, axis = model.apply({"params": params}, method=Decoder.unembedding)
        logprobs, _ = token_logprobs(hidden, matrix, targets, vocab_axis=axis, matmul_dtype=jnp.bfloat16)
        return logprobs.sum(), logprobs

    (_, logprobs), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(params)
    expected = jax.nn.log_softmax(forward(model, params, tokens))
    expected = np.take_along_axis(np.asarray(expected), targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5, rtol=0)

    def plain(params):
        logits = Decoder(config).apply({"params": params}, tokens)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1).sum()

    exact = jax.jit(jax.grad(plain))(params)
    for path, e in jax.tree_util.tree_leaves_with_path(
        jax.tree.map(lambda a, b: jnp.linalg.norm(a - b) / jnp.linalg.norm(b), gradient, exact)
    ):
        assert 0 < e < 0.03, (path, e)


def test_it_is_for_float32_on_cpus_and_unused_elsewhere(caplog):
    assert products.checked("bfloat16", "float32", "cpu") == jnp.bfloat16
    with pytest.raises(ValueError, match="this is bfloat16.*config.learner.matmul_dtype"):
        products.checked("bfloat16", "bfloat16", "cpu")
    with caplog.at_level("WARNING"):
        assert products.checked("bfloat16", "float32", "gpu") is None
    assert "is for CPUs: a gpu multiplies float32" in caplog.text
    assert products.checked("", "bfloat16", "gpu") is None


@pytest.mark.slow
def test_the_engine_samples_from_the_model_that_the_learner_scores(tiny_config):
    """Its log-probabilities are those of `Decoder` with the same operands, and not those of float32."""
    params, n = random_params(tiny_config), 12
    exact, rounded = (
        NativeEngine(
            tiny_config, params, slots=4, max_length=48, max_new_tokens=n, seed=0, matmul_dtype=operands
        )
        for operands in (None, jnp.bfloat16)
    )
    prompts = [tokens_of(tiny_config, 9 + i, seed=i) for i in range(4)]
    requests = [Request(i, p, Sampling(1.0, n), i) for i, p in enumerate(prompts)]

    def gap(engine, matmul_dtype):
        """The largest difference between the engine's log-probabilities and the model's."""
        found = []
        for prompt, done in zip(prompts, asyncio.run(engine.generate(requests))):
            whole = np.concatenate([prompt, done.ids])[None]
            logp = jax.nn.log_softmax(
                forward(Decoder(tiny_config, matmul_dtype=matmul_dtype), params, whole)[0]
            )
            own = np.asarray(logp)[np.arange(len(prompt) - 1, whole.size - 1), done.ids]
            found.append(np.abs(own - done.logprobs).max())
        engine.release(range(4))
        return max(found)

    assert gap(exact, None) < 1e-4
    assert 3 * gap(rounded, jnp.bfloat16) < gap(rounded, None)
