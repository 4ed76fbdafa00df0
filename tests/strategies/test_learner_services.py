"""INFUSER, Socratic-SWE and SOAR: what the learner's services, influence and branch, make them choose."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest

from coevolve_jax import build
from coevolve_jax.strategies import infuser, soar, socratic
from coevolve_jax.strategies.base import Branch
from coevolve_jax.strategies.growth import set_apart
from coevolve_jax.synthesis.knobs import KnobPolicy
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.testing.made_up import MadeUpLab, made_up_rollout, made_up_task
from coevolve_jax.types import Call, Group, Outcome, Step, Task, Turn
from tests.strategies.test_proposers import Lab, config_of, solved


def again(name, config, strategy):
    """The strategy as a checkpoint restores it."""
    state = json.loads(json.dumps(strategy.to_json()))
    return build.strategy(config, {"strategy": {"name": name, "state": state}})


def half(task, k):
    return solved(task, k // 2, k)


# INFUSER: drafts of five calls make the same call five times, which is the pattern of influence 1


class Aligned(Lab):
    """Half of the rollouts solve any task. The influence of `hot` tasks is 1, that of others -1.

    placebo: permutes the scores among the groups.
    """

    def __init__(self, config, hot, placebo=False, **how):
        super().__init__(config, half, **how)
        self.hot, self.placebo, self.asked = hot, placebo, []

    def synthesize(self, contexts, *, into=None, **how):
        if all(c.calls for c in contexts):
            return super().synthesize(contexts, into=into, **how)
        return MadeUpLab.synthesize(self, contexts, into=into, **how)

    def influence(self, goal, groups, *, preconditioned=True):
        self.asked.append(({g.task.id for g in goal}, preconditioned))
        scores = [1.0 if self.hot(g.task) else -1.0 for g in groups]
        return np.random.default_rng(len(self.asked)).permutation(scores).tolist() if self.placebo else scores


def five_alike(task):
    return task.actions == ("tool_0",) * 5


def influenced(placebo, evolutions=12, **own):
    """After so many evolutions: the proposer's share of the hot setting, and the hot share of new tasks."""
    shares, hot = [], []
    for seed in range(3):
        config = config_of("infuser", **own)
        config.seed = seed
        strategy, lab = build.strategy(config), Aligned(config, five_alike, placebo, alike=(5,))
        for step in range(evolutions):
            strategy.evolve(step, lab)
            strategy = again("infuser", config, strategy)
        shares.append(KnobPolicy({"calls": (4, 5, 6)}, strategy.to_json()["knobs"]).shares("calls")[1])
        hot += [five_alike(t) for t in lab.tasks if t.lineage.kind == "signal"][:48]  # of three evolutions
    return np.mean(shares), np.mean(hot)


def test_infusers_proposer_and_choice_go_to_influence_and_not_to_a_permutation_of_it():
    share, hot = influenced(False)
    assert share > 0.8 and hot > 0.8
    share, hot = influenced(True)
    assert abs(share - 1 / 3) < 0.2 and abs(hot - 1 / 3) < 0.15
    assert influenced(False, 1, learning_rate=0.0, keep="none")[1] < 0.5 < influenced(False, 1)[1]


def test_infusers_goal_set_is_made_once_in_scenarios_of_its_own_and_never_trained_on():
    config = config_of("infuser", preconditioned=False, documents=2)
    lab = Aligned(config, five_alike)
    strategy = build.strategy(config)
    first = strategy.evolve(0, lab)
    strategy = again("infuser", config, strategy)
    second = strategy.evolve(1, lab)
    goal = strategy.to_json()["goal"]
    ids = {task["id"] for task in goal}
    others, apart = set_apart(config, lab)
    assert len(ids) == 24 and lab.asked == [(ids, False)] * 2 and not ids & {t.id for t in lab.tasks}
    assert {t["lineage"]["parent"] for t in goal} == {s.id for s in apart}
    new = [t for t in lab.tasks if t.lineage.kind == "signal"]
    assert {t.lineage.parent for t in new} == {s.id for s in others}
    # Two documents of four drafts. The goal set counts as proposed, and not as added.
    assert (first.proposed, second.proposed, first.added, second.added) == (24 + 8, 8, 8, 8)
    assert all(t.lineage.solved == 0.5 for t in new)


