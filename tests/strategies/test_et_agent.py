"""ET-Agent: among successes the short ones are better, and groups that vary are drawn more."""

import dataclasses

import numpy as np
import pytest

from coevolve_jax import build
from coevolve_jax.strategies import et_agent
from coevolve_jax.types import Group
from tests.support.method_cases import Rolls, a_group, a_pool, a_rollout, a_step, a_task, again, config_of

TASK = a_task("t", "a", "b")


def rollouts(calls, won=None, tokens=None):
    """A group of rollouts with these numbers of calls and sampled tokens; all succeed unless `won` says."""
    how = enumerate(zip(calls, won or [True] * len(calls), tokens or [6] * len(calls), strict=True))
    made = [a_rollout(TASK, i, w, [a_step("a", j) for j in range(n)], tokens=t) for i, (n, w, t) in how]
    return Group(TASK, tuple(made))


def advantages(group, **changes):
    samples = build.strategy(config_of("et_agent", **changes)).compute_advantages([group])
    return [s.advantages[0] for s in samples]


def test_fewer_calls_have_positive_advantages_and_a_failure_is_below_every_success():
    made = advantages(rollouts([2, 2, 6, 6]))
    assert min(made[:2]) > 0 > max(made[2:])
    assert advantages(rollouts([2, 2, 6, 6]), call_slope=0.0) == []  # without the factor the group is dead
    made = advantages(rollouts([1, 2, 6, 9], [False, True, True, True]))
    assert made[0] < min(made[1:]) and made[1] > made[2] > made[3]
    made = advantages(rollouts([2, 2, 2, 2], tokens=[4, 4, 20, 20]))
    assert min(made[:2]) > 0 > max(made[2:])
    assert advantages(rollouts([2, 2, 2, 2], tokens=[4, 4, 20, 20]), length_slope=0.0) == []


def test_the_reward_is_the_papers_formula():
    strategy = build.strategy(config_of("et_agent", call_slope=0.3, length_slope=0.7))
    calls, won, tokens = [1, 4, 3], [True, True, False], [5, 9, 13]
    found = strategy.rewards(rollouts(calls, won, tokens))
    sigmoid = lambda x: 2 / (1 + np.exp(x))
    z = (np.array(tokens) - 9) / np.std(tokens)
    expected = [w * sigmoid(0.3 * (n - 8 / 3)) * sigmoid(0.7 * x) for n, w, x in zip(calls, won, z)]
    np.testing.assert_allclose(found, expected)
    bad = Group(TASK, (a_rollout(TASK, 0, True, [a_step("a"), no_call()]),))
    np.testing.assert_allclose(strategy.rewards(bad), [0.0])  # 1 of the success, -1 of its format
    assert strategy.rewards(Group(TASK, ())) == []
    with pytest.raises(ValueError, match=r"config\.strategy\.call_slope is -0\.1: it must be 0 or more"):
        build.strategy(config_of("et_agent", call_slope=-0.1))


def no_call():
    """A step whose text is no call."""
    return dataclasses.replace(a_step("a"), call=None, error=True)


def slow_fronts(points):
    """Pareto fronts by definition."""
    left, fronts = dict(points), []
    while left:
        beats = lambda a, b: all(x >= y for x, y in zip(a, b)) and a != b
        front = {id for id, p in left.items() if not any(beats(q, p) for q in left.values())}
        fronts.append(front)
        left = {id: p for id, p in left.items() if id not in front}
    return fronts


def test_the_order_is_by_front_and_then_by_crowding():
    for seed in range(50):
        rng = np.random.default_rng(seed)
        points = {f"t{i}": tuple(rng.integers(1, 6, 2) / 4) for i in range(rng.integers(1, 15))}
        order = et_agent.pareto({**points, "equal": (9.0, 0.0)})
        assert sorted(order) == sorted(points)
        for front in slow_fronts(points):
            assert set(order[: len(front)]) == front
            order = order[len(front) :]
    line = {"a": (0.0, 1.0), "b": (0.1, 0.9), "c": (0.2, 0.8), "d": (0.9, 0.3), "e": (1.0, 0.2)}
    assert et_agent.pareto(line)[:3] == ["a", "e", "c"] and et_agent.pareto(line)[-1] == "b"


def test_the_variance_of_calls_is_that_of_the_calls_that_the_reward_counts():
    """Calls to tools that are not on offer are calls too."""
    task = a_task("t", "a", "b")
    steps = lambda n: [a_step("a"), *(dataclasses.replace(a_step("b"), pattern="") for _ in range(n - 1))]
    group = Group(task, tuple(a_rollout(task, i, i == 0, steps(n)) for i, n in enumerate((1, 6, 1, 6))))
    assert [len(t.actions) for t in group.valid] == [1] * 4
    strategy = build.strategy(config_of("et_agent"))
    strategy.observe(0, [group])
    assert strategy.to_json()["spread"]["t"] == [6.25, 0.1875]


@pytest.mark.parametrize("passed_over, prefers", [(0.1, True), (1.0, False)])
def test_groups_that_vary_are_drawn_more(passed_over, prefers):
    config = config_of("et_agent", passed_over=passed_over, **{"rollout.tasks_per_step": 4})
    tasks = a_pool(*(a_task(f"t{i}", "a", "b") for i in range(40)))
    strategy = build.strategy(config)
    varied = [t for i, t in enumerate(tasks) if i < 12]
    strategy.observe(0, [a_group(t, 1, 1, 1, 1) for t in tasks if t not in varied])
    strategy.observe(1, [a_group(t, 1, 0, 1, 0) for t in varied])
    strategy = again(strategy, config)
    ids = {t.id for t in varied}
    drawn = [g.task.id in ids for s in range(60) for g in strategy.collect(s, tasks, Rolls(lambda t: 0.5))]
    assert (np.mean(drawn) > 0.5) == prefers
    unseen = build.strategy(config).weights(tasks)
    assert (unseen == 1).all()
