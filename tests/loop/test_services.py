"""Influence and branches in the real loop: their costs, and that the policy goes on as if without them."""

import json

import pytest

from coevolve_jax import config as configs
from coevolve_jax.train import train
from tests.strategies.test_strategies import settings

pytestmark = pytest.mark.slow
NAME = "tests.support.strategies.branching"


def lines(workdir, name):
    return [json.loads(line) for line in (workdir / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("services")
    for name in ("branching", "static"):
        changes = {"steps": 3, "learner.learning_rate": 3e-3}
        config = settings(NAME if name == "branching" else name, **changes)
        train(config, folder / name, until=2 if name == "static" else None)
    return folder


def test_a_branch_learns_and_is_forgotten(runs):
    state = json.loads((runs / "branching/checkpoints/step_00000003/state.json").read_text())
    seen = state["state"]["strategy"]["state"]["seen"][0]
    first, second = seen["after"]
    assert seen["before"][0] == seen["before"][1]  # greedy, by the policy as it was before both branches
    assert first != seen["before"][0] or second != seen["before"][0]  # two updates change what it says
    assert first != second  # each draws its own batches and rollouts
    # The steps before the first new task are those of a run without any service, bit for bit.
    steps = [lines(runs / name, "metrics.jsonl") for name in ("branching", "static")]
    for a, b in zip(steps[0][:2], steps[1][:2], strict=True):
        assert {k: a[k] for k in ("loss", "grad_norm", "success")} == {
            k: b[k] for k in ("loss", "grad_norm", "success")
        }


def test_costs_are_booked_and_scores_are_cosines(runs):
    ledger = json.loads((runs / "branching/ledger.json").read_text())["costs"]
    state = json.loads((runs / "branching/checkpoints/step_00000003/state.json").read_text())
    (seen,) = state["state"]["strategy"]["state"]["seen"]
    drafts, live = len(seen["scores"]), sum(seen["spread"])
    goals = live or drafts
    assert ledger["rollouts/probe"] == 4 * drafts == 4 * ledger["tasks_added/draft"]
    assert ledger["rollouts/branch"] == 2 * (2 * goals + 2 * 2 * 4)
    assert ledger["gradients/influence"] == (2 * live if live else 0)
    assert 1 <= ledger["updates/branch"] <= 4
    assert all(abs(x) <= 1.001 for x in seen["scores"])
    assert [x != 0 for x in seen["scores"]] == seen["spread"]


def test_what_the_learners_services_need_is_refused_by_name():
    for key, value, why in (
        ("evolution.async_steps", 1, "asks for rollouts"),
        ("learner.optimizer_offload", True, "scores tasks by Adam's moments"),
        ("engine.name", "sglang", "trains copies of the policy"),
    ):
        changes = {key: value}
        with pytest.raises(ValueError, match=rf"config\.{key} is .*{why}"):
            configs.check(settings(NAME, **changes))
