"""The scripted proposer tries a skill that holds, the parent's own move again, or another layer."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coevolve_jax import config as configs
from coevolve_jax.diagnosis import trends
from coevolve_jax.harness import levers, skills
from coevolve_jax.harness.proposers import placebo, score, scripted
from coevolve_jax.harness.proposers.base import History, Seen
from coevolve_jax.harness.records import Expectation, Proposal, Skill, Verdict
from tests.harness.support import config

RATE = "learner.learning_rate"
FASTER = Proposal(
    "v000", RATE, "x3", {RATE: 3e-5}, "It was slow.", "scripted", {}, Expectation("kl_last", "up")
)
SLOW = {"kl_last": 0.001, "gain": 0.0, "dead_last": 0.4}  # too-slow holds


def proposed(*versions: Seen) -> Proposal:
    """The next proposal. The start has a tenth of the learning rate; v001 has three times that."""
    start = config("slow")
    own = {v.id: configs.override(start, FASTER.changes) for v in versions if v.kind == "promoted"}
    known = History(
        [Seen("v000", None, "start", "", 0.4, SLOW), *versions],
        {"v000": start, **own},
        levers.table(start),
        skills.BUILT_IN,
    )
    drawn = scripted.make(start).propose(known, np.random.default_rng(0))
    assert drawn is not None
    return drawn


def test_a_move_that_was_promoted_goes_on_until_it_is_refused():
    assert (proposed().lever, proposed().move, proposed().skill) == (RATE, "x3", "too-slow")
    first = Seen("v001", FASTER, "promoted", "", 0.5, {})
    again = proposed(first)
    assert (again.parent, again.lever, again.move, again.skill) == ("v001", RATE, "x3", "")
    assert again.changes[RATE] == 9e-5 and again.expects == FASTER.expects
    second = Seen("v002", dataclasses.replace(again), "rejected", "", 0.5, {})
    other = proposed(first, second)
    assert other.parent == "v001" and other.lever != RATE


@pytest.mark.parametrize("proposer", [scripted, placebo, score], ids=["scripted", "placebo", "score"])
def test_a_move_that_gives_the_config_of_an_earlier_version_is_passed_over(proposer):
    start = config("slow", levers=(RATE,))
    faster = configs.override(start, FASTER.changes)
    seen = [Seen("v000", None, "start", "", 0.4, {}), Seen("v001", FASTER, "promoted", "", 0.5, {})]
    known = History(seen, {"v000": start, "v001": faster}, levers.table(start), ())
    assert known.new_moves("v001") == [(RATE, "x3"), (RATE, "/3")]
    assert known.twin("v001", {RATE: 1e-5}) == "v000" and known.twin("v001", {RATE: 9e-5}) == ""
    assert known.first_that_runs("v001", [(RATE, "/3")]) is None
    drawn = [proposer.make(start).propose(known, np.random.default_rng(seed)).move for seed in range(8)]
    assert drawn == ["x3"] * 8


def test_after_three_failures_in_a_row_another_layer_is_moved():
    def failed(number, lever):
        moved = dataclasses.replace(FASTER, lever=lever, move="x3", skill="")
        return Seen(f"v{number:03d}", moved, "rejected", "", 0.4, {})

    tried = [failed(n, "learner.max_grad_norm") for n in (1, 2, 3)]
    assert proposed(*tried[:2]).lever == RATE  # the skill that holds
    layer = levers.table(config("slow"))[proposed(*tried).lever].layer
    assert layer != "optimiser"
    better = Seen("v001", FASTER, "promoted", "", 0.5, SLOW)
    assert proposed(tried[0], better, *tried[1:]).lever == RATE  # two in a row


@pytest.mark.parametrize(
    ("row", "moves"),
    [
        ({"truncated": 0.3}, ["rollout.max_length x2", "rollout.max_new_tokens x2", "rollout.max_steps x2"]),
        ({"temperature": 1.25, "gain": 0.0}, ["rollout.temperature /1.25"]),
        ({"temperature": 1.0, "gain": 0.0}, []),
        ({"clipped_last": 0.3, **SLOW}, ["learner.clip_high x1.5", f"{RATE} x3"]),
    ],
)
def test_the_built_in_skills_name_the_moves_for_a_symptom_in_order(row, moves):
    assert [f"{s.lever} {s.move}" for s in skills.holding(skills.BUILT_IN, row)] == moves


def test_no_skill_holds_by_a_divergence_that_was_not_measured_or_expects_one_that_will_not_be():
    """Where config.learner.kl_coef is 0 the learner measures none."""
    low = dict.fromkeys(trends.MEANINGS, 0.0)
    names = lambda row: {s.id for s in skills.holding(skills.BUILT_IN, row)}
    reading = {s.id for s in skills.BUILT_IN if "kl_last" in s.trigger}
    assert "too-slow" in names(low) and "too-slow" in reading
    for kl in (low, dict.fromkeys(low, 1.0)):
        assert not names({**kl, "kl": None, "kl_first": None, "kl_last": None}) & reading
    off = [s.expects.diagnostic for s in skills.BUILT_IN if (s.lever, s.move) == ("learner.kl_coef", "0")]
    assert off and not [name for name in off if name.startswith("kl")]


@given(
    value=st.one_of(
        st.floats(-10, 10), st.sampled_from([1e-9, -7.8e-10, 4e-7, 0.0, 1e22, 0.6119791666666666])
    ),
    least=st.floats(0, 1),
    direction=st.sampled_from(["up", "down"]),
    move=st.sampled_from(["x3", "add tools.exists(t, t == tools[0])", "remove double(calls) * 2.0"]),
)
def test_a_skill_holds_for_the_version_that_taught_it_and_says_its_move(value, least, direction, move):
    aim = Expectation("kl_last", direction, least)
    followed = dataclasses.replace(FASTER, move=move, expects=aim)
    (taught,) = skills.learned([], "v001", followed, Verdict("promoted", ()), {"kl_last": value})
    assert skills.holding([taught], {"kl_last": value}) == [taught]
    assert Skill.from_json(taught.to_json()).says(RATE, move)
    assert not taught.says("learner.epochs", move) and not taught.says(RATE, move + "0")
    assert not taught.says(RATE, move.replace("*", "* 3.0 +") if "*" in move else "")


def test_a_skill_that_holds_comes_first_and_a_refused_move_does_not_go_on():
    cut = Seen("v001", FASTER, "promoted", "", 0.5, {"dead_first": 0.7, "logprob_first": -0.01})
    assert (proposed(cut).lever, proposed(cut).skill) == ("rollout.temperature", "no-noise")
    refused = proposed(Seen("v001", FASTER, "rejected", "", 0.4, {}))
    assert refused.parent == "v000" and (refused.lever, refused.move) != (RATE, "x3")
