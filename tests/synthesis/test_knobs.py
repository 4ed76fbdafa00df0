"""The proposer over settings: its gradient against differences, its pull to the uniform, and learning."""

import json
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from coevolve_jax.synthesis import knobs
from coevolve_jax.synthesis.knobs import KnobPolicy, standardised
from coevolve_jax.types import Task

FACTORS = {"calls": (2, 3, 4), "key": ("a", "b")}


@given(st.lists(st.floats(-2, 2), min_size=3, max_size=3), st.floats(0, 1), st.integers(0, 99))
def test_an_update_is_the_gradient_of_reward_and_divergence(logits, kl, seed):
    rng = np.random.default_rng(seed)
    drawn, advantages = KnobPolicy(FACTORS).sample(5, rng), rng.normal(size=5)
    start = {"calls": list(zip(FACTORS["calls"], logits)), "key": [["a", 0.0], ["b", 0.3]]}
    policy = KnobPolicy(FACTORS, start)
    policy.update(drawn, advantages, learning_rate=0.5, kl_coef=kl)

    def objective(theta):  # mean of A log pi(x), less kl times KL(pi || uniform)
        log_pi = theta - np.log(np.exp(theta).sum())
        chosen = [FACTORS["calls"].index(d["calls"]) for d in drawn]
        pi = np.exp(log_pi)
        return np.mean(advantages * log_pi[chosen]) - kl * np.sum(pi * (log_pi + np.log(3)))

    theta, eps = np.array(logits), 1e-5
    gradient = [(objective(theta + eps * e) - objective(theta - eps * e)) / (2 * eps) for e in np.eye(3)]
    found = [logit for _, logit in policy.to_json()["calls"]]
    np.testing.assert_allclose(found, theta + 0.5 * np.array(gradient), atol=1e-6)


def test_a_setting_whose_share_is_0_stays_a_number():
    policy = KnobPolicy({"a": (1, 2)}, {"a": [[1, 2000.0], [2, -2000.0]]})
    policy.update([{"a": 1}], [1.0], 1.0, kl_coef=0.1)
    assert policy.shares("a").tolist() == [1.0, 0.0] and np.isfinite(policy.to_json()["a"]).all()


def test_what_was_learned_belongs_to_the_values_also_after_others_join_or_leave():
    """A fork may have another data.max_calls, or other toolsets."""
    told = {"calls": [[2, 0.5], [3, -1.0], [4, 2.0]], "toolsets": [[["A", "B"], 1.0], [["C"], 0.25]]}
    state = json.loads(json.dumps(told))
    policy = KnobPolicy({"calls": (3, 4, 5), "toolsets": (["C"], ["D"], ["A", "B"]), "turns": (1, 2)}, state)
    assert policy.to_json() == {
        "calls": [[3, -1.0], [4, 2.0], [5, 0.0]],
        "toolsets": [[["C"], 0.25], [["D"], 0.0], [["A", "B"], 1.0]],
        "turns": [[1, 0.0], [2, 0.0]],
    }


def test_it_learns_what_pays_and_goes_on_from_its_state():
    rng, policy = np.random.default_rng(0), KnobPolicy(FACTORS)
    for _ in range(30):
        policy = KnobPolicy(FACTORS, policy.to_json())
        drawn = policy.sample(32, rng)
        policy.update(drawn, standardised([float(d["calls"] == 4) for d in drawn]), kl_coef=0.01)
    assert policy.shares("calls")[2] > 0.9 and policy.shares("key") == pytest.approx([0.5, 0.5], abs=0.2)


def test_equal_rewards_and_no_drafts_change_nothing():
    policy = KnobPolicy(FACTORS)
    policy.update(policy.sample(4, np.random.default_rng(0)), standardised([0.3] * 4))
    policy.update([], [])
    assert policy.to_json() == KnobPolicy(FACTORS).to_json()
    assert standardised([1.0, 3.0]).tolist() == [-1.0, 1.0]
    with pytest.raises(ValueError, match="Factor 'key' of the proposer has no values"):
        KnobPolicy({"key": ()})


def test_a_setting_asks_for_its_size_in_a_scenario_that_has_its_key():
    scenarios = [Task(f"s{i}", "made_up", {"id": i, "level": i % 3}) for i in range(9)]
    made = knobs.factors(scenarios, range(2, 4), range(1, 3))
    assert made == {"calls": (2, 3), "turns": (1, 2), "level": ("0", "1", "2")}
    assert knobs.factors(scenarios[:1], (), range(1, 3)) == {"turns": (1, 2)}
    rng, seen = np.random.default_rng(0), Counter()
    for drawn in KnobPolicy(made).sample(200, rng):
        context = knobs.context(drawn, scenarios, rng, id="c", signal="mine")
        assert str(context.task.scenario["level"]) == drawn["level"]
        assert (context.calls, context.turns) == ((drawn["calls"],) * 2, drawn["turns"])
        seen[context.task.id] += 1
    assert len(seen) == 9
    whole = knobs.context({"turns": 1}, scenarios, rng, id="c", signal="mine")
    assert whole.calls is None and whole.must == ()
