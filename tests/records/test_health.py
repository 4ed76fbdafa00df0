"""Diagnostics of a step, against rollouts made to have them; and the terminal's warnings."""

import dataclasses

import numpy as np
import pytest

from coevolve_jax.config import load_file
from coevolve_jax.records import health
from coevolve_jax.types import Call, Group, Outcome, Step, TrainingSample
from tests.strategies.test_comparable import made_up_task
from tests.support.grpo_cases import trajectory
from tests.support.paths import ROOT

THRESHOLDS = load_file(ROOT / "configs" / "bfcl_tiny.py").health


def rollout(m, reward, tools="ab", *, length=8, errors=(), stop="done", valid=True, logprob=-1.0):
    steps = tuple(
        Step(0, f"{tool}!", None if tool == "?" else Call(tool, {}), "", error=i in errors)
        for i, tool in enumerate(tools)
    )
    t = trajectory(np.random.default_rng(m), length, reward=reward)
    return dataclasses.replace(
        t, rollout_index=m, steps=steps, stop=stop,
        logprobs=np.where(t.mask, logprob, 0.0).astype(np.float32),
        outcome=Outcome(reward, reward >= 0.5, valid),
    )  # fmt: skip


def group(name, *rollouts):
    task = made_up_task(name, np.random.default_rng(0))
    return Group(task, tuple(dataclasses.replace(t, task_id=name) for t in rollouts))


def sound():
    return [
        group(f"g{i}", *(rollout(m, float(m % 2), length=12 + 2 * (m // 2)) for m in range(4)))
        for i in range(4)
    ]


def diagnose(groups):
    return health.diagnose(groups, [TrainingSample(t, None) for g in groups for t in g.valid])


def test_a_sound_step_raises_nothing():
    values = diagnose(sound())
    assert values["zero_variance_groups"] == 0 and values["group_std"] == 0.5 and values["active_groups"] == 1
    assert values["logprob"] == -1 and values["steps"] == 2 and values["length_reward"] == pytest.approx(0)
    assert health.alerts(values, THRESHOLDS) == []
    assert values["success"]["tool_entropy"] == 1 and values["success"]["longest_run"] == 1


BAD = {
    "zero_variance_groups": [group(f"g{i}", *(rollout(m, 0.0) for m in range(4))) for i in range(4)],
    "group_std": [group("g", *(rollout(m, 0.5 + 0.01 * m) for m in range(4)))],
    "logprob": [group("g", *(rollout(m, float(m % 2), logprob=-0.01) for m in range(4)))],
    "few_steps": [group("g", *(rollout(m, float(m % 2), "") for m in range(4)))],
    "many_steps": [group("g", *(rollout(m, float(m % 2), "ab" * 30) for m in range(4)))],
    "truncated": [group("g", *(rollout(m, float(m % 2), stop="token_limit") for m in range(4)))],
    "length_reward": [group("g", *(rollout(m, float(m % 2), length=8 + 8 * (m % 2)) for m in range(4)))],
    "malformed": [group("g", *(rollout(m, float(m % 2), "??a") for m in range(4)))],
    "invalid": [group("g", *(rollout(m, float(m % 2), valid=m != 3) for m in range(4)))],
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_told(name):
    values = diagnose(BAD[name])
    assert name in health.alerts(values, THRESHOLDS)
    sentence = health.explain(name, values, THRESHOLDS)
    assert f"config.health.{name}" in sentence and health.RULES[name][2] in sentence


def test_groups_that_nothing_is_learned_from_are_counted():
    values = health.diagnose(sound(), [])
    assert values["active_groups"] == 0 and "active_groups" in health.alerts(values, THRESHOLDS)
    assert set(BAD) | {"active_groups"} == set(health.RULES)


def test_behaviour_is_split_by_outcome():
    groups = [
        group(
            "g", rollout(0, 1.0, "abcd"), rollout(1, 0.0, "ababab", errors=(1, 3, 5)), rollout(2, 0.0, "aaab")
        )
    ]
    values = diagnose(groups)
    good, bad = values["success"], values["failure"]
    assert good["tool_failures"] == 0 and bad["tool_failures"] == pytest.approx(3 / 10)
    assert good["repeated"] == 0 and bad["repeated"] == pytest.approx((3 + 1) / 8)
    assert good["longest_run"] == 1 and bad["longest_run"] == 3
    assert good["tool_entropy"] == 2 and bad["stops"] == {"done": 2}


def test_a_call_with_other_arguments_is_no_repetition():
    same = rollout(0, 1.0, "abab")
    other = dataclasses.replace(
        same, steps=tuple(dataclasses.replace(s, text=f"{s.text}{n}") for n, s in enumerate(same.steps))
    )
    assert [health.behaviour([t])["repeated"] for t in (same, other)] == [1 / 3, 0]


def test_the_invalid_rollouts_are_a_share_of_all():
    assert [diagnose(groups)["invalid"] for groups in (BAD["invalid"], sound())] == [1 / 4, 0]


def test_a_step_without_a_valid_rollout_has_values_and_no_alarm_but_its_own():
    values = diagnose([group("g", *(rollout(m, 0.0, valid=False) for m in range(2)))])
    assert values["logprob"] is None and health.alerts(values, THRESHOLDS) == ["active_groups", "invalid"]


def test_the_terminal_hears_of_what_lasts_and_of_each_spell_once():
    watch, values = health.Watch(THRESHOLDS), diagnose(BAD["truncated"])
    said = [len(watch(values, raised)) for raised in [["truncated"]] * 5 + [[]] + [["truncated"]] * 3]
    assert said == [0, 0, 1, 0, 0, 0, 0, 0, 1]


def test_groups_without_a_spread_count_as_nothing_to_learn_from_even_where_they_are_not_skipped():
    groups = sound()
    samples = [
        TrainingSample(t, np.full(len(t.ids), 0.0 if n else 1.0, np.float32))
        for n, g in enumerate(groups)
        for t in g.valid
    ]
    assert health.taught(groups, samples) == [n == 0 for n in range(len(groups))]
    assert health.diagnose(groups, samples)["active_groups"] == 1 / len(groups)
