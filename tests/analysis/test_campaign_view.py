"""The page of a campaign: its numbers are those of the files, and it shows what was refused and why."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest

from coevolve_jax.analysis import report
from coevolve_jax.analysis.campaign_view import campaign_view, headline
from coevolve_jax.harness import campaign
from coevolve_jax.harness.campaign import Campaign
from tests.harness.support import files
from tests.support.browsing import PHONE, address, browser, needs_browser, visit  # noqa: F401
from tests.support.campaign_cases import DIAGNOSTICS, REFERENCE, fake_campaign
from tests.support.report_cases import poisoned

EVIL = '"><img src=x onerror="alert(1)"><script>alert(2)</script>'


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(a finished campaign, the same while v003 waited for its verdict)"""
    return fake_campaign(tmp_path_factory.mktemp("campaign"))


@pytest.fixture(scope="module")
def whole(folders):
    view, rows = campaign_view(Campaign(folders[0]))
    return folders[0], view, rows


def part(folder: Path, version: str, name: str):
    return json.loads((folder / "versions" / version / f"{name}.json").read_text())


def run_of(folder: Path, version: str) -> Path:
    """The workdir of a version's only run."""
    return folder.parent / "store" / part(folder, version, "evidence")["runs"]["0"]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def changed(folder: Path, to: Path, name: str, content: str) -> Path:
    """A copy of a campaign in which one file has another content."""
    shutil.copytree(folder, to, symlinks=True)
    (to / name).chmod(0o644)
    (to / name).write_text(content)
    return to


