"""Rows against what they count, and diagnostics version 0 against records/health.py."""

import numpy as np
import pytest

from coevolve_jax.diagnosis import expressions
from coevolve_jax.diagnosis.builtin import BUILTIN
from coevolve_jax.diagnosis.features import FIELDS, fields, step_row, trajectory_row
from coevolve_jax.diagnosis.trends import trend
from coevolve_jax.records import health
from coevolve_jax.types import QUERY, Call, Group, Step, TrainingSample
from tests.records.test_health import BAD, sound
from tests.support.method_cases import TINY, a_group, a_rollout, a_step, a_task

TASK = a_task("t", "ls", "wc", "cat", turns=2, kind="signal")
STEPS = [
    a_step("ls"),
    a_step("ls", error=True),
    a_step("wc"),
    a_step("ls"),
    a_step("ls"),
    Step(1, "?", None, "", True),
]
KINDS = {"int": int, "double": float, "bool": bool, "string": str, "list(string)": list}


def test_a_rollouts_row_counts_what_it_did():
    row = trajectory_row(a_rollout(TASK, 0, False, STEPS, stop="step_limit"), TASK, step=3)
    assert row == {
        "rollouts": 1, "calls": 5, "errors": 1, "malformed": 1, "tokens": 10, "policy_tokens": 6, "turns": 1,
        "truncated": 1, "stop": "step_limit", "tools": ["ls", "ls", "wc", "ls", "ls"],
        "actions": ["ls", "ls", "wc", "ls", "ls"], "distinct_tools": 2, "repeated_pairs": 1, "pairs": 4,
        "longest_run": 2, "reference_calls": 3, "missed_reference": 1, "extra_calls": 3, "is_new_task": True,
        "logprob_mean": -0.5, "staleness": 3.0,
    }  # fmt: skip
    assert set(row) == set(fields("trajectory"))
    for f in FIELDS:
        if f.name in row:
            assert type(row[f.name]) is KINDS[f.type]
    twice = trajectory_row(a_rollout(TASK, 0, False, [a_step("ls")]), a_task("t", "ls", "ls", kind=QUERY))
    assert (twice["missed_reference"], twice["is_new_task"]) == (1, False)
    bare = trajectory_row(a_rollout(TASK, 0, True).without_tokens(), TASK)
    assert not {"logprob_mean", "staleness"} & set(bare) and bare["calls"] == 3


def test_a_steps_row_has_every_field_that_a_formula_may_name():
    lost = a_rollout(TASK, 4, False, valid=False)
    mixed = a_group(TASK, True, False, False, True)
    groups = [Group(TASK, (*mixed.trajectories, lost)), a_group(a_task("u", "ls"), False, False)]
    samples = [TrainingSample(t, np.ones(len(t.ids), np.float32)) for t in mixed.trajectories]
    row = step_row(
        groups, samples, metrics={"kl": 0.5, "mismatch_mean": 0.25},
        rewards=lambda g: [r + 1 for r in g.rewards],
    )  # fmt: skip
    assert (row["rollouts"], row["invalid"], row["groups"], row["calls"]) == (6, 1, 2, 4 * 3 + 2)
    assert row["tool_calls"] == {"ls": 6, "wc": 4, "cat": 4} and row["stops"] == {"done": 6}
    assert row["success"] == row["reward"] == 1 / 3 and row["shaped_mean"] == pytest.approx(4 / 3)
    assert (row["mixed"], row["live"], row["kept_share"], row["new_tasks"]) == (0.5, 0.5, 1.0, 0.5)
    assert (row["kl"], row["mismatch"]) == (0.5, 0.25) and "entropy" not in row
    unknown = {"entropy", "grad_norm", "clip_fraction", "length_reward"}  # no metric; all are equally long
    assert set(row) == set(fields("step")) - unknown
    assert step_row(groups[:1], samples)["spread"] == 0.5
    uneven = [a_rollout(TASK, 0, True, logprob=-1.0, tokens=2), a_rollout(TASK, 1, True, tokens=6)]
    row = step_row([Group(TASK, tuple(uneven)), Group(a_task("q", "ls", kind=QUERY), ())])
    assert row["logprob_mean"] == (2 * -1.0 + 6 * -0.5) / 8 and row["new_tasks"] == 0.5


def taught(groups):
    return [TrainingSample(t, np.ones(len(t.ids), np.float32)) for g in groups[::2] for t in g.valid]


def of_outcome(groups, success):
    """The groups with their valid rollouts of one outcome alone."""
    return [Group(g.task, tuple(t for t in g.valid if t.outcome.success == success)) for g in groups]


@pytest.mark.parametrize("name", ["sound", *BAD])
def test_version_0_is_the_health_of_a_step(name):
    groups = sound() if name == "sound" else BAD[name]
    samples = taught(groups)
    told = health.diagnose(groups, samples)
    rows = [step_row(g, samples) for g in (groups, of_outcome(groups, True), of_outcome(groups, False))]
    values = [told, told["success"], told["failure"]]
    compared = 0
    for builtin in BUILTIN:
        formula = expressions.compile(builtin.formula, "step")
        for row, health_values in zip(rows, values, strict=True):
            if builtin.id in health_values:
                value = health_values[builtin.id]
                assert formula.value(row) == (value if value is None else pytest.approx(value, rel=1e-6))
                compared += 1
    assert compared == len({key for key, _, _ in health.RULES.values()}) + 2 * 4
    assert {key for key, _, _ in health.RULES.values()} <= {builtin.id for builtin in BUILTIN}


def test_version_0_of_a_rollout_is_its_own_behaviour():
    rollout = a_rollout(TASK, 0, False, STEPS)
    own, row = health.behaviour([rollout]), trajectory_row(rollout, TASK)
    for builtin in BUILTIN:
        if "trajectory" in builtin.units and builtin.id in own:
            assert expressions.compile(builtin.formula, "trajectory").value(row) == own[builtin.id]
    idle = trajectory_row(a_rollout(TASK, 0, False, [Step(0, "", Call("x", {}), "", False)]), TASK)
    formulas = {
        b.id: expressions.compile(b.formula, "trajectory") for b in BUILTIN if "trajectory" in b.units
    }
    assert formulas["repeated"].value(idle) is None and formulas["steps"].value(idle) == 1


def test_a_trend_is_of_the_first_and_last_quarter_which_have_a_step_at_least():
    health_of = {"zero_variance_groups": 0.75, "active_groups": 0.2}
    rows = [{"success": success, "health": health_of} for success in (0.1, 0.3, 0.9)]
    for steps, first, last in ((rows, 0.1, 0.9), (rows * 3, 0.2, 0.6)):
        found = trend(TINY, steps)
        told = [found[name] for name in ("success_first", "success_last", "gain", "kept")]
        assert told == pytest.approx([first, last, last - first, 0.8])
