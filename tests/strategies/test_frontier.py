"""Frontier and panel: where the next tasks go, and what each part of the aim does to that."""

import dataclasses
import json
from collections import Counter

import pytest

from coevolve_jax import build
from coevolve_jax.strategies import frontier, panel
from coevolve_jax.synthesis.pipeline import SynthesisStats
from coevolve_jax.synthesis.skills import allocate, beta, unsettled, variance_of
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.testing.made_up import MadeUpLab
from coevolve_jax.types import Call, Group, Lineage, Outcome, Task, Turn
from tests.strategies.test_comparable import rollout, settings_of


def a_task(id, *tools, **scenario):
    calls = tuple(Call(tool, {}) for tool in tools)
    return Task(id, "made_up", {"id": id, **scenario}, (Turn("q", calls),), lineage=Lineage("initial"))


def a_group(task, solved, count=10):
    """A group whose first `solved` rollouts make all calls of the task, and the others none."""
    ends = {ok: rollout(task.calls if ok else (), ok) for ok in (True, False)}
    made = [dataclasses.replace(ends[i < solved], task_id=task.id, rollout_index=i) for i in range(count)]
    return Group(task, tuple(made))


class Lab(MadeUpLab):
    """Records the contexts it is asked for. Draft i is solved as often as rates[i] says, over and over."""

    def __init__(self, config, tasks, rates=(0.5,), **how):
        super().__init__(config, tasks, **how)
        self.asked, self.rates = [], rates

    def synthesize(self, contexts, **how):
        self.asked += contexts
        return super().synthesize(contexts, **how)

    def probe(self, tasks, k, step):
        self.probed = True
        rate = lambda i: self.rates[i % len(self.rates)]
        return [a_group(t, round(rate(i) * k), k) for i, t in enumerate(tasks)]

    @property
    def places(self):
        return Counter(c.must[0] for c in self.asked)


def config_of(name, **own):
    changes = {"steps": 40, "evolution.every": 5, "evolution.tasks": 16}
    return settings_of(name, **changes, **{f"strategy.{key}": value for key, value in own.items()})


def evidence(rates, tasks=20):
    """Groups that show each tool's rate, at the first sight of twenty tasks of one call."""
    return [
        a_group(a_task(f"{tool} {i}", tool), round(10 * rate))
        for tool, rate in rates.items()
        for i in range(tasks)
    ]


def live(tool, count):
    """D_t with so many tasks of the tool, which half of the rollouts solved last."""
    tasks = TaskPool()
    tasks.add([a_task(f"live {i}", tool) for i in range(count)])
    tasks.record({t.id: 0.5 for t in tasks})
    return tasks


RATES = {"tool_1": 0.1, "tool_5": 0.5, "tool_7": 0.9}


def aimed(tasks, rates=RATES, seed=0, **own):
    config = config_of("frontier", memory=1.0, **own)
    config.seed = seed
    strategy, lab = build.strategy(config), Lab(config, tasks)
    strategy.observe(0, evidence(rates))
    assert strategy.evolve(4, lab).added == 16
    return lab.places


def test_a_skill_with_many_live_tasks_leaves_its_places_to_the_others():
    spread, narrow = aimed(live("tool_5", 40)), aimed(live("tool_5", 40), diminishing=0.0)
    assert spread["tool_5"] == 0 and spread.total() == 40 and abs(spread["tool_1"] - spread["tool_7"]) <= 8
    assert narrow == {"tool_5": 40}
    fresh = aimed(live("tool_5", 1))
    assert min(fresh.values()) >= 5 and fresh["tool_5"] == max(fresh.values())


def test_draws_of_the_rates_differ_by_seed_and_their_means_do_not():
    rates = {f"tool_{i}": 0.8 for i in range(6)}
    for thompson, kinds in ((True, 3), (False, 1)):
        places = [aimed(live("tool_7", 1), rates, seed, thompson=thompson) for seed in range(3)]
        assert len({tuple(sorted(p.items())) for p in places}) == kinds
        assert all(p["tool_7"] > 0 for p in places)  # nobody has tried it


