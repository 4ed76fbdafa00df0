"""Methods that give hints: what they remember, whom they tell, and that it is the memory that does it."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coevolve_jax import build
from coevolve_jax.strategies import evolver, hints, sage
from coevolve_jax.strategies.evolver import distil
from coevolve_jax.types import Call, Group, Hint, Turn
from tests.support.method_cases import Rolls, a_group, a_pool, a_rollout, a_step, a_task, again, config_of

# The line, and what is alike


@given(st.lists(st.sampled_from("abcdef")), st.lists(st.sampled_from("defghi")), st.integers(0, 60))
def test_a_line_of_advice_is_short_and_says_no_action_twice(do, avoid, most):
    told = hints.line(do, avoid, most)
    assert len(told) <= most and "\n" not in told
    named = [name.strip(".,") for name in told.split()[1:] if name.strip(".,") not in ("Use", "Not")]
    assert len(set(named)) == len(named)
    wanted = [*dict.fromkeys(do), *(a for a in dict.fromkeys(avoid) if a not in do)]
    if most == 60:
        assert named == wanted and bool(told) == bool(wanted)
    # What is left out stood last in its list.
    first = list(dict.fromkeys(do))
    assert [a for a in first if a in named] == first[: len(set(do) & set(named))]


def test_words_leave_out_what_is_quoted():
    query = "Move 'my notes.txt' to \"old things\", then count its lines."
    assert hints.words(query) == {"move", "to", "then", "count", "its", "lines"}
    assert hints.overlap("ab", "bc") == 1 / 3 and hints.overlap("", "") == 0.0


# SLEA-RL's library


TASK = a_task("t", "ls", "mv")
STREAMS = ("ids", "logprobs", "versions")


def played(*names, won=True, index=0, bad=()):
    """A rollout with one call per message; "" is a message whose call is malformed."""
    steps = [dataclasses.replace(a_step(name, error=name in bad), message=i) for i, name in enumerate(names)]
    steps = [s if s.text else dataclasses.replace(s, call=None) for s in steps]
    made = a_rollout(TASK, index, won, steps)
    mask = np.array([False, *[True, False] * (len(names) + 1)])
    made = dataclasses.replace(made, **{k: np.zeros(len(mask), getattr(made, k).dtype) for k in STREAMS})
    return dataclasses.replace(made, mask=mask)


def library(*groups, **own):
    config = config_of("slea_rl", **{"warm_up": 0, **own})
    strategy = build.strategy(config)
    for step, rollouts in enumerate(groups):
        strategy.observe(step, [Group(TASK, tuple(rollouts))])
    return again(strategy, config)


def advice(strategy, *names, bad=()):
    hint = strategy.help(TASK.without_calls(), 0)
    return hint and hint.before_step([a_step(name, error=name in bad) for name in names])


def test_what_followed_in_successes_is_advised_and_what_failed_there_is_warned_of():
    rollouts = [played("ls", "mv"), played("ls", "cp", won=False, index=1, bad=("cp",))]
    strategy = library(rollouts)
    assert advice(strategy, "ls") == "Hint: Use mv. Not cp."
    assert advice(strategy, "mv") == "Hint: Use mv."  # from the widest zone: after a call that went well
    assert advice(strategy, "cd", bad=("cd",)) == ""  # nothing is known about what follows an error
    # Without the library, and before the end of the warm-up, nobody is told anything.
    assert library(rollouts, library=False).help(TASK, 0) is None
    assert library(rollouts, warm_up=2).help(TASK, 0) is None
    assert library(rollouts, rollouts, warm_up=2).help(TASK, 0) is not None


def test_a_full_zone_lets_a_better_lesson_in_and_drops_its_weakest():
    """Three ways on from ls; the fewer the messages that follow, the better."""
    ways = {name: [played("ls", name, *[""] * more)] for name, more in (("find", 3), ("cp", 2), ("mv", 1))}
    kept = lambda *names, **own: [
        action for _, action, _ in library(*map(ways.get, names), **own).to_json()["zones"]["turn"]
    ]
    assert kept("find", "cp", "mv") == ["mv", "cp", "find"]
    assert kept("find", "cp", "mv", capacity=2) == kept("mv", "cp", "find", capacity=2) == ["mv", "cp"]
    assert advice(library(*ways.values(), capacity=2), "ls") == "Hint: Use mv, cp."
    # Of two that are alike the better one stays, also where there is room.
    ways["mvs"] = [played("ls", "mvs")]
    assert kept("mv", "mvs", novelty=0.5) == ["mvs"] and kept("mv", "mvs") == ["mvs", "mv"]


def test_the_credit_and_the_library_are_two_settings():
    group = Group(TASK, (played("ls", "mv"), played("ls", "cp", won=False, index=1)))
    spread = lambda **own: [
        len(set(s.advantages[s.trajectory.mask].tolist()))
        for s in build.strategy(config_of("slea_rl", **own)).compute_advantages([group])
    ]
    assert min(spread()) > 1 and spread() == spread(library=False) and spread(step_credit=False) == [1, 1]


# EvolveR's principles


def asking(id, query, *names):
    return dataclasses.replace(a_task(id, *names), turns=(Turn(query, a_task(id, *names).calls),))


MOVE, POST = asking("m", "Move 'a' into 'b'.", "cd", "mv"), asking("p", "Post 'x' for all.", "login", "post")


def test_a_group_shows_where_its_failures_leave_a_success():
    steps = lambda *names: [a_step(name, x) for x, name in enumerate(names)]
    won, lost = a_rollout(MOVE, 0, True, steps("cd", "mv")), a_rollout(MOVE, 1, False, steps("cd", "cp"))
    good, bad = distil(Group(MOVE, (won, lost)))
    assert (good["do"], good["action"], bad["do"], bad["action"]) == (True, "mv", False, "cp")
    assert good["words"] == bad["words"] == ["into", "move"] and evolver.score(good) == 0.5
    # A failure that ends early shows nothing to avoid, nor does one with other arguments.
    assert [p["action"] for p in distil(Group(MOVE, (won, a_rollout(MOVE, 1, False, steps("cd")))))] == ["mv"]
    other = a_rollout(MOVE, 1, False, [a_step("cd", 0), a_step("mv", 7)])
    assert [p["do"] for p in distil(Group(MOVE, (won, other)))] == [True]


@settings(max_examples=30)
@given(st.floats(0, 1), st.integers(1, 9), st.data())
def test_a_share_of_all_groups_is_distilled_and_of_those_with_both_outcomes(share, count, data):
    mixed = data.draw(st.integers(0, count))
    groups = [a_group(a_task(f"t{i}", "mv"), True, i >= mixed) for i in range(count)]
    drawn = build.strategy(config_of("evolver", distilled=share))._drawn(0, groups)
    wanted = next(n for n in range(count + 1) if n >= share * count)
    assert len({g.task.id for g in drawn}) == len(drawn) == min(wanted, mixed)
    assert all(g.mixed for g in drawn)


def test_a_principle_that_comes_before_failures_is_pruned():
    """Two tasks give a principle each. Afterwards rollouts that read one succeed, and the others fail."""
    kept, told = {}, {}
    for below in (0.3, 0.0):
        config = config_of("evolver", prune_below=below, distilled=1.0)
        strategy = build.strategy(config)
        first = [
            Group(task, (a_rollout(task, 0, True), a_rollout(task, 1, False, [a_step(task.calls[0].name)])))
            for task in (MOVE, POST)
        ]
        strategy.observe(0, first)
        for step in range(1, 10):
            strategy = again(strategy, config)
            assert strategy.help(MOVE.without_calls(), 0) == Hint("Hint: Use mv.")
            strategy.observe(step, [a_group(MOVE, True), a_group(POST, False)])
        store = again(strategy, config).to_json()["store"]
        kept[below] = {p["action"]: (p["successes"], p["uses"]) for p in store}
        told[below] = [hint and hint.before_task for hint in (strategy.help(t, 0) for t in (MOVE, POST))]
    assert kept == {0.3: {"mv": (9, 9)}, 0.0: {"mv": (9, 9), "post": (0, 9)}}
    assert told == {0.3: ["Hint: Use mv.", None], 0.0: ["Hint: Use mv.", "Hint: Use post."]}


def test_the_same_advice_of_a_task_is_one_principle_and_the_nearest_come_first():
    config = config_of("evolver", distilled=1.0, read=2)
    strategy = build.strategy(config)
    mixed = lambda task, *names: Group(
        task, (a_rollout(task, 0, True, [a_step(n) for n in names]), a_rollout(task, 1, False, []))
    )
    for group in (mixed(MOVE, "mv"), mixed(POST, "post"), mixed(MOVE, "mv"), mixed(MOVE, "mvs")):
        strategy.observe(0, [group])
    assert [p["action"] for p in strategy.to_json()["store"]] == ["mv", "post", "mvs"]
    near = asking("n", "Move 'c' for me.", "mv")
    assert strategy.help(near, 0) == Hint("Hint: Use mv, mvs.")
    strategy._config.strategy.read = 3
    assert strategy.help(near, 0) == Hint("Hint: Use mv, mvs, post.")
    assert strategy.help(asking("o", "Drink it.", "sip"), 0) is None


def test_a_principle_that_the_line_leaves_out_is_not_used():
    """It warns of what another one recommends, or there is no room for it."""
    config = config_of("evolver", characters=len("Hint: Use mv, cp."))
    words = sorted(hints.words(MOVE.turns[0].query))
    fresh = {"task": MOVE.id, "words": words, "uses": 0, "successes": 0}
    store = [
        {"do": do, "action": name, **fresh} for do, name in ((1, "mv"), (1, "cp"), (0, "cp"), (1, "far"))
    ]
    strategy = build.strategy(config)
    strategy._store = [{**p, "do": bool(p["do"])} for p in store]
    strategy._config.strategy.read = 4
    assert strategy.help(MOVE, 0) == Hint("Hint: Use mv, cp.")
    strategy.observe(1, [a_group(MOVE, True, True)])
    assert [p["uses"] for p in strategy.to_json()["store"]] == [2, 2, 0, 0]


# Evolving-RL's extractor


def test_an_extractor_is_paid_by_what_a_skill_does_on_other_tasks():
    """A task's last action helps the others and misleads the task itself. Each one names its own task."""
    tasks = [a_task(f"t{i}", "ls", f"end_{i}") for i in range(8)]

    def roll(drawn, k, hints):
        rng, groups = np.random.default_rng(next(counter)), []
        for task in drawn:
            told = [hint.before_task if (hint := hints(task, m)) else "" for m in range(k)]
            gain = [
                0.0 if "end_" not in line or "," in line else -0.4 if task.calls[-1].name in line else 0.4
                for line in told
            ]
            groups.append(a_group(task, *(rng.random(k) < 0.5 + np.array(gain))))
        return groups

    shares = {}
    for crossed in (True, False):
        config = config_of(
            "evolving_rl", crossed=crossed, learning_rate=1.0,
            **{"rollout.tasks_per_step": 8, "rollout.group_size": 8},
        )  # fmt: skip
        strategy, counter, pool = build.strategy(config), itertools.count(), a_pool(*tasks)
        for step in range(25):
            strategy = again(strategy, config)
            groups = strategy.collect(step, pool, roll)
            assert len({g.task.id for g in groups}) == 8
            strategy.observe(step, groups)
        (row,) = strategy.observe(25, []).rows
        shares[crossed] = row["shares"]["last"] + row["shares"]["parting"]
    assert shares[True] > 0.6 and shares[False] < 0.25, shares  # by chance a third


