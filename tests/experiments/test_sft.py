"""experiments/sft.py as a user starts it: a whole warm start, killed and asked to end, and its refusals."""

import json
import signal
import subprocess
import sys
import time

import pytest

from coevolve_jax import preemption
from coevolve_jax.analysis import report
from tests.support import forked
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

# Updates have the settings of tests/loop/test_warm_start.py, whose programs serve here too.
SMALL = {
    "warm_start.steps": 4, "warm_start.tasks": 12, "warm_start.batch": 4, "warm_start.learning_rate": 3e-4,
    "warm_start.held_out": 0.25, "warm_start.eval_every": 2, "warm_start.checkpoint_every": 1,
    "warm_start.eval_tasks": 2, "evaluation.tasks": 4, "environment.workers": 1, "engine.max_concurrency": 8,
    "learner.rows_per_microbatch": 2,
}  # fmt: skip


def command(workdir, **changes):
    options = [f"--config.{k}={v}" for k, v in {**SMALL, **changes}.items()]
    return ["experiments/sft.py", "--config=configs/bfcl_tiny.py", f"--workdir={workdir}", *options]


def told(folder):
    rows = [json.loads(line) for line in (folder / "sft.jsonl").read_text().splitlines()]
    weights = (folder / "policy" / "model.safetensors").read_bytes()
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows], weights


@pytest.fixture(scope="module")
def whole(tmp_path_factory, quick):
    workdir = tmp_path_factory.mktemp("sft") / "whole"
    program = [sys.executable, *command(workdir)]
    done = subprocess.run(program, cwd=ROOT, env=quick, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("warm start: 9 demonstrations, 4 steps, held-out loss 0.0")
    assert " -> " in done.stdout and "success" in done.stdout
    assert "loss of its own, not config.learner.learning_rate." in done.stderr
    assert "12 of 12 tasks give a demonstration; 3 of them are held out." in done.stderr
    return workdir


def test_it_leaves_a_policy_and_its_records(whole):
    there = {path.name for path in whole.iterdir()}
    made = {"config.json", "lock", "made.json", "tasks.jsonl", "held_out.jsonl", "sft.jsonl"}
    made |= {"summary.json", "policy"}
    assert there == made
    policy = {path.name for path in (whole / "policy").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= policy
    with pytest.raises(
        ValueError, match=f"{whole} holds a warm start, .* read its sft.jsonl and summary.json"
    ):
        report.write_report(whole)
    assert there == {path.name for path in whole.iterdir()}


@pytest.mark.nightly
def test_stopped_the_same_command_goes_on_to_the_same_bits(whole, tmp_path, quick):
    """A kill comes after the first update, a request to end after the next one."""
    folder = tmp_path / "sft"
    rows, again = folder / "sft.jsonl", ["experiments/sft.py", f"--workdir={folder}"]
    for program, step, number in ((command(folder), 1, signal.SIGKILL), (again, 2, signal.SIGTERM)):
        process, deadline = forked.Start(program, quick), time.monotonic() + 300
        while process.poll() is None and not (rows.exists() and f'"step": {step}' in rows.read_text()):
            assert time.monotonic() < deadline, f"no update {step}"
            time.sleep(0.002)
        process.send_signal(number)
        status, (_, err) = process.wait(300), process.communicate()
        if number == signal.SIGTERM:
            assert status == preemption.STATUS and "the same command goes on" in err
        assert not (folder / "policy").exists()
    done = forked.run(again, quick)
    assert done.returncode == 0, done.stderr[-3000:]
    assert told(folder) == told(whole)


def test_what_is_finished_is_not_done_again_and_belongs_to_its_config(whole, quick):
    before = told(whole)
    done = forked.run(command(whole), quick)
    assert done.returncode == 0 and done.stdout.startswith("warm start: 9 demonstrations")
    other = forked.run(command(whole, **{"warm_start.steps": 7}), quick)
    assert other.returncode == 1 and "holds a run of another config (config.warm_start.steps" in other.stderr
    assert told(whole) == before


def test_a_refusal_is_one_line(tmp_path, quick):
    for changes, why in (
        ({"warm_start.steps": 0}, "Error: config.warm_start.steps is 0: give the number of updates"),
        ({"warm_start.source": "nowhere"}, "Error: config.warm_start.source is 'nowhere'"),
        ({"warm_start.batch": 0}, "Error: config.warm_start.batch is 0: it must be at least 1"),
        ({"environment.name": "nowhere"}, "Error: config.environment.name is 'nowhere'"),
    ):
        done = forked.run(command(tmp_path / "sft", **changes), quick)
        assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(why), done.stderr[-2000:]
        assert "Traceback" not in done.stderr
