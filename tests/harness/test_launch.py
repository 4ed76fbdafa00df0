"""Runs of a store as processes, with a program in the place of experiments/main.py that trains nothing."""

import os
import subprocess
import sys
import time

import pytest

from coevolve_jax.comparison import cells
from coevolve_jax.harness import launch, start, store
from coevolve_jax.harness.claim import PROTOCOLS
from coevolve_jax.harness.store import Job, Question, Store, cores_of_a_run
from coevolve_jax.testing.campaign import MADE_UP
from tests.harness.support import config

# Keeps the workdir as a run does, notes how it was called, and writes what a run writes at its end.
MAIN = """
import fcntl, os, pathlib, sys, time
flags = dict(text.split("=", 1) for text in sys.argv[1:])
run = pathlib.Path(flags["--workdir"])
lock = open(run / "lock", "a")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit("Error: Another process goes on with the run")
with open(run / "calls", "a") as file:
    print(flags.get("--until", "end"), file=file)
time.sleep(float(os.environ.get("TAKES", "0")))
saved = run / "checkpoints" / f"step_{int(flags.get('--until', 8)):08d}"
saved.mkdir(parents=True, exist_ok=True)
(saved / "manifest.json").write_text("{}")
if "--until" not in flags:
    (run / "summary.json").write_text("{}")
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """(launch, a job whose workdir was forked)"""
    (tmp_path / "main.py").write_text(MAIN)
    monkeypatch.setattr(cells, "MAIN", tmp_path / "main.py")
    monkeypatch.setattr("coevolve_jax.comparison.side_by_side.PAUSE", 0.02)
    c = start.without_harness(config("none"))
    run = tmp_path / "store" / "digest" / "seed_0"
    run.mkdir(parents=True)
    return launch.programs(c, tmp_path / "compiled").launch, Job(run, c, tmp_path / "start")


def calls(job):
    return (job.workdir / "calls").read_text().split()


def test_first_steps_end_with_a_checkpoint_and_the_run_goes_on(made):
    launched, job = made
    assert launched([job._replace(until=3)], 1) == {} and calls(job) == ["3"]
    assert launched([job], 1) == {} and calls(job) == ["3", "end"]


def test_a_start_exists_by_its_checkpoint_of_step_0_alone_as_in_a_comparison(tmp_path):
    for step in (8, 0):
        folder = tmp_path / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        assert not store.begun(tmp_path)
        (folder / "manifest.json").write_text("{}")
        assert store.begun(tmp_path) == cells.begun(tmp_path) == (step == 0)


def test_a_run_that_another_process_makes_is_waited_for_and_taken(made, monkeypatch):
    launched, job = made
    monkeypatch.setenv("TAKES", "0.5")
    theirs = subprocess.Popen([sys.executable, str(cells.MAIN), f"--workdir={job.workdir}"])
    while not (job.workdir / "calls").exists():
        pass
    assert launched([job], 1) == {} and calls(job) == ["end"]
    assert theirs.wait() == 0


def test_a_run_whose_process_died_under_another_campaign_is_made(made, monkeypatch):
    launched, job = made
    monkeypatch.setenv("TAKES", "60")
    theirs = subprocess.Popen([sys.executable, str(cells.MAIN), f"--workdir={job.workdir}"])
    while not (job.workdir / "calls").exists() or not calls(job):  # the file is there before its line
        pass
    theirs.kill()
    theirs.wait()
    monkeypatch.setenv("TAKES", "0")
    assert launched([job], 1) == {} and calls(job) == ["end", "end"]


@pytest.mark.slow
def test_two_campaigns_that_begin_a_run_at_once_make_it_once(made, monkeypatch):
    launched, job = made
    monkeypatch.setenv("TAKES", "2")
    program = "import sys; from tests.harness.test_launch import both; both(*sys.argv[1:])"
    ours = [str(cells.MAIN), str(job.workdir)]
    pair = [subprocess.Popen([sys.executable, "-c", program, *ours]) for _ in range(2)]
    assert [process.wait() for process in pair] == [0, 0] and calls(job) == ["end"]


def both(main: str, workdir: str) -> None:
    """Launches a run, in a process of its own, when another process is as far."""
    from pathlib import Path

    cells.MAIN = Path(main)
    c = start.without_harness(config("none"))
    job = Job(Path(workdir), c, Path(workdir))
    ready = Path(main).with_name("ready")
    ready.mkdir(exist_ok=True)
    (ready / f"{os.getpid()}").touch()
    while len(list(ready.iterdir())) < 2:
        time.sleep(0.01)
    sys.exit(bool(launch.programs(c, Path(workdir)).launch([job], 1)))


def test_an_evaluation_is_told_its_policy_its_tasks_and_its_whole_protocol(tmp_path, monkeypatch):
    works = []
    monkeypatch.setattr(launch, "run_side_by_side", lambda given, *more: works.extend(given) or [])
    run, model = tmp_path / "run", tmp_path / "policy"
    c = start.without_harness(config("none"))
    asked = [Question(run, model, p.given(c), tmp_path / f"{name}.json") for name, p in PROTOCOLS.items()]
    assert launch.programs(c, tmp_path).evaluate(asked, 1) == {}
    where = {"--benchmark=held_out", f"--workdir={run}", f"--model={model}"}
    for protocol, work in zip(PROTOCOLS.values(), works, strict=True):
        assert where | {*protocol.given(c), "--dtype=float32"} <= {*work.command}


def test_a_campaign_finds_its_runs_on_a_machine_with_other_cores(tmp_path, monkeypatch):
    c = start.without_harness(config("none"))
    here = Store(tmp_path, c, MADE_UP, jobs=2)
    began = cores_of_a_run(2)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)))
    there = Store(tmp_path, c, MADE_UP, jobs=2, cores=began)
    assert there.workdir(c, 3) == here.workdir(c, 3) and there.start(3) == here.start(3)
    assert Store(tmp_path, c, MADE_UP, jobs=2).workdir(c, 3) != here.workdir(c, 3)  # its bits would differ
