"""Logs that survive a kill byte for byte."""

import json

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from coevolve_jax import logs


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
    writer = logs.MetricsWriter(tmp_path)
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

    writer = logs.MetricsWriter(killed)
    run(writer, [1])
    sizes = json.loads(json.dumps(writer.sizes()))
    run(writer, range(2, 5))
    with open(killed / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 5, "rew')  # the kill cut a line in two
    (killed / "trajectories/step_00006.jsonl").write_text('{"half": ')

    writer = logs.MetricsWriter(killed, sizes)
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
