"""The findings on tools, from facts that are made up."""

from collections import Counter

import pytest

from coevolve_jax.toolcheck.facts import Facts, ToolFacts
from coevolve_jax.toolcheck.findings import findings
from coevolve_jax.toolcheck.lines import Lines
from tests.support.method_cases import TINY, a_task

SOUND = Facts(
    worlds={"train": 9, "development": 9}, tools={}, steps=9, unlike=(), twins=(), reward="", logs=(),
    forgets=False, tasks=[a_task(f"t{i}", "ls") for i in range(9)], asked=9, proposed=9, refused=Counter(),
    prompt="", tokens=9, tokenizer="", speed=9.0, seconds=9.0,
)  # fmt: skip


def told(about, **facts):
    """(whether it stops, what) of the findings that have these words."""
    found = findings(TINY, Facts(**{**vars(SOUND), **facts}), Lines(""))
    return [(f.stops, f.what) for f in found if about in f.what]


def test_tools_that_make_no_task_stop_a_training_and_few_tasks_do_not():
    assert told(" task") == []
    ((stops, what),) = told(" task", tasks=(), refused=Counter(too_short=4))
    assert (
        stops and what == "Exploration makes no task of these tools (9 were proposed; refused: too_short 4)."
    )
    ((stops, what),) = told(" task", tasks=SOUND.tasks[:2])
    assert not stops and what.startswith("Exploration finds no more than 2 different tasks")


def test_two_tools_that_act_alike_are_told_and_do_not_stop():
    words = "Nothing tells ls and dir apart: on the same calls they answered and acted alike."
    assert told("apart") == [] and told("apart", twins=[("ls", "dir")]) == [(False, words)]


@pytest.mark.parametrize(
    ("calls", "seen", "missing"), [(8, "a", "b"), (8, "b", "a"), (7, "a", ""), (8, "ab", "")]
)
def test_a_value_that_is_allowed_and_never_seen_is_told_after_enough_calls(calls, seen, missing):
    parameters = {"properties": {"mode": {"enum": ["a", "b"]}}}
    tool = ToolFacts({"function": {"name": "ls", "parameters": parameters}}, calls, calls, changed=calls)
    tool.values["mode"].update(f'"{value}"' for value in seen)
    what = f"ls was never called with mode='{missing}', which its type allows."
    assert told("never called", tools={"ls": tool}) == ([(False, what)] if missing else [])
