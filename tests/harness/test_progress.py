"""Sentences on a version that trains, from made-up files of its runs."""

import itertools
import json
import time

import pytest

from coevolve_jax.analysis import live
from coevolve_jax.analysis.campaign_view import campaign_view
from coevolve_jax.harness import progress
from coevolve_jax.harness.records import Expectation
from coevolve_jax.harness.smoke import FIRST
from coevolve_jax.testing.campaign import train_made_up
from tests.harness.support import evolution


class Stopped(BaseException):
    """Stands for a kill."""


def under_way(tmp_path, steps):
    """A campaign whose v001 was killed after so many steps of its first seed."""

    def launch(jobs, side_by_side):
        whole = [j for j in jobs if j.start is None or j.config.learner.learning_rate < 2e-5 or j.until]
        train_made_up(whole, side_by_side)
        if whole:
            return {}
        train_made_up([jobs[0]._replace(until=steps)], 1)
        raise Stopped

    found = evolution(tmp_path / "campaign", "slow", launch, versions=3)
    try:
        found.run()
    except Stopped:
        pass
    return found


def test_a_sentence_names_steps_target_and_hours_left(tmp_path, monkeypatch):
    found = under_way(tmp_path, steps=6)
    told = progress.training(found.campaign)
    steps = found.campaign.plan()["config"]["steps"]
    assert (told.version, told.steps, dict(told.done)) == ("v001", steps, {0: 6, 1: 0})
    row = json.loads((found.versions.runs("v001")[0] / "metrics.jsonl").read_text().splitlines()[-1])
    assert told.success == row["success"] and told.expects == Expectation("kl_last", "up", 0.0)
    assert told.before == found.versions.row("v000")["kl_last"] < told.now
    # A made-up step takes two seconds: 2 seeds of this version, and of two more.
    assert told.hours == (2 * steps - 6) * 2 / 3600
    assert told.all_hours == (2 * steps - 6 + 2 * 2 * steps) * 2 / 3600
    plan = found.campaign.plan() | {"told": {"jobs": 8}}  # more than runs, of which two are of a version
    monkeypatch.setattr(found.campaign, "plan", lambda: plan)
    assert progress.training(found.campaign).hours == told.hours / 2
    text = progress.sentence(told)
    assert text.startswith(f"v001: seed 0 at step 6 of {steps}, seed 1 at step 0 of {steps}, success ")
    assert (
        "kl_last is " in text and "in its parent, expected up" in text and "of the campaign at most." in text
    )


def test_the_hours_of_the_campaign_at_most_are_no_fewer_while_the_first_steps_run(tmp_path):
    told = []

    def launch(jobs, side_by_side):
        done = train_made_up(jobs, side_by_side)
        if jobs[0].start and jobs[0].config.learner.learning_rate > 2e-5:
            told.append(progress.training(found.campaign))
        return done

    found = evolution(tmp_path / "campaign", "slow", launch, versions=3)
    found.run()
    steps = found.campaign.plan()["config"]["steps"]
    smoke, training = next((a, b) for a, b in itertools.pairwise(told) if a.version == b.version)
    assert (smoke.steps, smoke.hours, dict(smoke.done)) == (FIRST, 0, {0: FIRST})
    # A made-up step takes two seconds: 2 seeds of this version, and of those that may follow.
    left = (2 * steps * (3 - int(smoke.version[1:]) + 1) - FIRST) * 2 / 3600
    assert smoke.all_hours == pytest.approx(left) and smoke.all_hours > training.all_hours


def test_the_page_shows_the_runs_under_way(tmp_path):
    found = under_way(tmp_path, steps=6)
    view, _ = campaign_view(found.campaign)
    assert view["training"]["done"] == {"0": 6, "1": 0} and view["training"]["version"] == "v001"
    assert view["training"]["text"] in view["headline"]["lead"]
    json.dumps(view)
    # A page that is served follows the runs.
    state, path = live._state(found.campaign.folder), found.versions.runs("v001")[0] / "metrics.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:5]) + "\n")
    assert live._state(found.campaign.folder) != state


def test_half_a_line_is_left_out_and_a_campaign_at_rest_says_nothing(tmp_path):
    found = under_way(tmp_path, steps=6)
    path = found.versions.runs("v001")[0] / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    assert progress.training(found.campaign).done[0] == 5
    evolution(tmp_path / "campaign", "slow", versions=3).run()
    assert progress.training(found.campaign) is None and progress.sentence(None) == ""


def test_it_is_said_now_and_then_and_once_if_nothing_has_changed():
    said, texts = [], iter(["", "a", "a", "b"])
    with progress.said(said.append, lambda: next(texts, "b"), every=0.001):
        for _ in range(20_000):  # so that a failure ends
            if said == ["a", "b"]:
                break
            time.sleep(0.001)
    assert said == ["a", "b"]


def test_the_time_that_is_left_is_that_of_the_runs_that_were_done_here(monkeypatch):
    monkeypatch.setattr(progress.time, "monotonic", iter([1000.0, 1000.0 + 60 * 12]).__next__)
    counted = progress.Counted(9, 3)
    assert counted(3) == "3 of 9 runs"
    assert counted(5) == "5 of 9 runs, 24 minutes left"  # six minutes each
