"""The guide on one's own tools, followed: its class, its commands, and the tasks of a class that rewards."""

import json
import re

import pytest

from tests.envs.test_env_tools import REWARDED
from tests.support import forked
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "guides" / "train_on_your_own_tools.md").read_text()
SMALL = (
    "--config.steps=2 --config.warm_start.steps=0 --config.model=models/tiny_qwen3 "
    "--config.evolution.every=1 --config.evolution.freeze_last_steps=1 --config.evolution.tasks=2 "
    "--config.rollout.group_size=2 --config.rollout.tasks_per_step=2 --config.data.initial_tasks=4 "
    "--config.evaluation.tasks=2 --config.evaluation.num_rollouts=1 "
    "--config.learner.matmul_dtype= --config.engine.matmul_dtype="
).split()


@pytest.fixture
def folder(tmp_path):
    """A user's folder with the programs and the page's class. Configs and models are found by their names."""
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    (tmp_path / "my_env.py").write_text(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1])
    return tmp_path


@pytest.fixture
def run(folder, quick):
    def run(line, *more):
        assert line in PAGE or more
        start = forked.Start([*line.split()[1:], *more], quick, folder)
        out, err = start.communicate(600)
        assert start.wait() == 0, err[-2000:]
        return out

    return run


def test_the_page_makes_the_model_before_the_check_counts_its_tokens():
    assert PAGE.index("    make smollm2\n") < PAGE.index("    python experiments/check_tools.py ")


@pytest.mark.slow
def test_the_class_of_the_page_is_fit_and_trains(folder, run):
    said = run("python experiments/check_tools.py my_env:Library")
    assert said.startswith("my_env:Library: is it fit to train on? Yes.")
    assert re.search(r"lend +\d+ calls +[1-9]\d* worked", said)
    page = (folder / "runs" / "tools_my_env_Library.html").read_text()
    assert "Are these tools fit to train on?" in page and "<script" not in page
    line = "python experiments/main.py --config=configs/tools.py:source=my_env:Library --workdir=runs/library"
    run(line, *SMALL)
    assert (folder / "runs" / "library" / "report.html").exists()
    tasks = [json.loads(t) for t in (folder / "runs" / "library" / "tasks.jsonl").read_text().splitlines()]
    calls = [call["name"] for task in tasks for turn in task["turns"] for call in turn["calls"]]
    assert len(tasks) >= 4 and set(calls) <= {"list_shelf", "lend", "who_has"}


@pytest.mark.slow
@pytest.mark.nightly
def test_a_runs_policy_plays_the_tasks_that_the_class_rewards(folder, run):
    (folder / "guess.py").write_text(REWARDED)
    train = "python experiments/main.py --config=configs/tools.py:source=guess:Guess --workdir=runs/guess"
    run(train, *SMALL)
    evaluate = "python experiments/evaluate.py --workdir=runs/guess --benchmark=tools --output=o.json"
    run(evaluate, "--split=test")
    report = json.loads((folder / "o.json").read_text())
    assert report["protocol"]["tasks"] == 10  # a fifth of the 50 worlds