@pytest.mark.parametrize("memory", [1.0, 0.95])
def test_a_hopeless_skill_is_neither_chased_nor_forgotten(memory):
    chased = {}
    for floor in (0.02, 0.0):
        config = config_of("frontier", memory=memory, floor=floor)
        strategy, lab = build.strategy(config), Lab(config, live("tool_1", 1))
        failures = [a_group(a_task("tool_1 0", "tool_1"), 0, 12)]
        strategy.observe(0, [*failures, *evidence({"tool_5": 0.5}, 2)])
        for step in range(1, 4):
            strategy.observe(step, [])  # the counts fade, and twelve failures stay twelve
        assert strategy.to_json()["failed"] == {"tool_1": 12} | (
            {"tool_5": n} if (n := strategy.to_json()["failed"].get("tool_5")) else {}
        )
        strategy.evolve(4, lab)
        chased[floor] = lab.places["tool_1"]
    assert 0 < chased[0.02] < 0.7 * chased[0.0]


def test_drafts_that_half_of_the_rollouts_solve_come_first_and_all_of_them_teach():
    config = config_of("frontier", memory=1.0)
    strategy = build.strategy(config)
    strategy.observe(0, evidence(RATES))
    before = strategy.to_json()["skills"]
    lab = Lab(config, live("tool_5", 2), rates=(0.0, 0.25, 1.0, 0.5, 0.0))  # 8 of each but 16 of zero
    stats = strategy.evolve(4, lab)
    solved = Counter(t.lineage.solved for t in lab.tasks if t.lineage.kind == "signal")
    assert solved == {0.5: 8, 0.25: 8} and stats.added == 16 and stats.refused["not_adopted"] == 24
    after = strategy.to_json()["skills"]
    gained = {a: n - before.get(a, (0, 0))[0] for a, (n, _) in after.items()}
    assert min(gained[c.must[0]] for c in lab.asked) > 0  # probes of refused drafts count too
    scarce = Lab(config, live("tool_5", 2), rates=(0.0, 0.0, 0.0, 0.0, 0.5))
    assert build.strategy(config).evolve(4, scarce).added == 16  # never solved, where places are left
    blind = config_of("frontier", probe=0)
    lab = Lab(blind, live("tool_5", 2))
    assert build.strategy(blind).evolve(4, lab).added == 16 and not lab.probed and len(lab.asked) == 16


def test_batches_follow_the_variance_of_the_tasks_unless_told_otherwise():
    tasks = live("tool_5", 20)
    tasks.record({t.id: 1.0 for t in list(tasks)[:10]})
    drawn = {}
    for odds in (True, False):
        strategy, seen = build.strategy(config_of("frontier", odds=odds)), Counter()
        for step in range(40):
            roll = lambda batch, k, **how: [a_group(t, 1, 2) for t in batch[:4]]
            seen.update(tasks.records[g.task.id].last_score for g in strategy.collect(step, tasks, roll))
        drawn[odds] = seen[0.5] / seen.total()
    assert drawn[True] > 0.6 > 0.55 > drawn[False]


def test_a_level_is_part_of_a_skill_and_its_tasks_are_made_there():
    scenarios = [Task(f"s{i}", "made_up", {"id": i, "level": i % 2}) for i in range(6)]
    config = config_of("frontier", memory=1.0, level="level", probe=0)
    strategy, tasks = build.strategy(config), TaskPool()
    strategy.observe(
        0, [a_group(a_task(f"{i}", "tool_1", level=i % 2), 9 if i % 2 else 5) for i in range(40)]
    )
    assert strategy.to_json()["skills"] == {"0|tool_1": [200, 100], "1|tool_1": [200, 20]}
    tasks.add([a_task(f"known {level}", "tool_1", level=level) for level in range(2)])
    tasks.record({t.id: 1.0 for t in tasks})
    lab = Lab(config, tasks, scenarios=scenarios)
    strategy.evolve(4, lab)
    levels = Counter(c.task.scenario["level"] for c in lab.asked)
    assert levels[0] > levels[1] > 0 and {c.must for c in lab.asked} == {("tool_1",)}
    assert {(c.signal, c.task.scenario["level"]) for c in lab.asked} == {("frontier 0", 0), ("frontier 1", 1)}


