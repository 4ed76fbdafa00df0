"""Reading a run's files for the report: seconds and fates, costs by role, and the origins of tasks."""

import dataclasses
import json
import tempfile

import numpy as np
import pytest

from coevolve_jax.analysis.costs import by_role, cost_view
from coevolve_jax.analysis.loading import asked_for, fate, load_run
from coevolve_jax.analysis.origins import by_exploration, by_task, origins, packed, refused
from coevolve_jax.analysis.task_map import coordinates
from coevolve_jax.llm.calls import LLMCall
from coevolve_jax.records.llm_calls import Packer, all_lines, whole


def a_run(**files):
    """A run with these files and no others."""
    with tempfile.TemporaryDirectory() as empty:
        return dataclasses.replace(load_run(empty), **files)


# Files


def test_the_seconds_of_a_run_under_way_are_those_of_its_steps():
    """The environment's seconds are part of the rollouts'; "step" is their total."""
    rows = [
        {"seconds": {"rollout": 2.0, "environment": 0.5, "update": 1.0, "step": 3.0}, "evolution": None},
        {"seconds": {"rollout": 1.0, "environment": None, "evolution": 4.0, "step": 5.0}, "evolution": None},
    ]
    assert a_run(rows=rows).seconds == {"rollout": 3.0, "update": 1.0, "evolution": 4.0}
    assert a_run(rows=rows, summary={"seconds": {"rollout": 9.0}}).seconds == {"rollout": 9.0}


def test_the_fate_of_proposals_is_summed_over_evolutions_until_there_is_a_summary():
    made = lambda **refused: {"proposed": 14, "accepted": 8, "retained": 1, "added": 5, "refused": refused}
    rows = [{"seconds": {}, "evolution": e} for e in (made(b=3, a=6), None, made(c=2, a=7))]
    lines = [("proposed", 28), ("passed execution", 16), ("passed in part", 2), ("added", 10)]
    wanted = [*lines, ("refused: a", 13), ("refused: b", 3), ("refused: c", 2)]
    assert a_run(rows=rows).fate == wanted
    told = {"proposed": 9, "accepted": 2, "retained": 1, "refused": {"z": 1, "y": 1, "x": 7}}
    assert a_run(rows=rows, summary={"tasks": told}).fate == fate(told)
    assert [name for name, _ in fate(told)][4:] == ["refused: x", "refused: y", "refused: z"]


@pytest.mark.parametrize("told", [{"added": 5}, {}])
def test_as_many_tasks_are_proposed_as_are_added_and_refused(told):
    """A leak is refused after its execution. What D_t has no room for is not proposed at all."""
    refused = {"near_evaluation": 3, "too_long": 2, "pool_full": 4}
    found = dict(fate({"proposed": 10, "accepted": 8, "retained": 0, "refused": refused, **told}))
    parts = [n for name, n in found.items() if name == "added" or name.startswith("refused")]
    assert found["added"] == 5 and sum(parts) == found["proposed"] == 10
    assert found["not proposed: pool_full"] == 4 and "refused: pool_full" not in found


@pytest.mark.parametrize("signal, kind, told", [("rare", "signal", "rare"), (None, "initial", "initial")])
def test_what_asked_for_a_task(signal, kind, told):
    assert asked_for({"lineage": {"signal": signal, "kind": kind}}) == told


def test_a_log_is_read_to_its_last_whole_line_and_a_broken_one_is_named_by_its_number(tmp_path):
    log = tmp_path / "signals.jsonl"
    log.write_text('{"n": 1}\n{"n": 2}\n{"n": ')
    assert load_run(tmp_path).signals == [{"n": 1}, {"n": 2}]
    log.write_text('{"n": 1}\n{"n": 2}\n')
    assert load_run(tmp_path).signals == [{"n": 1}, {"n": 2}]
    log.write_text('{"n": 1}\n{"n\n{"n": 3}\n')
    with pytest.raises(ValueError, match=r"signals\.jsonl, line 2 is not JSON"):
        load_run(tmp_path)


def test_trajectories_come_in_the_order_of_their_steps_and_other_files_are_none(tmp_path):
    (tmp_path / "trajectories").mkdir()
    for name in ("step_00010.jsonl", "step_00002.jsonl", "step_1a.jsonl", "notes.jsonl"):
        (tmp_path / "trajectories" / name).write_text(json.dumps({"file": name}) + "\n")
    found = load_run(tmp_path).trajectories
    assert found == [(2, [{"file": "step_00002.jsonl"}]), (10, [{"file": "step_00010.jsonl"}])]


# Costs


def spent(role, times, **more):
    counts = {"llm_requests": 1, "llm_tokens_in": 10, "llm_tokens_out": 3, "money": 0.5}
    return {f"{key}/{role}": n * times for key, n in counts.items()} | more


def test_costs_are_those_of_each_role_in_the_order_of_the_work():
    costs = {
        **spent("solve", 1),
        **spent("explore", 2),
        **spent("mine", 4),
        **spent("reflect", 8),
        "money": 9.0,
    }
    found = by_role({**costs, "llm_requests/free": 5})
    assert list(found) == ["reflect", "explore", "solve", "free", "mine"]
    assert found["explore"] == {"requests": 2, "tokens_in": 20, "tokens_out": 6, "money": 1.0}
    assert found["free"] == {"requests": 5, "tokens_in": 0, "tokens_out": 0, "money": 0}


