"""Variants of tasks: the contexts that ask for them, and what the real environment makes of them."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from coevolve_jax import build
from coevolve_jax import config as configs
from coevolve_jax.envs import bfcl
from coevolve_jax.explorers.evidence import signature
from coevolve_jax.loop.lab import Laboratory
from coevolve_jax.strategies.growth import draft
from coevolve_jax.synthesis.explore import offered_names, unguided
from coevolve_jax.synthesis.leakage import LeakGuard
from coevolve_jax.synthesis.pipeline import SynthesisRequest, Synthesizer
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.synthesis.validate import Verdict
from coevolve_jax.synthesis.variants import OPERATORS, elsewhere, possible, variant
from coevolve_jax.types import Call, Task, Turn
from tests.support.paths import ROOT

CONFIG = configs.load_file(ROOT / "configs" / "bfcl_tiny.py")
A, B, C = (Call(name, {"x": 1}) for name in "abc")
TASK = Task("t", "made_up", {"id": 0}, (Turn("do it", (A, B)), Turn("and", (C,))))
SCENES = [Task(f"s{i}", "made_up", {"id": i}) for i in range(3)]


def made(operator, seed=0):
    return variant(TASK, operator, np.random.default_rng(seed), f"{operator}/{seed}", SCENES[1:])


def test_the_plans_of_variants():
    dropped = [made("drop_call", seed) for seed in range(30)]
    assert {"".join(call.name for call in c.plan) for c in dropped} == {"bc", "ac", "ab"}
    assert {c.calls for c in dropped} == {(2, 2)}
    assert (made("add_call").plan, made("add_call").calls) == ((A, B, C), (4, 4))
    assert (made("other_arguments").plan, made("other_arguments").calls) == (("a", "b", "c"), (3, 3))
    turn = made("new_turn")
    assert (turn.plan, turn.calls, turn.turns) == ((A, B, C), (4, 4), 3)
    scenes = {made("other_scene", seed).task.id for seed in range(30)}
    assert scenes == {"s1", "s2"} and made("other_scene").plan == ("a", "b", "c")
    assert {made(o).signal for o in OPERATORS} == set(OPERATORS)
    single = Task("one", "made_up", {}, (Turn("do it", (A,)),))
    with pytest.raises(ValueError, match="Task one has 1 call, so none can be dropped"):
        variant(single, "drop_call", np.random.default_rng(0), "c")
    with pytest.raises(ValueError, match="No other scenario offers the tools of task t: use another op"):
        variant(TASK, "other_scene", np.random.default_rng(0), "c")
    with pytest.raises(ValueError, match="no operator 'deeper': use one of drop_call"):
        made("deeper")


def test_a_variant_is_possible_if_its_calls_are_as_many_as_a_task_may_have():
    found = lambda *limits: {o for o in OPERATORS if possible(TASK, o, *limits, SCENES)}
    assert found(2, 6, 3) == set(OPERATORS)
    assert found(3, 6, 3) == set(OPERATORS) - {"drop_call"}
    assert found(2, 3, 3) == set(OPERATORS) - {"add_call", "new_turn"}
    assert found(2, 6, 2) == found(2, 6, 1) == set(OPERATORS) - {"new_turn"}  # it has two turns
    assert not possible(TASK, "other_scene", 2, 6, 3) and possible(TASK, "add_call", 2, 6, 3)


def test_another_scene_offers_all_tools_of_the_task():
    found = lambda *offered: [s.id for s in elsewhere(TASK, SCENES, offered)]
    assert found("abc", "abcd", "ab") == ["s1"]  # s0 is its own
    assert found("abc", "bc", "") == []


@pytest.fixture(scope="module")
def world():
    c = configs.override(CONFIG, {"evolution.rounds": 2, "evolution.steps": 8, "environment.workers": 1})
    with build.env_pool(c) as pool:
        yield Synthesizer(build.explorer(c), bfcl.tools, pool, c, None), build.scenarios(c)


def test_variants_of_real_tasks_are_what_their_operator_says(world):
    synthesizer, scenarios = world
    parents, rng = TaskPool(), np.random.default_rng(0)
    how = dict(step=3, rng=rng)
    synthesizer.synthesize_unguided(parents, scenarios, SynthesisRequest(wanted=16, kind="initial", **how))
    parents = [t for t in parents if 2 < len(t.calls) < 6]
    came, kept = {}, Counter()
    offered = [offered_names(synthesizer.tools(s)) for s in scenarios]
    for operator in OPERATORS:
        places = {p.id: elsewhere(p, scenarios, offered) for p in parents}
        able = [p for p in parents if operator != "other_scene" or places[p.id]]
        contexts = [variant(p, operator, rng, f"{operator}/{p.id}", places[p.id]) for p in able]
        pool, request = TaskPool(), SynthesisRequest(wanted=99, kind=operator, once=True, **how)
        stats = synthesizer.synthesize(pool, contexts, request)
        assert stats.contexts == len(contexts) and stats.added == len(pool) == len(stats.productive)
        came[operator] = len(pool)
        plans = {c.id: c.plan for c in contexts}
        for task in pool:
            parent = next(p for p in parents if task.lineage.context == f"{operator}/{p.id}")
            calls, before = [signature(c) for c in task.calls], [signature(c) for c in parent.calls]
            more = {"drop_call": -1, "add_call": 1, "new_turn": 1}.get(operator, 0)
            assert len(calls) == len(before) + more and task.lineage.parent == parent.id
            if operator == "new_turn":
                assert len(task.turns) == min(len(parent.turns) + 1, 3)
            if operator == "other_scene":
                assert task.scenario != parent.scenario
            if more == 1:
                kept[operator] += calls[: len(before)] == before
            if operator.startswith("other"):
                kept[operator] += task.actions == parent.actions
            if operator == "drop_call":
                assert calls == [signature(c) for c in plans[task.lineage.context]]
    # The exception: a plan that no round could follow to its end, so that other steps stand in. Another
    # scenario may lack what the calls need.
    least = {"add_call": 0.75, "other_arguments": 0.75, "other_scene": 0.5, "new_turn": 0.75}
    assert all(kept[o] >= share * came[o] for o, share in least.items()), (kept, came)
    assert min(came.values()) >= 3 and sum(came.values()) >= len(parents)


def test_drafts_of_one_step_have_ids_of_their_own_and_a_leak_is_never_probed(world):
    synthesizer, scenarios = world
    lab = Laboratory(TaskPool(), scenarios, synthesizer, None, Counter())
    rng = np.random.default_rng(1)
    contexts = [unguided(s, f"c{i}") for i, s in enumerate(scenarios[:8])]
    (first, one), (second, two) = (draft(lab, contexts, step=5, rng=rng) for _ in range(2))
    ids = [t.id for t in (*first, *second)]
    assert len(set(ids)) == len(ids) == one.added + two.added > 8 and len(lab.tasks) == 0
    assert {t.lineage.kind for t in first} == {"draft"} and lab.ledger["tasks_added/draft"] == len(ids)
    best = list(second)[:3]
    adopted = lab.adopt(best, kind="signal", solved={best[0].id: 0.25})
    assert [t.id for t in lab.tasks] == [t.id for t in best] and adopted.added == 3
    assert [t.lineage.solved for t in lab.tasks] == [0.25, None, None]
    assert {t.lineage.kind for t in lab.tasks} == {"signal"} and lab.ledger["tasks_added/signal"] == 3
    told = two.adopting(adopted, lab.tasks)
    assert (told.added, told.refused["not_adopted"]) == (3, two.added - 3)
    named = [p["task"] for row in told.explored for p in row["proposals"] if p["task"]]
    assert sorted(named) == sorted(t.id for t in best)
    assert lab.adopt(best[:1], kind="signal").refused == {"duplicate": 1}

    guard = LeakGuard(list(first)[:4], 0.95)
    guarded = dataclasses.replace(synthesizer, guard=guard)
    seen = []

    def admit(tasks):
        seen.extend(t.id for t in tasks)
        return [Verdict(None, 0.5)] * len(tasks)

    again = dataclasses.replace(lab, synthesizer=guarded, tasks=TaskPool(), ledger=Counter())
    stats = again.synthesize(
        contexts, wanted=99, kind="draft", step=5, rng=np.random.default_rng(1), once=True, admit=admit
    )
    leaks = stats.refused["near_evaluation"]
    assert leaks >= 4 and not {t.id for t in first if guard.check(t)} & set(seen)
    assert len(seen) >= stats.added == len(again.tasks)
