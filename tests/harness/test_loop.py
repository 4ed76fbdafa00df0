"""Whole campaigns of the made-up trainer: what is proposed, kept, found again after a kill, and refused."""

import json
import os
import random
import shutil
import subprocess
import sys

import pytest

from coevolve_jax.comparison.cell_files import finished
from coevolve_jax.harness import campaign, evidence, loop, start, store, summary
from coevolve_jax.harness.bench import FAULTS
from coevolve_jax.harness.records import Expectation, Proposal, Skill
from coevolve_jax.harness.registry import Diagnostic
from coevolve_jax.harness.verdict import RULES
from coevolve_jax.records.files import read_lines, write_lines
from coevolve_jax.testing.campaign import MADE_UP, ROLLOUTS, SEALED, TASKS, train_made_up, truth
from tests.harness.support import config, cut, evolution, files, lose_all_trials, rewritten
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow


def levers_of(found: loop.Evolution) -> list[tuple[str, str, str]]:
    """(lever, move, kind of the verdict) of every version."""
    told = [(v, found.versions.proposal(v), found.versions.verdict(v)) for v in found.campaign.versions()[1:]]
    return [(p.lever, p.move, verdict.kind) for _, p, verdict in told]


@pytest.mark.parametrize("fault", ["slow", "hot", "leash", "short", "few"])
def test_the_first_version_moves_the_right_lever_and_is_promoted(fault, tmp_path):
    found = evolution(tmp_path / "campaign", fault, versions=1)
    found.run()
    ((lever, move, kind),) = levers_of(found)
    assert kind == "promoted" and move in FAULTS[fault].right[lever]
    assert truth(found.versions.config(found.campaign.selected())) > truth(found.versions.config("v000"))
    # The skill that was followed has held; the next proposer knows it.
    followed = [s for s in found.versions.skills("v999") if s.held]
    assert [s.held for s in followed] == [("v001",)] and followed[0].trust == 2 / 3


@pytest.mark.slow
@pytest.mark.nightly
def test_each_proposer_ends_and_says_what_it_did(tmp_path):
    told, rules = {}, {}
    for proposer in ("scripted", "placebo", "score", "search"):
        found = evolution(tmp_path / proposer, "leash", versions=2, proposer=proposer)
        found.run()
        told[proposer] = levers_of(found)
        assert found.campaign.next() is None and len(told[proposer]) >= 2 and found.replay() == []
        assert summary.table(found).count("\n") == len(found.campaign.versions()) + 1
        judged = [found.versions.verdict(v) for v in found.versions.trained("v999")[1:]]
        rules[proposer] = [{rule.name for rule in verdict.rules} for verdict in judged]
    assert told["placebo"] != told["scripted"]
    # The placebo has no hypothesis, and every other condition of the scripted proposer.
    assert all(own == {"canary", *RULES} for own in rules["scripted"]) and rules["placebo"]
    assert all(own == {"canary", *RULES} - {"target"} for own in rules["placebo"])
    assert all(own == {"canary", "score"} for own in rules["score"]) and rules["score"]
    # A design moves many levers at once, any other proposer one.
    assert {lever for lever, _, _ in told["search"]} == {"search"}


@pytest.mark.nightly
def test_another_seed_of_the_placebo_draws_otherwise(tmp_path):
    told = []
    for seed in (0, 1):
        found = evolution(tmp_path / f"{seed}", "leash", versions=3, proposer="placebo", seed=seed)
        found.run()
        told.append(levers_of(found))
    assert told[0] != told[1]


class Killed(BaseException):
    """Stands for a kill: nothing in the code catches it."""


