"""Memories and requests of the methods when D_t evolves, beside slow references over random histories."""

import dataclasses
import json
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coevolve_jax import build
from coevolve_jax.grpo.filter import FilterState
from coevolve_jax.seeding import rng_for
from coevolve_jax.strategies import blame, coevolve
from coevolve_jax.strategies.base import grpo_samples
from coevolve_jax.strategies.growth import solvable, synthesize_for_tools
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.synthesis.validate import Verdict
from coevolve_jax.types import Call, Evidence, Group, Signal, Step, Task, Turn
from tests.strategies.test_comparable import settings_of
from tests.support.step_cases import a_rollout, a_task, as_, some_groups

SEEDS = st.integers(0, 10**6)


class Lab:
    """Records its requests. Tool x is on offer in the scenarios of places[x]."""

    own_patterns = False

    def __init__(self, places=None, scenarios=4, tasks=()):
        self.scenarios = [Task(f"scenario_{n}", "made_up", {"n": n}) for n in range(scenarios)]
        self.places = places or dict.fromkeys("abcdef", range(scenarios))
        self.tasks, self.asked, self.reflected = TaskPool(), [], []
        self.tasks.add(list(tasks))

    def offered(self, scenario):
        return frozenset(tool for tool, places in self.places.items() if scenario.scenario["n"] in places)

    def reflect(self, evidence):
        self.reflected.append(list(evidence))
        return []

    def synthesize(self, contexts, **how):
        self.asked.append((list(contexts), how))
        return SynthesisStats()

    def synthesize_unguided(self, **how):
        self.asked.append(([], how))
        return SynthesisStats()

    def probe(self, tasks, k, step):
        return [
            Group(t, tuple(as_(a_rollout(np.random.default_rng(m), t, m), m == 0, True) for m in range(k)))
            for t in tasks
        ]


def again(strategy, config):
    """The strategy as a checkpoint restores it."""
    state = json.loads(json.dumps(strategy.to_json()))
    return build.strategy(config, {"strategy": {"name": config.strategy.name, "state": state}})


# Blame


def missed_calls(task, t):
    """(tool, whether it was missed) for the reference calls that a rollout reached."""
    said = [
        (s.call.name, json.dumps(s.call.arguments, sort_keys=True)) for s in t.steps if s.call is not None
    ]
    found = []
    for call in (call for turn in task.turns for call in turn.calls):
        line = (call.name, json.dumps(call.arguments, sort_keys=True))
        if line in said:
            said = said[said.index(line) + 1 :]
            found.append((call.name, False))
        else:
            return found if t.outcome.success else [*found, (call.name, True)]
    return found


@settings(max_examples=60)
@given(
    SEEDS,
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    st.sampled_from([0.0, 1.0, 2.0, 2.5]),
    st.integers(1, 7),
    st.booleans(),
    st.lists(st.booleans(), min_size=1, max_size=7),
)
def test_blame_remembers_the_first_visits_and_lets_them_fade(
    seed, first_sight, memory, sharpness, breadth, chasing, saved
):
    """saved: the steps before which the run is killed and resumed."""
    own = {
        "first_sight": first_sight, "memory": memory, "sharpness": sharpness, "breadth": breadth,
        "chasing": chasing,
    }  # fmt: skip
    changes = {"steps": 40, "evolution.every": 1, "evolution.tasks": 9, "seed": seed % 7}
    config = settings_of("blame", **changes, **{f"strategy.{name}": value for name, value in own.items()})
    rng, strategy = np.random.default_rng(seed), build.strategy(config)
    tasks = [a_task(rng, f"t{i}") for i in range(4)]
    events, visits = [], Counter()  # (step, tool, missed) of all that counts
    for step, killed in enumerate(saved):
        if killed:
            strategy = again(strategy, config)
        drawn = [tasks[i] for i in rng.permutation(4)[: rng.integers(1, 4)]]
        groups = [Group(t, tuple(a_rollout(rng, t, m) for m in range(rng.integers(0, 4)))) for t in drawn]
        found, before = strategy.observe(step, groups), len(events)
        for group in groups:
            valid = [t for t in group.trajectories if t.outcome.valid]
            if not first_sight or visits[group.task.id] < first_sight:
                events += [(step, *called) for t in valid for called in missed_calls(group.task, t)]
            visits[group.task.id] += bool(valid)
        assert found.counts["blame"] == sum(missed for _, _, missed in events[before:])

    last = len(saved) - 1
    counts = {}
    for tool in {tool for _, tool, _ in events}:
        faded = [(memory ** (last - step), missed) for step, name, missed in events if name == tool]
        counts[tool] = [math.fsum(w for w, _ in faded), math.fsum(w for w, missed in faded if missed)]
    kept = strategy.to_json()["tools"]
    assert kept.keys() == counts.keys()
    for tool, pair in counts.items():
        assert kept[tool] == pytest.approx(pair), tool

    tried = math.fsum(n for n, _ in counts.values())
    mean = 1 - math.fsum(n for _, n in counts.values()) / tried if tried else 0.5
    weights = {}
    for tool, (n, misses) in counts.items():
        p = (n - misses + 4 * mean) / (n + 4)  # four attempts of the mean tool
        weights[tool] = (1 - p) ** sharpness if chasing else (p * (1 - p)) ** sharpness
    lab, luck, drawn = Lab(), rng_for(config.seed, "evolve", last), []
    assert blame.tool_weights(strategy._tools, sharpness, chasing) == pytest.approx(weights, abs=1e-12)
    if any(0 < w < 1e-9 for w in weights.values()):  # rounding decides
        return
    names = [tool for tool in sorted(weights) if weights[tool] > 1e-12]
    if not names:  # nothing tells the tools apart
        names, weights = list("abcdef"), dict.fromkeys("abcdef", 1.0)
    while len(drawn) < 9:
        share = np.array([weights[name] for name in names])
        size = min(breadth, len(names), 9 - len(drawn))
        drawn += rng_choice(luck, names, size, share / share.sum())
    assert strategy.evolve(last, lab) is not None
    ((contexts, how),) = lab.asked
    assert [c.must for c in contexts] == [(tool,) for tool in drawn]
    assert {c.signal for c in contexts} <= {"blame"} and how["kind"] == "signal" and how["wanted"] == 9


