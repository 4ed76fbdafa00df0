"""Step credit: which messages of a rollout get an advantage of their own."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coevolve_jax import build
from coevolve_jax.explorers.evidence import signature
from coevolve_jax.strategies.groups import spans
from coevolve_jax.strategies.step_credit import anchors, message_advantages
from coevolve_jax.testing.made_up import made_up_rollout
from coevolve_jax.types import Call, Group, Outcome, Step, Task, Turn
from tests.strategies.test_comparable import settings_of

TASK = Task("t", "made_up", {}, (Turn("first", (Call("go", {}),)), Turn("second", (Call("go", {}),))))


def a_rollout(index, reward, *turns):
    """A rollout of turns, each a list of (name of a call, its answer), and a message that ends the turn."""
    mask, starts, steps = [], [], []
    for turn, calls in enumerate(turns):
        starts.append(len(mask))
        mask += [0, 0]
        for name, answer in calls:
            message = sum(b > a for a, b in zip([0, *mask], mask))
            steps.append(Step(turn, name, Call(name, {}), answer, error=False, message=message))
            mask += [1, 1, 0]
        mask += [1]
    made, n = made_up_rollout(np.random.default_rng(index), TASK, index, 0), len(mask)
    return dataclasses.replace(
        made, ids=np.zeros(n, np.int32), mask=np.array(mask, bool), logprobs=np.zeros(n, np.float32),
        versions=np.zeros(n, np.int32), turn_starts=tuple(starts), steps=tuple(steps), stop="done",
        outcome=Outcome(float(reward), reward >= 0.5),
    )  # fmt: skip


def samples(group, **own):
    config = settings_of("step_credit", **{f"strategy.{key}": value for key, value in own.items()})
    return build.strategy(config).compute_advantages([group])


def test_only_messages_whose_anchor_others_share_are_told_apart():
    """Both read "x" and go on by another call. What they read after that differs."""
    won = a_rollout(0, 1.0, [("go", "x"), ("good", "yes")], [])
    lost = a_rollout(1, 0.0, [("go", "x"), ("bad", "no")], [])
    group = Group(TASK, (won, lost))
    plain, finer = samples(group, weight=0.0), samples(group)
    for sample in plain:
        values = sample.advantages[sample.trajectory.mask]
        assert len(set(values.tolist())) == 1
    parts = [
        [np.unique((b.advantages - a.advantages)[span]).tolist() for span in spans(a.trajectory)]
        for a, b in zip(plain, finer, strict=True)
    ]
    # The first two messages and that of the second turn have equal anchors; the third has not.
    for own, sign in zip(parts, (1, -1), strict=True):
        assert [len(values) for values in own] == [1, 1, 1, 1]
        expected = [sign * r / 2 for r in (0.95**3, 0.95**2, 0.0, 1.0)]
        assert [value for (value,) in own] == pytest.approx(expected, abs=1e-6)
    assert not any((b.advantages - a.advantages)[~a.trajectory.mask].any() for a, b in zip(plain, finer))


def test_a_detour_of_a_success_can_be_worse_than_the_way_of_others():
    """The rollout's own advantage is positive, and that of the call which led astray is negative."""
    short = [a_rollout(i, 1.0, [("go", "x"), ("good", "yes")]) for i in range(3)]
    long = a_rollout(3, 1.0, [("go", "x"), *[("around", f"a{i}") for i in range(20)], ("good", "yes")])
    lost = a_rollout(4, 0.0, [("stay", "y")])
    group = Group(TASK, (*short, long, lost))
    (*_, detour, _), (*_, plain, _) = samples(group, weight=4.0), samples(group, weight=0.0)
    message = spans(long)[1]
    assert (plain.advantages[message] > 0).all() and (detour.advantages[message] < 0).all()
    assert (detour.advantages[spans(long)[-1]] > 0).all()


def test_a_group_of_equal_rewards_teaches_which_way_was_shorter():
    short = [a_rollout(i, 1.0, [("go", "x"), ("good", "yes")]) for i in range(2)]
    long = [a_rollout(i, 1.0, [("go", "x"), ("around", "a"), ("good", "yes")]) for i in (2, 3)]
    group, skip = Group(TASK, (*short, *long)), {"learner.skip_zero_variance_groups": False}
    made = samples(group)
    first = [s.advantages[spans(s.trajectory)[0]] for s in made]
    np.testing.assert_allclose(
        np.mean(first, 1), np.array([1, 1, -1, -1]) * (0.95**2 - 0.95**3) / 2, rtol=1e-5
    )
    for changes in (skip, {**skip, "learner.group_filter": True, "learner.dynamic_sampling": 0}):
        config = settings_of("step_credit", **changes)
        for ours, all_groups in zip(made, build.strategy(config).compute_advantages([group]), strict=True):
            np.testing.assert_array_equal(ours.advantages, all_groups.advantages)
    count = lambda **own: build.strategy(settings_of("step_credit", **own)).observe(0, [group]).counts
    learned = sum((s.advantages[span] != 0).all() for s in made for span in spans(s.trajectory))
    assert count()["messages_told_apart"] == learned > 0
    assert count(**{"strategy.discount": 1.0})["messages_told_apart"] == 0
    assert samples(group, weight=0.0) == []
    for alike in (0.0, 0.7, 1.0):  # nothing to tell apart, however the mean of equal returns rounds
        rollouts = tuple(a_rollout(i, alike, [("go", "x")]) for i in range(7))
        assert samples(Group(TASK, rollouts)) == []


