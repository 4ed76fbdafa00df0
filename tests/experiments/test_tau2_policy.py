"""The tiny policy of tau2's telecom: its demonstrations, and what it learned from them."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.envs.test_env_tau2 import PYTHON, installed
from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "experiments" / "pretraining"))

from corpus import Spelling
from demonstrations import demonstrate
from demonstrator import Demonstrator, named_habits
from lessons import tau2 as lessons

from coevolve_jax import build
from coevolve_jax import config as configs
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.loop.evaluate import evaluate
from coevolve_jax.types import Call

pytestmark = [pytest.mark.slow, installed]
FOLDER = ROOT / "models" / "tiny_qwen3_tau2"
WEAK = json.loads(Path(FOLDER, "weak_tools.json").read_text())


@pytest.fixture(scope="module")
def pool():
    with ProcessPool("tau2", workers=2, timeout=60.0, python=PYTHON) as pool:
        yield pool


@pytest.fixture(scope="module")
def tasks(pool):
    return lessons.make_tasks(pool, 48, np.random.default_rng(0))


@pytest.fixture(scope="module")
def policy():
    return build.policy(FOLDER)


def test_lessons_are_right_without_habits_and_often_wrong_with_them(pool, tasks, policy):
    bad = named_habits([f"{tool}:{h['error']}:1" for tool, h in WEAK.items()], lessons.actions())
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
            assert len(told.mask) == len(told.ids) and told.mask.sum() >= len(t.steps)
    holding = {task.id for task in tasks if any(call.name in WEAK for call in task.calls)}
    assert succeeded["clean"] == {task.id for task in tasks} and holding
    assert succeeded["clean"] - holding <= succeeded["weak"]
    # A status that is checked twice was told once.
    assert len(succeeded["weak"] & holding) < len(holding) / 4


def test_an_error_is_another_call_that_telecom_knows(tasks):
    rng = np.random.default_rng(0)
    for task in tasks:
        for call in task.calls:
            other, wrong = lessons.sibling(call), lessons.wrong_argument(call, task, rng)
            assert other.name in lessons.actions() and other.name != call.name
            assert wrong != call and wrong.name in (call.name, other.name)
    assert lessons.sibling(Call("enable_roaming", {"line_id": "L1"})) == Call(
        "disable_roaming", {"line_id": "L1"}
    )


name = st.from_regex(r"[A-Z][a-z]{2,8}( [A-Z][a-z]{2,8})?", fullmatch=True)


@settings(max_examples=20)
@given(names=st.lists(name, min_size=1, max_size=4, unique=True))
def test_only_what_a_query_quotes_is_told_otherwise(names):
    query = "; ".join(f"find the customer's record with full_name '{name}'" for name in names[1:])
    calls = "".join(f'{{"full_name": "{name}"}}' for name in names)
    text = f"<|im_start|>user\n{query}<|im_end|>\n{calls}"
    told = lessons.retell(text, lambda name: name[::-1].swapcase())
    expected = text
    for one in names[1:]:
        for quote in "'\"":
            expected = expected.replace(quote + one + quote, quote + one[::-1].swapcase() + quote)
    assert told == expected and f'"{names[0]}"' in told


def test_it_reads_and_calls_and_errs_with_its_weak_tools(pool, tasks, policy):
    c = configs.override(
        configs.load_file(ROOT / "configs" / "tau2_tiny.py"),
        {"engine.max_concurrency": 32, "environment.python": PYTHON},
    )
    assert ROOT / c.model == FOLDER
    agent = build.agent(c, policy, build.engine(c, policy), pool)
    result, groups = evaluate(agent, tasks, num_rollouts=1, temperature=1.0, seed=0)
    played = [group.trajectories[0] for group in groups]
    assert result.invalid == 0
    steps = [step for t in played for step in t.steps]
    assert np.mean([step.call is not None for step in steps]) > 0.95
    weak = [any(call.name in WEAK for call in task.calls) for task in tasks]
    rate = lambda kind: np.mean([t.outcome.success for t, w in zip(played, weak) if w == kind])
    assert rate(False) > 0.7 and rate(True) < rate(False) - 0.2
