"""The tiny policy of text adventures: its demonstrations, and what it learned from them."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.envs.test_env_textworld import PYTHON, installed
from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "experiments" / "pretraining"))

from corpus import Spelling
from demonstrations import demonstrate
from demonstrator import Demonstrator, named_habits
from lessons import textworld as lessons

from coevolve_jax import build
from coevolve_jax import config as configs
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.loop.evaluate import evaluate

pytestmark = [pytest.mark.slow, installed]
FOLDER = ROOT / "models" / "tiny_qwen3_textworld"
WEAK = json.loads(Path(FOLDER, "weak_tools.json").read_text())


@pytest.fixture(scope="module")
def pool():
    with ProcessPool("textworld", workers=2, timeout=60.0, python=PYTHON) as pool:
        yield pool


@pytest.fixture(scope="module")
def tasks(pool):
    return lessons.make_tasks(pool, 48, np.random.default_rng(0))


@pytest.fixture(scope="module")
def policy():
    return build.policy(FOLDER)


def test_lessons_are_right_without_habits_and_often_wrong_with_them(pool, tasks, policy):
    assert len(tasks) == 48 and all(1 <= len(task.calls) <= 6 for task in tasks)
    assert {task.scenario["level"] for task in tasks} == {1, 2}
    bad = named_habits([f"{verb}:{h['error']}:1" for verb, h in WEAK.items()], lessons.actions())
    spelling, rng = Spelling(policy.tokenizer, lessons.retell), np.random.default_rng(1)
    limits = dataclasses.replace(lessons.LIMITS, max_length=2048)  # room for the longest demonstrations too
    succeeded = {}
    for kind, habits in (("clean", {}), ("weak", bad)):
        demonstrator = Demonstrator(habits, lessons)
        scripts = [demonstrator.messages(task, rng) for task in tasks]
        shown = demonstrate(policy.tokenizer, pool, lessons.tools, tasks, scripts, limits)
        succeeded[kind] = {task.id for task, t in zip(tasks, shown) if t.outcome.success}
        for t in shown[:8]:
            told = spelling.respell(t, rng)
            assert policy.chat.decode(told.ids) != policy.chat.decode(t.ids) or not t.steps
            assert len(told.mask) == len(told.ids) and told.mask.sum() >= len(t.steps)
    holding = {task.id for task in tasks if any(lessons.action(call) in WEAK for call in task.calls)}
    assert succeeded["clean"] == {task.id for task in tasks} and holding
    assert succeeded["clean"] - holding <= succeeded["weak"]
    # A door that is opened again need not have been closed.
    assert len(succeeded["weak"] & holding) < len(holding) / 4


def test_it_reads_and_calls_and_errs_with_its_weak_verbs(pool, tasks, policy):
    c = configs.override(
        configs.load_file(ROOT / "configs" / "textworld_tiny.py"),
        {"engine.max_concurrency": 32, "environment.python": PYTHON},
    )
    assert ROOT / c.model == FOLDER
    agent = build.agent(c, policy, build.engine(c, policy), pool)
    result, groups = evaluate(agent, tasks, num_rollouts=1, temperature=0.0, seed=0)
    played = [group.trajectories[0] for group in groups]
    assert result.invalid == 0
    steps = [step for t in played for step in t.steps]
    assert np.mean([step.call is not None for step in steps]) > 0.95
    weak = [any(lessons.action(call) in WEAK for call in task.calls) for task in tasks]
    rate = lambda kind: np.mean([t.outcome.success for t, w in zip(played, weak) if w == kind])
    assert rate(False) > 0.7 and rate(True) < rate(False) - 0.2
