"""The task pool: growth, duplicates, sampling in epochs, exact state."""

import dataclasses
import json
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.types import Call, Lineage, Task, Turn


def task(name, value=None, born=0, query="do it", state=None):
    turns = (Turn(query, (Call("cd", {"folder": name if value is None else value}),)),)
    return Task(name, "bfcl", state or {"x": 1}, turns, lineage=Lineage("initial", step=born))


def filled(n, born=0, prefix="t", pool=None):
    pool = TaskPool() if pool is None else pool
    pool.add([task(f"{prefix}{i}", born=born) for i in range(n)])
    return pool


def reload(pool):
    return TaskPool.from_json(json.loads(json.dumps(pool.to_json())), pool.max_size)


def names(batch):
    return [t.id for t in batch]


def test_add_reports_duplicates_by_scenario_and_calls_whatever_the_wording():
    pool = TaskPool()
    first = task("a", value=5, state={"p": 1, "q": 2})
    same = task("b", value=5.0, query="other words", state={"q": 2, "p": 1})
    verdicts = pool.add(
        [
            first,
            same,
            task("c", value=6, state={"p": 1, "q": 2}),
            task("d", value=5),
            task("e", value="5", state={"p": 1, "q": 2}),
        ]
    )
    assert verdicts == [None, "duplicate", None, None, None]
    assert names(pool) == ["a", "c", "d", "e"]
    assert pool.add([same]) == ["duplicate"]
    assert reload(pool).add([same]) == ["duplicate"]


def test_true_is_not_one_and_the_split_into_turns_matters():
    pool = TaskPool()
    calls = (Call("ls", {"a": True}), Call("ls", {"a": True}))
    one = dataclasses.replace(task("a"), turns=(Turn("q", calls),))
    two = dataclasses.replace(one, id="b", turns=(Turn("q", calls[:1]), Turn("q", calls[1:])))
    number = dataclasses.replace(one, id="c", turns=(Turn("q", (Call("ls", {"a": 1}),) * 2),))
    assert pool.add([one, two, number]) == [None, None, None]


def test_max_size_refuses_growth_but_names_duplicates_first():
    pool = TaskPool(max_size=2)
    assert pool.add([task("a"), task("b"), task("a2", value="a"), task("c")]) == [
        None,
        None,
        "duplicate",
        "pool_full",
    ]
    assert len(pool) == 2 and len(reload(pool)) == 2
    assert reload(pool).add([task("d")]) == ["pool_full"]


def test_bad_tasks_are_refused_and_nothing_is_added():
    pool = filled(2)
    with pytest.raises(ValueError, match="no reference calls"):
        pool.add([task("new"), dataclasses.replace(task("scenario"), turns=())])
    with pytest.raises(ValueError, match="the id t0"):
        pool.add([task("new"), task("t0", value="other")])
    with pytest.raises(ValueError, match="the id new"):
        pool.add([task("new"), task("new", value="other")])
    assert names(pool) == ["t0", "t1"]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**32))
