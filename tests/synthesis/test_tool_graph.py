"""The graph of actions: its edges, and how a walk weighs them."""

from collections import Counter

import numpy as np

from coevolve_jax.synthesis.tool_graph import fed, telling, walk
from coevolve_jax.types import Group
from tests.support.method_cases import a_rollout, a_step, a_task


def test_an_answer_that_holds_a_later_argument_is_an_edge():
    task = a_task("t", "a", "b")
    steps = lambda answer, error=False: [a_step("a", 1, error, answer), a_step("b", 12345), a_step("c", 7)]
    edges = lambda *how: fed([Group(task, (a_rollout(task, 0, True, steps(*how)),))])
    assert edges('{"id": 12345}') == {("a", "b")}
    assert edges('{"id": 7}') == set()  # too short to tell
    assert edges('{"id": 12345}', True) == set()
    lost = a_rollout(task, 0, True, steps('{"id": 12345}'), valid=False)
    assert fed([Group(task, (lost,))]) == set()


def test_a_value_tells_if_it_is_a_text_or_a_number_that_is_not_too_short():
    assert [telling(v) for v in ("abc", 100, 1.5, "ab", 7, True, None, ["abc"])] == [True] * 3 + [False] * 5


def test_a_walk_prefers_what_was_fed_then_its_own_toolset():
    rng, weights = np.random.default_rng(0), {"fed": 3.0, "same": 2.0, "other": 1.0}
    second = Counter(walk("x", ["x", *weights], lambda a, b: weights[b], 2, rng)[1] for _ in range(3000))
    np.testing.assert_allclose([second[n] / 3000 for n in weights], [3 / 6, 2 / 6, 1 / 6], atol=0.03)
    assert len(walk("x", ["x", "y"], lambda a, b: 1.0, 9, rng)) == 2
