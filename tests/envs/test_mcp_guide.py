"""The guide on MCP servers, followed with a server of the tests: its commands, its coevolve.json."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from coevolve_jax.envs.mcp import templates
from tests.envs.test_env_folder_tools import ASKED, BOOK, FIND, FLIGHTS, environment
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "guides" / "train_on_an_mcp_server.md").read_text()
SMALL = (
    "--config.steps=1 --config.warm_start.steps=0 --config.model=models/tiny_qwen3 "
    "--config.data.initial_tasks=4 "
    "--config.rollout.tasks_per_step=2 --config.rollout.group_size=2 --config.rollout.max_length=1536 "
    "--config.evaluation.tasks=2 --config.evaluation.num_rollouts=1 --config.learner.matmul_dtype= "
    "--config.engine.matmul_dtype= --config.environment.tools=restock,count,inventory"
)


def commands(program: str) -> list[str]:
    """The commands of the page that call a program, each in one line."""
    text = PAGE.replace("\\\n", " ")
    return [
        line.strip() for line in text.splitlines() if line.startswith(f"    python experiments/{program}")
    ]


@pytest.fixture
def checkout(tmp_path):
    """A folder with the checkout's programs, a user's server on the PATH, and her template folder."""
    for name in ("configs", "experiments", "models"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "my_world").mkdir()
    (tmp_path / "my_world" / "stock.json").write_text(json.dumps({"tea": 3, "milk": 1}))
    (tmp_path / "my_world" / "coevolve.json").write_text('{"values": {"item": ["tea", "milk", "rice"]}}')
    server = tmp_path / "bin" / "my-server"
    server.parent.mkdir()
    server.write_text(
        f'#!/bin/sh\nexec {sys.executable} {ROOT}/tests/support/mcp_server.py "$(dirname "$2")"\n'
    )
    server.chmod(0o755)
    environment(tmp_path / "environment_mix", "0001000", [FIND, BOOK], ASKED, flights=FLIGHTS, bookings=[])
    return tmp_path


def run(command: str, folder, environ) -> subprocess.CompletedProcess:
    words = [sys.executable, *shlex.split(command)[1:]]
    path = os.pathsep.join((str(folder / "bin"), environ["PATH"]))
    where = {**environ, "PATH": path, "PYTHONPATH": os.pathsep.join((str(ROOT), environ["PYTHONPATH"]))}
    return subprocess.run(words, cwd=folder, env=where, capture_output=True, text=True, timeout=600)


def test_the_notes_of_the_page_can_be_read(tmp_path):
    (text,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "coevolve.json").write_text(text)
    found = templates.notes(tmp_path, {"template": str(tmp_path)})
    assert set(found["values"]) == {"read_query.query", "city"} and len(found["tasks"]) == 1


@pytest.mark.nightly
@pytest.mark.slow
def test_a_server_is_checked(checkout, quick):
    own, folder = commands("check_tools.py")
    done = run(own, checkout, quick)
    assert done.returncode == 1, done.stderr
    told = done.stdout
    assert re.search(r"restock +\d+ calls +[1-9]\d* worked +[1-9]\d* changed the state", told)
    assert re.search(r"count +\d+ calls +[1-9]\d* worked +0 changed the state", told)
    assert "  STOP  today depends on a clock or on chance: " in told
    assert "--config.environment.tools=restock,count,inventory,fault\n" in told
    page = (checkout / "runs" / "tools_mcp.html").read_text()
    assert "today depends on a clock" in page and "check_tools.py --config=configs/mcp_smollm2.py" in page
    done = run(f"{own} --config.environment.tools=restock,count,inventory", checkout, quick)
    assert done.returncode == 0 and "--config.environment.reuse_server=True" in done.stdout, done.stderr
    done = run(folder, checkout, quick)
    assert done.returncode == 0 and "is it fit to train on? Yes." in done.stdout, done.stderr


@pytest.mark.nightly
@pytest.mark.slow
def test_a_server_is_trained_on(checkout, quick):
    own = commands("check_tools.py")[0].replace("check_tools.py", "main.py")
    plain = own.replace("mcp_smollm2.py", "mcp_smollm2.py:strategy=static")
    done = run(f"{plain} --workdir=runs/mine {SMALL}", checkout, quick)
    assert done.returncode == 0, done.stderr[-2000:]
    tasks = [json.loads(line) for line in (checkout / "runs/mine/tasks.jsonl").read_text().splitlines()]
    assert len(tasks) == 4 and {t["environment"] for t in tasks} == {"mcp"}
    made = {call["name"] for t in tasks for turn in t["turns"] for call in turn["calls"]}
    assert made <= {"restock", "count", "inventory"}
    metrics = [json.loads(line) for line in (checkout / "runs/mine/metrics.jsonl").read_text().splitlines()]
    assert metrics


@pytest.mark.nightly
@pytest.mark.slow
def test_what_is_lacking_is_one_sentence(checkout, quick):
    for program in ("main.py --workdir=runs/none", "check_tools.py"):
        done = run(
            f"python experiments/{program} --config=configs/mcp_smollm2.py --config.model=models/tiny_qwen3",
            checkout,
            quick,
        )
        assert done.returncode != 0
        assert done.stderr.splitlines()[-1].startswith("Error: config.environment.template is ''"), (
            done.stderr
        )
    done = run("python experiments/check_tools.py my_env:Shop --config=configs/mcp_tiny.py", checkout, quick)
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == (
        "Error: 'my_env:Shop' is a class or file of yours, and config.environment.name is 'mcp': give one or "
        "the other."
    )
