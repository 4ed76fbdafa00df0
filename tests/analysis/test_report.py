"""The report of a synthetic workdir: complete, self-contained, safe, and usable in mid-run."""

import base64
import json
import math
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coevolve_jax.analysis import page, report, stats, task_map
from coevolve_jax.analysis.summary import summary_table
from coevolve_jax.analysis.task_map import coordinates
from coevolve_jax.records.health import RULES
from coevolve_jax.types import SIGNAL_KINDS
from tests.support.report_cases import fake_comparison, fake_task, fake_with_queries, fake_workdir

EVIL = '<script>alert("x")</script>'


class Page(HTMLParser):
    """Text, tags and attributes of a page, and its packed data. Fails on tags that do not nest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words, self.links, self.packed = [], [], [], [], {}
        self.feed(text)
        assert not self.open
        self.view = unpack(self.packed["data"])
        self.parts = [
            unpack(self.packed[name])["rows"]
            for name in sorted(self.packed.keys() - {"data"}, key=part_number)
        ]

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append(tag)
        self.links += [attrs[name] for name in ("src", "href") if name in attrs]
        if tag != "meta":
            self.open.append((tag, attrs.get("id")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        tag, name = self.open[-1] if self.open else ("", None)
        if tag == "script" and name:
            self.packed[name] = data
        elif tag not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def part_number(name):
    return int(name.removeprefix("part-"))


def unpack(text):
    return json.loads(zlib.decompress(base64.b64decode(text)))


def build(path):
    return Page(report.write_report(path).read_text(encoding="utf-8"))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_report_of_a_finished_run_is_complete_and_self_contained(tmp_path):
    found = build(fake_workdir(tmp_path / "run"))
    size = (tmp_path / "run/report.html").stat().st_size
    assert size < page.LARGEST and found.links == []
    assert size - sum(map(len, found.packed.values())) < page.SCRIPT
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    for expected in (
        f"{summary['held_out_success_after']:.1%}",
        "paired over 20 tasks",
        "strategy coevolve",
        "jax 0.10.2",
        "10.8%",
        "8 initial tasks, 16 from evolution",
    ):
        assert expected in found.text, expected
    view, metrics = found.view, lines(tmp_path / "run/metrics.jsonl")
    assert view["metrics"]["step"] == list(range(12))
    assert np.allclose(view["metrics"]["signals/rare"], [row["signals"]["rare"] for row in metrics])
    assert view["metrics"]["evolution/pass_rate"][0] is None and view["metrics"]["evolution/pass_rate"][2] > 0
    assert ["refused: duplicate", 4] in view["fate"] and view["leak_thresholds"] == {
        "features": 0.9,
        "arguments": 0.88,
    }
    evolutions = [row["evolution"] for row in metrics if row["evolution"]]
    fate, table = dict(view["fate"]), summary_table(summary)
    assert fate["added"] == sum(e["added"] for e in evolutions)
    refused = sum(n for e in evolutions for n in e["refused"].values())
    assert fate["proposed"] == sum(e["proposed"] for e in evolutions) == fate["added"] + refused
    assert all(re.search(rf"^  {re.escape(name)} +{n}$", table, re.MULTILINE) for name, n in fate.items())
    for shown in (*view["tasks"], *view["evaluation_tasks"]):
        born = shown["lineage"]
        least = 0.88 if born["measure"] == "arguments" else 0.9
        assert math.isclose(shown["leak"], born["similarity"] / least, rel_tol=1e-4)
    assert {t["lineage"]["measure"] for t in view["tasks"]} == {"features", "arguments"}
    assert view["held_out"]["before"]["low"] < view["held_out"]["after"]["high"]
    by_task = summary["held_out"]["after"]["by_task"]
    calls = {
        t["id"]: sum(len(u["calls"]) for u in t["turns"]) for t in lines(tmp_path / "run/held_out.jsonl")
    }
    for n, shown in zip(view["held_out"]["calls"], view["held_out"]["by_calls"]["after"], strict=True):
        counts = np.sum([by_task[i] for i in by_task if calls[i] == n], axis=0)
        assert shown["low"] <= shown["value"] <= shown["high"] and np.isclose(
            shown["value"], counts[0] / counts[1], atol=1e-4
        )
    assert len(view["tasks"]) == 24 and len(view["evaluation_tasks"]) == 20
    rows = [row for file in sorted((tmp_path / "run/trajectories").iterdir()) for row in lines(file)]
    assert [row for part in found.parts for row in part][: len(rows)] == rows
    assert view["trajectories"]["task"] == [row["task_id"] for row in rows]


def test_the_list_of_trajectories_says_of_each_what_its_file_says(tmp_path):
    path = fake_workdir(tmp_path / "run")
    files = sorted((path / "trajectories").iterdir())
    first, *others = lines(files[0])
    marked = {**first, "valid": False, "reward": 1 / 3, "stop": "truncated", "queries": ["x" * 500, "y"]}
    silent = {**first, "rollout_index": 7, "queries": []}
    files[0].write_text("".join(json.dumps(row) + "\n" for row in (marked, *others, silent)))
    rows = [row for file in files for row in lines(file)]
    fired = [
        {"kind": kind, "task_id": task, "rollout_index": index, "step": step, "pattern": pattern}
        for kind, task, index, step, pattern in (
            ("rare", first["task_id"], first["rollout_index"], first["step"], "mkdir"),
            ("boundary", first["task_id"], first["rollout_index"], first["step"], None),
            ("forgetting", first["task_id"], first["rollout_index"], first["step"] + 1, None),
            ("forgetting", "another", first["rollout_index"], first["step"], None),
        )
    ]
    (path / "signals.jsonl").write_text("".join(json.dumps(s) + "\n" for s in fired))
    listed = build(path).view["trajectories"]
    column = lambda key, of=lambda value: value: [of(row[key]) for row in rows]
    told = {
        "step": column("step"),
        "task": column("task_id"),
        "rollout": column("rollout_index"),
        "success": column("success"),
        "valid": [False] + [True] * (len(rows) - 1),
        "reward": [0.33333, *column("reward")[1:]],
        "stop": ["truncated"] + ["done"] * (len(rows) - 1),
        "tokens": column("policy_tokens"),
        "calls": column("steps", len),
        "signals": [["rare: mkdir", "boundary"]] + [[]] * (len(rows) - 1),
        "query": ["x" * 160, *column("queries", lambda queries: queries[0] if queries else "")[1:]],
    }
    assert listed == told and {*told["success"]} == {True, False}


def add(file, rows):
    """Adds rows to a file and leaves its time, which the page names, as it was."""
    there = file.stat()
    with open(file, "a") as log:
        log.writelines(json.dumps(row) + "\n" for row in rows)
    os.utime(file, ns=(there.st_atime_ns, there.st_mtime_ns))


def test_rows_and_counts_in_a_strategys_own_format_are_no_signals(tmp_path):
    path = fake_workdir(tmp_path / "run")
    before = build(path).view
    named = before["tasks"][-1]["lineage"]
    own = [
        {"kind": "mine", "score": 0.5},
        {"kind": named["signal"], "task_id": named["parent"], "p_hat": 0.5},
    ]
    add(path / "signals.jsonl", own)
    assert build(path).view == before and before["signal_kinds"] == sorted(SIGNAL_KINDS)


def test_a_query_that_is_learned_from_is_one_task_whose_rewards_are_not_told(tmp_path):
    path, query = fake_with_queries(tmp_path / "run")
    view = build(path).view
    (shown,) = [t for t in (*view["tasks"], *view["evaluation_tasks"]) if t["id"] == "query-0-0"]
    assert shown["origin"] == "query" and shown["visits"] == 5 and shown["turns"][0]["calls"]
    assert shown["results"] == {"before": [0, 4], "after": [4, 4]} and shown["joined"] is None
    assert shown["first_score"] is shown["last_score"] is None
    listed = view["trajectories"]
    at = listed["task"].index("query-0-0")
    assert listed["success"][at] is listed["reward"][at] is None and listed["valid"][at]
    assert None not in listed["success"][:at]


def test_the_tasks_of_all_held_out_sets_have_results(tmp_path):
    path = fake_workdir(tmp_path / "run")
    add(path / "held_out.jsonl", [fake_task(np.random.default_rng(3), "b-0", kind="balanced").to_json()])
    summary = json.loads((path / "summary.json").read_text())
    sides = {"before": {"by_task": {"b-0": [1, 4]}}, "after": {"by_task": {"b-0": [4, 4]}}}
    (path / "summary.json").write_text(json.dumps({**summary, "balanced": sides}))
    results = {t["id"]: t["results"] for t in build(path).view["evaluation_tasks"]}
    assert results["b-0"] == {"before": [1, 4], "after": [4, 4]}
    assert results["held_000"]["after"] == summary["held_out"]["after"]["by_task"]["held_000"]


def test_tasks_join_when_their_evolution_ends(tmp_path):
    """Evolutions of steps 2 and 5 that take four steps; those of 8 and 11 have not ended yet."""
    path = fake_workdir(tmp_path / "run")
    rows = lines(path / "metrics.jsonl")
    for row in rows:
        row["tasks"] = 8 + 4 * sum(step + 4 <= row["step"] for step in (2, 5))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    joined = [t["joined"] for t in build(path).view["tasks"]]
    assert joined == [None] * 8 + [6] * 4 + [9] * 4 + [8] * 4 + [11] * 4
    joined = [t["joined"] for t in build(fake_workdir(tmp_path / "each", steps=3, every=1)).view["tasks"]]
    assert joined == [None] * 8 + [0] * 4 + [1] * 4 + [2] * 4


def test_a_fork_says_what_it_goes_on_from(tmp_path):
    path = fake_workdir(tmp_path / "run")
    told = {"run": "/runs/one", "step": 6, "config_digest": "9f3a", "strategy": "static"}
    (path / "forked.json").write_text(json.dumps(told))
    facts = build(path).view["headline"]["facts"]
    assert "goes on from step 6 of one (config 9f3a), whose strategy was static" in facts


def test_every_task_and_every_refusal_leads_to_what_is_behind_it(tmp_path):
    path = fake_workdir(tmp_path / "run")
    found = build(path)
    behind = [row for part in found.parts for row in part][len(found.view["trajectories"]["step"]) :]
    asked = lines(path / "llm_calls.jsonl")
    assert sum(len(row["llm_calls"]) for row in behind) == len(asked) > 200
    for task in found.view["tasks"]:
        own = behind[task["row"]] if task["lineage"]["signal"] else None
        assert (task["row"] is None) == (own is None) and task["asked"] == len(
            own["llm_calls"] if own else ()
        )
        assert own is None or task["id"] in [p["task"] for p in own["exploration"]["proposals"]]
    *refused, bare = found.view["refused"]
    assert len(refused) == 16 and {row["reason"] for row in refused} == {"too_short"}
    for row in refused:
        origin = behind[row["row"]]
        assert origin["exploration"]["proposals"][row["proposal"]]["task"] is None
        assert row["id"].startswith(origin["context"])
    assert bare["reason"] == "no_task_came_of_it" and behind[bare["row"]]["context"] == "initial-0-context-0"


def test_a_context_that_is_explored_again_has_its_own_questions_each_time(tmp_path):
    path = fake_workdir(tmp_path / "run", steps=3)
    first, *_ = lines(path / "explorations.jsonl")
    rows = [*lines(path / "explorations.jsonl"), {**first, "proposals": []}]
    (path / "explorations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = lines(path / "llm_calls.jsonl")
    again = [d for d in asked if d["about"]["context"] == first["context"]["id"] and d["role"] == "explore"][
        :3
    ]
    with open(path / "llm_calls.jsonl", "a") as file:
        file.writelines(json.dumps({**d, "lines": [], "answers": ["again"]}) + "\n" for d in again)
    found = build(path)
    behind = [row for part in found.parts for row in part]
    one, two = [row for row in behind if row.get("context") == first["context"]["id"]]
    assert [d["role"] for d in one["llm_calls"]][:2] == ["reflect", "explore"] and len(one["llm_calls"]) == 15
    assert [d["answers"] for d in two["llm_calls"]] == [["again"]] * 3 and not two["exploration"]["proposals"]
    assert [row["proposal"] for row in found.view["refused"] if row["id"].startswith(one["context"])] == [
        0,
        None,
    ]


def test_costs_are_told_by_role_and_evolution(tmp_path):
    costs = build(fake_workdir(tmp_path / "run")).view["costs"]
    assert costs["roles"] == ["reflect", "explore", "abstract", "judge", "solve"]
    assert [row["step"] for row in costs["rows"]] == [None, 2, 5, 8, 11] and costs["ended"] == 11
    assert costs["budget"] == {"tokens": 30_000, "money": None}
    judged = {"requests": 8, "tokens_in": 800, "tokens_out": 160, "money": pytest.approx(0.008)}
    assert costs["rows"][1]["roles"]["judge"] == judged and costs["rows"][1]["tokens"] == 4 * 15 * 120


def test_the_signal_that_a_reflection_names_is_the_one_that_is_shown(tmp_path):
    path = fake_workdir(tmp_path / "run")
    tasks, signals = lines(path / "tasks.jsonl"), lines(path / "signals.jsonl")
    born = next(t["lineage"] for t in tasks if t["lineage"]["signal"])
    of_it = [s for s in signals if s["kind"] == born["signal"] and s["task_id"] == born["parent"]]
    earlier = {**of_it[0], "step": 0, "rollout_index": 5}
    born["context"] = "/".join(str(earlier[k]) for k in ("kind", "step", "task_id", "rollout_index"))
    (path / "tasks.jsonl").write_text("".join(json.dumps(t) + "\n" for t in tasks))
    (path / "signals.jsonl").write_text("".join(json.dumps(s) + "\n" for s in [earlier, *signals]))
    shown = build(path).view["tasks"]
    assert [t["fired"] for t in shown if t["lineage"]["context"] == born["context"]] == [earlier]
    for task in shown:
        fired = task["fired"]
        assert (fired is None) == (task["lineage"]["signal"] is None)
        assert not fired or (fired["kind"], fired["task_id"]) == (task["origin"], task["lineage"]["parent"])
    assert {t["origin"] for t in shown} == {*SIGNAL_KINDS, "initial"}


def test_what_files_say_is_never_markup(tmp_path):
    path = fake_workdir(tmp_path / "run")
    for file in path.rglob("*.json*"):
        text = re.sub(r'(": )"', lambda m: m[1] + json.dumps(EVIL)[:-1], file.read_text())
        file.write_text(text)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, EVIL: EVIL, "seed": EVIL}))
    path.rename(tmp_path / 'a<b>&"c"')
    found = build(tmp_path / 'a<b>&"c"')
    raw = (tmp_path / 'a<b>&"c"' / "report.html").read_text()
    assert EVIL not in raw and "<b>&" not in raw and EVIL in found.text
    assert found.tags.count("script") == 2 + len(found.parts)
    assert EVIL in json.dumps(found.view, ensure_ascii=False).replace('\\"', '"')


def test_report_in_the_middle_of_a_run_says_what_is_missing(tmp_path):
    path = fake_workdir(tmp_path / "run", steps=2, finished=False)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "rewa')  # a row in mid-write
    found = build(path)
    assert "not finished" in found.text and "2 of 2 steps" in found.text and "strategy coevolve" in found.text
    assert found.view["held_out"] is None and found.view["trajectories"] == {}


@pytest.mark.parametrize(
    "gone",
    ["metrics.jsonl", "tasks.jsonl", "held_out.jsonl", "signals.jsonl", "config.json", "trajectories", "all"],
)
def test_any_file_may_be_missing(tmp_path, gone):
    path = fake_workdir(tmp_path / "run", steps=4)
    for item in sorted(path.rglob("*"), reverse=True):
        if gone in ("all", item.name, item.parent.name):
            item.rmdir() if item.is_dir() else item.unlink()
    found = build(path)
    assert "An agent and its training set" in found.text
    assert (found.view["metrics"]["step"] == []) == (gone in ("metrics.jsonl", "all"))
    assert (found.view["tasks"] == []) == (gone in ("tasks.jsonl", "all"))
    assert (found.view["trajectories"] == {}) == (gone in ("trajectories", "all"))


def test_a_broken_line_is_named(tmp_path):
    path = fake_workdir(tmp_path / "run", steps=3)
    rows = (path / "signals.jsonl").read_text().splitlines()
    (path / "signals.jsonl").write_text("\n".join([rows[0], "{oops", *rows[1:]]) + "\n")
    with pytest.raises(ValueError, match=r"signals\.jsonl, line 2 is not JSON"):
        report.write_report(path)
    (path / "signals.jsonl").unlink()
    (path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        report.write_report(path)


def test_the_same_files_give_the_same_page(tmp_path):
    path = fake_workdir(tmp_path / "run", steps=3)
    assert report.write_report(path).read_bytes() == report.write_report(path).read_bytes()


def test_numbers_that_are_none_are_null(tmp_path):
    path = fake_workdir(tmp_path / "run", steps=3)
    text = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(re.sub(r'"loss": [^,]+', '"loss": NaN', text))
    assert "loss" not in build(path).view["metrics"]


def test_numbers_and_half_characters_of_a_trajectory_do_not_spoil_the_page(tmp_path):
    path = fake_workdir(tmp_path / "run", steps=3)
    file = next((path / "trajectories").iterdir())
    row = {**lines(file)[0], "reward": float("nan"), "queries": ["\ud800 half"], "note": float("inf")}
    file.write_text(json.dumps(row) + "\n")
    ((shown, *_),) = build(path).parts
    assert shown["reward"] is None and shown["note"] is None and shown["queries"] == ["\ud800 half"]


def test_evaluations_on_the_way_become_curves_with_intervals_over_tasks(tmp_path):
    path = fake_workdir(tmp_path / "run", steps=3)
    by_task = {"a": [2, 2], "b": [1, 2], "c": [0, 2]}
    rows = [
        {"step": step, "set": name, "split": "test", "success": 0.5, "by_task": by_task, "weak_success": None}
        for step in (0, 2)
        for name in ("iid", "balanced")
    ]
    rows[1]["scenarios"] = dict.fromkeys(by_task, "x")  # the row knows of this one scenario only
    rows.append(
        {"step": 1, "set": "iid", "split": "test", "success": 0.25, "by_task": {}, "macro_weak": 0.125}
    )
    (path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    iid, balanced, weak = build(path).view["evaluations"]
    assert (iid["name"], balanced["name"]) == ("iid, test", "balanced, test")
    assert [p["step"] for p in iid["points"]] == [0, 1, 2]
    first, second = iid["points"][:2]
    assert 0 <= first["low"] < first["value"] == 0.5 < first["high"] <= 1
    one = balanced["points"][0]  # one scenario says next to nothing
    assert one["value"] == 0.5 and one["low"] < 0.01 and one["high"] > 0.99
    assert weak == {"name": "iid, test: weak tools", "points": [{**second, "value": 0.125}]}
    assert second == {"step": 1, "value": 0.25, "low": None, "high": None}


def lossy_workdir(path):
    """A run whose last evaluation lost trials: two of each third task, and all of the last one."""
    fake_workdir(path)
    summary = json.loads((path / "summary.json").read_text())
    by_task = summary["held_out"]["after"]["by_task"]
    for i, (task, (solved, _)) in enumerate(by_task.items()):
        if i % 3 == 0:
            by_task[task] = [min(solved, 2), 2]
    by_task[task] = [0, 0]
    rate = sum(s for s, _ in by_task.values()) / sum(n for _, n in by_task.values())
    summary["held_out"]["after"] |= {"success": rate, "invalid": 4 * 20 - sum(n for _, n in by_task.values())}
    for side in summary["held_out"].values():
        side["scenarios"] = {t: f"s{i % 7}" for i, t in enumerate(side["by_task"])}
    (path / "summary.json").write_text(json.dumps(summary))
    rows = [
        {"step": step, "set": "iid", "split": "test", **summary["held_out"][when]}
        for step, when in ((0, "before"), (12, "after"))
    ]
    (path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return summary


def test_lost_trials_stand_in_the_cards_the_table_and_the_curves(tmp_path):
    summary = lossy_workdir(tmp_path / "run")
    by_task = summary["held_out"]["after"]["by_task"]
    lost = sum(4 - n for _, n in by_task.values())
    solved = sum(s for s, _ in by_task.values())
    both = [t for t, (_, n) in by_task.items() if n]
    before = summary["held_out"]["before"]["by_task"]
    rates = [
        sum(s for s, _ in side.values()) / sum(n for _, n in side.values()) for side in (before, by_task)
    ]
    assert rates == [summary["held_out"][when]["success"] for when in ("before", "after")]
    view = build(tmp_path / "run").view
    cards = {title: (value, note) for title, value, note in view["headline"]["cards"]}
    value, note = cards["Held-out success"]
    assert lost == 18 and value == f"{rates[0]:.0%} → {rates[1]:.0%}"
    told = f"of 80 trials ({lost / 80:.1%}); success {solved / 80:.1%} if all of them are failures"
    assert note.endswith(f"; {lost} lost after {told}")
    worst = solved / 80 - sum(s for s, _ in before.values()) / 80
    rate = lambda counts: counts[0] / counts[1]
    gains = [rate(by_task[t]) - rate(before[t]) for t in both]  # what its interval and its test are of
    assert cards["Gain"][0] == f"{100 * sum(gains) / len(both):+.1f} points"
    assert f"paired over {len(both)} tasks in 7 scenarios" in cards["Gain"][1]
    assert cards["Gain"][1].endswith(
        f"; {100 * worst:+.1f} points if lost trials are failures. "
        "With fewer than 15 scenarios the 95% intervals are too narrow."
    )
    known, failed = view["evaluations"]
    assert (known["name"], failed["name"]) == ("iid, test", "iid, test: lost trials as failures")
    first, last = known["points"]
    assert "lost" not in first and (last["lost"], last["asked"]) == (lost, 80)
    assert last["value"] == pytest.approx(solved / (80 - lost), abs=1e-4)
    (point,) = failed["points"]
    assert point["step"] == 12 and point["value"] == pytest.approx(solved / 80, abs=1e-4)
    assert point["low"] < point["value"] < point["high"]
    lines_ = [line.split("  ") for line in summary_table(summary).splitlines() if "lost" in line]
    shown = {words[1]: " ".join(w.strip() for w in words[2:] if w) for words in lines_}
    assert shown["lost after, i.i.d. set"] == f"{lost} {told}"
    assert shown["gain, lost as failures"].startswith(f"{100 * worst:+.1f} points 95% interval")
    assert list(shown) == [
        "before, lost as failures", "after, lost as failures", "gain, lost as failures",
        "paired permutation test, lost as failures", "lost after, i.i.d. set",
    ]  # fmt: skip


def test_held_out_success_by_calls_is_that_of_the_tasks_with_as_many(tmp_path):
    summary = lossy_workdir(tmp_path / "run")
    shown = build(tmp_path / "run").view["held_out"]
    calls = {
        t["id"]: sum(len(u["calls"]) for u in t["turns"]) for t in lines(tmp_path / "run/held_out.jsonl")
    }
    assert shown["calls"] == sorted(set(calls.values()))
    for when in ("before", "after"):
        side = summary["held_out"][when]
        for n, point in zip(shown["calls"], shown["by_calls"][when], strict=True):
            own = {t: c for t, c in side["by_task"].items() if calls[t] == n and c[1]}
            if not own:
                assert point is None
                continue
            e = stats.share(*zip(*own.values()), [side["scenarios"][t] for t in own])
            assert [point[key] for key in ("value", "low", "high")] == pytest.approx(
                [e.value, e.low, e.high], abs=1e-4
            )
    result = stats.held_out(summary)
    for when, e in (("before", result.before), ("after", result.after)):
        assert [shown[when][key] for key in ("value", "low", "high")] == pytest.approx(
            [e.value, e.low, e.high], abs=1e-4
        )


def test_a_run_whose_every_trial_was_lost_says_so(tmp_path):
    summary = lossy_workdir(tmp_path / "run")
    after = summary["held_out"]["after"]
    after |= {"by_task": {t: [0, 0] for t in after["by_task"]}, "success": None}
    (tmp_path / "run/summary.json").write_text(json.dumps(summary))
    cards = {title: (value, note) for title, value, note in build(tmp_path / "run").view["headline"]["cards"]}
    told = "of 80 trials (100.0%); success 0.0% if all of them are failures"
    assert cards["Held-out success"] == ("—", f"80 lost after {told}")
    text = summary_table(summary)
    assert "not measured" in text and told in text and "after, lost as failures" in text


def test_cards_of_a_run_say_what_its_files_hold(tmp_path):
    path = fake_workdir(tmp_path / "run")
    view, summary = build(path).view, json.loads((path / "summary.json").read_text())
    cards = {title: (value, note) for title, value, note in view["headline"]["cards"]}
    born = Counter(t["lineage"]["signal"] or "initial" for t in lines(path / "tasks.jsonl"))
    new = sum(n for kind, n in born.items() if kind != "initial")
    value, note = cards["Training set"]
    assert value == f"{born['initial']} → {born['initial'] + new} tasks"
    assert note.startswith(f"{born['initial']} initial tasks, {new} from evolution: ")
    assert dict(part.split()[::-1] for part in note.partition(": ")[2].split(", ")) == {
        kind: str(n) for kind, n in born.items() if kind != "initial"
    }
    assert cards["Time"][1] == "10.8% of it on evolution"
    result = stats.held_out(summary)
    sides = [f"{side.low:.0%} to {side.high:.0%}" for side in (result.before, result.after)]
    assert cards["Held-out success"][1] == f"95% intervals {sides[0]} and {sides[1]}"
    d = result.paired.difference
    assert cards["Gain"][1].startswith(f"95% interval {100 * d.low:+.1f} to {100 * d.high:+.1f}; p ")
    assert "strategy coevolve · seed 0 · 12 steps" in view["headline"]["facts"]


def test_a_gain_that_is_the_same_for_every_task_has_no_interval(tmp_path):
    path = fake_workdir(tmp_path / "run")
    summary = json.loads((path / "summary.json").read_text())
    for when, solved in (("before", 0), ("after", 4)):
        summary["held_out"][when]["by_task"] = {f"held_{i:03d}": [solved, 4] for i in range(20)}
    (path / "summary.json").write_text(json.dumps(summary))
    cards = {title: note for title, _, note in build(path).view["headline"]["cards"]}
    assert cards["Gain"] == "no interval: all tasks alike; p < 0.001, paired over 20 tasks in 20 scenarios"
    assert cards["Held-out success"] == "95% intervals 0% to 17% and 83% to 100%"
    assert "+100.0 points" in summary_table(summary) and "no interval: all tasks alike" in summary_table(
        summary
    )


def test_alerts_are_told_by_how_long_they_lasted(tmp_path):
    lasting, once = build(fake_workdir(tmp_path / "run", steps=9)).view["alerts"]
    assert (
        lasting.pop("meaning") == RULES["zero_variance_groups"][2]
        and once["name"] == "truncated"
        and not once["lasting"]
    )
    assert lasting == {"name": "zero_variance_groups", "steps": 4, "longest": 3, "last": 6, "lasting": True}


def test_the_data_of_a_large_run_lie_beside_its_page(tmp_path, monkeypatch):
    path = fake_workdir(tmp_path / "run")
    monkeypatch.setattr(page, "PART", 4000)
    whole = build(path)
    assert len(whole.parts) > 2 and not (path / "report_data").exists()
    monkeypatch.setattr(page, "LARGEST", 1000)
    apart = build(path)
    files = sorted((path / "report_data").iterdir())
    texts = [re.fullmatch(r'coevolvePart\((\d+),"([\w+/=]+)"\)\n', f.read_text()).groups() for f in files]
    assert apart.parts == [] and [int(n) for n, _ in texts] == list(range(len(files)))
    assert [unpack(text)["rows"] for _, text in texts] == whole.parts
    assert apart.view["part_starts"] == list(np.cumsum([0, *map(len, whole.parts)])[:-1])
    monkeypatch.undo()
    build(path)
    assert list((path / "report_data").iterdir()) == []


def test_a_comparison_has_its_own_page(tmp_path):
    found = build(fake_comparison(tmp_path / "compare"))
    for expected in ("3 arms over 3 seeds", "macro success on weak tools", "+10.0 points", "9 of 9"):
        assert expected in found.text, expected
    assert found.view["kind"] == "comparison" and len(found.view["cells"]) == 9
    assert found.view["notes"][0] == "Read on the test set."
    found = build(fake_comparison(tmp_path / "begun", finished=False))
    assert "not finished: 0 of 9 runs" in found.text and found.view["tables"] == []


def test_the_runs_of_a_comparison_are_its_own_and_those_that_joined(tmp_path):
    path = fake_comparison(tmp_path / "compare", arms=("coevolve", "random", "guest"))
    plan = json.loads((path / "plan.json").read_text())
    guests = [{"arm": "guest", "seed": seed, "setting": []} for seed in range(3)]
    again = {"arm": "random", "seed": 0, "setting": {}}
    plan |= {"arms": ["coevolve", "random"], "joined": [{"cells": guests}, {"cells": [*guests, again]}]}
    (path / "plan.json").write_text(json.dumps(plan))
    assert build(path).view["headline"]["lead"].startswith("3 arms over 3 seeds")
    shutil.rmtree(path / "cells/random/seed_2")
    headline = build(path).view["headline"]
    assert headline["cards"][0][1] == "8 of 9"
    assert headline["lead"].startswith("The comparison is not finished: 8 of 9 runs are. So far")


COUNTS = st.lists(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 3)).map(Counter), max_size=12)


@given(COUNTS)
def test_the_map_shows_no_more_than_there_is_and_the_same_every_time(counts):
    points, share = coordinates(counts)
    assert points.shape == (len(counts), 2) and np.isfinite(points).all() and 0 <= share <= 1 + 1e-9
    again, _ = coordinates(counts)
    vectors = task_map._unit_tfidf(counts).toarray() if counts else np.zeros((1, 1))
    lengths = np.linalg.svd(vectors - vectors.mean(0), compute_uv=False)[:3]
    if (np.diff(lengths) < -1e-4).all():  # no two axes are equally long
        assert np.allclose(again, points, atol=1e-6)


def test_the_map_is_the_scaling_of_cosine_distances():
    """Compares with the textbook: double centring of the squared distances (Torgerson 1952)."""
    rng = np.random.default_rng(0)
    counts = [
        Counter({f"f{i}": int(n) for i, n in enumerate(row) if n}) for row in rng.integers(0, 3, (15, 9))
    ]
    points, share = coordinates(counts)
    frequency = Counter(f for c in counts for f in c)
    vectors = np.array(
        [[c[f"f{i}"] * np.log(16 / (frequency[f"f{i}"] + 0.5)) for i in range(9)] for c in counts]
    )
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    squared = 2 - 2 * vectors @ vectors.T
    centring = np.eye(15) - 1 / 15
    values, axes = np.linalg.eigh(-centring @ squared @ centring / 2)
    expected = axes[:, [-1, -2]] * np.sqrt(values[[-1, -2]])
    assert np.allclose(abs(points), abs(expected), atol=1e-8)
    assert np.isclose(share, values[-2:].sum() / values.sum())


def test_command_line_names_the_report_and_refuses_what_is_no_workdir(tmp_path):
    path = fake_workdir(tmp_path / "run", steps=3)
    command = [sys.executable, "-m", "coevolve_jax.analysis.report"]
    done = subprocess.run([*command, path], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == str(path / "report.html")
    done = subprocess.run([*command, tmp_path / "nowhere"], capture_output=True, text=True)
    assert done.returncode == 1 and "nowhere is not a folder" in done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(SystemExit, match="holds neither a run nor a comparison"):
        report.main([str(tmp_path)])
    with pytest.raises(SystemExit, match="Port 80000 cannot be served"):
        report.main([str(path), "--live", "--port=80000"])
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_page_may_lie_elsewhere(tmp_path):
    path = fake_workdir(tmp_path / "run", steps=3)
    report.main([str(path), f"--out={tmp_path / 'pages' / 'mine.html'}"])
    assert not (path / "report.html").exists()
    assert (tmp_path / "pages" / "mine.html").read_bytes() == report.write_report(path).read_bytes()
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="file cannot be used .*: --out=FILE writes the page elsewhere"):
        report.main([str(path), f"--out={tmp_path / 'file' / 'mine.html'}"])
    with pytest.raises(SystemExit, match="is for a page on disk: leave it or --live out"):
        report.main([str(path), "--live", "--out=mine.html"])


def test_a_warm_start_is_no_run(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "summary.json").write_text('{"seconds": 5}')
    (tmp_path / "sft.jsonl").write_text('{"step": 1, "loss": 0.5, "seconds": 2}\n')
    with pytest.raises(
        SystemExit, match="holds a warm start, .* read its sft.jsonl and summary.json, or begin"
    ):
        report.main([str(tmp_path)])
    assert not (tmp_path / "report.html").exists()