@pytest.mark.slow
def test_killed_at_any_moment_the_same_command_goes_on_to_the_same_files(tmp_path, monkeypatch):
    whole = evolution(tmp_path / "whole" / "campaign", "short", versions=1)
    whole.run()
    expected = files(whole.campaign.folder)
    calls = {"n": 0, "at": 10**9}

    def counted(function):
        def call(*args, **kwargs):
            calls["n"] += 1
            if calls["n"] == calls["at"]:
                raise Killed
            return function(*args, **kwargs)

        return call

    # A kill may fall before any of these: each leaves another state behind.
    for name in ("link", "fsync", "replace"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    evolution(tmp_path / "count" / "campaign", "short", versions=1).run()
    moments = random.Random(0).sample(range(1, calls["n"]), 12)
    for moment in moments:
        folder = tmp_path / f"killed_{moment}" / "campaign"
        calls.update(n=0, at=moment)
        with pytest.raises(Killed):
            evolution(folder, "short", versions=1).run()
        calls.update(at=10**9)
        evolution(folder, "short", versions=1).run()
        assert files(folder) == expected


def test_half_a_line_of_the_events_is_cut_off(tmp_path):
    found = evolution(tmp_path / "campaign", versions=1)
    found.run()
    expected = files(found.campaign.folder)
    path = found.campaign.folder / "events.jsonl"
    whole = path.read_text()
    path.write_text(whole[: whole.rindex('"previous"')])
    evolution(tmp_path / "campaign", versions=1).run()
    assert files(found.campaign.folder) == expected


@pytest.mark.parametrize(
    "what",
    [
        "versions/v001/verdict.json",
        "versions/v001/proposal.json",
        "starts/seed_0/held_out.jsonl",
        "campaign.json",
        "versions/v001/runs/seed_0/evaluations.jsonl",
        "versions/v000/runs/seed_1/metrics.jsonl",
    ],
)
def test_a_changed_byte_stops_the_next_command_and_names_the_file(what, tmp_path):
    found = evolution(tmp_path / "campaign", versions=2)
    found.run()
    path = found.campaign.folder / what
    path.chmod(0o644)
    content = path.read_bytes()
    path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    with pytest.raises(campaign.Tampered, match=what.replace(".", r"\.")):
        found.run()  # although the campaign is over


def test_changed_rollouts_stop_the_next_command_and_a_missing_file_is_a_sentence_of_the_replay(tmp_path):
    found = evolution(tmp_path / "campaign", versions=1)
    found.run()
    recorded = sorted((found.campaign.folder / "versions/v000/runs/seed_0/rollouts").glob("step_*"))
    content = recorded[0].read_bytes()
    recorded[0].write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    with pytest.raises(campaign.Tampered, match=f"rollouts/{recorded[0].name}"):
        found.run()
    recorded[0].write_bytes(content)
    (found.campaign.folder / "versions/v001/runs/seed_0/metrics.jsonl").unlink()
    told = evolution(tmp_path / "campaign", versions=1).replay()
    assert any("metrics.jsonl" in sentence for sentence in told[1:]), told


def test_a_kill_before_an_event_leaves_no_decision_outside_the_chain(tmp_path):
    found = evolution(tmp_path / "campaign", "slow", versions=1)
    with pytest.raises(loop.Waiting):
        found.run(gate="verdict")
    found.decide("v001", False, "no")
    events = found.campaign.folder / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    assert json.loads(lines[-1])["event"] == "decided"
    events.write_text("".join(lines[:-1]))  # as a kill between the file and its event leaves it
    evolution(tmp_path / "campaign", "slow", versions=1).run()
    assert [e["event"] for e in found.campaign.events()].count("decided") == 1
    (path,) = (found.campaign.folder / "approved").glob("v001_*.json")
    path.chmod(0o644)
    path.write_text(path.read_text().replace("false", "true"))
    with pytest.raises(campaign.Tampered, match="approved/v001_verdict.json"):
        found.campaign.check()


def test_events_that_were_cut_off_or_renumbered_are_found(tmp_path):
    found = evolution(tmp_path / "campaign", versions=1)
    found.run()
    events = found.campaign.folder / "events.jsonl"
    whole = events.read_text()
    last = whole.splitlines()[-1]
    for other in ({"n": 3}, {"event": "ended"}, {"version": "v000"}):
        events.write_text(whole.replace(last, json.dumps(json.loads(last) | other)))
        with pytest.raises(campaign.Tampered, match="events.jsonl"):
            found.run()
    events.write_text(whole)
    for kept in (-2, 3):
        cut(found.campaign.folder, kept)
        with pytest.raises(campaign.Tampered, match="lacks the event of versions/v00"):
            found.run()
    events.unlink()
    (told,) = found.replay()
    assert told.startswith("versions/v000/proposal.json has no event in")


def test_a_part_without_its_event_is_made_again_before_it_counts(tmp_path):
    found = evolution(tmp_path / "campaign", "slow", versions=1)
    with pytest.raises(loop.Waiting):
        found.run(gate="verdict")
    rewritten(found, "v001", "evidence", row={"success_last": 1.0})
    cut(found.campaign.folder, -1)  # as a kill between the file and its event leaves it
    for command in (lambda: found.run(gate="verdict"), lambda: found.decide("v001", True, "")):
        with pytest.raises(campaign.Tampered, match="v001/evidence.json differs from what the runs give"):
            command()


def test_nothing_is_trained_after_the_end_or_a_reading_of_the_test(tmp_path, monkeypatch):
    class Nothing:
        def propose(self, history, rng):
            return None

    found = evolution(tmp_path / "campaign", versions=2)
    monkeypatch.setattr(found.parts, "proposer", Nothing())
    found.run()
    assert found.campaign.next() is None
    cut(found.campaign.folder, -1)  # as a kill leaves it, or who would go on
    found.run()
    assert found.campaign.next() is None and found.campaign.events()[-1]["event"] == "ended"
    found.campaign.write_final("opened.json", {"seeds": [1]})
    assert found.campaign.next() is None


def test_a_version_whose_every_trial_is_lost_has_failed_and_the_campaign_goes_on(tmp_path):
    def launch(jobs, side_by_side):
        came = train_made_up(jobs, side_by_side)
        for job in jobs:
            if job.config.learner.learning_rate != slow and (job.workdir / "evaluations.jsonl").exists():
                lose_all_trials(job.workdir)
        return came

    slow = config("slow").learner.learning_rate
    found = evolution(tmp_path / "campaign", "slow", launch, versions=2)
    found.run()
    first = found.versions.verdict("v001")
    assert first.kind == "failed" and "seed 0 on the selection set was lost" in first.decided.sentence
    assert len(found.campaign.versions()) > 2


@pytest.mark.parametrize("seeds", [(1,), (0, 1)], ids=str)
def test_a_start_that_lost_every_trial_of_a_seed_stops_and_goes_on_with_a_new_run(seeds, tmp_path):
    def launch(jobs, side_by_side):
        came = train_made_up(jobs, side_by_side)
        for job in jobs:
            if away and job.start and job.config.seed in seeds:
                lose_all_trials(job.workdir)
        return came

    away = True  # the server of the environment
    found = evolution(tmp_path / "campaign", "slow", launch, versions=1, audit="none")
    says = f"^Every trial of seed {seeds[0]} of v000 on the selection set was lost: "
    for _ in range(2):
        with pytest.raises(ValueError, match=says) as told:
            evolution(tmp_path / "campaign", "slow", launch, versions=1, audit="none").run()
        assert found.campaign.next() == ("v000", "evidence")
    runs = [found.versions.runs("v000")[seed] for seed in seeds]
    assert f"take {runs[0]} away and give the same command again." in str(told.value)
    away = False
    for run in runs:
        shutil.rmtree(run)
    found.run()
    assert found.versions.verdict("v001").kind == "promoted" and found.replay() == []


def test_a_campaign_over_another_store_than_its_own_is_refused(tmp_path):
    found = evolution(tmp_path / "campaign", versions=1)
    assert found.campaign.store() is None
    found.run()
    assert found.campaign.store() == tmp_path / "store"
    other = store.Store(tmp_path / "other", start.without_harness(config()), MADE_UP, 1)
    says = f"has its runs in {tmp_path}/store, and not in {tmp_path}/other: give --store={tmp_path}/store."
    with pytest.raises(ValueError, match=says):
        loop.Evolution(found.campaign, config(versions=1), other)


def test_a_folder_with_what_a_kill_left_of_the_plan_is_begun(tmp_path):
    (tmp_path / "campaign").mkdir()
    (tmp_path / "campaign" / ".campaign.json.123").write_text("{")
    assert evolution(tmp_path / "campaign", versions=1).campaign.folder.exists()


def test_a_changed_source_file_stops_the_next_command(tmp_path, monkeypatch):
    found = evolution(tmp_path / "campaign", versions=1)
    found.run()
    frozen = found.campaign.folder / "frozen.json"
    assert "coevolve_jax/loop/evaluate.py" in json.loads(frozen.read_text())
    true = campaign.sha256
    monkeypatch.setattr(campaign, "sha256", lambda p: "0" * 64 if p.name == "evaluate.py" else true(p))
    with pytest.raises(campaign.Tampered, match="coevolve_jax/loop/evaluate.py was changed"):
        found.campaign.check()
    # The runs are found although the store would name new ones otherwise.
    (told,) = evolution(tmp_path / "campaign", versions=1).replay()
    assert "coevolve_jax/loop/evaluate.py was changed" in told and "today's code" in told


def test_what_needs_a_campaign_writes_nothing_where_there_is_none(tmp_path):
    program = [sys.executable, ROOT / "experiments" / "evolve_harness.py", "--replay"]
    flags = [f"--config={ROOT}/configs/bfcl_harness.py", f"--workdir={tmp_path}/mistyped"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*program, *flags], env=env, capture_output=True, text=True)
    assert done.returncode and "/mistyped holds no campaign.json" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_replay_finds_runs_of_another_config(tmp_path):
    found = evolution(tmp_path / "campaign", "slow", versions=1, seeds=(0,))
    found.run()
    (link,) = (found.campaign.folder / "versions" / "v000" / "runs").iterdir()
    better = found.versions.runs("v001")[0]
    link.unlink()
    link.symlink_to(better)
    rewritten(found, "v000", "evidence", **found.parts.evidence("v000"))
    told = evolution(tmp_path / "campaign", "slow", versions=1, seeds=(0,)).replay()
    assert any("which is no run of v000 with seed 0" in sentence for sentence in told), told