def test_the_state_tells_equal_answers_to_different_calls_apart():
    one, two = a_rollout(0, 1.0, [("a", "{}"), ("c", "{}")]), a_rollout(1, 0.0, [("b", "{}"), ("c", "{}")])
    read = [anchors(TASK, t, "observation") for t in (one, two)]
    assert read[0] == read[1] == [(("first",),), (("{}",),), (("{}",),)]
    seen = [anchors(TASK, t, "state") for t in (one, two)]
    assert seen[0][0] == seen[1][0] and not set(seen[0][1:]) & set(seen[1][1:])
    group = Group(TASK, (one, two))
    assert [[a != 0 for a in own] for own in message_advantages(group, 1.0, "state")] == [
        [True, False, False]
    ] * 2
    assert all(a != 0 for own in message_advantages(group, 1.0, "observation") for a in own)


def test_the_anchor_after_a_turn_is_the_next_query():
    t = a_rollout(0, 1.0, [("a", "x")], [("b", "y")])
    assert anchors(TASK, t, "observation") == [(("first",),), (("x",),), (("second",),), (("y",),)]
    assert [place[1] for place in anchors(TASK, t, "state")] == [0, 0, 1, 1]


def test_a_text_that_is_ignored_is_not_what_the_policy_read():
    t = a_rollout(0, 1.0, [("a", "x")], [("b", "y")])
    ignored = [Step(turn, "?", None, "", error=True, message=message) for turn, message in ((0, 0), (0, 1))]
    more = dataclasses.replace(t, steps=(t.steps[0], *ignored, t.steps[1]))
    for anchor in ("observation", "state"):
        assert anchors(TASK, more, anchor) == anchors(TASK, t, anchor)


def test_a_state_holds_the_calls_of_its_own_turn_alone():
    t = a_rollout(0, 1.0, [("a", "x"), ("b", "y")], [("c", "z")])
    a, b, c = (signature(Call(name, {})) for name in "abc")
    calls = [list(place[2:]) for place in anchors(TASK, t, "state")]
    assert calls == [[], [a], [a, b], [], [c]]


@given(st.integers(0, 10**6), st.sampled_from([0.5, 0.95, 1.0]), st.sampled_from(["observation", "state"]))
def test_advantages_are_differences_to_the_mean_of_all_messages_at_the_anchor(seed, discount, anchor):
    rng = np.random.default_rng(seed)
    pick = lambda: [(str(rng.choice(list("ab"))), str(rng.integers(2))) for _ in range(rng.integers(0, 4))]
    rollouts = tuple(
        a_rollout(i, rng.integers(3) / 2, *(pick() for _ in range(rng.integers(1, 3)))) for i in range(4)
    )
    group = Group(TASK, rollouts)
    all_places = [(t, i, p) for t in rollouts for i, p in enumerate(anchors(TASK, t, anchor))]
    value = lambda t, i: t.outcome.reward * discount ** (len(spans(t)) - 1 - i)
    for t, own in zip(rollouts, message_advantages(group, discount, anchor), strict=True):
        for i, advantage in enumerate(own):
            place = anchors(TASK, t, anchor)[i]
            among = [value(other, j) for other, j, p in all_places if p == place]
            assert advantage == pytest.approx(value(t, i) - sum(among) / len(among))


def test_truncated_rollouts_of_groups_of_equal_rewards_are_left_out_where_the_config_says_so():
    shapes = ([("go", "x"), ("good", "yes")], [("go", "x"), ("bad", "no"), ("bad", "no")])
    won, cut = (a_rollout(i, 1.0, turn, []) for i, turn in enumerate(shapes))
    group = Group(TASK, (won, dataclasses.replace(cut, stop="step_limit")))
    for on in (False, True):
        config = settings_of(
            "step_credit",
            **{"learner.skip_zero_variance_groups": True, "learner.overlong_filtering": on},
        )
        found = build.strategy(config).compute_advantages([group])
        assert [s.trajectory.rollout_index for s in found] == ([0] if on else [0, 1])


def test_invalid_rollouts_are_left_out_and_settings_that_mean_nothing_are_refused():
    won, lost = a_rollout(0, 1.0, [("a", "x")]), a_rollout(1, 0.0, [("b", "y")])
    bad = dataclasses.replace(lost, rollout_index=2, outcome=Outcome(0.0, False, False))
    assert len(message_advantages(Group(TASK, (won, bad, lost)), 1.0, "state")) == 2
    assert len(samples(Group(TASK, (won, bad, lost)))) == 2
    strategy = build.strategy(settings_of("step_credit"))
    assert strategy.observe(0, [Group(TASK, (won, lost))]).counts["messages_told_apart"] == 2
    with pytest.raises(
        ValueError, match="config.strategy.anchor is 'words': it must be observation or state"
    ):
        build.strategy(settings_of("step_credit", **{"strategy.anchor": "words"}))
    with pytest.raises(ValueError, match="config.strategy.weight is -1.0: it must be 0 or more"):
        build.strategy(settings_of("step_credit", **{"strategy.weight": -1.0}))
