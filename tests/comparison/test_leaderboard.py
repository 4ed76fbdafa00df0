"""The leaderboard: made-up runs with a known answer, every number of the CSV once more by other code."""

import csv
import json
import math
import random
import re
import statistics
import sys
import types
import xml.etree.ElementTree as ET
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from coevolve_jax.comparison import leaderboard, leaderboard_page, many_to_one, notes, results, testbed
from coevolve_jax.config import load_file, numbers
from tests.comparison.test_many_to_one import critical
from tests.support import forked
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

SEEDS = range(200, 208)
SKILL = {  # the true success on tasks with a weak tool
    "static": 0.45, "random": 0.5, "random_probe": 0.55, "oracle": 0.75, "my.good": 0.68, "my.little": 0.53,
    "my.none": 0.5,
}  # fmt: skip
ASKED, TASKS = 8, 24


def outcomes(lacking=(), scale=1.0):
    """Rows of outcomes.csv: 24 balanced tasks, of which a third each call tool a, b or no weak tool."""
    rows = []
    for arm, skill in SKILL.items():
        for seed in SEEDS:
            if (arm, seed) in lacking:
                continue
            luck = 0.04 * np.random.default_rng(seed).standard_normal()
            rng = np.random.default_rng([seed, *arm.encode()])
            for step in (0, 20, 55):
                for i in range(TASKS):
                    weak = ("a", "b", "")[i % 3]
                    p = 0.3 if step == 0 else skill + luck + (0.2 if not weak else 0.0)
                    trials = ASKED if step == 55 else 2
                    solved = int(rng.binomial(trials, min(max(p, 0), 1)))
                    for name in ("balanced", "iid"):
                        where = (arm, seed, name, "test", step, f"t{i}", f"s{i % 8}", f"{weak};x", weak)
                        values = (*where, solved, trials, trials)
                        rows.append(dict(zip(results.OUTCOMES, values, strict=True)))
    return rows


def cells(lacking=(), diverged=()):
    rows = []
    for k, arm in enumerate(SKILL):
        for seed in SEEDS:
            row = {"arm": arm, "seed": seed, "diverged": 17 if (arm, seed) in diverged else None}
            if (arm, seed) not in lacking:
                row |= {
                    "steps": 55 - k, "rollouts_policy": 7000 - seed, "rollouts_probe": 10 * k,
                    "rollouts_branch": 0, "gradients": 0, "new_tasks": 96,
                    "new_tasks_with_a_weak_tool": 20 + k,
                    "failed_at_first_visit": 0.125 * k, "explorer_steps": 3000, "llm_tokens": 0,
                    "seconds": 60.0 * (k + 1),
                }  # fmt: skip
            if (arm, seed) not in lacking or (arm, seed) in diverged:
                rows.append(row)
    return rows


def plan(**changes):
    config = json.loads(
        json.dumps(numbers(load_file(ROOT / "configs" / "leaderboard_bfcl.py", "split=test").to_dict()))
    )
    return {
        "config": config, "arms": [a for a in SKILL if not a.startswith("my.")], "seeds": list(SEEDS),
        "settings": [{}], "planned": [], "primary": "weak", "reads": "test", "machine": "m",
        "date": "2026-12-01", "commit": "c0ffee", "command": "c",
        "joined": [{
            "bundle": "theirs", "digest": "d" * 64, "commit": "beef", "machine": "n", "date": "2026-12-02",
            "cells": [{"arm": "my.good", "seed": s, "setting": []} for s in SEEDS], "taken": 0, "repeated": 0,
            "alike": 0,
        }],
        **changes,
    }  # fmt: skip


