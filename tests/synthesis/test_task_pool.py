"""The task pool: growth, duplicates, uniform and weighted draws (against a slow reference), forks, state."""

import dataclasses
import json
from collections import Counter
from fractions import Fraction

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from ml_collections import ConfigDict

from coevolve_jax.strategies.batches import sampling_weights
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


def test_a_file_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    filled(1).write(path)
    path.write_bytes(path.read_bytes() + b"\xff\xfe\n")
    with pytest.raises(ValueError, match=f"Line 2 of {path} is no task .UnicodeDecodeError"):
        TaskPool.read(path)


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
def test_a_batch_holds_different_tasks_as_far_as_there_are(size, n, seed):
    batch = names(filled(size).draw(n, np.random.default_rng(seed)))
    assert len(batch) == n and set(Counter(batch).values()) <= {n // size, -(-n // size)}


def drawn(pool, n, steps=4000, **how):
    """Each task's frequency, as a share of the batches."""
    rng = np.random.default_rng(0)
    counts = Counter(name for _ in range(steps) for name in names(pool.draw(n, rng, **how)))
    return {task.id: counts[task.id] / steps for task in pool}


def test_draws_are_uniform_whatever_was_drawn_before_and_whenever_a_task_was_born():
    pool, rng = filled(6), np.random.default_rng(0)
    pool.draw(6, rng)
    filled(2, born=10, prefix="new", pool=pool)
    shares = drawn(pool, 4)
    assert all(abs(share - 4 / 8) < 0.03 for share in shares.values()), shares


def test_new_share_reserves_a_part_for_all_that_evolution_made():
    pool = filled(20)
    for born in (5, 10):  # the earlier evolution is not forgotten
        evolved(3, born, pool)
    rng = np.random.default_rng(1)
    for _ in range(50):
        batch = names(pool.draw(8, rng, min_evolved_share=0.25))
        assert len(set(batch)) == 8 and sum(name.startswith("new") for name in batch) >= 2
    shares = drawn(pool, 8, min_evolved_share=0.5)
    new = [share for name, share in shares.items() if name.startswith("new")]
    assert max(new) - min(new) < 0.05 and min(new) > 0.6 and sum(new) >= 4
    everything = names(evolved(3, 5, filled(5)).draw(4, rng, min_evolved_share=1.0))
    assert {"new5-0", "new5-1", "new5-2"} < set(everything) and len(set(everything)) == 4


def evolved(n, born, pool):
    pool.add(
        [dataclasses.replace(task(f"new{born}-{i}"), lineage=Lineage("signal", step=born)) for i in range(n)]
    )
    return pool


def test_weights_by_record_and_tasks_that_are_left_out():
    pool = filled(4)
    pool.record({"t0": 1.0, "t1": 0.5, "t2": 0.25})
    weights = lambda rows: np.select([rows["last_score"] == 1.0, rows["last_score"] == 0.25], [0.0, 0.5], 1.0)
    shares = drawn(pool, 1, weights=weights)
    assert shares["t0"] == 0 and abs(shares["t1"] - 0.4) < 0.03 and abs(shares["t2"] - 0.2) < 0.03
    rng = np.random.default_rng(0)
    assert set(names(pool.draw(3, rng, weights=weights))) == {"t1", "t2", "t3"}
    assert set(names(pool.draw(4, rng, weights=weights))) == {"t0", "t1", "t2", "t3"}
    assert set(names(pool.draw(9, rng, apart_from={"t1", "t3"}))) == {"t0", "t2"}
    assert pool.draw(2, rng, apart_from={"t0", "t1", "t2", "t3"}) == []


@pytest.mark.parametrize(
    "weights, why",
    [
        ([1, 1, -0.01], "weight of task t2 is -0.01: it must be finite, and 0 or more"),
        ([np.nan, 1, 1], "weight of task t0 is nan"),
        ([1, np.inf, 1], "weight of task t1 is inf"),
        ([1, 1], r"3 tasks have weights of shape \(2,\): give each one"),
        ([1, 1, 1, 1], r"3 tasks have weights of shape \(4,\)"),
    ],
)
def test_weights_that_are_none_are_refused(weights, why):
    pool = filled(3)
    with pytest.raises(ValueError, match=why):
        pool.draw(1, np.random.default_rng(0), weights=lambda rows: np.array(weights))


@pytest.mark.parametrize(
    "share, of, least", [(0.5, 5, 3), (0.1, 10, 1), (0.1, 30, 3), (0.3, 4, 2), (0.7, 10, 7)]
)
def test_new_share_is_at_least_that_fraction(share, of, least):
    """0.1 * 30 and 0.7 * 10 are not whole in floating point."""
    pool = evolved(of, 100, filled(1000))  # so few of so many that chance draws none
    draws = (pool.draw(of, np.random.default_rng(seed), min_evolved_share=share) for seed in range(20))
    found = [sum(t.lineage.kind == "signal" for t in batch) for batch in draws]
    assert min(found) == least


def slow_sample(pool, n, rng, min_evolved_share, weight, apart_from):
    """The intended draw: all tasks in the order of their times, each weighted by its record alone."""
    ids = [t.id for t in pool if t.id not in apart_from]
    rounds, rest = (0, min(n, len(ids))) if apart_from else divmod(n, len(ids))
    weights = np.array([weight(pool.records[i]) for i in ids])
    noise = rng.exponential(size=len(ids))
    order = [ids[i] for i in np.lexsort((noise, noise / weights))]
    new = [i for i in order if pool[i].lineage.kind != "initial" and weight(pool.records[i]) > 0]
    reserved = new[: next(k for k in range(rest + 1) if k >= Fraction(str(min_evolved_share)) * rest)]
    others = [i for i in order if i not in reserved]
    batch = ids * rounds + reserved + others[: rest - len(reserved)]
    return [batch[i] for i in rng.permutation(len(batch))]


class Ties:
    """A generator with given times, which may be equal or 0."""

    def __init__(self, times):
        self.times = times

    def exponential(self, size):
        return np.array(self.times[:size])

    def permutation(self, n):
        return np.arange(n)[::-1]


TASK = st.tuples(
    st.booleans(), st.sampled_from([0.0, 0.1, 0.1, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0, 1.5])
)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(TASK, min_size=1, max_size=30),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 1.0]),
    st.sets(st.integers(0, 32), max_size=12),
    st.booleans(),
    st.none() | st.integers(0, 2**32),
)
def test_a_draw_is_that_of_the_slow_reference(made, n, share, barred, uniform, seed):
    pool = TaskPool()
    for i, (new, *_) in enumerate(made):
        lineage = Lineage("signal" if new else "initial", step=i)
        pool.add([dataclasses.replace(task(f"t{i}"), lineage=lineage)])
    weight = np.array([1.0 if uniform else w for _, w, _ in made])
    apart_from = {f"t{i}" for i in barred}
    one, two = (
        Ties([time for *_, time in made]) if seed is None else np.random.default_rng(seed) for _ in "12"
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = slow_sample(pool, n, one, share, lambda r: weight[r.born], apart_from)
        weights = None if uniform else lambda rows: weight[rows["born"]]
        batch = pool.draw(n, two, min_evolved_share=share, weights=weights, apart_from=apart_from)
    assert names(batch) == expected
    if seed is not None:
        assert one.bit_generator.state == two.bit_generator.state


def slow_weight(config, record):
    c = config.data
    if c.retire_after and record.saturated_visits >= c.retire_after:
        return 0.0
    if c.sampling == "uniform" or record.last_score is None:
        return 1.0
    return max(c.sampling_floor, 4 * record.last_score * (1 - record.last_score))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 1.0]) | st.floats(0, 1), max_size=4), min_size=1, max_size=12),
    st.sampled_from(["uniform", "variance"]),
    st.sampled_from([0, 0.0, 0.1, 1]),
    st.integers(0, 3),
)
def test_weights_by_column_are_those_by_record(scores, sampling, floor, retire_after):
    pool = filled(len(scores))
    for i, of_task in enumerate(scores):
        for score in of_task:
            pool.record({f"t{i}": score})
    config = ConfigDict(dict(data=dict(sampling=sampling, sampling_floor=floor, retire_after=retire_after)))
    expected = [slow_weight(config, r) for r in pool.records.values()]
    assert sampling_weights(config, pool.rows).tolist() == expected


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["fork", "add", "record"]), st.integers(0, 5)),
        max_size=12,
    )
)
def test_a_fork_and_its_pool_grow_and_learn_apart(acts):
    pools, whole = [filled(3)], [filled(3)]  # whole: copies that share nothing
    for which, act, i in acts:
        pool, copy = pools[which % len(pools)], whole[which % len(pools)]
        if act == "fork":
            pools.append(pool.fork())
            whole.append(reload(copy))
        elif act == "add":
            assert pool.add([task(f"new{i}")]) == copy.add([task(f"new{i}")])
        else:
            name = names(pool)[i % len(pool)]
            pool.record({name: i / 5})
            copy.record({name: i / 5})
        assert [p.to_json() for p in pools] == [c.to_json() for c in whole]
    for pool, copy in zip(pools, whole):
        batches = [names(p.draw(4, np.random.default_rng(0), min_evolved_share=0.5)) for p in (pool, copy)]
        assert batches[0] == batches[1]


