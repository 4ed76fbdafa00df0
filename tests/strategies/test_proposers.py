"""Agent0, Dr. Zero and SEIF: which settings their proposers come to choose, and why."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest

from coevolve_jax import build
from coevolve_jax.strategies import agent0, dr_zero, seif
from coevolve_jax.strategies.growth import propose
from coevolve_jax.synthesis.knobs import KnobPolicy
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.testing.made_up import MadeUpLab, made_up_rollout, made_up_task
from coevolve_jax.types import Call, Group, Lineage, Outcome, Task, Turn
from tests.strategies.test_comparable import settings_of


def ended(task, *rows):
    """A group of rollouts, each of (whether it succeeds, its ending, share of turns that pass)."""
    made = made_up_rollout(np.random.default_rng(0), task, 0, 0)
    return Group(
        task,
        tuple(
            dataclasses.replace(
                made,
                rollout_index=i,
                ending=ending,
                stop="done",
                outcome=Outcome(float(ok), ok, True, passed),
            )
            for i, (ok, ending, passed) in enumerate(rows)
        ),
    )


def solved(task, count, k):
    """A group of k rollouts of which `count` succeed, and the others fail each in another way."""
    return ended(
        task, *((i < count, "right" if i < count else f"wrong {i}", float(i < count)) for i in range(k))
    )


def config_of(name, **own):
    changes = {
        "steps": 200,
        "evolution.every": 1,
        "evolution.tasks": 16,
        "data.min_calls": 4,
        "data.max_turns": 1,
    }
    return settings_of(name, **changes, **{f"strategy.{key}": value for key, value in own.items()})


class Lab(MadeUpLab):
    """Makes a task of as many calls as a context asks for. `rolled` says how the policy does on it.

    Drafts of `alike` calls all have the same actions. Contexts of `barren` calls give none.
    """

    def __init__(self, config, rolled, alike=(), barren=(), **how):
        tasks = TaskPool()
        tasks.add([made_up_task("initial-0-0", np.random.default_rng(0))])
        super().__init__(config, tasks, **how)
        self.rolled, self.alike, self.barren, self.drafts = rolled, alike, barren, []

    def synthesize(self, contexts, *, into=None, rng, kind, step, **how):
        new = []
        for i, c in enumerate(contexts):
            count, id = (c.calls or (4,))[0], f"{kind}-{step}-{i}"
            names = [0] * count if count in self.alike else rng.integers(8, size=count)
            calls = tuple(Call(f"tool_{n}", {"x": int(rng.integers(1000))}) for n in names)
            line = Lineage(kind, c.signal, c.task.id, c.id, step=step)
            if count not in self.barren:
                new.append(
                    Task(id, "made_up", {"id": id, **c.task.scenario}, (Turn("q", calls),), lineage=line)
                )
        into.add(new)
        self.drafts += new
        return SynthesisStats(proposed=len(new), accepted=len(new), added=len(new))

    def probe(self, tasks, k, step):
        self.probed = True
        return [self.rolled(task, k) for task in tasks]


def shares_after(name, rolled, evolutions, alike=(), barren=(), seeds=(0, 1, 2), **own):
    """The proposer's mean shares of 4, 5 and 6 calls after so many evolutions."""
    total = np.zeros(3)
    for seed in seeds:
        config = config_of(name, **own)
        config.seed = seed
        strategy, lab = build.strategy(config), Lab(config, rolled, alike, barren)
        for step in range(evolutions):
            strategy.evolve(step, lab)
            strategy = build.strategy(
                config, {"strategy": {"name": name, "state": json.loads(json.dumps(strategy.to_json()))}}
            )
        total += KnobPolicy({"calls": (4, 5, 6)}, strategy.to_json()["knobs"]).shares("calls")
    return total / len(seeds)


# Settings of a context


