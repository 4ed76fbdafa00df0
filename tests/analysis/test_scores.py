"""avg@k and best@k with their intervals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coevolve_jax.analysis import stats
from coevolve_jax.analysis.run_view import evaluations
from coevolve_jax.analysis.scores import scores, table
from coevolve_jax.envs import base
from coevolve_jax.loop.evaluate import tally
from coevolve_jax.types import Group, Outcome, Task, Trajectory


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.none() | st.booleans(), min_size=3, max_size=3), min_size=1, max_size=12), st.data()
)
def test_scores_are_means_of_what_each_rollout_came_to(rolled, data):
    """None stands for an invalid rollout."""
    parts = data.draw(st.lists(st.sampled_from("ab"), min_size=len(rolled), max_size=len(rolled)))
    by_task = {
        f"t{i}": [sum(x is True for x in r), sum(x is not None for x in r)] for i, r in enumerate(rolled)
    }
    categories = {f"t{i}": part for i, part in enumerate(parts)}
    rows = {row["category"]: row for row in scores(by_task, 3, categories, {})}
    assert set(rows) == {*parts, "all"} if len(set(parts)) > 1 else set(rows) == set(parts)
    for name, row in rows.items():
        chosen = [r for r, part in zip(rolled, parts) if name in ("all", part)]
        valid = [x for r in chosen for x in r if x is not None]
        whole = [any(r) for r in chosen if None not in r]
        assert row["trials"] == len(valid) and row["invalid"] == sum(r.count(None) for r in chosen)
        as_failures = [x is True for r in chosen for x in r], [True in r for r in chosen]
        assert ("avg_if_invalid_failed" in row) == (row["invalid"] > 0.01 * 3 * len(chosen))
        for kind, values in zip(("avg", "best"), as_failures):
            if worst := row.get(f"{kind}_if_invalid_failed"):
                assert worst["value"] == pytest.approx(np.mean(values)) and worst["low"] <= worst["high"]
        for kind, values in (("avg", valid), ("best", whole)):
            if not values:
                assert row[kind] is None
                continue
            assert row[kind]["value"] == pytest.approx(np.mean(values))
            assert (
                row[kind]["low"] <= row[kind]["value"] + 1e-9
                and row[kind]["value"] - 1e-9 <= row[kind]["high"]
            )
    bounded = sum("avg_if_invalid_failed" in row for row in rows.values())
    assert len(table(list(rows.values()), 3).splitlines()) == 1 + len(rows) + bounded


def test_tasks_that_are_alike_count_as_one_in_the_interval():
    by_task = {f"{kind}{i}": [i % 2 * 2, 2] for kind in "ab" for i in range(50)}
    width = lambda alike: (lambda e: e["high"] - e["low"])(scores(by_task, 2, {}, alike)[-1]["avg"])
    assert width({name: name[1:] for name in by_task}) == pytest.approx(2**0.5 * width({}), rel=0.1)


def test_an_interval_of_nothing_but_failures_is_not_empty():
    """Clopper and Pearson: the upper bound for 0 of n is 1 - 0.025 ** (1 / n)."""
    none, all_ = stats.share([0] * 100, [4] * 100), stats.share([4] * 100, [4] * 100)
    bound = 1 - 0.025**0.01
    assert (none.value, none.low) == (0, 0) and none.high == pytest.approx(bound)
    assert (all_.value, all_.high) == (1, 1) and all_.low == pytest.approx(1 - bound)
    assert stats.share([0] * 100, [1] * 100, [i // 4 for i in range(100)]).high == pytest.approx(
        1 - 0.025**0.04
    )
    assert stats.share([0, 1, 1], [1, 1, 1]) == stats.clustered_ratio([0, 1, 1], [1, 1, 1])


def test_best_of_k_asks_for_k_valid_rollouts_and_one_success_among_them():
    by_task = {"one": [1, 3], "none": [0, 3], "all": [3, 3], "short": [2, 2], "lost": [0, 0]}
    parts = {"one": "a", "none": "a", "all": "b", "short": "b", "lost": "c"}
    rows = {row["category"]: row for row in scores(by_task, 3, parts, {})}
    told = lambda row: (row["tasks"], row["trials"], *(row[k] and row[k]["value"] for k in ("avg", "best")))
    assert told(rows["a"]) == (2, 6, 1 / 6, 1 / 2)
    assert told(rows["b"]) == (2, 5, 1.0, 1.0)
    assert told(rows["c"]) == (0, 0, None, None)
    assert told(rows["all"]) == (4, 11, 6 / 11, 2 / 3)


def test_best_of_tasks_that_lost_a_rollout_each_is_bounded_too():
    """16 of 1,600 rollouts are invalid: no more than 1%, but one in six tasks is not in best."""
    by_task = {f"solved {i}": [16, 16] for i in range(50)} | {f"never {i}": [0, 16] for i in range(50)}
    by_task |= {f"never {i}": [0, 15] for i in range(16)}
    (row,) = scores(by_task, 16, {}, {})
    assert row["best"]["value"] == 50 / 84 and row["best_if_invalid_failed"]["value"] == 0.5
    (row,) = scores(by_task | {f"never {i}": [0, 16] for i in range(1, 16)}, 16, {}, {})
    assert "best_if_invalid_failed" not in row


def test_sets_that_say_different_things_have_no_row_together():
    parts = {"a": "iid", "b": "balanced"}
    rows = scores({"a": [2, 2], "b": [0, 2]}, 2, parts, {}, together=False)
    assert [(row["category"], row["avg"]["value"]) for row in rows] == [("iid", 1.0), ("balanced", 0.0)]


def test_a_task_of_no_category_counts_in_all_of_them_together():
    rows = {row["category"]: row for row in scores({"t": [1, 1], "u": [0, 1]}, 1, {"t": "a", "v": "b"}, {})}
    assert rows["all"]["avg"]["value"] == 1 / 2 and rows["a"]["avg"]["value"] == 1.0


def test_a_table_of_no_valid_rollout_says_so():
    (row,) = scores({"t": [0, 0]}, 2, {}, {})
    worst = row.pop("avg_if_invalid_failed"), row.pop("best_if_invalid_failed")
    assert row == {"category": "all", "tasks": 0, "trials": 0, "invalid": 2, "avg": None, "best": None}
    assert [estimate["value"] for estimate in worst] == [0.0, 0.0]
    assert "no valid rollout" in table([row], 2)


def test_a_table_counts_what_was_lost_and_bounds_the_score():
    """Two of 4 x 5 rollouts are invalid: 9 of 18 are right, or 9 of 20."""
    rows = scores({"a": [5, 5], "b": [0, 5], "c": [3, 4], "d": [1, 4]}, 5, {}, {})
    header, found, worst = table(rows, 5).splitlines()
    assert found.split()[:3] == ["all", "4", "50.0%"] and worst.split()[:4] == [
        "with",
        "2",
        "invalid",
        "45.0%",
    ]
    assert "75.0%" in worst and "50.0%" in found  # best@5: 3 of 4 tasks, 1 of the 2 complete ones


def test_where_no_rollout_is_valid_success_is_unknown_and_not_nought():
    empty = np.zeros(0, np.int32)
    broken = Outcome(reward=0.0, success=False, valid=False, reason="the worker died")
    rolled = tuple(Trajectory("t", m, *[empty] * 4, (), (), "environment", broken) for m in range(3))
    groups = [Group(Task("t", "bfcl", {}, ()), rolled)]
    result = tally(groups, 3, 1.0)
    assert (result.success, result.invalid, result.by_task) == (None, 3, {"t": [0, 0]})
    assert base.report(groups, base.judge)["success"] is None
    assert base.report_verdicts(groups, lambda jobs: [])["success"] is None
    rows = [{"step": n, "set": "iid", "success": s} for n, s in enumerate((0.5, None, 0.0))]
    (curve,) = evaluations(rows)
    assert [(point["step"], point["value"]) for point in curve["points"]] == [(0, 0.5), (2, 0.0)]
