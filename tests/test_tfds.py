"""The training set as a TFDS data set: round trips in memory for any task, on disk for a run's."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coevolve_jax import envs, tfds_tasks
from coevolve_jax.envs import bfcl
from coevolve_jax.envs.bfcl import single_turn
from coevolve_jax.synthesis.task_pool import Record, TaskPool
from coevolve_jax.types import Call, Lineage, Task, Turn
from tests.support import forked

pytestmark = pytest.mark.slow

ROOT = Path(tfds_tasks.__file__).parents[1]

# Text as JSON reads it: any character, also unpaired surrogates.
text = st.text(st.characters(), max_size=8) | st.sampled_from(["\ud800", "a\0b", "é"])
value = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
mapping = st.dictionaries(text, value, max_size=3)
names = st.lists(text, max_size=3).map(tuple)
lineages = st.builds(
    Lineage,
    kind=st.sampled_from(["initial", "random", "signal"]),
    signal=st.none() | text,
    parent=st.none() | text,
    context=st.none() | text,
    explorer=st.none() | text,
    triplets=st.lists(st.integers(), max_size=3).map(tuple),
    verdict=st.none() | text,
    reason=text,
    step=st.integers(0, 10**6),
    similarity=st.floats(0, 1),
    nearest=st.none() | text,
    focus=names,
)
calls = st.builds(Call, text, mapping)
turns = st.builds(Turn, text, st.lists(calls, max_size=3).map(tuple))
tasks = st.builds(Task, text, text, mapping, st.lists(turns, max_size=3).map(tuple), text, lineages)
scores = st.none() | st.floats(0, 1)
records = st.builds(
    Record, st.integers(0, 10**6), st.integers(0, 10**6), scores, scores, st.integers(0, 10**6)
)


def a_line(task: Task, record: Record) -> dict:
    return {**task.to_json(), "record": vars(record)}


@given(tasks, records)
def test_any_task_comes_back_equal_and_its_columns_say_the_same(task, record):
    stored = tfds_tasks.FEATURES.serialize_example(
        tfds_tasks.FEATURES.encode_example(tfds_tasks.columns(a_line(task, record)))
    )
    row = tfds_tasks.FEATURES.deserialize_example_np(stored)
    assert tfds_tasks.task(row) == task
    assert json.loads(row["task"])["record"] == vars(record)
    plain = lambda name: name.encode("utf-8", "backslashreplace")
    assert row["id"] == plain(task.id) and row["parent"] == plain(task.lineage.parent or "")
    assert row["asked_for"] == plain(task.lineage.signal or task.lineage.kind)
    called = [plain(call.name) for call in task.calls]
    assert row["calls"] == len(called)
    assert list(row["tools"]) == sorted(set(called), key=called.index)
    assert (row["born"], row["visits"]) == (record.born, record.trained)
    for column in ("first_score", "last_score"):
        score = getattr(record, column)
        if score is None:
            assert math.isnan(row[column])
        else:
            assert row[column] == pytest.approx(score, rel=1e-6, abs=1e-38)  # float32


def test_the_scores_say_when_they_are_nan():
    for column in ("first_score", "last_score"):
        told = tfds_tasks.FEATURES[column].doc.desc
        assert told.endswith(" visit; NaN before it and for held-out queries"), told


@pytest.fixture
def workdir(tmp_path) -> Path:
    """The workdir of a run with a training set of twelve tasks, half of them visited."""
    pool = TaskPool()
    for i in range(12):
        lineage = Lineage("signal", "boundary", f"t{i - 1}", step=i) if i > 5 else Lineage("initial")
        call = Call("send_message", {"message": f"é \ud83d {i}", "times": 10**20 + i})
        pool.add(
            [Task(f"t{i}", "bfcl", {"inbox": [0.1 * i, None]}, (Turn("Send it.", (call,)),), "", lineage)]
        )
    pool.record({f"t{i}": i / 10 for i in range(6)})
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text('{"seed": 3}')
    pool.write(folder / "tasks.jsonl")
    return folder


def tasks_of(workdir: Path) -> list[Task]:
    return [Task.from_json(json.loads(line)) for line in open(workdir / "tasks.jsonl", encoding="utf-8")]


def test_a_run_is_written_and_read_in_its_order_and_written_again_as_it_stands_then(workdir, tmp_path):
    folder = tmp_path / "set"
    written = tfds_tasks.write(workdir, folder)
    assert written == folder / "coevolve_tasks" / "1.0.0" and (written / "dataset_info.json").exists()
    assert json.loads((written / "metadata.json").read_text()) == {"run": "run", "config": {"seed": 3}}
    rows = tfds_tasks.read(folder)
    assert [tfds_tasks.task(row) for row in rows] == tasks_of(workdir)
    assert tfds_tasks.task(rows[7]) == tasks_of(workdir)[7]
    assert [row["id"] for row in rows if row["born"] > 8] == [b"t9", b"t10", b"t11"]
    assert [row["visits"] for row in rows] == [1] * 6 + [0] * 6

    lines = (workdir / "tasks.jsonl").read_text().splitlines(keepends=True)
    (workdir / "tasks.jsonl").write_text("".join([*lines, lines[0].replace('"t0"', '"later"')]))
    tfds_tasks.write(workdir, folder)
    again = tfds_tasks.read(folder)
    assert len(again) == 13 and tfds_tasks.task(again[12]).id == "later"


def test_what_cannot_be_written_or_read_is_told_in_one_sentence(workdir, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        tfds_tasks.write(tmp_path / "nowhere", tmp_path / "set")
    with pytest.raises(ValueError, match=r"holds no training set \(no tasks.jsonl\)"):
        tfds_tasks.write(tmp_path, tmp_path / "set")
    with pytest.raises(ValueError, match=r"holds no data set \(no coevolve_tasks/\)"):
        tfds_tasks.read(tmp_path)
    tfds_tasks.write(workdir, tmp_path / "set").rename(tmp_path / "set" / "coevolve_tasks" / "2.3.0")
    with pytest.raises(ValueError, match=r"holds version 2.3.0 of the data set and this code reads 1.0.0"):
        tfds_tasks.read(tmp_path / "set")


def test_the_command_writes_it_without_tensorflow_and_names_what_is_missing(workdir, tmp_path):
    command = ["experiments/export.py", "--to=tfds", f"--run={workdir}", f"--output={tmp_path / 'set'}"]
    program = (
        "import runpy, sys; sys.argv = sys.argv[1:]; {}; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    blocked = {
        "": "import atexit; atexit.register("
        "lambda: print('tensorflow' in sys.modules, 'jax' in sys.modules))",
        "tensorflow_datasets": "sys.modules['tensorflow_datasets'] = None",
    }
    done = {
        name: subprocess.run(
            [sys.executable, "-c", program.format(code), *command], cwd=ROOT, capture_output=True, text=True
        )
        for name, code in blocked.items()
    }
    assert done[""].returncode == 0, done[""].stderr
    assert done[""].stdout.splitlines() == [
        f"12 tasks in {tmp_path / 'set/coevolve_tasks/1.0.0'}",
        "False False",
    ]
    assert done["tensorflow_datasets"].returncode == 1
    (told,) = done["tensorflow_datasets"].stderr.splitlines()
    assert told.startswith("Error: The data set of tasks needs tensorflow-datasets") and told.endswith(
        "pip install coevolve_jax[tfds]."
    )
    assert [tfds_tasks.task(row) for row in tfds_tasks.read(tmp_path / "set")] == tasks_of(workdir)


@pytest.mark.parametrize(
    "options, why",
    [
        (["--benchmark=bfcl", "--splits="], "--splits names no split"),
        (["--benchmark=bfcl", "--splits=test"], "--output={file} cannot be written (Not a directory)"),
    ],
)
def test_the_command_says_in_one_sentence_what_it_cannot_write(options, why, tmp_path, quick):
    (file := tmp_path / "file").write_text("")
    done = forked.run(["experiments/export.py", "--to=tfds", *options, f"--output={file}"], quick)
    assert done.returncode == 1 and done.stderr.startswith(f"Error: {why.format(file=file)}"), done.stderr
    assert done.stderr.count("\n") == 1 and file.is_file()


def test_the_command_writes_a_benchmark_with_its_splits(tmp_path, quick):
    names = ["train", "development", "test", "sequential_train", "sequential_test"]
    command = ["experiments/export.py", "--to=tfds", "--benchmark=bfcl", f"--output={tmp_path}"]
    done = forked.run([*command, f"--splits={','.join(names)}"], quick)
    assert done.returncode == 0, done.stderr
    splits = {name: tfds_tasks.read(tmp_path, "bfcl_tasks", name) for name in names}
    single = {split: sum(len(single_turn.load(c, split)) for c in bfcl.SINGLE_TURN) for split in names}
    multi = dict(zip(names, [400, 200, 200, 400, 400]))
    assert {name: len(rows) for name, rows in splits.items()} == {n: multi[n] + single[n] for n in names}
    assert min(single["development"], single["test"]) > 800 and single["train"] == 0
    told = [f"{name:>16}  {multi[name] + single[name]} tasks" for name in ("development", "test")]
    assert done.stdout.splitlines()[1:3] == told
    both = tfds_tasks.read(tmp_path, "bfcl_tasks", "development+test")
    family = envs.load("bfcl")
    expected = family.tasks("evaluation", family.settings(family.categories))
    assert {row["id"].decode(): tfds_tasks.task(row) for row in both} == {t.id: t for t in expected}
    multi_turn = lambda rows: {row["id"] for row in rows if row["id"].startswith(b"multi_turn")}
    ids = {name: multi_turn(rows) for name, rows in splits.items()}
    assert not ids["train"] & (ids["development"] | ids["test"])
    assert ids["sequential_train"] | ids["sequential_test"] == ids["train"] | multi_turn(both)
    row = both[0]
    assert (row["category"], row["turns"], row["calls"]) == (
        b"base",
        len(expected[0].turns),
        len(expected[0].calls),
    )
    assert {category for rows in splits.values() for category in (r["category"] for r in rows)} == {
        b"base",
        b"miss_func",
        b"miss_param",
        b"long_context",
        b"simple",
        *(name.encode() for name in bfcl.SINGLE_TURN if name != "simple_python"),
    }
