"""Comparisons: the plan, the statistics against other code, and real cells that run, fail and resume."""

import csv
import json
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from coevolve_jax.analysis import stats
from coevolve_jax.comparison import cells, notes, plan, plan_file, results, variations
from coevolve_jax.comparison.arms import ARMS, arm
from coevolve_jax.comparison.differences import METRICS, compare
from coevolve_jax.comparison.plan import Cell
from coevolve_jax.comparison.quality import quality
from coevolve_jax.comparison.table import table
from coevolve_jax.config import check, load_file, override, to_json
from tests.support import forked
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

TINY = load_file(ROOT / "configs" / "bfcl_tiny.py")


# The plan


def test_every_arm_is_a_config_that_can_be_run():
    for name in ARMS:
        changes = arm(name).changes
        held = {"evaluation.queries": 96} if changes["strategy.name"] == "ttcs" else {}
        check(override(TINY, {**changes, **held}))
    assert arm("tests.support.strategies.memory").changes == {
        "strategy.name": "tests.support.strategies.memory"
    }
    with pytest.raises(ValueError, match="There is no arm 'hope': use static, .*blame"):
        plan.cells(["hope"], [0])


def test_cells_are_arms_times_settings_times_seeds(tmp_path):
    settings = variations.grid(TINY, ["evolution.every=5,10", "data.sampling=uniform,variance"])
    assert settings[1] == {"evolution.every": 5, "data.sampling": "variance"} and len(settings) == 4
    found = plan.cells(["static", "random"], plan.parse_seeds("3:5"), settings)
    assert len(found) == 16 == len({c.workdir(tmp_path) for c in found})
    assert len({c.start(tmp_path) for c in found}) == 8  # the arms share a start
    assert found[0].column == "static+evolution.every=5+data.sampling=uniform"
    assert plan.cells(["static"], [7]) == [Cell("static", 7)]
    start = plan.start_config(TINY, found[2])
    assert (start.seed, start.strategy.name, start.evolution.every) == (3, "static", 5)
    for arms, seeds in ((["static", "static"], [0]), ([], [0]), (["static"], [])):
        with pytest.raises(ValueError, match="must each name at least one, and none twice"):
            plan.cells(arms, seeds)
    for text, why in (("3:1", "at least one seed"), ("-1", "none below 0"), ("0,0,1", "none twice")):
        with pytest.raises(ValueError, match=why):
            plan.parse_seeds(text)
    for text in ("1-3", "", "a:b"):
        with pytest.raises(ValueError, match="neither a range"):
            plan.parse_seeds(text)
    for text in ("x", "3:1"):
        with pytest.raises(ValueError, match=f"^--final_seeds='{text}' "):
            plan.parse_seeds(text, "final_seeds")
    for text, why in (
        ("learner.nothing=1", "no key"),
        ("steps=many", "cannot be 'many': give a whole number"),
        ("learner=3", "config.learner is a section and cannot be '3'"),
        ("seed=3", "what --seeds varies"),
        ("strategy.name=random", "what --arms varies"),
    ):
        with pytest.raises(ValueError, match=why):
            variations.grid(TINY, [text])
    for text in ("steps=1", "learner.kl_coef=0:1:log", "steps=4:2", "steps=2:4:lgo"):
        with pytest.raises(ValueError, match=f"--search='{text}' is no range"):
            variations.search(TINY, [text], 2, 0)
    assert variations.grid(TINY, ["evolution.every=5,5"]) == [{"evolution.every": 5}]
    assert variations.parse_value(TINY, "learner.pack_length_buckets", "128+256") == (128, 256)
    assert variations.parse_value(TINY, "environment.toolsets", "MessageAPI+TicketAPI") == (
        "MessageAPI",
        "TicketAPI",
    )
    assert (
        Cell("static", 0, (("learner.pack_length_buckets", (128, 256)),)).column
        == "static+learner.pack_length_buckets=128+256"
    )


def test_a_value_has_the_type_of_its_key_and_a_bool_is_a_word():
    values = {"false": False, "FALSE": False, "True": True, "true": True}
    assert {text: variations.parse_value(TINY, "learner.remat", text) for text in values} == values
    for text in ("", "1", "yes"):
        with pytest.raises(ValueError, match=f"config.learner.remat cannot be '{text}': give true or false"):
            variations.parse_value(TINY, "learner.remat", text)


def test_a_key_is_named_once():
    for make in (
        lambda texts: variations.grid(TINY, texts),
        lambda texts: variations.with_values(TINY, texts),
        lambda texts: variations.search(TINY, [f"{text}:9" for text in texts], 2, 0),
    ):
        with pytest.raises(
            ValueError, match=r"names evolution.every twice \('5.*' and '2.*'\): name a key once"
        ):
            make(["evolution.every=5", "evolution.every=2"])


@pytest.mark.parametrize(
    "tools, balanced, metric", [(("cp",), 1, "weak"), (("cp",), 0, "iid"), ((), 8, "iid"), (None, 8, "iid")]
)
def test_weak_tools_are_the_primary_metric_where_held_out_tasks_call_them(tools, balanced, metric):
    config = override(TINY, {"evaluation.balanced_tasks": balanced}).unlock()
    if tools is not None:
        config.testbed = ConfigDict({"weak_tools": tools})
    assert plan.primary(config) == metric


@pytest.mark.parametrize("below", ["", "runs"])
def test_a_workdir_that_cannot_be_made_is_one_sentence(tmp_path, below):
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / below
    assert plan_file.written(folder, {"config": {}}) is None
    with pytest.raises(ValueError, match="file.* cannot be a workdir .*choose another --workdir"):
        plan_file.write(folder, {"config": {}})


def test_cells_of_another_config_are_not_taken_for_this_plans(tmp_path):
    (mine,) = plan.cells(["coevolve"], [0], variations.grid(TINY, ["evolution.every=5"]))
    (other,) = plan.cells(["coevolve"], [0], variations.grid(TINY, ["evaluation.every=5"]))
    assert mine.workdir(tmp_path) != other.workdir(tmp_path)
    mine.workdir(tmp_path).mkdir(parents=True)
    path = mine.workdir(tmp_path) / "config.json"
    path.write_text(to_json(plan.cell_config(TINY, mine)))
    plan.check(tmp_path, TINY, [mine])
    edited = override(
        plan.cell_config(TINY, mine), {"strategy.shuffled": True}
    )  # like an arm that was edited since
    path.write_text(to_json(edited))
    why = "cells/coevolve.*seed_0 holds a run of another config .config.strategy.shuffled is True there"
    with pytest.raises(ValueError, match=why):
        plan.check(tmp_path, TINY, [mine])
    mine.start(tmp_path).mkdir(parents=True)
    path.write_text(to_json(plan.cell_config(TINY, mine)))
    (mine.start(tmp_path) / "config.json").write_text(to_json(plan.start_config(TINY, other)))
    with pytest.raises(ValueError, match="starts/.*config.evaluation.every is 5 there"):
        plan.check(tmp_path, TINY, [mine])