def folder(path, lacking=(), diverged=(), **changes):
    path.mkdir()
    (path / "plan.json").write_text(json.dumps(plan(**changes)))
    for name, rows in (("outcomes", outcomes(lacking)), ("cells", cells(lacking, diverged))):
        with open(path / f"{name}.csv", "w", newline="") as f:
            writer = csv.DictWriter(f, list(dict.fromkeys(k for r in rows for k in r)))
            writer.writeheader()
            writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The files that the program writes for a complete layout."""
    home = tmp_path_factory.mktemp("board")
    source = folder(home / "runs")
    board = leaderboard.board(testbed.load("bfcl", [source]))
    page = leaderboard_page.write([board], home / "results")
    with open(home / "results" / "leaderboard" / "leaderboard.csv") as f:
        rows = {r["method"]: r for r in csv.DictReader(f)}
    return home, page.read_text(), rows


def macro(arm, seed, rows, group=("a", "b")):
    """Success by weak tool after the last step, its mean."""
    rates = []
    for tool in group:
        own = [
            r
            for r in rows
            if (r["arm"], r["seed"], r["set"], r["step"], r["weak"]) == (arm, seed, "balanced", 55, tool)
        ]
        rates.append(sum(r["successes"] for r in own) / sum(r["trials"] for r in own))
    return statistics.fmean(rates)


def table(rows, lacking=()):
    return {a: [macro(a, s, rows) for s in SEEDS if (a, s) not in lacking] for a in SKILL}


def test_the_csv_is_what_other_code_computes(made):
    _, _, found = made
    rows = outcomes()
    values = table(rows)
    assert list(found) == sorted(SKILL, key=lambda a: -statistics.fmean(values[a]))  # best first
    y = np.array([values[a] for a in SKILL])
    rest = y - y.mean(1, keepdims=True) - y.mean(0, keepdims=True) + y.mean()
    error = math.sqrt((rest**2).sum() / (6 * 7)) * math.sqrt(2 / 8)
    bound = critical(3, 42)  # three methods, and the error of all seven arms
    mean = {a: statistics.fmean(own) for a, own in values.items()}
    gap = mean["oracle"] - mean["random"]
    for arm, own in values.items():
        r = found[arm]
        near = lambda key, value, r=r, **how: float(r[key]) == pytest.approx(value, **{"rel": 1e-4, **how})
        assert near("mean", mean[arm]) and near("sd", statistics.stdev(own)) and r["seeds"] == "8"
        assert near("headroom_share", (mean[arm] - mean["random"]) / gap, abs=1e-5)
        assert near("others", statistics.fmean(macro(arm, s, rows, ("",)) for s in SEEDS))
        k = list(SKILL).index(arm)
        assert (
            near("updates", 55 - k)
            and near("rollouts_policy", 7000 - 203.5)
            and near("seconds", 60 * (k + 1))
        )
        assert near("weak_tasks", 20 + k) and near("failed_first_sight", 0.125 * k)
        if arm == "random":
            assert r["diff_random"] == r["lo"] == r["p"] == ""
            continue
        difference = mean[arm] - mean["random"]
        d = np.array(own) - values["random"]
        assert near("diff_random", difference, abs=1e-5)
        half = (float(r["hi"]) - float(r["lo"])) / 2
        assert near("lo", difference - half, abs=1e-5)
        if not arm.startswith("my."):
            assert half == pytest.approx(stats.t.ppf(0.975, 42) * error, rel=1e-3)
            assert near("p", 2 * stats.t.sf(abs(difference) / error, 42), rel=1e-3)
            continue
        flips = flip_bound(values) * d.std(ddof=1) / math.sqrt(8)
        assert half == pytest.approx(max(bound * error, flips), rel=3e-3)  # the wider counts
        assert float(r["p"]) >= 2 * stats.t.sf(abs(difference) / error, 42)  # adjusted
    # Only what passed is compared with the probe, by Holm over as many.
    passed = [a for a in SKILL if a.startswith("my.") and float(found[a]["lo"]) > 0]
    assert passed == ["my.good"]
    for arm in SKILL:
        assert (found[arm]["diff_probe"] != "") == (arm in passed)
    difference = mean["my.good"] - mean["random_probe"]
    r = found["my.good"]
    assert float(r["diff_probe"]) == pytest.approx(difference, rel=1e-4)
    assert float(r["probe_p"]) == pytest.approx(2 * stats.t.sf(difference / error, 42), rel=1e-3)
    half = stats.t.ppf(0.975, 42) * error
    assert float(r["probe_lo"]) == pytest.approx(difference - half, rel=1e-3)
    assert (r["commit"], r["date"]) == ("beef", "2026-12-02")  # of the bundle that it came by
    marks = (found["random"]["commit"], found["random"]["fidelity"], r["fidelity"])
    assert marks == ("c0ffee", "control", "")
    told = {(r["testbed"], r["base"], r["split"], r["metric"]) for r in found.values()}
    assert told == {("bfcl", "tiny_qwen3_seldom", "test", "weak")}


def flip_bound(values):
    """The 95% point of the largest |t| of centred differences, over all sign vectors."""
    d = [np.array(values[a]) - values["random"] for a in SKILL if a.startswith("my.")]
    most = []
    for bits in range(2**8):
        sign = np.array([1 if bits >> i & 1 else -1 for i in range(8)])
        flipped = [sign * (x - x.mean()) for x in d]
        most.append(max(abs(x.mean()) / (x.std(ddof=1) / math.sqrt(8)) for x in flipped))
    return sorted(most)[math.ceil(0.95 * 255)]


def test_ranks_are_those_of_a_slow_bootstrap(made):
    _, _, found = made
    rows, chance = outcomes(), random.Random(1)
    arms = [a for a in SKILL if a != "oracle"]
    counts = {}
    for r in rows:
        if r["set"] == "balanced" and r["step"] == 55 and r["weak"]:
            key = (r["arm"], r["seed"], r["scenario"], r["weak"])
            s, n = counts.get(key, (0, 0))
            counts[key] = (s + r["successes"], n + r["trials"])
    places, best = {a: [] for a in arms}, Counter()
    for _ in range(300):
        seeds, where = chance.choices(SEEDS, k=8), chance.choices([f"s{i}" for i in range(8)], k=8)
        mean = {}
        for a in arms:
            of_seed = {}
            for s in set(seeds):
                rates = []
                for tool in "ab":
                    own = [counts[a, s, w, tool] for w in where if (a, s, w, tool) in counts]
                    rates += [sum(x for x, _ in own) / sum(n for _, n in own)] if own else []
                of_seed[s] = statistics.fmean(rates)
            mean[a] = statistics.fmean(of_seed[s] for s in seeds)
        order = sorted(arms, key=lambda a: -mean[a])
        best[order[0]] += 1
        for a in arms:
            places[a].append(order.index(a) + 1)
    assert found["oracle"]["rank_lo"] == found["oracle"]["p_best"] == ""  # a reference
    for a in arms:
        own = sorted(places[a])
        assert abs(int(found[a]["rank_lo"]) - own[7]) <= 1 and abs(int(found[a]["rank_hi"]) - own[-8]) <= 1
        assert float(found[a]["p_best"]) == pytest.approx(best[a] / 300, abs=0.08)
    assert (found["my.good"]["rank_lo"], found["my.good"]["rank_hi"]) == ("1", "1")
    assert "a" in found["my.good"]["letters"] and not set("a") & set(found["my.none"]["letters"])


def test_the_page_has_the_table_its_caveats_and_all_systems(made):
    home, page, found = made
    lines = page.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| rank |"))
    names = [line.split("|")[2].strip().strip("`") for line in lines[start + 2 : start + 2 + len(SKILL)]]
    assert names == list(found)
    good = found["my.good"]
    points = [f"{100 * float(good[key]):+.1f}" for key in ("diff_random", "lo", "hi")]
    shown = f"{points[0]} ({points[1]} to {points[2]})"
    assert f"| 1 | `my.good` |  | {100 * float(good['mean']):.1f} | {shown} |" in page
    assert "planned methods" not in page and "\\*" not in page and "Ranks and P(best) are" not in page
    assert (
        "Budget: 7,040 training rollouts a run. 8 seeds (200, 201, " in page
        and "8 rollouts per held-out" in page
    )
    assert "6 degrees" not in page and "(42 degrees of freedom)" in page
    (row,) = [line for line in lines if line.startswith("| 1 | `my.good`")]
    assert (
        row.endswith("% |")
        and "* `my.good`: its module was not read; --modules names those that are" in lines
    )
    assert "From the bundle theirs (digest dddddddddddd): `my.good`. That its numbers were really run" in page
    assert "Methods of the literature with a row to come: agent_world, ttcs, " in page
    listed = [line for line in lines if line.startswith("* **")]
    assert len(listed) == 61 and all(any(f" {v}: " in x for v in ("In", "Part", "Out")) for x in listed)
    values = table(outcomes())["my.none"]
    assert f"| `my.none` | {' | '.join(f'{100 * v:.1f}' for v in values)} |" in lines

    root = ET.parse(home / "results" / "leaderboard" / "bfcl.svg").getroot()
    of = lambda tag: root.findall(f"{{http://www.w3.org/2000/svg}}{tag}")
    dots = [float(c.get("cx")) for c in of("circle")]
    ticks = [(float(t.get("x")), float(t.text[:-1]) / 100) for t in of("text") if t.text.endswith("%")]
    (x0, v0), (x1, v1) = ticks[0], ticks[-1]
    value = lambda x: v0 + (x - x0) * (v1 - v0) / (x1 - x0)
    assert [value(x) for x in dots] == pytest.approx([float(r["mean"]) for r in found.values()], abs=1e-3)
    dashed = [value(float(line.get("x1"))) for line in of("line") if line.get("stroke-dasharray")]
    assert dashed == pytest.approx(
        [float(found[a]["mean"]) for a in ("random", "random_probe", "oracle")], abs=1e-3
    )
    spans = [
        (value(float(s.get("x1"))), value(float(s.get("x2"))))
        for s in of("line")
        if s.get("stroke-width") == "2"
    ]
    base = float(found["random"]["mean"])
    wanted = [(base + float(r["lo"]), base + float(r["hi"])) for r in found.values() if r["lo"]]
    assert [x for s in spans for x in s] == pytest.approx([x for w in wanted for x in w], abs=1e-3)


def test_what_a_plan_says_is_never_markup(tmp_path):
    """A plan, and what names commits in cells.csv, may come from the bundle of others."""
    evil = "<img src=x onerror=alert(1)> [a](javascript:alert(1))"
    later = [{"date": evil, "what": evil, "arms": [], "command": "c"}]
    source = folder(
        tmp_path / "runs", date=evil, commit=evil, reads=evil, extended=later, arms=[*SKILL, evil]
    )
    board = board_of(source)
    board.testbed.costs[0]["commit"] = f"{evil}-dirty"
    page = leaderboard_page.page([leaderboard.board(board.testbed)], [])
    assert page.count("&lt;img src=x onerror=alert(1)&gt; &#91;a](javascript") == 7
    assert "<img" not in page and "[a](java" not in page


def test_arms_with_missing_and_diverged_seeds_are_adjusted_and_named(tmp_path):
    lacking = {("my.none", 200), ("my.none", 201), ("my.little", 203)}
    source = folder(
        tmp_path / "runs", lacking, diverged={("my.little", 203)}, arms=[*plan()["arms"], "blame"]
    )
    board = leaderboard.board(testbed.load("bfcl", [source]))
    values = {a: {s: macro(a, s, outcomes()) for s in SEEDS if (a, s) not in lacking} for a in SKILL}
    arm, seed = dict.fromkeys(values, 0.0), dict.fromkeys(SEEDS, 0.0)
    for _ in range(3000):  # least squares by alternating means
        arm = {a: statistics.fmean(x - seed[s] for s, x in own.items()) for a, own in values.items()}
        seed = {s: statistics.fmean(own[s] - arm[a] for a, own in values.items() if s in own) for s in seed}
    level = statistics.fmean(seed.values())
    found = {r["method"]: r for r in board.rows}
    assert {a: r["mean"] for a, r in found.items()} == {a: pytest.approx(arm[a] + level) for a in values}
    assert {a: r["seeds"] for a, r in found.items()} == {a: len(own) for a, own in values.items()}
    plain = {a: pytest.approx(statistics.fmean(own.values())) for a, own in values.items()}
    assert {a: r["mean_raw"] for a, r in found.items()} == plain
    assert board.df == 53 - 7 - 7 and found["my.none"]["rank_lo"] >= 3
    assert board.said[:3] == [
        "my.little diverged in seeds 203, which its mean leaves out.",
        "my.none: 6 of 8 seeds were run; missing: 200, 201.",
        "Means are adjusted for the seeds that an arm lacks.",
    ]
    assert "Planned and not run yet: blame." in board.said
    assert not any("a guess" in line for line in board.said)
    text = leaderboard_page.page([board], leaderboard.systems())
    assert f"| `my.none` |  |  | {100 * values['my.none'][202]:.1f} |" in text
    (row,) = [line for line in text.splitlines() if "| `my.none` | " in line and "control" not in line][:1]
    assert f"| {100 * found['my.none']['mean']:.1f}\\* |" in row and "Means with \\* are adjusted for" in text
    assert text.count("\\* |") == 2  # of the two that lack seeds


def test_folders_of_one_plan_are_read_together_and_the_first_stands(tmp_path):
    a, b = folder(tmp_path / "a", lacking={(n, s) for n in SKILL for s in (206, 207)}), folder(tmp_path / "b")
    both = testbed.load("bfcl", [a, b])
    assert len(both.costs) == 7 * 8 and len(both.rows) == len(outcomes())
    last = both.plan["joined"][-1]
    assert (last["bundle"], len(last["cells"]), last["repeated"], last["alike"]) == ("b", 14, 42, 42)
    (line,) = [
        x for x in leaderboard_page.page([leaderboard.board(both)], []).splitlines() if "* From b:" in x
    ]
    assert "`random`" in line and "really run cannot be checked" in line and "Of 42 cells" in line
    text = (b / "outcomes.csv").read_text()
    first, *lines = text.splitlines()
    spoilt = [x.replace(",8,8", ",7,8") if x.startswith("my.good,203,balanced,test,55") else x for x in lines]
    assert spoilt != lines
    (b / "outcomes.csv").write_text("\n".join([first, *spoilt]) + "\n")
    with pytest.raises(ValueError, match="b: my.good, seed 203, has other counts than the cell of that name"):
        testbed.load("bfcl", [a, b])
    (b / "outcomes.csv").write_text(text)
    assert leaderboard.board(both).rows == leaderboard.board(testbed.load("bfcl", [b])).rows
    other = plan()
    other["config"]["learner"]["kl_coef"] = 0.5
    (b / "plan.json").write_text(json.dumps(other))
    with pytest.raises(
        ValueError, match="b is of another plan than .*a .config.learner.kl_coef is 0.5 there"
    ):
        testbed.load("bfcl", [a, b])
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ValueError, match="empty holds neither a comparison's tables nor a bundle: run python .*compare"
    ):
        testbed.load("bfcl", [tmp_path / "empty"])
    without = folder(tmp_path / "c", lacking={("random", s) for s in SEEDS})
    with pytest.raises(
        ValueError, match="bfcl has no finished run of random, which all are compared with: run it"
    ):
        leaderboard.board(testbed.load("bfcl", [without]))


def test_published_numbers_give_their_published_differences():
    source = ROOT / "docs" / "notes" / "headroom" / "test"
    board = leaderboard.board(testbed.load("bfcl", [source]))
    found = {r["method"]: r for r in board.rows}
    told = json.loads((source / "comparison.json").read_text())
    assert {e["arm"]: e["mean"] for e in told["arms"]} == {
        a: pytest.approx(r["mean"]) for a, r in found.items()
    }
    (d,) = [d for d in told["planned"] if (d["a"], d["b"]) == ("coevolve", "random")]
    assert (
        found["coevolve"]["diff_random"] == pytest.approx(d["difference"])
        and found["coevolve"]["lo"] < d["low"]
    )


FIRST_PAGE = {
    "no new tasks": "static",
    "the paper's signals": "coevolve",
    "`blame`": "blame",
    "`frontier`": "frontier",
    "a probe": "random_probe",
    "an oracle": "oracle",
}


def test_pages_tell_the_differences_of_the_published_table():
    with open(ROOT / "docs" / "results" / "leaderboard" / "leaderboard.csv") as file:
        rows = {row["method"]: row for row in csv.DictReader(file) if row["diff_random"]}

    def told(method: str) -> str:
        mean, low, high = (100 * float(rows[method][key]) for key in ("diff_random", "lo", "hi"))
        return f"{mean:+.1f} ({low:.1f} to {high:.1f})"

    page = (ROOT / "README.md").read_text()
    for opening, method in FIRST_PAGE.items():
        (row,) = re.findall(rf"^\| {re.escape(opening)}.*$", page, re.M)
        assert row.split("|")[2].strip(" *") == told(method)
    page = (ROOT / "docs" / "notes" / "results.md").read_text()
    for what, method in (("`blame`", "blame"), ("the signals", "coevolve"), ("the oracle", "oracle")):
        assert f"{what} {told(method)}" in page


@pytest.mark.nightly
def test_the_published_page_is_what_its_command_writes(tmp_path):
    """The command stands in docs/notes/arena.md. So each published cell passes the checks of bundles."""
    published = ROOT / "docs" / "results"
    source = testbed.load("bfcl", [published / "bundles" / "bfcl"])
    leaderboard_page.write([leaderboard.board(source)], tmp_path)
    for name in ("leaderboard.md", "leaderboard/bfcl.svg", "leaderboard/leaderboard.csv"):
        assert (tmp_path / name).read_bytes() == (published / name).read_bytes(), name


@pytest.mark.parametrize(
    "told, mark, sentence",
    [
        (("P", "Operators are ours."), "P", "Operators are ours."),
        (["F/P", "Text is not trained."], "F/P", "Text is not trained."),
        ("F: all of it.", "F", "all of it."),
        ("N without a model", "N", "without a model"),
        (None, "?", "its module does not say"),
    ],
)
def test_a_method_says_itself_how_faithful_it_is(monkeypatch, told, mark, sentence):
    module = types.ModuleType("their.method")
    module.__dict__["FIDELITY"] = told
    monkeypatch.setitem(sys.modules, "their", types.ModuleType("their"))
    monkeypatch.setitem(sys.modules, "their.method", module)
    assert leaderboard.fidelity("their.method+steps=3", ["their.method"]) == (mark, sentence)


def test_no_bundle_chooses_a_module_that_is_imported(tmp_path, monkeypatch):
    (tmp_path / "their_side_effect.py").write_text('FIDELITY = "F: all of it."')
    monkeypatch.syspath_prepend(tmp_path)
    why = "its module was not read; --modules names those that are"
    assert leaderboard.fidelity("their_side_effect.x") == ("", why)
    assert "their_side_effect" not in sys.modules
    assert leaderboard.fidelity("not.there", ["not.there"]) == ("?", "its module is not installed here")


def test_each_system_has_a_verdict_and_a_reason():
    found = leaderboard.systems()
    assert Counter(s.verdict for s in found) == {"in": 31, "part": 15, "out": 15}
    assert len({s.name for s in found}) == 61 and all(s.what.endswith(".") and s.why for s in found)
    assert all((s.arm == "") or s.arm.isidentifier() for s in found) and sum(bool(s.arm) for s in found) == 18


@pytest.mark.slow
def test_the_program_writes_the_page_and_refuses_in_a_sentence(made, tmp_path, environ):
    home, page, _ = made
    script = ROOT / "experiments" / "leaderboard.py"
    done = forked.run([script, f"--testbed=bfcl={home / 'runs'}", f"--out={tmp_path / 'out'}"], environ)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "leaderboard.md").read_text() == page
    (file := tmp_path / "file").write_text("")
    for flags, why in (
        ([f"--testbed=a={home / 'runs'}", f"--out={file / 'x'}"], f"lies below {file}, which is a file"),
        (["--out=x"], "Give --testbed and --out"),
        (["--testbed=runs/x", "--out=x"], "is no new NAME=FOLDER"),
        ([f"--testbed=a={tmp_path}", "--out=x"], "holds neither a comparison's tables nor a bundle"),
    ):
        done = forked.run([script, *flags], environ)
        assert done.returncode == 1 and "Traceback" not in done.stderr and why in done.stderr


def spoilt(path, arm, change, lacking=(), diverged=(), **changes):
    """A folder in which `change` has altered the rows of an arm's last evaluation."""
    made = folder(path, lacking, diverged, **changes)
    rows = outcomes(lacking)
    for row in rows:
        if row["arm"] == arm and row["step"] == 55:
            change(row)
    with open(made / "outcomes.csv", "w", newline="") as f:
        writer = csv.DictWriter(f, results.OUTCOMES)
        writer.writeheader()
        writer.writerows(rows)
    return made