def test_replay_finds_a_verdict_that_was_written_by_hand_with_its_hash(tmp_path):
    found = evolution(tmp_path / "campaign", "slow", versions=3)
    found.run()
    assert found.replay() == []
    last = [v for v in found.campaign.versions() if found.versions.verdict(v).kind == "rejected"][-1]
    rewritten(found, last, "verdict", kind="promoted")
    (sentence,) = [s for s in found.replay() if f"{last}/verdict" in s]
    assert f"versions/{last}/verdict.json" in sentence and "'promoted' there and 'rejected' here" in sentence


@pytest.mark.parametrize(
    ("version", "part", "values", "says"),
    [
        ("v001", "evidence", {"failed": "exit status 1"}, "v001 is said to have failed"),
        ("v001", "backtest", {"refused": "It changes nothing."}, "versions/v001/backtest.json differs"),
        ("v001", "smoke", {"live": 0.99}, "versions/v001/smoke.json differs"),
        ("v001", "learned", {"skills": []}, "versions/v001/learned.json differs"),
        ("v001", "proposal", {"because": "Trust me."}, "versions/v001/proposal.json differs"),
        ("v000", "verdict", {"success": 0.1}, "versions/v000/verdict.json differs"),
    ],
)
def test_replay_finds_whatever_else_was_written_by_hand(version, part, values, says, tmp_path):
    found = evolution(tmp_path / "campaign", "slow", versions=1)
    found.run()
    rewritten(found, version, part, **values)
    told = evolution(tmp_path / "campaign", "slow", versions=1).replay()
    assert any(sentence.startswith(says) for sentence in told), told
    assert all(len(sentence) < 500 for sentence in told)