def test_first_sight_counts_and_the_state_is_json():
    config = config_of("frontier")
    strategy, group = build.strategy(config), a_group(a_task("t", "tool_1"), 4)
    assert strategy.observe(0, [group]).counts["frontier"] == 6
    again = frontier.make(config, json.loads(json.dumps(strategy.to_json())))
    assert again.observe(1, [group]).counts["frontier"] == 0
    assert again.to_json()["skills"]["tool_1"] == pytest.approx([9.5, 5.7])
    with pytest.raises(ValueError, match="config.strategy.probe is -1: it must be 0 or more"):
        build.strategy(config_of("frontier", probe=-1))


def test_a_visit_whose_rollouts_are_all_lost_is_no_first_sight():
    strategy, group = build.strategy(config_of("frontier")), a_group(a_task("t", "tool_1"), 4)
    lost = Outcome(0.0, False, valid=False)
    gone = Group(group.task, tuple(dataclasses.replace(t, outcome=lost) for t in group.trajectories))
    assert strategy.observe(0, [gone]).counts["frontier"] == 0
    assert strategy.observe(1, [group]).counts["frontier"] == 6
    assert strategy.observe(2, [group]).counts["frontier"] == 0


def test_a_draft_counts_as_the_part_of_a_task_that_is_taken_of_it():
    """D_t takes 16 of 40 drafts, so a place adds 0.4 tasks to those that a skill has."""
    config, tasks = config_of("frontier", memory=1.0, thompson=False), live("tool_5", 1)
    strategy, lab = build.strategy(config), Lab(config, tasks)
    strategy.observe(0, evidence(RATES))
    posterior = beta(strategy.to_json()["skills"], 4.0)
    worth = variance_of({a: own[0] / sum(own) for a, own in posterior.items()}, {}, 0.02)
    places = lambda size: Counter(allocate(lambda: worth, unsettled(tasks, ""), 40, 3.0, size))
    expected = places(16 / 40)
    strategy.evolve(4, lab)
    assert lab.places == expected != places(1.0)


def test_without_reference_calls_the_tools_on_offer_are_the_skills():
    config, tasks = config_of("frontier"), TaskPool()
    tasks.add([a_task(f"t{i}") for i in range(24)])
    strategy, lab = build.strategy(config), Lab(config, tasks)
    strategy.observe(0, [a_group(t, 5) for t in tasks])
    assert strategy.evolve(4, lab).added == 16
    assert set(lab.places) == {f"tool_{i}" for i in range(8)}


# The panel


class OneCall(Lab):
    """Makes tasks of one call. The policy solves unseen ones as often as `rates` says of their tool."""

    def synthesize(self, contexts, *, into=None, wanted, kind, step, **how):
        self.asked += contexts if kind == "signal" else []
        scenarios = {c.task.id for c in contexts}
        self.where = {**getattr(self, "where", {}), kind: scenarios}
        new = [a_task(f"{kind}-{step}-{i}", c.must[0]) for i, c in enumerate(contexts[:wanted])]
        added = sum(refusal is None for refusal in (self.tasks if into is None else into).add(new))
        return SynthesisStats(proposed=len(new), accepted=len(new), added=added)

    def probe(self, tasks, k, step):
        self.probed = True
        self.seen = getattr(self, "seen", []) + [t.id for t in tasks]
        return [a_group(t, round(self.rates[t.calls[0].name] * 10), 10) for t in tasks]


SCENARIOS = tuple(Task(f"scenario_{i}", "made_up", {"id": i}) for i in range(8))


