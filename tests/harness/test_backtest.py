"""Each check of a backtest refuses a case made to be refused, and not one that is sound."""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coevolve_jax import config as configs
from coevolve_jax.grpo.filter import FilterState
from coevolve_jax.harness import draws
from coevolve_jax.harness.backtest import (
    SAYS,
    WARNS,
    Backtest,
    Check,
    backtest,
    credit,
    forecast,
    missed,
    spans,
)
from coevolve_jax.harness.parts import Parts
from coevolve_jax.strategies.base import grpo_samples
from coevolve_jax.types import Group, Outcome, Step
from tests.support.method_cases import a_group, a_rollout, a_step, a_task, config_of

START = config_of(
    "static",
    **{
        "rollout.max_length": 200, "rollout.max_new_tokens": 20, "rollout.max_steps": 10,
        "rollout.group_size": 8, "rollout.tasks_per_step": 4, "learner.learning_rate": 3e-4,
    },
)  # fmt: skip


def rollout(task, i, success, *, tokens=16, tools=("ls",), reward=None, progress=0.0):
    """Messages of 6 tokens, each after 4 others."""
    made = a_rollout(task, i, success, [a_step(t) for t in tools], tokens=tokens)
    mask = np.arange(4 + tokens) % 10 >= 4
    outcome = Outcome(float(success) if reward is None else reward, success, True, progress)
    return dataclasses.replace(made, mask=mask, outcome=outcome)


def group(name, won, how=lambda i: {}, size=8, kind="initial"):
    """A group of which the first `won` rollouts succeed. how: i -> arguments of `rollout`."""
    task = a_task(name, "ls", kind=kind)
    return Group(task, tuple(rollout(task, i, i < won, **how(i)) for i in range(size)))


def run_of(*groups, count=4):
    """A run with these groups at each step, each time of another task."""

    def named(g, step):
        name = f"{g.task.id}.{step}"
        task = dataclasses.replace(g.task, id=name, scenario={"id": name})
        return Group(task, tuple(dataclasses.replace(t, task_id=name) for t in g.trajectories))

    return [[named(g, step) for g in groups] for step in range(count)]


longer = lambda i: {"tokens": 16 + 20 * i}
calls = lambda i: {"tools": ("ls",) * (1 + i % 2)}
far = lambda i: {"reward": 0.4 * i}
near = lambda i: {"reward": 0.1 + 0.01 * i}
WIDE = [group(f"w{i}", 0, far, size=2) for i in range(9)]
SOUND = run_of(group("a", 4), group("b", 3), group("c", 0), group("d", 8))
LONG = run_of(group("a", 4), group("b", 4), group("c", 0, longer), group("d", 8))
MOSTLY_WON = run_of(*(group(n, 4) for n in "abefgh"), group("c", 0, calls))
SOME_NEAR = run_of(*WIDE, group("n", 0, near, size=2), count=12)
ONE_FAR = run_of(group("a", 1, lambda i: {"tokens": 196 if i > 6 else 6}))
SEVEN_WON = run_of(group("a", 7, longer))
CLOSE = run_of(group("a", 4, lambda i: {**longer(i), "reward": 0.6 - 0.03 * i}))  # no 0 and 1
SPREAD = run_of(group("a", 1), group("b", 7))
BONUS = {"reward.terms": ("calls > 1:0.1",)}
FILTER = {"learner.group_filter": True}
EVOLVED = {"data.min_evolved_share": 0.75}


def revisited(won):
    """A run whose four evolved tasks have so many successes."""
    groups = [group(f"t{i}", won if i % 2 else 4, kind="signal" if i % 2 else "initial") for i in range(8)]
    return [groups[:4], groups[4:]] * 3