@pytest.mark.parametrize("won", [False, True])
def test_blame_explores_all_that_is_on_offer_where_every_attempt_ends_alike(won):
    config = settings_of("blame", **{"steps": 40, "evolution.every": 1, "evolution.tasks": 12})
    strategy, task = build.strategy(config), Task("t", "made_up", {}, (Turn("q", (Call("a", {"x": 0}),)),))
    steps = [Step(0, "a", call, "", False) for call in task.calls * won]
    rollout = dataclasses.replace(a_rollout(np.random.default_rng(0), task, 0), steps=tuple(steps))
    strategy.observe(0, [Group(task, (as_(rollout, float(won), True),))])
    assert strategy.to_json()["tools"] == {"a": [1.0, float(not won)]}
    lab = Lab()
    strategy.evolve(1, lab)
    ((contexts, _),) = lab.asked
    assert Counter(c.must[0] for c in contexts) == dict.fromkeys("abcdef", 2)


def rng_choice(rng, names, size, shares):
    return [names[i] for i in rng.choice(len(names), size, replace=False, p=shares)]


def test_an_untried_policy_is_taken_to_be_right_half_the_time_and_a_rare_tool_to_be_as_the_others():
    assert blame.tool_weights({"a": (0.0, 0.0)}, 1.0, chasing=True) == {"a": 0.5}
    weights = blame.tool_weights({"often": (96.0, 0.0), "seldom": (4.0, 4.0)}, 1.0, chasing=True)
    assert weights == pytest.approx({"often": 1 - (96 + 4 * 0.96) / 100, "seldom": 1 - 4 * 0.96 / 8})


def test_each_step_draws_anew_from_equal_weights():
    config = settings_of("blame", **{"steps": 40, "evolution.every": 1, "evolution.tasks": 12})
    strategy, drawn = build.strategy(config), []
    rng = np.random.default_rng(1)
    for i in range(6):
        task = a_task(rng, f"t{i}")
        strategy.observe(0, [Group(task, tuple(as_(a_rollout(rng, task, m), 0.0, True) for m in range(4)))])
    assert len({w for w in blame.tool_weights(strategy._tools).values() if w}) > 2
    for step in (3, 3, 4):
        lab = Lab()
        strategy.evolve(step, lab)
        drawn.append([c.must for c in lab.asked[0][0]])
    assert drawn[0] == drawn[1] != drawn[2]


# Tools that are requested by name


