"""The rollout columns of metrics.jsonl, each recounted by plain loops over made-up rollouts."""

import dataclasses
import math
from statistics import fmean, pstdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_collections import ConfigDict

from coevolve_jax.grpo.advantages import group_advantages
from coevolve_jax.loop.collect import describe, leave_out_stale
from coevolve_jax.records import health
from coevolve_jax.types import Call, Group, Outcome, Step, TrainingSample, Trajectory
from tests.support.step_cases import a_rollout, a_task, some_groups

SEEDS = st.integers(0, 10**6)


def mean(values):
    return fmean(values) if (values := list(values)) else None


def near(value):
    return value if value is None or isinstance(value, (int, dict)) else pytest.approx(value, abs=1e-6)


def valid_of(group):
    return [t for t in group.trajectories if t.outcome.valid]


@settings(max_examples=200)
@given(SEEDS)
def test_the_numbers_of_a_steps_rollouts(seed):
    step = 9
    groups = some_groups(np.random.default_rng(seed), step)
    every = [t for g in groups for t in g.trajectories]
    valid = [t for g in groups for t in valid_of(g)]
    written = [step - version for t in valid for version, own in zip(t.versions.tolist(), t.mask) if own]
    outcomes = lambda kinds: [
        t.outcome.success for g in groups if g.task.lineage.kind in kinds for t in valid_of(g)
    ]
    wanted = {
        "reward": mean(t.outcome.reward for t in valid),
        "success": mean(t.outcome.success for t in valid),
        "success_initial": mean(outcomes(["initial"])),
        "success_new": mean(outcomes(["signal"])),
        "valid": len(valid) / len(every),
        "mixed_groups": mean(len({t.outcome.success for t in valid_of(g)}) == 2
            for g in groups if valid_of(g)),
        "mean_turn_calls": mean(len(t.steps) / len(t.turn_starts) for t in valid),
        "malformed": mean(s.call is None for t in valid for s in t.steps),
        "length": mean(t.ids.size for t in valid),
        "staleness_mean": mean(written) or 0.0,
        "staleness_max": max(written, default=0),
    }  # fmt: skip
    found = describe(groups, step)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == near(value), name


@given(SEEDS, st.integers(0, 3))
def test_what_is_too_old_becomes_invalid_and_nothing_else_changes(seed, bound):
    rng, step = np.random.default_rng(seed), 9
    rolled = [t for g in some_groups(rng, step) for t in g.trajectories]
    for before, after in zip(rolled, leave_out_stale(rolled, step, bound), strict=True):
        oldest = min(version for version, own in zip(before.versions.tolist(), before.mask) if own)
        if before.outcome.valid and step - oldest > bound:
            assert not after.outcome.valid and not after.outcome.success and after.outcome.reward == 0
            others = [f.name for f in dataclasses.fields(before) if f.name != "outcome"]
            assert all(getattr(after, name) is getattr(before, name) for name in others)
        else:
            assert after is before


def behaviour(rollouts):
    """health.behaviour by loops."""
    calls = [[s for s in t.steps if s.call is not None] for t in rollouts]
    flat = [s for own in calls for s in own]
    names = [s.call.name for s in flat]
    again, longest = [], 0
    for own in calls:
        pairs = [(own[i].text, own[i + 1].text) for i in range(len(own) - 1)]
        again += [pair in pairs[:i] for i, pair in enumerate(pairs)]
        for i in range(len(own)):
            run = 1
            while i + run < len(own) and own[i + run].action == own[i].action:
                run += 1
            longest = max(longest, run)
    entropy = 0.0
    for name in set(names):
        share = names.count(name) / len(names)
        entropy -= share * math.log(share) / math.log(2)
    stops = [t.stop for t in rollouts]
    return {
        "rollouts": len(rollouts),
        "tool_failures": mean(s.error for s in flat),
        "tool_entropy": entropy if names else None,
        "repeated": mean(again),
        "longest_run": longest,
        "stops": {stop: stops.count(stop) for stop in stops},
    }


def correlation(x, y):
    """Pearson's correlation; None where it is undefined."""
    if len(x) < 2 or len(set(x)) == 1 or len(set(y)) == 1:
        return None
    dx, dy = ([a - fmean(values) for a in values] for values in (x, y))
    norm = math.sqrt(sum(a * a for a in dx) * sum(b * b for b in dy))
    return sum(a * b for a, b in zip(dx, dy)) / norm