def test_infuser_trains_on_no_goal_task_where_one_scenario_is_on_both_sides():
    class Copying(Aligned):
        """Every second draft is a task of the goal set, and aligned above all."""

        def synthesize(self, contexts, *, into=None, **how):
            stats = super().synthesize(contexts, into=into, **how)
            if how["kind"] == "goal":
                self.goal = list(into)
            else:
                new = list(into)
                own = [dataclasses.replace(g, id=t.id, lineage=t.lineage) for g, t in zip(self.goal, new)]
                into.__init__()
                into.add([x for pair in zip(own[::2], new[1::2], strict=True) for x in pair])
            return stats

    config = config_of("infuser", documents=2, learning_rate=0.0)
    strategy = build.strategy(config)
    lab = Copying(config, lambda task: task.calls in [g.calls for g in lab.goal], scenarios=Lab.scenarios[:1])
    assert strategy.evolve(0, lab).added == 4
    assert not [t for t in lab.tasks if t.calls in [g.calls for g in lab.goal]]


def test_dugrpo_divides_by_the_deviation_of_the_document_and_the_mean_of_all_that_are_not_zero():
    scores = [0.5, 0.3, 0.1, 0.1, 0.0, 0.2]
    stds = [0.1, 0.0, 0.1]
    expected = [d / (std + 0.1 + 1e-6) for std, pair in zip(stds, (0.1, 0.0, 0.1)) for d in (pair, -pair)]
    expected[4:] = expected[5], expected[4]
    np.testing.assert_allclose(infuser.advantages(scores, [7, 7, 3, 3, 5, 5]), expected)
    assert not infuser.advantages([0.2] * 4, [0, 0, 1, 1]).any()
    # A document without a draft costs a proposer nothing among documents without influence.
    assert not infuser.advantages([0.0] * 4, [0] * 4).any()


