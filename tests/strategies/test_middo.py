"""Middo: a task that is too hard twice makes room for an easier one, and lonely tasks get a sibling."""

import dataclasses

import numpy as np
import pytest

from coevolve_jax import build
from coevolve_jax.strategies import middo
from coevolve_jax.synthesis.lineage import from_file
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Lineage
from tests.support.method_cases import Lab, Rolls, a_group, a_pool, a_task, again, config_of

NAMES = ("tool_0", "tool_1", "tool_2")


class Careful(Lab):
    """A lab whose tasks are their context's plan, as far as it holds calls."""

    def _add(self, contexts, request, into):
        before = {t.id for t in self.tasks}
        stats = super()._add(contexts, request, into)
        assert all(c.plan for c in contexts) and stats.added == len({t.id for t in self.tasks} - before)
        return stats


def run(failed_at, deviations=1.0, **changes):
    """Two visits to ten tasks. Task 0 fails at the visits in failed_at; the others succeed mostly."""
    config = config_of("middo", deviations=deviations, lonely=0.0, **changes)
    tasks = a_pool(*(a_task(f"t{i}", *NAMES) for i in range(10)))
    strategy, lab = build.strategy(config), Careful(config, tasks)
    for visit in (0, 1):
        strategy.observe(
            visit, [a_group(t, *[not (t.id == "t0" and visit in failed_at)] * 3, False) for t in tasks]
        )
    strategy = again(strategy, config)
    stats = strategy.evolve(4, lab)
    drawn = {g.task.id for s in range(60) for g in strategy.collect(s, lab.tasks, Rolls(lambda t: 0.5))}
    return lab, stats, drawn


def test_a_task_that_failed_at_both_visits_is_replaced_by_one_with_a_call_less():
    few = {"rollout.tasks_per_step": 3}
    lab, stats, drawn = run((0, 1), **few)
    assert [c.task.id for c in lab.contexts] == ["t0"] and stats.added == 1
    (context,) = lab.contexts
    own = lab.tasks["t0"].calls
    assert context.calls == (2, 2) and len(context.plan) == 2 and all(call in own for call in context.plan)
    (new,) = [t for t in lab.tasks if t.lineage.signal == "drop_call"]
    assert len(new.calls) == 2 and new.lineage.parent == "t0"
    assert "t0" not in drawn and drawn == {t.id for t in lab.tasks} - {"t0"}
    for failed_at in ((0,), (1,), ()):  # once is not enough
        lab, stats, drawn = run(failed_at, **few)
        assert not lab.contexts and stats.added == 0 and "t0" in drawn
    assert not run((0, 1), deviations=9.0, **few)[0].contexts  # the idea switched off


def test_a_task_stays_in_use_where_exploration_cannot_follow_its_plan():
    """Then tasks of other calls come of the context, as many as were asked for."""

    class Astray(Lab):
        def _add(self, contexts, request, into):
            return super()._add([dataclasses.replace(c, plan=self.made) for c in contexts], request, into)

    config = config_of("middo", lonely=0.0, **{"rollout.tasks_per_step": 3})
    for made, fits in (
        (("tool_1", "tool_0"), True),
        (("tool_0", "tool_0"), False),
        (("tool_2", "tool_7"), False),
        (("tool_6", "tool_7"), False),
    ):
        lab = Astray(config, a_pool(*(a_task(f"t{i}", *NAMES) for i in range(10))))
        strategy, lab.made = build.strategy(config), made
        for visit in (0, 1):
            strategy.observe(visit, [a_group(t, t.id != "t0", t.id != "t0") for t in lab.tasks])
        assert strategy.evolve(4, lab).added == len(lab.tasks) - 10 == fits
        drawn = {g.task.id for s in range(20) for g in strategy.collect(s, lab.tasks, Rolls(lambda t: 0.5))}
        assert ("t0" in drawn) != fits


def test_a_task_is_replaced_once():
    config, tasks = config_of("middo", lonely=0.0), a_pool(*(a_task(f"t{i}", *NAMES) for i in range(10)))
    strategy, lab = build.strategy(config), Careful(config, tasks)
    for visit in (0, 1):
        strategy.observe(visit, [a_group(t, t.id != "t0", t.id != "t0") for t in lab.tasks])
    assert [strategy.evolve(step, lab).added for step in (4, 9)] == [1, 0] and len(lab.contexts) == 1


def test_a_better_task_has_the_same_actions_and_a_sibling_may_have_any():
    parent = a_task("t0", "a", "b", "b")
    for what, names, fits in (
        ("better", "bab", True),
        ("better", "ab", False),
        ("better", "aab", False),
        ("easier", "bb", True),
        ("easier", "aa", False),
        ("sibling", "xy", True),
    ):
        lineage = Lineage("signal", parent="t0", context=f"middo/4/t0/{what}")
        assert middo.replaces(dataclasses.replace(a_task("child", *names), lineage=lineage), parent) == fits


