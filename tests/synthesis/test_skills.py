"""Skills: counts of attempts, posteriors, and the allocation by returns that diminish."""

from collections import Counter

import pytest

from coevolve_jax.synthesis.skills import (
    allocate,
    beta,
    next_share,
    skills_of,
    unsettled,
    variance_of,
)
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Call, Lineage, Task, Turn


def a_task(id, *tools):
    calls = tuple(Call(tool, {}) for tool in tools)
    return Task(id, "made_up", {"id": id}, (Turn("q", calls),), lineage=Lineage("initial"))


def test_the_share_of_the_next_task_is_the_difference_of_the_worths():
    for half in (0.5, 3.0):
        worth = lambda n: n / (n + half)
        for n in (0, 1, 2.5, 40):
            assert next_share(n, half) == pytest.approx(worth(n + 1) - worth(n))
    even = allocate(lambda: {"a": 0.2, "b": 0.2, "c": 0.1}, {"b": 2}, 9, 3.0)
    assert even[:2] == ["a", "a"] and Counter(even) == {"a": 5, "b": 2, "c": 2}
    assert allocate(dict, {}, 5, 3.0) == []


def test_a_place_that_is_likely_to_give_half_a_task_lowers_the_next_ones_worth_by_half():
    worth = lambda: {"a": 0.2, "b": 0.14}
    assert allocate(worth, {}, 4, 3.0) == ["a", "b", "a", "b"]
    assert allocate(worth, {}, 4, 3.0, size=0.5) == ["a", "a", "b", "a"]


def test_skills_are_counted_once_a_task_and_settled_tasks_are_not():
    tasks = TaskPool()
    tasks.add([a_task(f"live {i}", "tool_1") for i in range(4)])
    tasks.add([a_task("twice", "tool_2", "tool_2", "tool_3")])
    tasks.record({"live 0": 1.0, "live 1": 0.5, "live 2": 0.0})
    assert unsettled(tasks, "") == {"tool_1": 2, "tool_2": 1, "tool_3": 1}
    assert skills_of(tasks, "id") >= {"twice|tool_2", "live 0|tool_1"}


def test_the_posterior_starts_from_the_rate_of_all_skills():
    assert beta({"a": (4.0, 1.0)}, 4.0, ["b"]) == {"a": (1 + 3 + 3, 1 + 1 + 1), "b": (4, 2)}
    assert beta({}, 0.0, ["b"]) == {"b": (1, 1)}
    one, two = {"a": (0.1, 0.1), "b": (0.7, 0.3), "c": (1e9, 0.0)}, {}
    two.update(reversed(one.items()))
    assert beta(one, 4.0) == beta(two, 4.0)


def test_the_worth_is_the_variance_and_a_floor_where_all_attempts_failed():
    worth = lambda failed, floor=0.02: variance_of({"a": 0.2}, {"a": failed}, floor)["a"]
    assert (worth(20), worth(12)) == (0.02, 0.02)
    assert worth(11) == worth(0) == worth(20, 0.0) == pytest.approx(0.16)
