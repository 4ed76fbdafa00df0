"""Moves that a backtest refuses are trained all the same: which are drawn, and how they are judged."""

import csv
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from coevolve_jax.harness import calibration, evidence, levers, refusals
from coevolve_jax.harness.backtest import Check
from coevolve_jax.harness.refusals import Trained, Tried
from coevolve_jax.harness.start import without_harness
from coevolve_jax.harness.store import (
    Job,
    Store,
    config_changes,
    config_id,
    cores_of_starts,
    other_cores,
)
from coevolve_jax.records.files import read_lines, write_lines
from coevolve_jax.seeding import rng_for
from coevolve_jax.testing.campaign import MADE_UP, train_made_up
from tests.harness.support import WITH_MADE_UP, config
from tests.support import forked


def row(name: str, by: str = "") -> Tried:
    lever, _, move = name.partition(" ")
    return Tried(lever, move, by, "Why, it says." if by else "", "")


def test_every_move_that_can_run_is_one_lever_of_the_start_moved_once():
    healthy = config("none")
    found = list(refusals.moves(healthy))
    table = levers.table(healthy)
    assert len({(lever, move) for lever, move, _ in found}) == len(found) > 40
    for lever, move, changes in found:
        assert table[lever].moves(healthy)[move] == changes
        levers.changed(without_harness(healthy), changes)
    assert ("learner.learning_rate", "x3", {"learner.learning_rate": pytest.approx(3e-4)}) in found


def test_a_move_is_tried_with_its_own_gradient_and_a_known_one_not_again(tmp_path):
    healthy = config("none")
    first, run, asked = without_harness(healthy), tmp_path / "seed_0", []
    train_made_up([Job(run, first, tmp_path)], 1)
    every = {f"{lever} {move}": changes for lever, move, changes in refusals.moves(healthy)}
    known = {name: row(name) for name in every if not name.startswith("learner.kl_coef ")}

    def gradient(child):
        asked.append(config_changes(first, child))
        return {"margin": Check(-0.1, 0.0, False)}

    told = list(refusals.tried(healthy, first, [evidence.groups(run)], gradient, known))
    new = told[len(known) :]
    assert told[: len(known)] == list(known.values()) and new and {t.by for t in new} == {"margin"}
    assert asked == [every[f"{t.lever} {t.move}"] for t in new]


