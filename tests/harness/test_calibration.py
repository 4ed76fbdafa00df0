"""The noise of runs, what faults cost and what campaigns gain out of nothing, reckoned in other ways."""

import json
import math
import re

import numpy as np
import pytest
from scipy import stats

from coevolve_jax.diagnosis import trends
from coevolve_jax.harness import calibration
from coevolve_jax.harness.calibration import Run
from coevolve_jax.harness.store import answer
from tests.harness.support import WITH_MADE_UP
from tests.support import forked
from tests.support.paths import ROOT

SETTINGS = "configs/bfcl_harness.py"


def run(fault, seed, solved, salt=0, trials=400, sampling=1e-4, fresh=(None, None)):
    trend = dict.fromkeys(trends.MEANINGS) | {"kl_last": 0.5 + seed}
    told = solved, trials, 400 - trials, sampling, *fresh, "a machine", "abc"
    return Run(fault, seed, salt, SETTINGS, *told, trend)


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


def test_a_fault_costs_what_it_takes_from_each_seed_and_is_kept_if_that_is_large_and_sure():
    """Seeds differ by far more than faults do. Healthy seeds that no fault shares add nothing to a cost."""
    rng, seeds = np.random.default_rng(1), np.array([300, 220, 260, 200])
    lost = {"slow": 40, "hot": 26, "cold": 2}
    matrix = {f: seeds - n + rng.integers(-4, 5, 4) for f, n in {"none": 0, **lost}.items()}
    runs = [run(f, s, int(n)) for f, own in matrix.items() for s, n in enumerate(own)]
    spread, found = calibration.costs(runs)
    rates = np.array([matrix[f] for f in ("none", *lost)]) / 400
    residual = rates - rates.mean(1, keepdims=True) - rates.mean(0) + rates.mean()
    error = math.sqrt((residual**2).sum() / 9)
    assert spread == pytest.approx(error)
    assert [c.fault for c in found] == ["slow", "hot", "cold"] and [c.runs for c in found] == [4] * 3
    for c in found:
        own = rates[["none", *lost].index(c.fault)]
        assert c.success == pytest.approx(own.mean())
        assert c.cost == pytest.approx(rates[0].mean() - own.mean())
        assert c.p == pytest.approx(stats.t.sf(c.cost / (error * math.sqrt(2 / 4)), 9))
        assert c.margin == pytest.approx(2.26216 * error * math.sqrt(2 / 4), rel=1e-5)  # of nine degrees
    assert [c.kept for c in found] == [True, True, False] and found[2].cost < calibration.LEAST
    more, again = calibration.costs([*runs, run("none", 4, 390), run("none", 5, 10)])
    assert more == pytest.approx(spread) and [c.cost for c in again] == pytest.approx([c.cost for c in found])
    alone = calibration.costs([r for r in runs if r.seed == 0])[1]
    assert all(math.isnan(c.p) and not c.kept for c in alone)


def test_a_fault_is_compared_on_the_seeds_that_it_shares_with_the_healthy_start():
    """By least squares over runs, a column for each fault and for all seeds but one: `slow` lacks a seed."""
    values = {"none": (280, 220, 250), "slow": (240, 190), "kind": (290, 226, 262)}
    runs = [run(f, s, n) for f, own in values.items() for s, n in enumerate(own)]
    spread, found = calibration.costs(runs)
    design = np.zeros((8, 5))
    for row, r in zip(design, runs, strict=True):
        row[list(values).index(r.fault)] = 1
        row[3:] = np.eye(2)[r.seed] if r.seed < 2 else -1
    apart = np.array([1, -1, 0, 0, 0])
    error = spread * math.sqrt(apart @ np.linalg.inv(design.T @ design) @ apart)
    slow, kind = found
    assert slow.margin == pytest.approx(stats.t.ppf(0.975, 8 - 5) * error)
    assert kind.cost < 0 and kind.p > 0.5