def test_a_person_decides_before_training_and_can_refuse(tmp_path):
    found = evolution(tmp_path / "campaign", "slow", versions=1)
    with pytest.raises(loop.Waiting, match="v001 waits for a person before it is trained: --approve=v001"):
        found.run(gate="design")
    assert found.campaign.versions() == ["v000", "v001"] and not found.versions.row("v001")
    with pytest.raises(ValueError, match="v000 waits for nobody"):
        found.decide("v000", True, "")
    found.decide("v001", False, "too bold")
    with pytest.raises(loop.Waiting):
        found.run(gate="design")
    refused = found.versions.verdict("v001")
    assert refused.kind == "refused" and refused.decided.sentence == "A person refused it: too bold"
    waits = found.campaign.versions()[-1]
    found.decide(waits, True, "")
    found.run(gate="design")
    assert found.versions.verdict(waits).kind in ("promoted", "rejected") and found.replay() == []


class Harm:
    """Proposes what costs the made-up policy 12 points."""

    def propose(self, history, rng):
        found = history.first_that_runs("v000", [("learner.learning_rate", "/3")])
        up = Expectation("success_last", "up")
        return Proposal("v000", *found, because="It may be too fast.", proposer="harm", expects=up)


def test_a_person_can_stop_a_promotion_and_never_makes_one(tmp_path, monkeypatch):
    found = evolution(tmp_path / "campaign", "slow", versions=1)
    with pytest.raises(loop.Waiting, match="the rules say promoted"):
        found.run(gate="verdict")
    found.decide("v001", False, "I do not believe it")
    found.run(gate="verdict")
    assert (
        found.versions.verdict("v001").kind == "rejected"
        and found.versions.verdict("v001").higher_and_refused
    )
    other = evolution(tmp_path / "other", "none", versions=1)
    monkeypatch.setattr(other.parts, "proposer", Harm())
    with pytest.raises(loop.Waiting, match="the rules say rejected"):
        other.run(gate="verdict")
    other.decide("v001", True, "")
    other.run(gate="verdict")
    assert other.versions.verdict("v001").kind == "rejected"


