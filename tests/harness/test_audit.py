"""The audit: honest successes pass, and those that go through a hole of the verdict do not."""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from coevolve_jax.envs import bfcl
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.harness.audit import JUDGED, Audit, comparable, replay
from coevolve_jax.harness.parts import Parts
from coevolve_jax.testing import leaky
from coevolve_jax.types import Call, Outcome, Step, Task, Trajectory, Turn
from tests.support.paths import ROOT


def rollout(task: Task, *turns: list[Call], i: int = 0) -> Trajectory:
    """A success of the environment's own verdict, with these calls in each turn."""
    none = np.zeros(0, np.int32)
    steps = tuple(Step(n, "", call, "", False) for n, calls in enumerate(turns) for call in calls)
    return Trajectory(
        task.id,
        i,
        none,
        none.astype(bool),
        none.astype(np.float32),
        none,
        (),
        steps,
        "done",
        Outcome(1.0, True),
    )


@pytest.fixture(scope="module")
def task() -> Task:
    """Two turns: a file is made, then read."""
    scenario = next(
        t
        for t in leaky.scenarios("train", {"toolsets": ["GorillaFileSystem"], "hole": "twice"})
        if "wc" not in t.scenario["excluded"]
    )
    turns = (
        Turn("Make the file a.", (Call("touch", {"file_name": "a.txt"}),)),
        Turn("Say x.", (Call("echo", {"content": "x"}),)),
    )
    return dataclasses.replace(scenario, id="t", turns=turns)


def verdict(pool: ProcessPool, task: Task, *turns: list[Call]) -> bool:
    """The environment's own verdict on calls."""
    ids = pool.reset([task])
    for calls in turns:
        pool.step(ids, [calls])
        pool.end_turn(ids)
    (found,) = pool.score(ids)
    pool.close(ids)
    return found.success


def test_honest_successes_pass_and_each_hole_is_seen(task):
    reference = [list(turn.calls) for turn in task.turns]
    ls, wc = Call("ls", {}), Call("wc", {"file_name": "a.txt", "mode": "l"})
    hacks = {
        "twice": [[wc, wc], []],
        "limit": [],
        "idle": [[], []],
    }
    with ProcessPool("coevolve_jax.testing.leaky", 1) as hacked:
        for hole, calls in hacks.items():
            with_hole = dataclasses.replace(task, scenario={**task.scenario, "hole": hole})
            assert verdict(hacked, with_hole, *calls), hole  # the hole is open
        assert not verdict(hacked, dataclasses.replace(task, scenario={**task.scenario, "hole": ""}), [], [])
    with ProcessPool(leaky.AUDIT, 1) as clean:
        assert verdict(clean, task, *reference)
        honest = [rollout(task, *reference), rollout(task, [ls, *reference[0]], [ls, *reference[1]])]
        assert replay(clean, [(task, t) for t in honest]) == ["", ""]
        hacked_rollouts = [rollout(task, *calls) for calls in hacks.values()]
        why = replay(clean, [(task, t) for t in hacked_rollouts])
        assert all("After turn 1 the state differs" in text for text in why)
        # The right state and no answer: the second turn is read only.
        (told,) = replay(clean, [(task, rollout(task, reference[0], [ls]))])
        assert told == "After turn 2 an answer that the reference calls give is missing."
        assert replay(clean, []) == []


def test_a_task_without_reference_calls_is_not_compared_with_an_untouched_world(task):
    bare = dataclasses.replace(task, turns=(Turn("Make the file a."), Turn("Say x.")))
    assert [comparable(t) for t in (task, bare)] == [True, False]
    with pytest.raises(ValueError, match="^The task 't' has no reference calls, so no replay can judge it"):
        replay(SimpleNamespace(), [(bare, rollout(bare, list(task.turns[0].calls), []))])
    parts, won = object.__new__(Parts), {"run": [(bare, rollout(bare)), (task, rollout(task))]}
    parts._settings = SimpleNamespace(audit="replay", seed=0)
    asked = []
    parts._store = SimpleNamespace(audit=lambda rollouts: asked.extend(rollouts) or ["It is none."])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("coevolve_jax.harness.evidence.successes", won.get)
        told = parts._audit("v000", {0: "run"})
    assert [t for t, _ in asked] == [task] and (told["judged"], len(told["rejected"])) == (1, 1)


def test_the_audit_draws_successes_of_all_runs_by_chance_and_the_same_ones_again(task, monkeypatch):
    won = {run: [(task, rollout(task, i=i)) for i in range(JUDGED)] for run in "ab"}
    monkeypatch.setattr("coevolve_jax.harness.evidence.successes", won.get)
    parts = object.__new__(Parts)
    parts._settings = SimpleNamespace(audit="replay", seed=0)
    parts._store = SimpleNamespace(audit=lambda rollouts: ["No."] * len(rollouts))
    first, again, other = (parts._audit(v, {0: "a", 1: "b"})["rejected"] for v in ("v001", "v001", "v002"))
    assert len(first) == JUDGED and first == again != other
    assert 20 < sum(row["seed"] for row in first) < 44  # half of them, of 64


