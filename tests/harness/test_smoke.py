"""Smoke runs: the first steps of a version whose change no backtest sees whole."""

import json

import pytest

from coevolve_jax.harness import loop, smoke
from coevolve_jax.harness.records import Expectation, Proposal
from coevolve_jax.records.files import read_lines, write_lines
from coevolve_jax.testing.campaign import train_made_up
from tests.harness.support import evolution, files, rewritten

pytestmark = pytest.mark.slow


class Jobs:
    """The made-up trainer, which keeps the jobs that it was given.

    fails: the first steps of a version end with this. live: they learn from this share of the groups.
    """

    def __init__(self, fails="", live=None):
        self.given, self.fails, self.live = [], fails, live

    def __call__(self, jobs, side_by_side):
        self.given += [(job.until, job.config.seed) for job in jobs if job.start]
        failed = train_made_up(jobs, side_by_side)
        for job in (job for job in jobs if job.until):
            if self.live is not None:
                path = job.workdir / "metrics.jsonl"
                low = {"zero_variance_groups": 1 - self.live, "active_groups": self.live}
                write_lines(path, [{**row, "health": {**row["health"], **low}} for row in read_lines(path)])
            if self.fails:
                failed[job.workdir] = self.fails
        return failed


class Proposes:
    """Proposes one move."""

    def __init__(self, lever, move):
        self.lever, self.move = lever, move

    def propose(self, history, rng):
        new = [move for move in history.new_moves("v000") if move == (self.lever, self.move)]
        found = history.first_that_runs("v000", new)
        up = Expectation("success_last", "up")
        return found and Proposal("v000", *found, because="To be seen.", proposer="test", expects=up)


def campaign(folder, launch, lever="rollout.temperature", move="x1.25"):
    found = evolution(folder, "none", launch, versions=1)
    found.parts.proposer = Proposes(lever, move)
    return found


def test_first_steps_are_run_where_a_backtest_does_not_see_all_and_the_training_goes_on_from_them(tmp_path):
    launch = Jobs()
    found = campaign(tmp_path / "campaign", launch)
    found.run()
    both = [(None, 0), (None, 1)]
    assert launch.given == [*both, (smoke.FIRST, 0), *both]
    told = found.campaign.read("v001", "smoke")
    # Groups of 8: three tenths are dead at the start, and the truth does not depend on the temperature.
    assert told["refused"] is None and told["live"] == pytest.approx(told["parent"])
    c = found.versions.config("v001").rollout
    assert told["rollouts"] == {"0": smoke.FIRST * c.tasks_per_step * c.group_size}
    assert found.versions.verdict("v001").kind in ("promoted", "rejected") and found.replay() == []


def test_what_backtests_see_whole_needs_no_first_steps(tmp_path):
    launch = Jobs()
    found = campaign(tmp_path / "campaign", launch, "learner.kl_coef", "x3")
    found.run()
    assert found.campaign.read("v001", "backtest")["not_covered"] == []
    assert found.campaign.read("v001", "smoke") == {} and all(until is None for until, _ in launch.given)


def test_a_version_that_crashes_is_found_before_it_is_trained(tmp_path):
    launch = Jobs(fails="exit status 1: not finite")
    found = campaign(tmp_path / "campaign", launch)
    found.run()
    verdict = found.versions.verdict("v001")
    assert (verdict.kind, verdict.decided.sentence) == ("failed", "seed 0: exit status 1: not finite")
    assert launch.given.count((smoke.FIRST, 0)) == 1 and len(launch.given) == 3  # two are the start's
    assert found.campaign.read("v001", "smoke")["rollouts"]["0"] > 0 and found.replay() == []
    rewritten(found, "v001", "smoke", rollouts={"0": 1})
    assert found.replay() == ["v001 (smoke) has other rollouts than its run of seed 0."]


def test_a_version_that_learns_from_half_as_many_groups_is_refused_and_does_not_count(tmp_path):
    launch = Jobs(live=0.2)
    found = campaign(tmp_path / "campaign", launch)
    found.run()
    assert found.campaign.versions() == ["v000", "v001"]  # the proposer has nothing else
    verdict = found.versions.verdict("v001")
    rule = verdict.decided
    assert (verdict.kind, rule.name, rule.value) == ("refused", "smoke", pytest.approx(0.2))
    assert rule.bound == pytest.approx(found.campaign.read("v001", "smoke")["parent"] / 2)
    assert "Its first 3 steps learn from 20% of the groups, less than 50% of the parent's" in rule.sentence
    assert found.campaign.left() == 1 and found.replay() == []


def test_a_person_decides_before_the_first_steps(tmp_path):
    launch = Jobs()
    found = campaign(tmp_path / "campaign", launch)
    with pytest.raises(loop.Waiting, match="before it is trained"):
        found.run(gate="design")
    assert len(launch.given) == 2
    found.decide("v001", False, "too hot")
    found.run(gate="design")
    assert found.versions.verdict("v001").kind == "refused" and len(launch.given) == 2


@pytest.mark.parametrize("part", ["smoke", "evidence"])
def test_killed_while_it_trains_the_same_command_goes_on_to_the_same_files(part, tmp_path):
    whole = campaign(tmp_path / "whole" / "campaign", Jobs())
    whole.run()

    class Killed(BaseException):
        pass

    def launch(jobs, side_by_side):
        train_made_up(jobs, side_by_side)
        started = [job for job in jobs if job.start and job.config.rollout.temperature > 1]
        if started and bool(started[0].until) == (part == "smoke"):
            raise Killed
        return {}

    folder = tmp_path / "killed" / "campaign"
    with pytest.raises(Killed):
        campaign(folder, launch).run()
    campaign(folder, Jobs()).run()
    assert files(folder) == files(whole.campaign.folder)


def test_the_budget_counts_first_steps_once(tmp_path):
    from coevolve_jax.analysis.campaign_view import campaign_view

    stopped = campaign(tmp_path / "a" / "campaign", Jobs(fails="exit status 1: not finite"))
    stopped.run()
    trained = campaign(tmp_path / "b" / "campaign", Jobs())
    trained.run()
    of = lambda found: {v["id"]: v["rollouts"] for v in campaign_view(found.campaign)[0]["versions"]}
    assert of(stopped)["v001"] == stopped.campaign.read("v001", "smoke")["rollouts"]
    last = campaign_view(stopped.campaign)[0]["versions"][-1]
    assert last["seconds"] == {"0": 2.0 * smoke.FIRST}  # of the made-up steps
    ledger = json.loads((trained.versions.runs("v001")[0] / "ledger.json").read_text())["costs"]
    assert of(trained)["v001"] == dict.fromkeys("01", ledger["rollouts/policy"])
