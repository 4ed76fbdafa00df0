"""The runs of docs/notes/smollm2.md: its figures are those of the raw numbers beside it."""

import json
import re

import pytest

from tests.support.paths import ROOT

NOTES = ROOT / "docs" / "notes"
RUNS = {
    "[the first]": "smollm2/",
    "the first by": "smollm2/demo_",
    "[on an H200]": "hardware/h200_smollm2_",
    "this one": "smollm2/again_",
}


def lines(name: str) -> list[dict]:
    return [json.loads(line) for line in (NOTES / name).read_text().splitlines()]


@pytest.mark.parametrize("opening", RUNS)
def test_a_row_of_the_page_is_its_run(opening):
    text = (NOTES / "smollm2.md").read_text()
    (row,) = re.findall(rf"^\| {re.escape(opening)}.*$", text, re.M)
    _, before, after, gain, truncated = (cell.strip() for cell in row.strip("|").split("|"))
    trials = [row["by_task"] for row in lines(f"{RUNS[opening]}evaluations.jsonl")]
    passed, asked = ([sum(t[i] for t in tasks.values()) for tasks in trials] for i in (0, 1))
    assert asked == [128, 128]
    assert before == f"{passed[0] / 1.28:.1f}%" and after == f"{passed[1] / 1.28:.1f}%"
    assert gain.split()[0] == f"{(passed[1] - passed[0]) / 1.28:+.1f}"
    steps = lines(f"{RUNS[opening]}metrics.jsonl")
    assert len(steps) == 20
    assert truncated == f"{max(m['health']['truncated'] for m in steps):.1%}"