def test_a_tool_is_explored_where_it_is_offered_and_elsewhere_again_until_it_gives_a_task():
    lab = Lab({"a": (1, 3), "b": (2,), "nowhere": ()})
    tools = ["a", "b", "nowhere", "a"]
    how = dict(wanted=7, kind="signal", step=5, rng=np.random.default_rng(0))
    synthesize_for_tools(lab, tools, "blame", **how)
    ((contexts, asked),) = lab.asked
    assert [c.id for c in contexts] == ["blame/5/0/a/0", "blame/5/1/b/0", "blame/5/3/a/0"]
    assert [(c.must, c.focus_pattern) for c in contexts] == [((t,), (t,)) for t in "aba"]
    assert {name: asked[name] for name in ("wanted", "kind", "step")} == {
        "wanted": 7,
        "kind": "signal",
        "step": 5,
    }
    places, unproductive = Counter(), contexts[0]
    for n in range(1, 60):
        unproductive = asked["relocate"](unproductive)
        assert (
            unproductive.id == f"blame/5/0/a/{n}"
            and unproductive.must == ("a",)
            and unproductive.signal == "blame"
        )
        places[unproductive.task.id] += 1
    assert places.keys() == {"scenario_1", "scenario_3"} and min(places.values()) > 15


def test_the_oracle_asks_for_every_weak_tool_as_often_as_any_other_in_an_order_of_chance():
    config = settings_of("static", **{"steps": 40, "evolution.every": 1, "evolution.tasks": 11, "seed": 3})
    config.strategy = {"name": "oracle", "probe": 0}
    config.testbed = {"weak_tools": tuple("abcd")}
    orders = {}
    for step in range(6):
        lab = Lab()
        build.strategy(config).evolve(step, lab)
        tools = [c.must[0] for c in lab.asked[0][0]]
        assert len(tools) == 11 and sorted(Counter(tools).values()) == [2, 3, 3, 3]
        assert sorted(tools[:4]) == sorted(tools[4:8]) == list("abcd")
        orders[step] = tools
    assert any(tools[:4] != tools[4:8] for tools in orders.values())
    assert len(set(map(tuple, orders.values()))) > 1


@pytest.mark.parametrize("room", [0, 1])
def test_coevolve_reflects_on_nothing_where_no_task_has_room(room):
    config = settings_of("coevolve", **{"steps": 40, "evolution.every": 1})
    task = a_task(np.random.default_rng(0), "t0")
    lab, strategy = Lab(tasks=[task]), build.strategy(config)
    lab.tasks.max_size = 1 + room
    rolled = tuple(as_(a_rollout(np.random.default_rng(m), task, m), m, True) for m in range(2))
    strategy.observe(7, [Group(task, rolled)])
    strategy.evolve(7, lab)
    assert len(lab.reflected[0]) == room and len(lab.asked) == 1


# Random


@pytest.mark.parametrize("scenarios", ["train", "known"])
@pytest.mark.parametrize("probe", [0, 3])
def test_random_explores_where_it_is_told_and_probes_if_it_is_told(scenarios, probe):
    own = {"strategy.scenarios": scenarios, "strategy.probe": probe}
    config = settings_of("random", **{"steps": 40, "evolution.every": 1, **own})
    rng = np.random.default_rng(0)
    first = [a_task(rng, f"t{i}") for i in range(3)]
    twin = Task("twin", "made_up", first[1].scenario, first[0].turns)
    lab = Lab(tasks=[*first, twin])
    build.strategy(config).evolve(7, lab)
    ((_, how),) = lab.asked
    assert (how["wanted"], how["kind"], how["step"]) == (config.evolution.tasks, "random", 7)
    if scenarios == "known":
        assert [t.scenario for t in how["scenarios"]] == [t.scenario for t in first]
    else:
        assert how["scenarios"] is None
    if probe:
        assert how["admit"](first) == [Verdict(None, 1 / 3)] * 3
    else:
        assert how["admit"] is None
    wanted = rng_for(config.seed, "evolve", 7).integers(2**32, size=4).tolist()
    assert how["rng"].integers(2**32, size=4).tolist() == wanted


def test_a_probe_counts_valid_rollouts_only():
    class Half(Lab):
        def probe(self, tasks, k, step):
            rolled = [a_rollout(np.random.default_rng(m), tasks[0], m) for m in range(4)]
            outcomes = [(1.0, True), (1.0, True), (0.0, False), (0.0, True)]
            return [Group(tasks[0], tuple(as_(t, *o) for t, o in zip(rolled, outcomes[: 2 + k])))]

    task = a_task(np.random.default_rng(0), "t")
    assert solvable(Half(), 0, 1)([task]) == [Verdict("always_solved", 1.0)]
    assert solvable(Half(), 0, 2)([task]) == [Verdict(None, 2 / 3)]


