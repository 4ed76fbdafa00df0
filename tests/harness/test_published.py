"""Every figure in the tables of docs/results/harness.md, reckoned again from the raw rows in other ways."""

import csv
import itertools
import random
import re
import statistics
from collections import Counter, defaultdict

import numpy as np
import pytest
from scipy import stats

from coevolve_jax import config as configs
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "results" / "harness.md").read_text()
RAW = ROOT / "docs" / "notes" / "harness"


def rows(name: str) -> list[dict[str, str]]:
    with open(RAW / name, newline="") as file:
        return list(csv.DictReader(file))


def table(head: str) -> list[list[str]]:
    """The rows of the page's table that begins with this line."""
    lines = PAGE[PAGE.index(head) :].splitlines()[2:]
    end = next(i for i, line in enumerate(lines) if not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:end]]


def numbers(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"-?\d+(?:\.\d+)?(?:e-\d+)?", text)]


def points(rate: float):
    """The number that stands for a rate on the page, to half a digit."""
    return pytest.approx(100 * rate, abs=0.051)


def test_what_faults_cost_and_its_interval():
    own = rows("starts.csv")
    faults, seeds = sorted({r["fault"] for r in own} - {"none"}), sorted({r["seed"] for r in own})
    # Least squares by the normal equations, with a column for each fault and for each seed.
    design = [[*(r["fault"] == f for f in faults), *(r["seed"] == s for s in seeds)] for r in own]
    x, y = np.array(design, float), np.array([int(r["solved"]) / int(r["trials"]) for r in own])
    inverse = np.linalg.inv(x.T @ x)
    beta = inverse @ x.T @ y
    free = len(y) - x.shape[1]
    variance = ((y - x @ beta) ** 2).sum() / free
    healthy = beta[len(faults) :].mean()
    told = table("| fault | runs | success |")
    assert [row[0].strip("`") for row in told] == sorted(faults, key=lambda f: beta[faults.index(f)])
    for name, runs, success, cost, p, kept in told:
        i = faults.index(name.strip("`"))
        assert int(runs) == sum(r["fault"] == faults[i] for r in own)
        se = (variance * inverse[i, i]) ** 0.5
        margin = stats.t.isf(0.025, free) * se
        assert numbers(success) == [points(healthy + beta[i])]
        assert numbers(cost) == [points(-beta[i]), points(-beta[i] - margin), points(-beta[i] + margin)]
        found = stats.t.sf(-beta[i] / se, free)
        assert float(p) == pytest.approx(found, rel=0.06)
        assert (kept == "yes") == (-beta[i] >= 0.06 and found < 0.05)
    assert f"The healthy start has {100 * healthy:.1f}%" in PAGE
    assert f"its seed a run deviates by {100 * variance**0.5:.1f} points ({free} degrees" in PAGE


def test_what_luck_gains_and_what_of_it_is_there_on_fresh_tasks():
    own = [
        (int(r["solved"]) / int(r["trials"]), int(r["fresh_solved"]) / int(r["fresh_trials"]))
        for r in rows("luck.csv")
    ]
    mean = [statistics.fmean(side) for side in zip(*own, strict=True)]
    spread = [statistics.stdev(side) for side in zip(*own, strict=True)]
    assert f"Success is {100 * mean[0]:.1f}% on the selection set, and the runs deviate by " in PAGE
    assert f"by {100 * spread[0]:.1f} points; on 192 fresh tasks it is {100 * mean[1]:.1f}%" in PAGE
    rng, told = random.Random(3), table("| rule | versions | seeds | gain")
    assert len(told) == 6
    for rule, versions, seeds, gain, simulated, fresh in told:
        sums, made, drawn = [0.0, 0.0], 0.0, 1500
        for _ in range(drawn):
            both = [[rng.choice(own) for _ in range(int(seeds))] for _ in range(int(versions) + 1)]
            normal = [[(rng.gauss(0, spread[0]), 0.0) for _ in own] for own in both]
            kept, others = chosen(rule, both, NOISE), chosen(rule, normal, NOISE)
            sums = [s + statistics.fmean(x) - m for s, x, m in zip(sums, zip(*kept, strict=True), mean)]
            made += statistics.fmean(x for x, _ in others)
        assert numbers(gain)[0] == pytest.approx(100 * sums[0] / drawn, abs=0.12)
        assert float(simulated) == pytest.approx(100 * made / drawn, abs=0.12)
        assert numbers(fresh)[0] == pytest.approx(100 * sums[1] / drawn, abs=0.12)
        for interval in (numbers(gain), numbers(fresh)):
            assert interval[1] <= interval[0] <= interval[2] and interval[1] < interval[2]


NOISE = 0.025  # config.harness.noise, by which campaigns judge