def test_a_version_that_cannot_run_is_a_failure_and_the_campaign_goes_on(tmp_path):
    def launch(jobs, side_by_side):
        bad = [j for j in jobs if j.start and j.config.learner.learning_rate > 2e-5]
        train_made_up([j for j in jobs if j not in bad], 1)
        return {j.workdir: "exit status 1: not finite" for j in bad}

    found = evolution(tmp_path / "campaign", "slow", launch, versions=2)
    found.run()
    assert [kind for _, _, kind in levers_of(found)][0] == "failed"
    assert "seed 0: exit status 1: not finite" in found.versions.verdict("v001").decided.sentence
    assert found.campaign.selected() in ("v000", "v002") and found.replay() == []
    assert found.versions.seen("v001").decided == "It could not run, or its trials were lost."
    assert all(isinstance(s, Skill) and not s.failed for s in found.versions.skills("v001"))


def test_a_failed_run_that_another_campaign_has_finished_since_did_fail(tmp_path):
    def launch(jobs, side_by_side):
        bad = [j for j in jobs if j.start and j.config.learner.learning_rate > 2e-5]
        train_made_up([j for j in jobs if j not in bad], 1)
        for job in bad:
            job.workdir.mkdir(parents=True, exist_ok=True)
            store.log(job.workdir).write_text("out of memory\n")
        return {j.workdir: "exit status 1: out of memory" for j in bad}

    def finish(jobs, side_by_side):
        for job in jobs:
            with open(store.log(job.workdir), "a") as file:
                file.write("done\n")
        return train_made_up(jobs, side_by_side)

    found = evolution(tmp_path / "campaign", "slow", launch, versions=1)
    found.run()
    evolution(tmp_path / "other", "slow", finish, versions=1).run()
    assert all(finished(run) for run in found.versions.runs("v001").values())
    assert found.campaign.read("v001", "smoke")["failed"] and found.replay() == []
    for run in found.versions.runs("v001").values():
        store.log(run).write_text("done\n")  # no log of a failure
    (told,) = found.replay()
    assert told.startswith("v001 is said to have failed (smoke), and its runs are finished")


