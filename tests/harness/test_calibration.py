"""The noise of runs, what faults cost and what campaigns gain out of nothing, reckoned in other ways."""

import math
import subprocess
import sys

import numpy as np
import pytest
from scipy import stats

from coevolve_jax.diagnosis import trends
from coevolve_jax.harness import calibration
from coevolve_jax.harness.calibration import Run
from tests.support.paths import ROOT


def run(fault, seed, solved, salt=0, trials=400, sampling=1e-4):
    trend = dict.fromkeys(trends.MEANINGS) | {"kl_last": 0.5 + seed}
    return Run(fault, seed, salt, solved, trials, sampling, "a machine", "abc", trend)


def test_the_variance_that_samples_bring_is_found_without_bias():
    rng, tasks = np.random.default_rng(0), 60
    p = rng.beta(1, 1, tasks)
    trials = np.where(np.arange(tasks) % 6, 2, 1)  # some tasks lost a trial
    true = float((p * (1 - p) * trials).sum() / trials.sum() ** 2)
    solved = rng.binomial(trials, p, size=(4000, tasks))
    found = [calibration.sampling(list(zip(own, trials, strict=True))) for own in solved]
    assert np.mean(found) == pytest.approx(true, rel=0.1)
    assert np.var(solved.sum(1) / trials.sum()) == pytest.approx(true, rel=0.1)
    assert math.isnan(calibration.sampling([(1, 1), (0, 0)]))


def test_a_fault_costs_the_difference_of_means_and_is_kept_if_it_is_large_and_sure():
    well = [run("none", s, n) for s, n in enumerate((280, 284, 276, 288))]
    ill = [run("slow", s, n) for s, n in enumerate((240, 244, 248))]
    found = calibration.cost(well, ill)
    assert (found.fault, found.runs) == ("slow", 3)
    assert found.cost == pytest.approx(282 / 400 - 244 / 400)
    # Welch's test, by its formula.
    a, b = ([r.success for r in runs] for runs in (well, ill))
    va, vb = np.var(a, ddof=1) / 4, np.var(b, ddof=1) / 3
    df = (va + vb) ** 2 / (va**2 / 3 + vb**2 / 2)
    assert found.p == pytest.approx(stats.t.sf(found.cost / math.sqrt(va + vb), df))
    assert found.kept and found.deviation == pytest.approx(0.01)
    small = calibration.cost(well, [run("hot", s, n) for s, n in enumerate((262, 263, 264))])
    unsure = calibration.cost(well, [run("hot", s, n) for s, n in enumerate((200, 288, 230))])
    alone = calibration.cost(well, [run("hot", 0, 200)])
    assert small.p < 0.05 < unsure.p and math.isnan(alone.p)
    assert not (small.kept or unsure.kept or alone.kept)


def test_the_luck_of_campaigns_is_that_of_the_runs_drawn_again():
    runs = [run("none", 0, n, salt=i) for i, n in enumerate((270, 280, 284, 276, 288, 282, 274, 278))]
    found = {
        tuple(how): both for *how, both in ((*row[:3], row[3:]) for row in calibration.selected_luck(runs))
    }
    scores = np.array([r.success for r in runs])
    # One version of one seed, not worse: the mean of the better of two draws.
    better = np.maximum.outer(scores, scores).mean() - scores.mean()
    assert found["not worse", 1, 1][0] == pytest.approx(better, abs=2e-4)
    assert found["not worse", 1, 1][1] == pytest.approx(scores.std(ddof=1) / math.sqrt(math.pi), abs=2e-4)
    assert found["best", 6, 1][0] > found["one se", 6, 1][0] > 0


def test_rows_come_back_as_they_were_written(tmp_path):
    runs = {(r.fault, r.seed, r.salt): r for r in (run("slow", 1, 5), run("none", 0, 7, salt=3))}
    assert calibration.read_rows(tmp_path / "starts.csv") == {}
    calibration.write_rows(tmp_path / "starts.csv", runs.values())
    assert calibration.read_rows(tmp_path / "starts.csv") == runs


def test_what_has_a_row_is_not_run_again_and_the_table_tells_all(tmp_path):
    rows = [run("none", s, n) for s, n in enumerate((280, 284))] + [run("slow", s, 200 + s) for s in range(2)]
    rows += [run("none", 0, 270 + i, salt=i) for i in range(1, 4)]
    calibration.write_rows(tmp_path / "starts.csv", rows)
    command = [sys.executable, "experiments/calibrate_harness.py", f"--workdir={tmp_path}"]
    ran = lambda *flags: subprocess.run([*command, *flags], cwd=ROOT, capture_output=True, text=True)
    told = ran("--faults=none,slow", "--seeds=0:2")
    assert told.returncode == 0 and not (tmp_path / "store").exists()
    assert "Healthy, 2 seeds: success 70.5%, deviation 0.7 points" in told.stdout
    assert "| `slow` | 2 | 50.1 | 0.2 | 20.4 |" in told.stdout and "Seed 0, 4 salts:" in told.stdout
    wrong = ran("--faults=sloth")
    assert wrong.returncode and "--faults names 'sloth': use all, or some of none, slow" in wrong.stderr