def share_of_the_learned(name, **own):
    """Places of tool_3 among ten, after it is always solved in training and seldom on unseen tasks."""
    config = config_of(name, **own)
    config.evolution.tasks = 10
    strategy, tasks = build.strategy(config), TaskPool()
    tasks.add([a_task(f"initial-0-{i}", f"tool_{i}") for i in range(8)])
    lab = OneCall(config, tasks, rates={f"tool_{i}": 0.3 for i in range(8)}, scenarios=SCENARIOS)
    strategy.evolve(4, lab)
    for step in range(5, 10):  # all other skills stay at a half
        groups = [a_group(a_task(f"{step} {i}", f"tool_{i}"), 10 if i == 3 else 5) for i in range(8)]
        strategy.observe(step, groups)
    lab.asked.clear()
    strategy = (panel if name == "panel" else frontier).make(
        config, json.loads(json.dumps(strategy.to_json()))
    )
    assert strategy.evolve(9, lab).added == 10
    return lab.places["tool_3"], lab


def test_a_skill_that_is_solved_by_heart_keeps_its_places():
    kept, lab = share_of_the_learned("panel")
    assert kept >= 1
    assert share_of_the_learned("frontier", first_sight=0, probe=0, thompson=False, memory=1.0)[0] == 0
    # Scenarios are set apart for the panel, and no task of the panel is ever one of D_t.
    assert lab.where["panel"] and not lab.where["panel"] & lab.where["signal"]
    assert all(id.startswith("panel") for id in lab.seen) and len(lab.seen) == 16
    assert not any(t.id.startswith("panel") for t in lab.tasks)


def test_a_task_of_the_panel_is_never_trained_on_where_there_is_one_scenario():
    class Same(OneCall):
        """Where it grows, it makes the tasks of the panel again."""

        def synthesize(self, contexts, *, into=None, kind, admit=None, **how):
            if kind == "panel":
                made = super().synthesize(contexts, into=into, kind=kind, **how)
                self.made = list(into)
                return made
            new = [dataclasses.replace(t, id=f"again {t.id}") for t in self.made]
            self.refused = [v.reason for v in admit(new)]
            return SynthesisStats()

    config, tasks = config_of("panel"), TaskPool()
    tasks.add([a_task(f"initial-0-{i}", f"tool_{i}") for i in range(8)])
    rates = {f"tool_{i}": 0.3 for i in range(8)}
    lab = Same(config, tasks, rates=rates, scenarios=SCENARIOS[:1])
    build.strategy(config).evolve(4, lab)
    assert lab.made and lab.refused == ["duplicate"] * len(lab.made)


@pytest.mark.parametrize("apart", [0.0, 1.0])
def test_a_panel_of_no_scenario_or_of_all_is_refused(apart):
    with pytest.raises(ValueError, match=f"config.strategy.apart is {apart}: it must be above 0 and below 1"):
        build.strategy(config_of("panel", apart=apart))


def test_the_gain_of_a_skill_that_nothing_trained_says_nothing_of_the_others():
    before = {"a": (4.0, 3.0), "b": (4.0, 3.0), **{f"x{i}": (4.0, 2.0) for i in range(8)}}
    after = {**before, "a": (4.0, 1.0), "b": (4.0, 2.0)}
    visits = dict.fromkeys(before, 20)
    same, unseen = panel.progress([before, before], visits, 0.0, 8.0, 1.0), dict(visits, b=0)
    assert set(same.values()) == {1.0}
    found = panel.progress([before, after], unseen, 0.0, 8.0, 1.0)
    still = panel.progress([before, dict(after, b=before["b"])], unseen, 0.0, 8.0, 1.0)
    assert found == pytest.approx(still) and found["a"] > found["b"] > found["x0"]


def test_a_rise_of_all_skills_is_no_progress_of_one_that_fell():
    before = {f"x{i}": (4.0, 3.0) for i in range(9)} | {"fell": (4.0, 2.0)}
    after = {f"x{i}": (4.0, 1.0) for i in range(9)} | {"fell": (4.0, 3.0)}
    factor = panel.progress([before, after], dict.fromkeys(before, 8), 4.0, 0.0, 1.0)
    assert factor["x0"] > factor["fell"] == 1.0


