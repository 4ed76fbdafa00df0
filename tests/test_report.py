"""The report of a synthetic workdir: complete, self-contained, safe, and usable in the middle of a run."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from clock import Stopwatch

from coevolve_jax.analysis import report
from coevolve_jax.types import SIGNAL_KINDS, Call, Lineage, Signal, Task, Turn

EVIL = '<script>alert("x")</script>'
QUERIES = (
    "Change into the folder 'reports' and tell me which files it holds.",
    "Move 'budget_2024.csv' to 'archive', then search it for 'total'.",
    "Post 'Quarterly numbers are in' with the tag '#finance' and pin it.",
    "What does a share of NVDA cost? Buy 12 of them at that price.",
)
CALLS = (
    Call("cd", {"folder": "reports"}),
    Call("ls", {}),
    Call("mv", {"source": "budget_2024.csv", "destination": "archive"}),
    Call("grep", {"file_name": "budget_2024.csv", "pattern": "total"}),
    Call("place_order", {"symbol": "NVDA", "amount": 12}),
)


def fake_task(rng, name, step=0, kind="initial", signal=None, parent="scenario_7"):
    turns = tuple(
        Turn(str(rng.choice(QUERIES)), tuple(CALLS[i] for i in rng.integers(0, 5, rng.integers(1, 4))))
        for _ in range(rng.integers(1, 3))
    )
    lineage = Lineage(
        kind,
        signal,
        parent,
        f"ctx_{name}" if signal else None,
        "scripted",
        (2, 3, int(rng.integers(4, 9))),
        "accept",
        "ran in a fresh environment",
        step,
        float(rng.beta(5, 6)),
        "multi_turn_base_17",
    )
    return Task(name, "bfcl", {"root": {}}, turns, "", lineage)


def fake_trajectory(rng, task, step, rollout_index, success):
    steps = [
        {
            "turn": number,
            "text": json.dumps(call.to_json()),
            "call": call.to_json(),
            "observation": '{"current_directory_content": ["budget_2024.csv", "archive"]}',
            "error": False,
        }
        for number, turn in enumerate(task.turns)
        for call in turn.calls
    ]
    if not success:
        steps[-1].update(observation='{"error": "mv: cannot move: no such file or directory"}', error=True)
        steps.append(
            {
                "turn": len(task.turns) - 1,
                "text": '<tool_call>{"name": "mv", ',
                "call": None,
                "observation": '{"error": "not a JSON object"}',
                "error": True,
            }
        )
    return {
        "step": step,
        "task_id": task.id,
        "rollout_index": rollout_index,
        "reward": float(success),
        "success": success,
        "valid": True,
        "stop": "done",
        "policy_tokens": int(rng.integers(60, 200)),
        "steps": steps,
        "queries": [turn.query for turn in task.turns],
        "text": "<|im_start|>system\nYou are an agent.<|im_end|>\n" * 8,
    }


def fake_row(rng, step, skill, signals, evolution, tasks):
    """A row of metrics.jsonl of a policy that succeeds at rate `skill`."""
    noise = rng.standard_normal(8)
    success = float(np.clip(skill + 0.06 * noise[0], 0, 0.9))
    seconds = {
        "rollout": 2.6,
        "environment": 0.3,
        "update": 0.8,
        "signals": 0.01,
        "checkpoint": 0.1,
        "evolution": 3.0 if evolution else 0.0,
    }
    return {
        "step": step,
        "reward": success + 0.06,
        "success": success,
        "valid": 1.0,
        "loss": 0.01 * noise[1],
        "policy_loss": 0.01 * noise[1],
        "kl": 0.002 * step + abs(0.002 * noise[2]),
        "ratio_max": 1.1,
        "entropy": 1.2 - 0.4 * skill + 0.02 * noise[3],
        "grad_norm": 0.6 + abs(0.2 * noise[4]),
        "clip_fraction": 0.01,
        "mismatch_mean": abs(2e-6 * noise[5]),
        "mismatch_max": 1e-5,
        "policy_tokens": 9000,
        "mean_turn_calls": 3.1,
        "malformed": 0.02,
        "mixed_groups": 0.6 + 0.05 * noise[6],
        "success_initial": success + 0.05,
        "success_new": success - 0.1 if tasks[-1].lineage.signal else None,
        "tasks": len(tasks),
        "signals": {k: sum(s.kind == k for s in signals) for k in SIGNAL_KINDS},
        "evolution": evolution,
        "held_out": None,
        "seconds": {**seconds, "step": sum(seconds.values()) - 0.3},
    }


def fake_workdir(path, steps=12, every=3, initial=8, added=4, held_out=20, finished=True, seed=0):
    """Writes the files of a run that learns a little."""
    rng = np.random.default_rng(seed)
    rows, found = [], []
    tasks = [fake_task(rng, f"init_{i:03d}") for i in range(initial)]
    (path / "trajectories").mkdir(parents=True)
    for step in range(steps):
        skill = 0.3 + 0.35 * step / steps
        signals = [
            Signal(k, tasks[int(rng.integers(len(tasks)))].id, 3, step, "mkdir" if k == "rare" else None)
            for k, rate in zip(SIGNAL_KINDS, (5, 9, 3))
            for _ in range(1 + rng.poisson(rate * (1.3 - skill)))
        ]
        evolution = None
        if (step + 1) % every == 0:
            for i in range(added):
                s = signals[int(rng.integers(len(signals)))]
                tasks.append(fake_task(rng, f"{s.kind}_{step:03d}_{i}", step, "signal", s.kind, s.task_id))
            refused = {"duplicate": 1, "near copy of an evaluation task": added - 1}
            evolution = {
                "proposed": 2 * added,
                "accepted": added,
                "retained": 0,
                "discarded": added,
                "added": added,
                "refused": refused,
                "pass_rate": 0.6 + 0.2 * rng.random(),
            }
            trajectories = [fake_trajectory(rng, tasks[-1 - m], step, m, m % 2 == 0) for m in range(3)]
            _dump(path / f"trajectories/step_{step:05d}.jsonl", trajectories)
        rows.append(fake_row(rng, step, skill, signals, evolution, tasks))
        found += signals
    for name, lines in (
        ("metrics", rows),
        ("tasks", [t.to_json() for t in tasks]),
        ("signals", [s.to_json() for s in found]),
    ):
        _dump(path / f"{name}.jsonl", lines)
    config = {"seed": seed, "strategy": {"name": "coevolve"}, "data": {"leak_threshold": 0.9}}
    (path / "config.json").write_text(json.dumps(config))
    if finished:
        (path / "summary.json").write_text(json.dumps(_summary(rng, rows, held_out, seed)))
    return path


def _summary(rng, rows, held_out, seed):
    def evaluation(rate):
        skill = np.clip(rate + 0.25 * rng.standard_normal(held_out), 0, 1)
        counts = {f"held_{i:03d}": [int(rng.binomial(4, p)), 4] for i, p in enumerate(skill)}
        by_calls = {
            str(n): [sum(s for s, _ in list(counts.values())[n - 2 :: 5]), 4 * held_out // 5]
            for n in range(2, 7)
        }
        success = sum(s for s, _ in counts.values()) / (4 * held_out)
        return {"temperature": 1.0, "samples": 4, "success": success, "by_calls": by_calls, "by_task": counts}

    before, after = evaluation(0.3), evaluation(0.55)
    evolutions = [row["evolution"] for row in rows if row["evolution"]]
    return {
        "held_out_success_before": before["success"],
        "held_out_success_after": after["success"],
        "held_out_tasks": held_out,
        "held_out": {"before": before, "after": after},
        "signals": {kind: sum(row["signals"][kind] for row in rows) for kind in SIGNAL_KINDS},
        "tasks": {
            **{k: sum(e[k] for e in evolutions) for k in ("proposed", "accepted", "retained")},
            "refused": {k: sum(e["refused"][k] for e in evolutions) for k in evolutions[0]["refused"]},
        },
        "seconds": {
            **{k: sum(row["seconds"][k] for row in rows) for k in ("rollout", "update", "evolution")},
            "evaluation": 31.0,
            "other": 12.0,
        },
        "evolution_share": 0.108,
        "steps": len(rows),
        "seed": seed,
        "strategy": "coevolve",
        "config_digest": "9f3a6c1e55d0aa",
        "versions": {"jax": "0.10.2", "flax": "0.12.8"},
    }


def _dump(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


class Page(HTMLParser):
    """Text, tags and attributes of a page; fails on tags that do not nest."""

    VOID = {"meta", "br", "path", "use", "rect", "circle"}

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.words, self.links = [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def build(path):
    return Page(report.write_report(path).read_text(encoding="utf-8"))


def test_report_of_a_finished_run_is_complete_and_self_contained(tmp_path):
    watch = Stopwatch()
    page = build(fake_workdir(tmp_path / "run"))
    assert watch.seconds < 10
    raw = (tmp_path / "run/report.html").read_text()
    assert len(raw) < 1_000_000 and "http" not in raw and "url(" not in raw.replace("url(#", "")
    assert all(link.startswith("#") for link in page.links) and "script" not in page.tags
    assert page.tags.count("svg") == 14 and "missing" not in re.findall(r'class="([^"]*)"', raw)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    for expected in (
        f"{summary['held_out_success_after']:.1%}",
        "paired over tasks",
        "strategy coevolve",
        "jax 0.10.2",
        "10.8%",
        "8 initial tasks, 16 from evolution",
        "refused: duplicate",
        "refused from 0.9",
        "mv: cannot move",
        "not a call:",
        'cd(folder="reports")',
    ):
        assert expected in page.text, expected


def test_every_kind_of_signal_is_shown_with_its_lineage(tmp_path):
    page = build(fake_workdir(tmp_path / "run"))
    tasks = [json.loads(line) for line in (tmp_path / "run/tasks.jsonl").read_text().splitlines()]
    for kind in {task["lineage"]["signal"] for task in tasks} - {None}:
        first = next(task for task in tasks if task["lineage"]["signal"] == kind)
        assert first["id"] in page.text and first["lineage"]["context"] in page.text
        assert f"signal {kind} in rollout" in page.text
    assert {task["lineage"]["signal"] for task in tasks} >= set(SIGNAL_KINDS)


def test_what_models_and_tasks_say_is_text_and_never_markup(tmp_path):
    path = fake_workdir(tmp_path / "run")
    for file in [*path.rglob("*.jsonl"), path / "summary.json"]:
        text = file.read_text()
        for word in (
            "Move 'budget_2024.csv'",
            "Change into",
            "What does",
            "Post '",
            "mkdir",
            "<tool_call>",
            "no such file",
            "reports",
            "init_",
            "held_0",
            "scripted",
            "ran in",
            "ctx_",
            "duplicate",
            "You are",
            "0.10.2",
            "multi_turn_base_17",
            '"rollout"',
            '"done"',
        ):
            inside = word.strip('"')
            evil = json.dumps(EVIL + inside)[1:-1]
            text = text.replace(word, f'"{evil}"' if word[0] == '"' else evil)
        if file.name == "metrics.jsonl":
            continue
        file.write_text(text)
    page = build(path)
    assert "script" not in page.tags
    assert page.text.count(EVIL) > 30
    assert EVIL not in (path / "report.html").read_text()


def test_report_in_the_middle_of_a_run_says_what_is_missing(tmp_path):
    path = fake_workdir(tmp_path / "run", steps=2, finished=False)
    with open(path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "rewa')  # being written
    page = build(path)
    assert "not finished" in page.text and "2 steps" in page.text and "strategy coevolve" in page.text
    assert "summary.json with the two held-out evaluations" in page.text
    assert "trajectories/ holds no file yet" in page.text


@pytest.mark.parametrize(
    "gone", ["metrics.jsonl", "tasks.jsonl", "signals.jsonl", "config.json", "trajectories", "all"]
)
def test_any_file_may_be_missing(tmp_path, gone):
    path = fake_workdir(tmp_path / "run", steps=4)
    for item in sorted(path.rglob("*"), reverse=True):
        if gone in ("all", item.name, item.parent.name):
            item.rmdir() if item.is_dir() else item.unlink()
    page = build(path)
    named = {
        "metrics.jsonl": "metrics.jsonl holds no step",
        "tasks.jsonl": "tasks.jsonl is not there yet",
        "trajectories": "trajectories/ holds no file",
        "all": "No step is finished yet",
    }
    assert named.get(gone, "An agent and its training set") in page.text


def test_a_broken_line_is_named(tmp_path):
    path = fake_workdir(tmp_path / "run", steps=3)
    lines = (path / "signals.jsonl").read_text().splitlines()
    (path / "signals.jsonl").write_text("\n".join([lines[0], "{oops", *lines[1:]]) + "\n")
    with pytest.raises(ValueError, match=r"signals\.jsonl, line 2 is not JSON"):
        report.write_report(path)


def test_the_same_files_give_the_same_page(tmp_path):
    path = fake_workdir(tmp_path / "run", steps=3)
    assert report.write_report(path).read_bytes() == report.write_report(path).read_bytes()


def test_command_line_names_the_report_and_refuses_what_is_no_workdir(tmp_path):
    path = fake_workdir(tmp_path / "run", steps=3)
    command = [sys.executable, "-m", "coevolve_jax.analysis.report"]
    done = subprocess.run([*command, path], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == str(path / "report.html")
    done = subprocess.run([*command, tmp_path / "nowhere"], capture_output=True, text=True)
    assert done.returncode == 1 and "nowhere is not a folder" in done.stderr
    assert "Traceback" not in done.stderr