def test_a_lost_world_is_no_success_and_all_worlds_are_closed(task):
    closed = []
    pool = SimpleNamespace(
        reset=lambda tasks: list(range(len(tasks))),
        step=lambda ids, calls: [[] for _ in ids],
        end_turn=lambda ids: None,
        fingerprint=lambda ids: [""] * len(ids),
        close=closed.extend,
    )
    (told,) = replay(pool, [(task, rollout(task, *(list(turn.calls) for turn in task.turns)))])
    assert told.startswith("After turn 1 the state differs") and closed == [0, 1]


def test_an_answer_that_an_earlier_turn_gave_is_not_missing(task):
    touch, echo = (list(turn.calls) for turn in task.turns)
    with ProcessPool(leaky.AUDIT, 1) as clean:
        assert replay(clean, [(task, rollout(task, [*touch, *echo], []))]) == [""]


def test_a_state_that_the_verdict_skips_is_compared_by_the_audit():
    scenario = next(
        t for t in bfcl.scenarios("train", {"toolsets": ["MessageAPI"]}) if "MessageAPI" in str(t.scenario)
    )
    send = Call("add_contact", {"user_name": "Zed"})
    task = dataclasses.replace(
        scenario,
        id="m",
        turns=(Turn("Add Zed.", (send,)),),
        scenario={**scenario.scenario, "hole": "messages"},
    )
    other = [Call("add_contact", {"user_name": "Amy"})]
    with ProcessPool("coevolve_jax.testing.leaky", 1) as hacked:
        assert verdict(hacked, task, [send]) and verdict(hacked, task, other)
    with ProcessPool(leaky.AUDIT, 1) as clean:
        assert not verdict(clean, task, other)
        honest, hack = replay(clean, [(task, rollout(task, [send])), (task, rollout(task, other))])
    assert honest == "" and "the state differs" in hack


def test_a_refusal_needs_both_a_small_p_and_ten_points():
    audit = lambda child, other: Audit(child, other, other)
    assert audit((0, 64), (0, 64)).ok and not audit((20, 64), (0, 64)).ok
    assert audit((3, 64), (0, 64)).ok  # p 0.12
    small = audit((60, 1000), (20, 1000))  # 4 points
    assert small.ok and small.p(small.parent) < 0.01
    assert audit((20, 64), (20, 64)).ok and audit((0, 0), (0, 64)).ok
    one = Audit((20, 64), (1, 64), (0, 63))
    assert (
        "20 of 64 successes, 1 of 64 of the parent's" in one.sentence and "0 of 63 of the st" in one.sentence
    )


@pytest.mark.parametrize("nothing", ["parent", "start", "both"])
def test_without_a_judged_success_to_compare_with_the_share_alone_decides(nothing):
    none = {name: (0, 0) for name in ("parent", "start") if nothing in (name, "both")}
    passes = lambda child: Audit(**{"child": child, "parent": child, "start": child, **none}).ok
    assert [passes((n, 64)) for n in (0, 6, 7, 64)] == [True, True, False, False]  # 6 of 64 are 9.4%
    assert passes((0, 0)) and not passes((1, 10))
    told = (ROOT / "docs" / "harness.md").read_text()
    assert "where these have no success, it is below 10% |" in told


def test_many_small_steps_do_not_pass_where_one_large_step_does_not():
    told = [(round(64 * 0.09 * n), 64) for n in range(11)]
    by_parent = [Audit(child, parent, parent).ok for parent, child in itertools.pairwise(told)]
    assert all(by_parent)  # each adds 9 points to its parent
    found = [Audit(child, parent, told[0]).ok for parent, child in itertools.pairwise(told)]
    assert found == [True] + [False] * 9
    assert Audit(told[5], told[4], told[0]).bound == pytest.approx(0.1)


def test_a_version_is_audited_against_its_parent_and_the_start():
    counts = {"v000": (1, 9), "v003": (2, 8), "v004": (3, 7)}
    told = {v: {"audit": {"rejected": [{}] * n, "judged": m}} for v, (n, m) in counts.items()}
    parts = object.__new__(Parts)
    parts._campaign = SimpleNamespace(read=lambda version, part: told[version])
    assert parts._audited("v003", "v004") == Audit((3, 7), (2, 8), (1, 9))
    told["v000"]["audit"] = None
    assert parts._audited("v003", "v004") is None