def test_learning_progress_is_counted_by_visit_and_raises_the_worth():
    before = dict.fromkeys("abc", (20.0, 10.0))
    after = {"a": (20.0, 2.0), "b": (20.0, 2.0), "c": (20.0, 14.0)}
    factor = panel.progress([before, after], {"a": 4, "b": 40, "c": 4}, 0.0, 0.0, 1.0)
    assert factor["a"] > factor["b"] > factor["c"] == 1.0  # forgetting is no progress
    gain = (19 / 22 - 11 / 22) / 4, (19 / 22 - 11 / 22) / 40, (7 / 22 - 11 / 22) / 4
    assert factor["a"] == pytest.approx(1 + gain[0] / (sum(map(abs, gain)) / 3))
    unsure = panel.progress([before, after], {"a": 4, "b": 40, "c": 4}, 0.0, 1e9, 1.0)
    assert max(unsure.values()) - min(unsure.values()) < 1e-6  # all are the mean of all
    assert set(panel.progress([before, after], {}, 0.0, 8.0, 0.0).values()) == {1.0}
    assert panel.progress([after], {}, 0.0, 8.0, 1.0) == {}
    assert panel.pooled([before, {"a": (1.0, 1.0), "z": (2.0, 0.0)}])["a"] == (21.0, 11.0)


def test_visits_are_counted_from_one_round_of_the_panel_to_the_next():
    config, tasks = config_of("panel"), TaskPool()
    tasks.add([a_task(f"initial-0-{i}", f"tool_{i}") for i in range(8)])
    strategy = build.strategy(config)
    lab = OneCall(config, tasks, rates={f"tool_{i}": 0.4 for i in range(8)}, scenarios=SCENARIOS)
    for step in (4, 9, 14):
        strategy.observe(step, [a_group(a_task(f"{step}", "tool_2"), 5)])
        assert strategy.to_json()["visits"] == {"tool_2": 1}
        strategy.evolve(step, lab)


def test_progress_on_unseen_tasks_draws_places():
    places = {}
    for kappa in (0.0, 4.0):
        config = config_of("panel", kappa=kappa, floor=0.0)
        strategy, tasks = build.strategy(config), TaskPool()
        tasks.add([a_task(f"initial-0-{i}", f"tool_{i}") for i in range(8)])
        lab = OneCall(config, tasks, rates={f"tool_{i}": 0.4 for i in range(8)}, scenarios=SCENARIOS)
        strategy.evolve(4, lab)
        lab.asked.clear()
        strategy.observe(5, [a_group(a_task(f"{i} {n}", f"tool_{i}"), 5) for i in range(8) for n in range(9)])
        lab.rates = {**lab.rates, "tool_2": 0.6}
        strategy.evolve(9, lab)
        places[kappa] = lab.places["tool_2"]
    assert places[4.0] > places[0.0] > 0


def test_tasks_of_mastered_skills_alone_are_drawn_seldom():
    drawn = {}
    for mastered in (0.9, 1.0):
        strategy, seen = build.strategy(config_of("panel", mastered=mastered)), Counter()
        strategy._rounds = [{"tool_1": (400.0, 0.0), "tool_2": (400.0, 200.0)}]
        tasks = live("tool_1", 20)
        tasks.add([a_task(f"both {i}", "tool_1", "tool_2") for i in range(20)])
        tasks.record({t.id: 0.5 for t in tasks})
        for step in range(30):
            roll = lambda batch, k, **how: [a_group(t, 1, 2) for t in batch[:4]]
            seen.update(len(g.task.calls) for g in strategy.collect(step, tasks, roll))
        drawn[mastered] = seen[1] / seen.total()
    assert drawn[0.9] < 0.4 < drawn[1.0]


def test_tasks_without_reference_calls_are_not_mastered():
    strategy, seen = build.strategy(config_of("panel")), Counter()
    strategy._rounds = [{"tool_1": (400.0, 200.0)}]
    tasks = live("tool_1", 20)
    tasks.add([a_task(f"bare {i}") for i in range(20)])
    tasks.record({t.id: 0.5 for t in tasks})
    for step in range(30):
        roll = lambda batch, k, **how: [a_group(t, 1, 2) for t in batch[:4]]
        seen.update(len(g.task.calls) for g in strategy.collect(step, tasks, roll))
    assert 0.4 < seen[0] / seen.total() < 0.6