def test_infusers_other_reward_wants_tasks_that_half_of_the_rollouts_solve():
    config = config_of("infuser", reward="variance")
    strategy, lab = build.strategy(config), Aligned(config, five_alike)
    lab.rolled = lambda task, k: solved(task, {4: 0, 5: k // 2, 6: k}[len(task.calls)], k)
    for step in range(12):
        strategy.evolve(step, lab)
    assert not lab.asked
    assert KnobPolicy({"calls": (4, 5, 6)}, strategy.to_json()["knobs"]).shares("calls")[1] > 0.8
    for key, value, why in (
        ("keep", "best", "must be top or none"),
        ("reward", "p", "influence or variance"),
    ):
        with pytest.raises(ValueError, match=f"config.strategy.{key} is '{value}': it .*{why}"):
            build.strategy(config_of("infuser", **{key: value}))


# Socratic-SWE: all tasks begin with tool_0, and rollouts miss tool_1 or tool_2 after it


def call(n, x=0):
    return Call(f"tool_{n}", {"x": x})


def rollout(task, index, calls, success=False, errors=(), stop="done"):
    """A rollout of these calls. errors: positions of those that fail."""
    steps = tuple(Step(0, "", c, "", i in errors) for i, c in enumerate(calls))
    made = made_up_rollout(np.random.default_rng(0), task, index, 0)
    outcome = Outcome(float(success), success)
    return dataclasses.replace(made, steps=steps, stop=stop, outcome=outcome)


def traces(missed, count):
    """Groups in which half of the rollouts call something else where `missed` is due."""
    groups = []
    for i in range(count):
        calls = (call(0, i), call(missed, i), call(7))
        task = Task(f"{missed}-{i}", "made_up", {"id": f"{missed}-{i}"}, (Turn("q", calls),))
        right = rollout(task, 0, calls, success=True)
        groups.append(Group(task, (right, rollout(task, 1, (call(0, i), call(5), call(7))))))
    return groups


class Registry(MadeUpLab):
    """The influence of drafts that have to call tool_1 is 1, that of others -1. placebo: as in `Aligned`."""

    def __init__(self, config, tasks, placebo=False):
        pool = TaskPool()
        pool.add(tasks)
        super().__init__(config, pool)
        self.placebo, self.contexts, self.asked = placebo, [], 0

    def synthesize(self, contexts, **how):
        self.contexts += [c for c in contexts if how["kind"] == "draft"]
        return super().synthesize(contexts, **how)

    def influence(self, goal, groups, *, preconditioned=True):
        self.asked += 1
        scores = [1.0 if g.task.lineage.context.endswith("/tool_1") else -1.0 for g in groups]
        self.aligned = [score > 0 for score in scores]
        return np.random.default_rng(self.asked).permutation(scores).tolist() if self.placebo else scores


def grown(placebo=False, **own):
    """Counts what two evolutions asked for and took, by the call that had to be in it."""
    asked, taken = [Counter(), Counter()], Counter()
    for seed in range(3):
        config = config_of("socratic", **own)
        config.seed = seed
        groups = [*traces(1, 4), *traces(2, 4)]
        strategy, lab = build.strategy(config), Registry(config, [g.task for g in groups], placebo)
        for step in range(2):
            strategy.observe(step, groups)
            strategy = again("socratic", config, strategy)
            before = len(lab.contexts)
            stats = strategy.evolve(step, lab)
            agreeing = sum(lab.aligned) if own.get("influence", True) else 16
            assert stats.added == min(16, agreeing) > 0
            asked[step].update(c.must for c in lab.contexts[before:])
            if not step:
                new = [t.lineage for t in lab.tasks if t.lineage.kind == "signal"]
                taken.update(line.context.rpartition("/")[2] for line in new)
    return asked, taken, lab


def test_socratics_drafts_are_of_what_was_missed_and_those_that_it_takes_are_aligned():
    asked, taken, lab = grown()
    # Of each call as many traces: about half of the drafts. The common calls are in no one's way.
    assert set(asked[0]) == {("tool_1",), ("tool_2",)} and 0.35 < asked[0][("tool_1",)] / 96 < 0.65
    assert set(taken) == {"tool_1"}
    assert asked[1][("tool_1",)] > 4 * asked[1][("tool_2",)]  # a skill weighs what its drafts were aligned
    for context in lab.contexts:
        first, last = (
            context.plan
        )  # the calls up to where the rollout left the successful one, then the repair
        example = context.task.calls
        assert (first, (last,)) == (example[0], context.must) and example[1].name == last
    _, taken, _ = grown(placebo=True)
    assert 0.3 < taken["tool_1"] / sum(taken.values()) < 0.7
    asked, taken, lab = grown(influence=False)
    assert 0.3 < taken["tool_1"] / sum(taken.values()) < 0.7 and not lab.asked and not lab.probed
    assert abs(asked[1][("tool_1",)] - asked[1][("tool_2",)]) < 40


@pytest.mark.parametrize("size", [1.0, 0.001])
def test_the_weights_of_socratics_skills_do_not_depend_on_the_scale_of_influence(size):
    class Scaled(Registry):
        def influence(self, goal, groups, *, preconditioned=True):
            return [size * x for x in super().influence(goal, groups, preconditioned=preconditioned)]

    config, groups = config_of("socratic"), [*traces(1, 4), *traces(2, 4)]
    strategy, lab = build.strategy(config), Scaled(config, [g.task for g in groups])
    strategy.observe(0, groups)
    strategy.evolve(0, lab)
    weights = {key.partition("|")[0]: own["weight"] for key, own in strategy.to_json()["skills"].items()}
    assert weights == {"tool_1": pytest.approx(2.0), "tool_2": socratic.LEAST}


def test_socratic_takes_no_draft_that_is_not_aligned():
    class Opposed(Registry):
        def influence(self, goal, groups, *, preconditioned=True):
            return [0.1 if i < 3 else (0.0, -0.5)[i % 2] for i in range(len(groups))]

    config, groups = config_of("socratic"), traces(1, 4)
    strategy, lab = build.strategy(config), Opposed(config, [g.task for g in groups])
    strategy.observe(0, groups)
    assert strategy.evolve(0, lab).added == len(lab.tasks) - 4 == 3


def test_socratics_trusted_set_is_apart_from_what_it_grows():
    """Its scenarios hold no example of a draft, and D_t takes none of its tasks."""

    class Copying(Registry):
        """Drafts are copies of the trusted tasks as far as there are some, and aligned above all."""

        def synthesize(self, contexts, *, into=None, **how):
            stats = super().synthesize(contexts, into=into, **how)
            if how["kind"] == "draft":
                copies = [dataclasses.replace(t, id=f"copy {t.id}") for t in strategy._goal]
                into.add([dataclasses.replace(t, lineage=next(iter(into)).lineage) for t in copies])
            return stats

    config = config_of("socratic")
    groups = [*traces(1, 4), *traces(2, 4)]
    strategy = build.strategy(config)
    lab = Copying(config, [g.task for g in groups])
    _, apart = set_apart(config, lab)
    moved = dataclasses.replace(groups[0].task, id="moved", scenario=apart[0].scenario)
    lab.tasks.add([moved])
    own = tuple(dataclasses.replace(t, task_id="moved") for t in groups[0].trajectories)
    groups.append(Group(moved, own))
    for step in range(2):
        strategy.observe(step, groups)
        assert strategy.evolve(step, lab).added > 0
    assert "moved" not in {c.task.id for c in lab.contexts} and strategy._goal
    assert not [t.id for t in lab.tasks if t.id.startswith("copy")]


def test_a_lesson_is_the_missed_call_what_came_instead_and_how_that_ended():
    calls = (call(0), call(1), call(2))
    task = Task("t", "made_up", {}, (Turn("q", calls),))
    failures = [
        rollout(task, 1, (call(0), call(4), call(1))),  # goes on after a detour, and misses tool_2
        rollout(task, 2, (call(0), call(1, 9)), errors=(1,)),
        rollout(task, 3, (call(0),), stop="length"),
        rollout(task, 4, (*calls, call(6))),  # makes all calls: nothing is missed
        dataclasses.replace(rollout(task, 5, ()), outcome=Outcome(0.0, False, valid=False)),
    ]
    found = socratic.lessons_of(Group(task, tuple(failures)))
    assert [(parts, list(made)) for parts, _, made in found] == [
        (("tool_2", "tool_4", "accepted"), [call(0)]),
        (("tool_1", "tool_1", "error"), [call(0)]),
        (("tool_1", "", "length"), [call(0)]),
    ]
    # A success on another way leads further than the reference calls do.
    other = rollout(task, 0, (call(0), call(4), call(1), call(2)), success=True)
    parts, _, made = socratic.lessons_of(Group(task, (other, failures[0])))[0]
    assert parts == ("tool_2", "", "done") and made == [call(0), call(4), call(1)]


def test_socratics_skills_fade_and_are_dropped():
    config = config_of("socratic", memory=0.5)
    strategy, groups = build.strategy(config), traces(1, 9)
    strategy.observe(0, groups)
    saved = strategy.to_json()
    strategy.observe(0, [])
    strategy = again(
        "socratic", config, build.strategy(config, {"strategy": {"name": "socratic", "state": saved}})
    )
    (skill,) = saved["skills"].values()  # a state that was saved stays as it was
    assert skill["count"] == 9 and len(skill["examples"]) == socratic.EXAMPLES
    for step in range(1, 9):
        strategy.observe(step, [])
    assert strategy.to_json()["skills"] == {}
    lab = Registry(config, [g.task for g in groups])
    assert strategy.evolve(9, lab).added == 0 and not lab.contexts


# SOAR: training on drafts of level 0 helps on the hard tasks


def level_of(task):
    return int(task.lineage.parent[1:]) % 2


class Branching(MadeUpLab):
    """A branch gains `gain` on the hard tasks if `helps`, given the level of its drafts."""

    def __init__(self, config, gain, helps=lambda level, number: level == 0):
        tasks = TaskPool()
        tasks.add([made_up_task(f"initial-0-{i}", np.random.default_rng(i)) for i in range(3)])
        places = tuple(Task(f"s{i}", "made_up", {"level": i % 2}) for i in range(4))
        super().__init__(config, tasks, places)
        self.gain, self.helps, self.branched, self.screened = gain, helps, [], []

    def probe(self, tasks, k, step):
        self.probed = True
        self.screened.append((len(tasks), k))
        hard = lambda t: int(t.id.rpartition("-")[2]) % 2 == 0  # every second candidate
        return [solved(t, 0 if hard(t) else 1, k) for t in tasks]

    def branch(self, tasks, goal, *, updates, batch, k, step):
        self.probed = True
        (level,) = {level_of(t) for t in tasks}  # a set is of one setting
        self.branched.append((len(tasks), len(goal), updates, batch, k))
        wins = round(self.gain * len(goal)) if self.helps(level, len(self.branched)) else 0
        return Branch([solved(t, 0, 1) for t in goal], [solved(t, i < wins, 1) for i, t in enumerate(goal)])


def taught(**how):
    """The teacher's share of level 0, and the levels of new tasks."""
    shares, levels = [], Counter()
    for seed in range(3):
        config = config_of("soar")
        config.seed = seed
        strategy, lab = build.strategy(config), Branching(config, 0.1, **how)
        for step in range(8):
            strategy.evolve(step, lab)
            strategy = again("soar", config, strategy)
        shares.append(KnobPolicy({"level": ("0", "1")}, strategy.to_json()["knobs"]).shares("level")[0])
        levels.update(level_of(t) for t in lab.tasks if t.lineage.kind == "signal")
    return float(np.mean(shares)), levels, lab


def test_soars_teacher_goes_where_a_copy_gains():
    share, levels, lab = taught()
    assert share > 0.85 and levels[0] > 4 * levels[1]
    assert set(lab.branched) == {(12, 32, 6, 8, 4)} and len(lab.screened) == 2  # drafts are not probed
    assert len({len(t.calls) for t in lab.tasks if t.lineage.kind == "signal"}) > 1  # sizes vary within a set
    share, levels, _ = taught(helps=lambda level, number: number % 2)
    assert 0.2 < share < 0.8 and levels[1] > levels[0] / 4


def test_soar_takes_no_set_while_the_mean_gain_is_small():
    config = config_of("soar", promotion=0.05, window=2)
    strategy, lab, added = build.strategy(config), Branching(config, 0.0, lambda level, number: True), []
    # Of 32 hard tasks; means over two: .031, .047, .078, .094, .047, .016.
    for step, wins in enumerate((1, 2, 3, 3, 0, 1)):
        lab.gain = wins / 32
        added.append(strategy.evolve(step, lab).added)
    assert added == [0, 0, 12, 12, 0, 0]


def test_an_evolution_without_hard_tasks_measures_nothing():
    config = config_of("soar", promotion=0.05)
    strategy, lab = build.strategy(config), Branching(config, 0.1, lambda level, number: True)
    lab.probe = lambda tasks, k, step: [solved(t, 1, k) for t in tasks]  # nothing is hard
    assert strategy.evolve(0, lab).added == 0 and strategy.to_json()["gains"] == []
    del lab.probe
    assert strategy.evolve(1, lab).added > 0 and len(strategy.to_json()["gains"]) == 1


def test_soars_hard_tasks_are_those_that_fail_every_attempt_and_nobody_trains_on_them():
    config = config_of("soar", candidates=40, hard=15)
    strategy, lab = build.strategy(config), Branching(config, 0.1)
    strategy.evolve(0, lab)
    hard = strategy.to_json()["hard"]
    assert lab.screened == [(40, 4), (20, 12)]  # those that failed four times are tried twelve times more
    assert len(hard) == 15 and all(int(t["id"].rpartition("-")[2]) % 2 == 0 for t in hard)
    assert not {t["id"] for t in hard} & {t.id for t in lab.tasks}
    strategy.evolve(1, lab)
    assert len(lab.screened) == 2 and strategy.to_json()["hard"] == hard


def test_each_set_is_compared_with_the_mean_of_the_others():
    np.testing.assert_allclose(soar.leave_one_out([0.1, 0.0, 0.2]), [0.0, -0.15, 0.15], atol=1e-12)
    with pytest.raises(ValueError, match="config.strategy.sets is 1: it must be 2 or more"):
        build.strategy(config_of("soar", sets=1))