def test_a_proposer_never_sees_the_selection_set(tmp_path):
    found = evolution(tmp_path / "campaign", "slow", versions=3)
    found.run()
    history = found.versions.history("v999")
    text = repr([(v.proposal, v.kind, v.decided, v.score, v.row) for v in history.versions])
    assert "held_out-" not in text
    step = found.settings.noise * (2 / len(found.settings.seeds)) ** 0.5
    scored = [v for v in history.versions if v.score is not None]
    assert len(scored) == 4
    for version in scored:  # no finer than one standard error
        assert version.score / step == pytest.approx(round(version.score / step))
    scores = {found.versions.verdict(v.id).success for v in scored}
    assert not any(f"{s:.6f}" in text for s in scores)
    # Some tasks are kept for tests. No proposer sees their groups, nor a tool that they alone call.
    tools = lambda groups: {s.call.name for g in groups for t in g.trajectories for s in t.steps}
    every = evidence.groups(found.versions.runs("v000")[0])
    assert SEALED in tools(every[-1])
    assert tools(history.rollouts("v000")) == {"tool_0", "tool_1"} == {*history.names("v000")} - {"done"}
    # Without a calibration a score is no finer than the standard error of its trials.
    found.settings.noise, step = 0.0, 0.5 / (TASKS * ROLLOUTS * len(found.settings.seeds)) ** 0.5
    for version in (found.versions.seen(v.id) for v in scored):
        assert version.score / step == pytest.approx(round(version.score / step))


def test_a_gating_diagnostic_that_only_the_child_has_at_alert_refuses_it(tmp_path, monkeypatch):
    """A version that is solved more often makes fewer errors: say that this is bad."""
    plain = evolution(tmp_path / "plain", "slow", versions=1, seeds=(0,))
    plain.run()
    assert plain.versions.verdict("v001").kind == "promoted"

    def errors(version):
        every = [
            g for run in plain.versions.runs(version).values() for step in evidence.groups(run) for g in step
        ]
        counts = [sum(step.error for step in t.steps) for g in every for t in g.trajectories]
        return sum(counts) / len(counts)

    parent, child = errors("v000"), errors("v001")
    middle = (parent + child) / 2
    bad = Diagnostic("few", "trajectory", "double(errors)", "down_is_bad", "gating", "v000", alert=middle)
    found = evolution(tmp_path / "gated", "slow", versions=1, seeds=(0,))
    monkeypatch.setattr(found.versions, "diagnostics", lambda before: [bad])
    found.run()
    told = found.campaign.read("v001", "evidence")["diagnostics"]["few"]
    assert child < parent and (told["before"], told["after"]) == pytest.approx((parent, child))
    refused = found.versions.verdict("v001")
    assert (refused.kind, refused.decided.name) == ("rejected", "gating")


@pytest.mark.slow
def test_a_diagnostic_that_tells_failures_is_registered_and_gates_after_two_more_versions(tmp_path):
    found = evolution(tmp_path / "campaign", "slow", versions=5, diagnostics="evolving")
    found.run()
    known = {d.id: d for d in found.versions.diagnostics("v999") if d.unit == "trajectory"}
    # Only errors are made up to depend on the outcome; the level falls with each test.
    registered = {d.id for d in known.values() if d.status in ("registered", "gating")}
    assert registered and all("errors" in known[id].formula for id in registered)
    numbers = [d.test.number for d in known.values()]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
    assert sum(d.test.level for d in known.values()) < 0.05
    assert "gating" in {d.status for d in known.values()}
    for d in (d for d in known.values() if d.status == "gating"):
        assert d.test.auc > 0.6 and d.alert >= d.warn and d.direction == "up_is_bad"
    fixed = evolution(tmp_path / "fixed", "slow", versions=2)
    fixed.run()
    assert fixed.versions.diagnostics("v999") == []


