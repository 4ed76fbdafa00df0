"""The findings on tools, from facts that are made up."""

from collections import Counter

import pytest

from coevolve_jax import config as configs
from coevolve_jax.llm.prompting import CONTROL
from coevolve_jax.toolcheck import page
from coevolve_jax.toolcheck.facts import Facts, ToolFacts, Unlike
from coevolve_jax.toolcheck.findings import findings
from coevolve_jax.toolcheck.lines import Lines
from coevolve_jax.types import Call
from tests.support.method_cases import TINY, a_task
from tests.support.paths import ROOT

SOUND = Facts(
    worlds={"train": 9, "development": 9}, tools={}, steps=9, unlike=(), twins=(), reward="", logs=(),
    forgets=False, tasks=[a_task(f"t{i}", "ls") for i in range(9)], asked=9, proposed=9, refused=Counter(),
    prompt="", tokens=9, tokenizer="", speed=9.0, seconds=9.0,
)  # fmt: skip


def found_in(lines=None, **facts):
    """The findings on facts that are sound but for these."""
    return findings(TINY, Facts(**{**vars(SOUND), **facts}), lines or Lines(""))


def told(about, **facts):
    """(whether it stops, what) of the findings that have these words."""
    found = found_in(**facts)
    return [(f.stops, f.what) for f in found if about in f.what]


def a_tool(name, **facts):
    """A tool that succeeded nine times in nine calls."""
    return ToolFacts({"function": {"name": name, "parameters": {}}}, 9, 9, **{"answers": {"a", "b"}, **facts})


def test_what_stops_a_training_comes_first():
    unlike = Unlike(Call("ls", {}), "1", "2", alone=True)
    dead = a_tool("rm", fatal=(Call("rm", {}), "was killed"))
    found = found_in(reward="It is 7.", unlike=[unlike], twins=[("a", "b")], tools={"rm": dead})
    stops = [f.stops for f in found]
    assert stops == sorted(stops, reverse=True) and True in stops and False in stops


def test_tools_that_make_no_task_stop_a_training_and_few_tasks_do_not():
    assert told(" task") == []
    ((stops, what),) = told(" task", tasks=(), refused=Counter(too_short=4))
    assert (
        stops and what == "Exploration makes no task of these tools (9 were proposed; refused: too_short 4)."
    )
    ((stops, what),) = told(" task", tasks=SOUND.tasks[:2])
    assert not stops and what.startswith("Exploration finds no more than 2 different tasks")


@pytest.mark.parametrize("tasks", [(), SOUND.tasks[:2]])
def test_too_few_tasks_are_blamed_on_calls_that_do_not_repeat_where_there_are_such(tasks):
    unlike = Unlike(Call("ls", {}), "1", "2", alone=False)
    remedy = lambda **facts: next(
        f.remedy for f in found_in(tasks=tasks, **facts) if f.what.startswith("Exploration")
    )
    assert remedy(unlike=[unlike]).startswith("Mend the findings above first")
    assert not remedy().startswith("Mend")


def test_calls_that_all_change_the_state_or_never_do_are_told_and_both_kinds_are_sound():
    look, act = a_tool("ls", looked=9), a_tool("rm", changed=9)
    about = lambda **tools: told("the state", tools=tools)
    assert about(ls=look, rm=act) == []
    assert about(ls=look) == [(False, "No call changes the state: tasks are graded by answers alone.")]
    ((_, what),) = about(rm=act, mv=a_tool("mv", changed=9))
    assert what == "Every call changes the state, also where it only looks something up."


def test_worlds_are_alike_where_no_split_has_two():
    assert told("All worlds", worlds={"train": 1, "development": 1})
    assert told("All worlds", worlds={"train": 9, "development": 1}) == []


