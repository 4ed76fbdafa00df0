"""The tables of a comparison, recomputed from made-up run folders by loops that a reader can check."""

import csv
import itertools
import json
import math
import random
import shutil
import statistics

import pytest

from coevolve_jax.analysis import report
from coevolve_jax.analysis.comparison_view import comparison_view
from coevolve_jax.analysis.loading import load_comparison
from coevolve_jax.comparison import cell_files, differences, notes, plan_file, results
from coevolve_jax.comparison.differences import METRICS, compare, counts, difference
from coevolve_jax.comparison.plan import Cell
from coevolve_jax.comparison.table import table

WEAK = ("cp", "du", "mv")
RATES = {"cp": 0.1, "du": 0.5, "mv": 0.8, "": 0.9}  # success rates on a task with this weak tool
STEPS, SAMPLES = (0, 2, 4), 4
T = {2: 12.7062047, 3: 4.3026527}  # quantiles 0.975 of Student's t with n - 1 degrees of freedom
CELLS = [Cell(arm, seed) for seed in (0, 1, 2) for arm in ("static", "random", "coevolve")]
DIVERGED, MISSING = Cell("coevolve", 2), Cell("static", 2)
DONE = [c for c in CELLS if c not in (DIVERGED, MISSING)]
PLAN = {
    "arms": ["static", "random", "coevolve"], "seeds": [0, 1, 2], "settings": [{}], "reads": "development",
    "machine": "m", "date": "2026-11-20", "command": "c", "primary": "weak",
    "planned": [["random", "static"], ["coevolve", "random"]],
    "planned_later": [{"planned": [["coevolve", "static"]], "date": "2026-11-24", "command": "later"}],
}  # fmt: skip


def held_out():
    """id -> (set, scenario, tools): one weak tool, two or none; du comes in one task only."""
    found = {}
    for i in range(12):
        tools = (
            [("ls", "cp"), ("mv",), ("ls",), ("cp", "mv"), ("cd", "ls", "pwd")][i % 5] if i != 7 else ("du",)
        )
        found[f"b{i}"] = ("balanced", f"s{i % 4}", tools)
    for i in range(5):
        found[f"i{i}"] = ("iid", f"s{i % 3}", ("ls",) * (i + 1))
    return found


def made(cell):
    """All files of one run, as values."""
    rng = random.Random(f"{cell.arm} {cell.seed}")
    evaluations = {}  # (step, set) -> {task: [successes, trials]}
    for step in STEPS:
        for task, (name, _, tools) in held_out().items():
            rate = min(RATES[tool if tool in WEAK else ""] for tool in tools)
            solved = sum(
                rng.random() < 0.6 * rate + 0.05 * step * (cell.arm != "static") for _ in range(SAMPLES)
            )
            lost = rng.randint(0, SAMPLES - solved) if (cell.arm == "coevolve" and step == 4) else 0
            lost += task == "b7" and cell == Cell("random", 1) and step == 4
            evaluations.setdefault((step, name), {})[task] = [solved, max(solved, SAMPLES - lost)]
    grown = {"static": 0, "random": 4, "coevolve": 5}[cell.arm]
    tasks = [
        {
            "kind": "initial" if i < 3 else "signal" if cell.arm == "coevolve" else "random",
            "signal": rng.choice(["rare", "boundary"]) if i >= 3 and cell.arm == "coevolve" else None,
            "step": 0 if i < 3 else rng.choice([0, 1, 2]),
            "focus": rng.sample(["cp", "ls", "mv"], 2),
            "turns": [[rng.choice(["cp", "ls", "cd"]) for _ in range(rng.randint(1, 2))] for _ in range(2)],
            "trained": rng.choice([0, 1, 3]),
            "first": rng.choice([0.0, 0.25, 0.75, 1.0]),
            "scenario": f"s{i}" if i or cell.arm != "random" else "another",
        }
        for i in range(3 + grown)
    ]
    for task in tasks:
        task["first"] = task["first"] if task["trained"] else None
    return {
        "evaluations": evaluations,
        "tasks": tasks,
        "groups": [(rng.randint(2, 4), 4 + 2 * k, rng.choice([1.0, 0.75, 0.5])) for k in range(4)],
        "costs": {
            "rollouts/policy": 100 + cell.seed, "rollouts/probe": rng.randint(1, 40), "rollout_other": 5000,
            "sampled_tokens/policy": 700, "sampled_tokens/probe": rng.randint(1, 90),
            "learned_trajectories": 31,
            "learned_tokens": 47, "environment_steps/explorer": 60, "environment_steps/initial": 8,
        },
        "llm_tokens": 11 * cell.seed,
        "money": 0.5 * cell.seed,
        "seconds": {"rollout": 10.0, "update": rng.random()},
    }  # fmt: skip


