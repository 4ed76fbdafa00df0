"""The functions that strategies share: odds, agreement of endings, messages, and needs that are refused."""

import dataclasses
import types
from collections import Counter

import numpy as np
import pytest

from coevolve_jax import config as configs
from coevolve_jax.strategies.base import check_least, must_be
from coevolve_jax.strategies.batches import by_variance, category, collect_batch
from coevolve_jax.strategies.groups import majority, solve_rate, spans
from coevolve_jax.strategies.growth import (
    actions_on_offer,
    adopt_first,
    goal_set,
    offering,
    propose,
    set_apart,
    synthesize_for_tools,
    synthesize_in_turn,
    unseen,
)
from coevolve_jax.synthesis.explore import unguided
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.testing.made_up import MadeUpLab, MadeUpRoll, made_up_rollout, made_up_task
from coevolve_jax.types import Group, Outcome, Task
from tests.support.paths import ROOT

CONFIG = configs.load_file(ROOT / "configs" / "bfcl_tiny.py")


def pool(count, kind="initial"):
    tasks, rng = TaskPool(), np.random.default_rng(0)
    tasks.add([made_up_task(f"{kind}-0-{i}", rng, kind) for i in range(count)])
    return tasks


def test_the_odds_of_a_method_decide_its_batches_and_odds_of_zero_retire_a_task():
    config = configs.override(CONFIG, {"rollout.tasks_per_step": 4, "rollout.group_size": 2})
    tasks, drawn = pool(12), Counter()
    weights = lambda d_t: np.array([0, 8.0, *[1.0] * (len(d_t) - 2)])
    for step in range(300):
        groups = collect_batch(config, step, tasks, MadeUpRoll(config, step), weights=weights)
        drawn.update(g.task.id for g in groups)
    assert drawn["initial-0-0"] == 0
    others = [drawn[f"initial-0-{i}"] for i in range(2, 12)]
    assert drawn["initial-0-1"] > 2 * max(others) and min(others) > 0.5 * max(others)


def test_the_share_of_new_tasks_may_be_the_methods_own():
    config = configs.override(CONFIG, {"rollout.tasks_per_step": 8, "rollout.group_size": 1})
    tasks = pool(20)
    tasks.add(list(pool(8, "signal")))
    for share, least in ((0.5, 4), (1.0, 8)):
        groups = collect_batch(config, 1, tasks, MadeUpRoll(config, 1), min_evolved_share=share)
        assert sum(g.task.lineage.kind == "signal" for g in groups) >= least


def group(*rows):
    """A group of rollouts, each of (ending, stop, valid)."""
    task = made_up_task("t", np.random.default_rng(0))
    made = made_up_rollout(np.random.default_rng(0), task, 0, 0)
    return Group(
        task,
        tuple(
            dataclasses.replace(
                made, rollout_index=i, ending=ending, stop=stop, outcome=Outcome(0.0, False, valid)
            )
            for i, (ending, stop, valid) in enumerate(rows)
        ),
    )


def test_the_majority_is_found_without_the_reference():
    done = lambda ending, valid=True: (ending, "done", valid)
    assert majority(group(done("a"), done("b"), done("a"))) == (2 / 3, "a", [True, False, True])
    # A rollout that a limit cut agrees with nobody, and an invalid one is not there.
    cut = group(done("a"), ("a", "step_limit", True), done("b", False), done("c"))
    assert majority(cut) == (1 / 3, "a", [True, False, False])
    assert majority(group(("a", "token_limit", True))) == (0.0, "", [False])
    assert majority(group(done("", True), done("a"))) == (0.5, "a", [False, True])
    assert majority(group(done("a", False))) == (0.0, "", [])
    assert solve_rate(group(done("a", False))) is None


def test_spans_are_the_runs_of_the_mask():
    made = made_up_rollout(np.random.default_rng(0), made_up_task("t", np.random.default_rng(0)), 0, 0)
    for row in ("0110111", "1", "000", "1101", ""):
        t = dataclasses.replace(made, mask=np.array([c == "1" for c in row], bool))
        expected, start = [], None
        for i, c in enumerate(row + "0"):
            if c == "1" and start is None:
                start = i
            elif c == "0" and start is not None:
                expected.append(slice(start, i))
                start = None
        assert spans(t) == expected


def test_a_pattern_of_the_familys_own_is_offered_anywhere_and_a_tool_where_it_is_listed():
    lab = MadeUpLab(CONFIG, pool(3))
    assert list(map(len, offering(lab, ["tool_1", "go north"]).values())) == [3, 0]
    named = dataclasses.replace(
        made_up_task("n", np.random.default_rng(9)), id="n", scenario={"n": 1}, patterns=("go north",)
    )
    lab.tasks.add([named])
    assert len(offering(lab, ["go north"])["go north"]) == 3
    assert len(offering(lab, ["go north"], lab.scenarios[:1])["go north"]) == 1


