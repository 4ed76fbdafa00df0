"""SEC: the bandit finds the category that teaches, and follows it when it moves."""

import numpy as np
import pytest

from coevolve_jax import build
from coevolve_jax.types import Group
from tests.support.method_cases import (
    Lab,
    Rolls,
    a_group,
    a_pool,
    a_rollout,
    a_task,
    again,
    born,
    config_of,
    slots,
)

SMALL = {"rollout.tasks_per_step": 6}
SIZE = lambda task: len(task.calls)


def three_arms():
    return a_pool(*(a_task(f"{n}-{i}", *["tool"] * n) for n in (1, 2, 3) for i in range(30)))


def shares(strategy, chances, steps, seed=0):
    """Shares of the slots of the three arms, whose rollouts have these chances."""
    rolls = Rolls(lambda task: chances[SIZE(task) - 1], seed)
    drawn = slots(strategy, three_arms(), rolls, steps, SIZE)
    return np.array([drawn[n] for n in (1, 2, 3)]) / sum(drawn.values())


@pytest.mark.parametrize("tau, found", [(0.4, True), (1e6, False)])  # a hot softmax knows no arm
def test_the_arm_of_middling_tasks_leads_and_another_one_after_a_change(tau, found):
    config = config_of("sec", tau=tau, **SMALL)
    strategy = build.strategy(config)
    shares(strategy, (0.02, 0.5, 0.98), range(8))
    strategy = again(strategy, config)
    assert (shares(strategy, (0.02, 0.5, 0.98), range(8, 28), seed=1)[1] >= 0.6) == found
    shares(strategy, (0.5, 0.98, 0.02), range(28, 34), seed=2)
    value = lambda: {arm: strategy.to_json()["values"].get(arm, 0.0) for arm in "123"}
    assert max(value(), key=value().get) == "1"
    assert (shares(strategy, (0.5, 0.98, 0.02), range(34, 54), seed=3)[0] >= 0.6) == found


def test_the_value_of_an_arm_moves_by_the_papers_rule_and_fades():
    tasks = {n: a_task(f"{n}", *["tool"] * n) for n in (1, 2, 3)}
    strategy, other_task = build.strategy(config_of("sec")), a_task("other", "tool")
    groups = [a_group(tasks[1], 1, 0, 0, 0), a_group(other_task, 1, 1, 1, 1), a_group(tasks[2], 0, 0, 0, 0)]
    strategy.observe(0, groups)
    # 2 sqrt(p (1 - p)) for p = 1/4, and a group without spread that counts as 0.
    expected = 0.5 * (2 * (1 / 4 * 3 / 4) ** 0.5) / 2
    np.testing.assert_allclose(strategy.to_json()["values"]["1"], expected, rtol=1e-4)
    assert strategy.to_json()["values"]["2"] == 0.0
    for fade, left in ((True, expected / 2), (False, expected)):
        other = build.strategy(config_of("sec", fade=fade))
        other.observe(0, groups)
        other.observe(1, [a_group(tasks[3], 1, 0, 0, 0)])
        np.testing.assert_allclose(other.to_json()["values"]["1"], left, rtol=1e-4)
    rising = build.strategy(config_of("sec", signal="progress"))
    for won in (0, 2, 3):
        rising.observe(0, [a_group(tasks[1], *([True] * won + [False] * (4 - won)))])
    np.testing.assert_allclose(rising.to_json()["values"]["1"], 0.5 * (0.5 * 0.5) + 0.5 * 0.25)


def test_before_it_learned_the_bandit_draws_as_random_does_without_a_reserved_share():
    kinds = ("initial", "random")
    tasks = a_pool(*(a_task(f"{kind}{i}", "tool", kind=kind) for kind in kinds for i in range(3)))
    drawn = {}
    for name, share in (("sec", 0.0), ("sec", 1.0), ("random", 0.0), ("random", 1.0)):
        config = config_of(name, **{"rollout.tasks_per_step": 3, "data.min_evolved_share": share})
        strategy, rolls = build.strategy(config), Rolls(lambda t: 0.5)
        drawn[name, share] = [[g.task.id for g in strategy.collect(s, tasks, rolls)] for s in range(9)]
    assert drawn["sec", 0.0] == drawn["sec", 1.0] == drawn["random", 0.0] != drawn["random", 1.0]


def test_an_arm_is_rewarded_by_the_advantages_that_are_learned_from():
    """A term of the reward makes a difference within a group whose rollouts all fail."""
    groups = [a_group(a_task("t", "tool"), 0, 0, 0, 0)]
    groups = [
        Group(g.task, tuple(a_rollout(g.task, i, False, tokens=3 + i) for i in range(4))) for g in groups
    ]
    plain, paid = config_of("sec"), config_of("sec", **{"reward.terms": ("length:0.3",)})
    values = []
    for config in (plain, paid):
        strategy = build.strategy(config)
        strategy.observe(0, groups)
        values.append(strategy.to_json()["values"]["1"])
        sizes = [abs(s.advantages[0]) for s in strategy.compute_advantages(groups)]
        np.testing.assert_allclose(values[-1], 0.5 * np.mean(sizes or [0]), rtol=1e-4)
    assert values[0] == 0 < values[1]


def test_its_tasks_are_those_of_random():
    made = {}
    for name in ("sec", "random"):
        lab = Lab(config_of(name), a_pool(a_task("t", "tool_0")))
        for step in (4, 9):
            build.strategy(config_of(name)).evolve(step, lab)
        made[name] = [task.to_json() for task in born(lab.tasks, "random")]
    assert made["sec"] == made["random"] != []


def test_arms_may_be_keys_of_the_scenario():
    tasks = a_pool(
        *(a_task(f"{level}{i}", "a", scenario={"level": level, "i": i}) for level in (1, 2) for i in range(3))
    )
    strategy = build.strategy(config_of("sec", arms="level,calls"))
    strategy.observe(0, [a_group(next(iter(tasks)), 1, 0)])
    assert list(strategy.to_json()["values"]) == ["1/1"]
    assert strategy.weights(tasks)[0] > strategy.weights(tasks)[-1]
    for key, value in (("tau", 0.0), ("rate", 0.0), ("signal", "loss")):
        with pytest.raises(ValueError, match=rf"config\.strategy\.{key} is .*: it must be "):
            build.strategy(config_of("sec", **{key: value}))


def test_an_arm_whose_rollouts_are_all_lost_keeps_its_value():
    one, two, three = (a_task(f"{n}", *["tool"] * n) for n in (1, 2, 3))
    strategy = build.strategy(config_of("sec"))
    strategy.observe(0, [a_group(task, 1, 0) for task in (one, two, three)])
    before = dict(strategy.to_json()["values"])
    lost, new = a_group(two, 1, 0, valid=False), a_group(a_task("4", *["tool"] * 4), 1, 0, valid=False)
    strategy.observe(1, [a_group(one, 1, 0), lost, new])
    after = strategy.to_json()["values"]
    assert after["2"] == before["2"] > after["3"] == before["3"] / 2  # the batch lacks the third arm
    assert after["1"] > before["1"] and "4" not in after
