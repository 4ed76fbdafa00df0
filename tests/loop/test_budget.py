"""A budget of rollouts: the real loop in small ends by it, also killed and resumed; and what it refuses."""

import json
from collections import Counter
from pathlib import Path

import pytest

from coevolve_jax import config as configs
from coevolve_jax.loop.run import Run
from coevolve_jax.loop.state import RunState
from coevolve_jax.records.workdir import fork
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.train import train
from tests.loop.test_train import SMALL, kill_when, rows
from tests.support.paths import ROOT

TINY = configs.load_file(ROOT / "configs" / "bfcl_tiny.py")
PROBING = {  # free exploration with a probe: rollouts of two roles
    "strategy.probe": 3, "steps": 8, "checkpoint.keep": 20, "evaluation.every": 2,
    "evaluation.num_rollouts": 1, "evaluation.tasks": 2, "evolution.tasks": 2, "data.initial_tasks": 4,
}  # fmt: skip


def config_of(**changes):
    config = configs.load_file(ROOT / "configs" / "bfcl_tiny.py", "strategy=random")
    model = {"model": str(ROOT / "models" / "tiny_qwen3")}
    return configs.override(config, {**SMALL, **PROBING, **model, **changes})


def spent(workdir: Path, step: int) -> dict[str, int]:
    """Rollouts by role in the checkpoint after so many steps."""
    state = json.loads((workdir / f"checkpoints/step_{step:08d}/state.json").read_text())["state"]
    return {key: n for key, n in state["ledger"].items() if key.startswith("rollouts/")}


def numbers(workdir: Path) -> list[dict]:
    """Metrics without what depends on the clock."""
    timed = {"seconds", "utilization", "serving", "throughput"}
    return [{k: v for k, v in row.items() if k not in timed} for row in rows(workdir, "metrics.jsonl")]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_ends_after_the_step_that_reaches_its_budget_and_killed_as_well(tmp_path, quick):
    whole, short, killed = (tmp_path / name for name in ("whole", "short", "killed"))
    train(config_of(), whole, until=4)
    found = {step: sum(spent(whole, step).values()) for step in range(1, 5)}
    assert spent(whole, 4)["rollouts/probe"] > 0 and found[4] > found[3] + 8  # the step's evolution probed
    budget = found[4] - 1  # only the probes of the evolution reach it
    assert found[3] + 8 <= budget
    changes = {"budget.rollouts": budget, "evaluation.last_rollouts": 3, "checkpoint.every": 3}

    summary = train(config_of(**changes), short)
    ledger = json.loads((short / "ledger.json").read_text())
    assert summary["steps"] == 4 and "not finished" not in (short / "report.html").read_text()
    booked = {key: n for key, n in ledger["costs"].items() if key.startswith("rollouts/")}
    assert booked == spent(whole, 4) and sum(booked.values()) == found[4]
    assert numbers(short) == numbers(whole)[:4]  # evolutions keep their steps
    assert sorted(p.name for p in (short / "checkpoints").glob("step_*"))[-1] == "step_00000004"
    seen = [(row["step"], row["samples"]) for row in rows(short, "evaluations.jsonl")]
    assert seen == [(0, 1), (2, 1), (4, 3)]  # the last one once, with its own number of rollouts
    last = rows(short, "evaluations.jsonl")[-1]
    assert {n for _, n in last["by_task"].values()} == {3} and last["greedy_success"] is not None
    assert summary["held_out"]["after"] == last

    config = fork(short, 3, killed)
    logged = lambda: (killed / "metrics.jsonl").read_bytes().count(b"\n") >= 4
    # The last step is over, its summary not written.
    assert kill_when(["experiments/main.py", f"--workdir={killed}"], quick, logged)
    assert not (killed / "summary.json").exists()
    train(config, killed)
    assert numbers(killed) == numbers(short)
    assert rows(killed, "evaluations.jsonl") == rows(short, "evaluations.jsonl")
    assert (killed / "tasks.jsonl").read_bytes() == (short / "tasks.jsonl").read_bytes()
    before = (killed / "summary.json").read_text()
    train(config, killed, until=2)  # behind its end: nothing happens
    assert (killed / "summary.json").read_text() == before


@pytest.mark.parametrize(
    "booked, step, pending, ended",
    [
        ({"rollouts/policy": 60, "rollouts/probe": 39}, 3, None, False),
        ({"rollouts/policy": 60, "rollouts/probe": 40}, 3, None, True),
        ({"rollouts/policy": 60, "rollouts/branch": 30, "rollouts/arena": 10}, 3, None, True),
        ({"rollouts/policy": 100}, 3, {"row": {}}, False),  # its evolution is still to come
        ({"rollouts/policy": 10, "sampled_tokens/policy": 900, "explorer/llm_tokens": 99}, 3, None, False),
        ({"rollouts/policy": 10, "explorer/rollouts/wording": 90}, 3, None, True),
        ({"rollouts/policy": 10}, 60, None, True),  # config.steps
    ],
)
def test_what_ends_training(booked, step, pending, ended):
    run = object.__new__(Run)
    run.config = configs.override(TINY, {"budget.rollouts": 100})
    run.state = RunState(step, TaskPool(), [], [], SynthesisStats(), ledger=Counter(booked), pending=pending)
    assert run.ended == ended
    run.config = TINY  # no budget
    assert run.ended == (step == 60)


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"rollout.max_staleness": 1}, "budget.rollouts is 7040: it must be 0 unless .*they are 1 and 0"),
        ({"evolution.async_steps": 2}, "budget.rollouts is 7040: it must be 0 unless .*they are 0 and 2"),
        ({"budget.rollouts": -1}, "budget.rollouts is -1: it must be at least 0"),
        ({"budget.rollouts": 1280}, "budget.rollouts is 1280: it must be above 1280, which the batches take"),
        ({"evaluation.last_rollouts": -1}, "evaluation.last_rollouts is -1"),
    ],
)
def test_a_budget_that_cannot_be_kept_is_refused(changes, why):
    config = configs.override(TINY, {"budget.rollouts": 7040, **changes})
    with pytest.raises(ValueError, match=why):
        configs.check(config)
        configs.check_evolution(config)


def test_a_budget_is_no_bound_on_arms_that_do_not_evolve():
    configs.check_evolution(configs.override(TINY, {"strategy.name": "static", "budget.rollouts": 8}))
