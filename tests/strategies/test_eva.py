"""eva: children come from tasks with a gap between their best rollout and the others, and from no other."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from coevolve_jax import build
from coevolve_jax.strategies import eva
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Group, Outcome
from tests.support.method_cases import Lab, Rolls, a_group, a_pool, a_task, again, config_of


def evolved(solved, at=4, gap="max_mean", **changes):
    """Evolves after visits with `solved[i]` successes of five rollouts of task i. Returns (lab, stats)."""
    config = config_of("eva", gap=gap, **changes)
    tasks = a_pool(*(a_task(f"t{i}", "tool_0", "tool_1") for i in range(len(solved))))
    strategy = build.strategy(config)
    strategy.observe(at, [a_group(t, *(m < n for m in range(5))) for t, n in zip(tasks, solved, strict=True)])
    lab = Lab(config, tasks)
    return lab, again(strategy, config).evolve(4, lab)


def parent(context) -> int:
    return int(context.id.split("/")[2][1:])


@pytest.mark.parametrize("live", [0, 1, 2])  # the parents follow the gap, wherever it is
def test_children_are_variants_of_tasks_with_a_gap(live):
    solved = [0, 5] * 12
    solved[live::6] = [1] * 4  # four tasks with p = 0.2
    lab, stats = evolved(solved)
    assert stats.added == 16 and len(lab.contexts) == 16
    born = Counter(parent(c) for c in lab.contexts)
    assert set(born) == {live, live + 6, live + 12, live + 18} and set(born.values()) == {4}
    for c in lab.contexts:
        source = list(lab.tasks)[parent(c)]
        longer = c.calls == (3, 3) and c.plan == source.calls
        refilled = c.plan == source.actions  # the explorer fills other arguments
        assert longer if c.signal in ("add_call", "new_turn") else refilled
        assert (c.task == source) == (c.signal != "other_scene") and (c.turns == 2) == (
            c.signal == "new_turn"
        )
    assert Counter(c.signal for c in lab.contexts) == dict.fromkeys(eva.OPERATORS, 4)


def test_a_parent_with_the_most_calls_has_only_variants_that_are_no_longer():
    config = config_of("eva")
    tasks = a_pool(*(a_task(f"t{i}", *["tool_0"] * config.data.max_calls) for i in range(2)))
    strategy, lab = build.strategy(config), Lab(config, tasks)
    strategy.observe(4, [a_group(t, 1, 0, 0) for t in tasks])
    strategy.evolve(4, lab)
    assert {c.signal for c in lab.contexts} == {"other_arguments", "other_scene"}


@pytest.mark.parametrize("name", ["eva", "webrl"])
def test_another_scene_is_one_that_offers_the_tools_of_the_task_and_without_one_there_is_no_variant(name):
    class Uneven(Lab):
        def offered(self, scenario):
            return self.tools[scenario.id]

    everything, one = frozenset({"tool_0", "tool_1"}), frozenset({"tool_0"})
    for tools, chosen in (((one, everything, one), {"scenario_1"}), ((one, one, one), set())):
        config = config_of(name)
        tasks = a_pool(*(a_task(f"t{i}", "tool_0", "tool_1") for i in range(3)))
        strategy, lab = build.strategy(config), Uneven(config, tasks)
        lab.tools = {f"scenario_{i}": offered for i, offered in enumerate(tools)}
        strategy.observe(4, [a_group(t, 1, 0, 0) for t in tasks])
        tasks.record({t.id: 0.3 for t in tasks})
        strategy.evolve(4, lab)
        assert {c.task.id for c in lab.contexts if c.signal == "other_scene"} == chosen
        assert "other_arguments" in {c.signal for c in lab.contexts}


def test_a_parent_with_the_most_turns_has_no_variant_with_one_more():
    for name, most, more in (("eva", 2, False), ("eva", 3, True), ("webrl", 2, False), ("webrl", 3, True)):
        config = config_of(name, **{"data.max_turns": most})
        tasks = a_pool(*(a_task(f"t{i}", "tool_0", "tool_1", turns=2) for i in range(2)))
        strategy, lab = build.strategy(config), Lab(config, tasks)
        strategy.observe(4, [a_group(t, 1, 0, 0) for t in tasks])
        tasks.record({t.id: 0.3 for t in tasks})
        strategy.evolve(4, lab)
        assert lab.contexts and more == ("new_turn" in {c.signal for c in lab.contexts})


def test_only_visits_since_the_last_evolution_count_and_without_a_gap_nothing_is_born():
    assert evolved([1, 0, 5], at=0)[1].added == 4
    for solved, at in (([1, 0, 5], -1), ([0, 5, 5], 4)):
        lab, stats = evolved(solved, at)
        assert stats.added == 0 == len(lab.contexts)


def test_equal_rewards_leave_no_gap_however_they_round():
    config, task = config_of("eva"), a_task("t", "tool_0", "tool_1")
    others = [a_task(f"t{i}", "tool_0", "tool_1") for i in (1, 2)]
    strategy, lab = build.strategy(config), Lab(config, a_pool(task, *others))

    def alike(t, reward):
        outcome = Outcome(reward, reward > 0.5, valid=True)
        made = (dataclasses.replace(r, outcome=outcome) for r in a_group(t, *[0] * 7).trajectories)
        return Group(t, tuple(made))

    groups = [alike(task, 0.1), *map(alike, others, (0.7, 1.0))]
    assert any(max(g.rewards) != np.mean(g.rewards) for g in groups)  # by 1e-17
    strategy.observe(4, groups)
    assert strategy.evolve(4, lab).added == 0 == len(lab.contexts)


def test_the_least_gap_has_no_children_and_the_odds_are_the_normalised_gaps():
    first = Counter(
        eva.parents({"a": 0.1, "b": 0.4, "c": 0.2}, np.random.default_rng(seed))[0] for seed in range(400)
    )
    assert set(first) == {"b", "c"} and 0.68 < first["b"] / 400 < 0.82  # 0.3 of 0.4
    assert sorted(eva.parents({"a": 0.5, "b": 0.5}, np.random.default_rng(0))) == ["a", "b"]
    # p is 0.2, 0.6 and 1: the gap to the mean favours the first, the variance the second.
    for gap, expected in (("max_mean", 2 / 3), ("max_min", 1 / 2), ("variance", 0.4)):
        values = [float(eva.GAPS[gap]([1.0] * n + [0.0] * (5 - n))) for n in (1, 3, 5)]
        np.testing.assert_allclose(values[0] / sum(values), expected)
    with pytest.raises(
        ValueError, match="config.strategy.gap is 'sd': it must be one of max_mean, max_min, var"
    ):
        evolved([1], gap="sd")


def test_later_parents_only_make_up_for_fruitless_ones():
    class Barren(Lab):
        def synthesize(self, contexts, **how):
            return super().synthesize([c for c in contexts if c.signal != "new_turn"], **how)

    config = config_of("eva", **{"evolution.tasks": 8})
    tasks = a_pool(*(a_task(f"t{i}", "tool_0", "tool_1") for i in range(6)))
    strategy, lab = build.strategy(config), Barren(config, tasks)
    strategy.observe(4, [a_group(t, i < 5, 0, 0) for i, t in enumerate(tasks)])
    assert strategy.evolve(4, lab).added == 8
    assert max(Counter(parent(c) for c in lab.contexts).values()) <= 4


def test_batches_hold_the_share_of_new_tasks():
    old = [a_task(f"o{i}", "a") for i in range(40)]
    new = [a_task(f"n{i}", "a", kind="signal") for i in range(10)]
    for share, least, most in ((0.5, 4, 8), (0.0, 0, 3)):
        config = config_of("eva", min_evolved_share=share, **{"rollout.tasks_per_step": 8})
        strategy, pool = build.strategy(config), TaskPool()
        pool.add(old + new)
        drawn = [g.task.id[0] for s in range(20) for g in strategy.collect(s, pool, Rolls(lambda t: 0.5))]
        assert least * 20 <= drawn.count("n") <= most * 20


@pytest.mark.parametrize("name", ["eva", "webrl", "middo", "socratic"])
def test_without_reference_calls_a_method_that_grows_from_them_is_refused(name):
    bare, strategy = a_pool(*(a_task(f"t{i}") for i in range(24))), build.strategy(config_of(name))
    with pytest.raises(ValueError, match=f"^Strategy {name} makes .* none of the 24 tasks of D_t has"):
        strategy.collect(0, bare, Rolls(lambda t: 0.5))
    bare.add([a_task("explored", "tool_0")])
    assert strategy.collect(0, bare, Rolls(lambda t: 0.5))