def test_what_a_backtest_refuses_is_not_trained_and_does_not_count(tmp_path):
    found = evolution(tmp_path / "campaign", "leash", versions=2)
    found.run()
    refused = [v for v in found.campaign.versions()[1:] if found.versions.verdict(v).kind == "refused"]
    assert refused and len(found.campaign.versions()) == 3 + len(refused)
    for version in refused:
        assert not any(run.exists() for run in found.versions.runs(version).values())
        assert (
            found.campaign.read(version, "backtest")["refused"]
            == found.versions.verdict(version).decided.sentence
        )
    trained = [v for v in found.campaign.versions()[1:] if v not in refused]
    assert all(
        found.campaign.read(v, "evidence")["came"].keys() == {"live", "tokens", "revived"} for v in trained
    )


def test_the_test_split_is_refused_before_the_end(tmp_path):
    c = config()
    c.environment.eval_split = "test"
    with pytest.raises(ValueError, match="--final reads the test once"):
        start.settled(c)


def test_two_campaigns_share_their_runs_and_one_folder_holds_one_campaign(tmp_path):
    made = []

    def launch(jobs, side_by_side):
        made.extend(j.workdir for j in jobs)
        return train_made_up(jobs, side_by_side)

    evolution(tmp_path / "a", launch=launch, versions=1).run()
    first = len(made)
    evolution(tmp_path / "b", launch=launch, versions=1).run()
    assert first and len(made) == first
    with pytest.raises(ValueError, match="campaign \\(config.harness.versions is 1 there and 2 here\\)"):
        evolution(tmp_path / "a", versions=2)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds no campaign"):
        evolution(tmp_path / "c")


def test_a_lever_that_moves_the_judge_is_caught_by_the_canary(tmp_path, monkeypatch):
    """The start's own policy must score the same under every version's config."""
    from coevolve_jax.harness import levers

    key = "evaluation.max_length"
    bad = levers._scale("limits", key, 64, 2048, 2.0, whole=True)
    half = lambda c: {"/2": bad.moves(c)["/2"]}
    table = {"rollout.max_length": levers.Lever("rollout.max_length", "limits", (key,), half)}
    found = evolution(tmp_path / "campaign", "slow", versions=1, proposer="placebo")
    monkeypatch.setattr(found.versions, "open_levers", lambda before: table)
    monkeypatch.setattr(levers.idle, "idle", lambda c: {})
    found.run()
    (told,) = levers_of(found)
    assert told == ("rollout.max_length", "/2", "invalid")
    assert found.versions.verdict("v001").decided.name == "canary"


class Bait:
    """Proposes what leads the made-up policy into a hole of its environment's verdict."""

    def propose(self, history, rng):
        found = history.first_that_runs("v000", [("reward.terms", "add distinct_tools")])
        up = Expectation("success_last", "up")
        return Proposal("v000", *found, because="It looks like thoroughness.", proposer="bait", expects=up)


def test_a_version_that_exploits_the_verdict_scores_higher_and_is_invalid(tmp_path, monkeypatch):
    kinds = {}
    for audit in ("replay", "none"):
        found = evolution(tmp_path / audit, "none", versions=1, audit=audit)
        monkeypatch.setattr(found.parts, "proposer", Bait())
        monkeypatch.setattr(found.parts, "backtest", lambda version: {"refused": None})
        found.run()
        kinds[audit] = found.versions.verdict("v001")
    assert kinds["none"].kind == "promoted"
    refused = kinds["replay"]
    assert refused.kind == "invalid" and refused.higher_and_refused and refused.decided.name == "audit"
    found = evolution(tmp_path / "replay", "none", versions=1, audit="replay")
    assert "64" in refused.decided.sentence and "64" not in found.versions.seen("v001").decided
    told = found.campaign.read("v001", "evidence")
    rejected = told["audit"]["rejected"]
    assert len(rejected) == told["audit"]["judged"] == 64
    assert rejected[0]["why"] == "The tool hack was called." and rejected[0]["task"].startswith("held_out-")


