"""The real loop on two processes, shrunk: it equals one process, also after kills; both fail together."""

import functools
import json
import os
import signal
import sys
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from coevolve_jax import preemption
from coevolve_jax.loop import rendezvous
from coevolve_jax.loop.leader import Leader, multihost_utils
from coevolve_jax.models import hf_io
from tests.distributed.test_multiprocess import free_address
from tests.distributed.test_sharding import IN_ORDER
from tests.loop.test_train import command, rows
from tests.support import forked
from tests.support.checkpoints import latest_step
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

PROGRAM = ROOT / "tests" / "support" / "patient_main.py"
# XLA runs CPU collectives on a pool of threads, one per core by default. Waiting ones can take all.
THREADS = {"NPROC": "16"}
# The tests' own flags: programs that run once or twice are not optimised.
FLAGS = f"{os.environ.get('XLA_FLAGS', '')} {IN_ORDER}"
# Batches are scored, and sent once for two updates.
HERE = ConfigDict({"engine": {"name": "native", "dtype": "float32", "sharded": False}})
CONFIG = f"{ROOT}/configs/bfcl_tiny.py:strategy=static"
SMALL = {
    "steps": 2, "mesh.fsdp": 2, "learner.tis_cap": 2.0, "learner.epochs": 2,
    "data.initial_tasks": 4, "evaluation.tasks": 2,
}  # fmt: skip


def start(workdir, quick, changes=({}, {}), folders=(ROOT, ROOT), patience=60) -> list[forked.Start]:
    """Starts two processes of one run, each with its own config changes and working folder."""
    quick = {**quick, **THREADS}
    address, processes = free_address(), []
    flags = f"{FLAGS} --xla_force_host_platform_device_count=1"
    for index in range(2):
        options = command(workdir, config=CONFIG, **{**SMALL, **changes[index]})[1:]
        program = [PROGRAM, str(patience), f"--processes={address},2,{index}", *options]
        processes.append(forked.Start(program, {**quick, "XLA_FLAGS": flags}, folders[index]))
    return processes


def ends(processes) -> list[tuple[int, str]]:
    """Exit code and messages of each process; none stays alive."""
    try:
        messages = [process.communicate(timeout=600)[1] for process in processes]
        return [(process.returncode, text) for process, text in zip(processes, messages)]
    finally:
        for process in processes:
            process.kill()


def kill_when(process: forked.Start, ready, number=signal.SIGKILL) -> None:
    """Sends the signal as soon as ready() holds."""
    deadline = time.monotonic() + 600
    while not ready():
        assert process.poll() is None, f"it never came to that point: {process.communicate()[1][:3000]}"
        assert time.monotonic() < deadline, "it never came to that point"
        time.sleep(0.01)
    process.send_signal(number)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, quick):
    """The folder of the run of one process with two devices; the first call runs it."""

    @functools.cache
    def folder():
        workdir = tmp_path_factory.mktemp("runs") / "alone"
        flags = {**THREADS, "XLA_FLAGS": f"{FLAGS} --xla_force_host_platform_device_count=2"}
        done = forked.run(command(workdir, config=CONFIG, **SMALL), {**quick, **flags})
        assert done.returncode == 0, done.stderr[-3000:]
        return workdir

    return folder


NAMES = ("step", "success", "length", "tasks", "applied", "signals", "policy_tokens")


def progress(folder) -> list[dict]:
    return [{name: row[name] for name in NAMES} for row in rows(folder, "metrics.jsonl")]


def sums(folder) -> list[list[float]]:
    return [[row["loss"], row["grad_norm"]] for row in rows(folder, "metrics.jsonl")]


