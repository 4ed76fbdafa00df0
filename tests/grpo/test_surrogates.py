"""Surrogates by name: ours and a user's against the papers' formulas, and what is no surrogate."""

import re
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from coevolve_jax.config import check, load_file, override
from coevolve_jax.grpo import surrogates
from coevolve_jax.grpo.packing import pack
from coevolve_jax.models.decoder import Decoder
from tests.support.grpo_cases import (
    MODEL,
    learner_config,
    make_learner,
    moved,
    samples,
    trajectory,
)
from tests.support.paths import ROOT

FREE = dict(kl="none", kl_coef=0.0)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Makes a user's module of a function's code, and returns the dotted path of the function `loss`."""
    monkeypatch.syspath_prepend(tmp_path)
    surrogates.find.cache_clear()

    def make(code: str, function: str = "loss") -> str:
        (tmp_path / "own_losses.py").write_text(textwrap.dedent(code))
        monkeypatch.delitem(sys.modules, "own_losses", raising=False)
        return f"own_losses.{function}"

    yield make
    surrogates.find.cache_clear()


def rollouts():
    rng = np.random.default_rng(3)
    trajectories = [trajectory(rng, n) for n in (8, 20, 9, 13)]
    return trajectories, np.array([1.5, -0.7, 0.4, -2.0], np.float32)


def batch_of(trajectories, advantages):
    return pack(samples(trajectories, advantages), pack_length=32, rows_per_microbatch=2, max_rows=4)


def gradient(params, **settings):
    """The gradient and the metrics of the objective, at parameters that are not the sampler's."""
    learner = make_learner(params, **{**FREE, **settings})
    of = jax.jit(lambda p, batch: learner.gradients(p, None, batch, batch.sampler_logprobs))
    return of(moved(params), batch_of(*rollouts()))


def plain(params, token_loss):
    """The gradient of the mean of token_loss(ratio, logprob, advantage) over all policy tokens."""

    def loss(p):
        total, count = 0.0, 0
        for t, a in zip(*rollouts()):
            logp = jax.nn.log_softmax(Decoder(MODEL).apply({"params": p}, t.ids[None])[0])
            own = logp[jnp.arange(len(t.ids) - 1), t.ids[1:]]
            token = token_loss(jnp.exp(own - t.logprobs[1:]), own, a)
            total += jnp.sum(jnp.where(t.mask[1:], token, 0))
            count += t.mask[1:].sum()
        return total / count

    return jax.jit(jax.grad(loss))(moved(params))


def assert_equal(got, want):
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-6)


def test_cispo_is_the_papers_gradient(params):
    def token_loss(ratio, logprob, advantage):
        return -jax.lax.stop_gradient(jnp.clip(ratio, 0.5, 1.2)) * advantage * logprob

    got, metrics = gradient(params, surrogate="cispo", clip_low=0.5, clip_high=0.2)
    assert_equal(got, plain(params, token_loss))
    assert 0 < metrics["clip_fraction"] < 1


def test_cispo_learns_from_tokens_that_ppo_clips():
    log_ratio = jnp.log(jnp.array([[0.5, 1.0, 3.0, 0.5, 3.0]]))
    advantages = jnp.array([[1.0, 1.0, 1.0, -1.0, -1.0]])
    ones = jnp.ones((1, 5))
    c = learner_config(clip_low=0.2, clip_high=0.3)
    at = lambda x: surrogates.Tokens(jnp.exp(x), x, advantages, ones, ones > 0, ones.astype(int))
    slope = lambda surrogate: jax.grad(lambda x: surrogate(at(x), c)[0].sum())(log_ratio)
    np.testing.assert_allclose(slope(surrogates.clipped), [[-0.5, -1, 0, 0, 3]], rtol=1e-5)
    np.testing.assert_allclose(slope(surrogates.cispo), [[-0.8, -1, -1.3, 0.8, 1.3]], rtol=1e-5)


def test_the_example_of_the_docs_is_the_papers_objective(params, module):
    (code,) = re.findall(r"^    import jax\n.*?(?=^\S)", surrogates.__doc__, re.DOTALL | re.MULTILINE)

    def token_loss(ratio, logprob, advantage):
        t = 1.0 if advantage > 0 else 1.05
        return -advantage * 4 / t / (1 + jnp.exp(-t * (ratio - 1)))

    got, metrics = gradient(params, surrogate=module(textwrap.dedent(code), "sapo"))
    assert_equal(got, plain(params, token_loss))
    assert metrics["clip_fraction"] == 0


