"""The schedule of the rate, clipping and weight decay."""

from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from coevolve_jax.grpo.optimizer import clip_by_global_norm, learning_rate, make_optimizer
from coevolve_jax.records import checkpoint
from tests.grpo.test_grpo import policy_batch
from tests.support.grpo_cases import learner_config, make_learner


def test_schedules_follow_their_formulas():
    rate = lambda step, **changes: float(learning_rate(learner_config(**changes), 0.1)(step))
    shape = dict(warmup_steps=10, decay_steps=110, final_rate=0.2)
    for step in (0, 5, 9, 10, 60, 110, 500):
        part = min(max(step - 10, 0) / 100, 1)
        cosine = 0.2 + 0.8 * (1 + np.cos(np.pi * part)) / 2
        for schedule, after in (("cosine", cosine), ("linear", 1 - 0.8 * part), ("constant", 1)):
            want = 0.1 * ((step + 1) / 10 if step < 10 else after)
            assert rate(step, schedule=schedule, **shape) == pytest.approx(want, rel=1e-5, abs=1e-9)
    assert learning_rate(learner_config(), 0.1) == 0.1


@pytest.mark.slow
@pytest.mark.parametrize("stop", [0, 1, 2, 3, 5])
def test_the_schedule_goes_on_where_a_checkpoint_left_it(params, stop, tmp_path):
    """Each update has the rate of its index, also after a restore. A batch without signal takes none."""
    rng = np.random.default_rng(20)
    shape = dict(warmup_steps=3, schedule="linear", decay_steps=8, final_rate=0.1, weight_decay=0.0)
    learner = make_learner(params, kl="none", kl_coef=0.0, **shape)
    rate, state, rates = learning_rate(learner_config(**shape), 1e-2), learner.init(params), []
    for update in range(6):
        if update == stop:
            state, _ = learner.update(state, policy_batch(rng, [0, 0, 0, 0]))
            with closing(checkpoint.Writer()) as writer:
                writer.save(tmp_path, update, state, {})
            _, state, _ = checkpoint.restore(tmp_path, learner.abstract_state)
        rates.append(float(rate(schedule_index(state))))
        state, metrics = learner.update(state, policy_batch(rng, [1, -1, 0.5, 2]))
        assert metrics["applied"]
    wanted = [1 / 3, 2 / 3, 1, 1, 1 - 0.9 / 5, 1 - 1.8 / 5]
    np.testing.assert_allclose(rates, 1e-2 * np.array(wanted), rtol=1e-5)


def schedule_index(state) -> int:
    (index,) = {int(s.count) for s in jax.tree.leaves(state.opt_state, is_leaf=is_schedule) if is_schedule(s)}
    return index


def is_schedule(x) -> bool:
    return isinstance(x, optax.ScaleByScheduleState)


def test_the_first_update_of_a_warmup_moves_the_policy(params):
    """Adam's first step is the gradient's sign times learning_rate / warmup_steps."""
    learner = make_learner(params, warmup_steps=4, kl="none", kl_coef=0.0)
    before = jax.device_get(params)
    state, _ = learner.update(learner.init(params), policy_batch(np.random.default_rng(8), [1, -1, 0.5, 2]))
    moves = [np.abs(np.asarray(a) - b).max() for a, b in zip(*map(jax.tree.leaves, (state.params, before)))]
    assert max(moves) == pytest.approx(1e-2 / 4, rel=1e-3)


@pytest.mark.parametrize("limit", [0.5, 5.0, 50.0])
def test_clipping_is_optaxs(limit):
    trees = [{"a": jnp.full(9, x), "b": jnp.full((4, 4), x)} for x in (0.0, 1.0, 1e-9)]  # norms 0, 5, 5e-9
    ours, theirs = clip_by_global_norm(limit), optax.clip_by_global_norm(limit)
    for tree in trees:
        got, want = (clip.update(tree, clip.init(tree))[0] for clip in (ours, theirs))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
    assert optax.tree.norm(ours.update(trees[1], ours.init(trees[1]))[0]) == pytest.approx(min(5, limit))


def test_a_step_is_adamws():
    c, params = learner_config(adam_b1=0.8, weight_decay=0.1), {"kernel": jnp.asarray([1.0, -2.0, 3.0])}
    optimizer, rng = make_optimizer(c, 0.01), np.random.default_rng(0)
    state, m, v = optimizer.init(params), 0.0, 0.0
    for t in (1, 2, 3):
        g = 0.1 * rng.normal(size=3)  # too short to be clipped
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
        adam = m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
        updates, state = optimizer.update({"kernel": jnp.asarray(g, jnp.float32)}, state, params)
        np.testing.assert_allclose(updates["kernel"], -0.01 * (adam + 0.1 * params["kernel"]), rtol=1e-4)


def test_only_matrices_decay_and_embeddings_on_request(params):
    zero = jax.tree.map(jnp.zeros_like, params)
    for embeddings in (False, True):
        optimizer = make_optimizer(learner_config(weight_decay=0.5, decay_embeddings=embeddings), 0.1)
        updates, _ = optimizer.update(zero, optimizer.init(params), params)
        for path, update in flatten_dict(updates).items():
            decays = path[-1] == "kernel" or (embeddings and path[-1] == "embedding")
            want = -0.05 * flatten_dict(params)[path] if decays else 0
            np.testing.assert_allclose(update, want + jnp.zeros_like(update), rtol=1e-5)