def test_the_bound_is_that_of_both_visits():
    rng = np.random.default_rng(0)
    for _ in range(50):
        losses = {str(i): rng.random(2).tolist() for i in range(rng.integers(1, 12))}
        before, last = np.array(list(losses.values())).T
        expected = {
            id
            for id, (a, b) in losses.items()
            if a > before.mean() + before.std() and b > last.mean() + last.std()
        }
        assert middo.too_hard({**losses, "unvisited": []}, 1.0) == expected
    assert middo.too_hard({"new": [1.0]}, 1.0) == set()


def test_a_task_visited_once_counts_among_the_last_visits():
    losses = {"a": [0.8, 0.8], "b": [0.2, 0.2], "c": [0.3, 0.3]}
    assert middo.too_hard(losses, 1.0) == {"a"}
    assert middo.too_hard(losses | {f"new{i}": [0.9] for i in range(20)}, 1.0) == set()  # 0.8 is usual now


def test_only_its_own_variants_replace_a_task():
    cases = {"webrl/4/t0/easier": 1, "middo/4/t0/easier": 0, "middo/4/t0/better": 0, "middo/4/t0/sibling": 1}
    for context, weight in cases.items():
        lineage = Lineage("signal", step=4, parent="t0", signal="drop_call", context=context)
        child = dataclasses.replace(a_task("child", "tool_0"), lineage=lineage)
        tasks = a_pool(a_task("t0", "tool_0", "tool_1"), a_task("t1", "tool_2"), child)
        assert middo.in_use(tasks).tolist() == [weight, 1, 1]


def test_tasks_of_another_runs_file_replace_none_of_the_tasks_that_have_its_ids_now():
    born = Lineage("signal", step=9, parent="initial-0-3", context="middo/9/initial-0-3/easier")
    tasks = a_pool(*(a_task(f"initial-0-{i}", "tool_0", "tool_1") for i in range(5)))
    tasks.add([dataclasses.replace(a_task("initial-0-5", "tool_0"), lineage=from_file(born))])
    assert build.strategy(config_of("middo")).weights(tasks).tolist() == [1] * 6


@pytest.mark.parametrize("room", [0, 1])
def test_a_full_training_set_is_counted_as_such_and_costs_no_question(room):
    class Asked(Lab):
        def ask(self, role, questions, *, reader=""):
            self.questions += len(questions)
            return super().ask(role, questions, reader=reader)

    for name in ("middo", "eva"):
        config = config_of(name, **{"evolution.tasks": 4}, **({"lonely": 1.0} if name == "middo" else {}))
        tasks = TaskPool(10 + room)
        assert not any(tasks.add([a_task(f"t{i}", *NAMES) for i in range(10)]))
        strategy, lab = build.strategy(config), Asked(config, tasks)
        lab.questions = 0
        strategy.observe(4, [a_group(t, t.id != "t0", 1, 0) for t in tasks])
        stats = strategy.evolve(4, lab)
        assert (stats.added, stats.refused) == (room, {"pool_full": 4 - room}), name
        assert bool(lab.questions) == (name == "middo" and room > 0) and len(lab.contexts) <= room


def test_a_task_at_the_least_number_of_calls_stays():
    config = config_of("middo", lonely=0.0)
    tasks = a_pool(*(a_task(f"t{i}", "tool_0", "tool_1") for i in range(6)))
    strategy, lab = build.strategy(config), Lab(config, tasks)
    for visit in (0, 1):
        strategy.observe(visit, [a_group(t, t.id != "t0", t.id != "t0") for t in tasks])
    assert config.data.min_calls == 2
    assert strategy.evolve(4, lab).added == 0


def test_the_task_least_like_its_neighbours_gets_a_sibling():
    common = [a_task(f"t{i}", "a", "b", "c") for i in range(9)]
    alone = a_task("alone", "x", "y")
    for neighbours in (1, 5):  # a task is no neighbour of its own
        assert middo.loneliest([*common, alone], neighbours)[0] == alone
    config = config_of("middo", lonely=0.1)
    lab = Lab(config, a_pool(*common, alone))
    build.strategy(config).evolve(4, lab)
    assert [(c.task.id, c.signal, c.plan) for c in lab.contexts] == [("alone", "other_arguments", ("x", "y"))]
    twin = dataclasses.replace(alone, id="twin", scenario={"other": 1})
    assert middo.loneliest([*common, alone, twin], 1)[0] not in (alone, twin)


def test_a_lonely_task_that_an_easier_one_replaces_gets_no_sibling():
    config = config_of("middo", lonely=0.1)
    tasks = a_pool(*(a_task(f"t{i}", *NAMES) for i in range(9)), a_task("alone", "x", "y", "z"))
    strategy, lab = build.strategy(config), Lab(config, tasks)
    for visit in (0, 1):
        strategy.observe(visit, [a_group(t, *[t.id != "alone"] * 3, False) for t in tasks])
    strategy.evolve(4, lab)
    assert [(c.task.id, c.signal) for c in lab.contexts] == [("alone", "drop_call")]