def test_more_of_the_same_moves_are_drawn_where_more_are_asked_for():
    rows = [row(f"a.{i} up", "order" if i % 3 else "") for i in range(30)]
    few, many = (refusals.drawn(rows, n, n // 2, rng_for(0, "refusals")) for n in (4, 12))
    for side in (True, False):
        own = [[r for r in chosen if bool(r.by) == side] for chosen in (few, many)]
        assert own[1][: len(own[0])] == own[0]
    assert sum(bool(r.by) for r in many) == 12 and len(many) == len(set(many)) == 18
    assert [bool(r.by) for r in few[:4]] == [True, False, True, False]
    assert len(refusals.drawn(rows, 100, 100, rng_for(1, "refusals"))) == 30


@pytest.mark.parametrize("salts", [1, 4])
def test_luck_makes_a_sixth_worse_and_a_sixth_better_where_runs_deviate_by_the_noise(salts):
    rng, noise, kinds = np.random.default_rng(0), 0.025, []
    for _ in range(4000):
        gains = rng.normal(0.6, noise, salts) - rng.normal(0.6, noise, salts)
        kinds.append(refusals.judge(list(gains), noise)[1])
    tail = 0.5 * math.erfc(1 / math.sqrt(2))
    assert kinds.count("worse") / 4000 == pytest.approx(tail, abs=0.02)
    assert kinds.count("better") / 4000 == pytest.approx(tail, abs=0.02)


def test_a_move_is_judged_by_the_mean_of_its_gains_and_fails_with_any_of_its_runs():
    se = 0.025  # of two salts
    assert refusals.judge([0.0, -2 * se], 0.025) == (-se, "worse")
    assert refusals.judge([0.0, 2 * se], 0.025) == (se, "better")
    assert refusals.judge([0.04, -0.04], 0.025) == (0.0, "alike")
    assert refusals.judge([0.5, None], 0.025) == (None, "worse")
    assert refusals.standard_error(0.025, 1) == pytest.approx(0.035, abs=5e-4)  # as of a campaign of one seed


def test_the_table_counts_what_was_trained_and_a_failed_run_is_worse():
    rows = [row("a up", "order"), row("b up", "live_groups"), row("c up", "order"), row("d up"), row("e up")]
    trained = [
        Trained(rows[0], -0.1, "worse"),
        Trained(rows[1], 0.08, "better"),
        Trained(rows[2], None, "worse"),
        Trained(rows[3], 0.01, "alike"),
    ]
    told = refusals.table(rows, [0.5, 0.7], trained, 0.02)
    assert "|  | trained | worse | alike | better | mean gain, without failed |" in told
    assert "Of 5 moves the backtest refuses 3: `order` 2, `live_groups` 1." in told
    assert "solves 50.0%, 70.0% (by salt). One standard error of a gain over it is 2.0 points." in told
    assert "| refused | 3 | 2 | 0 | 1 | -1.0 |" in told and "| passed | 1 | 0 | 1 | 0 | +1.0 |" in told
    assert (
        "one-sided p 0.5." in told
    )  # of 4 places the passed one has one of the 2 alike or better: C(3, 2) / C(4, 2)
    assert "Worse: 2 of 3 (9 to 99%)" in told and "at a loss: 1 of 3 (1 to 91%)." in told
    alone = refusals.table(rows, [0.5, 0.7], [Trained(rows[0], 0.0, "alike"), trained[0]], 0.02)
    assert "| passed | 0 | 0 | 0 | 0 |  |" in alone
    assert alone.index("| -10.0 | worse |") < alone.index("| +0.0 | alike |")
    assert "| `c up` | order | failed | worse |" in told and "| `d up` | passed | +1.0 | alike |" in told


def test_a_store_keeps_the_cores_of_its_starts(tmp_path, monkeypatch):
    first = without_harness(config("none"))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    kept = lambda jobs: Store(tmp_path, first, MADE_UP, jobs, cores_of_starts(tmp_path, jobs))
    assert cores_of_starts(tmp_path, 2) == 4 and other_cores(4, 2) == ""
    begun = kept(2)
    begun.begin([0])
    assert kept(1).workdir(first, 0) == kept(8).workdir(first, 0) == begun.workdir(first, 0)
    assert "begun with 4 cores a run. Runs made here have 8," in other_cores(4, 1)
    Store(tmp_path, first, MADE_UP, 1).begin([0])  # as a program leaves it that keeps none
    assert [cores_of_starts(tmp_path, jobs) for jobs in (1, 2, 4)] == [8, 4, 4]


def test_moves_come_back_as_they_were_written(tmp_path):
    rows = [row("reward.terms add length", "paid_share"), row("learner.epochs up")]
    path = tmp_path / "backtests.csv"
    refusals.write(path, "abc-123-2/seed_0", rows)
    start, found = refusals.read(path)
    assert start == "abc-123-2/seed_0" and list(found.values()) == rows
    assert refusals.read(tmp_path / "none.csv") == ("", {})
    path.write_text(path.read_text().replace("seed_0", "seed_1", 1))
    with pytest.raises(ValueError, match="backtests on abc-123-2/seed_0 and abc-123-2/seed_1: move that"):
        refusals.read(path)
    path.write_text("lever,move,by,why,unseen\nlearner.epochs,up,,,\n")
    with pytest.raises(ValueError, match="has other columns than start, lever, move.*: move that file away"):
        refusals.read(path)


@pytest.mark.slow
def test_the_program_trains_what_it_drew_and_goes_on_where_it_was(quick, tmp_path):
    flags = (f"--workdir={tmp_path}", "--salts=0:2", "--refused=2", "--passed=2")
    done = forked.run_after(WITH_MADE_UP, "check_backtests", tmp_path, quick, *flags)
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "backtests.csv", newline="") as file:
        known = list(csv.DictReader(file))
    assert len(known) == len(list(refusals.moves(config("none"))))
    assert 2 <= sum(bool(k["by"]) for k in known) < len(known)
    rows = calibration.read_rows(tmp_path / "trained.csv", "configs/bfcl_harness.py")
    start = {salt: r.success for (name, _, salt), r in rows.items() if name == "none"}
    assert len(start) == 2 and len(rows) == 10
    runs = [json.loads(p.read_text()) for p in (tmp_path / "store").glob("*/seed_0/config.json")]
    assert len(runs) == 10 and sum(c["rollout"]["salt"] for c in runs) == 5
    by_name = {f"{k['lever']} {k['move']}": k["by"] for k in known}
    for name in {key[0] for key in rows} - {"none"}:
        gain = 100 * np.mean([rows[name, 0, salt].success - start[salt] for salt in (0, 1)])
        assert f"| `{name}` | {by_name[name] or 'passed'} | {gain:+.1f} |" in done.stdout
    more = *flags[:3], "--passed=3", "--jobs=2"
    again = forked.run_after(WITH_MADE_UP, "check_backtests", tmp_path, quick, *more)
    assert again.returncode == 0, again.stderr
    more = calibration.read_rows(tmp_path / "trained.csv", "configs/bfcl_harness.py")
    assert len({p.parent.name.rpartition("-")[2] for p in (tmp_path / "store").glob("*/seed_0")}) == 1
    assert len(more) == 12 and {k: more[k] for k in rows} == rows
    # Those of another start are refused before anything is run.
    for other in (("--seed=1", *flags[1:]), ("--salts=1:3", *flags[2:])):
        refused = forked.run_after(WITH_MADE_UP, "check_backtests", tmp_path, quick, flags[0], *other)
        assert refused.returncode and f"backtests.csv has backtests on {known[0]['start']}" in refused.stderr
    assert len(list((tmp_path / "store").glob("*/seed_*/config.json"))) == 12
    _the_tables_alone_say_the_same(tmp_path, quick, done.stdout, flags[1:])
    # A move that lost all of its trials has failed, and the command ends. Without its start it cannot.
    name = next(key[0] for key in more if key[0] != "none")
    changes = {f"{lever} {move}": found for lever, move, found in refusals.moves(config("none"))}[name]
    moved = levers.changed(without_harness(config("none")), changes)
    folder = _all_trials_lost(tmp_path, moved, (name, 0))
    told = forked.run_after(WITH_MADE_UP, "check_backtests", tmp_path, quick, *flags[:3], "--passed=3")
    assert told.returncode == 0, told.stderr
    assert f"{name} 0 failed: {folder} has no valid trial in its last evaluation." in told.stdout
    assert f"| `{name}` | {by_name[name] or 'passed'} | failed | worse |" in told.stdout
    folder = _all_trials_lost(tmp_path, without_harness(config("none")), ("none", 0))
    ended = forked.run_after(WITH_MADE_UP, "check_backtests", tmp_path, quick, *flags)
    assert ended.returncode and f"The start has no result of salt 0 ({folder} has no valid" in ended.stderr


def _the_tables_alone_say_the_same(folder, quick, before, flags):
    """Both tables in a folder of their own, as of older code: the same is printed and nothing is run."""
    alone = folder / "alone"
    alone.mkdir()
    shutil.copy(folder / "trained.csv", alone)
    text = (folder / "backtests.csv").read_text()
    (alone / "backtests.csv").write_text(re.sub(r"(?m)^(\w{16})-\w+-", r"\1-00000000-", text))
    told = forked.run_after(WITH_MADE_UP, "check_backtests", folder, quick, f"--workdir={alone}", *flags)
    assert told.returncode == 0, told.stderr
    assert told.stdout[told.stdout.index("Of ") :] == before[before.index("Of ") :]
    assert not list((alone / "store").glob("*/seed_*")) and not list((alone / "store").glob("starts"))
    (alone / "backtests.csv").write_text(
        "\n".join((alone / "backtests.csv").read_text().split("\n")[:9]) + "\n"
    )
    told = forked.run_after(WITH_MADE_UP, "check_backtests", folder, quick, f"--workdir={alone}", *flags)
    assert told.returncode and "-00000000-" in told.stderr  # what is missing would be of other code


def _all_trials_lost(folder, config, key) -> Path:
    """Takes all trials from the run of a config, and its row from trained.csv. Returns the run's workdir."""
    (run,) = (folder / "store").glob(f"{config_id(config)}-*/seed_0")
    rows = read_lines(run / "evaluations.jsonl")
    write_lines(
        run / "evaluations.jsonl", [{**e, "by_task": dict.fromkeys(e["by_task"], [0, 0])} for e in rows]
    )
    told = calibration.read_rows(folder / "trained.csv", "configs/bfcl_harness.py").values()
    calibration.write_rows(folder / "trained.csv", [r for r in told if (r.fault, r.salt) != key])
    return run
