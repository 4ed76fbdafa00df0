"""The runs of docs/notes/smollm2.md: its figures are those of the raw numbers beside it."""

import json
import re

import pytest
from scipy.stats import binomtest

from tests.support.paths import ROOT

NOTES = ROOT / "docs" / "notes"
RUNS = {
    "[the first]": "smollm2/",
    "the first by": "smollm2/demo_",
    "[on an H200]": "hardware/h200_smollm2_",
    "[the same command again]": "smollm2/again_",
    "[overlong rollouts punished]": "smollm2/overlong_",
}


def prose() -> str:
    """The page without its line breaks, to look for a sentence in it."""
    return " ".join((NOTES / "smollm2.md").read_text().split())


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


def test_greedy_success_in_the_five_runs_is_that_of_their_files():
    rows = [row for row in (NOTES / "smollm2.md").read_text().splitlines() if row.startswith("| 11-")]
    rises = []
    for row, name in zip(rows, RUNS.values(), strict=True):
        before, after = (evaluation["greedy_success"] for evaluation in lines(f"{name}evaluations.jsonl"))
        assert f"| {before:.1%}, {after:.1%} |" in row
        rises.append(after > before)
    assert sum(rises) == 2 and "success rises in two of five runs and falls in three" in prose()


def test_the_run_against_overlong_rollouts_is_told_as_it_went():
    text = prose()
    steps, before = (lines(f"smollm2/{name}_metrics.jsonl") for name in ("overlong", "again"))
    truncated = lambda rows: [m["health"]["truncated"] for m in rows]
    assert [m["step"] for m in steps] == list(range(20)) and truncated(steps)[-8] > 0
    told = f"at most {max(truncated(steps)):.1%} of a step's rollouts were truncated, where the run without "
    told += f"the term had {max(truncated(before)):.1%}, and none in the last seven"
    assert told in text and not any(truncated(steps)[-7:])
    first, last = lines("smollm2/overlong_evaluations.jsonl")
    begun = lines("smollm2/again_evaluations.jsonl")[0]  # the same policy and tasks
    assert first["by_task"] == begun["by_task"]
    passed, asked = ([sum(t[i] for t in row["by_task"].values()) for row in (first, last)] for i in (0, 1))
    assert asked == [128, 128]
    gain = f"to **{passed[1] / 1.28:.1f}%** (46.3 to 73.4): **{(passed[1] - passed[0]) / 1.28:+.1f} points**"
    assert gain in text and f"from {passed[0] / 1.28:.1f}% (40.4 to 62.3) {gain}" in text


SINGLE_TURN = {
    "as downloaded, N = 3": "downloaded_3",
    "after the warm start": "warm_0",
    "after RL": "rl_0",
}


@pytest.mark.parametrize(("opening", "name"), SINGLE_TURN.items())
def test_a_row_of_bfcls_own_tasks_is_its_file(opening, name):
    text = (NOTES / "smollm2.md").read_text().partition("### On the test half")[2]
    text = text.partition("### Several turns")[0]
    (row,) = re.findall(rf"^\| {opening} \|.*$", text, re.M)
    told = [cell.strip() for cell in row.strip("|").split("|")][1:5]
    found = json.loads((NOTES / "smollm2" / "single_turn" / f"test_{name}.json").read_text())
    assert found["protocol"]["split"] == "test" and found["invalid"] == 0
    *parts, whole = found["scores"]
    assert told[:3] == [f"{round(part['avg']['value'] * part['tasks'])}" for part in parts]
    low, high = (100 * whole["avg"][key] for key in ("low", "high"))
    count = round(found["success"] * found["trials"])
    assert told[3] == f"{count}: {100 * found['success']:.1f}% ({low:.1f} to {high:.1f})"


def test_the_differences_on_bfcls_own_tasks_are_those_of_the_files():
    files = {name: NOTES / "smollm2" / "single_turn" / f"test_{name}.json" for name in SINGLE_TURN.values()}
    solved = {name: json.loads(path.read_text())["official"]["by_task"] for name, path in files.items()}

    def sign_test(before, after):
        gained = sum(solved[after][t][0] > solved[before][t][0] for t in solved[after])
        lost = sum(solved[after][t][0] < solved[before][t][0] for t in solved[after])
        return gained, lost, binomtest(gained, gained + lost).pvalue

    gained, lost, p = sign_test("downloaded_3", "warm_0")
    assert (gained, lost, f"{p:.3f}") == (14, 2, "0.004")
    gained, lost, p = sign_test("warm_0", "rl_0")
    assert (gained, lost, f"{p:.2f}") == (1, 5, "0.22")
    text = prose()
    assert "(12 more, p = 0.004 by an exact sign test of the 16 tasks that differ)" in text
    assert "RL takes 4 of them back (p = 0.22)" in text


