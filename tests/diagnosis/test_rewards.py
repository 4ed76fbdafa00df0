"""Reward terms: their values, what they leave as it is, and what a config may hold."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from coevolve_jax import config as configs
from coevolve_jax.diagnosis import rewards
from coevolve_jax.diagnosis.rewards import TERMS, Term, outcome_rewards, parse, rewards_of
from coevolve_jax.grpo.filter import FilterState
from coevolve_jax.strategies import agent0, et_agent, seif
from coevolve_jax.strategies.base import grpo_samples
from coevolve_jax.strategies.batches import collect_batch
from coevolve_jax.types import Group, Step
from tests.support.method_cases import Rolls, a_group, a_pool, a_rollout, a_step, a_task, config_of

TASK = a_task("t", "ls", "wc")


def with_terms(*terms, name="static", **changes):
    return config_of(name, **{"reward.terms": terms, "rollout.max_length": 100, **changes})


def shaped(group, *terms):
    return list(rewards_of(with_terms(*terms))(group))


def test_each_named_term_has_its_value_within_0_and_1():
    steps = [a_step("ls"), a_step("ls"), a_step("ls", error=True), a_step("wc"), Step(0, "?", None, "", True)]
    group = Group(
        TASK, (a_rollout(TASK, 0, False, steps, tokens=16), a_rollout(TASK, 1, True, [], tokens=496))
    )
    told = {
        "progress": (0, 0), "length": (0.2, 1), "brevity": (0.8, 0), "overlong": (0, 1), "errors": (0.25, 0),
        "repeats": (1 / 3, 0), "malformed": (0.2, 0), "distinct_tools": (2 / 3, 0),
    }  # fmt: skip
    assert set(told) == set(TERMS)
    for name, values in told.items():
        assert shaped(group, f"{name}:0.5") == pytest.approx([0.5 * values[0], 1 + 0.5 * values[1]])


@pytest.mark.parametrize("tokens, value", [(79, 0), (80, 0), (85, 0.25), (99, 0.95), (100, 1), (130, 1)])
def test_overlong_rises_over_the_last_fifth(tokens, value):
    group = Group(TASK, (a_rollout(TASK, 0, True, [], tokens=tokens - 4),))
    assert shaped(group, "overlong:-0.5") == pytest.approx([1 - 0.5 * value])


def test_terms_and_formulas_add_up_and_a_missing_value_is_0():
    group = Group(TASK, (a_rollout(TASK, 0, True), a_rollout(TASK, 1, True, [])))
    assert shaped(group, "length:0.1", "double(calls) / double(calls):-0.2") == pytest.approx(
        [1.01 - 0.2, 1.01]
    )
    assert shaped(group, "calls > 1 ? 5.0 : -5.0:0.25") == [1.25, 1.0]  # clipped to 0 and 1


def test_without_terms_the_rewards_are_the_same_function():
    assert rewards_of(with_terms()) is outcome_rewards
    assert rewards_of(with_terms(), max) is max


def test_spread_filter_and_advantages_follow_the_shaped_rewards_and_outcomes_stay():
    long, short, lost = (a_rollout(TASK, i, False, tokens=n, valid=i < 2) for i, n in enumerate((40, 6, 9)))
    group, even = Group(TASK, (long, short, lost)), a_group(a_task("u", "ls"), False, False)
    samples, state = grpo_samples(with_terms("brevity:0.3"), [group, even], FilterState())
    assert [s.trajectory for s in samples] == [long, short] and samples[1].advantages[0] > 0.9
    assert grpo_samples(with_terms(), [group, even], FilterState()) == ([], FilterState())
    filtering = with_terms("brevity:0.3", **{"learner.group_filter": True})
    assert grpo_samples(filtering, [group, even], FilterState())[1].mean == pytest.approx(0.3 * 0.34 / 2)
    assert not long.outcome.success and group.rewards == (0.0, 0.0)


def test_a_batch_is_filled_by_the_shaped_rewards():
    tasks = a_pool(*(a_task(f"t{i}", "ls") for i in range(30)))
    many = {"learner.dynamic_sampling": 1, "rollout.tasks_per_step": 4, "rollout.group_size": 2}
    fails = Rolls(lambda task: 0.0)
    assert len(collect_batch(with_terms(**many), 0, tasks, fails)) == 8
    by_index = lambda group: [float(t.rollout_index) for t in group.valid]
    assert len(collect_batch(with_terms("length:0.1", **many), 0, tasks, fails, rewards=by_index)) == 4


@pytest.mark.parametrize("method", [agent0, et_agent, seif])
def test_terms_are_added_to_a_methods_own_rewards(method):
    name = method.__name__.rpartition(".")[2]
    group = a_group(TASK, True, False)
    plain, more = (
        method.make(with_terms(*terms, name=name)) for terms in ((), ("errors:0.2", "stop == 'done':0.1"))
    )
    advantages = [[s.advantages[0] for s in m.compute_advantages([group])] for m in (plain, more)]
    assert advantages[0] == pytest.approx(advantages[1], abs=1e-5)  # both are worth 0.1 more
    worse = Group(TASK, (a_rollout(TASK, 0, False, [a_step("ls", error=True)]), a_rollout(TASK, 1, False)))
    less = method.make(with_terms("errors:-0.2", name=name)).compute_advantages([worse])
    assert less[0].advantages[0] < 0 < less[1].advantages[0]


def test_a_config_holds_terms_and_json_gives_them_back():
    config = with_terms("length:0.1", "tools.exists(t, t == 'ls'):-0.2", "calls > 1 ? 1.0 : 0.5:0.05")
    configs.check(config)
    assert parse(config.reward.terms)[2] == Term("calls > 1 ? 1.0 : 0.5", 0.05)
    assert [str(t) for t in parse(config.reward.terms)] == list(config.reward.terms)
    assert rewards.size(config.reward.terms) == pytest.approx(0.35)
    again = ConfigDict(json.loads(configs.to_json(config)))
    assert shaped(a_group(TASK, True), *again.reward.terms) == list(rewards_of(again)(a_group(TASK, True)))


REFUSED = {
    ("length",): "has 'length': a term is WHAT:WEIGHT",
    ("length:much",): "a term is WHAT:WEIGHT",
    ("length:nan",): "with a weight other than 0",
    ("length:0",): "with a weight other than 0",
    (
        "lenght:0.1",
    ): "'lenght' is none of progress, length, .*, nor a formula: lenght is no field of a trajectory",
    ("reward:0.1",): "reward is the outcome",
    ("calls:0.1",): "wrap it in double",
    ("length:0.1", "length : 0.2"): "has 'length' twice: add up the weights",
    ("length:0.6", "errors:-0.4"): "it must be terms whose weights are below 1 together",
}


@pytest.mark.parametrize("terms, why", REFUSED.items(), ids=str)
def test_a_wrong_term_is_refused_by_name(terms, why):
    with pytest.raises(ValueError, match=rf"config\.reward\.terms.*{why}"):
        configs.check(with_terms(*terms))


@given(st.lists(st.floats(-1, 1).filter(bool), max_size=len(TERMS)), st.integers(0, 2**32 - 1))
def test_no_terms_below_1_rank_a_failure_before_a_success(weights, seed):
    texts = [f"{name}:{weight!r}" for name, weight in zip(TERMS, weights)]
    if rewards.size(texts) >= 1:
        return
    rng, names = np.random.default_rng(seed), ("ls", "wc")
    step = lambda: a_step(str(rng.choice(names)), error=bool(rng.integers(2)))
    group = Group(
        TASK,
        tuple(
            a_rollout(
                TASK, i, i % 2 == 1, [step() for _ in range(rng.integers(5))], tokens=rng.integers(1, 96)
            )
            for i in range(6)
        ),
    )
    values = shaped(group, *texts)
    assert max(values[::2]) < min(values[1::2]) + 1e-9