@settings(max_examples=200)
@given(SEEDS)
def test_the_health_of_a_step(seed):
    rng = np.random.default_rng(seed)
    groups = some_groups(rng)
    valid = [t for g in groups for t in valid_of(g)]
    spreads = [pstdev(t.outcome.reward for t in valid_of(g)) for g in groups if valid_of(g)]
    samples, learned = [], set()
    for t in valid:  # nothing, no advantage, one on a single token, replay without the policy gradient
        kind = int(rng.integers(4))
        advantages = np.zeros(len(t.ids), np.float32)
        advantages[0] = kind == 2
        if kind:
            replay = np.ones(len(t.ids), np.float32) if kind == 3 else None
            samples.append(TrainingSample(t, advantages, replay))
            learned |= {t.task_id} if kind > 1 else set()
    found = health.diagnose(groups, samples)
    wanted = {
        "zero_variance_groups": mean(s == 0 for s in spreads),
        "group_std": mean(spreads),
        "logprob": mean(p for t in valid for p, own in zip(t.logprobs.tolist(), t.mask) if own),
        "steps": mean(len(t.steps) for t in valid),
        "truncated": mean("limit" in t.stop for t in valid),
        "active_groups": len(learned) / len(groups),
        "length_reward": correlation([t.ids.size for t in valid], [t.outcome.reward for t in valid]),
        "malformed": mean(s.call is None for t in valid for s in t.steps),
        "invalid": mean(not t.outcome.valid for g in groups for t in g.trajectories),
    }
    for name, value in wanted.items():
        assert found[name] == near(value), name
    for name, success in (("success", True), ("failure", False)):
        own = behaviour([t for t in valid if t.outcome.success == success])
        assert found[name].keys() == own.keys()
        for key, value in own.items():
            assert found[name][key] == near(value), (name, key)
    assert found.keys() == {*wanted, "success", "failure"}


def test_a_rollout_that_has_no_advantages_is_learned_from():
    task = a_task(np.random.default_rng(0), "t")
    t = a_rollout(np.random.default_rng(0), task, 0)
    none, own = np.zeros(len(t.ids), np.float32), [Group(task, (t,))]
    assert health.taught(own, [TrainingSample(t, None, none + 1)]) == [True]
    assert health.taught(own, [TrainingSample(t, None)]) == [True]
    assert health.taught(own, [TrainingSample(t, none)]) == [False]


def test_a_replay_of_an_earlier_rollout_makes_no_group_one_that_is_learned_from():
    rng = np.random.default_rng(0)
    tasks = [a_task(rng, name) for name in "abc"]
    groups = [Group(task, tuple(a_rollout(rng, task, n) for n in range(2))) for task in tasks[:2]]
    replays = [TrainingSample(a_rollout(rng, task, 0), None) for task in tasks]
    assert health.taught(groups, replays) == [False, False]
    assert health.taught(groups, [*replays, TrainingSample(groups[1].trajectories[1], None)]) == [False, True]
    assert health.diagnose(groups, replays)["active_groups"] == 0


def with_rewards(*rewards):
    rng = np.random.default_rng(0)
    task = a_task(rng, "t")
    rolled = [
        dataclasses.replace(a_rollout(rng, task, m), outcome=Outcome(r, r >= 0.5))
        for m, r in enumerate(rewards)
    ]
    return Group(task, tuple(rolled))


def test_equal_rewards_alone_are_without_spread_and_a_small_difference_is_learned_from():
    """A shaped reward can have a spread of 0.0005, which group_std scales to 1."""
    assert health.diagnose([with_rewards(0.1, 0.1, 0.1)], [])["zero_variance_groups"] == 1
    small = with_rewards(0.2, 0.201)
    assert health.diagnose([small], [])["zero_variance_groups"] == 0
    assert group_advantages(small.rewards) == pytest.approx([-1, 1], rel=0.01)


def test_calls_of_one_action_in_a_row_are_a_run_whatever_they_say():
    steps = tuple(Step(0, f"a{x}", Call("a", {"x": x}), "", error=False) for x in range(3))
    other = (Step(0, "a0", Call("a", {"x": 0}), "", error=False, pattern="another"), *steps)
    none = np.zeros(0, np.int32)
    rolled = lambda steps: Trajectory(
        "t", 0, none, none > 0, none * 1.0, none, (0,), steps, "done", Outcome(0.0, False)
    )
    assert health.behaviour([rolled(steps)])["longest_run"] == 3
    assert health.behaviour([rolled(other)])["longest_run"] == 3
    assert health.behaviour([rolled(steps), rolled(steps)])["longest_run"] == 3


@given(st.sampled_from(sorted(health.RULES)), st.sampled_from([-1.0, -0.5, 0.0, 0.25]))
def test_a_value_that_is_just_its_threshold_raises_nothing(name, bound):
    key, above, _ = health.RULES[name]
    quiet = {n: -math.inf if not up else math.inf for n, (_, up, _) in health.RULES.items()}
    thresholds = ConfigDict({**quiet, name: bound})
    values = {k: 0.0 for k, _, _ in health.RULES.values()}
    raised = lambda value: health.alerts({**values, key: value}, thresholds)
    assert raised(bound) == raised(None) == []
    assert (raised(bound + 1e-9), raised(bound - 1e-9)) == (([name], []) if above else ([], [name]))