# Groups that count


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("filtered", [False, True])
def test_what_is_skipped_and_what_is_filtered_are_two_settings(skip, filtered):
    """The filter sees every group with spread, whatever is skipped."""
    own = {"learner.skip_zero_variance_groups": skip, "learner.group_filter": filtered}
    config, rng = settings_of("static", **own), np.random.default_rng(4)
    groups = [g for _ in range(8) for g in some_groups(rng)]
    samples, state = grpo_samples(config, groups, FilterState())
    alive = [g for g in groups if len({t.outcome.reward for t in g.valid}) > 1]
    assert 0 < len(alive) < len(groups) and state.seen == (len(alive) if filtered else 0)
    wanted = alive if skip or filtered else groups
    assert len(samples) == sum(len(g.valid) for g in wanted)


# CoEvolve


def test_evidence_is_used_once():
    config = settings_of("coevolve", **{"steps": 40, "evolution.every": 2, "signals.rare_percent": 50.0})
    strategy, rng, seen = build.strategy(config), np.random.default_rng(0), []
    for step in range(6):
        strategy.observe(step, some_groups(rng, step))
        lab = Lab()
        strategy.evolve(step, lab)
        seen += [(step, e.signal.step) for own in lab.reflected for e in own]
        assert bool(lab.reflected) == (step % 2 == 1)
    assert seen and all(after - 1 <= of <= after for after, of in seen)


@given(SEEDS, st.integers(1, 12))
def test_the_kinds_take_turns_and_failures_come_before_successes(seed, count):
    rng = np.random.default_rng(seed)
    found = []
    for group in some_groups(rng, most=6):
        kinds = [k for k in ("boundary", "forgetting", "rare") if rng.random() < 0.6]
        for kind in kinds:
            found += [
                Evidence(Signal(kind, t.task_id, t.rollout_index, 0), group) for t in group.trajectories
            ]
    told = coevolve.select_signals(found, count, np.random.default_rng(seed))
    pairs = {(e.signal.kind, e.task.id) for e in found}
    assert len(told) == min(count, len(pairs)) == len({(e.signal.kind, e.task.id) for e in told})
    left = Counter(kind for kind, _ in pairs)
    for e in told:
        alternatives = [t.outcome.success for t in e.group.trajectories]
        assert not e.trajectory.outcome.success or all(alternatives)
    for n in range(1, len(told) + 1):  # no kind is two ahead of another that has some left
        taken = Counter(e.signal.kind for e in told[:n])
        assert all(taken[a] <= taken[b] + 1 or taken[b] == left[b] for a in taken for b in left)


def test_which_evidence_is_told_and_where_a_placebo_goes_depends_on_the_step():
    rng = np.random.default_rng(2)
    groups = [
        Group(t, tuple(as_(a_rollout(rng, t, m), m % 2, True) for m in range(4)))
        for t in (a_task(rng, f"t{i}") for i in range(8))
    ]
    changes = {"steps": 40, "evolution.every": 1, "evolution.contexts": 3}
    told, moved = [], []
    for step in (3, 3, 4):
        lab, strategy = Lab(), build.strategy(settings_of("coevolve", **changes))
        strategy.observe(step, groups)
        strategy.evolve(step, lab)
        told.append([(e.signal.kind, e.task.id, e.signal.rollout_index) for e in lab.reflected[0]])
        placebo = build.strategy(settings_of("coevolve", **{**changes, "strategy.shuffled": True}))
        found = placebo.observe(step, groups)
        moved.append([(s["kind"], s["task_id"], s["rollout_index"]) for s in found.rows])
        kept = [(e.signal.kind, e.task.id, e.signal.rollout_index) for e in placebo._evidence]
        assert kept == moved[-1]
    assert told[0] == told[1] != told[2] and moved[0] == moved[1] != moved[2]


def test_evidence_of_one_group_only_is_that_groups():
    """Two tasks have rollouts of the same numbers; one alone has signals, of each kind."""
    rng = np.random.default_rng(0)
    groups = [Group(t, tuple(a_rollout(rng, t, m) for m in range(3))) for t in (a_task(rng, n) for n in "pq")]
    found = [Signal("rare", "p", 1, 0, "a"), Signal("boundary", "q", 2, 0), Signal("rare", "q", 0, 0, "b")]
    for e, signal in zip(coevolve.join_evidence(found, groups), found, strict=True):
        assert e.signal == signal and e.task.id == signal.task_id
        of = groups["pq".index(signal.task_id)].trajectories[signal.rollout_index]
        assert e.trajectory.to_json() == of.to_json() and not len(e.trajectory.ids)


def test_evidence_holds_no_invalid_rollout():
    rng = np.random.default_rng(0)
    task = a_task(rng, "p")
    group = Group(task, tuple(as_(a_rollout(rng, task, m), True, valid=m == 0) for m in range(2)))
    (found,) = coevolve.join_evidence([Signal("rare", "p", 0, 0, "a")], [group])
    assert [t.rollout_index for t in found.group.trajectories] == [0]
