"""Agent-World: what fails in the arena of unseen tasks is where the chains of new tasks start."""

import dataclasses

import numpy as np
import pytest

from coevolve_jax import build
from coevolve_jax.strategies import agent_world
from coevolve_jax.types import Group, Lineage
from tests.support.method_cases import Lab, a_group, a_pool, a_rollout, a_step, a_task, again, config_of

X = "tool_3"


class Arena(Lab):
    """A lab whose policy never makes the call of tool X. It keeps its probes."""

    def probe(self, tasks, k, step):
        self.probed = True
        self.probes = [*getattr(self, "probes", []), (len(tasks), k)]
        return [Group(task, tuple(self.rollout(task, m) for m in range(k))) for task in tasks]

    def rollout(self, task, m):
        missing = X in task.actions
        steps = [a_step(c.name, c.arguments["x"]) for c in task.calls if c.name != X]
        return a_rollout(task, m, not missing, steps)


def share_with_x(shuffled: bool, seed: int) -> float:
    config = config_of("agent_world", shuffled=shuffled, **{"evolution.tasks": 16})
    config.seed = seed
    lab = Arena(config, a_pool(a_task("t", "tool_0", "tool_1")))
    strategy = build.strategy(config)
    strategy.observe(0, [a_group(a_task("t", "tool_0", "tool_1"), 1, 1)])  # training shows no weakness
    assert strategy.evolve(4, lab) is not None and len(lab.contexts) == 32
    assert all(c.must == (c.plan[0],) and len(set(c.plan)) == 3 for c in lab.contexts)
    return np.mean([X in c.plan for c in lab.contexts])


@pytest.mark.slow
def test_chains_start_at_what_fails_in_the_arena_alone():
    assert min(share_with_x(False, seed) for seed in range(5)) >= 0.5
    by_chance = np.mean([share_with_x(True, seed) for seed in range(20)])
    assert by_chance < 0.5  # three of eight tools make a chain: 0.375


def test_an_evolution_asks_for_an_arena_and_keeps_drafts_that_some_runs_solve():
    config = config_of("agent_world", arena=6, drafts=1.0, **{"evolution.tasks": 8})
    for chance, added in ((1.0, 8), (0.0, 0)):
        lab = Lab(config, a_pool(a_task("t", "tool_0")), lambda task: chance)
        strategy = build.strategy(config)
        stats = strategy.evolve(4, lab)
        assert stats.added == added == len(lab.tasks) - 1 and stats.refused["not_adopted"] == 14 - added
        assert {t.lineage.kind for t in lab.tasks} == {"initial", "signal"} if added else {"initial"}
        assert not [t for t in lab.tasks if t.id.startswith("arena")]
    lab = Arena(config, a_pool(a_task("t", "tool_0")))
    strategy.evolve(4, lab)
    assert lab.probes == [(6, 4), (8, 5)]
    kept = [t for t in lab.tasks if t.lineage.kind == "signal"]
    assert not any(X in t.actions for t in kept)  # no run solves these
    with pytest.raises(ValueError, match=r"config\.strategy\.agree is 6: it must be 0 to config.* \(5\)"):
        build.strategy(config_of("agent_world", agree=6))


@pytest.mark.parametrize(
    "agree, runs, added", [(2, 1, 0), (2, 2, 8), (2, 3, 8), (0, 0, 8), (5, 4, 0), (5, 5, 8)]
)
def test_a_draft_is_kept_from_the_number_of_runs_on_that_solve_it(agree, runs, added):
    class Solved(Lab):
        def probe(self, tasks, k, step):
            super().probe(tasks, k, step)
            return [a_group(task, *(i < runs for i in range(k))) for task in tasks]

    config = config_of("agent_world", arena=6, drafts=1.0, agree=agree, **{"evolution.tasks": 8})
    lab = Solved(config, a_pool(a_task("t", "tool_0")))
    assert build.strategy(config).evolve(4, lab).added == added


def test_the_arena_has_no_task_that_is_trained_on():
    class Known(Lab):
        """A lab whose free exploration also finds a task that D_t has."""

        probed_ids = ()

        def synthesize_unguided(self, *, into=None, **request):
            stats = super().synthesize_unguided(into=into, **request)
            into.add(
                [dataclasses.replace(next(iter(self.tasks)), id="known", lineage=Lineage("arena", step=4))]
            )
            return stats

        def probe(self, tasks, k, step):
            self.probed_ids = self.probed_ids or tuple(t.id for t in tasks)
            return super().probe(tasks, k, step)

    config = config_of("agent_world", arena=3)
    lab = Known(config, a_pool(a_task("t", "tool_0", "tool_1")))
    build.strategy(config).evolve(4, lab)
    assert len(lab.probed_ids) == 3 and "known" not in lab.probed_ids


def test_a_draft_that_the_arena_holds_is_not_trained_on_where_there_is_one_scenario():
    class Narrow(Lab):
        """A world in which exploration under a plan finds a task of the arena again."""

        def _add(self, contexts, request, into):
            stats = super()._add(contexts, request, into)
            if request.kind == "draft":
                into.add([dataclasses.replace(self.found, id="again", lineage=Lineage("draft"))])
            return stats

        def synthesize_unguided(self, *, into=None, **request):
            stats = super().synthesize_unguided(into=into, **request)
            self.found = next(iter(into))
            return stats

    config = config_of("agent_world", arena=3)
    for own, added in (("again", 0), ("draft-4-0", 1)):
        lab = Narrow(
            config, a_pool(a_task("t", "tool_0")), lambda task: task.id == own, scenarios=Lab.scenarios[:1]
        )
        assert build.strategy(config).evolve(4, lab).added == added


def test_the_diagnosis_counts_attempts_up_to_the_first_missed_call_and_shrinks_to_the_toolset():
    task = a_task("t", "a", "b", "c")
    failed = a_rollout(task, 1, False, [a_step("a", 0), a_step("c", 2)])
    tried = agent_world.diagnose([Group(task, (a_rollout(task, 0, True), failed))])
    assert tried == {"a": (2, 0), "b": (2, 1), "c": (1, 0)}
    one, other = frozenset({"s1"}), frozenset({"s2"})
    rates = agent_world.weakness({**tried, "unknown": (9, 9)}, {"a": one, "b": one, "c": other})
    mean = 1 / 4  # of the toolset of a and b
    np.testing.assert_allclose(
        [rates[name] for name in "abc"], [4 * mean / 6, (1 + 4 * mean) / 6, 0.0], atol=1e-12
    )


def test_the_edges_of_the_graph_come_from_rollouts_and_are_kept():
    task = a_task("t", "a", "b")
    steps = [a_step("a", 1, answer='{"id": 12345}'), a_step("b", 12345)]
    strategy = build.strategy(config_of("agent_world"))
    strategy.observe(0, [Group(task, (a_rollout(task, 0, True, steps),))])
    assert again(strategy, config_of("agent_world")).to_json()["fed"] == [["a", "b"]]
