"""Logs that survive a kill byte for byte, and trackers that see each step's numbers."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from coevolve_jax import build
from coevolve_jax.config import check, digest, load_file, override
from coevolve_jax.records import logs
from coevolve_jax.records.trackers import tensorboard
from tests.support.paths import ROOT

CONFIG = load_file(ROOT / "configs" / "bfcl_tiny.py")


def row(step, **changes):
    base = {
        "step": step,
        "reward": 0.25,
        "success": 0.5,
        "tasks": 40 + step,
        "grad_norm": np.float32(0.1),
        "signals": {"forgetting": 1, "boundary": 2, "rare": 0},
        "evolution": None,
        "held_out": None,
        "seconds": {"step": 2.0, "update": 0.5},
    }
    return {**base, **changes}


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def scalars(folder):
    """(step, tag, value) of the event files, and the purge steps, from TFRecords (u64, u32, data, u32)."""
    found, purged = [], []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            purged += [event.step] if event.HasField("session_log") else []
    return found, purged


def test_rows_survive_as_exact_numbers_and_nan_as_null(tmp_path):
    writer = logs.MetricsWriter(tmp_path)
    value = 0.1 + 0.2
    writer.write_step(row(1, loss=value, kl=float("nan"), entropy=np.float32("inf"), note="é"))
    (first,) = read(tmp_path / "metrics.jsonl")  # readable before close: flushed line by line
    writer.close()
    assert first["loss"] == value and first["kl"] is None and first["entropy"] is None
    assert first["grad_norm"] == float(np.float32(0.1)) and first["note"] == "é"


def test_tensorboard_gets_flattened_numbers(tmp_path):
    writer = logs.MetricsWriter(tmp_path, None, [tensorboard.make(CONFIG, tmp_path)])
    writer.write_step(row(3, kl=float("nan")))
    writer.close()
    found, purged = scalars(tmp_path / "tensorboard")
    by_tag = {tag: (step, value) for step, tag, value in found}
    assert by_tag["seconds/update"] == (3, 0.5) and by_tag["signals/boundary"] == (3, 2.0)
    assert not {"step", "kl", "evolution"} & by_tag.keys() and purged == []


def test_killed_and_resumed_gives_the_bytes_of_an_unbroken_run(tmp_path):
    def run(writer, steps):
        for step in steps:
            writer.append(f"trajectories/step_{step:05d}.jsonl", [{"step": step, "text": "<é>"}])
            writer.append("signals.jsonl", [{"kind": "rare", "step": step}] * (step % 3))
            writer.write_step(row(step))
            if step >= 2:
                writer.append("late.jsonl", [{"step": step}])

    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    writer = logs.MetricsWriter(unbroken)
    run(writer, range(1, 7))
    writer.close()

    tracked = lambda: [tensorboard.make(CONFIG, killed)]
    writer = logs.MetricsWriter(killed, None, tracked())
    run(writer, [1])
    sizes = json.loads(json.dumps(writer.sizes()))
    run(writer, range(2, 5))
    with open(killed / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 5, "rew')  # the kill cut a line in two
    (killed / "trajectories/step_00006.jsonl").write_text('{"half": ')

    writer = logs.MetricsWriter(killed, sizes, tracked())
    assert sorted(p.name for p in (killed / "trajectories").iterdir()) == ["step_00001.jsonl"]
    run(writer, range(2, 7))
    writer.close()
    names = sorted(str(p.relative_to(unbroken)) for p in unbroken.rglob("*.jsonl"))
    assert len(names) == 10
    for name in names:
        assert (unbroken / name).read_bytes() == (killed / name).read_bytes(), name
    assert scalars(killed / "tensorboard")[1] == [2]


def test_a_start_without_checkpoint_forgets_an_earlier_attempt(tmp_path):
    for _ in range(2):
        writer = logs.MetricsWriter(tmp_path)
        writer.append("signals.jsonl", [{"kind": "rare"}])
        writer.write_step(row(1))
    assert len(read(tmp_path / "metrics.jsonl")) == len(read(tmp_path / "signals.jsonl")) == 1


def test_what_a_model_was_asked_after_the_checkpoint_is_not_this_runs(tmp_path):
    """A fork from a checkpoint before the first question has copies of the files of the run that it left."""
    told = {name: [{"step": 9, "money": 1.0}] for name in (logs.COSTS, logs.LLM_CALLS)}
    for listed in ((), (logs.COSTS, logs.LLM_CALLS)):
        writer = logs.MetricsWriter(tmp_path)
        for name, rows in told.items():
            writer.append(name, rows)
        sizes = {k: v for k, v in writer.sizes().items() if k not in told or k in listed}
        logs.MetricsWriter(tmp_path, sizes)
        assert [(tmp_path / name).exists() for name in told] == [bool(listed)] * 2


def test_a_log_shorter_than_recorded_is_named_and_nothing_is_cut(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    (tmp_path / "signals.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"signals\.jsonl holds 3 bytes where the checkpoint recorded 99"):
        logs.truncate(tmp_path, {"metrics.jsonl": 12, "signals.jsonl": 99})
    assert len(read(tmp_path / "metrics.jsonl")) == 2


def test_a_repeated_step_is_refused(tmp_path):
    writer = logs.MetricsWriter(tmp_path)
    writer.write_step(row(4))
    with pytest.raises(ValueError, match="already holds step 4"):
        writer.write_step(row(4))


def test_what_is_no_unicode_is_kept_as_it_was_written(tmp_path):
    writer = logs.MetricsWriter(tmp_path)
    writer.append("signals.jsonl", [{"call": "half a pair: \ud800, größer"}])
    assert read(tmp_path / "signals.jsonl") == [{"call": "half a pair: \ud800, größer"}]


def wandb_records(path):
    """Reads a W&B run's own file: a LevelDB log in blocks of 32 KiB, after 7 bytes of its own."""
    from wandb.proto import wandb_internal_pb2

    data, place, parts, found = path.read_bytes(), 7, b"", []
    while place < len(data):
        if 2**15 - place % 2**15 < 7:  # the rest of a block holds no header
            place += 2**15 - place % 2**15
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