def test_every_epoch_visits_every_task_once(size, n, seed):
    pool, rng = filled(size), np.random.default_rng(seed)
    batches = [names(pool.sample(n, rng)) for _ in range(2 * size)]
    drawn = Counter(name for batch in batches for name in batch)
    assert set(drawn.values()) == {2 * n}  # 2 * size * n draws over `size` tasks: whole epochs
    for batch in batches:
        assert len(batch) == n
        assert max(Counter(batch).values()) <= -(-n // size)


def test_new_tasks_join_the_running_epoch_and_the_old_ones_are_not_repeated():
    pool, rng = filled(6), np.random.default_rng(0)
    first = names(pool.sample(4, rng))
    filled(2, born=10, prefix="new", pool=pool)
    second = names(pool.sample(4, rng))
    assert set(second) == {"t0", "t1", "t2", "t3", "t4", "t5", "new0", "new1"} - set(first)


def test_new_share_reserves_part_of_every_batch_and_still_visits_the_old():
    pool, rng = filled(20), np.random.default_rng(1)
    filled(4, born=10, prefix="new", pool=pool)
    assert names(pool.newest) == ["new0", "new1", "new2", "new3"]
    batches = [names(pool.sample(8, rng, new_share=0.25)) for _ in range(12)]
    for batch in batches:
        assert len(set(batch)) == 8
        assert sum(name.startswith("new") for name in batch) >= 2
    drawn = Counter(name for batch in batches for name in batch)
    old, new = [drawn[f"t{i}"] for i in range(20)], [drawn[f"new{i}"] for i in range(4)]
    assert min(old) >= 1 and max(old) - min(old) <= 1
    assert max(new) - min(new) <= 2 and min(new) > max(old)


def test_the_reserved_part_and_the_rest_know_of_each_other_within_an_epoch():
    pool, rng = filled(2, born=10, prefix="new", pool=filled(6)), np.random.default_rng(2)
    first = set(names(pool.sample(4, rng, new_share=0.5)))
    assert {"new0", "new1"} < first
    assert set(names(pool.sample(4, rng))) == {f"t{i}" for i in range(6)} - first

    pool = filled(4, born=10, prefix="new", pool=filled(4))
    first_new = {name for name in names(pool.sample(4, rng)) if name.startswith("new")}
    assert 0 < len(first_new) < 4
    rest = set(names(pool.sample(4 - len(first_new), rng, new_share=1.0)))
    assert rest == {f"new{i}" for i in range(4)} - first_new


def test_new_share_one_trains_on_the_new_only_as_far_as_they_reach():
    pool = filled(3, born=5, prefix="new", pool=filled(5))
    batch = names(pool.sample(4, np.random.default_rng(0), new_share=1.0))
    assert {"new0", "new1", "new2"} < set(batch) and len(set(batch)) == 4


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 6))
def test_state_continues_exactly(size, n, share, cut):
    pool, rng = filled(3, born=7, prefix="new", pool=filled(size)), np.random.default_rng(3)
    for _ in range(cut):
        pool.record({t.id: 1 / 3 for t in pool.sample(n, rng, new_share=share)})
    copy, copy_rng = reload(pool), np.random.default_rng()
    copy_rng.bit_generator.state = rng.bit_generator.state
    for _ in range(5):
        assert names(copy.sample(n, copy_rng, new_share=share)) == names(pool.sample(n, rng, new_share=share))
    assert json.dumps(copy.to_json()) == json.dumps(pool.to_json())
    assert list(copy) == list(pool)


def test_sampling_depends_on_the_seed():
    draws = {tuple(names(filled(8).sample(8, np.random.default_rng(seed)))) for seed in range(5)}
    assert len(draws) == 5


def test_records():
    pool = filled(1, born=4)
    pool.record({"t0": 0.25})
    pool.record({"t0": 0.75})
    record = reload(pool).records["t0"]
    assert (record.born, record.trained, record.first_score, record.last_score) == (4, 2, 0.25, 0.75)
    with pytest.raises(KeyError):
        pool.record({"unknown": 1.0})


def test_json_lines(tmp_path):
    path, pool = tmp_path / "tasks.jsonl", filled(2)
    pool.write(path)
    new = [task("new", born=3, query="größer")]
    pool.add(new)
    pool.append(path, new)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [Task.from_json(line) for line in lines] == list(pool)
    assert lines[2]["record"]["born"] == 3
    filled(1).write(path)
    assert len(path.read_text().splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["tasks.jsonl"]


@pytest.mark.parametrize(
    "call, word",
    [
        (lambda: TaskPool().sample(1, np.random.default_rng(0)), "empty"),
        (lambda: filled(1).sample(0, np.random.default_rng(0)), "batch of 0"),
        (lambda: filled(1).sample(1, np.random.default_rng(0), new_share=1.5), "new_share 1.5"),
        (lambda: TaskPool(max_size=0), "max_size"),
    ],
)
def test_bad_arguments(call, word):
    with pytest.raises(ValueError, match=word):
        call()
