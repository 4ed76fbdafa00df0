"""The design of the search: every point moves something, can run, and passes the checks of proposals."""

import numpy as np
import pytest

from coevolve_jax.harness import levers, skills
from coevolve_jax.harness.proposers import search
from coevolve_jax.harness.proposers.base import History, Seen
from tests.harness.support import config


@pytest.mark.parametrize("open_levers", [(), ("learner.learning_rate",), ("learner.filter_z",)])
def test_each_point_of_the_design_is_a_proposal_that_passes(open_levers):
    c = config(levers=open_levers, versions=4)
    table = levers.table(c)
    seen = [Seen("v000", None, "start", "", 0.4, {})]
    proposer, rng = search.make(c), np.random.default_rng(0)
    for number in range(1, 5):
        known = History(seen, {"v000": c}, table, skills.BUILT_IN)
        drawn = proposer.propose(known, rng)
        if open_levers == ("learner.filter_z",):
            assert drawn is None  # the filter is off, so it has no effect
            return
        levers.check_proposal(table, c, levers.plain(drawn), search.SEVERAL)
        seen.append(Seen(f"v{number:03d}", drawn, "rejected", "", 0.4, {}))