def test_the_luck_of_campaigns_is_that_of_the_runs_drawn_again(monkeypatch):
    solved, fresh = (270, 280, 284, 276, 288, 282, 274, 278), (100, 90, 110, 95, 104, 99, 101, 97)
    runs = [run("none", 0, n, i, fresh=(m, 200)) for i, (n, m) in enumerate(zip(solved, fresh, strict=True))]
    luck = {row[:3]: row for row in calibration.selected_luck(runs, calibration.noise(runs))}
    found = {how: (row.gain, row.simulated, row.kept) for how, row in luck.items()}
    scores = np.array([r.success for r in runs])
    # One version of one seed, not worse: the mean of the better of two draws.
    better = np.maximum.outer(scores, scores).mean() - scores.mean()
    assert found["not worse", 1, 1][0] == pytest.approx(better, abs=2e-4)
    assert found["not worse", 1, 1][1] == pytest.approx(scores.std(ddof=1) / math.sqrt(math.pi), abs=2e-4)
    assert found["best", 6, 1][0] > found["one se", 6, 1][0] > 0
    # On fresh tasks the same one of two; the second where both are equal.
    there = np.array(fresh) / 200
    kept = np.where(scores[None] >= scores[:, None], there[None], there[:, None]).mean() - there.mean()
    assert found["not worse", 1, 1][2] == pytest.approx(kept, abs=1e-3) and kept > 0.005
    # The interval: of the better of two draws, over runs drawn again.
    own = np.random.default_rng(5).integers(8, size=(20_000, 8))
    drawn = scores[own]
    gains = np.maximum(drawn[:, :, None], drawn[:, None]).mean((1, 2)) - drawn.mean(1)
    row = luck["not worse", 1, 1]
    assert (row.low, row.high) == pytest.approx(np.quantile(gains, (0.025, 0.975)), rel=0.25)
    assert all(r.low < r.gain and r.kept_low <= r.kept <= r.kept_high for r in luck.values())
    monkeypatch.setattr(calibration, "RESAMPLES", 3)  # these take long
    # The threshold is what campaigns take, whatever these runs deviate by: a large one lets none pass.
    strict = {row[:3]: row for row in calibration.selected_luck(runs, 1.0)}
    none = strict["one se", 8, 2]
    assert (none.gain, none.simulated) == pytest.approx((0, 0), abs=1e-4)
    assert strict["not worse", 8, 2].gain == pytest.approx(luck["not worse", 8, 2].gain)
    row, told = calibration.selected_luck(runs, 0.025)[0], calibration.table(runs, 0.025)
    mean, spread, shared = 100 * there.mean(), 100 * there.std(ddof=1), np.corrcoef(solved, fresh)[0, 1]
    assert f"success {mean:.1f}%, deviation {spread:.1f} points, correlation {shared:.2f} with" in told
    assert f"| not worse | 1 | 1 | {100 * better:.1f} ({100 * row.low:.1f} to {100 * row.high:.1f}) |" in told
    assert f"| {100 * kept:.1f} (" in told
    unread = [*runs, run("none", 0, 281, 8)]
    assert "fresh tasks:" not in calibration.table(unread, 0.025)
    assert all(math.isnan(x) for row in calibration.selected_luck(unread, 0.025) for x in row[-3:])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("runs", "says"),
    [
        (
            [run("slow", 0, 150, salt) for salt in range(4)],
            ["No cost is of seed 0: ", "Seed 0 tells of no luck"],
        ),
        (
            [run("none", 0, 280), run("slow", 1, 150)],
            ["Healthy, 1 seeds: ", "No cost is of seed 1: no healthy"],
        ),
        ([run("none", 0, 280), run("slow", 0, 150)], ["Healthy, 1 seeds: ", "| `slow` | 1 | 37.5 | 32.5 |"]),
    ],
)
def test_a_seed_without_its_healthy_runs_is_named_and_left_out(runs, says):
    told = calibration.table(runs, 0.025)
    assert all(text in told for text in says) and "deviates by" not in told
    assert ("| fault |" in told) == ("`slow`" in told) and "nan" not in told
    assert told.endswith(f"Lost trials: 0 of {400 * len(runs)}. Commits: abc.")


def test_rows_come_back_as_they_were_written(tmp_path):
    runs = {
        (r.fault, r.seed, r.salt): r for r in (run("slow", 1, 5), run("none", 0, 7, salt=3, fresh=(6, 9)))
    }
    assert calibration.read_rows(tmp_path / "starts.csv", SETTINGS) == {}
    calibration.write_rows(tmp_path / "starts.csv", runs.values())
    assert calibration.read_rows(tmp_path / "starts.csv", SETTINGS) == runs
    with pytest.raises(ValueError, match=f"has runs of {SETTINGS}, and these are of other.py: name another"):
        calibration.read_rows(tmp_path / "starts.csv", "other.py")


def test_what_has_a_row_is_not_run_again_and_the_table_tells_all(tmp_path, quick):
    rows = [run("none", s, n) for s, n in enumerate((280, 284))] + [run("slow", s, 200 + s) for s in range(2)]
    rows += [run("none", 0, 270 + i, salt=i) for i in range(1, 4)]
    own = tmp_path / "own.py"  # whose get_config knows no faults
    text = "from coevolve_jax import config\n\n\ndef get_config():\n"
    own.write_text(text + f"    return config.load_file({str(ROOT / SETTINGS)!r})\n")
    calibration.write_rows(tmp_path / "starts.csv", [r._replace(settings=str(own)) for r in rows])
    command = ["experiments/calibrate_harness.py", f"--workdir={tmp_path}", f"--config={own}"]
    told = forked.run([*command, "--faults=none,slow", "--seeds=0:2"], quick)
    assert told.returncode == 0 and not (tmp_path / "store").exists()
    assert "Healthy, 2 seeds: success 70.5%, deviation 0.7 points" in told.stdout
    assert "Lost trials: 0 of 2800. Commits: abc." in told.stdout
    assert "| `slow` | 2 | 50.1 | 20.4 (" in told.stdout and "Seed 0, 4 salts:" in told.stdout
    (flag,) = re.findall(r"^For a campaign: --config\.harness\.noise=(\S+)$", told.stdout, re.MULTILINE)
    assert float(flag) == pytest.approx(calibration.costs(rows[:4])[0], abs=5e-5) and float(flag) > 0


@pytest.mark.slow
def test_each_salt_is_a_run_of_its_own(quick, tmp_path):
    flags = (f"--workdir={tmp_path}", "--seeds=0", "--salts=0:3", "--fresh")
    done = forked.run_after(WITH_MADE_UP, "calibrate_harness", tmp_path, quick, *flags)
    assert done.returncode == 0, done.stderr
    rows = calibration.read_rows(tmp_path / "starts.csv", SETTINGS)
    folders = {
        json.loads(p.read_text())["rollout"]["salt"]: p.parent.parent.name
        for p in (tmp_path / "store").glob("*/seed_0/config.json")
    }
    assert folders.keys() == {0, 1, 2} == {r.salt for r in rows.values()}
    assert len({r.solved for r in rows.values()}) > 1
    for (_, _, salt), row in rows.items():
        counts = answer(tmp_path / "fresh" / folders[salt] / "seed_0.json")
        assert [row.fresh_solved, row.fresh_trials] == [sum(c[i] for c in counts.values()) for i in (0, 1)]
    assert "On fresh tasks: success" in done.stdout
