"""SEAL: each failure has a type, and rollouts of the frequent and rising types weigh more."""

import dataclasses
import json

import numpy as np
import pytest

from coevolve_jax import build
from coevolve_jax.strategies import seal
from coevolve_jax.types import Group
from tests.support.method_cases import Lab, a_group, a_pool, a_rollout, a_step, a_task, again, config_of

TASK = a_task("t", "a", "b", "c")  # with x 0, 1, 2
A, B, C = (a_step(c.name, c.arguments["x"]) for c in TASK.calls)
TYPES = {
    "limit": ([A, B, C], "step_limit"),
    "malformed": ([A, dataclasses.replace(B, call=None, error=True)], "done"),
    "missing_call": ([A, B], "done"),
    "wrong_arguments": ([A, a_step("b", 9), C], "done"),
    "wrong_tool": ([A, C], "done"),
    "error": ([A, a_step("b", 1, True), C], "done"),
    "extra_call": ([A, B, C, a_step("d")], "done"),
}


def failed(kind, index=0, task=TASK):
    steps, stop = TYPES[kind]
    return a_rollout(task, index, False, steps, stop=stop)


@pytest.mark.parametrize("kind", TYPES)
def test_every_failure_has_its_type(kind):
    assert seal.failure(TASK, failed(kind)) == kind
    assert seal.failure(TASK, a_rollout(TASK, 0, True, TYPES[kind][0])) == ""


def test_a_failure_without_a_reference_is_of_no_type_that_asks_for_one():
    bare = TASK.without_calls()
    for kind in TYPES:
        told = kind if kind in ("limit", "malformed") else "ungraded"
        assert seal.failure(bare, failed(kind, task=bare)) == told
        assert seal.failure(bare, a_rollout(bare, 0, True, TYPES[kind][0])) == ""


def test_a_refused_call_that_is_made_again_is_no_error():
    steps = [A, a_step("b", 1, True), B]
    assert seal.failure(TASK, a_rollout(TASK, 0, False, steps)) == "missing_call"


def groups(*kinds):
    """A task per type, with two such failures and two successes."""
    tasks = [dataclasses.replace(TASK, id=f"{i}") for i in range(len(kinds))]
    return [
        Group(t, (failed(k, 0, t), failed(k, 1, t), a_rollout(t, 2, True), a_rollout(t, 3, True)))
        for t, k in zip(tasks, kinds, strict=True)
    ]


def weights(strategy, made):
    """How much each type's advantage is scaled, against plain GRPO, and the mean over the batch."""
    own, plain = (
        strategy.compute_advantages(made),
        build.strategy(config_of("static")).compute_advantages(made),
    )
    scale = [a.advantages[0] / b.advantages[0] for a, b in zip(own, plain, strict=True)]
    types = [seal.failure(TASK, s.trajectory) for s in own]
    return {kind: float(np.mean([w for w, k in zip(scale, types) if k == kind])) for kind in types}, np.mean(
        scale
    )


@pytest.mark.parametrize("on", [True, False])
def test_the_frequent_type_weighs_more_and_the_mean_weight_is_one(on):
    own = {} if on else {"frequent": 0.0, "rising": 0.0}
    config = config_of("seal", **own)
    strategy, batch = build.strategy(config), groups("wrong_tool", "limit")
    assert weights(strategy, batch)[0] == pytest.approx(dict.fromkeys(("wrong_tool", "limit", ""), 1.0))
    for step in range(6):
        strategy.observe(step, groups("wrong_tool", "wrong_tool", "wrong_tool", "limit"))
    found, mean = weights(again(strategy, config), batch)
    assert mean == pytest.approx(1.0)
    if on:
        # 1.75, 1.25 and 1 before the division by their mean 1.25.
        assert found == pytest.approx({"wrong_tool": 1.4, "limit": 1.0, "": 0.8})
    else:
        assert found == pytest.approx(dict.fromkeys(("wrong_tool", "limit", ""), 1.0))


def test_a_type_that_rises_weighs_more_than_one_that_falls_at_equal_shares():
    strategy = build.strategy(config_of("seal", frequent=0.0, memory=0.5))
    for step in range(12):
        strategy.observe(step, groups("limit"))
    for step in range(12, 14):
        strategy.observe(step, groups("error"))
    found, _ = weights(strategy, groups("limit", "error"))
    assert found["error"] > found["limit"] == found[""]


def test_counts_are_reported_and_decay_and_nothing_grows():
    config = config_of("seal")
    strategy = build.strategy(config)
    invalid = [a_group(dataclasses.replace(TASK, id="lost"), 0, 0, valid=False)]
    report = strategy.observe(0, groups("limit", "error") + invalid)
    assert {k: n for k, n in report.counts.items() if k in TYPES} == {"limit": 2, "error": 2}
    strategy.observe(1, groups("limit"))
    assert strategy.to_json()["fast"] == pytest.approx({"limit": 0.8 * 2 + 2, "error": 0.8 * 2})
    lab = Lab(config, a_pool(TASK))
    assert strategy.evolve(4, lab) is None and len(lab.tasks) == 1
    json.dumps(strategy.to_json())
    with pytest.raises(ValueError, match=r"config\.strategy\.memory is 1\.0: it must be 0 or more, below 1"):
        build.strategy(config_of("seal", memory=1.0))