def table_of(opening: str) -> dict[str, list[str]]:
    """The cells of each row of the page's table whose first cell is `opening`, by the row's first cell."""
    rows = (
        (NOTES / "smollm2.md").read_text().partition(f"| {opening} |")[2].partition("\n\n")[0].split("\n")[2:]
    )
    cells = [[cell.strip().strip("*") for cell in row.strip("|").split("|")] for row in rows]
    return {first: rest for first, *rest in cells}


def test_generation_at_this_shape_is_the_run_of_the_benchmark():
    (found,) = json.loads((NOTES / "smollm2" / "generate.json").read_text())
    by_name = found["implementations"]
    told = lambda x: f"{x['median']:.1f} s, {x['tokens_per_second']:.0f} tokens/s"
    rows = table_of("generation")
    names = {"ours": "ours", "transformers 5.23, static cache": "trl", "llama-cpp-python 0.3.36": "llama_cpp"}
    for row, name in names.items():
        both = by_name[name], by_name[f"{name} reduced"]
        peaks = " and ".join(f"{x['peak_bytes'] / 2**30:.1f}" for x in both)
        assert rows.pop(row) == [*map(told, both), f"{peaks} GiB"]
    tunix = by_name["tunix"]
    assert rows == {"tunix 0.1.7": [told(tunix), "not offered", f"{tunix['peak_bytes'] / 2**30:.1f} GiB"]}
    of = lambda kind: {name: x["median"] for name, x in by_name.items() if x["dtype"] == kind}
    ratio = lambda kind, own: min(s for name, s in of(kind).items() if name != own) / by_name[own]["median"]
    text = prose()
    assert f"only {ratio('float32', 'ours'):.2f} times the best other in float32 and" in text
    assert f"and {ratio('bfloat16', 'ours reduced'):.2f} times in bfloat16" in text
    floor, best = found["floor_seconds"], min(of("float32")["trl"], of("float32")["llama_cpp"])
    assert f"take {floor:.1f} s at" in text and f"take {floor / (best / 1.5):.0%} of that rate" in text
    assert f"ours reaches {floor / by_name['ours']['median']:.0%}" in text


def test_updates_at_this_shape_are_the_trials_of_the_benchmark():
    trials = re.findall(
        r"agent (\w+) +({.*}) +([\d.]+) s +([\d.]+) GiB",
        (NOTES / "smollm2" / "update_trials.txt").read_text(),
    )
    found = {}
    for name, setting, seconds, peak in trials:
        setting = json.loads(setting)
        size = setting.get("micro") or setting["pack_length"]
        found.setdefault((name, size), {})[setting.get("dtype", "float32")] = float(seconds), float(peak)
    rows = table_of("update of 16 rollouts")
    assert rows.pop("TRL 1.16, micro-batches of 16")[:2] == ["out of memory"] * 2
    assert rows.pop("Tunix 0.1.7, micro-batches of 4")[:2] == ["out of memory", "not offered"]
    for row, own in rows.items():
        size = int(row.split()[-1].replace(",", ""))
        seconds, peaks = zip(*found.pop((re.match(r"\w+", row)[0].lower(), size)).values())
        less = ["not offered"] if row.startswith("Tunix") else []
        memory = " and ".join(f"{g:.1f}" for g in peaks)
        assert own == [*[f"{s:.1f} s" for s in seconds], *less, f"{memory} GiB"]
    assert not found
    best = lambda name, column: min(float(own[column].split()[0]) for row, own in rows.items() if name in row)
    ratios = [best("TRL", column) / best("ours", column) for column in (0, 1)]
    text = prose()
    assert (
        "Ours is {:.2f} times as fast as TRL's best in float32 and {:.2f} times in bfloat16".format(*ratios)
        in text
    )


MULTI_TURN = {"as downloaded": "downloaded", "after the warm start": "warm", "after RL": "rl"}
WHY = ("instance_state_mismatch", "execution_response_mismatch", "empty_turn_model_response")


@pytest.mark.parametrize(("opening", "name"), MULTI_TURN.items())
def test_a_row_of_tasks_of_several_turns_is_its_file(opening, name):
    text = (NOTES / "smollm2.md").read_text().partition("### Several turns")[2]
    (row,) = re.findall(rf"^\| {opening} \|.*$", text, re.M)
    told = [cell.strip() for cell in row.strip("|").split("|")][1:6]
    found = json.loads((NOTES / "smollm2" / "base" / f"dev_{name}.json").read_text())
    assert found["protocol"]["split"] == "development" and (found["trials"], found["invalid"]) == (50, 0)
    assert found["environment"]["stops"].keys() <= {"done", "token_limit"}  # none by the context
    (whole,) = found["scores"]
    solved = round(found["success"] * 50)
    interval = f"{100 * whole['avg']['low']:.1f} to {100 * whole['avg']['high']:.1f}%"
    failures = found["official"]["failures"]
    why = [failures.get(f"multi_turn:{reason}", 0) for reason in WHY]
    cut = failures.get("force_terminated", 0)
    assert told == [f"{solved} of 50 ({interval})", *map(str, (*why, cut))]
    assert cut == found["environment"]["stops"].get("token_limit", 0) and solved + sum(why) + cut == 50
