"""Influence and branches in the real loop: their costs, and that the policy goes on as if without them."""

import json

import numpy as np
import pytest

from coevolve_jax import config as configs
from coevolve_jax.loop import services
from coevolve_jax.train import train
from coevolve_jax.types import Group
from tests.strategies.test_strategies import settings
from tests.support.method_cases import a_group, a_rollout, a_task
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow
TINY = ROOT / "configs" / "bfcl_tiny.py"
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


class Served:
    """The learner and the engine of a branch. States are words; `served` lists the policies that served."""

    routing = flops = score = None

    def __init__(self):
        self.served = []

    def fork(self, state):
        return "copy"

    def policy(self, state):
        return f"policy of {state}"

    policy_of_branch = policy

    def update_weights(self, policy, version):
        self.served.append(policy)


@pytest.mark.parametrize("fails, served", [(1, []), (2, ["policy of copy+", "policy of own"])])
def test_a_copy_that_diverges_is_dropped_and_the_policy_serves_again(monkeypatch, fails, served):
    updates = []

    def learn(config, learner, state, samples):
        updates.append(state)
        if len(updates) == fails:
            raise FloatingPointError
        return f"{state}+", {}

    monkeypatch.setattr(services, "learn", learn)
    roll = lambda tasks, k, role, greedy=False: [a_group(t, *[m % 2 == 0 for m in range(k)]) for t in tasks]
    own, tasks = Served(), [a_task(f"t{i}", "a") for i in range(3)]
    made = services.Services(configs.load_file(TINY), own, own, lambda: "own")
    found, count = made.branch(roll, tasks, tasks[:1], 0, updates=3, batch=2, k=2, step=4)
    assert found.after is found.before and count == fails - 1 and own.served == served


class Scorer(Served):
    """A learner whose scores are the greatest size of the advantages in a batch."""

    routing = (0, 0)

    def aim(self, state, batch):
        self.aimed = np.abs(batch.advantages).max()

    def influence(self, state, batch, preconditioned):
        return np.abs(batch.advantages).max()


@pytest.mark.parametrize("terms, live", [((), False), (("brevity:0.1",), True)])
def test_influence_is_that_of_the_rewards_which_are_learned_from(terms, live):
    """Rollouts that all succeed are equal, unless a term of the reward tells the short from the long."""
    task, config = a_task("t", "a"), configs.override(configs.load_file(TINY), {"reward.terms": terms})
    rollouts = tuple(a_rollout(task, i, True, tokens=4 + 2 * i) for i in range(4))
    learner, goal = Scorer(), [Group(task, rollouts)]
    score = services.Services(config, learner, learner, lambda: "own").influence
    (found,), gradients = score(goal, goal, preconditioned=False)
    assert (found > 1, gradients) == ((True, 2) if live else (False, 0))
    assert not live or found == learner.aimed
    mixed = [a_group(task, 1, 0)]
    assert score(goal, mixed, preconditioned=False)[1] == (2 if live else 0)


def test_what_the_learners_services_need_is_refused_by_name():
    for key, value, why in (
        ("evolution.async_steps", 1, "asks for rollouts"),
        ("learner.optimizer_offload", True, "scores tasks by Adam's moments"),
        ("engine.name", "sglang", "trains copies of the policy"),
        ("rollout.max_staleness", 1, "serves copies of the policy"),
    ):
        changes = {key: value}
        with pytest.raises(ValueError, match=rf"config\.{key} is .*{why}"):
            configs.check(settings(NAME, **changes))
