"""Progress lines that do not flood the terminal, and a table of the outcome."""

import io
import json
import re

import pytest

from coevolve_jax.analysis import summary


def row(step, **changes):
    base = {
        "step": step,
        "reward": 0.25,
        "success": 0.5,
        "tasks": 40 + step,
        "signals": {"forgetting": 1, "boundary": 2, "rare": 0},
        "evolution": None,
        "held_out": None,
        "seconds": {"step": 2.0, "update": 0.5},
    }
    return {**base, **changes}


def test_progress_in_a_log_file_is_a_few_lines():
    stream = io.StringIO()
    progress = summary.Progress(100, stream=stream)
    signals = {**row(0)["signals"], "skills": 12}  # a strategy counts more than signals
    for step in range(1, 101):
        progress.update(row(step, reward=None if step == 10 else 0.25, signals=signals))
    progress.note("saved")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 21 and lines[-1] == "saved"
    assert lines[1].startswith("step  10/100: reward none, success 50%")
    assert lines[-2] == "step 100/100: reward 0.25, success 50%, signals 3, |D| 140, 2.0 s/step"


def test_progress_in_a_log_file_is_at_most_twenty_lines_and_tells_the_last_step():
    for total in range(1, 130):
        stream = io.StringIO()
        progress = summary.Progress(total, stream=stream)
        for step in range(total):
            progress.update(row(step))
        lines = stream.getvalue().splitlines()
        assert min(total, 10) <= len(lines) <= 20 and f" {total}/{total}: " in lines[-1], total


def test_progress_on_a_terminal_is_a_bar_with_notes_above():
    stream = io.StringIO()
    stream.isatty = lambda: True
    progress = summary.Progress(3, initial=1, stream=stream)
    progress.update(row(2))
    progress.note("evolved")
    progress.update(row(3))
    progress.close()
    text = stream.getvalue()
    assert "3/3" in text and "reward 0.25" in text and "|D| 43" in text and "evolved\n" in text


SUMMARY = {
    "held_out_success_before": 0.25,
    "held_out_success_after": 0.5,
    "held_out_tasks": 40,
    "held_out": {},
    "signals": {"forgetting": 10, "boundary": 25, "rare": 15},
    "steps": 60,
    "tasks": {"proposed": 90, "accepted": 50, "retained": 4, "refused": {"duplicate": 6, "does not run": 30}},
    "seconds": {"rollout": 300.0, "update": 60.0, "evolution": 40.0},
    "evolution_share": 0.1,
}


def test_summary_table_shows_every_block():
    lines = summary.summary_table({**SUMMARY, "held_out_split": "test"}, "runs/x").splitlines()
    text = "\n".join(lines)
    assert "not measured" in text
    for expected in (
        "Held-out success (40 test tasks)",
        "boundary",
        "50.0%",
        "refused: does not run",
        "5 min 00 s",
        "share of evolution",
    ):
        assert expected in text
    assert text.index("does not run") < text.index("duplicate") and "runs/x/report.html" in text
    rollout, update = (next(line for line in lines if name in line) for name in ("rollout", "update"))
    assert rollout.index("75.0%") == update.index("15.0%")


