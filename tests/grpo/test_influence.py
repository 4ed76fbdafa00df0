"""The influence score against numpy: plain cosines, and the scaling of Adam's second moment."""

import jax
import numpy as np
import optax
import pytest

from coevolve_jax.distributed import sharding
from coevolve_jax.grpo.influence import cosine, preconditioned
from coevolve_jax.grpo.packing import pack
from tests.support.grpo_cases import init_params, make_learner, moved, samples, trajectory

B2, EPS = 0.95, 1e-8


def flat(tree):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


def test_two_parameters_by_hand():
    optimizer = optax.chain(optax.clip_by_global_norm(1e9), optax.adamw(1e-2, b1=0.9, b2=B2))
    params, goal = {"x": np.float32(0.0), "y": np.float32(0.0)}, {"x": 1.0, "y": 0.0}
    state = optimizer.init(params)
    past = [{"x": 3.0, "y": 0.1}, {"x": -1.0, "y": 0.2}]
    for g in past:
        _, state = optimizer.update(jax.tree.map(np.float32, g), state, params)
    g = {"x": np.float32(0.5), "y": np.float32(-0.5)}
    v = np.zeros(2)
    for seen in (*past, g):  # the gradient that is scored is in the moment too
        v = B2 * v + (1 - B2) * np.array([seen["x"], seen["y"]], np.float64) ** 2
    v /= 1 - B2**3
    expected = np.array([0.5, -0.5]) / (np.sqrt(v) + EPS)
    np.testing.assert_allclose(flat(preconditioned(g, state, B2)), expected, rtol=1e-5)
    # The rarely moved y counts for more: plainly the cosine is 0.71.
    found = float(cosine(goal, preconditioned(g, state, B2)))
    assert found == pytest.approx(expected[0] / np.linalg.norm(expected), rel=1e-5) and found < 0.3
    assert float(cosine(goal, g)) == pytest.approx(np.sqrt(0.5), rel=1e-6)
    assert float(cosine(goal, {"x": 0.0, "y": 0.0})) == 0.0


@pytest.mark.slow
def test_the_learners_numbers_are_those_of_whole_gradients_and_change_nothing():
    rng, params = np.random.default_rng(0), init_params()
    learner = make_learner(params, kl_coef=0.0)
    batch = lambda seed, n=4: pack(
        samples([trajectory(rng, 10 + seed) for _ in range(n)], rng.normal(size=n).astype(np.float32)),
        pack_length=32, rows_per_microbatch=2, max_rows=4,
    )  # fmt: skip
    state = learner.init(moved(params))
    for seed in range(2):
        state, _ = learner.update(state, batch(seed))
    goal, others = batch(5), [batch(7), batch(9)]
    before = jax.device_get(state)
    gradient = lambda b: flat(
        jax.jit(lambda s, b: learner.gradients(s.params, None, b, None)[0])(
            state, sharding.place_batch(sharding.make_mesh(), b, axis=1)
        )
    )
    adam = [
        s for s in jax.tree.leaves(state.opt_state, is_leaf=lambda x: hasattr(x, "nu")) if hasattr(s, "nu")
    ]
    (nu,) = (flat(s.nu) for s in adam)
    d = gradient(goal)
    norm = float(learner.aim(state, goal))
    assert norm == pytest.approx(np.linalg.norm(d), rel=1e-4)
    for other in (*others, goal):
        g = gradient(other)
        v = (B2 * nu + (1 - B2) * g**2) / (1 - B2**3)
        scaled = g / (np.sqrt(v) + EPS)
        for how, vector in ((False, g), (True, scaled)):
            want = vector @ d / np.linalg.norm(vector) / np.linalg.norm(d)
            assert float(learner.influence(state, other, how)) == pytest.approx(want, abs=2e-4)
    assert float(learner.influence(state, goal, False)) == pytest.approx(1.0, abs=1e-5)
    for a, b in zip(jax.tree.leaves(jax.device_get(state)), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(a, b)