@pytest.mark.slow
def test_wandb_gets_the_same_numbers_as_one_run_also_after_a_kill(tmp_path, monkeypatch):
    for name, value in {"MODE": "offline", "PROJECT": "ours"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    config = override(CONFIG, {"logging.trackers": "wandb,tensorboard"})
    assert digest(config) == digest(CONFIG)
    for steps, sizes in (((0, 1), None), ((1, 2), {})):
        writer = logs.MetricsWriter(tmp_path, sizes, build.trackers(config, tmp_path))
        for step in steps:
            writer.write_step(row(step, kl=float("nan")))
        writer.close()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    records = [record for path in files for record in wandb_records(path)]
    runs = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert {(r.run_id, r.project, r.display_name) for r in runs} == {
        ((tmp_path / "wandb" / "run_id").read_text(), "ours", tmp_path.name)
    }
    told = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in r.history.item}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    assert [values["_step"] for values in told] == [0, 1, 1, 2]
    assert told[0]["seconds/update"] == 0.5 and told[3]["signals/boundary"] == 2.0 and "kl" not in told[0]
    assert (2, "seconds/update", 0.5) in scalars(tmp_path / "tensorboard")[0]  # both trackers get it


@pytest.mark.nightly
@pytest.mark.slow
def test_trackio_gets_the_same_numbers_as_one_run_also_after_a_kill(tmp_path):
    """In a process of its own: Trackio takes its folder from the environment when it is imported."""
    program = f"""
import pathlib, sys
sys.path.insert(0, {str(ROOT)!r})
from coevolve_jax import build
from coevolve_jax.records import logs
from tests.records.test_logs import CONFIG, override, row
config, workdir = override(CONFIG, {{"logging.trackers": "trackio"}}), pathlib.Path("run")
for steps, sizes in (((0, 1), None), ((1, 2), {{}})):
    writer = logs.MetricsWriter(workdir, sizes, build.trackers(config, workdir))
    for step in steps:
        writer.write_step(row(step, kl=float("nan")))
    writer.close()
"""
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "db"), "TRACKIO_PROJECT": "ours"}

    def out(*command):
        done = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    out("-c", program)
    asked = lambda *what: json.loads(out("-m", "trackio.cli", *what, "--project=ours", "--json"))
    (name,) = asked("list", "runs")["runs"]
    assert name == (tmp_path / "run" / "trackio" / "run_id").read_text() and name.startswith("run-")
    values = asked("get", "metric", "--run", name, "--metric=seconds/update")["values"]
    assert [(v["step"], v["value"]) for v in values] == [(0, 0.5), (1, 0.5), (1, 0.5), (2, 0.5)]
    names = asked("list", "metrics", "--run", name)["metrics"]
    assert "signals/boundary" in names and "kl" not in names


@pytest.mark.parametrize(
    "name, why",
    [
        ("wandb", r"'wandb', which imports wandb, and .*pip install 'coevolve_jax\[wandb\]'"),
        ("trackio", r"'trackio', which imports trackio, and .*pip install 'coevolve_jax\[trackio\]'"),
        ("comet", "must be one of tensorboard, trackio, wandb, or the dotted path"),
        ("json", "must be one of tensorboard, trackio, wandb"),
        ("json.tool", "must define the function make"),
    ],
)
def test_a_tracker_that_cannot_be_had_is_one_sentence(monkeypatch, name, why):
    for absent in ("wandb", "trackio"):  # as if they were not installed
        monkeypatch.setitem(sys.modules, absent, None)
        monkeypatch.delitem(sys.modules, f"coevolve_jax.records.trackers.{absent}", raising=False)
    with pytest.raises(ValueError, match=why):
        check(override(CONFIG, {"logging.trackers": name}))


@pytest.mark.slow
def test_wandb_that_nobody_is_logged_in_to_is_one_sentence(tmp_path, monkeypatch):
    from coevolve_jax.records.trackers import wandb as ours

    def refused(**settings):
        raise ours.wandb.errors.UsageError("api_key not configured (no-tty).\nCall wandb.login")

    monkeypatch.setattr(ours.wandb, "init", refused)
    with pytest.raises(ValueError, match=r"\(api_key .* Call wandb.login\): log in with `wandb login`"):
        ours.make(CONFIG, tmp_path)