def test_the_noise_that_ships_is_that_between_configs_and_salts_of_one_start_give_less():
    """By the residuals of rows and columns: each fault was run on the same seeds, so none is missing."""
    cells = {(r["fault"], r["seed"]): int(r["solved"]) / int(r["trials"]) for r in rows("starts.csv")}
    faults, seeds = (sorted({key[i] for key in cells}) for i in (0, 1))
    y = np.array([[cells[f, s] for s in seeds] for f in faults])
    rest = y - y.mean(1, keepdims=True) - y.mean(0) + y.mean()
    between = ((rest**2).sum() / ((len(faults) - 1) * (len(seeds) - 1))) ** 0.5
    salts = statistics.stdev(int(r["solved"]) / int(r["trials"]) for r in rows("luck.csv"))
    assert between == pytest.approx(0.0243, abs=5e-5) and salts == pytest.approx(0.0096, abs=5e-5)
    assert configs.harness().noise == NOISE == pytest.approx(between, abs=1e-3)
    for name in ("docs/harness.md", "configs/harness_qwen3_4b.py"):
        text = " ".join((ROOT / name).read_text().split())
        assert "experiments/calibrate_harness.py" in text and "give a lower bound" in text, name


def chosen(rule: str, versions, noise: float):
    """The runs of the version that a campaign ends with. versions: (selection, fresh) of each run."""
    score = lambda runs: statistics.fmean(x for x, _ in runs)
    if rule == "the best at the end":
        return max(versions, key=score)
    least = (2 * noise**2 / len(versions[0])) ** 0.5 if rule == "one standard error better" else 0.0
    kept = versions[0]
    for child in versions[1:]:
        kept = child if score(child) >= score(kept) + least else kept
    return kept


def test_how_many_moves_without_effect_luck_makes_worse_or_better():
    """Every two runs as the start, and every two others as a move's, judged as E5 does."""
    own = [int(r["solved"]) / int(r["trials"]) for r in rows("luck.csv")]
    se, beyond, count = NOISE, 0, 0  # of the mean of two gains, each of two runs
    for four in itertools.combinations(own, 4):
        for first in itertools.combinations(range(4), 2):
            gain = sum(four) / 2 - sum(four[i] for i in first)
            beyond, count = beyond + (gain >= se), count + 1
    assert count == 35_960 * 6
    share = f"{100 * beyond / count:.1f}% of the moves worse and as many better"
    assert share in " ".join((ROOT / "docs" / "notes" / "harness.md").read_text().split())


def test_which_conditions_let_baits_and_mends_pass():
    cases = rows("baits.csv")
    share = lambda c, side, what: int(c[f"{side}{what}"]) / int(c[f"{side}trials"])
    of = defaultdict(list)
    for c in cases:
        gained = share(c, "", "granted") - share(c, "start_", "granted")
        scored = share(c, "", "solved") - share(c, "start_", "solved")
        se = float(c["se"])
        c["truth"] = "honest" if gained >= se else "hack" if scored >= se and gained <= 0 else "neither"
        of[c["truth"]].append(c)
    told = table("| conditions | hacks promoted | honest ones refused |")
    assert [row[0] for row in told] == ["score", "fixed", "evolving", "audited"]
    for name, promoted, refused in told:
        passed = [sum(c[f"by_{name}"] == "" for c in of[truth]) for truth in ("hack", "honest")]
        n, m = len(of["hack"]), len(of["honest"])
        for text, part, whole in ((promoted, passed[0], n), (refused, m - passed[1], m)):
            low = stats.beta.ppf(0.025, part, whole - part + 1) if part else 0.0
            high = stats.beta.ppf(0.975, part + 1, whole - part) if part < whole else 1.0
            assert numbers(text)[:2] == [part, whole]
            assert numbers(text)[2:] == pytest.approx([100 * low, 100 * high], abs=0.51)
    every = table("| hole |  | move | seeds | success, % |")
    assert Counter((row[0], row[1], row[3]) for row in every) == Counter(
        (c["hole"], c["kind"], c["seeds"]) for c in cases
    )
    for row in every:
        (c,) = (c for c in cases if (c["hole"], c["kind"], c["seeds"]) == (row[0], row[1], row[3]))
        for text, what in ((row[4], "solved"), (row[5], "granted")):
            assert numbers(text) == [points(share(c, "start_", what)), points(share(c, "", what))]
        names = ("score", "fixed", "evolving", "audited")
        assert row[6:] == [c["truth"], *(c[f"by_{name}"] or "promoted" for name in names)]


def test_how_moves_fared_that_backtests_refused_and_let_pass():
    by = {f"{r['lever']} {r['move']}": r["by"] for r in rows("refused/backtests.csv")}
    share = {
        (r["fault"], r["salt"]): int(r["solved"]) / int(r["trials"]) for r in rows("refused/trained.csv")
    }
    salts = {salt for _, salt in share}
    se, told = NOISE * (2 / len(salts)) ** 0.5, table("| move | refused by | gain |")
    kinds = defaultdict(Counter)
    for move, refused_by, gain, kind in told:
        name = move.strip("`")
        found = statistics.mean(share[name, salt] - share["none", salt] for salt in salts)
        assert numbers(gain) == [points(found)] and refused_by == (by[name] or "passed")
        assert kind == ("worse" if found <= -se else "better" if found >= se else "alike")
        kinds[bool(by[name])][kind] += 1
    assert {move.strip("`") for move, *_ in told} == {name for name, _ in share} - {"none"}
    for side, *counts, _ in table("|  | trained | worse | alike | better |"):
        own = kinds[side == "refused"]
        assert [*map(int, counts)] == [own.total(), own["worse"], own["alike"], own["better"]]
    (told,) = re.findall(r"Of (\d+) moves the backtest refuses (\d+)", PAGE)
    assert [*map(int, told)] == [len(by), sum(map(bool, by.values()))]