def test_long_answers_and_long_prompts_are_told_beyond_their_bounds():
    most, limit = TINY.rollout.max_observation, TINY.rollout.max_length
    assert told("characters", tools={"ls": a_tool("ls", longest=most)}) == []
    assert told("characters", tools={"ls": a_tool("ls", longest=most + 1)})
    assert told("first request", tokens=limit // 2) == []
    assert told("first request", tokens=limit // 2 + 1)


def test_two_tools_that_act_alike_are_told_and_do_not_stop():
    words = "Nothing tells ls and dir apart: on the same calls they answered and acted alike."
    assert told("apart") == [] and told("apart", twins=[("ls", "dir")]) == [(False, words)]


def test_docstrings_in_another_language_are_told():
    def found(summary, argument):
        parameters = {"properties": {"x": {"type": "string", "description": argument}}}
        function = {"name": "ls", "description": summary, "parameters": parameters}
        return told("not in English", tools={"ls": ToolFacts({"function": function}, 9, 9)})

    german = "Zahlt einen Betrag auf das Konto einer Person ein."
    assert found(german, "Name der Person, die etwas zahlt, in Worten.")
    assert not found("Pays an amount into the account of a person.", "Name of the person who pays.")
    assert not found(german, "Wer.")  # too few words to tell


@pytest.mark.parametrize(
    ("calls", "seen", "missing"), [(8, "a", "b"), (8, "b", "a"), (7, "a", ""), (8, "ab", "")]
)
def test_a_value_that_is_allowed_and_never_seen_is_told_after_enough_calls(calls, seen, missing):
    parameters = {"properties": {"mode": {"enum": ["a", "b"]}}}
    tool = ToolFacts({"function": {"name": "ls", "parameters": parameters}}, calls, calls, changed=calls)
    tool.values["mode"].update(f'"{value}"' for value in seen)
    what = f"ls was never called with mode='{missing}', which its type allows."
    assert told("never called", tools={"ls": tool}) == ([(False, what)] if missing else [])


def test_a_default_that_is_left_out_is_not_missed():
    order = {"enum": ["asc", "desc"], "default": "asc"}
    tool = ToolFacts({"function": {"name": "ls", "parameters": {"properties": {"mode": order}}}}, 9, 9, 9)
    tool.values["mode"].update(['"desc"'])
    assert told("never called", tools={"ls": tool}) == []
    tool.schema["function"]["parameters"]["required"] = ["mode"]
    assert len(told("never called", tools={"ls": tool})) == 1


OWN = """
import functools
import uuid

class Shop:
    def reset(self): ...
    def buy(self, item, into=[], *, by={}): ...
    def state(self): ...
    @classmethod
    def make(cls): ...
    @functools.lru_cache(maxsize=3)
    def look(self): ...
    @property
    def size(self): ...
    again = functools.partialmethod(buy, item="tea")
    def _hidden(self, into=()): return str(uuid.uuid4())
"""


@pytest.fixture
def lines(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return Lines(str(tmp_path / "own.py"), "Shop")


def test_a_state_that_cannot_be_read_stops_at_the_line_of_state(lines):
    unreadable = (Call("buy", {"item": "tea"}), "own.py:3: Shop.state raises KeyError: 1.")
    (first, *_) = found_in(lines, unreadable=unreadable)
    assert first.stops and first.place.endswith("own.py:8")
    assert first.what == "After buy(item='tea') the state cannot be read: Shop.state raises KeyError: 1."


def test_what_is_no_tool_is_named_with_its_kind_and_so_are_defaults_that_calls_change(lines):
    (left_out,) = [f for f in found_in(lines) if f.what.startswith("No tools")]
    assert left_out.place.endswith("own.py:9") or left_out.place.endswith("own.py:10")
    kinds = "make (classmethod), look (lru_cache), size (property), again (partialmethod)"
    assert left_out.what == f"No tools, though public: {kinds}."
    shared = [f for f in found_in(lines) if "has a default that all calls share" in f.what]
    assert len(shared) == 2 and all(f.place.endswith("own.py:7") for f in shared)


def test_chance_in_the_file_is_blamed_before_other_worlds(lines):
    unlike = Unlike(Call("buy", {}), "1", "2", alone=False)
    what = lambda own: next(f.what for f in found_in(own, unlike=[unlike]) if "depends" in f.what)
    assert what(lines).startswith("buy depends on a clock or on chance: ")
    assert what(None).startswith("buy depends on other worlds beside it: ")


def test_a_tool_that_never_succeeded_is_not_fit_to_train_on():
    config = configs.load_file(ROOT / "configs" / "mcp_smollm2.py")
    never = ToolFacts({"function": {"name": "no", "parameters": {}}}, 9, errors=Counter(no=9))
    tools = {"ls": a_tool("ls"), "cp": a_tool("cp"), "no": never}
    unlike = Unlike(Call("cp", {}), "1", "2", alone=True)
    found = findings(config, Facts(**{**vars(SOUND), "tools": tools, "unlike": [unlike]}), Lines(""))
    (fit,) = [f for f in found if f.what.startswith("Fit to train on")]
    assert fit.what == "Fit to train on are 1 of 3 tools." and fit.remedy.endswith("tools=ls")


def test_many_tasks_that_pass_with_another_argument_are_told_by_their_tools():
    about = "tasks pass with another argument"
    loose = Counter(is_poor=3, set_day=1)
    assert told(about) == [] and told(about, swapped=41, loose=loose) == []
    ((stops, what),) = told(about, swapped=40, loose=loose)
    assert what.startswith(f"4 of 40 {about}: is_poor in 3, set_day in 1.") and not stops


def test_tokens_that_another_models_template_counts_are_told():
    assert told("tokens of a prompt", tokenizer=TINY.model) == []
    ((stops, what),) = told("tokens of a prompt", tokenizer="models/other")
    assert what.startswith(f"{TINY.model} is not here: ") and what.endswith("by models/other.") and not stops


def test_values_are_a_remedy_for_a_tool_that_did_nothing_with_those_tried():
    properties = {"owner": {"type": "string"}, "day": {"type": "string", "description": "A date."}}
    tool = a_tool("set_day", answers={"done"})
    tool.schema["function"]["parameters"] = {"properties": properties}
    remedy = lambda tool: next(f.remedy for f in found_in(tools={"x": tool}) if "changed nothing" in f.what)
    assert remedy(tool).endswith('such as values = {"owner": [...], "day": [...]}.')
    assert remedy(a_tool("ls", answers={"done"})).endswith("let it answer or do something.")


CACHED = """
import functools

class Shop:
    def reset(self): ...
    @functools.cached_property
    def _cheap(self): ...
"""


def test_a_cached_property_is_told_with_its_line_unless_the_class_has_a_state(tmp_path):
    path = tmp_path / "own.py"
    for code, places in ((CACHED, [7]), (CACHED + "    def state(self): ...\n", [])):
        path.write_text(code)
        told = [f for f in found_in(Lines(str(path), "Shop")) if "is a cached_property" in f.what]
        assert [f.place.rpartition(":")[2] for f in told] == [str(line) for line in places]
        assert all("in reset" in f.remedy and "state(self)" in f.remedy for f in told)


def test_a_server_says_nothing_that_a_terminal_obeys():
    evil = "\x1b]0;PWNED\x07\x1b[31mno\x9b8m\u202e\nFindings none"
    look = ToolFacts({"function": {"name": "look", "parameters": {}}}, 9, errors=Counter({evil: 9}))
    tools = {"look": look, "list\x1b[2J": a_tool("list\x1b[2J"), "ls": a_tool("ls", answers={evil})}
    facts = Facts(**{**vars(SOUND), "tools": tools, "reward": evil})
    text = page.text("x", facts, findings(TINY, facts, Lines("")))
    assert not CONTROL.search(text.replace("\n", "")) and "PWNED" in text
    assert "\nFindings none" not in text and "  list[2J      9 calls" in text


def test_the_arguments_that_have_no_values_are_named():
    properties = {"currency": {"type": "string"}, "owner": {"type": "string"}}
    tool = ToolFacts({"function": {"name": "pay", "parameters": {"properties": properties}}}, 4)
    tool.errors["no"] = 4
    (never,) = [
        f for f in found_in(tools={"pay": tool}, unnamed={"pay": ["owner", "target"]}) if "never" in f.what
    ]
    assert 'such as values = {"owner": [...], "target": [...]}, or' in never.remedy


@pytest.mark.parametrize(
    "why, remedy",
    [
        ("the server gave no answer within 2 s", "Raise config.environment.server_timeout"),
        (
            "the server gave no answer within 2 s (an answer came with the id 9, not 3)",
            "Let the server answer",
        ),
        ("the server ended with code 3", "Let the server answer with an error instead of ending"),
        ("the server sent more than 8 MiB at once", "Let it answer with less"),
        ("the server runs 99 processes", "Mend the server"),
        ("timeout: no answer within 110 s by the clock", "Raise config.environment.call_timeout"),
    ],
)
def test_the_remedy_fits_the_end_of_a_server_and_where_most_tools_end_it_one_finding_stops(why, remedy):
    config = configs.load_file(ROOT / "configs" / "mcp_smollm2.py")
    tool = lambda name: ToolFacts({"function": {"name": name, "parameters": {}}}, fatal=(Call(name, {}), why))
    fine = ToolFacts({"function": {"name": "ls", "parameters": {}}}, 9, 9, 9)
    of = lambda **tools: [
        f
        for f in findings(config, Facts(**{**vars(SOUND), "tools": tools}), Lines(""))
        if "end" in f.what and "world" in f.what and why in f.what
    ]
    (one,) = of(a=tool("a"), ls=fine)
    assert not one.stops and one.remedy.startswith(remedy) and one.remedy.endswith("environment.tools.")
    (every,) = of(a=tool("a"), b=tool("b"), c=tool("c"), ls=fine)
    assert every.stops and every.what.startswith("3 of 4 tools end their world, as a() does (")
    assert every.remedy.startswith(remedy) and "leave" not in every.remedy
