"""The scripted proposer tries a skill that holds, the parent's own move again, or another layer."""

import dataclasses

import numpy as np

from coevolve_jax import config as configs
from coevolve_jax.harness import levers, skills
from coevolve_jax.harness.proposers import scripted
from coevolve_jax.harness.proposers.base import History, Seen
from coevolve_jax.harness.records import Expectation, Proposal
from tests.harness.support import config

RATE = "learner.learning_rate"
FASTER = Proposal(
    "v000", RATE, "x3", {RATE: 3e-5}, "It was slow.", "scripted", {}, Expectation("kl_last", "up")
)
SLOW = {"kl_last": 0.001, "gain": 0.0, "dead_last": 0.4}  # too-slow holds


def proposed(*versions: Seen) -> Proposal:
    """The next proposal. The start has a tenth of the learning rate; v001 has three times that."""
    start = config("slow")
    made = {"v000": start, "v001": configs.override(start, FASTER.changes)}
    known = History(
        [Seen("v000", None, "start", "", 0.4, SLOW), *versions], made, levers.table(start), skills.BUILT_IN
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


def test_a_skill_that_holds_comes_first_and_a_refused_move_does_not_go_on():
    cut = Seen("v001", FASTER, "promoted", "", 0.5, {"dead_first": 0.7, "logprob_first": -0.01})
    assert (proposed(cut).lever, proposed(cut).skill) == ("rollout.temperature", "no-noise")
    refused = proposed(Seen("v001", FASTER, "rejected", "", 0.4, {}))
    assert refused.parent == "v000" and (refused.lever, refused.move) != (RATE, "x3")