def test_the_rollouts_of_a_task_try_different_skills_of_another_task():
    config = config_of("evolving_rl", near=2, **{"rollout.tasks_per_step": 4, "rollout.group_size": 8})
    tasks = [a_task(f"{kind}{i}", kind, f"end_{kind}") for kind in "ab" for i in range(3)]
    strategy, pool = build.strategy(config), a_pool(*tasks)
    assert {g.task.id for g in strategy.collect(0, pool, Rolls(lambda task: 1.0))} <= {t.id for t in tasks}
    strategy.observe(0, [a_group(t, True, False, steps=None) for t in tasks[:1]])
    seen = {}

    def roll(drawn, k, hints):
        seen.update({t.id: [hints(t, m) and hints(t, m).before_task for m in range(k)] for t in drawn})
        return [a_group(t, *[True] * k) for t in drawn]

    for step in range(1, 30):
        seen.clear()
        strategy.collect(step, pool, roll)
        tried = {id: lines for id, lines in seen.items() if any(lines)}
        assert len(seen) == 4 and tried.keys() <= {"a1", "a2"}  # nearest to the one source, and never itself
        assert all(
            set(lines) <= {None, "Hint: Use a.", "Hint: Use end_a.", "Hint: Use a, end_a."}
            for lines in tried.values()
        )
        assert len({tuple(lines) for lines in tried.values()}) <= 1
    assert strategy.help(tasks[4].without_calls(), 0) is None  # the likeliest skill is none as yet