def test_actions_on_offer_are_the_tools_or_the_familys_own_patterns():
    lab = MadeUpLab(CONFIG, pool(3))
    assert actions_on_offer(lab) == [f"tool_{i}" for i in range(8)]
    own = dataclasses.replace(list(pool(1))[0], id="n", scenario={"n": 1}, patterns=("go north", "go east"))
    lab.tasks.add([own])
    assert {"go east", "go north"} <= set(actions_on_offer(lab))


@pytest.mark.parametrize("own_patterns", [False, True])
def test_where_no_task_has_calls_the_family_says_whether_a_tool_can_be_required(own_patterns):
    """A required call to a tool could never be met where actions are called otherwise."""
    asked = []

    class Heard(MadeUpLab):
        def synthesize(self, contexts, *, relocate=None, **how):
            asked.append([*contexts, *map(relocate, contexts)])
            return super().synthesize(contexts, **how)

    tasks = TaskPool()
    tasks.add([task.without_calls() for task in pool(3)])
    lab = Heard(CONFIG, tasks, own_patterns=own_patterns)
    assert len(offering(lab, ["go north"])["go north"]) == 3 * own_patterns
    how = {"wanted": 2, "kind": "even", "step": 0, "rng": np.random.default_rng(0)}
    assert synthesize_for_tools(lab, ["tool_1", "tool_2"], "even", **how).added == 2
    named = dataclasses.replace(list(pool(1))[0], id="n", scenario={"n": 1}, patterns=("go north",))
    lab.tasks.add([named])
    synthesize_for_tools(lab, ["go north"], "even", **how)
    unknown, known = ([c.must for c in contexts] for contexts in asked)
    assert unknown == ([()] * 4 if own_patterns else [("tool_1",), ("tool_2",)] * 2)
    assert known == [("go north",)] * 2


def test_scenarios_set_apart_are_a_part_that_the_seed_alone_decides():
    places = tuple(Task(f"s{i}", "made_up", {"id": i}) for i in range(40))
    split = lambda seed, n: set_apart(
        configs.override(CONFIG, {"seed": seed}), MadeUpLab(CONFIG, pool(1), places[:n])
    )
    others, apart = split(0, 40)
    assert len(apart) == 10 and {t.id for t in (*others, *apart)} == {t.id for t in places}
    assert not {t.id for t in others} & {t.id for t in apart}
    assert split(0, 40) == (others, apart) != split(1, 40)
    assert split(0, 1) == ([places[0]], [places[0]]) and [len(part) for part in split(0, 2)] == [1, 1]


def test_a_category_is_made_of_sizes_and_keys_of_the_scenario():
    task = dataclasses.replace(
        made_up_task("t", np.random.default_rng(0)), scenario={"level": 2, "home": "x"}
    )
    count = len(task.calls)
    assert category(task, "calls") == str(count) and category(task, "turns") == "1"
    assert category(task, "level,home,calls") == f"2/x/{count}"
    with pytest.raises(
        ValueError, match="'toolset' is no key .* task t: use calls, turns, or one of home, l"
    ):
        category(task, "level,toolset")


def test_contexts_in_turn_are_explored_once_and_later_ones_only_make_up():
    class Lab(MadeUpLab):
        asked = []

        def synthesize(self, contexts, **how):
            assert how["once"] and how["wanted"] == len(contexts)
            self.asked.append([c.id for c in contexts])
            return super().synthesize([c for c in contexts if c.id not in barren], **how)

    contexts = [unguided(MadeUpLab.scenarios[0], str(i)) for i in range(10)]
    how = dict(kind="signal", step=4, rng=np.random.default_rng(0))
    for barren, asked in (
        ({"1", "4"}, [["0", "1", "2", "3"], ["4"], ["5"]]),
        (set(map(str, range(10))), [["0", "1", "2", "3"], ["4", "5", "6", "7"], ["8", "9"]]),
    ):
        lab = Lab(CONFIG, pool(1))
        lab.asked = []
        stats = synthesize_in_turn(lab, contexts, wanted=4, **how)
        assert lab.asked == asked and stats.added == len(lab.tasks) - 1 == (4 if len(barren) == 2 else 0)


def test_a_bad_setting_is_refused_in_one_sentence():
    must_be(CONFIG, "probe", True, "0 or more")
    with pytest.raises(ValueError, match=r"^config\.strategy\.probe is 0: it must be above 0\.$"):
        must_be(CONFIG, "probe", False, "above 0")


@pytest.mark.parametrize(
    "need, key, value, why",
    [
        ("fresh", "rollout.max_staleness", 1, "draws each batch by what it learned"),
        ("help", "rollout.max_staleness", 1, "gives hints by what it learned"),
        ("probe", "evolution.async_steps", 1, "asks for rollouts while the training set evolves"),
    ],
)
def test_what_a_method_needs_is_refused_by_name_where_it_is_missing(monkeypatch, need, key, value, why):
    module = types.ModuleType("my_method")
    module.make, module.NEEDS = (lambda config, state=None: None), frozenset({need})
    monkeypatch.setitem(__import__("sys").modules, "my_package", types.ModuleType("my_package"))
    monkeypatch.setitem(__import__("sys").modules, "my_package.my_method", module)
    config = configs.override(CONFIG, {"strategy.name": "my_package.my_method"})
    configs.check(config)
    assert configs.needs(config) == {need}
    with pytest.raises(
        ValueError, match=rf"config\.{key} is {value}: it must be 0: strategy my_package.*{why}"
    ):
        configs.check(configs.override(config, {key: value, "learner.epochs": 1}))
    module.NEEDS = frozenset({"telepathy"})
    with pytest.raises(ValueError, match="names 'telepathy': the services are fresh, probe"):
        configs.check(config)


