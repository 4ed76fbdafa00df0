"""The controls even, weakest and random_dev. Each test fails without what the control is for."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from coevolve_jax import build
from coevolve_jax import config as configs
from coevolve_jax.comparison.arms import arm
from coevolve_jax.strategies import growth
from tests.support.method_cases import Lab, Rolls, a_pool, a_task, again, born, config_of, slots

FOUR = range(4, 24, 5)  # the steps of four evolutions


def grown(name, tasks, steps=FOUR, **changes):
    config = config_of(name, **changes)
    lab = Lab(config, tasks)
    for step in steps:
        stats = build.strategy(config).evolve(step, lab)
        assert stats is not None and stats.added > 0
    return lab


def test_even_asks_for_every_action_equally_often_over_its_evolutions():
    lab = grown("even", a_pool(a_task("t", "tool_0")), **{"evolution.tasks": 6})
    asked = [c.must[0] for c in lab.contexts]
    assert Counter(asked) == dict.fromkeys([f"tool_{i}" for i in range(8)], 3)
    assert asked[:8] != asked[8:16]  # each turn has an order of its own
    assert build.strategy(config_of("even")).evolve(5, lab) is None
    free = grown("random", a_pool(a_task("t", "tool_0")), **{"evolution.tasks": 6})
    calls = Counter(name for task in born(free.tasks, "random") for name in task.actions)
    assert max(calls.values()) > min(calls.values())  # free exploration is not even


def test_even_takes_the_patterns_of_a_family_that_has_its_own():
    own = dataclasses.replace(a_task("t", "do", "do"), patterns=("go north", "take key"))
    lab = grown("even", a_pool(own), FOUR[:1], **{"evolution.tasks": 4})
    assert Counter(c.must[0] for c in lab.contexts) == {"go north": 2, "take key": 2}


def by_calls(chances, each=6):
    """Tasks of 1, 2, ... calls, `each` of a size, and rolls with a chance by size."""
    tasks = [a_task(f"{n}-{i}", *["tool"] * n) for n in range(1, len(chances) + 1) for i in range(each)]
    return a_pool(*tasks), Rolls(lambda task: chances[len(task.calls) - 1])


def test_weakest_draws_by_what_its_categories_lack():
    config = config_of("weakest", **{"rollout.tasks_per_step": 4})
    strategy, (tasks, rolls) = build.strategy(config), by_calls((0.2, 0.6, 1.0))
    size = lambda task: len(task.calls)
    slots(strategy, tasks, rolls, range(40), size)
    drawn = slots(again(strategy, config), tasks, rolls, range(40, 140), size)
    shares = np.array([drawn[n] for n in (1, 2, 3)]) / sum(drawn.values())
    # 0.8, 0.4 and the floor 0.05, of a sum of 1.25.
    np.testing.assert_allclose(shares, [0.64, 0.32, 0.04], atol=0.06)
    static = build.strategy(config_of("static", **{"rollout.tasks_per_step": 4}))
    flat = slots(static, tasks, rolls, range(40), size)
    assert max(flat.values()) < 0.45 * sum(flat.values())


def test_the_weights_of_weakest_are_the_formulas():
    strategy, (tasks, rolls) = build.strategy(config_of("weakest")), by_calls((1.0, 0.0), each=3)
    np.testing.assert_allclose(strategy.weights(tasks), [0.65 / 3] * 6)
    groups = rolls([task for task in tasks if len(task.calls) == 1], 4)
    strategy.observe(0, groups)  # three visits, all solved
    np.testing.assert_allclose(strategy.weights(tasks)[:3], (1 - (3 + 0.7) / 5) / 3)
    strategy = build.strategy(config_of("weakest", category="level"))
    with pytest.raises(ValueError, match="Category 'level' is no key of the scenario of task 1-0: use calls"):
        strategy.weights(tasks)
    with pytest.raises(ValueError, match="config.strategy.floor is 0.0: it must be above 0, at most 1"):
        build.strategy(config_of("weakest", floor=0.0))


@pytest.mark.parametrize("goals", [0, 5, 12])
def test_random_dev_is_random_and_one_goal_for_each_action_once(goals):
    start = lambda: a_pool(a_task("t", "tool_0"))
    dev = grown("random_dev", start(), goals=goals, **{"evolution.tasks": 4})
    free = grown("random", start(), **{"evolution.tasks": 4})
    goal_set = born(dev.tasks, "goal")
    assert {t.lineage.step for t in goal_set} == {4} and len(goal_set) == (goals or 8)
    asked, each = [c.must[0] for c in dev.contexts], (goals or 8) // 8
    assert {Counter(asked)[f"tool_{i}"] for i in range(8)} <= {each, each + 1} and len(asked) == (goals or 8)
    beside = Lab(config_of("random_dev"), start())
    growth.goal_set(config_of("random_dev"), beside, goals, 4)
    assert [c.must[0] for c in beside.contexts] == asked  # what the methods with a goal set measure on
    scenarios = {t.lineage.parent for t in goal_set}
    assert len(scenarios) == 1  # set apart: one of three
    same = lambda lab: [t.to_json() for t in born(lab.tasks, "random")]
    assert same(dev) == same(free)
    with pytest.raises(ValueError, match="config.strategy.goals is -1: it must be 0 or more"):
        build.strategy(config_of("random_dev", goals=-1))


def test_a_fork_to_random_dev_makes_its_goals_at_its_own_first_evolution():
    start, few = a_pool(a_task("t", "tool_0")), {"evolution.tasks": 4}
    forked = grown("random", start, FOUR[:2], **few).tasks
    lab = grown("random_dev", forked, FOUR[2:], **few)
    assert [t.lineage.step for t in born(lab.tasks, "goal")] == [FOUR[2]] * 8
    assert Counter(t.lineage.step for t in born(lab.tasks, "random")) == dict.fromkeys(FOUR, 4)


def test_the_goals_of_random_dev_do_not_depend_on_what_it_grows():
    """In a family with patterns of its own, a new task brings new actions."""
    own = dataclasses.replace(a_task("t", "do", "do"), patterns=("go north", "take key"))
    lab = grown("random_dev", a_pool(own), FOUR[:1], **{"evolution.tasks": 4})
    assert sorted(c.must[0] for c in lab.contexts) == ["go north", "take key"]
    assert born(lab.tasks, "random") and born(lab.tasks, "goal")


def test_random_prioritised_is_random_with_batches_by_variance_and_prioritised_does_not_grow():
    made, odds = {}, {}
    for name in ("random", "random_prioritised", "prioritised"):
        config = configs.override(config_of("static", **{"rollout.tasks_per_step": 1}), arm(name).changes)
        lab = Lab(config, a_pool(*(a_task(f"t{i}", *["tool"] * (i + 1)) for i in range(4))))
        strategy = build.strategy(config)
        lab.tasks.record({"t0": 0.0, "t1": 0.5, "t2": 1.0})
        counts = Counter(
            g.task.id for s in range(80) for g in strategy.collect(s, lab.tasks, Rolls(lambda t: 0.5))
        )
        odds[name] = [counts[f"t{i}"] for i in range(4)]
        strategy.evolve(4, lab)
        made[name] = [task.to_json() for task in born(lab.tasks, "random")]
    assert made["random"] == made["random_prioritised"] != [] == made["prioritised"]
    for name in ("prioritised", "random_prioritised"):
        never, half, always, new = odds[name]
        assert min(half, new) > 2 * max(never, always) > 0
    assert max(odds["random"]) < 2 * min(odds["random"])
