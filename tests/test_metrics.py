"""Logs that survive a kill byte for byte, progress that does not spam, a table that says what happened."""

import io
import json

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from coevolve_jax import metrics


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
    writer = metrics.MetricsWriter(tmp_path)
    value = 0.1 + 0.2
    writer.write_step(row(1, loss=value, kl=float("nan"), entropy=np.float32("inf"), note="é"))
    (first,) = read(tmp_path / "metrics.jsonl")  # readable before close: flushed line by line
    writer.close()
    assert first["loss"] == value and first["kl"] is None and first["entropy"] is None
    assert first["grad_norm"] == float(np.float32(0.1)) and first["note"] == "é"


def test_tensorboard_gets_flattened_numbers(tmp_path):
    writer = metrics.MetricsWriter(tmp_path)
    writer.write_step(row(3, kl=float("nan")))
    writer.close()
    found, purged = scalars(tmp_path / "tensorboard")
    by_tag = {tag: (step, value) for step, tag, value in found}
    assert by_tag["seconds/update"] == (3, 0.5) and by_tag["signals/boundary"] == (3, 2.0)
    assert not {"step", "kl", "evolution"} & by_tag.keys() and purged == []


def test_killed_and_resumed_gives_the_bytes_of_an_unbroken_run(tmp_path):
    def run(writer, steps):
        for step in steps:
            writer.append("trajectories/step_%05d.jsonl" % step, [{"step": step, "text": "<é>"}])
            writer.append("signals.jsonl", [{"kind": "rare", "step": step}] * (step % 3))
            writer.write_step(row(step))
            if step >= 2:
                writer.append("late.jsonl", [{"step": step}])

    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    writer = metrics.MetricsWriter(unbroken)
    run(writer, range(1, 7))
    writer.close()

    writer = metrics.MetricsWriter(killed)
    run(writer, [1])
    sizes = json.loads(json.dumps(writer.sizes()))
    run(writer, range(2, 5))
    with open(killed / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 5, "rew')  # the kill cut a line in two
    (killed / "trajectories/step_00006.jsonl").write_text('{"half": ')

    writer = metrics.MetricsWriter(killed, sizes)
    assert sorted(p.name for p in (killed / "trajectories").iterdir()) == ["step_00001.jsonl"]
    run(writer, range(2, 7))
    writer.close()
    names = sorted(str(p.relative_to(unbroken)) for p in unbroken.rglob("*.jsonl"))
    assert len(names) == 9
    for name in names:
        assert (unbroken / name).read_bytes() == (killed / name).read_bytes(), name
    assert scalars(killed / "tensorboard")[1] == [2]


def test_a_start_without_checkpoint_forgets_an_earlier_attempt(tmp_path):
    for _ in range(2):
        writer = metrics.MetricsWriter(tmp_path)
        writer.append("signals.jsonl", [{"kind": "rare"}])
        writer.write_step(row(1))
    assert len(read(tmp_path / "metrics.jsonl")) == len(read(tmp_path / "signals.jsonl")) == 1


def test_a_log_shorter_than_recorded_is_named_and_nothing_is_cut(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    (tmp_path / "signals.jsonl").write_text("{}\n")
    with pytest.raises(ValueError, match=r"signals\.jsonl holds 3 bytes where the checkpoint recorded 99"):
        metrics.truncate(tmp_path, {"metrics.jsonl": 12, "signals.jsonl": 99})
    assert len(read(tmp_path / "metrics.jsonl")) == 2


def test_a_repeated_step_is_refused(tmp_path):
    writer = metrics.MetricsWriter(tmp_path)
    writer.write_step(row(4))
    with pytest.raises(ValueError, match="already holds step 4"):
        writer.write_step(row(4))


def test_progress_in_a_log_file_is_a_few_lines():
    stream = io.StringIO()
    progress = metrics.Progress(100, stream=stream)
    for step in range(1, 101):
        progress.update(row(step, reward=None if step == 10 else 0.25))
    progress.note("saved")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 21 and lines[-1] == "saved"
    assert lines[1].startswith("step  10/100: reward none, success 50%")
    assert lines[-2] == "step 100/100: reward 0.25, success 50%, signals 3, |D| 140, 2.0 s/step"


def test_progress_on_a_terminal_is_a_bar_with_notes_above():
    stream = io.StringIO()
    stream.isatty = lambda: True
    progress = metrics.Progress(3, initial=1, stream=stream)
    progress.update(row(2))
    progress.note("evolved")
    progress.update(row(3))
    progress.close()
    text = stream.getvalue()
    assert "3/3" in text and "reward 0.25" in text and "|D| 43" in text and "evolved\n" in text


SUMMARY = {
    "held_out_success_before": 0.25,
    "held_out_success_after": 0.5,
    "held_out_tasks": 40,
    "held_out": {},
    "signals": {"forgetting": 10, "boundary": 25, "rare": 15},
    "steps": 60,
    "tasks": {"proposed": 90, "accepted": 50, "retained": 4, "refused": {"duplicate": 6, "does not run": 30}},
    "seconds": {"rollout": 300.0, "update": 60.0, "evolution": 40.0},
    "evolution_share": 0.1,
}


def test_summary_table_shows_every_block():
    lines = metrics.summary_table(SUMMARY, "runs/x").splitlines()
    text = "\n".join(lines)
    assert "before" in text and "25.0%" in text and "95% interval 14.2% to 40.2%" in text  # Wilson, 10 of 40
    assert "+25.0 points" in text and "no paired test" in text
    for expected in ("boundary", "50.0%", "refused: does not run", "5 min 00 s", "share of evolution"):
        assert expected in text
    assert text.index("does not run") < text.index("duplicate") and "runs/x/report.html" in text
    rollout, update = (next(line for line in lines if name in line) for name in ("rollout", "update"))
    assert rollout.index("75.0%") == update.index("15.0%")


def test_summary_table_shows_the_paired_test_and_its_absence():
    by_task = {f"t{i}": [1, 4] for i in range(12)}
    better = {f"t{i}": [2, 4] for i in range(12)}
    details = {"before": {"by_task": by_task}, "after": {"by_task": better}}
    assert "p < 0.001" in metrics.summary_table({**SUMMARY, "held_out": details})
    assert "not measured" in metrics.summary_table({**SUMMARY, "held_out_success_after": None})


def test_clock():
    shown = [metrics.clock(s) for s in (5.25, 59.96, 185, 7440)]
    assert shown == ["5.2 s", "1 min 00 s", "3 min 05 s", "2 h 04 min"]
