"""The wheel: what it holds, and a run of it from outside the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support import wheels
from tests.support.paths import ROOT
from tests.support.wheels import MODELS, SOURCES, pip

pytestmark = pytest.mark.slow

SMALL = {
    "data.initial_tasks": 4, "rollout.tasks_per_step": 2, "rollout.group_size": 2,
    "evaluation.tasks": 4, "environment.workers": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return wheels.build(tmp_path_factory.mktemp("wheel"))


def test_it_is_small_and_has_every_file_of_the_package_and_of_the_folders_beside_it(wheel):
    assert wheel.stat().st_size <= 10e6
    inside = set(zipfile.ZipFile(wheel).namelist())
    tracked = subprocess.run(
        ["git", "ls-files", *SOURCES], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in tracked:
        beside = not name.startswith("coevolve_jax/")
        if "pretraining" in name or "notebooks" in name or name.endswith("patch_sglang_cpu.py") and beside:
            continue  # for those who make the policies, or work in a checkout
        if name.startswith("docs/") and not name.endswith(".md"):
            continue  # pictures and raw numbers
        assert f"{'coevolve_jax/checkout/' * beside}{name}" in inside, name


def test_it_trains_and_reports_outside_the_checkout(wheel, tmp_path, quick):
    installed = tmp_path / "installed"
    pip("install", "--no-deps", "--target", installed, wheel)
    env = {**quick, "PYTHONPATH": os.pathsep.join((str(installed), quick["PYTHONPATH"]))}
    run = lambda *command: subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    where = run(sys.executable, "-c", "import coevolve_jax; print(coevolve_jax.__file__)")
    assert where.stdout.strip() == str(installed / "coevolve_jax" / "__init__.py")
    small = [f"--config.{key}={value}" for key, value in SMALL.items()]
    done = run(installed / "bin" / "coevolve", "demo", "--steps=2", "--workdir=out", *small)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000
    assert (tmp_path / "out" / "policy" / "model.safetensors").exists()
    told = run(installed / "bin" / "coevolve", "plan", "--config=bfcl_qwen3_4b", "--topology=h100-8")
    assert told.returncode == 0 and "h100-8" in told.stdout
    every = "import coevolve_jax.config as c, coevolve_jax.shipped as s, glob, os\n"
    every += "for f in glob.glob(os.path.join(s.ROOT, 'configs', '*.py')): print(c.load_file(f, '').model)"
    told = run(sys.executable, "-c", every)
    assert told.returncode == 0, told.stderr[-2000:]
    ours = {name for name in told.stdout.split() if (ROOT / name).is_dir() and name.startswith("models/tiny")}
    assert ours <= set(MODELS) and "models/tiny_qwen3_textworld" in ours
