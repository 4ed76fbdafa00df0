"""The parts of a version: what they take from its parent, and what moves the judge."""

from types import SimpleNamespace

import pytest

from coevolve_jax import config as configs
from coevolve_jax.harness import backtest, evidence, levers
from coevolve_jax.harness.parts import Parts
from coevolve_jax.harness.proposers import score
from coevolve_jax.harness.records import Expectation, Proposal
from coevolve_jax.harness.store import twin
from coevolve_jax.harness.templates import Candidate, checked
from tests.harness.support import config, evolution


class Proposes:
    def __init__(self, *proposal):
        self.proposal = proposal

    def propose(self, history, rng):
        up = Expectation("success_last", "up")
        return Proposal("v000", *self.proposal, because="To see.", proposer="test", expects=up)


def test_a_version_whose_evaluation_is_another_is_invalid_although_the_canary_is_alike(tmp_path, monkeypatch):
    """The canary is greedy, so it does not see the evaluation's temperature."""
    key = "evaluation.temperature"
    lever = levers.Lever(key, "limits", (key,), lambda c: {"down": {key: 0.7}})
    found = evolution(tmp_path / "campaign", "slow", versions=1)
    monkeypatch.setattr(found.versions, "open_levers", lambda before: {key: lever})
    monkeypatch.setattr(found.parts, "proposer", Proposes(key, "down", {key: 0.7}))
    monkeypatch.setattr(found.parts, "backtest", lambda version: {"refused": None})
    found.run()
    judged = found.versions.verdict("v001")
    canary = [found.campaign.read(v, "evidence")["canary"] for v in ("v000", "v001")]
    assert canary[0] == canary[1]
    assert (judged.kind, judged.decided.name) == ("invalid", "canary")
    (score,) = [rule for rule in judged.rules if rule.name == "score"]
    assert judged.higher_and_refused == score.ok and found.versions.seen("v001").score is None
    assert judged.decided.sentence == (
        "config.evaluation.temperature is 0.7, other than the start's: a lever moved the judge."
    )


def test_a_move_back_to_the_config_of_an_earlier_version_is_refused(tmp_path):
    """The store would return its finished runs, and a test would count them as new rollouts."""
    found = evolution(tmp_path / "campaign", "slow", versions=1)
    found.run()
    key = "learner.learning_rate"
    assert found.versions.verdict("v001").kind == "promoted" and found.versions.proposal("v001").lever == key
    up = Expectation("success_last", "up")
    says = lambda move, rate, aim=up: Proposal(
        "v001", key, move, {key: rate}, because="To see.", proposer="test", expects=aim
    )
    found.parts.check("v002", says("x3", 9e-5))
    why = "'/3' of v001 gives the config of v000, whose runs would count as new evidence: propose another"
    with pytest.raises(levers.Refused, match=why):
        found.parts.check("v002", says("/3", 1e-5))
    with pytest.raises(levers.Refused, match="expects nothing, and the rule `target` asks for it: give `exp"):
        found.parts.check("v002", says("x3", 9e-5, None))
    start = found.versions.config("v000")
    assert twin(configs.override(start, {"seed": 7}), {"v000": start}) == "v000"
    assert twin(found.versions.config("v001"), {"v000": start}) == ""


def test_the_reward_of_parent_and_child_is_by_the_childs_terms(tmp_path, monkeypatch):
    """A term whose values are below 0 lowers the reward of both, so it alone is no fall."""
    term = ("distinct_tools:-0.1",)
    found = evolution(tmp_path / "campaign", "slow", versions=1)
    monkeypatch.setattr(found.parts, "check", lambda *proposal: None)
    monkeypatch.setattr(found.parts, "proposer", Proposes("reward.terms", "set", {"reward.terms": term}))
    monkeypatch.setattr(found.parts, "backtest", lambda version: {"refused": None})
    found.run()
    runs, child = list(found.versions.runs("v000").values()), found.versions.config("v001")
    own, by_terms = (evidence.row(c, runs)["shaped_last"] for c in (found.versions.config("v000"), child))
    before = found.parts._before("v001")
    assert before["shaped_last"] == by_terms < own == found.versions.row("v000")["shaped_last"]
    (rule,) = [r for r in found.versions.verdict("v001").rules if r.name == "reward"]
    assert rule.sentence.startswith(f"The reward by the version's terms went from {by_terms:.4g} to ")
    kept = found.versions.row("v000")
    assert {name for name in kept if before[name] != kept[name]} <= {"shaped", "shaped_first", "shaped_last"}


@pytest.mark.parametrize(
    ("diagnostic", "direction", "aims"),
    [("dead_last", "up", True), ("dead_last", "down", False), ("active", "down", True),
     ("active", "up", False), ("kept", "down", True), ("kept_last", "up", False), ("mixed", "down", True),
     ("mixed_last", "up", False), ("gain", "down", False), (None, "", False)],
)  # fmt: skip
def test_a_hypothesis_aims_at_fewer_live_groups_in_one_direction_only(
    diagnostic, direction, aims, monkeypatch
):
    asked = {}
    aim = diagnostic and Expectation(diagnostic, direction)
    proposal = Proposal("v000", "x", "up", {}, "b", "p", expects=aim)
    parts = object.__new__(Parts)
    parts._module, parts._unreliable = SimpleNamespace(), lambda version: set()
    parts._versions = SimpleNamespace(
        proposal=lambda v: proposal, runs=lambda v: {}, config=lambda v: configs.override(config(), {})
    )
    told = SimpleNamespace(to_json=dict)
    monkeypatch.setattr(backtest, "backtest", lambda *args, **how: asked.update(how) or told)
    parts.backtest("v001")
    assert asked["aims_at_live"] is aims


def test_a_formula_that_takes_the_name_of_a_reward_term_is_left_out():
    said = []
    given = [Candidate("length", "double(errors)"), Candidate("my_length", "double(errors)")]
    assert checked(given, (), (), said.append) == given[1:]
    assert "length is the name of a reward term" in said[0]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, "it is a NoneType, and no list"),
        ("double(errors)", "it is a str, and no list"),
        ([{"id": "a", "formula": "double(errors)"}], "a dict is no Candidate"),
        ([Candidate(None, "double(errors)")], "a field of a Candidate is no text"),
        ([Candidate("a", None)], "a field of a Candidate is no text"),
        ([Candidate("a", "double(errors)", unit=1)], "a field of a Candidate is no text"),
        ([Candidate("a", "double(errors)", proposer=object())], "a field of a Candidate is no text"),
        ([Candidate("a", "double(errors)", proposer="\ud800")], "a field of a Candidate is no text"),
    ],
)
def test_what_is_no_list_of_formulas_is_left_out_in_a_sentence(given, says):
    said = []
    assert checked(given, (), (), said.append) == [] and len(said) == 1 and says in said[0]


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ((), "lacks 'score', so a version could be promoted that is no better than its parent: add it"),
        (("target", "reward", "gating", "audit"), "lacks 'score'"),
        (("score", "targets"), "names 'targets': use some of score, target, reward, gating, audit"),
        ("score", "names 's': use some of"),
    ],
)
def test_a_proposer_that_sets_no_rules_or_unknown_ones_is_refused_by_name(rules, says, tmp_path, monkeypatch):
    monkeypatch.setattr(score, "RULES", rules)
    with pytest.raises(ValueError, match=f"^RULES of coevolve_jax.harness.proposers.score {says}"):
        evolution(tmp_path / "campaign", "slow", versions=1, proposer="score")