def test_panel_is_refused_where_batches_are_drawn_ahead():
    """An evolution replaces the rounds by which they are drawn."""
    config = configs.override(CONFIG, {"strategy.name": "panel"})
    configs.check(config)
    with pytest.raises(ValueError, match="max_staleness is 1: it must be 0: strategy panel draws each batch"):
        configs.check(configs.override(config, {"rollout.max_staleness": 1, "learner.epochs": 1}))


def test_a_service_is_needed_only_with_the_setting_that_asks_for_it():
    config = configs.override(CONFIG, {"strategy.name": "socratic", "learner.optimizer_offload": True})
    assert configs.needs(config) == {"ask", "probe", "influence"}
    with pytest.raises(ValueError, match="optimizer_offload is True: it must be False: strategy socratic"):
        configs.check(config)
    config.strategy.influence = False
    assert configs.needs(config) == {"ask"}
    configs.check(config)


def test_tools_of_a_methods_own_need_calls_in_json():
    config = configs.override(CONFIG, {"strategy.name": "sage"})
    configs.check(config)
    with pytest.raises(
        ValueError, match="tool_call_format is 'python': it must be json or llama3: strategy sage"
    ):
        configs.check(configs.override(config, {"rollout.tool_call_format": "python"}))


def test_odds_by_variance_are_those_of_the_config_that_asks_for_them():
    tasks = pool(5)
    tasks.record({f"initial-0-{i}": score for i, score in enumerate((0.0, 0.25, 0.5, 1.0))})
    config = configs.override(CONFIG, {"data.sampling_floor": 0.2})
    assert by_variance(config)(tasks).tolist() == [0.2, 0.75, 1.0, 0.2, 1.0]
    assert config.data.sampling == "uniform"


def test_a_setting_below_its_least_is_refused():
    config = configs.override(CONFIG, {"strategy.name": "blame"})
    check_least(config, {"probe": 0, "memory": 0.95})
    with pytest.raises(ValueError, match=r"config.strategy.memory is 0.95: it must be 1 or more"):
        check_least(config, {"memory": 1})


def test_adopting_goes_on_past_a_refused_draft():
    tasks, new = pool(2), list(pool(5))[2:]
    stats = adopt_first(
        MadeUpLab(CONFIG, tasks), [next(iter(tasks)), *new], 2, kind="mine", solved={new[0].id: 0.5}
    )
    assert (stats.proposed, stats.added) == (3, 2) and len(tasks) == 4
    assert [(t.lineage.kind, t.lineage.solved) for t in list(tasks)[2:]] == [("mine", 0.5), ("mine", None)]


def test_each_setting_of_a_proposer_is_paired_with_its_own_draft():
    lab, rng = MadeUpLab(CONFIG, pool(2)), np.random.default_rng(0)
    drafts, made = propose(lab, [{"calls": n} for n in (6, 2, 4)], "mine", step=3, rng=rng)
    assert [len(t.calls) for t in drafts] == [6, 2, 4] and made.added == 3 and len(lab.tasks) == 2
    assert {t.lineage.signal for t in drafts} == {"mine"}


def test_each_setting_may_have_a_scenario_of_its_own():
    lab, rng = MadeUpLab(CONFIG, pool(2)), np.random.default_rng(0)
    places = [lab.scenarios[i] for i in (2, 0, 2)]
    drafts, _ = propose(lab, [{"calls": 3}] * 3, "mine", step=3, rng=rng, scenarios=places)
    assert [t.lineage.parent for t in drafts] == [s.id for s in places]


def test_a_goal_set_asks_for_different_actions_in_scenarios_set_apart_and_stays_outside():
    places = tuple(Task(f"s{i}", "made_up", {"id": i}) for i in range(8))
    lab = MadeUpLab(CONFIG, pool(3), places)
    goal, stats = goal_set(CONFIG, lab, 5, 0)
    asked = [t.lineage.context.split("/")[-2] for t in goal]
    assert len(goal) == stats.added == 5 == len(set(asked)) and len(lab.tasks) == 3
    assert {t.lineage.parent for t in goal} <= {s.id for s in set_apart(CONFIG, lab)[1]}
    again = Counter(t.lineage.context.split("/")[-2] for t in goal_set(CONFIG, lab, 12, 1)[0])
    assert sorted(again.values()) == [1, 1, 1, 1, 2, 2, 2, 2]


def test_a_duplicate_of_the_pools_is_not_unseen():
    tasks, new = pool(2), list(pool(5))[2:]
    copies = [dataclasses.replace(t, id=f"copy-{t.id}") for t in tasks]
    assert unseen(tasks, [copies[0], *new]) == new and len(tasks) == 2