def test_scores_values_and_costs_are_those_of_the_runs(whole):
    folder, view, _ = whole
    versions = {v["id"]: v for v in view["versions"]}
    success = {}
    for version in ("v000", "v001", "v003"):
        run, shown = run_of(folder, version), versions[version]
        counts = lines(run / "evaluations.jsonl")[-1]["by_task"].values()
        success[version] = sum(solved for solved, _ in counts) / sum(n for _, n in counts)
        assert shown["success"] == pytest.approx(success[version])
        steps = [step["success"] for step in lines(run / "metrics.jsonl")]
        row = next(r for r in shown["row"] if r["name"] == "success")
        spans = [steps, steps[: len(steps) // 4], steps[-(len(steps) // 4) :]]
        assert [pair[1] for pair in row["values"]] == pytest.approx([sum(s) / len(s) for s in spans])
        spent = json.loads((run / "ledger.json").read_text())["costs"]
        assert shown["rollouts"] == {"0": spent["rollouts/policy"]} and spent["rollouts/policy"] > 0
        took = json.loads((run / "summary.json").read_text())["seconds"]
        assert shown["seconds"] == {"0": took["rollout"] + took["update"]}
    assert versions["v001"]["difference"] == pytest.approx(success["v001"] - success["v000"])
    assert versions["v003"]["by_seed"] == {"0": pytest.approx(success["v003"] - success["v001"])}
    assert versions["v002"]["rollouts"] == versions["v002"]["seconds"] == {}  # it was not trained
    lead = view["headline"]["lead"]
    assert lead.startswith("3 versions of the training harness were tried and 1 promoted; v001 is selected")
    assert f"{success['v001']:.1%}" in lead and f"{success['v000']:.1%} at the start" in lead
    assert "was selected, so it is too high and is not the claim" in lead


def test_a_version_shows_its_diff_its_forecasts_and_what_its_target_did(whole):
    folder, view, _ = whole
    versions = {v["id"]: v for v in view["versions"]}
    assert [(v["id"], v["parent"], v["kind"]) for v in view["versions"]] == [
        ("v000", None, "start"),
        ("v001", "v000", "promoted"),
        ("v002", "v001", "refused"),
        ("v003", "v001", "rejected"),
    ]
    assert view["path"] == ["v001", "v000"] and view["selected"] == "v001"
    assert versions["v001"]["changes"] == [["learner.learning_rate", 1e-5, 3e-5]]
    aim, row = versions["v003"]["expects"], part(folder, "v003", "evidence")["row"]
    before = part(folder, "v001", "evidence")["row"]
    assert aim["diagnostic"] == "success_last" and aim["held"] is False
    assert (aim["before"], aim["after"]) == (before["success_last"], row["success_last"])
    assert aim["after"] < aim["before"] and "last quarter" in aim["meaning"]
    assert [(r["name"], r["target"]) for r in versions["v003"]["row"] if r["target"] is not None] == [
        ("success", 2)
    ]
    settings = [r["name"] for r in versions["v001"]["row"] if r["meaning"].startswith("config.")]
    assert settings == ["learning_rate"]  # and none that did not change
    tested = part(folder, "v001", "backtest")
    assert {n: c for n, *c, _ in versions["v001"]["checks"]} == tested["checks"]
    came = part(folder, "v001", "evidence")["came"]
    assert [(n, a, b) for n, a, b, _ in versions["v001"]["forecast"]] == [
        (n, x, came[n]) for n, x in tested["forecast"].items()
    ]
    assert all(row[-1] for v in view["versions"] for row in v["checks"] + v["forecast"])  # a meaning


def test_the_page_names_the_rules_that_no_verdict_has(whole):
    folder, view, _ = whole
    assert "rules that are off" not in view["headline"]["facts"]
    kept = [
        {**v, "rules": [rule for rule in v["rules"] if rule["name"] not in ("target", "audit")]}
        for v in view["versions"]
    ]
    freeze = {"state": "intact", "sentence": ""}
    told = headline(Campaign(folder).plan(), kept, None, "v001", freeze, None)
    assert " · rules that are off: target, audit · " in told["facts"]


def test_what_scored_higher_and_was_refused_says_why(whole):
    folder, view, rows = whole
    (found,) = [v for v in view["versions"] if v["refused_higher"]]
    rules = {rule["name"]: rule for rule in part(folder, "v003", "verdict")["rules"]}
    assert found["id"] == "v003" and rules["score"]["ok"] and not rules["target"]["ok"]
    assert (found["decided"], found["sentence"]) == ("target", rules["target"]["sentence"])
    rejected = [rows[place] for place in found["rejected"]]
    assert [(r["task_id"], r["rollout_index"], r["note"]) for r in rejected] == [
        ("held_out-0", 1, "File 0 is still there."),
        ("held_out-2", 1, "File 2 is still there."),
    ]


def test_transcripts_are_of_tasks_in_which_the_parent_did_otherwise(whole):
    _, view, rows = whole
    versions = {v["id"]: v for v in view["versions"]}
    told = lambda version: [view["transcripts"][place] for place in versions[version]["transcripts"]]
    # The start solves none of the six tasks, v001 those of even numbers, and v003 the first three.
    assert [row[:2] for row in told("v000")] == [["held_out-0", False], ["held_out-1", False]]
    assert [row[1] for row in told("v001")] == [True, True, False, False]
    assert told("v001")[0] == ["held_out-0", True, "its parent solved 0% of its rollouts of this task"]
    assert [row[0][-1] for row in told("v003")] == ["1", "0", "4", "3"]
    assert [row[2].split()[3] for row in told("v003")] == ["0%", "100%", "100%", "0%"]
    assert versions["v002"]["transcripts"] == []
    for row, (task, solved, _) in zip(rows, view["transcripts"], strict=True):
        assert row["task_id"] == task and row["outcome"]["success"] == solved
        assert len(row["queries"]) == len(row["turns"]) and row["steps"][0]["observation"]


def test_registry_skills_and_the_reading_of_the_test(whole):
    folder, view, _ = whole
    assert view["diagnostics"] == json.loads(json.dumps([d.to_json() for d in DIAGNOSTICS]))
    held = {s["id"]: (s["held"], s["trust"]) for s in view["skills"] if s["held"]}
    assert held == {"too-slow": (["v001"], 2 / 3)}
    rows = list(csv.DictReader((folder / "final" / "readings.csv").open()))
    gain = lambda seeds, tasks, than="start": [
        float(a["success"]) - float(b["success"])
        for a in rows
        for b in rows
        if (a["harness"], b["harness"]) == ("selected", than)
        and all(a[key] == b[key] for key in ("seeds", "seed", "tasks", "protocol"))
        and (a["seeds"], a["tasks"], a["protocol"]) == (seeds, tasks, "P1")
    ]
    final = view["final"]
    assert [row["label"] for row in final["gains"]] == ["SD", "FD", "ST", "FT"]
    for row in final["gains"]:
        values = gain(*row["label"])
        assert row["value"] == pytest.approx(sum(values) / len(values)) and row["seeds"] == len(values)
    claim = final["gains"][-1]
    assert dict(final["parts"])["optimism"] == pytest.approx(final["gains"][0]["value"] - claim["value"])
    cards = {title: (value, note) for title, value, note in view["headline"]["cards"]}
    assert cards["Claim"][0] == f"{100 * claim['value']:+.1f} points" and "2 fresh seeds" in cards["Claim"][1]
    assert view["freeze"]["state"] == cards["Files"][0] == "intact" and len(final["opened"]) == 1
    assert (final["openings"], final["engines"]) == (1, "")
    (over,) = final["over"]
    assert final["lost"] == {"start": 0, "selected": 0, over["name"]: 0}
    values = gain("F", "T", over["name"])
    assert over["name"].startswith("reference_")
    assert (over["given"], len(over["transfer"])) == (REFERENCE, 5)
    assert over["transfer"][0]["label"] == "P1" and len(values) == 2
    assert over["transfer"][0]["value"] == pytest.approx(sum(values) / 2)


def test_a_test_that_is_read_once_more_claims_nothing_until_it_is_read(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "again", symlinks=True)
    again = Campaign(tmp_path / "again")
    again.write_final("opened_2.json", {"fresh_seeds": [200, 201], "date": "2026-11-26", "number": 2})

    def claim():
        view, _ = campaign_view(again)
        (card,) = (told for title, *told in view["headline"]["cards"] if title == "Claim")
        return [row["value"] for row in view["final"]["gains"]], card

    assert claim() == ([None] * 4, ["—", "the test has been opened; its reading goes on"])
    assert len(campaign_view(again)[0]["final"]["opened"]) == 2
    again.tell_final("readings.csv", "final.json")
    values, card = claim()
    assert None not in values and card[0] == f"{100 * values[-1]:+.1f} points"
    (again.folder / "events.jsonl").unlink()
    assert claim()[0] == [None] * 4  # nothing shows what was read


def test_a_campaign_that_goes_on_claims_nothing(folders, tmp_path):
    _, half = folders
    view, _ = campaign_view(Campaign(half))
    assert view["headline"]["lead"].startswith(
        "The campaign is not finished: v003 is due for its verdict. So far, 2 versions of the"
    )
    last = view["versions"][-1]
    assert (last["kind"], last["due"], last["success"]) == ("under way", "is due for its verdict", None)
    assert last["expects"]["after"] is not None and not any(v["refused_higher"] for v in view["versions"])
    assert view["final"] is None and ["Claim", "—"] in [[*c[:2]] for c in view["headline"]["cards"]]
    assert (half / "report.html").exists()  # of the version before: the loop writes it after each
    begun = campaign.begin(tmp_path / "begun", Campaign(half).plan())
    view, rows = campaign_view(begun)
    assert (view["versions"], view["freeze"]["state"], rows) == ([], "not frozen yet", [])


def test_a_changed_file_is_named_and_nothing_is_written_but_the_page(folders, tmp_path):
    whole, half = folders
    name = "versions/v003/verdict.json"
    better = (whole / name).read_text().replace("rejected", "promoted")
    other = changed(whole, tmp_path / "a", name, better)
    freeze = campaign_view(Campaign(other))[0]["freeze"]
    assert freeze["state"] == "changed" and f"{name} was changed" in freeze["sentence"]
    (other / "events.jsonl").unlink()
    assert campaign_view(Campaign(other))[0]["freeze"]["sentence"].startswith("events.jsonl is gone")
    events = (half / "events.jsonl").read_text()
    other = changed(half, tmp_path / "b", "events.jsonl", events.replace("{", "", 1))
    assert "line 1 is no event" in campaign_view(Campaign(other))[0]["freeze"]["sentence"]
    other = changed(half, tmp_path / "c", "versions/v002/proposal.json", "{")
    with pytest.raises(SystemExit, match="versions/v002/proposal.json cannot be read"):
        report.main([str(other)])
    # Another process may be writing an event: whoever reads leaves half a line as it is.
    other = changed(half, tmp_path / "d", "events.jsonl", events + '{"n": 9')
    (other / "report.html").unlink()
    before = files(other)
    report.main([str(other)])
    assert {k: v for k, v in files(other).items() if k != "report.html"} == before


@needs_browser
def test_the_page_in_a_browser(folders, visit, tmp_path):
    whole, half = folders
    report.write_report(whole)
    found = visit(address(whole))
    titles = found.locator("#panels h2").all_inner_texts()
    assert titles[:2] == ["Scored higher and was refused", "Versions"] and titles[-1].startswith("The test")
    box = found.locator(".alerts")
    higher = 100 * part(whole, "v003", "verdict")["difference"]
    shown = re.search(r"v003 scored \+([\d.]+) points over its parent", box.inner_text())
    assert shown and float(shown[1]) == pytest.approx(higher, abs=0.051) and higher > 5
    assert found.locator(".tree .version").count() == 4
    assert found.locator(".tree path.promoted").count() == 1 and found.locator(".tree path").count() == 3
    assert found.locator("#version h3").inner_text().startswith("v001 promoted")
    # Two transcripts that the audit rejected.
    for n in (0, 1):
        box.locator(".question > summary").nth(n).click()
        box.locator(".question").nth(n).locator(".user").first.wait_for()
    assert "cd(folder=" in box.locator("details").first.inner_text()
    # A click shows a version, a key the next one.
    found.locator(".tree .version", has_text="v002").click()
    found.locator("#version h3", has_text="v002").wait_for()
    refused = part(whole, "v002", "backtest")["refused"]
    assert found.locator("#version > p").first.inner_text() == f"✗ {refused}"
    found.keyboard.press("j")
    found.locator("#version h3", has_text="v003").wait_for()
    assert found.locator("#version .deciding").inner_text().startswith("✗ target success_last went from")
    assert "→" in found.locator("#version mark").inner_text()
    # A line for the bound beside the value that did not reach it.
    (rule,) = [r for r in part(whole, "v003", "verdict")["rules"] if r["name"] == "target"]
    line = found.locator("#version .deciding .bound-line")
    told = line.get_attribute("aria-label")
    assert told == f"value {rule['value']:.3g}, bound {rule['bound']:.3g}" and rule["value"] < rule["bound"]
    dot, bound = (line.locator(name).bounding_box() for name in ("circle.missed", "path.bound"))
    assert dot["x"] + dot["width"] < bound["x"]
    assert found.locator("#version .watched .bound-line path.bound").count() == 2  # warn and alert
    registry = found.locator("section.group", has_text="Registry of diagnostics").locator("tbody tr")
    for row, texts in enumerate((["registered", "0.025"], ["refused", "nearer than 0.1 to 0.5"])):
        assert all(text in registry.nth(row).inner_text() for text in texts)
    # A gain that is the same for all seeds has no interval, nor has that of one seed.
    result = json.loads((whole / "final" / "final.json").read_text())
    for name, seeds in (("SD", 1), ("FT", 3)):
        result["gain"][name] |= {"low": None, "high": None, "seeds": seeds}
    result |= {
        "lost": {"start": 1, "selected": 7, "reference_1": 0},
        "over": {"reference_1": next(iter(result["over"].values()))},
        "given": {"reference_1": REFERENCE},
        "openings": 3,
        "engines": "The selection set was read by another engine.",
    }
    alike = changed(whole, tmp_path / "alike", "final/final.json", json.dumps(result))
    report.write_report(alike)
    test = visit(address(alike)).locator("section.group", has_text="The test, read after the end")
    row = lambda name: test.get_by_role("row", name=re.compile(f"^{name} ")).inner_text()
    assert "one seed: none" in row("SD") and "all seeds alike: none" in row("FT")
    said = test.inner_text()
    assert "Openings of this test by the campaigns of the store: 3." in said and result["engines"] in said
    assert "Trials lost: 1 of start, 7 of selected, 0 of reference 1." in said
    assert f"Selected harness − reference 1, which is {REFERENCE}." in said
    assert test.get_by_role("table").filter(has_text="over reference 1").get_by_role("row").count() == 1 + 5
    # Hostile text is text, and a campaign that goes on fits on a phone.
    other = shutil.copytree(half, tmp_path / "half", symlinks=True)
    for path in [*other.glob("versions/v00[23]/*.json")]:
        path.chmod(0o644)
        path.write_text(json.dumps(poisoned(json.loads(path.read_text()), EVIL)))
    report.write_report(other)
    found = visit(address(other, version="v003"), viewport=PHONE)
    shown = found.locator("#version").inner_text()
    assert EVIL in shown and EVIL in found.locator(".tree").inner_text() and "under way" in shown
    assert found.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
