"""TTCS: what its solver and its synthesiser are paid for, and that no answer of a query is ever used."""

import dataclasses
import json

import numpy as np
import pytest

from coevolve_jax import build
from coevolve_jax import config as configs
from coevolve_jax.analysis.summary import held_out_lines
from coevolve_jax.comparison.consistency import check_run
from coevolve_jax.loop import initial
from coevolve_jax.loop.collect import describe, without_answers
from coevolve_jax.records.health import diagnose
from coevolve_jax.strategies import ttcs
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.testing.made_up import MadeUpLab, made_up_rollout, made_up_task
from coevolve_jax.train import train
from coevolve_jax.types import QUERY, Call, Group, Lineage, Outcome, Step, Task, Turn
from tests.strategies.test_comparable import settings_of
from tests.strategies.test_strategies import settings

pytestmark = pytest.mark.slow

QUERIES = {"evaluation.queries": 4}


NO_TOOLS = {"toolsets": [], "excluded": []}  # for BFCL's documents of a scenario's tools


def query(n: int, *names: str) -> Task:
    calls = tuple(Call(name, {"x": n}) for name in names)
    scenario = {"id": n, **NO_TOOLS}
    return Task(f"query-0-{n}", "made_up", scenario, (Turn(f"do {n}", calls),), lineage=Lineage(QUERY))


def group(task: Task, agreeing: int, k: int = 8, solved: bool = False) -> Group:
    """k rollouts of which `agreeing` end alike and the others each in another way."""
    made = made_up_rollout(np.random.default_rng(0), task, 0, 0)
    steps = tuple(Step(0, name, Call(name, {"x": 0}), "{}", error=False) for name in ("tool_0", "tool_1"))
    ends = ["alike" if i < agreeing else f"other {i}" for i in range(k)]
    outcome = Outcome(float(solved), solved)
    return Group(
        task,
        tuple(
            dataclasses.replace(made, rollout_index=i, steps=steps, ending=end, stop="done", outcome=outcome)
            for i, end in enumerate(ends)
        ),
    )


def strategy_of(**own):
    changes = {f"strategy.{key}": value for key, value in own.items()}
    return build.strategy(settings_of("ttcs", **QUERIES, **{"evolution.every": 1, "steps": 99}, **changes))


@pytest.mark.parametrize("solved", [False, True])
def test_only_groups_that_half_agree_teach_and_the_majority_is_the_label(solved):
    """The environment's word, whatever it is, changes nothing; that of a variant neither."""
    strategy = strategy_of()
    variant = made_up_task("signal-3-0", np.random.default_rng(0), "signal")
    agreeing = ((query(1), 8), (query(2), 4), (query(3), 1), (variant, 6))
    groups = [group(task, n, solved=solved) for task, n in agreeing]
    samples = strategy.compute_advantages(groups)
    assert {s.trajectory.task_id for s in samples} == {"query-0-2", "signal-3-0"}
    for s in samples:
        alike = s.trajectory.ending == "alike"
        assert (s.advantages > 0).all() if alike else (s.advantages < 0).all()
    found = strategy.observe(0, groups)
    assert (found.counts["queries"], found.counts["in_band"]) == (3, 2)
    assert [r["p_hat"] for r in found.rows if r["kind"] == "agreement"] == [1.0, 0.5, 0.125, 0.75]


def test_queries_come_most_often_and_the_first_tasks_never():
    tasks, rng = TaskPool(), np.random.default_rng(0)
    tasks.add([made_up_task("initial-0-0", rng), query(1), made_up_task("signal-3-0", rng, "signal")])
    assert strategy_of().weights(tasks).tolist() == [0.0, 5.0, 1.0]


def test_a_near_copy_of_its_query_earns_less_than_another_variant_that_divides_as_many():
    own = settings_of("ttcs", **QUERIES).strategy
    source = query(1, "a", "b", "c")
    copy = dataclasses.replace(source, id="draft-1-0")
    apart = Task("draft-1-1", "made_up", {"id": 9}, (Turn("else", (Call("d", {"x": 5}),)),))
    other = Task("draft-1-2", "made_up", {"id": 8}, (Turn("more", (Call("e", {"x": 6}),)),))
    near, far, none = ttcs.earned([group(copy, 4), group(apart, 4), None], [source] * 3, own)
    assert far == pytest.approx(1 - 1 / 2) and near < 0.1 and none == 0
    # One that all rollouts agree on is worth nothing, nor one that has many siblings with its actions.
    settled, divided = ttcs.earned([group(apart, 8), group(other, 4)], [source] * 2, own)
    assert settled == 0 and divided == pytest.approx(1 - 1 / 2)
    twins = [dataclasses.replace(apart, id=f"draft-2-{i}") for i in range(4)]
    assert ttcs.earned([group(t, 4) for t in twins], [source] * 4, own) == [0.0] * 4