# check -> the case that it refuses, and one that nothing refuses: (changes, run)
CASES = {
    "order": (
        ({"reward.terms": ("length:0.3",)}, CLOSE),
        ({"reward.terms": ("length:0.1",)}, run_of(group("a", 4, longer))),
    ),
    "sign_success": (
        ({"reward.terms": ("brevity:0.9",)}, SEVEN_WON),
        ({"reward.terms": ("brevity:0.05",)}, SEVEN_WON),
    ),
    "sign_failure": (
        ({"reward.terms": ("length:0.9",)}, ONE_FAR),
        ({"reward.terms": ("length:0.1",)}, ONE_FAR),
    ),
    # The release's bonus: it is paid to all rollouts of a group, and cancels.
    "nothing": (({"reward.terms": ("calls > 0:0.1",)}, SOUND), (BONUS, MOSTLY_WON)),
    "live_groups": ((FILTER, run_of(*WIDE[:3], group("n", 0, near, size=2), count=40)), (FILTER, SOME_NEAR)),
    "live_tokens": (
        (FILTER, run_of(*WIDE, group("n", 0, lambda i: {**near(i), "tokens": 196}, size=2), count=12)),
        (FILTER, SOME_NEAR),
    ),
    "paid_share": (
        (BONUS, run_of(group("a", 4), *(group(n, 0, calls) for n in "cdef"))),
        (BONUS, MOSTLY_WON),
    ),
    "paid_length": (({"reward.terms": ("length:0.3",)}, LONG), (BONUS, MOSTLY_WON)),
    "cut": (({"rollout.max_length": 120}, SEVEN_WON), ({"rollout.max_length": 180}, SEVEN_WON)),
    "group_size": (
        ({"rollout.group_size": 2, "rollout.tasks_per_step": 16}, SPREAD),
        ({"rollout.group_size": 16, "rollout.tasks_per_step": 2}, SPREAD),
    ),
    "draws": ((EVOLVED, revisited(0)), (EVOLVED, revisited(5))),
}  # fmt: skip


def tried(changes, run, **how) -> Backtest:
    return backtest(START, configs.override(START, changes), [run], **how)


@pytest.mark.parametrize("name", CASES)
def test_each_check_refuses_its_case_or_warns_and_says_nothing_of_a_sound_one(name):
    bad, good = (tried(*case) for case in CASES[name])
    check = bad.checks[name]
    says = SAYS[name].format_map(check._asdict())
    assert not check.ok and good.checks[name].ok and good.refused is None
    assert not any("warning" in note for note in good.notes)
    warned = bad if name in WARNS else tried(*CASES[name][0], unreliable=[name])
    assert (bad.refused, bad.by) == ((None, "") if name in WARNS else (says, name))
    assert warned.refused != says and f"A warning only: {says}" in warned.notes