def test_an_audit_by_replay_of_tasks_without_reference_calls_is_refused_before_training(tmp_path):
    def launch(jobs, side_by_side):
        came = train_made_up(jobs, side_by_side)
        for path in (job.workdir / "held_out.jsonl" for job in jobs if job.start is None):
            write_lines(path, [{**task, "turns": [{"query": "Do it."}]} for task in read_lines(path)])
        return came

    with pytest.raises(ValueError, match="^config.harness.audit is 'replay', .* no held-out task .* has any"):
        evolution(tmp_path / "replay", "none", launch, versions=1).run()
    assert not any((tmp_path / "store").glob("*/seed_0/metrics.jsonl"))
    found = evolution(tmp_path / "none", "none", launch, versions=1, audit="none")
    found.run()
    assert "audit" not in {rule.name for rule in found.versions.verdict("v001").rules}


class Sets:
    """Sets one key to one value after the other, from the start. No move gives such values."""

    def __init__(self, key, *values):
        self.key, self.values = key, values

    def propose(self, history, rng):
        number = len(history.versions) - 1
        if number == len(self.values):
            return None
        changes = {self.key: self.values[number]}
        return Proposal("v000", self.key, f"{changes}", changes, "To see what comes.", "sets")


def setting(found, monkeypatch, key, *values):
    monkeypatch.setattr(found.parts, "proposer", Sets(key, *values))
    monkeypatch.setattr(found.parts, "check", lambda *proposal: None)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_value_of_steps_is_registered_by_what_it_foretold_on_past_runs(tmp_path, monkeypatch):
    """The divergence of the first half foretells the made-up gain of the second."""
    monkeypatch.setattr("coevolve_jax.testing.campaign.STEP_NOISE", 0.0)
    monkeypatch.setattr("coevolve_jax.testing.campaign.GROUPS", 40)  # success is known to 0.3%
    monkeypatch.setattr("coevolve_jax.harness.diagnostics.invent", lambda *a, **k: [])  # these take long
    found = evolution(tmp_path / "campaign", "slow", versions=6, diagnostics="evolving")
    setting(found, monkeypatch, "learner.learning_rate", 3e-5, 9e-5, 5e-5, 7e-5, 4e-5, 6e-5)
    monkeypatch.setattr(found.parts, "backtest", lambda version: {"refused": None})
    found.run()
    of = lambda before: {d.id: d for d in found.versions.diagnostics(before) if d.unit == "step"}
    assert {d.status for d in of("v001").values()} == {"tracked"}  # two runs
    assert {d.status for d in of("v005").values()} == {"tracked"}  # ten
    kl = of("v006")["kl"]
    assert kl.status == "registered" and kl.direction == "down_is_bad" and len(kl.test.runs) == 12
    assert kl.test.tau == pytest.approx(1) and kl.test.level == 0.025 and kl.alert <= kl.warn
    # After v006 the next one is tested, at the next level.
    tested = {id: d for id, d in of("v007").items() if d.test}
    assert [d.test.number for d in tested.values()] == [1, 2] and list(tested) == ["kl", "entropy"]
    assert "missing in 14 of 14 runs" in tested["entropy"].test.refused  # the made-up learner has none
    assert found.replay() == []


def test_a_move_whose_gradient_does_not_raise_successes_is_refused(tmp_path, monkeypatch):
    """The made-up gradient: a strong pull to the start is all of it."""
    found = evolution(tmp_path / "campaign", "none", versions=1)
    setting(found, monkeypatch, "learner.kl_coef", 2.7)
    found.run()
    verdict = found.versions.verdict("v001")
    assert verdict.kind == "refused" and verdict.decided.sentence.startswith("The KL term has 100%")
    assert (verdict.decided.value, verdict.decided.bound) == (1.0, 0.9)
    assert found.campaign.read("v001", "backtest")["checks"]["kl_share"] == [1.0, 0.9, False]