def test_no_source_of_a_step_is_in_its_batch_and_no_retired_task():
    config = config_of(
        "evolving_rl",
        near=2,
        **{"rollout.tasks_per_step": 4, "rollout.group_size": 2, "data.retire_after": 3},
    )
    tasks = [a_task(f"a{i}", "a", f"end_{i}") for i in range(24)]
    strategy, pool = build.strategy(config), a_pool(*tasks)
    strategy.observe(0, [a_group(t, True, True) for t in tasks])
    for _ in range(3):
        pool.record({t.id: 1.0 for t in tasks[12:]})
    for step in range(1, 20):
        batch = {g.task.id for g in strategy.collect(step, pool, Rolls(lambda t: 1.0))}
        assert len(batch) == 4 and len(strategy._skills) == 2
        assert not batch & strategy._skills.keys() and not batch & {t.id for t in tasks[12:]}


@pytest.mark.parametrize("size, share", [(6, 0.5), (7, 0.5), (8, 0.25), (5, 0.75)])
@pytest.mark.parametrize(
    "name, own", [("evolving_rl", {}), ("evolving_rl", {"crossed": False}), ("sage", {})]
)
def test_batches_hold_as_many_evolved_tasks_as_those_of_random(name, own, size, share):
    """The tasks nearest to any other are given ones, and all sources are."""
    given = [a_task(f"o{i}", "a", "b") for i in range(30)]
    evolved = [a_task(f"n{i}", "a", "b", "c", f"end_{i}", kind="random") for i in range(10)]
    pool = a_pool(*given, *evolved)
    changes = {"rollout.tasks_per_step": size, "rollout.group_size": 2, "data.min_evolved_share": share}
    strategy, random = (
        build.strategy(config_of(n, **changes, **w)) for n, w in ((name, own), ("random", {}))
    )
    strategy.observe(0, [a_group(t, True, True) for t in given])
    tried = 0
    for step in range(1, 12):
        batch, plain = (
            [g.task.id for g in s.collect(step, pool, Rolls(lambda t: 1.0))] for s in (strategy, random)
        )
        new = sum(id[0] == "n" for id in batch)
        assert len(set(batch)) == size and new == sum(id[0] == "n" for id in plain) >= share * size
        tried += new if name == "sage" else len(strategy._skills)
    assert tried