class Lab(MadeUpLab):
    """Rollouts of drafts agree by halves if they have one call less than the query, else all of them."""

    def probe(self, tasks, k, step):
        self.probed = True
        return [group(t, k // 2 if t.lineage.signal == "drop_call" else k, k) for t in tasks]


def test_the_synthesiser_learns_which_operator_divides_the_rollouts():
    """A variant starts from what the majority did: the queries themselves have no calls."""
    how = {"evolution.every": 1, "evolution.tasks": 24, "steps": 99, "data.min_calls": 1}
    config = settings_of("ttcs", **QUERIES, **how)
    strategy, tasks = build.strategy(config), TaskPool()
    tasks.add([query(n) for n in range(4)])
    assert strategy.evolve(0, Lab(config, tasks)).added == 0  # nobody has tried a query yet
    strategy.observe(0, [group(query(n), 5) for n in range(4)])
    for step in range(1, 12):
        lab = Lab(config, tasks)
        grown = strategy.evolve(step, lab)
    new = [t for t in tasks if not t.is_query]
    assert {t.lineage.signal for t in new} == {"drop_call"} and grown.added > 0
    assert {t.lineage.parent for t in new} <= {f"query-0-{n}" for n in range(4)}
    shares = dict(strategy.to_json()["knobs"]["operator"])
    assert list(shares) == list(ttcs.OPERATORS)
    assert max(shares, key=shares.get) == "drop_call"
    assert all(t.calls[0].name in ("tool_0", "tool_1") for t in new)


def test_a_variant_whose_rollouts_are_all_lost_teaches_nothing():
    class Lossy(MadeUpLab):
        def probe(self, tasks, k, step):
            def lost(group):
                gone = Outcome(0.0, False, valid=False)
                rollouts = (dataclasses.replace(t, outcome=gone) for t in group.trajectories)
                return dataclasses.replace(group, trajectories=tuple(rollouts))

            return [lost(group(t, k // 2, k)) for t in tasks]

    operators = {"data.min_calls": 1, "data.max_calls": 9, "data.max_turns": 9, "strategy.kl_coef": 0.0}
    config = settings_of("ttcs", **QUERIES, **operators, **{"evolution.every": 1, "steps": 99})
    strategy, tasks = build.strategy(config), TaskPool()
    tasks.add([query(1)])
    strategy.observe(0, [group(query(1), 5)])
    assert strategy.evolve(1, Lossy(config, tasks)).added == 0
    shares = [logit for _, logit in strategy.to_json()["knobs"]["operator"]]
    assert shares == [0.0] * len(ttcs.OPERATORS)


def test_a_variant_is_made_of_a_query_and_of_no_other_variant():
    strategy, variant = strategy_of(), made_up_task("signal-3-0", np.random.default_rng(0), "signal")
    strategy.observe(0, [group(query(1), 5), group(variant, 5)])
    assert list(strategy.to_json()["done"]) == ["query-0-1"]


def test_the_queries_alone_make_no_tasks():
    config = settings_of("ttcs", **QUERIES, **{"evolution.every": 1, "steps": 99, "strategy.variants": False})
    strategy = build.strategy(config)
    strategy.observe(0, [group(query(1), 5)])
    assert strategy.evolve(1, Lab(config, TaskPool())) is None


def test_rollouts_of_a_query_have_no_reward_and_stand_in_no_success_rate():
    known = made_up_task("initial-0-0", np.random.default_rng(0))
    lost = dataclasses.replace(group(query(1), 4).trajectories[0], outcome=Outcome(0.0, False, valid=False))
    asked = group(query(1, "a"), 4, solved=True)
    hidden = without_answers(dataclasses.replace(asked, trajectories=(*asked.trajectories, lost)))
    assert [t.outcome.valid for t in hidden.trajectories] == [True] * 8 + [False]
    assert not any(t.outcome.success or t.outcome.reward or t.outcome.progress for t in hidden.trajectories)
    told = group(known, 4, solved=True)
    assert without_answers(told) is told
    for groups, success in (([told, hidden], 1.0), ([hidden], None)):
        assert describe(groups, 0)["success"] == describe(groups, 0)["reward"] == success
        assert diagnose(groups, [])["zero_variance_groups"] == success
        assert diagnose(groups, [])["success"]["rollouts"] == (8 if success else 0)


def test_a_run_without_queries_or_without_room_for_them_is_refused():
    small = {"rollout.tasks_per_step": 2}
    for few, more in ((0, {}), (1, {}), (4, {"learner.dynamic_sampling": 2})):
        with pytest.raises(ValueError, match=rf"evaluation.queries is {few}: it must be enough for a batch"):
            configs.check(settings_of("ttcs", **small, **more, **{"evaluation.queries": few}))
    full = {**small, "data.initial_tasks": 20, "data.max_tasks": 23}
    with pytest.raises(ValueError, match=r"max_tasks is 23: it must be 0, or room for .*\(20\).*\(4\)"):
        configs.check(settings_of("ttcs", **QUERIES, **full))
    configs.check(settings_of("ttcs", **QUERIES, **{**full, "data.max_tasks": 24}))


def test_only_a_strategy_that_needs_queries_has_them_in_d_t_and_may_come_near_them():
    other = made_up_task("held_out-0-0", np.random.default_rng(0), "held_out")
    other = dataclasses.replace(other, scenario={**other.scenario, **NO_TOOLS})
    held_out = [query(1, "a"), query(2, "b"), other]
    near = dataclasses.replace(query(1, "a"), id="signal-3-0")
    for name, ids in (("ttcs", ["query-0-1", "query-0-2"]), ("static", [])):
        config, tasks = settings_of(name, **QUERIES), TaskPool()
        for _ in range(2):  # once more, as after a kill
            initial.add_queries(config, tasks, held_out)
        assert [t.id for t in tasks] == ids and not any(t.calls for t in tasks)
        if ids:
            with pytest.raises(ValueError, match=r"Query query-0-2 is held out, and D_t .*\(pool_full\)"):
                initial.add_queries(config, TaskPool(1), held_out)
        guard = initial.leak_guard(config, initial.kept_apart(config, held_out))
        assert (guard.check(near) is None) == bool(ids)
        assert initial.leak_guard(config, held_out).check(near) is not None  # as for D_0 and demonstrations
        assert guard.check(dataclasses.replace(other, id="signal-3-1")) is not None


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two real runs on BFCL; in the second one every query has the answer of another."""
    folder, right = tmp_path_factory.mktemp("ttcs"), initial.held_out_tasks
    config = settings("ttcs", **QUERIES, **{"evolution.every": 1, "strategy.probe": 4, "steps": 3})
    train(config, folder / "right")

    def wrong(*given):
        found = right(*given)
        asked = [t for t in found if t.is_query]
        swapped = [
            dataclasses.replace(t, turns=(dataclasses.replace(t.turns[0], calls=o.calls), *t.turns[1:]))
            for t, o in zip(asked, [*asked[1:], asked[0]], strict=True)
        ]
        return [*(t for t in found if not t.is_query), *swapped]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial, "held_out_tasks", wrong)
        train(config, folder / "wrong")
    return folder


@pytest.mark.nightly
def test_wrong_answers_of_the_queries_change_nothing_but_their_evaluation(runs):
    lines = lambda name, file: [json.loads(x) for x in (runs / name / file).read_text().splitlines()]
    timed = lambda row: {k: v for k, v in row.items() if k not in ("seconds", "serving", "memory")}
    own, other = (list(map(timed, lines(name, "metrics.jsonl"))) for name in ("right", "wrong"))
    keys = ("loss", "kl", "grad_norm", "length", "signals", "groups", "success")
    assert [[row.get(k) for k in keys] for row in own] == [[row.get(k) for k in keys] for row in other]
    assert any(row["signals"]["queries"] for row in own)
    tasks = [lines(name, "tasks.jsonl") for name in ("right", "wrong")]
    for task in (t for side in tasks for t in side if t["lineage"]["kind"] == "initial"):
        # Leak control keeps D_0, which nobody draws here, from the queries by their answers too.
        task["lineage"] |= {"similarity": None, "nearest": None}
    assert tasks[0] == tasks[1]
    sets = [{r["set"]: r for r in lines(name, "evaluations.jsonl")} for name in ("right", "wrong")]
    assert sets[0]["iid"] == sets[1]["iid"] and sets[0]["queries"] != sets[1]["queries"]


@pytest.mark.nightly
def test_a_run_on_queries_keeps_their_answers_out_of_d_t_and_reports_their_success(runs):
    workdir = runs / "right"
    lines = lambda file: [json.loads(x) for x in (workdir / file).read_text().splitlines()]
    tasks, held_out = lines("tasks.jsonl"), lines("held_out.jsonl")
    asked = [t for t in tasks if t["lineage"]["kind"] == QUERY]
    assert len(asked) == 4 and not any(turn["calls"] for t in asked for turn in t["turns"])
    assert all(t["record"]["trained"] == 0 for t in tasks if t["lineage"]["kind"] == "initial")
    assert sum(t["record"]["trained"] for t in asked) > 0
    answers = {t["id"]: t for t in held_out if t["lineage"]["kind"] == QUERY}
    assert answers.keys() == {t["id"] for t in asked}
    assert all(t["turns"][0]["calls"] for t in answers.values())
    summary = json.loads((workdir / "summary.json").read_text())
    rows = [r for r in lines("evaluations.jsonl") if r["set"] == "queries"]
    assert summary["queries"] == {"before": rows[0], "after": rows[-1]}
    assert set(rows[0]["by_task"]) == answers.keys()
    gain = 100 * (rows[-1]["success"] - rows[0]["success"])
    told = {name: value for name, value, _ in held_out_lines(summary)}
    assert told["queries, gain"].split()[0] == f"{gain:+.1f}"
    check_run(workdir)