def test_a_users_copy_of_the_clipped_surrogate_gives_the_same_bits(params, module):
    code = """
        import jax.numpy as jnp
        def loss(tokens, config):
            ratio, a = jnp.exp(tokens.log_ratio), tokens.advantages
            bounded = jnp.clip(ratio, 1 - config.clip_low, 1 + config.clip_high)
            return -jnp.minimum(ratio * a, bounded * a), ratio * a > bounded * a
    """
    (ours, told), (theirs, said) = (gradient(params, surrogate=name) for name in ("clipped", module(code)))
    assert 0 < told["clip_fraction"] < 1
    jax.tree.map(np.testing.assert_array_equal, (ours, told), (theirs, said))


def test_a_surrogate_sees_entropies_without_their_gradient_and_each_trajectorys_tokens(params, module):
    entropies = []
    for t in rollouts()[0]:
        logp = jax.nn.log_softmax(Decoder(MODEL).apply({"params": moved(params)}, t.ids[None])[0])
        entropies += [float(-np.sum(np.exp(row) * row)) for row in np.asarray(logp)[:-1][t.mask[1:]]]
    limit = sorted(entropies)[len(entropies) // 3] + 1e-4
    code = f"""
        import jax.numpy as jnp
        def loss(tokens, config):
            told = (tokens.entropy > {limit}) & tokens.mask & (tokens.segment_ids > 0)
            return -tokens.advantages * tokens.log_ratio + 9 * tokens.entropy, told
    """
    got, metrics = gradient(params, surrogate=module(code))
    assert_equal(got, plain(params, lambda ratio, logprob, advantage: -advantage * logprob))
    np.testing.assert_allclose(metrics["clip_fraction"], np.mean(np.array(entropies) > limit), rtol=1e-5)


CUT = "jnp.zeros(tokens.mask.shape, bool)"


@pytest.mark.parametrize(
    "returns, why",
    [
        (f"tokens.advantages * tokens.log_ratio, {CUT}", "pushes tokens of advantage +1 the wrong way"),
        (f"-jnp.abs(tokens.advantages) * tokens.log_ratio, {CUT}", "pushes tokens of advantage -1 the wrong"),
        (f"-tokens.advantages * jnp.sqrt(tokens.log_ratio), {CUT}", "gradient is not finite at log_ratio"),
        ("-tokens.advantages * tokens.log_ratio", "must return the loss and a bool of each token"),
        (f"-jnp.mean(tokens.advantages * tokens.log_ratio), {CUT}", r"it returns float32 () and bool (2, 3)"),
        ("-tokens.advantages * tokens.log_ratio, tokens.advantages", "float32 (2, 3) and float32 (2, 3)"),
        (f"-tokens.advantage * tokens.log_ratio, {CUT}", "has no attribute 'advantage'"),
        (f"config.mine * tokens.log_ratio, {CUT}", "'mine'"),
    ],
)
def test_what_is_no_surrogate_is_refused_before_anything_is_learned(params, module, returns, why):
    name = module(f"import jax.numpy as jnp\ndef loss(tokens, config):\n    return {returns}\n")
    with pytest.raises(ValueError, match=f"config.learner.surrogate is '{name}'.*{re.escape(why)}") as error:
        make_learner(params, surrogate=name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, why",
    [
        ("nowhere_at_all.loss", "cannot be imported"),
        ("math.nothing", "defines no function nothing"),
    ],
)
def test_a_path_to_nothing_is_refused_with_the_config(name, why):
    config = override(load_file(ROOT / "configs" / "bfcl_tiny.py"), {"learner.surrogate": name})
    with pytest.raises(ValueError, match=f"config.learner.surrogate is '{name}'.*{why}"):
        check(config)


def test_a_file_that_python_does_not_look_for_is_told_how(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "losses_here.py").write_text("def loss(tokens, config): ...\n")
    config = override(load_file(ROOT / "configs" / "bfcl_tiny.py"), {"learner.surrogate": "losses_here.loss"})
    with pytest.raises(ValueError, match=r"losses_here.py is here: start with PYTHONPATH=\.\)"):
        check(config)


def test_a_misspelled_name_is_told_ours(params):
    with pytest.raises(ValueError, match="'cipso': it must be one of clipped, cispo, or the dotted path"):
        make_learner(params, surrogate="cipso")