def board_of(path):
    return leaderboard.board(testbed.load("bfcl", [path]))


def test_lost_failures_raise_no_arm_unseen(tmp_path):
    """Most failures of my.none are lost, so its mean rises: the page says so, and no second test is made."""

    def lose(row):
        row["trials"] -= int(0.8 * (row["trials"] - row["successes"]))

    board = board_of(spoilt(tmp_path / "lost", "my.none", lose))
    row = next(r for r in board.rows if r["method"] == "my.none")
    assert row["lo"] > 0 and row["diff_probe"] is None
    (line,) = [line for line in board.said if line.startswith("my.none lost")]
    true = [macro("my.none", s, outcomes()) for s in SEEDS]
    assert f"its mean is {100 * statistics.fmean(true):.1f}," in line


def test_diverged_runs_stand_as_0_beside_the_mean_of_the_others(tmp_path):
    gone = {("my.good", s) for s in (204, 205, 206, 207)}
    board = board_of(folder(tmp_path / "runs", gone, gone))
    row = next(r for r in board.rows if r["method"] == "my.good")
    assert row["mean"] > 0.6 and row["diff_probe"] is None
    (line,) = [line for line in board.said if line.startswith("my.good lost 0.0%")]
    left = sum(macro("my.good", s, outcomes()) for s in range(200, 204)) / 8
    assert f"its mean is {100 * left:.1f}," in line


