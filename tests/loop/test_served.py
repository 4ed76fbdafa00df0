"""The real loop, shrunk, on a real SGLang server; and one step ahead of the update."""

import json
import time

import numpy as np
import pytest

from coevolve_jax.loop import collect
from coevolve_jax.types import Group, Outcome, Task, Trajectory
from tests.loop.test_train import command, rows
from tests.support import forked
from tests.support.checkpoints import latest_step
from tests.support.faults import Proxy
from tests.support.paths import ROOT

pytestmark = pytest.mark.server

SERVED = "configs/bfcl_tiny.py:engine=sglang"


def check_metrics(workdir, ages):
    metrics = rows(workdir, "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(len(ages)))
    for m, age in zip(metrics, ages):
        assert m["valid"] == 1.0 and m["staleness_max"] <= age
        for use in m["utilization"].values():  # earlier steps may have used all that ran ahead
            assert 0 <= use <= 1 and (use or age)
        assert m["throughput"]["rollout_tokens"] > 0 and 0 < m["seconds"]["push"] < m["seconds"]["step"]
        if m["policy_tokens"] > 1 and age == 0:  # the same policy: only rounding may differ
            assert m["mismatch_max"] < 1e-3
    return metrics


def test_the_loop_runs_on_a_server_and_what_changed_are_its_weights(sglang_server, quick, tmp_path):
    done = forked.run(command(tmp_path / "run", SERVED, steps=3, **{"engine.url": sglang_server.url}), quick)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = check_metrics(tmp_path / "run", [0, 0, 0])
    assert all(m["utilization"]["cached"] for m in metrics)
    for m in metrics:
        assert m["serving"]["prefill_tokens"] > 0 and m["serving"]["decode_tokens"] > 0
        assert 0 < m["serving"]["queue_seconds"] < m["seconds"]["rollout"]
    written = sorted(p.name for p in (tmp_path / "run" / "weights").iterdir())
    assert written == ["owner", "version-2", "version-3"]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["held_out"]["after"]["invalid"] == 0
    (folder,) = ROOT.glob(".sglang/lib/python3*/site-packages/sglang-*.dist-info")
    assert summary["versions"]["sglang"] == folder.name.removeprefix("sglang-").removesuffix(".dist-info")
    for name in ("prefill_tokens", "decode_tokens"):
        assert summary["serving"][name] == sum(m["serving"][name] for m in metrics)


@pytest.mark.nightly
def test_a_run_that_loses_its_server_keeps_every_step_and_goes_on_with_another(
    sglang_server,
    quick,
    tmp_path,
):
    workdir = tmp_path / "run"
    with Proxy(sglang_server.url) as proxy:
        settings = {"steps": 3, "checkpoint.every": 100, "engine.url": proxy.url, "engine.patience": 2.0}
        process = forked.Start(command(workdir, SERVED, **settings), quick)
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and process.poll() is None:
            if (workdir / "metrics.jsonl").exists() and rows(workdir, "metrics.jsonl"):
                break
            time.sleep(0.02)
        proxy.always = "reset"
        error = process.communicate(timeout=120)[1]
    assert process.returncode == 1 and "Traceback" not in error
    assert "Error: No SGLang server has answered for 2 s" in error.strip().splitlines()[-1]
    kept = len(rows(workdir, "metrics.jsonl"))
    assert 1 <= kept < 3 and latest_step(workdir / "checkpoints") == kept
    done = forked.run(command(workdir, SERVED, **settings | {"engine.url": sglang_server.url}), quick)
    assert done.returncode == 0, done.stderr[-3000:]
    check_metrics(workdir, [0, 0, 0])


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["native", "sglang"])
def test_one_step_ahead_the_tokens_are_one_update_old(engine, sglang_server, quick, tmp_path):
    ahead = {
        "rollout.max_staleness": 1,
        "evolution.freeze_last_steps": 2,
        "learner.tis_cap": 2.0,
        "steps": 4,
        "learner.skip_zero_variance_groups": False,
    }
    ahead |= {"engine.name": engine, "engine.url": sglang_server.url}
    done = forked.run(command(tmp_path / "run", **ahead), quick)
    assert done.returncode == 0, done.stderr[-3000:]
    metrics = check_metrics(tmp_path / "run", [0, 1, 1, 1])
    assert max(m["staleness_max"] for m in metrics) == 1
    # Fresh tokens have ratio 1; stale ones compare with the policy before the last update.
    assert [m["ratio_max"] == 1 for m in metrics] == [True, False, False, False]
    assert all(0 <= m["tis_capped"] < 1 and 0.5 < m["tis_weight_mean"] < 2 for m in metrics)
    paused = [m["serving"].get("paused_seconds", 0) for m in metrics]
    assert any(paused) == (engine == "sglang")


def test_trajectories_beyond_the_bound_are_left_out():
    def aged(*versions):
        n = len(versions)
        return Trajectory(
            "t",
            0,
            np.zeros(n, np.int32),
            np.asarray(versions) >= 0,
            np.zeros(n, np.float32),
            np.asarray(versions, np.int32),
            (0,),
            (),
            "done",
            Outcome(1.0, True),
        )

    given = [aged(-1, 7, 7), aged(-1, 6, 7), aged(-1, 5, 7), aged(-1)]
    kept = collect.leave_out_stale(given, 7, 1)
    assert [t.outcome.valid for t in kept] == [True, True, False, True]
    assert [t.outcome.valid for t in collect.leave_out_stale(given, 7, 0)] == [True, False, False, True]
    told = collect.describe([Group(Task("t", "bfcl", {}), kept)], 7)
    assert told["staleness_mean"] == pytest.approx(1 / 4) and told["staleness_max"] == 1