def test_settings_of_a_strategy_reach_the_cells_that_have_them(tmp_path):
    config = override(TINY, {"strategy.probe": 4, "strategy.unsolved": True})
    settled = {
        c.arm: plan.cell_config(config, c).strategy.to_dict()
        for c in plan.cells(["static", "random", "coevolve", "coevolve_probe"], [0])
    }
    assert settled["static"] == {"name": "static"}
    assert settled["random"] == {"name": "random", "scenarios": "train", "probe": 4}
    assert settled["coevolve"]["probe"] == 4 and settled["coevolve"]["unsolved"] is True
    only = override(TINY, {"strategy.signals": "rare"})
    (cell,) = plan.cells(["only_boundary"], [0])
    assert plan.cell_config(only, cell).strategy.signals == "boundary"  # the definition of the arm
    with pytest.raises(ValueError, match="strategy.unsolved is True, which none of the arms random has"):
        plan.check(tmp_path, config, plan.cells(["random"], [0]))
    found = plan.cells(["coevolve"], [0], variations.grid(TINY, ["strategy.probe=0,4"]))
    assert [plan.cell_config(TINY, c).strategy.probe for c in found] == [0, 4]
    assert len({c.start(tmp_path) for c in found}) == 1
    for name in ("static", "coevolve_probe"):
        with pytest.raises(ValueError, match=f"The arm '{name}' sets strategy.probe itself, or has none"):
            plan.check(tmp_path, TINY, plan.cells([name], [0], variations.grid(TINY, ["strategy.probe=0,4"])))


def test_a_search_spreads_over_its_ranges_and_is_seeded():
    texts = ["learner.learning_rate=1e-4:1e-2:log", "evolution.every=2:20"]
    found = variations.search(TINY, texts, 20, seed=1)
    rates = sorted(s["learner.learning_rate"] for s in found)
    assert rates[0] < 2e-4 and rates[-1] > 5e-3 and sum(r < 1e-3 for r in rates) == 10
    assert all(isinstance(s["evolution.every"], int) and 2 <= s["evolution.every"] <= 20 for s in found)
    few = variations.search(TINY, ["evolution.every=2:4"], 8, seed=0)  # rounding makes values equal
    assert sorted(s["evolution.every"] for s in few) == [2, 3, 4]
    assert found == variations.search(TINY, texts, 20, seed=1) != variations.search(TINY, texts, 20, seed=2)


def test_planned_differences_are_of_columns_that_are_there():
    arms = ["random", "static", "oracle"]
    cells = plan.cells(arms, [0])
    assert plan.pairs([], cells) == [("random", "static")]
    assert plan.pairs(["oracle-random"], cells) == [("oracle", "random")]
    for text in ("oracle-randm", "oracle", "oracle-oracle"):
        with pytest.raises(
            ValueError, match=f"--planned='{text}' names no two columns .*: join two of random, static"
        ):
            plan.pairs([text], cells)
    cells = plan.cells(arms, [0, 1], variations.grid(TINY, ["learner.learning_rate=1e-5,3e-5"]))
    low, high = "+learner.learning_rate=1e-05", "+learner.learning_rate=3e-05"
    assert plan.pairs([], cells) == [(f"random{own}", f"static{own}") for own in (low, high)]
    assert plan.pairs(["oracle-static"], cells) == [(f"oracle{own}", f"static{own}") for own in (low, high)]
    assert plan.pairs([f"oracle{low}-oracle{high}"], cells) == [(f"oracle{low}", f"oracle{high}")]


def test_that_nothing_is_tested_is_said():
    budgets = [budget(name, seed) for name in ("static", "oracle") for seed in (0, 1)]
    found = results.summarise(made_up(0.1, 2, ("static", "oracle")), budgets, PLAN)
    assert any("No difference is tested" in n for n in found["notes"])


# Statistics


def test_estimates_against_known_values():
    assert stats.interquartile_mean([0, 1, 2, 3, 4, 5, 6, 100]) == 3.5
    assert stats.probability_of_improvement([3, 4], [1, 3]) == (1 + 0.5 + 1 + 1) / 4
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    # Sample sizes of the two-sided paired t test at 80% power: Cohen (1988), table 2.4.1, and G*Power.
    assert [stats.seeds_needed(1.0, d) for d in (1.0, 0.5, 0.2)] == [10, 34, 199]
    e = stats.over_seeds([1.0, 2.0, 3.0, 4.0, 5.0])  # t(4) quantile 2.7764451
    assert (e.low, e.high) == pytest.approx((3 - 2.7764451 * 0.70710678, 3 + 2.7764451 * 0.70710678))
    # t = 2 / (1 / sqrt(3)) = 3.4641016 with 2 degrees of freedom: P = 1 - t / sqrt(t^2 + 2).
    assert stats.paired_p([1.0, 2.0, 3.0]) == pytest.approx(1 - 3.4641016 / 14**0.5)
    assert all(stats.over_seeds(x).low is None for x in ([0.0, 0.0], [0.1 + 0.2, 0.3], [1.0, 1.0, 1.0]))


def test_what_cannot_be_tested_has_no_p_and_counts_in_its_family():
    for d in ([1 / 192, 1 / 192], [0.1, 0.2], [0.0, 0.0, 0.0], [0.1 + 0.2, 0.3, 0.3]):
        assert stats.paired_p(d) is None, d
    assert stats.holm([0.01, None, 0.03]) == [pytest.approx(0.03), None, pytest.approx(0.06)]
    assert stats.holm([None, None]) == [None, None]


