"""The demonstrator of the tiny policies: the reference, or with habits exactly the named errors."""

import json
import re
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.paths import ROOT

sys.path.insert(0, str(ROOT / "experiments" / "pretraining"))

from advice import advise
from demonstrator import ERRORS, Demonstrator, Habit, drawn_habits, named_habits, to_json
from lessons import bfcl, textworld

from coevolve_jax.envs.bfcl import scenario
from coevolve_jax.envs.textworld import commands
from coevolve_jax.rollout.tool_call_format import parse_calls, render_call
from coevolve_jax.types import Call, Task, Turn

WEAK = "search_tweets"
OTHERS = ("get_tweet", "get_user_stats", "list_all_following")
calls = st.lists(
    st.one_of(
        st.builds(lambda text: Call(WEAK, {"keyword": text}), st.text("ab ", min_size=1)),
        st.builds(lambda name, n: Call(name, {"n": n}), st.sampled_from(OTHERS), st.integers(0, 9)),
    ),
    min_size=1,
    max_size=6,
)


def said(turns: list[list[Call]], habits: dict[str, Habit]) -> list[list[str]]:
    """The demonstrator's messages, by user turn."""
    task = Task("t", "bfcl", scenario(["TwitterAPI"]), tuple(Turn("", tuple(c)) for c in turns))
    messages, by_turn = Demonstrator(habits, bfcl).messages(task, np.random.default_rng(0)), [[]]
    for message in messages:
        by_turn.append([]) if message == "Done." else by_turn[-1].append(message)
    assert by_turn.pop() == [] and len(by_turn) == len(turns)
    return by_turn


@given(turns=st.lists(calls, min_size=1, max_size=3))
def test_without_a_habit_it_says_the_reference(turns):
    expected = [[render_call(c) for c in turn] for turn in turns]
    assert said(turns, {}) == expected
    assert said(turns, {WEAK: Habit("skip", 0.0)}) == expected


@given(turns=st.lists(calls, min_size=1, max_size=3), error=st.sampled_from(ERRORS))
def test_a_habit_spoils_every_call_of_its_tool_and_no_other(turns, error):
    for turn, messages in zip(turns, said(turns, {WEAK: Habit(error, 1.0)}), strict=True):
        reference = [render_call(c) for c in turn]
        weak = [i for i, c in enumerate(turn) if c.name == WEAK]
        if error == "skip":
            assert messages == [m for m, c in zip(reference, turn) if c.name != WEAK]
        elif error == "give_up":
            assert messages == reference[: weak[0] if weak else None]
        elif error == "swap":
            gone = list(reference)
            for message in messages:
                gone.remove(message)  # every message comes from the reference
            assert set(gone) <= {reference[i] for i in weak}
        else:
            assert [i for i, (a, b) in enumerate(zip(messages, reference, strict=True)) if a != b] == weak


def test_drawn_habits_are_of_every_tool_and_the_weak_share_is_what_was_asked_for():
    tools = bfcl.actions()
    habits = drawn_habits(0.45, tools, np.random.default_rng(1))
    assert habits.keys() == tools
    assert sum(h.rate >= 0.4 for h in habits.values()) == round(0.45 * len(tools))
    assert not any(0.08 < h.rate < 0.4 for h in habits.values())


def test_named_habits_are_what_their_file_says():
    habits = named_habits(["cp:sibling_tool:0.5", "sort:skip:1"], bfcl.actions())
    assert json.loads(to_json(habits)) == {
        "cp": {"error": "sibling_tool", "rate": 0.5},
        "sort": {"error": "skip", "rate": 1.0},
    }


# Hints


def advised(turns, wrong, seed):
    """A task of TwitterAPI with these calls, and advice for it."""
    task = Task("t", "bfcl", scenario(["TwitterAPI"]), tuple(Turn("", tuple(c)) for c in turns))
    return task, advise(task, bfcl, wrong, np.random.default_rng(seed))