@pytest.mark.nightly
def test_killed_and_resumed_two_processes_do_what_one_does(tmp_path, quick, alone):
    workdir = tmp_path / "two"
    both = start(workdir, quick)
    kill_when(both[0], (workdir / "config.json").exists)
    assert [code != 0 for code, _ in ends(both)] == [True, True]

    both = start(workdir, quick, patience=12)
    kill_when(both[1], lambda: (workdir / "checkpoints/step_00000001/manifest.json").exists())
    alone = alone()  # while the leader waits for the dead process
    assert [code != 0 for code, _ in ends(both)] == [True, True]
    assert not (workdir / "summary.json").exists()

    both = ends(start(workdir, quick))
    assert [code for code, _ in both] == [0, 0], both

    # The sum of two processes' parts is the same in either order, so the trajectories are equal.
    for name in ("tasks.jsonl", "signals.jsonl", "held_out.jsonl"):
        assert (workdir / name).read_bytes() == (alone / name).read_bytes(), name
    assert progress(workdir) == progress(alone) and len(progress(alone)) == SMALL["steps"]
    np.testing.assert_allclose(sums(workdir), sums(alone), atol=1e-5)
    assert any(norm > 0 for _, norm in sums(alone))

    policies = [hf_io.load(folder / "policy")[1] for folder in (workdir, alone)]
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5)
    jax.tree.map(close, *policies)
    result = lambda folder: json.loads((folder / "summary.json").read_text())["held_out"]
    assert result(workdir) == result(alone)

    told = (workdir / "summary.json").read_bytes()
    both = ends(start(workdir, quick))  # a finished run is over for both
    assert [code for code, _ in both] == [0, 0], both
    assert (workdir / "summary.json").read_bytes() == told


@pytest.mark.nightly
def test_what_the_follower_is_asked_the_leader_does_and_both_generate_together(tmp_path, quick, alone):
    """Two processes that share one engine equal one process with rows on one device, until asked to end.

    The engine (rollout/native/lockstep.py) has a cache of pages. Each process generates its part of the
    conversations. tests/distributed/test_multiprocess.py covers split weights, exchanged over TCP for each
    token.
    """
    sharded = {"engine.sharded": True, "engine.cache_tokens": 4096, "mesh.fsdp": 1, "mesh.data": 2}
    changes = {**sharded, "checkpoint.every": 999, "steps": 999}
    done = lambda: len(rows(tmp_path, "metrics.jsonl")) if (tmp_path / "metrics.jsonl").exists() else 0
    both = start(tmp_path, quick, changes=(changes, changes))
    kill_when(both[1], lambda: done() >= SMALL["steps"], signal.SIGTERM)
    for code, message in ends(both):
        assert code == preemption.STATUS and "Traceback" not in message, message
        assert message.endswith("Asked to end: every finished step is saved, and the same command goes on.\n")
    assert latest_step(tmp_path / "checkpoints") == done()
    steps = slice(SMALL["steps"])
    assert progress(tmp_path)[steps] == progress(alone())
    np.testing.assert_allclose(sums(tmp_path)[steps], sums(alone()), atol=1e-5)


@pytest.mark.nightly
def test_a_server_gets_the_weights_of_two_processes(sglang_server, tmp_path, quick):
    served = {"engine.name": "sglang", "engine.url": sglang_server.url, "steps": 1, "checkpoint.every": 9}
    both = ends(start(tmp_path / "run", quick, changes=(served, served)))
    assert [code for code, _ in both] == [0, 0], both
    assert [row["valid"] for row in rows(tmp_path / "run", "metrics.jsonl")] == [1.0]
    config, pushed = hf_io.load(tmp_path / "run" / "weights" / "version-1")
    jax.tree.map(np.testing.assert_array_equal, pushed, hf_io.load(tmp_path / "run" / "policy")[1])


def test_processes_of_different_configs_are_all_refused(tmp_path, quick):
    both = ends(start(tmp_path / "run", quick, changes=({}, {"learner.learning_rate": 0.5})))
    for code, message in both:
        assert code == 1 and "Traceback" not in message
        assert "Process 1 was started with another config than process 0" in message
        assert '"learning_rate": 0.5, not "learning_rate": 0.0001' in message
    assert not (tmp_path / "run").exists()


def test_a_mesh_that_leaves_a_process_without_part_is_refused(tmp_path, quick):
    for code, message in ends(start(tmp_path / "run", quick, changes=[{"mesh.fsdp": 1}] * 2)):
        assert code == 1 and "Traceback" not in message and "have 2: choose sizes" in message
    assert not (tmp_path / "run").exists()