def test_an_arm_with_few_seeds_has_no_rank_and_sets_no_floor_to_the_p_of_others(tmp_path):
    few = {("my.little", s) for s in range(203, 208)}
    board = board_of(folder(tmp_path / "runs", few))
    found = {r["method"]: r for r in board.rows}
    left_out = "Ranks and P(best) are without arms of fewer than 5 seeds: `my.little` (3)."
    assert left_out in leaderboard_page.page([board], [])
    assert found["my.little"]["rank_lo"] is None and found["my.little"]["p_best"] is None
    assert found["my.little"]["lo"] is not None  # Dunnett's alone, from three seeds on
    assert any("With fewer than 5 seeds" in line for line in board_of(tmp_path / "runs").said)
    assert found["my.good"]["p"] < 0.05 and found["my.good"]["lo"] > 0
    assert found["my.good"]["rank_lo"] == 1


def test_a_run_without_a_valid_trial_and_an_arm_without_a_common_seed_stop_no_board(tmp_path):
    def empty(row):
        if row["seed"] == 203:
            row["successes"] = row["trials"] = 0

    assert {r["method"] for r in board_of(spoilt(tmp_path / "a", "my.none", empty)).rows} == set(SKILL)
    lacking = {("my.little", s) for s in range(200, 207)} | {("random", 207)}
    board = board_of(folder(tmp_path / "b", lacking))
    assert "my.little" not in {r["method"] for r in board.rows}
    assert "my.little shares no seed with random and stands in no table." in board.said
    lacking |= {(arm, 207) for arm in SKILL if arm != "my.little"}  # it shares none with any arm
    assert {r["method"] for r in board_of(folder(tmp_path / "c", lacking)).rows} == set(SKILL) - {"my.little"}