def test_fewer_tasks_of_a_step_are_fewer_rollouts_in_mixed_groups():
    told = tried({"rollout.tasks_per_step": START.rollout.tasks_per_step // 2}, SPREAD)
    assert told.checks["group_size"] == Check(0.5, 0.8, False)


def test_limits_cut_what_is_beyond_them_and_not_what_reaches_them():
    won = group("a", 7, lambda i: {"tokens": 26})
    messages = len(spans(won.trajectories[0]))
    cut = lambda changes, group: tried(changes, run_of(group)).checks["cut"].value
    assert messages > 1 and cut({"rollout.max_messages": messages}, won) == 0
    assert cut({"rollout.max_messages": messages - 1}, won) == 1
    last = spans(won.trajectories[0])[-1].start + START.rollout.max_new_tokens  # it may have all of them
    assert cut({"rollout.max_length": last}, won) == 0 and cut({"rollout.max_length": last - 1}, won) == 1
    most = START.rollout.max_length - spans(won.trajectories[0])[-1].start  # with more, the last has no room
    assert cut({"rollout.max_new_tokens": most}, won) == 0
    assert cut({"rollout.max_new_tokens": most + 1}, won) == 1
    # Calls of one message are one step, a text that is ignored is none, and each turn has the limit.
    steps = tuple(dataclasses.replace(a_step("ls"), message=n // 3) for n in range(6))
    steps += (Step(0, "?", None, "", error=True, message=2), a_step("ls", turn=1))
    several = Group(won.task, tuple(dataclasses.replace(t, steps=steps) for t in won.trajectories))
    assert cut({"rollout.max_steps": 2}, several) == 0 and cut({"rollout.max_steps": 1}, several) == 1


def test_a_length_term_is_warned_of_by_correlation_and_its_order_is_sound():
    told = tried({"reward.terms": ("length:0.3",)}, LONG)
    warning, revives = told.notes
    assert warning.startswith("A warning only: Without success, length and advantage correlate by 1.00")
    assert revives == "It revives 4 groups; by one thing alone: 4 by length."
    assert told.checks["order"] == Check(0, 0, True) and told.checks["sign_success"].ok


def test_a_hypothesis_about_live_groups_may_lose_more_of_them():
    assert tried(*CASES["live_groups"][0], aims_at_live=True).refused is None


def test_shown_values_refuse_nothing():
    tiers = run_of(
        group("a", 4, lambda i: {"tokens": 16 + 4 * i, "progress": 0.5 * (i == 4)}),
        *(group(name, 4) for name in "bcd"),
        group("e", 0, lambda i: {"tools": ("ls", "wc")[: 1 + (i % 4 == 0)]}),
    )  # fmt: skip
    told = tried({"reward.terms": ("length:0.02", "distinct_tools:0.1")}, tiers)
    assert told.checks["order_tiers"] == Check(1.0, None, True) and told.refused is None
    assert told.notes[0].startswith("In groups without a success, rollouts that call wc have +")
    assert "revives 4 groups; by one thing alone: 4 by wc" in told.notes[1]


def test_what_the_parent_does_itself_is_not_refused():
    paid = configs.override(START, {"reward.terms": ("length:0.3",)})
    assert backtest(paid, configs.override(paid, {"learner.learning_rate": 9e-4}), [LONG]).refused is None
    faster = backtest(paid, configs.override(paid, {"learner.learning_rate": 9e-4}), [CLOSE])
    assert faster.checks["order"] == Check(0, 0, True)
    for name in ("sign_success", "sign_failure", "cut"):
        changes, run = CASES[name][0]
        bad = configs.override(START, changes)
        other = {"rollout.max_steps": 20} if name == "cut" else {"learner.learning_rate": 9e-4}
        told = backtest(bad, configs.override(bad, other), [run])
        assert told.refused is None and told.checks[name].value == 0
    without = backtest(paid, configs.override(paid, {"reward.terms": ()}), [LONG])
    assert without.refused is None and without.forecast["live"] == 0.5  # the groups that it loses were paid


def test_without_recorded_rollouts_nothing_is_tried():
    with pytest.raises(ValueError, match=r"No rollouts are recorded.*logging\.rollouts_every=1"):
        tried(BONUS, [])


def test_keys_whose_effect_no_check_sees_are_named():
    told = tried(
        {"rollout.temperature": 0.7, "learner.kl_coef": 0.5, "reward.terms": ("length:0.01",)}, SOUND
    )
    assert (
        set(told.not_covered) == {"rollout.temperature", "learner.kl_coef"} and "nothing" not in told.checks
    )


def test_what_limits_do_to_rollouts_that_failed_is_seen_by_no_check():
    assert tried({"rollout.max_length": 180}, SEVEN_WON).not_covered == ("rollout.max_length",)


def test_gradients_are_compared_only_where_they_can_refuse():
    asked = []

    def gradient():
        asked.append(1)
        return {"margin": Check(-0.1, 0.0, False)}

    told = tried({"learner.kl_coef": 0.5}, SOUND, gradient=gradient)
    assert told.not_covered == () and told.refused.startswith("The update does not raise successes")
    assert told.by == "margin" and len(asked) == 1
    assert (
        tried({"rollout.temperature": 0.7}, SOUND, gradient=gradient).refused is None
    )  # no change of the loss
    assert tried(*CASES["order"][0], gradient=gradient).by == "order"  # refused without them
    assert len(asked) == 1
    # Where no group is mixed there is nothing to compare, and the change stays unseen.
    told = tried({"learner.kl_coef": 0.5}, SOUND, gradient=dict)
    assert told.refused is None and told.not_covered == ("learner.kl_coef",)


def test_advantages_are_those_of_the_strategy_with_its_state_carried_along():
    config = configs.override(START, {**FILTER, "reward.terms": ("length:0.1",)})
    run, state, expected = SOME_NEAR, FilterState(), []
    for groups in run:
        samples, state = grpo_samples(config, groups, state)
        learned = {id(s.trajectory): s.advantages[0] for s in samples}
        expected += [learned.get(id(t), 0.0) for g in groups for t in g.valid]
    found = credit(config, [run, run])
    assert found.advantage.tolist() == pytest.approx(expected * 2) and 0 in expected
    finer = configs.override(START, {"strategy.name": "step_credit"})
    assert np.abs(credit(finer, [SOUND]).advantage).max() > 0


def test_a_forecast_is_about_the_first_steps_and_compared_with_what_came():
    child = configs.override(START, BONUS)
    run = [*MOSTLY_WON[:3], *run_of(group("x", 0), count=9)]
    told = forecast(START, child, [run, run])
    assert told == {"live": 1.0, "tokens": 7 * 8 * 12.0, "revived": 1.0}
    assert tried(BONUS, run).forecast == told
    assert missed(told, {"live": 0.8, "tokens": 400.0, "revived": 1.0}) == {"tokens"}


@given(st.lists(st.booleans(), min_size=2, max_size=7), st.data())
def test_the_share_of_mixed_groups_is_that_of_all_smaller_groups(won, data):
    k = data.draw(st.integers(2, len(won)))
    one = a_group(a_task("t", "ls"), *won)
    parts = list(itertools.combinations(won, k))
    mixed = sum(0 < sum(part) < k for part in parts)
    assert draws.share_mixed([one], k) == pytest.approx(mixed / len(parts))


def test_larger_groups_are_forecast_by_a_fit():
    rng = np.random.default_rng(0)
    tried_, solved = np.full(2000, 8), rng.binomial(8, rng.beta(2, 3, 2000))
    assert draws.beta_binomial(solved, tried_) == pytest.approx((2, 3), rel=0.15)
    groups = [a_group(a_task("t", "ls"), *(i < s for i in range(8))) for s in solved[:300]]
    p = rng.beta(2, 3, 10_000)
    assert draws.share_mixed(groups, 16) == pytest.approx(np.mean(1 - p**16 - (1 - p) ** 16), abs=0.02)
    assert draws.share_mixed([], 4) == 0


def test_replayed_draws_give_recorded_groups_of_tasks_that_are_born():
    run = revisited(5)
    late = dataclasses.replace(run[0][1].task.lineage, step=2)
    run[0][1] = Group(dataclasses.replace(run[0][1].task, lineage=late), run[0][1].trajectories)
    assert draws.live_drawn(START, [run]) == (4.0, 4.0)
    unsolved = run_of(*(group(name, 0, calls) for name in "abcd"))
    paid = configs.override(START, BONUS)  # with which these groups have a spread
    assert [draws.live_drawn(c, [unsolved])[0] for c in (START, paid)] == [0.0, 4.0]
    same = [[group(f"t{i}", 8 if i % 2 else 4) for i in range(8)]] * 6
    never, soon = (configs.override(START, {"data.retire_after": n}) for n in (0, 1))
    assert draws.live_drawn(soon, [same])[0] > draws.live_drawn(never, [same])[0]  # visits are recorded
    dead, full = (tried(EVOLVED, revisited(won)) for won in (0, 5))
    assert dead.forecast["live"] < 0.8 * full.forecast["live"]
    dead = run_of(group("a", 0), group("b", 8), group("c", 4), group("d", 4))
    resampled = configs.override(START, {"learner.dynamic_sampling": 2})
    assert draws.live_drawn(resampled, [dead])[1] > draws.live_drawn(START, [dead])[1] == 4


def test_a_forecast_of_live_groups_is_a_share_of_all_that_are_drawn():
    run = run_of(group("a", 0), group("b", 8), group("c", 4), group("d", 4))
    more = configs.override(START, {"learner.dynamic_sampling": 2})
    (live, drawn), (before, all_before) = (draws.live_drawn(config, [run]) for config in (more, START))
    told, plain = tried({"learner.dynamic_sampling": 2}, run).forecast, forecast(START, more, [run])
    assert told["live"] == pytest.approx(plain["live"] * (live / drawn) / (before / all_before))
    assert told["tokens"] == pytest.approx(plain["tokens"] * live / before)


def test_a_forecast_has_missed_by_the_share_of_what_came():
    assert missed({"live": 1.0}, {"live": 0.72}) == {"live"}  # 39% of what came, 28% of the forecast
    assert missed({"live": 1.0}, {"live": 0.78}) == set()


@given(st.lists(st.booleans(), max_size=24))
def test_a_forecast_that_missed_in_half_of_ten_versions_or_more_refuses_no_more(wrong):
    """A version's live groups were foretold as they came, or as twice as many."""
    told = {
        f"v{number:03d}": {
            "backtest": {"forecast": {"live": 1.0 + off, "tokens": 1.0}},
            "evidence": {"came": {"live": 1.0, "tokens": 1.0}},
        }
        for number, off in enumerate(wrong, 1)
    }
    parts = object.__new__(Parts)
    parts._versions = SimpleNamespace(trained=lambda before: ["v000", *told])
    parts._campaign = SimpleNamespace(read=lambda version, part: told[version][part])
    many = len(wrong) >= 10 and wrong.count(True) >= wrong.count(False)
    assert parts._unreliable("v999") == ({"live_groups"} if many else set())