def test_each_setting_is_paired_with_its_own_draft():
    config = config_of("seif")
    lab = Lab(config, None, barren=(5,))
    asked = [{"calls": n} for n in (6, 5, 4, 5, 6)]
    drafts, made = propose(lab, asked, "mine", step=3, rng=np.random.default_rng(0))
    assert [t and len(t.calls) for t in drafts] == [6, None, 4, None, 6] and made.added == 3
    assert len(lab.tasks) == 1


class Lossy(Lab):
    """Half of the rollouts of every draft succeed, and the infrastructure loses all of drafts of 5 calls."""

    def probe(self, tasks, k, step):
        def lost(group):
            gone = Outcome(0.0, False, valid=False)
            made = (dataclasses.replace(t, outcome=gone, stop="environment") for t in group.trajectories)
            return Group(group.task, tuple(made)) if len(group.task.calls) == 5 else group

        return [lost(solved(task, k // 2, k)) for task in tasks]

    def influence(self, goal, groups, *, preconditioned=True):
        assert all(g.valid for g in groups)
        return [0.5] * len(groups)


@pytest.mark.parametrize(
    "name, own",
    [
        ("agent0", {"diversity": 0.0, "tool_bonus": 0.0}),
        ("dr_zero", {"hops": (4, 5, 6), "hop_shares": (1, 1, 1), "baseline": "batch"}),
        ("seif", {}),
        ("infuser", {"reward": "variance"}),
        ("infuser", {}),
    ],
)
def test_a_draft_whose_rollouts_are_all_lost_teaches_nothing_and_is_not_adopted(name, own):
    config = config_of(name, kl_coef=0.0, **own)
    strategy, lab = build.strategy(config), Lossy(config, None)
    for step in range(3):
        strategy.evolve(step, lab)
    drafts = Counter(len(t.calls) for t in lab.drafts)
    adopted = Counter(len(t.calls) for t in lab.tasks if t.lineage.kind == "signal")
    assert drafts[5] and adopted[4] and adopted[6] and not adopted[5]
    assert not any(logit for values in strategy.to_json()["knobs"].values() for _, logit in values)


# Agent0: 4 calls are solved always, 5 half the time, 6 half the time by drafts that are all alike


def uncertain(task, k):
    return solved(task, k if len(task.calls) == 4 else k // 2, k)


def test_agent0s_proposer_goes_to_uncertain_tasks_that_are_not_alike():
    a, b, c = shares_after("agent0", uncertain, 10, alike=(6,), probe=4)
    assert b > 0.6 and c < b and a < b
    a, b, c = shares_after("agent0", uncertain, 10, alike=(6,), probe=4, uncertainty=0.0)
    assert abs(a - b) < 0.25 and c < min(a, b)
    a, b, c = shares_after("agent0", uncertain, 10, alike=(6,), probe=4, diversity=0.0)
    assert abs(b - c) < 0.25 and a < min(b, c)


def test_agent0_pays_no_wrong_majority_and_no_barren_setting():
    config = config_of("agent0")
    task = lambda id, n: Task(id, "made_up", {}, (Turn("q", tuple(Call(f"{id}{i}", {}) for i in range(n))),))
    wrong = ended(task("w", 3), (True, "r", 1.0), (False, "x", 0.0), (False, "x", 0.0))
    most = ended(task("m", 6), *[(True, "r", 1.0)] * 7, *[(False, f"x{i}", 0.0) for i in range(3)])
    scattered = ended(task("s", 4), *[(i == 0, f"e{i}", 0.0) for i in range(10)])
    rewards = agent0.earned([wrong, most, scattered, None], config.strategy)
    assert rewards == pytest.approx([0.15 - 0.25, 0.3 - 0.25 + 0.2, 0.2 - 0.25, -1.0])
    barren = shares_after("agent0", uncertain, 5, barren=(6,))
    assert barren[2] < 0.1


@pytest.mark.parametrize("labels", ["majority", "checker"])
def test_agent0_learns_from_the_majority_at_birth_or_from_the_checker(labels):
    """A wrong majority becomes the label: agreement with it is rewarded, and the right answer is not."""
    config = config_of("agent0", labels=labels)
    habit = lambda task, k: ended(
        task, *[(i < 3, "right" if i < 3 else "habit" if i < 8 else f"x{i}", 0.0) for i in range(k)]
    )
    strategy, lab = build.strategy(config), Lab(config, habit)
    assert strategy.evolve(0, lab).added == 16
    adopted = next(t for t in lab.tasks if t.lineage.kind == "signal")
    assert adopted.lineage.solved == 0.3 and strategy.to_json()["labels"][adopted.id] == ["habit", 0.5]
    again = build.strategy(
        config, {"strategy": {"name": "agent0", "state": json.loads(json.dumps(strategy.to_json()))}}
    )
    group = ended(adopted, (True, "right", 1.0), (False, "habit", 0.0))
    right, wrong = (s.advantages[0] for s in again.compute_advantages([group]))
    assert (right > 0 > wrong) == (labels == "checker")
    # p_hat .5 scales by .5 + .5 * .4; a task of D_0 keeps its advantage.
    plain = again.compute_advantages(
        [
            dataclasses.replace(
                group,
                task=lab.tasks["initial-0-0"],
                trajectories=tuple(dataclasses.replace(t, task_id="initial-0-0") for t in group.trajectories),
            )
        ]
    )
    assert abs(right) == pytest.approx(0.7 * abs(plain[0].advantages[0]), rel=1e-5)


def test_agent0_keeps_to_its_band_and_reports_how_its_majorities_agree_with_the_checker():
    config = config_of("agent0")
    rates = {4: 2, 5: 8, 6: 9}  # of ten: p_hat .2, .8 and .9
    strategy, lab = build.strategy(config), Lab(config, lambda t, k: solved(t, rates[len(t.calls)], k))
    stats = strategy.evolve(0, lab)
    new = [t for t in lab.tasks if t.lineage.kind == "signal"]
    assert stats.added == len(new) > 4 and {len(t.calls) for t in new} == {5}
    group = ended(lab.tasks["initial-0-0"], (True, "r", 1.0), (False, "x", 0.0), (False, "x", 0.0))
    report = strategy.observe(1, [group])
    assert report.counts["majority_rollouts"] == 3 and report.counts["majority_as_checker"] == 0
    probes = [row for row in report.rows if row["kind"] == "probe"]
    assert len(probes) == 32 and all(row["p_hat"] == row["solved"] and row["right"] for row in probes)
    own = [row for row in report.rows if row["kind"] == "majority"]
    assert own == [
        {
            "kind": "majority",
            "task_id": "initial-0-0",
            "step": 1,
            "p_hat": 2 / 3,
            "solved": 1 / 3,
            "right": False,
        }
    ]
    assert not [row for row in strategy.observe(2, []).rows if row["kind"] == "probe"]
    with pytest.raises(ValueError, match="config.strategy.labels is 'votes': it must be majority or checker"):
        build.strategy(config_of("agent0", labels="votes"))
    with pytest.raises(ValueError, match=r"config.strategy.band is \(0.8, 0.3\): it must be two shares"):
        build.strategy(config_of("agent0", band=(0.8, 0.3)))


# Dr. Zero


def test_dr_zeros_baseline_by_hops_sees_a_setting_through_the_hops_it_happened_to_get():
    """a pays .2 more at every number of hops, 5 hops pay .6 less, and a was drawn mostly with 5."""
    batch = [("a", 5)] * 12 + [("a", 2)] * 4 + [("b", 5)] * 4 + [("b", 2)] * 12
    drawn = [{"setting": name} for name, _ in batch]
    rewards = [1.0 + 0.2 * (name == "a") - 0.6 * (h == 5) for name, h in batch]
    shares = {}
    for kinds in ("hop", "batch"):
        policy = KnobPolicy({"setting": ("a", "b")})
        for _ in range(20):
            policy.update(drawn, dr_zero.advantages(rewards, [h if kinds == "hop" else 0 for _, h in batch]))
        shares[kinds] = policy.shares("setting")[0]
    assert shares["hop"] > 0.7 and shares["batch"] < 0.3
    assert dr_zero.advantages([0.5, 1.0, 0.0], [2, 3, 3]).tolist() == [0.5, 1.0, -1.0]  # a lone one stays raw


def test_dr_zero_pays_for_hard_drafts_and_adopts_the_hardest_of_each_number_of_hops():
    task = made_up_task("t", np.random.default_rng(0))
    pays = [dr_zero.earned(solved(task, k, 5), 0.5) for k in range(6)]
    assert pays == [0.5, 1.5, 1.25, 1.0, 0.75, 0.5]
    config = config_of("dr_zero", hops=(4, 5), hop_shares=(1, 1))
    cycle = iter(range(10**6))
    strategy, lab = build.strategy(config), Lab(config, lambda t, k: solved(t, next(cycle) % 6, k))
    stats = strategy.evolve(0, lab)
    new = [t for t in lab.tasks if t.lineage.kind == "signal"]
    assert stats.added == len(new) == 16
    for hops in (4, 5):
        own = [t.lineage.solved for t in new if len(t.calls) == hops]
        assert own == sorted(own) and 0 < own[0] and own[-1] < 1 and abs(len(own) - 8) <= 1
    refused = {t.id for t in lab.drafts} - {t.id for t in new}
    assert len(refused) == 16
    for key, value, why in (
        ("hops", (1, 5), r"hops is \(1, 5\): hops are calls"), ("baseline", "none", "must be hop or batch"),
        ("hop_shares", (1,), "hop_shares has 1 values"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=why):
            build.strategy(config_of("dr_zero", **{"hops": (4, 5), "hop_shares": (1, 1), key: value}))


def test_dr_zeros_proposer_learns_where_tasks_are_hard_within_reach():
    """Level 1 is solved once of five, level 0 always, level 2 never."""
    scenarios = tuple(Task(f"s{i}", "made_up", {"level": i % 3}) for i in range(6))
    config = config_of("dr_zero", hops=(4, 5), hop_shares=(1, 1))
    count = {0: 5, 1: 1, 2: 0}
    lab = Lab(config, lambda t, k: solved(t, count[t.scenario["level"]], k), scenarios=scenarios)
    strategy = build.strategy(config)
    for step in range(12):
        strategy.evolve(step, lab)
    shares = KnobPolicy({"level": ("0", "1", "2")}, strategy.to_json()["knobs"]).shares("level")
    assert shares[1] > 0.6


# SEIF


def test_seif_pays_the_two_in_opposite_ways():
    task = made_up_task("t", np.random.default_rng(0))
    nothing = ended(task, (False, "", 0.0), (False, "", 0.0))
    partly = ended(task, (False, "", 0.25), (False, "", 0.5))
    earned = lambda group: seif.instructed(seif.met(group))
    assert (earned(nothing), seif.instructed([]), earned(partly)) == (1.0, 0.0, 0.625)
    assert seif.met(partly) == [0.25, 0.5] and seif.met(solved(task, 1, 2)) == [1.0, 0.0]
    learned = {}
    for name in ("seif", "static"):
        config = settings_of(name, **{"learner.skip_zero_variance_groups": True})
        learned[name] = [s.advantages[0] for s in build.strategy(config).compute_advantages([partly])]
    assert learned["static"] == [] and learned["seif"][0] < 0 < learned["seif"][1]
    assert build.strategy(settings_of("seif")).observe(0, [partly]).counts["partly_met"] == 2


def test_seifs_instructor_goes_where_the_follower_misses_most_and_drafts_are_valid():
    passed = {4: 1.0, 5: 0.5, 6: 0.0}
    misses = lambda task, k: ended(task, *[(False, "", passed[len(task.calls)])] * k)
    a, b, c = shares_after("seif", misses, 10, seeds=(0, 1))
    assert c > 0.6 and a < b < c
    a, b, c = shares_after("seif", misses, 10, barren=(6,), seeds=(0, 1))
    assert b > 0.6 and c < b