def write(folder, cell):
    run, workdir, sets = made(cell), cell.workdir(folder), held_out()
    workdir.mkdir(parents=True)
    put = lambda name, rows: (workdir / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    call = lambda tool: {"name": tool, "arguments": {}}
    (workdir / "config.json").write_text(json.dumps({"testbed": {"weak_tools": WEAK}}))
    put(
        "held_out.jsonl",
        [
            {"id": i, "scenario": where, "turns": [{"calls": [call(t)]} for t in tools]}
            for i, (_, where, tools) in sets.items()
        ],
    )
    put(
        "evaluations.jsonl",
        [
            {
                "step": step, "set": name, "split": "development", "samples": SAMPLES, "by_task": by_task,
                "scenarios": {t: sets[t][1] for t in by_task}, "weak_tools": dict.fromkeys(WEAK, [0, 0]),
            }
            for (step, name), by_task in run["evaluations"].items()
        ],
    )  # fmt: skip
    put(
        "tasks.jsonl",
        [
            {
                "id": f"t{i}",
                "scenario": t["scenario"],
                "turns": [{"calls": [call(tool) for tool in turn]} for turn in t["turns"]],
                "lineage": {key: t[key] for key in ("kind", "signal", "step", "focus")},
                "record": {"trained": t["trained"], "first_score": t["first"]},
            }
            for i, t in enumerate(run["tasks"])
        ],
    )
    put(
        "metrics.jsonl",
        [
            {"step": k, "valid": valid, "groups": {"learned_from": learned, "rolled_out": rolled}}
            for k, (learned, rolled, valid) in enumerate(run["groups"])
        ],
    )
    if cell == DIVERGED:
        (workdir / "failure.json").write_text(json.dumps({"step": 3, "why": "not finite"}))
    elif cell != MISSING:
        ledger = {key: run[key] for key in ("costs", "llm_tokens", "money")}
        (workdir / "ledger.json").write_text(json.dumps(ledger))
        (workdir / "summary.json").write_text(json.dumps({"seconds": run["seconds"], "steps": 4 + cell.seed}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("comparison")
    for cell in CELLS:
        write(path, cell)
    (path / "plan.json").write_text(json.dumps(PLAN))
    return path


@pytest.fixture(scope="module")
def found(folder):
    return results.read(folder, PLAN, CELLS, keep=True)


# By hand


def rate(cell, metric, step=4, lost_failed=False):
    """Successes over trials of one run, by weak tool where the metric concerns these."""
    counts = {}
    for task, (name, _, tools) in held_out().items():
        weak = [tool for tool in WEAK if tool in tools]
        if name != ("iid" if metric == "iid" else "balanced"):
            continue
        solved, trials = made(cell)["evaluations"][step, name][task]
        for key in weak if metric == "weak" else [""] if metric == "iid" or not weak else []:
            row = counts.setdefault(key, [0, 0])
            row[0] += solved
            row[1] += SAMPLES if lost_failed else trials
    rates = [s / n for s, n in counts.values() if n]
    return sum(rates) / len(rates)


def lost(cell, metric, step=4):
    """(lost trials, requested trials) of the tasks that a metric reads."""
    gone = asked = 0
    for task, (name, _, tools) in held_out().items():
        weak = any(tool in WEAK for tool in tools)
        read = {
            "weak": name == "balanced" and weak,
            "others": name == "balanced" and not weak,
            "iid": name == "iid",
        }
        if read[metric]:
            gone += SAMPLES - made(cell)["evaluations"][step, name][task][1]
            asked += SAMPLES
    return gone, asked


def interval(values):
    """Mean and t interval; equal values have no interval."""
    mean = sum(values) / len(values)
    if max(values) - min(values) < 1e-9:
        return (pytest.approx(mean), None, None)
    half = T[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return pytest.approx((mean, mean - half, mean + half))


def of(arm):
    return [c for c in DONE if c.arm == arm]


def told_p(p):
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


TABLES = [("weak", 0), ("others", 1), ("iid", 2)]


@pytest.mark.parametrize("metric, place", TABLES)
def test_each_arm_is_the_mean_of_its_finished_seeds_and_tells_what_it_leaves_out(found, metric, place):
    part = [found, *found["secondary"]][place]
    assert part["metric"]["group"] == {"iid": "all"}.get(metric, metric)
    for entry in part["arms"]:
        own = of(entry["arm"])
        values = [rate(c, metric) for c in own]
        assert entry["values"] == pytest.approx({str(c.seed): v for c, v in zip(own, values)})
        assert (entry["mean"], entry["low"], entry["high"]) == interval(values) and entry["n"] == len(own)
        gone, asked = (sum(lost(c, metric)[k] for c in own) for k in (0, 1))
        assert (entry["lost"], entry["lost_share"]) == (gone, pytest.approx(gone / asked))
        worst = [rate(c, metric, lost_failed=True) for c in own]
        many = gone / asked > 0.01 or abs(sum(worst) - sum(values)) / len(own) > 0.01
        assert ("if_lost_failed" in entry) == many
        if many:
            told = entry["if_lost_failed"]
            assert (told["mean"], told["low"], told["high"]) == interval(worst)
        assert ("if_diverged_failed" in entry) == (entry["arm"] == "coevolve") == ("diverged" in entry)
    told = next(e for e in part["arms"] if e["arm"] == "coevolve")
    assert told["diverged"] == [2] and "if_lost_failed" in told
    values = [rate(c, metric, lost_failed=True) for c in of("coevolve")] + [
        0.0
    ]  # the worst case: both as failures
    counted = told["if_diverged_failed"]
    assert (counted["mean"], counted["low"], counted["high"]) == interval(values) and counted["n"] == 3


@pytest.mark.parametrize("metric, place", TABLES)
def test_differences_are_paired_and_told_again_at_worst(found, metric, place):
    part = [found, *found["secondary"]][place]
    assert [(d["a"], d["b"]) for d in part["planned"]] == [
        ("random", "static"), ("coevolve", "random"), ("coevolve", "static"),
    ]  # fmt: skip
    for d in part["planned"]:
        seeds = [s for s in (0, 1, 2) if Cell(d["a"], s) in DONE and Cell(d["b"], s) in DONE]
        pairs = lambda **how: [
            rate(Cell(d["a"], s), metric, **how) - rate(Cell(d["b"], s), metric, **how) for s in seeds
        ]
        assert (d["difference"], d["low"], d["high"]) == interval(pairs()) and d["n"] == len(seeds) == 2
        assert d["by_seed"] == pytest.approx({str(s): v for s, v in zip(seeds, pairs())})
        assert d["p"] is None is d["p_holm"]
        both = [lost(c, metric) for c in DONE if c.arm in (d["a"], d["b"])]
        assert (d["lost"], d["lost_share"]) == (
            sum(n for n, _ in both), pytest.approx(sum(n for n, _ in both) / sum(n for _, n in both)),
        )  # fmt: skip
        if "coevolve" in (d["a"], d["b"]):
            worst = d["if_lost_failed"]
            assert (worst["difference"], worst["low"], worst["high"]) == interval(pairs(lost_failed=True))
            third, many = Cell(d["b"], 2), {e["arm"] for e in part["arms"] if "if_lost_failed" in e}
            at_worst = lambda cell: rate(cell, metric, lost_failed=cell.arm in many)
            values = [at_worst(Cell(d["a"], s)) - at_worst(Cell(d["b"], s)) for s in seeds]
            values += [-at_worst(third)] if third in DONE else []
            counted = d["if_diverged_failed"]
            assert (counted["difference"], counted["low"], counted["high"]) == interval(values)
            assert (counted["p"] is None) == (len(values) < 3)
        else:
            assert "if_diverged_failed" not in d
        assert d.get("planned_later") == (
            "2026-11-24" if d["b"] == "static" and d["a"] == "coevolve" else None
        )


def test_curves_are_the_means_of_each_evaluated_step(found):
    for metric, arms in found["curves"].items():
        assert list(arms) == ["static", "random", "coevolve"]
        for arm, line in arms.items():
            assert line["step"] == list(STEPS)
            for k, step in enumerate(STEPS):
                values = [rate(c, metric, step) for c in of(arm)]
                assert (line["mean"][k], line["low"][k], line["high"][k]) == interval(values)
                counts = [lost(c, metric, step) for c in of(arm)]
                assert line["lost"][k] == pytest.approx(sum(n for n, _ in counts) / sum(n for _, n in counts))
                worst = statistics.fmean(rate(c, metric, step, lost_failed=True) for c in of(arm))
                many = line["lost"][k] > 0.01 or line["mean"][k] - worst > 0.01
                assert line["if_lost_failed"][k] == (pytest.approx(worst) if many else None)
    assert list(found["curves"]) == ["weak", "others", "iid"]


def costs(cell):
    """The row of cells.csv."""
    run = made(cell)
    booked, new, old = run["costs"], [], []
    for task in run["tasks"]:
        (old if task["kind"] == "initial" else new).append(task)
    visits = sum(t["trained"] for t in new)
    firsts = [t["first"] for t in new if t["first"] is not None]
    mean = lambda values: sum(values) / len(values) if values else None
    ends = {name: made(cell)["evaluations"][4, name].values() for name in ("balanced", "iid")}
    rolled = sum(n for _, n, _ in run["groups"])
    return {
        "arm": cell.arm,
        "seed": cell.seed,
        "diverged": None,
        "steps": 4 + cell.seed,
        "rollouts": booked["rollouts/policy"] + booked["rollouts/probe"],
        "rollouts_policy": booked["rollouts/policy"],
        "rollouts_probe": booked["rollouts/probe"],
        "rollouts_branch": 0,
        "gradients": 0,
        "rollouts_lost_share": sum(n * (1 - valid) for _, n, valid in run["groups"]) / rolled,
        "balanced_trials_lost": sum(SAMPLES - n for _, n in ends["balanced"]),
        "balanced_trials_asked": 12 * SAMPLES,
        "iid_trials_lost": sum(SAMPLES - n for _, n in ends["iid"]),
        "iid_trials_asked": 5 * SAMPLES,
        "queries_trials_lost": None,  # these runs have no held-out queries
        "queries_trials_asked": None,
        "sampled_tokens": booked["sampled_tokens/policy"] + booked["sampled_tokens/probe"],
        "learned_trajectories": 31,
        "learned_tokens": 47,
        "explorer_steps": 68,
        "llm_tokens": 11 * cell.seed,
        "money": 0.5 * cell.seed,
        "new_tasks": len(new),
        "new_tasks_with_a_weak_tool": sum(any("cp" in turn for turn in t["turns"]) for t in new),
        "new_tasks_never_visited": sum(not t["trained"] for t in new),
        "new_share_of_visits": visits / (visits + sum(t["trained"] for t in old)) if visits else 0.0,
        "calls_per_new_task": mean([len(t["turns"][0]) + len(t["turns"][1]) for t in new]),
        "live_groups": mean([learned / rolled for learned, rolled, _ in run["groups"]]),
        "live_at_first_visit": mean([score not in (0.0, 1.0) for score in firsts]),
        "failed_at_first_visit": mean([1 - score for score in firsts]),
        "seconds": 10.0 + run["seconds"]["update"],
    }


def test_cells_csv_column_by_column(folder, found):
    rows = {(r["arm"], r["seed"]): r for r in results.budgets(folder, [*DONE, DIVERGED])}
    once = {"arm": "coevolve", "seed": 2, "diverged": 3, "diverged_before": None}
    assert rows.pop(("coevolve", 2)) == once
    for cell in DONE:
        row = rows.pop((cell.arm, cell.seed))
        assert [row.pop(key) for key in ("commit", "date", "diverged_before")] == [None] * 3  # nothing tells
        told = {key: value for key, value in row.items() if not key.endswith("_digest")}
        assert told == {k: pytest.approx(v) if isinstance(v, float) else v for k, v in costs(cell).items()}
    assert not rows
    with open(folder / "cells.csv") as f:
        told = list(csv.DictReader(f))
    assert [(r["arm"], int(r["seed"])) for r in told] == [(c.arm, c.seed) for c in CELLS if c != MISSING]
    assert [r["diverged"] for r in told] == ["3" if r == told[-1] else "" for r in told]
    for entry in found["arms"]:
        own = [costs(c) for c in of(entry["arm"])]
        for key, value in entry["budgets"].items():
            values = [row[key] for row in own if row[key] is not None]
            assert value == (pytest.approx(statistics.fmean(values)) if values else None), key
        assert entry["budgets"].keys() == own[0].keys() - {"arm", "seed", "diverged"}


def test_a_cell_tells_its_commits_and_dates(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "runs")
    ran = [
        {"commit": c, "machine": "m", "date": f"2026-12-0{i}"}
        for i, c in ((1, "one"), (2, "two"), (3, "one"))
    ]
    (DONE[0].workdir(tmp_path / "runs") / cell_files.RAN).write_text(json.dumps(ran))
    made = results.read(tmp_path / "runs", PLAN, CELLS, keep=True)
    with open(tmp_path / "runs" / "cells.csv") as f:
        row = next(r for r in csv.DictReader(f) if (r["arm"], r["seed"]) == (DONE[0].arm, str(DONE[0].seed)))
    assert row["commit"] == "one+two"
    assert row["date"] == "2026-12-01+2026-12-02+2026-12-03"
    assert not any({"commit", "date"} & entry["budgets"].keys() for entry in made["arms"])


def test_runs_that_were_tried_again_after_they_had_diverged_are_named(folder, tmp_path):
    runs = tmp_path / "runs"
    shutil.copytree(folder, runs)
    origin = {"commit": "one", "machine": "m", "date": "2026-12-01"}
    failed = lambda step: {**origin, "diverged": {"step": step, "why": "not finite"}}
    for cell, ran in ((DONE[0], [failed(3), failed(2), origin]), (DIVERGED, [failed(1), origin])):
        (cell.workdir(runs) / cell_files.RAN).write_text(json.dumps(ran))
    found = results.read(runs, PLAN, CELLS, keep=True)
    name = f"{DONE[0].arm}, seed {DONE[0].seed} (step 3, then 2)"
    (told,) = (note for note in found["notes"] if note.startswith("Tried again after they had diverged"))
    assert f"(--retry_diverged), 2 of {len(DONE) + 1}: {name}, coevolve, seed 2 (step 1). Their" in told
    rows = [results.read_csv(runs / f"{table}.csv") for table in ("outcomes", "cells")]
    again = results.summarise(*rows, PLAN, ["static, seed 2"])
    assert again == {key: value for key, value in found.items() if key != "signals"}
    old = [{key: value for key, value in row.items() if key != "diverged_before"} for row in rows[1]]
    assert told not in results.summarise(rows[0], old, PLAN)["notes"]
    # The failure of a cell that is older than ran.json is kept without an origin.
    (DIVERGED.workdir(runs) / cell_files.RAN).unlink()
    cell_files.forget_divergence(DIVERGED.workdir(runs))
    (entry,) = cell_files.ran(DIVERGED.workdir(runs))
    assert entry["diverged"]["step"] == 3 and {*entry} == {"diverged"}
    (row,) = results.budgets(runs, [DIVERGED])
    assert row["diverged"] is None and row["diverged_before"] == "3"


def test_a_cell_that_is_named_twice_counts_once(folder):
    once, twice = (results.read(folder, PLAN, cells) for cells in (CELLS, [*CELLS, *DONE]))
    assert once == twice


def test_digests_are_of_what_tasks_are(folder):
    rows = results.budgets(folder, DONE)
    initial = {r["arm"]: r["initial_digest"] for r in rows if r["seed"] == 0}
    assert len({r["iid_digest"] for r in rows}) == len({r["balanced_digest"] for r in rows}) == 1
    # All names are equal, but random's first scenario differs; turns are drawn for each.
    assert len(set(initial.values())) == 3
    a, b = (made(Cell("static", 0)), made(Cell("random", 0)))
    assert [t["scenario"] for t in a["tasks"][:3]] != [t["scenario"] for t in b["tasks"][:3]]


def test_outcomes_csv_row_by_row(folder, found):
    rows = results.read_csv(folder / "outcomes.csv")
    expected = []
    for cell in [c for c in CELLS if c in DONE]:
        for (step, name), by_task in made(cell)["evaluations"].items():
            for task, (solved, trials) in by_task.items():
                _, where, tools = held_out()[task]
                called = ";".join(sorted(set(tools)))
                weak = ";".join(tool for tool in sorted(set(tools)) if tool in WEAK)
                values = (
                    cell.arm,
                    cell.seed,
                    name,
                    "development",
                    step,
                    task,
                    where,
                    called,
                    weak,
                    solved,
                    trials,
                    4,
                )
                expected.append(dict(zip(results.OUTCOMES, map(str, values), strict=True)))
    assert rows == expected
    again = results.summarise(rows, results.read_csv(folder / "cells.csv"), PLAN, ["static, seed 2"])
    assert again == {key: value for key, value in found.items() if key != "signals"}


def test_notes_say_all_that_is_unequal_lost_diverged_missing_or_late(found):
    said = found["notes"]
    assert said[:5] == [
        "Read on the development set.",
        "Planned after the run began, on 2026-11-24: coevolve - static. Holm's correction of these is over "
        "those planned "
        "before as well.",
        "1 cells are not finished: static, seed 2.",
        "Diverged, which is a result: coevolve, seed 2 (step 3). The means leave these runs out; the rows "
        '"diverged as 0" count each as success 0, and an arm\'s lost trials as failures where they are many. '
        "They are not run again, for they would end alike; --retry_diverged runs them.",
        "2 seeds (static): how far seeds differ is itself a guess, and with it the t intervals and p. Few "
        "that happen to agree give a "
        "narrow interval, and two give no p; 5 or more are needed.",
    ]
    assert (
        "The arms are not equal in new tasks in seeds 0, 1: in seed 0 from 4 (random) to 5 (coevolve)."
        in said
    )
    assert "The arms do not start from the same D_0 in seeds 0, 1." in said
    for arm in ("static", "random", "coevolve"):
        share = statistics.fmean(costs(c)["rollouts_lost_share"] for c in of(arm))
        assert f"{arm} lost {share:.1%} of its training rollouts: nothing is learned from these." in said
    n = sum(costs(c)["balanced_trials_lost"] for c in of("coevolve"))
    assert (
        "Lost trials of the balanced held-out set, neither success nor failure: random 1 of 144 (0.7%) at "
        "step 4; "
        f"coevolve {n} of 96 ({n / 96:.1%}) at step 4; static none."
    ) in said
    gone, asked = (sum(lost(c, "iid")[k] for c in of("coevolve")) for k in (0, 1))
    means = [
        statistics.fmean(rate(c, "iid", lost_failed=how) for c in of("coevolve")) for how in (False, True)
    ]
    (told,) = [n for n in said if n.startswith("coevolve lost") and "i.i.d." in n]
    assert told.startswith(f"coevolve lost {gone / asked:.1%} of the trials of success on the i.i.d.")
    assert told.endswith(f"{means[0]:.1%} without them, {means[1]:.1%} if all of them are failures.")


def test_the_text_of_a_comparison_has_its_numbers(found):
    text = table(found).splitlines()
    mean = f"{found['arms'][2]['mean']:.1%}"
    (at,) = [i for i, x in enumerate(text) if x.split()[:3] == ["coevolve", "2", mean]][:1]
    entry = found["arms"][2]
    share = f"{entry['lost_share']:.1%}"
    assert text[at + 1].startswith(f"    lost {entry['lost']} trials ({share}")
    assert text[at + 2].split()[:5] == [
        "lost",
        "as",
        "failures",
        "2",
        f"{entry['if_lost_failed']['mean']:.1%}",
    ]
    assert text[at + 3 : at + 5] == [
        "    diverged: seeds 2",
        f"    diverged as 0{'':>13}3{entry['if_diverged_failed']['mean']:>8.1%}   "
        + " to ".join(f"{entry['if_diverged_failed'][end]:.1%}" for end in ("low", "high")),
    ]
    (late,) = [line for line in text if line.startswith("  coevolve - static: ")][:1]
    assert "p not testable, P(better)" in late and late.endswith(
        "; planned on 2026-11-24, after the run began"
    )


def test_signals_task_by_task(folder, found):
    gains = {}
    for cell in DONE:
        for (step, _), by_task in made(cell)["evaluations"].items():
            for task, (solved, _) in by_task.items():  # lost trials count as failures here
                for tool in set(held_out()[task][2]):
                    count = gains.setdefault((cell.arm, cell.seed, tool), {}).setdefault(step, [0, 0])
                    count[0], count[1] = count[0] + solved, count[1] + SAMPLES
    assert {row["signal"] for row in found["signals"]} == {"rare", "boundary"}
    for row in found["signals"]:
        failed, matched, theirs, own, other, n = [], [], [], [], [], 0
        for seed in (0, 1):
            for task in made(Cell("coevolve", seed))["tasks"]:
                if task["signal"] != row["signal"]:
                    continue
                n += 1
                same = [
                    1 - t["first"]
                    for t in made(Cell("random", seed))["tasks"]
                    if t["kind"] != "initial" and t["step"] == task["step"] and t["trained"]
                    and sum(map(len, t["turns"])) == sum(map(len, task["turns"]))
                ]  # fmt: skip
                if task["first"] is not None:
                    failed.append(1 - task["first"])
                    if same:
                        matched.append(1 - task["first"])
                        theirs.append(statistics.fmean(same))
                for tool in task["focus"]:
                    before = max(s for s in STEPS if s <= task["step"] + 1)
                    for arm, into in (("coevolve", own), ("random", other)):
                        (s0, n0), (s1, n1) = gains[arm, seed, tool][before], gains[arm, seed, tool][4]
                        into.append(s1 / n1 - s0 / n0)
        mean = lambda values: pytest.approx(statistics.fmean(values)) if values else None
        assert row["new_tasks"] == n
        assert (row["precision"], row["matched_precision"], row["against_precision"]) == (
            mean(failed), mean(matched), mean(theirs),
        )  # fmt: skip
        assert (row["gain"], row["against_gain"]) == (mean(own), mean(other))
        (told,) = [x for x in table(found).splitlines() if f" {row['signal']:<12}{n:>5} new tasks" in x]
        shares = f"{row['precision']:6.1%}   {row['matched_precision']:6.1%} ({row['against_precision']:.1%})"
        assert f" new tasks   {shares}" in told


def test_the_page_of_a_comparison_says_the_same(folder, found):
    report.write_report(folder)
    view = comparison_view(load_comparison(folder))
    assert [t["arms"] for t in view["tables"]] == [t["arms"] for t in (found, *found["secondary"])]
    assert view["curves"] == found["curves"] and view["notes"] == found["notes"]
    cells = {(c["arm"], c["seed"]): c for c in view["cells"]}
    assert (cells["coevolve", "2"]["done"], cells["coevolve", "2"]["diverged"]) == (False, 3)
    assert (cells["static", "2"]["done"], cells["static", "2"]["diverged"]) == (False, None)
    assert cells["static", "0"]["done"]
    cards = view["headline"]["cards"]
    assert cards[0] == ("Runs", "7 of 9", "have finished, 1 diverged")
    d = found["planned"][1]
    at_worst = [d[key]["difference"] for key in ("if_lost_failed", "if_diverged_failed")]
    assert cards[2] == (
        "coevolve − random",
        f"{100 * d['difference']:+.1f} points",
        f"95% interval {100 * d['low']:+.1f} to {100 * d['high']:+.1f}, 2 seeds; {100 * at_worst[0]:+.1f} "
        f"with lost trials as "
        f"failures; {100 * at_worst[1]:+.1f} with diverged seeds as failures",
    )


# Rules, each with rows made for it


def rows_of(arm, seed, tasks, name="iid", step=40, weak=""):
    """Rows of outcomes.csv. tasks: (scenario, successes, trials, samples) each."""
    return [
        dict(
            zip(
                results.OUTCOMES,
                (arm, seed, name, "development", step, f"t{i}", *task[:1], "x", weak, *task[1:]),
            )
        )
        for i, task in enumerate(tasks)
    ]


def budget(arm, seed, **more):
    return {"arm": arm, "seed": seed, "rollouts": 1.0, "initial_digest": "x", **more}


def test_a_policy_that_makes_its_failures_vanish_gains_nothing_unnoticed():
    """The random arm solves 50%; the other solves 45% and loses 80% of its failures."""
    rng, rows = random.Random(0), []
    for seed in range(5):
        for arm, skill, hidden in (("random", 0.5, 0.0), ("coevolve", 0.45, 0.8)):
            tasks = []
            for i in range(96):
                solved = sum(rng.random() < skill for _ in range(8))
                tasks.append(
                    (f"s{i % 12}", solved, 8 - sum(rng.random() < hidden for _ in range(8 - solved)), 8)
                )
            rows += rows_of(arm, seed, tasks)
    budgets = [budget(arm, seed) for arm in ("random", "coevolve") for seed in range(5)]
    asked = {**PLAN, "planned": [["coevolve", "random"]], "planned_later": [], "primary": "iid"}
    bare = [{key: value for key, value in r.items() if key != "samples"} for r in rows]
    for given in (rows, bare):  # also as published before the column existed
        found = results.summarise(given, budgets, asked)
        (d,) = found["planned"]
        worst = d["if_lost_failed"]
        assert d["low"] > 0.2 and worst["high"] < 0 and worst["p"] < 0.05 and d["p_holm"] == d["p"]
        assert worst["p_holm"] == worst["p"]
        assert any(n.endswith("if all of them are failures: THE SIGN CHANGES.") for n in found["notes"])
        text = table({**found, "signals": []})
        for before, row in (("  ", d), ("    lost trials as failures: ", worst)):
            points = {
                key: f"{100 * row[key]:+.1f}"
                for key in ("difference", "low", "high", "boot_low", "boot_high")
            }
            line = (
                f"{before}coevolve - random: {points['difference']} points, 5 seeds, "
                f"t interval {points['low']} to {points['high']}, "
                f"bootstrap {points['boot_low']} to {points['boot_high']}, "
                f"p {told_p(row['p'])} (Holm {told_p(row['p_holm'])}), "
                f"P(better) {row['p_improvement']:.2f}; 3 points need "
                f"{row['seeds_for_effect']} seeds"
            )
            assert line in text.splitlines()
        assert "if_lost_failed" in found["arms"][1] and "if_lost_failed" not in found["arms"][0]
        (curve,) = found["curves"]["iid"]["coevolve"]["if_lost_failed"]
        assert (
            curve
            == found["arms"][1]["if_lost_failed"]["mean"]
            == pytest.approx(sum(r["successes"] for r in rows if r["arm"] == "coevolve") / (5 * 96 * 8))
        )


def test_runs_of_a_budget_end_after_steps_of_their_own_and_are_compared_at_their_ends():
    """Seed 0 of the second arm ends at step 38, seed 1 at 41; the last evaluation takes 8 samples, not 2."""
    rows = []
    for arm, seed, end, solved in (
        ("static", 0, 50, 2),
        ("static", 1, 50, 4),
        ("random", 0, 38, 5),
        ("random", 1, 41, 8),
    ):
        for step in (s for s in (0, 20, 40) if s < end):
            rows += rows_of(arm, seed, [("s", 1, 2, 2), ("r", 0, 2, 2)], step=step)
        rows += rows_of(arm, seed, [("s", solved, 8, 8), ("r", 0, 7, 8)], step=end)
    budgets = [
        budget(a, s, steps=e)
        for a, s, e in (("static", 0, 50), ("static", 1, 50), ("random", 0, 38), ("random", 1, 41))
    ]
    found = results.summarise(
        rows, budgets, {**PLAN, "planned": [["random", "static"]], "planned_later": [], "primary": "iid"}
    )
    assert [a["values"] for a in found["arms"]] == [
        {"0": pytest.approx(2 / 15), "1": pytest.approx(4 / 15)},
        {"0": pytest.approx(5 / 15), "1": pytest.approx(8 / 15)},
    ]
    assert found["planned"][0]["difference"] == pytest.approx((13 - 6) / 30)
    line = found["curves"]["iid"]["random"]
    assert line["step"] == [0, 20, 39.5]  # step 40 of seed 1 alone is no point
    assert line["mean"] == [0.25, 0.25, pytest.approx(13 / 30)]
    assert line["lost"] == [0, 0, 2 / 32] and line["if_lost_failed"][2] == pytest.approx(13 / 32)
    assert found["curves"]["iid"]["static"]["step"] == [0, 20, 40, 50]
    (said,) = [n for n in found["notes"] if "not equal in steps" in n]
    assert "in seeds 0, 1: in seed 0 from 38 (random) to 50 (static)." in said


def test_sets_with_help_are_tables_of_their_own_beside_the_plain_ones():
    """The method solves 1 of 4 without help and 3 of 4 with it; there is no help before training."""
    rows, arms = [], ("static", "random", "evolver")
    for arm, seed in itertools.product(arms, range(3)):
        for step, solved in ((0, 2), (40, 1)):
            rows += rows_of(arm, seed, [("s", solved, 4, 4), ("r", solved, 4, 4)], step=step)
    for seed in range(3):
        rows += rows_of("evolver", seed, [("s", 3, 4, 4), ("r", 3, 4, 4)], "iid+help")
    pairs = [["evolver", "random"], ["random", "static"]]
    asked = {**PLAN, "planned": pairs, "planned_later": [], "primary": "iid"}
    found = results.summarise(rows, [budget(arm, seed) for arm in arms for seed in range(3)], asked)
    assert found["metric"]["set"] == "iid" and [a["mean"] for a in found["arms"]] == [0.25] * 3
    assert len(found["planned"]) == 2
    (helped,) = found["secondary"]
    assert helped["metric"]["set"] == "iid+help"
    assert [(a["arm"], a["mean"]) for a in helped["arms"]] == [
        ("static", 0.25), ("random", 0.25), ("evolver", 0.75)
    ]  # fmt: skip
    # The difference of two arms without help is not tested twice.
    assert [(d["a"], d["b"], d["difference"]) for d in helped["planned"]] == [("evolver", "random", 0.5)]
    assert found["curves"]["iid+help"]["evolver"]["mean"] == [0.5, 0.75]
    assert found["curves"]["iid"]["evolver"]["mean"] == [0.5, 0.25]
    assert f"{helped['metric']['name']}\n" in table({**found, "signals": []})


def test_few_lost_trials_are_counted_and_a_task_without_any_is_named():
    whole, nearly = [("s", 2, 4, 4)] * 200, [("s", 2, 4, 4)] * 199 + [("s", 2, 3, 4)]
    gone = [("s", 2, 4, 4)] * 199 + [("s", 0, 0, 4)]
    rows = rows_of("static", 0, nearly) + rows_of("random", 0, gone) + rows_of("oracle", 0, whole)
    found = results.summarise(rows, [budget(a, 0) for a in ("static", "random", "oracle")], PLAN)
    assert [(a["lost"], a["lost_tasks"]) for a in found["secondary"][0]["arms"]] == [(1, 0), (4, 1), (0, 0)]
    assert not any("if_lost_failed" in a for a in found["secondary"][0]["arms"])
    assert (
        "random lost 4 trials of success on the i.i.d. held-out set, last step, of 1 tasks all."
        in found["notes"]
    )
    told = "static 1 of 800 (0.1%) at step 40; random 4 of 800 (0.5%) at step 40; oracle none."
    assert any(told in n for n in found["notes"])


def test_a_weak_tool_whose_few_trials_are_lost_moves_the_macro_mean():
    """0.7% of the trials are lost, but half of one tool's."""
    rows = rows_of("static", 0, [("s", 4, 4, 4)] * 150, "balanced", weak="mv")
    rows += rows_of("static", 0, [("s", 0, 0, 4)], "balanced", weak="cp")
    found = compare(rows, METRICS["weak"], ["static"], [])["arms"][0]
    assert found["lost_share"] < 0.01 and found["mean"] == 1.0 and found["if_lost_failed"]["mean"] == 0.5


def test_a_run_that_lost_every_trial_is_told():
    rows = rows_of("static", 0, [("s", 0, 0, 4)] * 3) + rows_of("random", 0, [("s", 2, 4, 4)] * 3)
    asked = {**PLAN, "planned": [["random", "static"]], "planned_later": [], "primary": "iid"}
    found = results.summarise(rows, [budget(a, 0) for a in ("static", "random")], asked)
    static = found["arms"][0]
    assert static["n"] == 0 and static["lost_share"] == 1.0 and static["if_lost_failed"]["mean"] == 0.0
    (d,) = found["planned"]
    assert d["difference"] is None and d["if_lost_failed"]["difference"] == 0.5
    assert found["curves"]["iid"]["static"]["mean"] == [None]
    json.dumps(found, allow_nan=False)
    assert table({**found, "signals": []})


def spread(arm, shift, seeds=4, name="iid", weak=""):
    rng = random.Random(f"{arm} {name} {weak}")
    return [
        row
        for seed in range(seeds)
        for row in rows_of(
            arm,
            seed,
            [(f"s{i}", min(20, int(shift + rng.randint(0, 8))), 20, 20) for i in range(6)],
            name,
            weak=weak,
        )
    ]


def test_holm_has_one_family_for_the_primary_metric_and_one_for_all_others():
    arms = ("static", "random", "blame", "oracle")
    rows = []
    for k, arm in enumerate(arms):
        rows += (
            spread(arm, 2 * k) + spread(arm, k, name="balanced", weak="cp") + spread(arm, 3, name="balanced")
        )
    first = [
        ["random", "static"],
        ["blame", "random"],
        ["blame", "gone"],
    ]  # gone: of an arm that no cell has yet
    late = {"planned": [["oracle", "random"]], "date": "2026-11-24", "command": "c"}
    budgets = [budget(arm, seed) for arm in arms for seed in range(4)]
    for later in ([], [late]):
        found = results.summarise(rows, budgets, {**PLAN, "planned": first, "planned_later": later})
        assert found["metric"]["group"] == "weak" and len(found["secondary"]) == 2
        families = [found["planned"], [d for t in found["secondary"] for d in t["planned"]]]
        for family in families:
            early = [d for d in family if "planned_later" not in d]
            assert (
                len(early) == 3 * len(family) // (3 + len(later))
                and sum(d["n"] == 0 for d in early) == len(early) / 3
            )
            for told, against in ((early, early), ([d for d in family if "planned_later" in d], family)):
                values = [d.get("p", 1.0) for d in against]
                for d in told:
                    if "p" in d:
                        assert d["p_holm"] == pytest.approx(adjusted(d["p"], values))


def adjusted(p, family):
    """Holm: the maximum over all p up to this one of p times the number of values that are no smaller."""
    return min(1.0, max(q * sum(r >= q for r in family) for q in family if q <= p))


def test_an_older_table_asks_of_each_setting_for_the_most_trials_that_it_has():
    row = lambda setting, trials: {"set": "iid", "arm": f"random+{setting}", "trials": trials}
    rows = [row("a=1", 2), row("a=1", 1), row("a=2", 4), row("a=2", 3)]
    assert differences.samples(rows) == [2, 2, 4, 4]


@pytest.mark.parametrize(
    ("difference", "worst", "said"),
    [
        ((2.0, -1.0, 5.0), (-0.5, -3.0, 2.0), ": THE SIGN CHANGES"),
        ((2.0, 1.0, 3.0), (1.0, -1.0, 3.0), ": the interval then holds 0"),
        ((-2.5, -5.1, 0.1), (-3.3, -5.8, -0.8), ": THE INTERVAL IS THEN CLEAR OF 0"),
        ((0.0, -1.0, 1.0), (-20.0, -30.0, -10.0), ": THE INTERVAL IS THEN CLEAR OF 0"),
        ((2.0, 1.0, 3.0), (1.5, 0.5, 2.5), ""),
        ((2.0, -1.0, 5.0), (1.0, -2.0, 4.0), ""),
    ],
)
def test_what_lost_trials_could_change_about_a_difference_is_said(difference, worst, said):
    d, other = (dict(zip(("difference", "low", "high"), values)) for values in (difference, worst))
    assert notes._verdict(d, other) == said


def test_cells_that_other_models_explored_are_told():
    rows = [{**budget("random", seed), "explorer_model": model} for seed, model in enumerate("aab")]
    asked = {**PLAN, "planned": [["random", "static"]], "planned_later": [], "primary": "iid"}
    found = [line for line in notes.notes(asked, rows, []) if "SEVERAL MODELS" in line]
    assert found == [
        "SEVERAL MODELS ANSWERED THE EXPLORERS, and what is compared differs in them too: "
        "a (random, seed 0, random, seed 1); b (random, seed 2)."
    ]
    for fine in (rows[:2], [budget("random", seed) for seed in range(3)]):
        assert not any("SEVERAL MODELS" in line for line in notes.notes(asked, fine, []))


def test_the_first_plan_stands_and_later_ones_are_dated():
    made_ = lambda *pairs, day=1: {"planned": list(pairs), "date": f"2026-11-{day:02}", "command": f"c{day}"}
    begun = {
        **made_(),
        **plan_file.fixed(None, made_(("a", "b")), True),
        "arms": ["static", "random"],
        "settings": [{}],
    }
    assert (begun["planned"], begun["planned_later"]) == ([["a", "b"]], [])
    same = {"planned": [["a", "b"]], "planned_later": []}
    assert plan_file.fixed(begun, made_(("a", "b"), day=2), True) == same
    late = plan_file.fixed(begun, made_(("a", "c"), day=3), True)
    entry = {"planned": [["a", "c"]], "date": "2026-11-03", "command": "c3"}
    assert late == {"planned": [["a", "b"]], "planned_later": [entry]}
    assert plan_file.fixed({**begun, **late}, made_(("a", "c"), ("a", "b"), day=4), True) == late
    # The reverse of a difference is the same test.
    for known in (("b", "a"), ("c", "a")):
        with pytest.raises(ValueError, match="a - . is planned already: name a difference once"):
            plan_file.fixed({**begun, **late}, made_(known, day=5), True)
    (entry,) = plan_file.fixed(begun, made_(("b", "a"), ("c", "b"), day=5), False)["planned_later"]
    assert entry["planned"] == [["c", "b"]]
    # Without --planned only the usual contrasts of new arms are new.
    usual = made_(("random", "static"), day=5)
    assert plan_file.fixed(begun, usual, False)["planned_later"] == []
    wider = plan_file.fixed(begun, made_(("random", "static"), ("blame", "random"), day=6), False)
    assert [e["planned"] for e in wider["planned_later"]] == [[["blame", "random"]]]


def test_the_bootstrap_draws_the_scenarios_of_the_two_arms_and_counts_samples_without_a_task():
    alone = spread("static", 2) + spread("random", 6)
    more = [{**r, "arm": f"{r['arm']}+k=1", "scenario": f"other {r['scenario']}"} for r in alone]
    metric = METRICS["iid"]
    ours = difference(counts(alone, metric), "random", "static")
    assert ours == difference(counts(alone + more, metric), "random", "static")
    assert ours["boot_empty"] == 0
    # One of three scenarios holds a task with a weak tool: (2/3)^3 of the samples have none.
    rows = []
    for arm, shift in (("static", 0), ("random", 5)):
        for seed in range(4):
            rows += rows_of(arm, seed, [("s0", shift + seed % 3, 20, 20)], "balanced", weak="cp")
            rows += rows_of(arm, seed, [("s1", 9, 20, 20), ("s2", 9, 20, 20)], "balanced")
    d = difference(counts(rows, METRICS["weak"]), "random", "static")
    assert d["boot_empty"] == pytest.approx((2 / 3) ** 3, abs=0.03)
    asked = {**PLAN, "planned": [["random", "static"]], "planned_later": []}
    found = results.summarise(rows, [budget(a, s) for a in ("static", "random") for s in range(4)], asked)
    told = f"{100 * d['boot_empty']:.1f}% of the bootstrap samples hold no"
    assert any(told in n for n in found["notes"]) and told in table({**found, "signals": []})


def test_differences_that_are_all_alike_have_no_interval_and_no_p():
    rows = [row for s in range(4) for row in rows_of("static", s, [("a", 2, 4, 4), ("b", 1, 4, 4)])]
    rows += [row for s in range(4) for row in rows_of("random", s, [("a", 3, 4, 4), ("b", 2, 4, 4)])]
    asked = {**PLAN, "planned": [["random", "static"]], "planned_later": [], "primary": "iid"}
    found = results.summarise(rows, [budget(a, s) for a in ("static", "random") for s in range(4)], asked)
    (d,) = found["planned"]
    assert d["difference"] == 0.25 and {
        d[k] for k in ("low", "high", "boot_low", "boot_high", "p", "p_holm")
    } == {None}
    assert (found["arms"][0]["mean"], found["arms"][0]["low"]) == (0.375, None)
    text = table({**found, "signals": []})
    assert (
        "+25.0 points, 4 seeds, t interval none (all alike), bootstrap none (all alike), p not testable"
        in text
    )
    assert "nan" not in text and "+0.0 to" not in text


def test_a_diverged_seed_counts_as_0_on_either_side():
    rows = [row for s in range(3) for row in rows_of("static", s, [("a", 1 + s, 4, 4)])]
    rows += [row for s in range(3) for row in rows_of("random", s, [("a", 4, 4, 4)])]
    rates = [0.25, 0.5, 0.75]
    for pair, gone, expected in (
        (("random", "static"), ("static", 3), [1 - r for r in rates]),
        (("random", "static"), ("random", 1), [1 - rates[0], 0 - rates[1], 1 - rates[2]]),
    ):
        (d,) = compare(rows, METRICS["iid"], ["static"], [pair], [gone])["planned"]
        assert d["if_diverged_failed"]["by_seed"] == pytest.approx(dict(zip("012", expected)))
        assert d["n"] == (3 if gone[0] == "static" else 2)