def test_what_ends_the_leader_ends_the_follower(tmp_path, quick):
    (tmp_path / "another.txt").write_text("")
    (leader, message), (follower, relayed) = ends(start(tmp_path, quick))
    assert leader == follower == 1 and "Traceback" not in message + relayed, message + relayed
    assert f"Error: {tmp_path} is not empty" in message
    assert f"Error: Process 0 has ended (ValueError: {tmp_path} is not empty" in relayed
    assert [p.name for p in tmp_path.iterdir()] == ["another.txt"]


def test_what_ends_the_follower_ends_the_leader(tmp_path, quick):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"  # the second is a host that lacks the model
    for folder in (here, elsewhere):
        folder.mkdir()
    (here / "mine").symlink_to(ROOT / "models" / "tiny_qwen3")
    changes = {"model": "mine"}
    run = start(tmp_path / "run", quick, (changes, changes), folders=(here, elsewhere))
    (leader, relayed), (follower, message) = ends(run)
    assert leader == follower == 1 and "Traceback" not in message + relayed, message + relayed
    assert "Error: mine is not a Hugging Face model folder" in message
    assert "Error: Process 1 has ended (ValueError: mine is not a" in relayed
    assert not (tmp_path / "run").exists()


def test_an_interrupt_that_python_drops_is_sent_again_without_a_word(monkeypatch, capfd):
    class Slow:
        def __del__(self):
            dropped.append(True)  # Python would drop an interrupt here, and print it
            time.sleep(600)

    dropped = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(rendezvous, "_agree", lambda config: None)
    monkeypatch.setattr(rendezvous, "_failure", lambda: "Process 1 has ended" if dropped else None)
    monkeypatch.setattr(rendezvous, "_INSIST_SECONDS", 1e9)
    hook = sys.unraisablehook
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's workers ignore it
    try:
        with pytest.raises(rendezvous.Failed, match="Process 1 has ended"), rendezvous.coordinated({}):
            slow = Slow()
            del slow
            time.sleep(600)
    finally:
        signal.signal(signal.SIGINT, handler)
    assert sys.unraisablehook is hook and not capfd.readouterr().err


def test_a_state_or_scores_that_the_others_do_not_hold_are_refused(monkeypatch):
    published = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(rendezvous, "meet", lambda: None)
    monkeypatch.setattr(rendezvous, "publish", published.append)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", lambda batch: batch)
    learner = SimpleNamespace(
        routing=(0, 0),
        scores=True,
        keeps_reference=True,
        flops=lambda batch, updates: 0.0,
        init=lambda params: object(),
        score=lambda state, batch: object(),
        update=lambda state, batch, old_logprobs: (object(), {}),
        aim=lambda state, batch: 1.0,
        influence=lambda state, batch, preconditioned: 0.5,
    )
    policy = SimpleNamespace(params={"a": 1})
    leader = Leader(learner, policy, HERE)
    with pytest.raises(ValueError, match="given another `params` than the last one"):
        leader.init({"a": 1})
    first, batch = leader.init(policy.params), (np.zeros(2, np.float32),)
    scores = leader.score(first, batch)
    second, _ = leader.update(first, batch, scores)
    third, _ = leader.update(state=second, batch=batch, old_logprobs=None)
    for state, old_logprobs, name in ((second, scores, "state"), (third, object(), "old_logprobs")):
        with pytest.raises(ValueError, match=f"Leader.update was given another `{name}`"):
            leader.update(state, batch, old_logprobs)
    leader.update(third, (np.ones(3, np.int32),), scores)
    with pytest.raises(ValueError, match="Leader.update_branch was given another `branch`"):
        leader.update_branch(third, batch)
    assert published == [
        ["init", {}, ["params"], {}],
        ["score", {}, ["state", "batch"], {"batch": [["float32", (2,)]]}],
        ["update", {}, ["state", "batch", "old_logprobs"], {}],
        ["update", {"old_logprobs": None}, ["state", "batch"], {}],
        ["update", {}, ["state", "batch", "old_logprobs"], {"batch": [["int32", (3,)]]}],
    ]