# SAGE's chains


FIRST, NEXT = a_task("first", "mkdir", "mv", "ls"), a_task("next", "mkdir", "mv", "cat")


def chained(won_first, won_next, used, **own):
    """(R1, R2) of one rollout of a chain, the next after a failure that used nothing."""
    strategy = build.strategy(
        config_of("sage", **{"rollout.tasks_per_step": 2, "rollout.group_size": 2, **own})
    )

    def roll(drawn, k, hints=None):
        (task,), won = drawn, won_next if hints else won_first
        offered = [hints(task, m) for m in range(k)] if hints else [None] * k
        skill = offered[0].macros[0].name if offered[0] else ""
        steps = [dataclasses.replace(s, macro=skill if used else "") for s in a_rollout(task, 0, won).steps]
        return [Group(task, (a_rollout(task, 0, won, steps), a_rollout(task, 1, False)))]

    groups = strategy.collect(0, a_pool(FIRST, NEXT), roll)
    found = strategy.observe(0, groups)
    return tuple(strategy.rewards(g)[0] for g in groups), found.counts["chained"], strategy


def test_a_skill_is_paid_in_both_tasks_if_it_is_used_and_both_succeed():
    assert chained(True, True, used=True)[:2] == ((2.0, 2.0), 1)
    assert chained(True, True, used=False)[:2] == ((1.0, 1.0), 0)
    assert chained(True, False, used=True)[:2] == ((1.0, 0.0), 0)
    assert chained(False, True, used=True)[:2] == ((0.0, 1.0), 0)  # nothing was there to be used
    assert chained(True, True, used=True, bonus=0.0)[0] == (1.0, 1.0)


