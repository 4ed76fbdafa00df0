"""Checks the algorithm in one file: its pieces on made-up rollouts, and the whole against `train`."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from ml_collections import ConfigDict

from coevolve_jax.config import load_file, override
from coevolve_jax.grpo import advantages
from coevolve_jax.strategies import coevolve
from coevolve_jax.synthesis import signals
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.train import train
from coevolve_jax.types import Call, Group, Lineage, Outcome, Step, Task, Trajectory, Turn
from examples import minimal_loop
from tests.support.paths import ROOT

SMALL = {
    "steps": 5,
    "data.initial_tasks": 8,
    "rollout.tasks_per_step": 2,
    "rollout.group_size": 4,
    "engine.max_concurrency": 8,
    "learner.rows_per_microbatch": 2,
    "evolution.every": 2,
    "evolution.freeze_last_steps": 2,
    "evolution.tasks": 3,
    "evolution.contexts": 4,
    "evaluation.tasks": 4,
    "evaluation.num_rollouts": 1,
    "environment.workers": 1,
    "signals.rare_percent": 20.0,
    "model": str(ROOT / "models" / "tiny_qwen3"),
}
STEPS = 4  # one evolution, and two steps that draw from what it made


def rollouts(groups):
    """All that a step's rollouts are, token by token, as values that compare."""
    return [
        (g.task, t.outcome, t.steps, t.ids.tolist(), t.logprobs.tolist())
        for g in groups
        for t in g.trajectories
    ]


@pytest.mark.slow
def test_its_first_steps_are_those_of_train(tmp_path, monkeypatch):
    config, seen = override(load_file(ROOT / "configs" / "bfcl_tiny.py"), SMALL), []
    observe = coevolve.CoEvolve.observe

    def note(strategy, step, groups):
        seen.append(rollouts(groups))
        return observe(strategy, step, groups)

    monkeypatch.setattr(coevolve.CoEvolve, "observe", note)
    train(config, tmp_path, until=STEPS)
    read = lambda name: [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    rows, born = read("metrics.jsonl"), [t for t in TaskPool.read(tmp_path / "tasks.jsonl") if t.lineage.step]

    records = list(itertools.islice(minimal_loop.run(config), STEPS))
    for record, row, theirs in zip(records, rows, seen, strict=True):
        assert rollouts(record.groups) == theirs
        assert np.mean([r for g in record.groups for r in g.rewards]) == row["reward"]
        assert signals.count_by_kind(record.signals) == row["signals"]
    found = [s.to_json() for record in records for s in record.signals]
    assert found and found == read("signals.jsonl")
    # Equal in ids, scenarios, wording, calls and lineage.
    assert [t for record in records for t in record.new_tasks] == born
    assert len(records[1].new_tasks) == 3
    drawn = {g.task.id for record in records[2:] for g in record.groups}
    assert drawn & {t.id for t in born}


# ---- Its pieces, where a few steps do not reach every case -------------------------------------------------


def made_up(rng, step):
    """Groups of four rollouts of three to six tasks, some of them invalid, all in one."""
    empty, groups = np.zeros(0, np.int32), []
    for i in rng.permutation(6)[: rng.integers(3, 7)]:
        task, own = Task(f"task {i}", "made_up", {}), []
        for m in range(4):
            reward = float(rng.choice([0.0, 0.3, 0.5, 1.0], p=rng.dirichlet([0.3] * 4)))
            steps = [
                Step(0, "", Call(a, {}), "", False) for a in rng.choice(list("abcdefgh"), rng.integers(4))
            ]
            outcome = Outcome(reward, reward >= 0.5, valid=bool(rng.random() < 0.8))
            own.append(Trajectory(task.id, m, empty, empty, empty, empty, (), tuple(steps), "done", outcome))
        groups.append(Group(task, tuple(own)))
    return groups


def test_signals_and_the_choice_among_them_are_those_of_the_package():
    c, kinds = ConfigDict({"signals": {"window": 2, "rare_percent": 9.0}}), Counter()
    for seed in range(30):
        rng = np.random.default_rng(seed)
        history, scores, actions, evidence = signals.History(), {}, Counter(), []
        for step in range(6):
            groups = made_up(rng, step)
            expected, history = signals.extract(history, groups, step, window=2, theta=9.0)
            found = minimal_loop.weakness_signals(c, step, groups, scores, actions)
            assert [e.signal for e in found] == expected
            assert all(e.trajectory.task_id == e.signal.task_id for e in found)
            kinds.update(s.kind for s in expected)
            evidence += found
        for count in (0, 1, 5, 100):
            ours, theirs = (
                choose(evidence, count, np.random.default_rng(seed))
                for choose in (minimal_loop.choose_evidence, coevolve.select_signals)
            )
            assert ours == theirs
    assert min(kinds[kind] for kind in signals.SIGNAL_KINDS) > 20


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_a_batch_is_that_of_the_task_pool(share):
    for seed in range(30):
        rng = np.random.default_rng(seed)
        size = int(rng.integers(5, 12))
        lineages = [Lineage(str(kind)) for kind in rng.choice(["initial", "signal"], size)]
        pool = TaskPool()
        pool.add(
            [
                Task(f"{i}", "made_up", {"i": i}, (Turn("q"),), lineage=lineage)
                for i, lineage in enumerate(lineages)
            ]
        )
        theirs = pool.draw(4, np.random.default_rng(seed), min_evolved_share=share)
        assert minimal_loop.draw_batch(list(pool), 4, share, np.random.default_rng(seed)) == theirs


def test_advantages_are_those_of_the_package():
    for seed in range(30):
        rewards = np.random.default_rng(seed).random(8).round(1).tolist()
        ours, theirs = (module.group_advantages(rewards) for module in (minimal_loop, advantages))
        assert ours.dtype == np.float32 and ours.tobytes() == theirs.tobytes()
