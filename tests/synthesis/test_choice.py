"""Task sets of a known composition, beside slow references."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coevolve_jax.synthesis import choice
from coevolve_jax.types import Call, Task, Turn
from tests.support.step_cases import a_task

SEEDS = st.integers(0, 10**6)


def named(task):
    return {call.name for turn in task.turns for call in turn.calls}


def candidates(seed, count):
    rng = np.random.default_rng(seed)
    return [a_task(rng, f"t{i}") for i in range(count)]


def balanced(tasks, count, rng):
    """Shuffles each tool's tasks and takes the last; repeats with a task of the tool that has the fewest."""
    order = {}
    for tool in sorted({name for task in tasks for name in named(task)}):
        own = [task for task in tasks if tool in named(task)]
        order[tool] = [own[i] for i in rng.permutation(len(own))][::-1]
    chosen = []
    while len(chosen) < count:
        free = {tool: [t for t in own if t not in chosen] for tool, own in order.items()}
        open_ = sorted((times(tool, chosen), tool) for tool in free if free[tool])
        if not open_:
            break
        chosen.append(free[open_[0][1]][0])
    return [t for t in tasks if t in chosen]


@settings(max_examples=500)
@given(SEEDS, st.sampled_from([3, 12, 20]), st.integers(1, 22))
def test_the_balanced_choice(seed, size, count):
    tasks = candidates(seed, size)
    found = choice.balanced(tasks, count, np.random.default_rng(seed))
    assert [t.id for t in found] == [t.id for t in balanced(tasks, count, np.random.default_rng(seed))]
    assert len(found) == min(count, size)


def test_where_there_is_one_tool_its_actions_are_balanced():
    """Two of 30 tasks open a door: a plain draw of 6 has none of them half of the time."""
    verbs = ["look"] * 14 + ["take"] * 14 + ["open"] * 2
    turn = Turn("q", (Call("act", {}),))
    tasks = [Task(f"t{n}", "x", {}, (turn,), patterns=(verb,)) for n, verb in enumerate(verbs)]
    for seed in range(10):
        found = choice.balanced(tasks, 6, np.random.default_rng(seed))
        assert Counter(t.actions for t in found) == {("look",): 2, ("take",): 2, ("open",): 2}


def times(tool, chosen):
    return sum(tool in named(task) for task in chosen)


def fits(task, chosen, count, tools, high):
    full = [tool for tool in tools if times(tool, chosen) >= high]
    return task not in chosen and len(chosen) < count and not named(task) & set(full)


def scarce(tasks, count, tools, low, high, rng):
    """None where no choice is found."""
    for _ in range(20):
        order, chosen = [tasks[i] for i in rng.permutation(len(tasks))], []
        for tool in sorted(tools):  # first the required ones
            for task in order:
                if (
                    times(tool, chosen) < low
                    and tool in named(task)
                    and fits(task, chosen, count, tools, high)
                ):
                    chosen.append(task)
        for task in order:
            if fits(task, chosen, count, tools, high):
                chosen.append(task)
        if len(chosen) == count and all(times(tool, chosen) >= low for tool in tools):
            return [t for t in tasks if t in chosen]
    return None


@given(SEEDS, st.integers(1, 10), st.integers(0, 3), st.integers(0, 2))
def test_the_scarce_choice(seed, count, low, more):
    tasks, tools = candidates(seed, 12), ("a", "c")
    wanted = scarce(tasks, count, tools, low, low + more, np.random.default_rng(seed))
    draw = lambda: choice.scarce(tasks, count, tools, low, low + more, np.random.default_rng(seed))
    if wanted is None:
        with pytest.raises(ValueError, match="Of 12 candidates"):
            draw()
    else:
        assert [t.id for t in draw()] == [t.id for t in wanted]


def test_no_task_is_sooner_chosen_than_another():
    tasks, drawn = candidates(3, 40), {"balanced": Counter(), "scarce": Counter()}
    for seed in range(150):
        rng = np.random.default_rng(seed)
        drawn["balanced"].update(t.id for t in choice.balanced(tasks, 10, rng))
        drawn["scarce"].update(t.id for t in choice.scarce(tasks, 10, "a", 0, 10, rng))
    assert all(len(own) == 40 for own in drawn.values())
    assert max(drawn["scarce"].values()) < 3 * min(drawn["scarce"].values())