def test_what_a_strategy_counts_besides_signals_is_none_of_the_table(tmp_path):
    rows = [{"kind": "mine", "task_id": "t", "rollout_index": 0, "step": 3}, {"kind": "extractor", "step": 3}]
    (tmp_path / "signals.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    counted = {**SUMMARY, "signals": {**SUMMARY["signals"], "mine": 50, "skills": 1830, "extractor": 60}}
    lines = {
        line.split()[0]: line.split()[1:]
        for line in summary.summary_table(counted, tmp_path).splitlines()
        if line.startswith("  ")
    }
    assert lines["mine"] == ["50", "50.0%"] and lines["boundary"] == ["25", "25.0%"]
    assert "skills" not in lines and "extractor" not in lines
    assert "skills" not in summary.summary_table(counted)


def test_a_fork_names_in_its_first_line_what_it_goes_on_from(tmp_path):
    told = {"run": "/runs/one", "step": 30, "config_digest": "9f3a", "strategy": "static"}
    (tmp_path / "forked.json").write_text(json.dumps(told))
    line = "goes on from step 30 of one (config 9f3a), whose strategy was static"
    assert summary.summary_table(SUMMARY, tmp_path).splitlines()[0] == line


def test_few_scenarios_have_a_caveat():
    def text(scenarios):
        side = lambda n: {
            "by_task": {f"t{i}": [n + i % 2, 4] for i in range(30)},
            "scenarios": {f"t{i}": i % scenarios for i in range(30)},
        }
        return summary.summary_table({**SUMMARY, "held_out": {"before": side(1), "after": side(2)}})

    caveat = "With fewer than 15 scenarios the 95% intervals are too narrow."
    assert caveat in text(14) and "over 30 tasks in 14 scenarios" in text(14) and caveat not in text(15)


def test_a_warm_start_is_one_line_of_the_table():
    told = {
        "demonstrations": 230,
        "steps": 100,
        "held_out_loss": {"before": 0.98, "after": 0.0204},
        "success": {"before": 0.0, "after": 0.406},
    }
    line = "warm start: 230 demonstrations, 100 steps, held-out loss 0.980 -> 0.020, success 0.0% -> 40.6%"
    assert summary.warm_start_line(told) == line
    assert summary.summary_table({**SUMMARY, "warm_start": told}).splitlines()[0] == line
    less = {**told, "held_out_loss": None, "success": {"before": None, "after": 0.5}}
    assert summary.warm_start_line(less).endswith("100 steps, success none -> 50.0%")


def test_summary_table_shows_the_paired_test_and_its_absence():
    by_task = {f"t{i}": [1, 4] for i in range(12)}
    better = {f"t{i}": [2, 4] for i in range(12)}
    details = {"before": {"by_task": by_task}, "after": {"by_task": better}}
    text = summary.summary_table({**SUMMARY, "held_out": details})
    assert "before" in text and "25.0%" in text and "50.0%" in text and "95% interval" in text
    assert "+25.0 points" in text and "p < 0.001" in text and "over 12 tasks in 12 scenarios" in text


def test_a_gain_lies_within_its_interval_also_where_trials_are_lost():
    """Lost trials weigh tasks otherwise in the two rates than in the gain, which is a mean over tasks."""
    before = {f"a{i}": [1, 8] for i in range(20)} | {f"b{i}": [4, 8] for i in range(20)}
    after = {f"a{i}": [0, 1] for i in range(20)} | {f"b{i}": [4, 8] for i in range(20)}
    details = {"before": {"by_task": before}, "after": {"by_task": after}}
    text = summary.summary_table({**SUMMARY, "held_out": details})
    line = next(line for line in text.splitlines() if line.lstrip().startswith("gain"))
    value, low, high = (float(x) for x in re.findall(r"[+-]\d+\.\d", line))
    assert low < value < high and value == pytest.approx(-6.25, abs=0.06)


def test_what_the_help_gains_stands_below_the_gain_of_training():
    row = lambda counts: {"by_task": counts, "scenarios": {t: t for t in counts}, "samples": 4}
    before, after = row({"a": [0, 4], "b": [1, 4]}), row({"a": [1, 4], "b": [2, 4]})
    told = {**SUMMARY, "held_out": {"before": before, "after": after}}
    text = summary.summary_table({**told, "help": {"iid+help": row({"a": [3, 4], "b": [3, 4]})}})
    assert "after, with help" in text and " 75.0%" in text and "+37.5 points" in text
    assert "help" not in summary.summary_table(told)


def test_what_the_help_gains_by_losing_failures_alone_is_told():
    """Seven of eight trials solved, as without help; the eighth is lost."""
    row = lambda lost: {
        "success": 7 / (8 - lost), "samples": 4, "by_task": {"a": [4, 4], "b": [3, 4 - lost]},
        "scenarios": {"a": "s", "b": "t"},
    }  # fmt: skip
    both = {"before": row(0), "after": row(0)}
    found = summary.held_out_lines({"held_out": both, "balanced": None, "help": {"iid+help": row(1)}})
    shown = {name: (value.strip(), note) for name, value, note in found}
    assert shown["gain of the help"][0] == "+12.5 points"
    assert shown["gain of the help, lost as failures"][0] == "+0.0 points"
    assert shown["after, with help, lost as failures"][0] == "87.5%"
    told = "of 8 trials (12.5%); success 87.5% if all of them are failures"
    assert shown["lost with help, i.i.d. set"] == ("1", told)


def test_clock():
    shown = [summary.clock(s) for s in (5.25, 59.96, 185, 7440)]
    assert shown == ["5.2 s", "1 min 00 s", "3 min 05 s", "2 h 04 min"]
