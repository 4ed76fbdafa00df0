"""The checks of a device, small and interpreted on a CPU; and what the page says where one fails."""

import json
import subprocess
import sys

import numpy as np
import pytest

from coevolve_jax.testing import device
from experiments import smoke_device
from tests.support.paths import ROOT


@pytest.mark.slow
@pytest.mark.nightly
def test_the_program_checks_kernels_engine_and_training_and_writes_a_page(tmp_path, quick):
    command = [sys.executable, "experiments/smoke_device.py", f"--output={tmp_path / 'out'}"]
    done = subprocess.run(command, cwd=ROOT, env=quick, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = json.loads((tmp_path / "out" / "smoke.json").read_text())["checks"]
    left_out = {row["name"] for row in rows if row["state"] == "left out"}
    assert left_out <= {"SGLang", "GRPO of SmolLM2-135M"} and {row["state"] for row in rows} <= {
        "passed",
        "left out",
    }
    figures = {row["name"]: row["figures"] for row in rows}
    assert figures["devices"]["platform"] == "cpu" and figures["memory bandwidth"]["gb_per_second"] > 0
    assert figures["engine against the CPU"]["same"] == figures["engine against the CPU"]["tokens"] > 0
    pages = figures["engine in pages against the CPU"]
    assert pages["same"] == pages["tokens"] > 0
    for name in ("GRPO of the tiny policy", "GRPO with LoRA"):
        assert figures[name]["steps"] == device.SMALL.steps
    told = (tmp_path / "out" / "smoke.md").read_text()
    assert all(f"| {name} | " in told for name in figures) and told.endswith("Nothing failed.\n")
    again = subprocess.run(command, cwd=ROOT, env=quick, capture_output=True, text=True)
    assert again.returncode == 1 and "is not empty: choose another" in again.stderr


def test_a_kernel_that_is_wrong_is_found(monkeypatch):
    wrong = lambda q, k, v, segments, *parents, interpret: 1.1 * device.plain(q, k, v, segments, *parents)
    monkeypatch.setitem(device.IMPLEMENTATIONS, "flash", wrong)
    tiny = device.SMALL._replace(length=32)
    with pytest.raises(ValueError, match="attention by flash differs from plain code by 0.1"):
        device.attention("flash", tiny, shared=True)
    with pytest.raises(ValueError, match="differs from plain code by nan"):
        device.close("it", float("nan"))
    assert device.far(np.array([1.0, 3.0]), np.array([1.0, 2.0])) == 0.5


def test_each_failure_is_a_row_and_the_page_says_what_to_send(tmp_path):
    def broken():
        raise RuntimeError("no\nkernel | at all")

    def absent():
        raise device.LeftOut("It is not here.")

    checks = {"one": broken, "two": absent, "three": lambda: {"rate": 1.23456}}
    rows = [smoke_device.row_of(name, check) for name, check in checks.items()]
    assert [row["state"] for row in rows] == ["failed", "left out", "passed"]
    lines = smoke_device.page(rows, "2026-01-01", tmp_path).splitlines()
    assert lines[4:7] == [
        "| one | failed | RuntimeError: no kernel \\| at all |",
        "| two | left out | It is not here. |",
        "| three | passed | rate 1.235 |",
    ]
    assert lines[-1] == f"Failed: one. Send smoke.json, this page and the *.log files of {tmp_path}."
    early = smoke_device.page(rows, "2026-01-01", tmp_path, ["four", "five"]).splitlines()
    assert early[-1] == f"It ended in the check 'four', 2 before the end. {lines[-1]}"
    hung = smoke_device.page(rows[1:], "2026-01-01", tmp_path, ["four"]).splitlines()
    assert hung[-1].startswith("It ended in the check 'four', 1 before the end. Send smoke.json")
    fine = smoke_device.page(rows[1:], "2026-01-01", tmp_path, none="There is none.").splitlines()
    assert fine[-1] == "There is none. Nothing failed."


def test_a_program_that_fails_is_told_with_its_last_line(tmp_path):
    program = [sys.executable, "-c", "print('first', flush=True); raise SystemExit('the reason')"]
    with pytest.raises(ValueError, match=r"ended with status 1 \(the reason\): see .*x.log"):
        device.run_program(program, tmp_path / "x.log", {})