def test_flips_that_make_differences_alike_give_no_interval_and_no_crash():
    values = {"random": dict.fromkeys(range(8), 0.5), "my.m": {s: 0.51 + 0.02 * (s % 2) for s in range(8)}}
    values["my.n"] = {s: 0.5 + 0.01 * s for s in range(8)}
    for contrast in many_to_one.max_t(values, ["my.m", "my.n"], "random"):
        assert contrast.low is None or np.isfinite([contrast.low, contrast.high]).all()


def test_headroom_needs_an_oracle_that_gains(tmp_path):
    def weaken(row):
        row["successes"] = min(row["successes"], row["trials"] // 2)

    assert all(r["headroom_share"] is None for r in board_of(spoilt(tmp_path / "a", "oracle", weaken)).rows)
    assert all(r["headroom_share"] is not None for r in board_of(folder(tmp_path / "b")).rows)


def test_runs_of_a_seed_with_other_tasks_are_refused(tmp_path):
    made = folder(tmp_path / "runs")
    text = (made / "cells.csv").read_text().splitlines()
    rows = list(csv.DictReader(text))
    for row in rows:
        row["initial_digest"] = "aa" if row["arm"] != "my.good" else "bb"
    with open(made / "cells.csv", "w", newline="") as f:
        writer = csv.DictWriter(f, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    with pytest.raises(ValueError, match="my.good, seed 200, has other tasks .initial_digest bb"):
        testbed.load("bfcl", [made])


def rewritten(path, change):
    """Changes the rows of a table of a folder."""
    rows = list(csv.DictReader(path.read_text().splitlines()))
    rows = [row for row in rows if change(row) is not False]
    with open(path, "w", newline="") as f:
        writer = csv.DictWriter(f, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_runs_of_another_base_policy_are_refused_and_one_that_does_not_tell_is_taken(tmp_path):
    made = folder(tmp_path / "runs")
    digest = {"random": "", "my.good": "beef"}
    rewritten(made / "cells.csv", lambda row: row.update(model_digest=digest.get(row["arm"], "beef")))
    testbed.load("bfcl", [made])
    rewritten(
        made / "cells.csv", lambda row: row["arm"] == "my.good" and row.update(model_digest="dead") or None
    )
    with pytest.raises(ValueError, match="my.good, seed 200, has another base policy .model_digest dead"):
        testbed.load("bfcl", [made])


def test_a_table_that_lacks_rows_is_refused(tmp_path):
    made, asked = folder(tmp_path / "runs"), Counter()
    rows = results.read_csv(made / "outcomes.csv")
    for row in rows:
        asked[row["arm"], row["seed"]] += (row["set"], row["step"]) == ("balanced", "55")
    rewritten(made / "outcomes.csv", lambda row: row.update(samples=2))
    rewritten(
        made / "cells.csv",
        lambda row: row.update(balanced_trials_asked=2.0 * asked[row["arm"], row["seed"]]),
    )
    testbed.load("bfcl", [made])
    rows = results.read_csv(made / "outcomes.csv")
    last = [row for row in rows if (row["set"], row["step"]) == ("balanced", "55")][-1]
    gone = lambda row: row != last
    rewritten(made / "outcomes.csv", gone)
    told = rf"outcomes.csv has \d+ trials of {re.escape(last['arm'])}, seed {last['seed']} .balanced."
    with pytest.raises(ValueError, match=told):
        testbed.load("bfcl", [made])


def test_arms_that_were_added_later_have_their_own_commit_and_are_named(tmp_path):
    entry = {"what": "arms random_probe", "arms": ["random_probe"], "date": "2026-12-20", "commit": "later"}
    board = board_of(folder(tmp_path / "runs", extended=[entry]))
    found = {r["method"]: r["commit"] for r in board.rows}
    assert (found["random_probe"], found["random"]) == ("later", "c0ffee")
    assert "Added after the run began, on 2026-12-20: arms random_probe." in board.said


def test_a_family_that_has_not_run_is_told_beside_the_first_p(tmp_path):
    asked = [*plan()["arms"], "my.good", "my.later", "coevolve"]
    lines = leaderboard_page.page([board_of(folder(tmp_path / "runs", arms=asked))], []).splitlines()
    end = next(i for i, line in enumerate(lines) if line.startswith("| rank |")) + len(SKILL) + 2
    said = "**1 of 3 planned methods has run; intervals and p widen as the others come.**"
    assert lines[end : end + 2] == ["", said]


def test_what_sixteen_methods_worth_nothing_would_do_to_the_one_that_ran():
    """The figures of docs/notes/headroom.md, from the ten seeds of 2026-11-28."""
    free = [66.4, 61.2, 68.3, 62.1, 62.9, 64.4, 63.2, 63.1, 63.8, 60.8]
    signals = [68.0, 66.4, 65.4, 69.8, 65.9, 69.8, 71.2, 69.6, 65.7, 69.4]
    ran = {"random": dict(enumerate(free)), "coevolve": dict(enumerate(signals))}
    (alone,) = many_to_one.max_t(ran, ["coevolve"], "random")
    assert [round(x, 3) for x in (alone.low, alone.high, alone.p)] == [1.957, 7.043, 0.008]
    rng, drawn = np.random.default_rng(0), []
    for _ in range(100):
        nothing = {f"n{i}": dict(enumerate(rng.normal(np.mean(free), 2.1, 10))) for i in range(16)}
        drawn.append(many_to_one.max_t({**ran, **nothing}, ["coevolve", *nothing], "random")[0])
    quartiles = lambda key: np.quantile([getattr(c, key) for c in drawn], [0.25, 0.5, 0.75])
    assert quartiles("p") == pytest.approx([0.044, 0.051, 0.055], abs=0.004)
    assert [quartiles(key)[1] for key in ("low", "high")] == pytest.approx([0.1, 8.9], abs=0.06)


def test_a_method_passes_by_its_interval_and_its_p(tmp_path):
    """Six seeds in which the interval lies above 0 and p is 4 of 64 sign vectors."""
    values = {
        "random": [627, 636, 627, 594, 638, 629], "my.x": [644, 667, 662, 661, 656, 666],
        "my.y": [605, 617, 610, 632, 621, 614], "random_probe": [640, 650, 645, 620, 648, 642],
    }  # fmt: skip
    where = {"set": "balanced", "split": "test", "step": 55, "task": "t", "scenario": "s", "weak": "a"}
    rows = [
        {**where, "arm": arm, "seed": seed, "calls": "a", "successes": n, "trials": 1000, "samples": 1000}
        for arm, own in values.items()
        for seed, n in enumerate(own)
    ]
    costs = [{"arm": r["arm"], "seed": r["seed"], "diverged": None} for r in rows]
    board = leaderboard.board(testbed.Testbed("t", plan(joined=[], arms=[]), rows, costs))
    row = next(r for r in board.rows if r["method"] == "my.x")
    assert row["lo"] > 0 and row["p"] == 0.0625 and row["diff_probe"] is None


def test_five_seeds_are_enough_for_a_rank_and_equal_bests_share_the_point():
    values = {"random": [62, 63, 60, 64, 61], "my.x": [70, 72, 69, 74, 71], "static": [5, 9, 7, 8, 6]}
    where = {"set": "balanced", "split": "test", "step": 55, "task": "t", "scenario": "s", "weak": "a"}
    rows = [
        {**where, "arm": arm, "seed": seed, "calls": "a", "successes": n, "trials": 100, "samples": 100}
        for arm, own in {**values, "my.y": values["my.x"]}.items()
        for seed, n in enumerate(own)
    ]
    costs = [{"arm": r["arm"], "seed": r["seed"], "diverged": None} for r in rows]
    board = leaderboard.board(testbed.Testbed("t", plan(joined=[], arms=[]), rows, costs))
    found = {r["method"]: (r["rank_lo"], r["rank_hi"], r["p_best"]) for r in board.rows}
    assert found == {"my.x": (1, 1, 0.5), "my.y": (1, 1, 0.5), "random": (3, 3, 0), "static": (4, 4, 0)}


def bed(values, trials=100, **more):
    """A testbed with one row for each arm, seed and place. values: (arm, seed) -> [(row, successes)]."""
    where = {"split": "test", "step": 55, "calls": "a"}
    rows = [
        {**where, "arm": arm, "seed": seed, "trials": trials, "samples": trials, "successes": n, **row}
        for (arm, seed), own in values.items()
        for row, n in own
    ]
    costs = [{"arm": arm, "seed": seed, "diverged": None} for arm, seed in values]
    return testbed.Testbed("t", plan(joined=[], arms=[]), rows, costs)


def test_resampled_scenarios_without_a_task_of_the_measure_are_left_out_of_ranks():
    """Two of eight scenarios have a task with a weak tool, so a tenth of all samples has none."""
    row = lambda i: {"set": "balanced", "task": f"t{i}", "scenario": f"s{i}", "weak": "a" if i < 2 else ""}
    values = {
        (arm, seed): [(row(i), skill + seed) for i in range(8)]
        for arm, skill in (("random", 40), ("my.x", 60), ("my.y", 50))
        for seed in range(5)
    }
    found = {r["method"]: r for r in leaderboard.board(bed(values)).rows}
    ranks = {a: (r["rank_lo"], r["rank_hi"], r["p_best"]) for a, r in found.items()}
    assert ranks == {"my.x": (1, 1, 1.0), "my.y": (2, 2, 0.0), "random": (3, 3, 0.0)}


def test_a_second_measure_is_told_of_arms_that_share_a_seed_with_random_in_it():
    """In the second set random lost seed 0 and my.x seed 1; my.y has both."""
    row = lambda name: {"set": name, "task": "t", "scenario": "s", "weak": "a"}
    lost = lambda name: {**row(name), "trials": 0, "successes": 0}
    gone = {("random", 0), ("my.x", 1)}
    values = {
        (arm, seed): [
            (row("balanced"), 50 + k + 3 * seed),
            (lost("iid") if (arm, seed) in gone else row("iid"), 40 + k + seed),
        ]
        for k, arm in enumerate(("random", "my.x", "my.y"))
        for seed in (0, 1)
    }
    told = {r["method"]: r["iid"] is not None for r in leaderboard.board(bed(values)).rows}
    assert told == {"random": True, "my.x": False, "my.y": True}
    without = {key: own for key, own in values.items() if key[0] != "my.y"}
    board = leaderboard.board(bed(without))
    assert {r["method"]: r["iid"] for r in board.rows} == {"random": pytest.approx(0.41), "my.x": None}
    assert "| `my.x` |" in leaderboard_page.page([board], [])


def test_more_rollouts_than_the_budget_and_cells_of_several_commits_are_told(tmp_path):
    bed = testbed.load("bfcl", [folder(tmp_path / "runs")])
    cost = lambda r: {"rollouts": 7800 if (r["arm"], int(r["seed"])) == ("my.good", 203) else 7100}
    commit = lambda r: {
        "commit": f"{'ab12' * 10}-dirty" if r["arm"] == "random" else "cd34" * 10,
        "date": "d",
    }
    board = leaderboard.board(bed._replace(costs=[{**r, **cost(r), **commit(r)} for r in bed.costs]))
    (said,) = [line for line in board.said if "rollouts in a run" in line]
    assert said == "my.good spent up to 7,800 rollouts in a run, 11% above the budget."
    others = ", ".join(a for a in SKILL if a != "random")
    (told,) = [line for line in board.said if line.startswith("Cells by commit")]
    assert f"cd34cd3 (48: {others})" in told and "ab12ab1-dirty (8: random)" in told
    assert told.endswith('Files differed from a commit that is "-dirty".')
    page = leaderboard_page.page([board], [])
    costs = page.split("### Costs")[1].splitlines()
    assert costs[2].startswith("| method | updates | rollouts | of batches | of probes |")
    assert any(line.startswith("| `my.good` | 51 | 7,188 | 6,796 |") for line in costs)
    assert any(told in n for n in notes.notes(plan(), board.testbed.costs, []))


def test_runs_that_tell_their_commit_and_date_are_believed_before_the_plan(tmp_path):
    bed = testbed.load("bfcl", [folder(tmp_path / "runs")])
    told = lambda r: ("one+two", "2026-12-02") if int(r["seed"]) == 203 else ("one", "2026-12-01")
    names = ("commit", "date")
    costs = [{**r, **dict(zip(names, told(r)))} if r["arm"] == "my.good" else r for r in bed.costs]
    found = {r["method"]: (r["commit"], r["date"]) for r in leaderboard.board(bed._replace(costs=costs)).rows}
    assert found["my.good"] == ("one+two", "2026-12-01 to 2026-12-02")
    assert found["random"] == ("c0ffee", bed.plan["date"])