def test_a_chain_stays_in_its_scenario_where_tasks_there_share_actions():
    other = dataclasses.replace(FIRST, id="other", scenario={"id": "elsewhere"})  # all actions alike
    near = dataclasses.replace(NEXT, id="near", scenario=FIRST.scenario)
    apart = a_task("apart", "touch", scenario=FIRST.scenario)  # no action in common
    assert sage.like(FIRST, near) > sage.like(FIRST, other) > sage.like(FIRST, apart)


def test_a_retired_task_is_no_second_of_a_chain():
    config = config_of(
        "sage", **{"rollout.tasks_per_step": 2, "rollout.group_size": 2, "data.retire_after": 3}
    )
    pool = a_pool(FIRST, NEXT, a_task("far", "touch"))
    for _ in range(3):
        pool.record({"next": 1.0})
    drawn = {
        g.task.id for s in range(20) for g in build.strategy(config).collect(s, pool, Rolls(lambda t: 1.0))
    }
    assert drawn == {"first", "far"}


@pytest.mark.parametrize("name", ["sage", "evolving_rl"])
def test_methods_that_roll_once_refuse_dynamic_sampling(name):
    with pytest.raises(ValueError, match=f"dynamic_sampling is 2, and strategy {name} draws no task anew"):
        build.strategy(config_of(name, **{"learner.dynamic_sampling": 2}))


def test_a_rollout_without_any_call_is_worse_than_a_failure():
    strategy = build.strategy(config_of("sage"))
    quiet = a_rollout(FIRST, 1, False, [dataclasses.replace(a_step("x"), call=None)])
    assert strategy.rewards(Group(FIRST, (a_rollout(FIRST, 0, False), quiet))) == [0.0, -1.0]


def test_a_skill_that_paid_is_offered_at_evaluation_and_stands_for_calls_of_both_tasks():
    *_, strategy = chained(True, True, used=True)
    strategy = again(strategy, config_of("sage"))
    hint = strategy.help(dataclasses.replace(FIRST, turns=(Turn("q", ()),)), 0)
    assert hint.macros[0].name == "mkdir_then_mv" and hint.macros[0].parameters == ("x", "x_2")
    assert strategy.help(asking("o", "Drink it.", "sip"), 0) is None


def test_skills_of_one_name_are_each_found_by_the_words_of_their_task():
    def chain(query, *values):
        turn = Turn(query, tuple(Call(name, {"x": x}) for name, x in zip("fg", values, strict=True)))
        first, second = (dataclasses.replace(a_task(query + part, "f", "g"), turns=(turn,)) for part in "12")
        used = [dataclasses.replace(s, macro="f_then_g") for s in a_rollout(second, 0, True).steps]
        return Group(first, (a_rollout(first, 0, True),)), Group(second, (a_rollout(second, 0, True, used),))

    strategy = build.strategy(config_of("sage"))
    strategy._chains = [chain("Book the room.", 0, 1), chain("Pay the bill.", 0, 0)]
    strategy.observe(0, [])
    strategy.observe(1, [])  # what paid again is kept once
    strategy = again(strategy, config_of("sage"))
    assert len(strategy.to_json()["skills"]) == 2
    for query, parameters in (("Book the room.", ("x", "x_2")), ("Pay the bill.", ("x",))):
        (macro,) = strategy.help(asking("o", query, "f"), 0).macros
        assert (macro.name, macro.parameters) == ("f_then_g", parameters)


def test_macros_of_other_calls_have_other_names_also_where_these_are_long():
    calls = [Call("a_name_of_some_length", {})] * 3
    names = {hints.macro_of([*calls, Call(last, {})]).name for last in ("f", "g", "h")}
    assert len(names) == 3 and {len(name) for name in names} == {64}


@given(
    st.lists(st.dictionaries(st.sampled_from("ab"), st.sampled_from(["v", "w", 1, True, None]), min_size=1))
)
def test_a_macro_called_with_its_own_values_makes_its_own_calls(arguments):
    calls = [Call(f"tool{i % 2}", own) for i, own in enumerate(arguments)]
    macro = hints.macro_of(calls)
    assert macro.expand(hints.call_of(macro, calls)) == calls
    assert len(macro.name) <= 64 and macro.name.startswith("tool0" if calls else "")