def test_tasks_that_are_always_or_never_solved_settle():
    pool, seen = filled(1), []
    for score in (1.0, 1.0, 0.5, 0.0, 0.0, 0.0, 1.0):
        pool.record({"t0": score})
        seen.append(reload(pool).records["t0"].saturated_visits)
    assert seen == [1, 2, 0, 1, 2, 3, 1]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 6))
def test_state_continues_exactly(size, n, share, cut):
    pool, rng = evolved(3, 7, filled(size)), np.random.default_rng(3)
    for _ in range(cut):
        pool.record({t.id: 1 / 3 for t in pool.draw(n, rng, min_evolved_share=share)})
    copy, copy_rng = reload(pool), np.random.default_rng()
    copy_rng.bit_generator.state = rng.bit_generator.state
    for _ in range(5):
        assert names(copy.draw(n, copy_rng, min_evolved_share=share)) == names(
            pool.draw(n, rng, min_evolved_share=share)
        )
    assert json.dumps(copy.to_json()) == json.dumps(pool.to_json())
    assert list(copy) == list(pool)


def test_sampling_depends_on_the_seed():
    draws = {tuple(names(filled(8).draw(8, np.random.default_rng(seed)))) for seed in range(5)}
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
    pool.add([task("new", born=3, query="größer")])
    pool.write(path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [Task.from_json(line) for line in lines] == list(pool)
    assert lines[2]["record"]["born"] == 3
    filled(1).write(path)
    assert len(path.read_text().splitlines()) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["tasks.jsonl"]


def test_a_pool_is_read_as_it_was_written(tmp_path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    pool = evolved(2, 3, filled(3))
    pool.add([task("odd", query="größer \ud83d\n")])
    pool.record({"t1": 1 / 3, "new3-0": 1.0})
    pool.record({"t1": 0.1 + 0.2})
    pool.write(one)
    copy = TaskPool.read(one, max_size=6)
    assert json.dumps(copy.to_json()) == json.dumps(pool.to_json()) and list(copy) == list(pool)
    assert copy.add([task("again", value="t0"), task("more")]) == ["duplicate", "pool_full"]
    copy.write(two)
    assert two.read_bytes() == one.read_bytes()


@pytest.mark.parametrize(
    "lines, word",
    [
        (lambda line: [line, line], "Line 2 of .* has the id t0"),
        (lambda line: [line, line[:-9]], "Line 2 of .* is no task"),
        (lambda line: ["[]"], r"Line 1 of .* is no task .*\(TypeError"),
        (lambda line: [line.replace('"scenario"', '"note"')], r"is no task .*\(KeyError: 'scenario'\)"),
        (lambda line: [line.replace('"trained"', '"visits"')], r"is no task .*\(TypeError"),
    ],
)
def test_what_is_no_training_set_is_not_read(tmp_path, lines, word):
    filled(1).write(tmp_path / "tasks.jsonl")
    (line,) = (tmp_path / "tasks.jsonl").read_text().splitlines()
    (tmp_path / "bad.jsonl").write_text("\n".join(lines(line)))
    with pytest.raises(ValueError, match=word):
        TaskPool.read(tmp_path / "bad.jsonl")


@pytest.mark.parametrize(
    "call, word",
    [
        (lambda: TaskPool().draw(1, np.random.default_rng(0)), "empty"),
        (lambda: filled(1).draw(0, np.random.default_rng(0)), "batch of 0"),
        (lambda: filled(1).draw(1, np.random.default_rng(0), min_evolved_share=1.5), "min_evolved_share 1.5"),
        (lambda: TaskPool(max_size=0), "max_size"),
    ],
)
def test_bad_arguments(call, word):
    with pytest.raises(ValueError, match=word):
        call()


def test_none_is_reserved_for_evolved_tasks_that_are_drawn_no_more():
    pool = filled(8, prefix="old")
    evolved(8, 3, pool)
    weights = lambda rows: np.where(rows["evolved"], 0.0, 1.0)
    for seed in range(20):
        drawn = pool.draw(4, np.random.default_rng(seed), min_evolved_share=0.5, weights=weights)
        assert len(drawn) == 4 and all(t.id.startswith("old") for t in drawn)