def test_the_budget_ended_at_the_first_question_that_was_not_asked():
    rows = [
        {"step": None, "costs": spent("explore", 1, llm_tokens=13, llm_tokens_in=10, money=0.5)},
        {"step": 4, "costs": spent("reflect", 2, llm_tokens=26, **{"llm_faults/budget": 3})},
        {"step": 9, "costs": {"llm_faults/budget": 7}},
    ]
    view = cost_view(rows, {"explorer": {"budget_tokens": 40, "budget_money": 0.0}})
    assert view["roles"] == ["reflect", "explore"] and view["budget"] == {"tokens": 40, "money": None}
    told = [(r["step"], r["tokens"], r["money"], r["unasked"], list(r["roles"])) for r in view["rows"]]
    assert told == [(None, 13, 0.5, 0, ["explore"]), (4, 26, 0, 3, ["reflect"]), (9, 0, 0, 7, [])]
    assert view["ended"] == 4
    assert cost_view(rows[2:], {})["ended"] == 9 and "ended" not in cost_view(rows[:1], {})
    early = {"step": None, "costs": {"llm_faults/budget": 1}}
    assert cost_view([early], {})["ended"] is None


# Origins


def asked(context, role, round=None, step=None, text="q"):
    about = {"context": context} | ({} if round is None else {"round": round, "step": step})
    return LLMCall(role, about, "You explore.", text, ["{}"])


ONCE = [
    ("reflect",),
    ("explore", 0, 0),
    ("explore", 0, 1),
    ("explore", 1, 0),
    ("explore", 1, 1),
    ("abstract",),
]


def questions(*contexts):
    return list(
        Packer().pack(asked(c, *rest, text=f"{c} {n}") for c in contexts for n, rest in enumerate(ONCE))
    )


def explored(context, *tasks, step=3):
    """A row of explorations.jsonl. tasks: ids, or (reason, verdict) where there is none."""
    rows = [
        {"task": t, "verdict": "accept", "reason": "", "description": ""}
        if isinstance(t, str)
        else {"task": None, "verdict": t[1], "reason": t[0], "description": f"of {t[0]}"}
        for t in tasks
    ]
    return {"step": step, "context": {"id": context, "signal": "rare"}, "proposals": rows}


def test_a_new_time_begins_with_the_first_step_of_the_first_round_only():
    times = by_exploration(questions("c", "d", "c"))
    assert [[row["role"] for row in own] for own in times["c"]] == [
        ["reflect", "explore", "explore", "explore", "explore", "abstract", "reflect"],
        ["explore", "explore", "explore", "explore", "abstract"],
    ]  # calls between two times belong to the first: only a context's own reflection starts the next
    assert len(times["d"]) == 1 and len(times["d"][0]) == len(ONCE)


def test_what_is_behind_tasks_and_behind_what_became_none():
    run = a_run(
        explorations=[
            explored("c", "t1", ("too_short", "discard")),
            explored("none"),
            explored("c", ("duplicate", "refused"), "t2", step=5),
        ],
        llm_calls=questions("first", "c", "vain"),
    )
    # A strategy's own question is behind no task.
    asked = [*run.llm_calls, {**run.llm_calls[0], "role": "grade", "about": {"subject": "t1"}}]
    run = dataclasses.replace(run, llm_calls=asked)
    found = origins(run)
    assert [(o["context"], bool(o["exploration"]), len(o["llm_calls"])) for o in found] == [
        ("c", True, 6), ("c", True, 0), ("none", True, 0), ("first", False, 6), ("vain", False, 6),
    ]  # fmt: skip
    tasks = [
        {"id": id, "lineage": {"context": context}}
        for id, context in (("t1", "c"), ("t2", "c"), ("i1", "first"), ("t3", "c"), ("far", "gone"))
    ]
    places = by_task(tasks, found)
    assert places == {
        "t1": 0,
        "t2": 1,
        "i1": 3,
        "t3": 0,
    }  # no proposal holds t3: its context's first time counts
    rows = refused(found, places)
    assert [(r["id"], r["reason"], r["step"], r["row"], r["proposal"], r["signal"]) for r in rows] == [
        ("c · 1", "too_short", 3, 0, 1, "rare"),
        ("c · 2", "duplicate", 5, 1, 0, "rare"),
        ("none · 1", "no_task_came_of_it", 3, 2, None, "rare"),
        ("vain · 1", "no_task_came_of_it", 0, 4, None, None),
    ]
    assert [r["description"] for r in rows] == ["of too_short", "of duplicate", "", ""]
    assert {r["origin"] for r in rows} == {"refused"}


def test_each_origin_of_the_page_has_the_lines_of_its_own_prompts():
    run = a_run(explorations=[explored("c", "t")], llm_calls=questions("c", "d"))
    lines = all_lines(run.llm_calls)
    for origin, row in zip(origins(run), packed(run, origins(run)), strict=True):
        own = all_lines(row["llm_calls"])
        assert [whole(d, own) for d in row["llm_calls"]] == [whole(d, lines) for d in origin["llm_calls"]]


# The map


def test_the_map_lies_along_its_longest_axis_and_points_the_same_way_every_time():
    rng = np.random.default_rng(1)
    for _ in range(20):
        counts = [{f"f{i}": int(n) for i, n in enumerate(row) if n} for row in rng.integers(0, 3, (12, 7))]
        points, share = coordinates(counts)
        x, y = (points**2).sum(0)
        assert x >= y and 0 < share < 1
        heaviest = np.abs(points).argmax(0)
        assert (points[heaviest, [0, 1]] > 0).all()