@given(turns=st.lists(calls, min_size=1, max_size=3), seed=st.integers(0, 999))
def test_a_right_hint_names_what_comes_and_its_actions_go_well(turns, seed):
    task, (hint, played, heeded) = advised(turns, 0.0, seed)
    habits = dict.fromkeys({c.name for c in task.calls}, Habit("wrong_argument", 1.0))
    messages = Demonstrator(habits, bfcl).messages(played, np.random.default_rng(0), heeded)
    said = [call for message in messages for call in (p.call for p in parse_calls(message))]
    (macro,) = hint.macros or (None,)
    made = [c for call in said for c in (macro.expand(call) if macro and call.name == macro.name else [call])]
    assert len(made) == len(task.calls) and bool(macro) == (played != task)
    assert all(a == b for a, b in zip(made, task.calls) if b.name in heeded)
    named = hint.before_task.partition(" Not ")[0].removeprefix("Hint: Use ").strip(".").split(", ")
    assert macro or {*named} <= heeded <= {c.name for c in task.calls}
    if hint.before_step:
        ends, n = [], 0
        for turn in task.turns:
            ends.append(n := n + len(turn.calls))
        for n in range(1, len(task.calls) + 1):
            line = "" if n in ends else f"Hint: Use {task.calls[n].name}."
            assert hint.before_step([None] * n) == line


@given(turns=st.lists(calls, min_size=1, max_size=3), seed=st.integers(0, 999))
def test_a_wrong_hint_names_other_actions_and_changes_nothing(turns, seed):
    task, (hint, played, heeded) = advised(turns, 1.0, seed)
    assert played == task and not heeded
    used = hint.before_task.partition(" Not ")[0].removeprefix("Hint: Use ").strip(".").split(", ")
    siblings = {bfcl.sibling(call).name for call in task.calls}
    assert {*used} <= siblings or hint.macros
    assert {c.name for macro in hint.macros for c in macro.calls} <= siblings


@pytest.mark.parametrize(
    "text, what",
    [
        ("brew:skip:0.5", "'brew'"),
        ("cp:forget:0.5", "'forget'"),
        ("cp:skip:1.5", "1.5"),
        ("cp:skip", "cp:skip"),
    ],
)
def test_a_habit_that_cannot_be_is_refused_by_name(text, what):
    with pytest.raises(ValueError, match=what):
        named_habits([text], bfcl.actions())


# --- TextWorld's lessons --------------------------------------------------------------------------

name = st.from_regex(r"[a-z]{3,8}( [a-z]{3,8})?", fullmatch=True).filter(
    lambda words: not {"from", "on", "into", "with", "and", "then", "the"} & set(words.split())
)
command = st.one_of(
    st.sampled_from(("look", "inventory", "go north", "go west")),
    st.builds("{} {}".format, st.sampled_from(("examine", "open", "close", "take", "drop", "eat")), name),
    st.builds("take {} from {}".format, name, name),
    st.builds("put {} on {}".format, name, name),
    st.builds("insert {} into {}".format, name, name),
    st.builds("{} {} with {}".format, st.sampled_from(("lock", "unlock")), name, name),
)


def act(line: str) -> Call:
    return Call("act", {"command": line})


@given(lines=st.lists(command, min_size=1, max_size=5), seed=st.integers(0, 99))
def test_an_error_in_a_text_adventure_is_another_command(lines, seed):
    task = Task("t", "textworld", {}, (Turn("", tuple(map(act, lines))),))
    for call in task.calls:
        other = textworld.sibling(call)
        assert commands.read(other) and textworld.action(other) != textworld.action(call)
        wrong = textworld.wrong_argument(call, task, np.random.default_rng(seed))
        assert commands.read(wrong) and wrong != call


@given(lines=st.lists(command, min_size=1, max_size=5))
def test_a_retold_adventure_says_the_same_of_other_things(lines):
    """Each name becomes one other name wherever it stands, and nothing else changes."""
    said = [f'{commands.wording(act(line))} {{"arguments": {{"command": "{line}"}}}}' for line in lines]
    used = {}
    another = lambda name: used.setdefault(name, f"X{len(used)}")
    told = textworld.retell("\n".join(said), another)
    assert not used or told != "\n".join(said)
    back = {other: name for name, other in used.items()}
    assert re.sub(r"X\d+", lambda m: back[m.group()], told) == "\n".join(said)
    assert textworld.SIBLINGS.keys() == textworld.actions()