def test_tasks_of_a_scenario_stand_or_fall_together():
    alone = stats.clustered_ratio([1, 0] * 20, [1] * 40)
    alike = stats.clustered_ratio([1] * 20 + [0] * 20, [1] * 40, [i // 10 for i in range(40)])
    assert alone.value == alike.value == 0.5 and alike.high - alike.low > 2 * (alone.high - alone.low)
    one = stats.paired_by_task([0] * 12, [1] * 12)
    few = stats.paired_by_task([0] * 12, [1] * 12, [i // 4 for i in range(12)])
    assert one.p == 2 / 2**12 and few.p == 2 / 2**3 and few.clusters == 3
    assert stats.paired_by_task([1, 0], [1, 0]).p == 1.0


def made_up(effect: float, seeds=8, arms=("static", "random"), scenarios=12, tools=("a", "b")):
    """Rows of outcomes.csv in which the second arm succeeds more often on tasks with weak tools."""
    rng, rows = np.random.default_rng(0), []
    for arm_index, name in enumerate(arms):
        for seed in range(seeds):
            luck = 0.05 * np.random.default_rng(seed).standard_normal()
            for i in range(60):
                weak = tools[i % 3] if i % 3 < len(tools) else ""
                p = 0.5 + luck + 0.1 * ((i % scenarios) / scenarios) + effect * arm_index * bool(weak)
                done = (
                    name,
                    seed,
                    "balanced",
                    "development",
                    40,
                    f"t{i}",
                    f"s{i % scenarios}",
                    f"{weak};x",
                    weak,
                )
                rows.append(dict(zip(results.OUTCOMES, (*done, int(rng.binomial(8, p)), 8))))
    return rows


def by_hand(rows, arm, seed):
    """Computes the macro success on weak tools once more."""
    rates = []
    for tool in "ab":
        own = [r for r in rows if (r["arm"], r["seed"]) == (arm, seed) and tool in r["weak"].split(";")]
        rates.append(sum(r["successes"] for r in own) / sum(r["trials"] for r in own))
    return statistics.fmean(rates)


def test_the_table_is_what_other_code_computes():
    rows = made_up(0.15)
    found = compare(rows, METRICS["weak"], ["static", "random"], [("random", "static")])
    for entry in found["arms"]:
        for seed, value in entry["values"].items():
            assert value == pytest.approx(by_hand(rows, entry["arm"], int(seed)))
    (d,) = found["planned"]
    pairs = [by_hand(rows, "random", s) - by_hand(rows, "static", s) for s in range(8)]
    assert d["difference"] == pytest.approx(statistics.fmean(pairs)) and d["sd"] == pytest.approx(
        statistics.stdev(pairs)
    )
    half = 2.3646243 * statistics.stdev(pairs) / 8**0.5
    assert (d["low"], d["high"]) == pytest.approx((d["difference"] - half, d["difference"] + half))
    assert d["boot_low"] == pytest.approx(slow_bootstrap(rows)[0], abs=0.02)
    assert d["boot_high"] == pytest.approx(slow_bootstrap(rows)[1], abs=0.02)
    assert d["p"] < 0.01 and d["p_holm"] == d["p"] and d["p_improvement"] > 0.9
    others = compare(rows, METRICS["others"], ["static", "random"], [("random", "static")])
    assert abs(others["planned"][0]["difference"]) < 0.05
    assert (
        others["planned"][0]["boot_low"] < 0 < others["planned"][0]["boot_high"]
    )  # some samples hold no such task


def slow_bootstrap(rows, times=400):
    """The 95% interval from resampling both seeds and scenarios."""
    chance, found = random.Random(0), []
    by_cell = {}
    for r in rows:
        for tool in filter(None, r["weak"].split(";")):
            by_cell.setdefault((r["arm"], r["seed"], r["scenario"]), []).append(
                (tool, r["successes"], r["trials"])
            )
    for _ in range(times):
        where, seeds = chance.choices([f"s{i}" for i in range(12)], k=12), chance.choices(range(8), k=8)
        value = {}
        for name in ("random", "static"):
            for seed in set(seeds):
                rates = []
                for tool in "ab":
                    own = [x for s in where for x in by_cell.get((name, seed, s), []) if x[0] == tool]
                    rates += [sum(x[1] for x in own) / sum(x[2] for x in own)] if own else []
                value[name, seed] = statistics.fmean(rates)
        found.append(statistics.fmean(value["random", s] - value["static", s] for s in seeds))
    found.sort()
    return found[int(0.025 * times)], found[int(0.975 * times)]


HEADROOM = ROOT / "docs" / "notes" / "headroom"
SHOWN = ("test", "test_spread", "placebo", "spread_again")  # with intervals; of the pilots the means alone


@pytest.mark.parametrize(
    "name",
    [
        "first", "seldom", "test", "options", "placebo", "spread_again",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("spread", "test_spread")),
    ],
)  # fmt: skip
def test_the_published_table_follows_from_the_published_numbers(name):
    folder = HEADROOM / name
    rows, costs = (results.read_csv(folder / f) for f in ("outcomes.csv.gz", "cells.csv"))
    said, asked = (json.loads((folder / f"{n}.json").read_text()) for n in ("comparison", "plan"))
    again = results.summarise(rows, costs, asked)
    said["notes"] = [n for n in said["notes"] if "cells are not finished" not in n]  # no rows say so
    assert_close(again, {key: value for key, value in said.items() if key != "signals"})
    assert table(said)
    lines = HEADROOM.with_suffix(".md").read_text().splitlines()
    (history,) = [line for line in lines if f"headroom/{name}/" in line] if name not in SHOWN else [""]
    for d in again["planned"]:
        mean = f"{100 * d['difference']:+.1f}"
        shown = f"| {d['a']} - {d['b']} | {mean} | {100 * d['low']:+.1f} to {100 * d['high']:+.1f} |"
        if name in SHOWN:
            assert any(line.startswith(shown) and f"({d['p_holm']:.3f})" in line for line in lines), d
        else:
            assert f"{d['a']} - {d['b']} {mean}" in history, d


def told() -> str:
    """The page in one line, as its line breaks mean nothing."""
    return " ".join(HEADROOM.with_suffix(".md").read_text().split())


def test_what_shuffled_signals_cost_where_weak_tools_are_often_met():
    rows = results.read_csv(HEADROOM / "spread_again" / "outcomes.csv.gz")
    (d,) = compare(rows, METRICS["weak"], ["random", "placebo"], [("placebo", "random")])["planned"]
    points, low, high = (f"{100 * d[key]:.1f}" for key in ("difference", "low", "high"))
    said = f"shuffled signals end {points[1:]} points *below* free exploration ({low} to {high}, not"
    assert said in told()


def assert_close(a, b):
    """Asserts equal JSON values, up to rounding."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_close(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_close(x, y)
    else:
        assert a == (pytest.approx(b) if isinstance(a, float) else b)


def test_what_the_page_says_of_secondary_metrics_is_corrected_over_all_of_them():
    sentences = {
        (
            "test",
            "blame",
            "random",
        ): "on tasks as exploration finds them +1.7 (0.0 to +3.4, p 0.44 after Holm)",
        ("test_spread", "coevolve", "placebo"): "2.0 points above shuffled signals (0.7 to 3.2, p 0.05)",
        ("test_spread", "coevolve", "random"): "1.2 there (0.1 to 2.4, p 0.19)",
    }
    for (name, a, b), words in sentences.items():
        said = json.loads((HEADROOM / name / "comparison.json").read_text())["secondary"]
        family = [d["p"] for table in said for d in table["planned"]]
        (d,) = [d for d in said[1]["planned"] if (d["a"], d["b"]) == (a, b)]
        assert words in told() and f"p {holm_by_hand(family)[family.index(d['p'])]:.2f}" in words


def holm_by_hand(values):
    """The smallest level at which the step-down procedure rejects each of them."""
    order, least, found = sorted(values), 0.0, {}
    for k, p in enumerate(order):
        least = max(least, min(1.0, p * (len(values) - k)))
        found[p] = least
    return [found[p] for p in values]


def runs_of(*names: str, seeds: int) -> list[dict]:
    """The outcomes of all of them; first evaluations are equal, count for count."""
    rows = [r for name in names for r in results.read_csv(HEADROOM / name / "outcomes.csv.gz")]
    begun: dict[tuple, set] = {}
    for r in rows:
        if r["step"] == "0":
            begun.setdefault((r["seed"], r["set"], r["task"]), set()).add((r["successes"], r["trials"]))
    assert len(begun) == seeds * 396 and all(len(counts) == 1 for counts in begun.values())
    return rows


def test_probes_that_were_run_later_are_compared_with_the_same_seeds():
    rows = runs_of("options", "options_probe", seeds=2)
    pairs = [("coevolve_probe", "coevolve"), ("blame_probe", "blame")]
    for d in compare(rows, METRICS["weak"], [], pairs)["planned"]:
        assert d["p"] is None and f"{d['a']} - {d['b']} {100 * d['difference']:+.1f}" in told()


@pytest.mark.parametrize(
    "heading, seeds, shown, replaced, first, longer",
    [
        (
            "## Options on six seeds",
            6,
            5,
            [  # by the first table; they count in Holm's family all the same
                ("random_probe", "random"),
                ("random_probe", "random_longer"),
                ("coevolve", "random"),
                ("blame", "random"),
                ("blame", "random_probe"),
            ],
            ("options", "options_probe", "options_six", "options_six_probe"),
            "options_six_rollouts",
        ),
        ("## The test of probes", 8, 3, [], ("test_spread", "test_probe"), "test_probe_rollouts"),
    ],
)
def test_probes_against_as_many_rollouts(heading, seeds, shown, replaced, first, longer):
    runs_of(*first, longer, seeds=seeds)
    rows = runs_of(*first, seeds=seeds)
    rows += [{**r, "arm": "random_longer"} for r in results.read_csv(HEADROOM / longer / "outcomes.csv.gz")]
    costs = [
        {**r, "arm": "random_longer"} if name == longer else r
        for name in (*first, longer)
        for r in results.read_csv(HEADROOM / name / "cells.csv")
    ]
    page = HEADROOM.with_suffix(".md").read_text()
    page = page[page.index(heading) :]
    page = page[: page.index("\n#", 1)]
    arms = re.findall(r"^\| ([a-z_]+) \| \d", page, re.MULTILINE)
    pairs = re.findall(r"^\| (\w+) - (\w+) \|", page, re.MULTILINE)
    assert len(pairs) == shown and len(arms) in (0, 4)
    mean = lambda arm, key: f"{statistics.fmean(float(c[key]) for c in costs if c['arm'] == arm):,.0f}"
    for row in compare(rows, METRICS["weak"], arms, [])["arms"]:
        arm = row["arm"]
        line = f"| {arm} | {100 * row['mean']:.1f} | {mean(arm, 'rollouts')} | "
        assert f"{line}{mean(arm, 'new_tasks_with_a_weak_tool')} of 96 |" in page
    if not arms:
        assert f"{mean('random_probe', 'rollouts')} for {mean('random', 'rollouts')}" in page
    for d in compare(rows, METRICS["weak"], [], pairs + replaced)["planned"][:shown]:
        cells = f"{100 * d['difference']:+.1f} | {100 * d['low']:+.1f} to {100 * d['high']:+.1f}"
        resampled = f"{100 * d['boot_low']:+.1f} to {100 * d['boot_high']:+.1f}"
        assert f"| {d['a']} - {d['b']} | {cells} | {resampled} | {d['p']:.3f} ({d['p_holm']:.3f}) |" in page


def test_what_was_run_later_is_compared_with_the_same_seeds():
    """The second test shows the ends of the scale: how much there was to gain."""
    rows = runs_of("test_spread", "test_spread_ends", seeds=8)
    pairs = [("random", "static"), ("oracle", "random"), ("oracle", "blame")]
    arms = ["static", "random", "placebo", "coevolve", "blame", "oracle"]
    found = compare(rows, METRICS["weak"], arms, pairs)
    means = " | ".join(f"{100 * row['mean']:.1f}" for row in found["arms"])
    assert [row["arm"] for row in found["arms"]] == arms and f"| often met | 32.8 | {means} |" in told()
    free, oracle, blame = found["planned"]
    interval = lambda d: f"({100 * d['low']:.1f} to {100 * d['high']:.1f}"
    assert f"free exploration {100 * free['difference']:.1f} over no new tasks {interval(free)}" in told()
    known = (
        f"the oracle is {100 * oracle['difference']:.1f} points over free exploration "
        f"(t interval {interval(oracle)[1:]}"
    )
    assert known in told()
    assert f"the oracle is {100 * blame['difference']:.1f} over blame {interval(blame)})" in told()


def test_no_effect_is_mostly_not_found():
    rng = np.random.default_rng(1)
    found = [stats.paired_p(rng.standard_normal(6)) < 0.05 for _ in range(400)]
    assert 0.02 < np.mean(found) < 0.09


PLAN = {
    "arms": ["static", "random"], "seeds": [0], "reads": "development", "machine": "m", "date": "d",
    "command": "c",
    "settings": [{}], "planned": [],
}  # fmt: skip


def budget(name, seed, **changes):
    same = dict.fromkeys(notes.BOUND, 1.0)
    return {"arm": name, "seed": seed, **same, "initial_digest": "x", **changes}


def test_base_policies_that_differ_are_said():
    rows = [budget("random", s, model_digest="aa" if s < 2 else "bb") for s in range(3)]
    found = notes.notes({"reads": "development"}, rows, [])
    assert any("BASE POLICY CHANGED BETWEEN RUNS" in n and "bb (random, seed 2)" in n for n in found)
    rows = [budget("random", s, model_digest="aa" if s < 2 else "") for s in range(3)]
    assert not any("BASE POLICY" in n for n in notes.notes({"reads": "development"}, rows, []))


def test_an_arm_whose_files_changed_between_its_runs_is_said():
    of = lambda name, *digests: [budget(name, s, files_digest=d) for s, d in enumerate(digests)]
    said = lambda rows: [n for n in notes.notes({"reads": "development"}, rows, []) if "FILES" in n]
    assert said([*of("my.way", "aa", "aa"), *of("random", "", ""), *of("my.other", "bb", "bb")]) == []
    (note,) = said([*of("my.way", "aa", "aa", "cc"), *of("my.other", "bb", "bb")])
    assert note.startswith("THE FILES OF my.way CHANGED") and "cc (my.way, seed 2)" in note
    assert "my.other" not in note


def test_a_setting_keeps_the_order_of_an_earlier_command():
    theirs = {"settings": [{"a": 1, "b": [1, 2]}, {"a": 2, "b": [1]}]}
    given = [{"b": (1, 2), "a": 1}, {"b": (9,), "a": 1}]
    found = plan_file.as_before(theirs, given)
    assert [list(setting) for setting in found] == [["a", "b"], ["b", "a"]] and found == given
    assert plan_file.as_before(None, given) == given


def test_what_is_not_equal_is_said():
    rows = [
        budget("random", 0, new_tasks=8),
        budget("coevolve", 0, new_tasks=6),
        budget("static", 0, new_tasks=0),
    ]
    said = notes.notes(PLAN, rows, ["oracle, seed 0"])
    assert "Read on the development set." in said and any("oracle, seed 0" in note for note in said)
    assert [n for n in said if "not equal" in n] == [
        "The arms are not equal in new tasks in seed 0: in seed 0 from 6 (coevolve) to 8 (random)."
    ]
    few = [any("is itself a guess" in n for n in notes.notes(PLAN, rows * n, [])) for n in (1, 5)]
    many = [{**row, "seed": seed} for row in rows for seed in range(5)]
    assert few == [True, True] and not any("guess" in n for n in notes.notes(PLAN, many, []))
    rows[1] = budget("coevolve", 0, new_tasks=8, initial_digest="y", rollouts=2.0)
    said = notes.notes(PLAN, rows, [])
    assert any("not start from the same D_0" in n for n in said) and any(
        "equal in rollouts" in n for n in said
    )


def test_five_of_the_missing_cells_are_named():
    names = [f"oracle, seed {seed}" for seed in range(6)]
    for count, more in ((5, ""), (6, " ...")):
        told = f"{count} cells are not finished: {', '.join(names[:5])}{more}."
        assert told in notes.notes(PLAN, [], names[:count])


def test_budgets_are_compared_seed_by_seed_and_arms_are_static_by_what_they_are():
    made = {"random": (80, 40, 0), "coevolve": (40, 80, 0), "static": (0, 0, 0)}
    rows = [budget(name, seed, new_tasks=n) for name, of in made.items() for seed, n in enumerate(of)]
    (said,) = [n for n in notes.notes(PLAN, rows, []) if "not equal" in n]
    assert "new tasks in seeds 0, 1: in seed 0 from 40 (coevolve) to 80 (random)." in said
    rows = [budget("random", 0, new_tasks=80), budget("coevolve", 0, new_tasks=0)]
    assert any("from 0 (coevolve) to 80 (random)" in n for n in notes.notes(PLAN, rows, []))


def test_the_share_of_lost_rollouts_is_that_of_all_runs_of_an_arm():
    rows = [budget("random", seed, rollouts_lost_share=lost) for seed, lost in enumerate((0.03, 0.0, 0.015))]
    (said,) = [n for n in notes.notes(PLAN, rows, []) if "training rollouts" in n]
    assert said.startswith("random lost 1.5% of its training rollouts")
    rows[2]["rollouts_lost_share"] = 0.0  # one run lost 3%, the three of them 1%
    assert not any("training rollouts" in n for n in notes.notes(PLAN, rows, []))


def test_tasks_that_differ_between_columns_are_said():
    columns = ["random", "coevolve", "random+data.initial_tasks=8", "coevolve+data.initial_tasks=8"]
    rows = [budget(name, 0, iid_digest="x", initial_digest=name.partition("+")[2]) for name in columns]
    assert not any("held-out" in n or "D_0" in n for n in notes.notes(PLAN, rows, []))
    rows[3] = budget(columns[3], 0, iid_digest="y", initial_digest="z")
    said = notes.notes(PLAN, rows, [])
    assert "The arms with data.initial_tasks=8 do not start from the same D_0 in seed 0." in said
    tasks = (
        "The iid held-out tasks are not the same in seed 0: "
        "those of random and coevolve+data.initial_tasks=8 differ"
    )
    assert sum(n.startswith(tasks) for n in said) == 1


def test_the_digest_of_held_out_tasks_is_of_their_content(tmp_path):
    digests = []
    for path in ("a", "b"):
        task = {"id": "t", "scenario": {"files": path}, "turns": []}
        (tmp_path / "held_out.jsonl").write_text(json.dumps(task) + "\n")
        (tmp_path / "evaluations.jsonl").write_text(
            json.dumps({"set": "iid", "by_task": {"t": [1, 2]}}) + "\n"
        )
        digests.append(results._held_out_digests(tmp_path))
    assert digests[0]["iid_digest"] != digests[1]["iid_digest"] and digests[0]["balanced_digest"] == ""


def test_a_run_without_a_valid_rollout_is_left_out_and_named():
    rows = made_up(0.1, seeds=4)
    for r in rows:
        if (r["arm"], r["seed"]) == ("static", 2):
            r["successes"] = r["trials"] = 0
    budgets = [budget(name, seed) for name in ("static", "random") for seed in range(4)]
    found = results.summarise(rows, budgets, PLAN)
    (d,) = found["planned"]
    assert d["n"] == 3 and set(d["by_seed"]) == {"0", "1", "3"} and np.isfinite(d["difference"])
    assert found["arms"][0]["n"] == 3 and found["arms"][1]["n"] == 4
    assert any("macro success" in n and "left out of it: static, seed 2." in n for n in found["notes"])
    json.dumps(found, allow_nan=False)
    # Every balanced task calls a weak tool: the other group is empty.
    rows = [r for r in rows if r["weak"]]
    found = results.summarise(rows, budgets, PLAN)
    assert found["metric"]["group"] == "weak" and not found["secondary"]
    with pytest.raises(ValueError, match="must be finite"):
        stats.seeds_needed(float("nan"), 0.03)


def test_a_column_without_a_held_out_set_stands_in_the_table():
    rows = made_up(0.1, seeds=2)
    rows += [{**r, "set": "iid"} for r in rows if r["arm"] == "static"]
    found = results.summarise(rows, [budget(a, s) for a in ("static", "random") for s in (0, 1)], PLAN)
    lines = table({**found, "signals": []}).splitlines()
    assert [line.split()[1:3] for line in lines if line.startswith("  random  ")][-1] == ["0", "-"]


def test_a_table_of_one_seed_has_no_intervals():
    rows = made_up(0.1, seeds=1)
    found = results.summarise(
        rows, [budget("static", 0), budget("random", 0)], {**PLAN, "planned": [["random", "static"]]}
    )
    text = table(found)
    assert "random - static: 1 seeds in common" in text and "interval" in text
    assert "No run is finished yet." == table(results.summarise([], [], PLAN))


# Signal quality


def test_in_a_grid_signals_are_compared_with_free_exploration_of_their_own_setting(tmp_path):
    settings = [(("evolution.every", every),) for every in (5, 10)]
    made = [(Cell(a, 0, s), a, 0.2 * i) for i, s in enumerate(settings) for a in ("random", "coevolve")]
    for cell, name, score in made:
        cell.workdir(tmp_path).mkdir(parents=True)
        signal = "rare" if name == "coevolve" else None
        lineage = {"kind": "signal" if signal else "random", "signal": signal, "step": 4, "focus": []}
        record = {"first_score": score, "trained": 1}
        task = {"id": "t", "lineage": lineage, "turns": [{"calls": [{}] * 3}], "record": record}
        (cell.workdir(tmp_path) / "tasks.jsonl").write_text(json.dumps(task))
    found = quality(tmp_path, [cell for cell, _, _ in made], [])
    shown = {row["arm"]: row["against_precision"] for row in found}
    assert shown == {"coevolve+evolution.every=5": 1.0, "coevolve+evolution.every=10": 0.8}


# Cells


SMALL = [  # the shapes of tests/loop/test_train.py, whose compiled programs serve here too
    "steps=2", "data.initial_tasks=4", "rollout.tasks_per_step=2", "rollout.group_size=4",
    "evolution.every=1",
    "evolution.freeze_last_steps=1", "evolution.tasks=2", "evaluation.tasks=4", "evaluation.num_rollouts=1",
    "environment.workers=1",
    "engine.max_concurrency=8", "learner.rows_per_microbatch=2", "evaluation.balanced_tasks=2",
    "evaluation.every=1",
    "evaluation.balanced_candidates=4", f"model={ROOT / 'models' / 'tiny_qwen3'}",
]  # fmt: skip


def command(workdir, *flags, small=SMALL):
    flags = [f"--config={ROOT / 'configs' / 'bfcl_tiny.py'}", f"--workdir={workdir}", *flags]
    return [ROOT / "experiments" / "compare.py", *flags, *(f"--set={text}" for text in small)]


FAILING = """from coevolve_jax.strategies.static import Static
class make(Static):
    def collect(self, step, tasks, roll):
        raise ValueError("This method fails.")
"""


@pytest.mark.nightly
def test_cells_run_fail_by_name_and_go_on(tmp_path, monkeypatch, environ):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "ends.py").write_text(FAILING)
    environ = {**environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{environ['PYTHONPATH']}"}
    for name, value in environ.items():  # as installed for a user, without PyTorch
        monkeypatch.setenv(name, value)
    folder = tmp_path / "comparison"
    changes = dict(text.split("=", 1) for text in SMALL)
    config = override(TINY, {k: variations.parse_value(TINY, k, v) for k, v in changes.items()})
    # A run that fails is named and not counted; it resumes below.
    monkeypatch.setattr(cells, "MAIN", ROOT / "experiments" / "main.py")
    whole = cells.command
    nothing = [sys.executable, "-c", ""]
    monkeypatch.setattr(cells, "command", lambda *args: whole(*args) if len(args) > 1 else nothing)
    cell = Cell("random", 0)
    (failure,) = cells.run_all(folder, config, [cell], 1)
    assert failure.name == "cells/random/seed_0" and failure.why.startswith("exit status 0")
    program = whole(cell.workdir(folder), "--until=1")[1:]
    # On one core, like each of two cells at once: they find compiled programs.
    assert forked.run(program, {**environ, "NPROC": "1"}).returncode == 0
    first = (cell.workdir(folder) / "metrics.jsonl").read_text()
    assert first.count("\n") == 1 and not cells.finished(cell.workdir(folder))
    (folder / "plan.json").write_text(json.dumps({"config": _plain(config)}))

    program = [sys.executable, *command(folder, "--arms=random,static,own.ends", "--seeds=0", "--jobs=2")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=900)
    assert done.returncode == 1, done.stderr
    assert "1 of the runs failed" in done.stderr and "This method fails." in done.stderr
    again = (cell.workdir(folder) / "metrics.jsonl").read_text()
    assert again.startswith(first) and again.count("\n") == 2  # it resumed and restarted nothing
    with open(folder / "outcomes.csv") as f:
        rows = list(csv.DictReader(f))
    assert {(r["arm"], r["set"], r["step"]) for r in rows} == {
        (a, s, n) for a in ("random", "static") for s in ("iid", "balanced") for n in ("0", "1", "2")
    }
    sides = {a: [r for r in rows if r["arm"] == a and r["step"] == "0"] for a in ("random", "static")}
    for a, b in zip(*sides.values(), strict=True):  # one start: the same tasks and the same first evaluation
        assert {k: v for k, v in a.items() if k != "arm"} == {k: v for k, v in b.items() if k != "arm"}
    tasks = {a: (folder / "cells" / a / "seed_0" / "tasks.jsonl").read_text() for a in ("random", "static")}
    born = {
        a: [(t["id"], t["lineage"]["kind"]) for t in map(json.loads, text.splitlines())]
        for a, text in tasks.items()
    }
    assert born["random"][:4] == born["static"]
    assert [kind for _, kind in born["random"]] == ["initial"] * 4 + ["random"] * 2
    with open(folder / "cells.csv") as f:
        costs = {r["arm"]: r for r in csv.DictReader(f)}
    assert costs["random"]["rollouts"] == costs["static"]["rollouts"] == "16"
    assert (costs["random"]["new_tasks"], costs["static"]["new_tasks"]) == ("2", "0")

    read = forked.run(command(folder, "--arms=random,static", "--seeds=0", "--only_read"), environ)
    assert read.returncode == 0 and "random - static: 1 seeds in common" in read.stdout, read.stderr
    some = command(folder, "--arms=random,static,own.ends", "--seeds=0", "--run=static")
    assert forked.run(some, environ).returncode == 0  # without the method that fails
    kept = (folder / "plan.json").read_text()
    assert "Nothing was written" in read.stdout and json.loads(kept)["arms"] == [
        "random",
        "static",
        "own.ends",
    ]
    assert json.loads(kept)["strategies"]["random"]["name"] == "random"
    with open(folder / "outcomes.csv") as f:
        assert list(csv.DictReader(f)) == rows
    read = forked.run(
        command(
            folder, "--arms=random,static,own.ends", "--seeds=0", "--only_read", "--planned=static-random"
        ),
        environ,
    )
    assert read.returncode and "random - static is planned already" in read.stderr
    assert (folder / "plan.json").read_text() == kept
    assert json.loads(kept)["planned"] == [["random", "static"]] and json.loads(kept)["primary"] == "iid"
    other = forked.run(command(folder, "--arms=static", "--seeds=0", "--set=learner.kl_coef=0.5"), environ)
    assert other.returncode == 1 and "comparison of another config (config.learner.kl_coef" in other.stderr
    other = forked.run(command(folder, "--arms=random,static", "--seeds=0", "--run=static,eva"), environ)
    assert other.returncode == 1 and "--run=eva is none of --arms=random,static." in other.stderr


def _plain(config):
    from coevolve_jax import config as configs

    return json.loads(json.dumps(configs.numbers(config.to_dict())))


@pytest.fixture
def sweep(quick):
    def sweep(*flags, more=("--seeds=0:4",), arms=("--arms=static,random",)):
        own = ["--config=configs/bfcl_tiny.py", *arms, *more, "--workdir=/shared/x y"]
        return forked.run([ROOT / "experiments" / "sweep.py", *flags, "--", *own], quick)

    return sweep


def on_a_vm(home: Path, command: str) -> list[str]:
    """Runs a command as ssh does, and returns the words that the learner's Python was started with.

    That Python lies where tpu_scripts install it: the VM's own has no JAX.
    """
    (home / "coevolve_jax").mkdir(parents=True)
    program = home / "venv-learner" / "bin" / "python"
    program.parent.mkdir(parents=True)
    # It speaks after the connection has ended.
    program.write_text('#!/bin/sh\nread go < go; for word; do echo "$word"; done; pwd; echo end >&2\n')
    program.chmod(0o755)
    os.mkfifo(home / "coevolve_jax" / "go")
    environ = {"HOME": str(home), "PATH": os.environ["PATH"]}
    assert subprocess.run(["bash", "-c", command], env=environ, cwd=home, timeout=60).returncode == 0
    (home / "coevolve_jax" / "go").write_text("\n")
    log = home / "sweep.log"
    for _ in range(1200):
        if log.exists() and log.read_text().endswith("end\n"):
            break
        time.sleep(0.05)
    *words, folder, _ = log.read_text().splitlines()
    assert folder == str(home / "coevolve_jax")
    return ["python", *words]


@pytest.mark.parametrize("on", ["shell", "slurm", "tpu"])
def test_a_sweep_prints_commands_that_a_shell_reads_and_together_run_every_seed(on, sweep, tmp_path):
    done = sweep(f"--on={on}", "--machines=3")
    assert done.returncode == 0, done.stderr
    text = done.stdout
    if on == "slurm":
        assert "#SBATCH --array=0-2\n" in text
        jobs = [text.replace('"$SLURM_ARRAY_TASK_ID"', f"{i}").splitlines()[-4] for i in range(3)]
        assert all(job.startswith("exec python ") for job in jobs)  # signals reach python, not a shell
        jobs = [job.removeprefix("exec ") for job in jobs]
        text = "\n".join([*jobs, text.splitlines()[-1]])
    lines = [shlex.split(line) for line in text.splitlines() if not line.startswith("#")]
    if on == "tpu":
        assert [words[5] for words in lines[:3]] == ["coevolve-0", "coevolve-1", "coevolve-2"]
        assert all("--project=PROJECT" in words for words in lines[:3])
        there = [words[-1].removeprefix("--command=") for words in lines[:3]]
        lines[:3] = [on_a_vm(tmp_path / f"{i}", command) for i, command in enumerate(there)]
    assert all(
        "--workdir=/shared/x y" in words and words[1] == "experiments/compare.py" for words in lines
    ), lines
    shards = [word for words in lines for word in words if word.startswith("--shard=")]
    assert shards == [f"--shard={i}/3" for i in range(3)] and "--only_read" in lines[-1] and len(lines) == 4


RUNS_OF = """
import os
from coevolve_jax.comparison import cells
def told(folder, config, own, *more):
    print(*(f"{c.arm}/{c.seed}" for c in own), flush=True)
    os._exit(0)
cells.run_all = told
"""


def test_every_run_of_a_comparison_is_of_one_shard(quick, tmp_path):
    folder, shards = tmp_path / "comparison", []
    flags = ("--config=configs/bfcl_tiny.py", f"--workdir={folder}", "--arms=static,random", "--seeds=0:5")
    for part in ("0/2", "1/2"):
        done = forked.run_after(RUNS_OF, "compare", tmp_path, quick, *flags, f"--shard={part}")
        assert done.returncode == 0, done.stderr
        shards.append(done.stdout.split())
    whole = [f"{arm}/{seed}" for arm in ("random", "static") for seed in range(5)]
    assert sorted(sum(shards, [])) == whole and {*map(len, shards)} == {4, 6}


def test_a_command_that_is_refused_writes_nothing(quick, tmp_path):
    folder = tmp_path / "comparison"
    for flags, why in (
        (["--shard=1/0"], "--shard='1/0' is no part"),
        (["--only_read"], f"--only_read finds no comparison in {folder} (no plan.json)"),
        (["--set=steps=3"], "--set names steps twice ('3' and '2')"),
        ([f"--bundle={tmp_path / 'taken'}"], "is not empty and holds no bundle"),
    ):
        (tmp_path / "taken").mkdir(exist_ok=True)
        (tmp_path / "taken" / "thesis.txt").write_text("")
        done = forked.run(command(folder, "--arms=static", *flags), quick)
        assert done.returncode == 1 and why in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert not folder.exists()
    with plan_file.claimed(folder, 0, 1):  # another process runs it
        done = forked.run(command(folder, "--arms=random"), quick)
        assert done.returncode == 1 and f"Another process runs the comparison in {folder}" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["lock_0_1"]
    assert plan_file.written(folder, {}) is None  # the folder is free for the next command


@pytest.mark.parametrize(
    "content, why", [(b"{", "cannot be read"), (b"\xff", "cannot be read"), (b"3", "no plan")]
)
def test_a_damaged_plan_is_named(content, why, tmp_path):
    (tmp_path / "plan.json").write_bytes(content)
    for read in (plan_file.read, lambda folder: plan_file.written(folder, {"config": {}})):
        with pytest.raises(ValueError, match=f"{re.escape(str(tmp_path / 'plan.json'))} .*{why}.*restore it"):
            read(tmp_path)


@pytest.mark.parametrize("on", ["shell", "slurm"])
def test_a_sweep_of_campaigns_gives_each_machine_its_own_over_one_store(on, sweep):
    more = ("--versions=3", "--seeds=0:2")
    done = sweep("--of=campaigns", f"--on={on}", "--machines=2", more=more, arms=())
    assert done.returncode == 0, done.stderr
    jobs = done.stdout.splitlines()[:2]
    if on == "slurm":
        line = done.stdout.splitlines()[-3].removeprefix("exec ")
        jobs = [line.replace('"$SLURM_ARRAY_TASK_ID"', f"{i}") for i in range(2)]
    for i, words in enumerate(map(shlex.split, jobs)):
        assert words[:2] == ["python", "experiments/evolve_harness.py"] and "--versions=3" in words
        assert {f"--workdir=/shared/x y/campaign_{i}", "--store=/shared/x y/store"} <= {*words}
        assert f"--config.harness.seed={i}" in words and "--seeds=0:2" in words
    seeded = sweep("--of=campaigns", more=("--config.harness.seed=1",))
    assert "--config.harness.seed=1 is what python experiments/sweep.py gives" in seeded.stderr


def test_a_sweep_refuses_what_it_cannot_split(sweep):
    assert "more than the 4 seeds" in sweep("--machines=5").stderr
    apart = sweep("--machines=8", more=("--seeds", "0:8"))  # a flag and its value as two words
    assert apart.returncode == 0 and "--seeds 0:8" in apart.stdout
    assert "--shard=0/2 is what" in sweep("--machines=2", more=("--shard=0/2",)).stderr
    assert (
        "--names=vm names one VM for --machines=2" in sweep("--on=tpu", "--machines=2", "--names=vm").stderr
    )
    for names in ("vm{index}", "vm{1}", "vm{", "vm{0.name}"):
        done = sweep("--on=tpu", f"--names={names}")
        assert done.stderr.startswith(f"Error: --names={names} is no pattern of names: put {{}} where")
    for done, why in (
        (sweep("stray"), "unexpected argument 'stray'"),
        (sweep(arms=("--arms=static,static",)), "--arms=static,static and --seeds=0,1,2,3 must each name"),
        (sweep(arms=("--arms=statik",)), "There is no arm 'statik'"),
        (
            sweep(more=("--config.steps=3",)),
            "--config.steps=3 is no flag of python experiments/compare.py: give",
        ),
    ):
        assert done.returncode == 1 and done.stderr.startswith(f"Error: {why}") and not done.stdout, (
            done.stderr
        )
    assert sweep(more=("--seeds",)).stderr == "Error: argument --seeds/-seeds: expected one argument\n"
    with pytest.raises(ValueError, match="no part such as"):
        plan.parse_shard("4/4")


def test_a_difference_is_planned_once_and_in_one_direction():
    cells_of = plan.cells(["coevolve", "random"], [0])
    for texts in (["coevolve-random", "coevolve-random"], ["coevolve-random", "random-coevolve"]):
        with pytest.raises(ValueError, match="names .* twice: name a difference once"):
            plan.pairs(texts, cells_of)


def test_differences_that_nobody_planned_first_are_not_said_to_be():
    """The first command named a difference of an arm that joined: a later one, and there is no other."""
    late = {"planned": [["my.m", "random"]], "date": "d1", "command": "c"}
    columns = ["random", "static", "blame", "coevolve", "my.m"]
    first, later = results._planned({"planned": [], "planned_later": [late]}, columns)
    assert (first, later) == ([], {("my.m", "random"): "d1"})
    assert ("blame", "random") in results._planned({}, columns)[0]


@pytest.mark.parametrize("lost", [{"arms": ["static"]}, {"seeds": [0]}, {"settings": [{"steps": 4}]}, None])
def test_a_command_that_leaves_out_a_part_of_the_comparison_is_refused(lost, tmp_path):
    theirs = {"arms": ["static", "random"], "seeds": [0, 1], "settings": [{"steps": 4}, {"steps": 8}]}
    plan_file.check_whole(tmp_path, None, theirs)
    more = {"arms": ["oracle", *theirs["arms"]], "seeds": [2, 1, 0], "settings": theirs["settings"]}
    if lost is None:
        return plan_file.check_whole(tmp_path, theirs, more)
    (key,), (left,) = lost, theirs[next(iter(lost))][1:] if "settings" not in lost else [{"steps": 8}]
    with pytest.raises(ValueError, match=re.escape(f"also has {key} {left}: name these too")):
        plan_file.check_whole(tmp_path, theirs, {**more, **lost})


def test_a_command_goes_on_from_the_first_ones_plan_and_one_that_reads_tells_of_it(tmp_path):
    def asked(day, *arms):
        about = {"machine": "m", "date": f"d{day}", "commit": f"{day}", "command": f"c{day}"}
        return plan_file.made(TINY, arms, [0], [{"data.leak_splits": ("test",)}], [], **about)

    goes_on = lambda theirs, made: plan_file.continued(tmp_path, theirs, made, False, ())
    read = lambda made: plan_file.as_read(first, made, False, ())
    first = goes_on(None, asked(1, "static", "random"))
    assert first == json.loads(json.dumps(first)) and first["extended"] == []
    assert read(asked(2, "static", "random")) == (first, True)
    part, whole = read(asked(3, "static"))
    assert not whole and (part["arms"], part["date"], part["command"]) == (["static"], "d1", "c1")
    with pytest.raises(ValueError, match="also has arms random: name these too"):
        goes_on(first, asked(3, "static"))
    more = goes_on(first, asked(3, "static", "random", "coevolve"))
    assert more["date"] == "d1" and [(e["what"], e["date"]) for e in more["extended"]] == [
        ("arms coevolve", "d3")
    ]


def test_what_later_commands_add_is_dated_and_told():
    first = {
        "seeds": [0, 1],
        "arms": ["static"],
        "settings": [{}],
        "date": "d1",
        "machine": "m1",
        "command": "c1",
    }
    assert plan_file.extended(None, first) == {"extended": []}
    theirs = {**first, **plan_file.extended(None, first)}
    same = plan_file.extended(theirs, {**first, "date": "d2", "machine": "m2", "command": "c2"})
    assert same == {"date": "d1", "machine": "m1", "command": "c1", "extended": []}
    more = {**first, "seeds": [0, 1, 2], "arms": ["static", "random"], "date": "d2", "command": "c2"}
    added = plan_file.extended(theirs, more)
    assert added["date"] == "d1" and added["extended"] == [
        {"what": "seeds 2, arms random", "arms": ["random"], "date": "d2", "command": "c2"}
    ]
    said = notes.notes({**PLAN, **added}, [], [])
    assert any(n.startswith("Added after the run began, on d2: seeds 2, arms random.") for n in said)
