"""The reading of the runs of a version, against values that are planted in their files."""

import numpy as np
import pytest

from coevolve_jax import config as configs
from coevolve_jax.harness import calibration, evidence, start, verdict
from coevolve_jax.harness.records import Expectation
from coevolve_jax.harness.store import Job
from coevolve_jax.records.files import read_lines, write_lines
from coevolve_jax.records.rollouts import write_rollouts
from coevolve_jax.testing.campaign import ACTIVE, ROLLOUTS, STEPS, TASKS, train_made_up, truth
from coevolve_jax.types import Group
from tests.harness.support import config
from tests.support.method_cases import a_rollout, a_task

CONFIG = start.without_harness(config("none"))


def made(folder, seed=0, **metrics):
    """A made-up run. metrics: name -> its values, in the place of its own."""
    c = CONFIG.copy_and_resolve_references()
    c.seed = seed
    run = folder / f"seed_{seed}"
    train_made_up([Job(run, c, folder)], 1)
    rows = list(read_lines(run / "metrics.jsonl"))
    own = [{name: values[i] for name, values in metrics.items()} for i in range(STEPS)]
    write_lines(run / "metrics.jsonl", [row | more for row, more in zip(rows, own, strict=True)])
    return run


def test_the_row_of_a_version_is_the_mean_over_all_of_its_runs(tmp_path):
    values = {seed: np.linspace(0.1 * seed, 0.5, STEPS).tolist() for seed in range(3)}
    row = evidence.row(CONFIG, [made(tmp_path, seed, success=own) for seed, own in values.items()])
    assert row["success"] == pytest.approx(np.mean([*values.values()]))
    assert row["gain"] == pytest.approx(np.mean([np.mean(v[-3:]) - np.mean(v[:3]) for v in values.values()]))
    assert row["kept"] == pytest.approx(ACTIVE)


def test_a_value_that_one_run_lacks_is_unknown_for_the_version_and_no_target_holds(tmp_path):
    kl = {0: [0.9] * STEPS, 1: [0.9] * (STEPS - 3) + [None] * 3}
    runs = [made(tmp_path, seed, kl=own) for seed, own in kl.items()]
    alone, both = evidence.row(CONFIG, runs[:1]), evidence.row(CONFIG, runs)
    assert alone["kl_last"] == pytest.approx(0.9) and both["kl_last"] is None
    assert [both["kl"], both["kl_first"]] == pytest.approx(
        [0.9, 0.9]
    )  # a run has these, from some of its steps
    assert {name for name in both if both[name] is None and alone[name] is not None} == {"kl_last"}
    two = evidence.Selection({"t": [1, 2]}, {"t": "s"})
    judged = verdict.judge(
        {0: two},
        {0: two},
        noise=0.0,
        expects=Expectation("kl_last", "up"),
        before={"kl_last": 0.1},
        after=both,
    )
    (target,) = [rule for rule in judged.rules if rule.name == "target"]
    assert not target.ok and "went from 0.1 to unknown" in target.sentence


def test_the_selection_is_the_last_row_of_the_balanced_set(tmp_path):
    run = made(tmp_path)
    read = evidence.selection(run)
    assert len(read.by_task) == TASKS and read.success == pytest.approx(truth(CONFIG), abs=0.07)
    *_, last = [row for row in read_lines(run / "evaluations.jsonl") if row["set"] == "iid"]
    write_lines(run / "evaluations.jsonl", [last])
    assert evidence.selection(run).by_task == last["by_task"]
    assert evidence.selection(run).success == pytest.approx((ROLLOUTS - 1) / 2 / ROLLOUTS)


def test_tables_that_the_rollouts_on_disk_contradict_are_named(tmp_path):
    run = made(tmp_path)
    assert evidence.contradictions(run) == []
    evaluations, metrics = run / "evaluations.jsonl", run / "metrics.jsonl"
    whole, steps = (list(read_lines(path)) for path in (evaluations, metrics))
    for name in ("by_task", "scenarios"):
        other = {**whole[-1][name], "held_out-7": whole[-1][name]["held_out-9"]}
        other = other if other != whole[-1][name] else {**other, "held_out-7": [0, 1]}
        write_lines(evaluations, [*whole[:-1], whole[-1] | {name: other}])
        (told,) = evidence.contradictions(run)
        assert told.endswith("seed_0/evaluations.jsonl differs from the rollouts of its last evaluation.")
    write_lines(evaluations, [row for row in whole if row["set"] == "iid"])
    assert len(evidence.contradictions(run)) == 1
    write_lines(evaluations, whole)
    write_lines(metrics, [row | {"success": row["success"] / 2} for row in steps])
    told = evidence.contradictions(run)
    assert len(told) == STEPS / 3 and told[1].endswith("differs from the rollouts of step 3 in success.")


def test_the_later_gain_is_of_the_last_two_quarters_and_the_steps_are_of_the_first_half(tmp_path):
    success = np.random.default_rng(0).random(STEPS).tolist()
    half = evidence.half(CONFIG, made(tmp_path, success=success))
    third, last = success[STEPS // 2 : -(STEPS // 4)], success[-(STEPS // 4) :]
    assert half.gain == pytest.approx(np.mean(last) - np.mean(third))
    assert len(half.steps) == len(range(0, STEPS // 2, 3))


def test_length_is_paid_by_the_advantage_within_a_task_and_not_by_the_reward(tmp_path):
    """Hard tasks take long. Within each, half of either outcome is a token longer than the other half."""
    run = made(tmp_path)
    groups = [
        Group(task, tuple(a_rollout(task, i, i < 2 * n, tokens=long + i % 2) for i in range(8)))
        for task, long, n in ((a_task("easy", "ls"), 8, 3), (a_task("hard", "ls"), 40, 1))
    ]
    for step in range(0, STEPS, 3):
        write_rollouts(run, step, groups)
    assert evidence.row(CONFIG, [run])["length_paid"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("last", [0, 3])
def test_lost_trials_are_asked_for_and_not_there(last, tmp_path):
    run, asked = made(tmp_path), last or CONFIG.evaluation.num_rollouts
    counts = {f"t{i}": [i % 2, asked - (i in (0, 4))] for i in range(8)}
    row = {"set": "iid", "by_task": counts, "scenarios": {task: task for task in counts}}
    write_lines(run / "evaluations.jsonl", [row])
    c = configs.override(CONFIG, {"evaluation.last_rollouts": last})
    found = calibration.read("none", 0, 0, "", c, run)
    assert (found.solved, found.trials, found.lost) == (4, 8 * asked - 2, 2)
