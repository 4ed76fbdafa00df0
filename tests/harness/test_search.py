"""The design of the search: every point moves something, can run, passes the checks, and comes once."""

import numpy as np
import pytest

from coevolve_jax import config as configs
from coevolve_jax.harness import levers, skills
from coevolve_jax.harness.proposers import search
from coevolve_jax.harness.proposers.base import History, Seen
from coevolve_jax.harness.store import config_id
from tests.harness.support import config


def proposed(c, formulas=None):
    """The configs that a search proposes until it has none, the start first.

    formulas: number of versions -> the diagnostics that are registered then, as terms of the reward.
    """
    seen, made = [Seen("v000", None, "start", "", 0.4, {})], {"v000": c}
    proposer, rng = search.make(c), np.random.default_rng(0)
    for _ in range(c.harness.versions + 1):
        table = levers.table(c, formulas and formulas(len(seen)))
        drawn = proposer.propose(History(seen, made, table, skills.BUILT_IN), rng)
        if drawn is None:
            break
        levers.check_proposal(table, c, levers.plain(drawn), search.SEVERAL)
        seen.append(Seen(f"v{len(seen):03d}", drawn, "rejected", "", 0.4, {}))
        made[seen[-1].id] = configs.override(c, drawn.changes)
    return list(made.values())


@pytest.mark.parametrize(
    ("open_levers", "versions", "points"),
    [
        ((), 4, 4),
        (("learner.learning_rate",), 4, 2),  # x3 and /3
        (("learner.learning_rate",), 9, 2),
        (("learner.filter_z",), 4, 0),  # the filter is off, so it has no effect
    ],
)
def test_each_point_of_the_design_comes_once_and_passes(open_levers, versions, points):
    made = proposed(config(levers=open_levers, versions=versions))
    assert len({config_id(c) for c in made}) == len(made) == 1 + points


def test_a_design_whose_levers_grow_repeats_no_config():
    growing = lambda number: {f"d{i}": (f"double(errors) * {i}.0", True) for i in range(number)}
    made = proposed(config(levers=("learner.learning_rate", "reward.terms"), versions=10), growing)
    assert len({config_id(c) for c in made}) == len(made) > 6


def test_levers_that_write_one_key_are_moved_one_at_a_time():
    c = config(levers=("learner.epochs", "learner.warmup_steps", "learner.schedule"), versions=12)
    own = {"learner.warmup_steps": 6, "learner.schedule": "cosine", "learner.decay_steps": c.steps}
    made = proposed(configs.override(c, own))[1:]
    pairs = {(m.learner.epochs, m.learner.warmup_steps, m.learner.decay_steps / c.steps) for m in made}
    assert {epochs for epochs, *_ in pairs} == {1, 2}
    assert all((warm, end) == (12, 2) for epochs, warm, end in pairs if epochs == 2)
    assert {"linear"} < {m.learner.schedule for m in made if m.learner.epochs == 2} | {"linear", "cosine"}
