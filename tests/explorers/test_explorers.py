"""The roles of an explorer: the scripted ones, the choice by name, and the conformance suite."""

import copy
import dataclasses
import re

import numpy as np
import pytest
from ml_collections import ConfigDict

from coevolve_jax import build, envs
from coevolve_jax.envs import bfcl
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.explorers import scripted
from coevolve_jax.explorers.base import Episode
from coevolve_jax.explorers.scripted import tools as tools_module
from coevolve_jax.explorers.scripted.abstractor import instruction, value_text, word
from coevolve_jax.explorers.scripted.explorer import KEPT, remedies
from coevolve_jax.explorers.scripted.tools import named_values, tokens, toolbox
from coevolve_jax.synthesis.explore import unguided
from coevolve_jax.testing.explorer import check_explorer
from coevolve_jax.types import Call, Observation, Task, Triplet, Turn
from tests.support.explorer_cases import evidence, file_task, trajectory
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def pool():
    with ProcessPool("bfcl", workers=2, timeout=60.0) as pool:
        yield pool


@pytest.fixture(scope="module")
def roles():
    return scripted.make(None, envs.load("bfcl"))


# Reflection


def test_boundary_focus_is_where_successes_and_failures_part(roles):
    ok = trajectory(0, 1.0, ("cd", {"folder": "x"}, None), ("mv", {"source": "a"}, None))
    bad = trajectory(1, 0.0, ("cd", {"folder": "x"}, None), ("cp", {"source": "a"}, '{"error": "no"}'))
    crashed = trajectory(2, 0.0, ("rm", {}, None), valid=False)
    (context,) = roles.reflector.reflect([evidence("boundary", file_task(), bad, [ok, crashed], step=5)])
    assert context.focus_pattern == ("mv", "cp")
    assert context.avoid == (r'cp({"source": "a"}): "{\"error\": \"no\"}"',)
    assert "1 of 2" in context.instability_pattern
    assert context.signal == "boundary" and context.id == "boundary/5/t/1"


# Exploration


def test_error_messages_point_to_tools():
    scenario = next(s for s in bfcl.scenarios("train") if s.scenario["toolsets"] == ["VehicleControlAPI"])
    box = toolbox(bfcl.tools(scenario))
    for text, tool in [
        ("All doors must be locked before starting the engine.", "lockDoors"),
        ("Brake pedal needs to be pressed when starting the engine.", "pressBrakePedal"),
    ]:
        failure = Triplet(0, 0, Call("startEngine", {"ignitionMode": "START"}), Observation(text, True))
        assert remedies(failure, box)[0].name == tool


@pytest.mark.parametrize(
    "text, values",
    [
        ('The mode. [Enum]: ["engage", "release"]', ("engage", "release")),
        ("The base currency. [Enum]: USD, RMB, EUR", ("USD", "RMB", "EUR")),
        ("Options are: economy, business, first.", ("economy", "business", "first")),
        ("Type of the order (Buy/Sell).", ("Buy", "Sell")),
        ("Mode ('l' for lines, 'w' for words).", ("l", "w")),
        ("Start date (format: 'YYYY-MM-DD').", ()),
    ],
)
def test_allowed_values_are_read_from_descriptions(text, values):
    assert named_values(text) == values


TOOLS = [{"type": "function", "function": {"name": "ls", "description": "Lists.", "parameters": {}}}]

# Wording


def test_instructions_are_short_imperatives():
    assert instruction("Starts the engine of the vehicle.") == "start the engine of the vehicle"
    assert instruction("Presses the brake pedal based on pedal position. Kept pressed.") == (
        "press the brake pedal based on pedal position"
    )
    assert value_text("it's") == '"it\'s"'
    long = "Find any file or directories under specific path that contain name in its file name. More."
    assert instruction(long) == "find any file or directories under specific path"


@pytest.mark.parametrize("doc", [{}, {"description": ""}, {"description": None}, {"description": " . "}])
@pytest.mark.parametrize("name, words", [("get_userId", "get user id"), ("pwd", "pwd"), ("_", "_")])
def test_a_tool_without_documentation_is_worded_by_its_name(name, words, doc):
    tools, rng = [{"type": "function", "function": {"name": name, **doc}}], np.random.default_rng(0)
    text = word([Call(name, {"a": 1})], tools, rng, wording=lambda call: "")
    assert text.lower() in (f"{words} (a 1).", f"{words} with a 1.")


def test_what_is_remembered_does_not_grow_with_the_training_set():
    explorer = scripted.make(None, envs.load("bfcl")).explorer
    state = {"folder": {"file": "content"}}
    episode = lambda n: Episode(
        unguided(Task(f"t{n}", "bfcl", {"initial_state": dict(state)}), f"c{n}"),
        TOOLS,
        (),
        0,
        np.random.default_rng(n),
    )
    for n in range(300):
        explorer.act([episode(n), episode(0)])
    assert len(explorer._banks) == KEPT and {"t0", "t299"} <= explorer._banks.keys()
    held = tools_module._tokens_of_name.cache_info().currsize
    assert tokens("a long answer " * 100) == tokens("a long answer")
    assert tools_module._tokens_of_name.cache_info().currsize <= held + 1


# Choice by name


def named(name):
    return ConfigDict({"explorer": {"name": name}, "environment": {"name": "bfcl", "python": ""}})


def test_the_config_names_the_explorer():
    assert build.explorer(named("scripted")).name == "scripted"
    assert build.explorer(named("coevolve_jax.explorers.scripted")).name == "scripted"


@pytest.mark.parametrize("name", ["qwen", "a.b", "", ".x", "base.x"])
def test_an_unknown_explorer_is_one_sentence_that_says_what_exists(name):
    message = (
        f"config.explorer.name is {name!r}: it must be one of llm, policy, scripted, or the dotted path of a "
        f"module that Python "
        "can import."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        build.explorer(named(name))


def test_a_module_that_makes_no_explorer():
    with pytest.raises(ValueError, match="'json.decoder', and json.decoder must define the function make"):
        build.explorer(named("json.decoder"))


# Mixing kinds, and the example of the docs


@pytest.fixture(scope="module")
def sweep():
    """All four roles, from a user's file."""
    return build.explorer(named("tests.support.explorers.sweep"))


@pytest.mark.slow
def test_an_explorer_of_ones_own_keeps_the_contract(sweep, pool):
    assert sweep.name == "sweep"
    check_explorer(sweep, bfcl.tools, pool, bfcl.scenarios("train")[::12])


@pytest.mark.slow
def test_the_example_of_the_docs_keeps_the_contract(pool, tmp_path, monkeypatch):
    """A user has it like this: a file on the Python path, named in the config."""
    page = (ROOT / "docs" / "guides" / "add_explorer.md").read_text()
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "curious.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    monkeypatch.syspath_prepend(tmp_path)
    roles = build.explorer(named("page.curious"))
    assert roles.name == "curious"
    check_explorer(roles, bfcl.tools, pool, bfcl.scenarios("train")[::12])


@pytest.mark.slow
def test_kinds_can_be_mixed(sweep, roles, pool):
    """The actions come from one explorer, the wording from another, the judgement from a third."""

    class Trusting:
        def judge(self, proposals, answers):
            return [[None] * len(p.turns) for p in proposals]

    mixed = roles._replace(name="mixed", explorer=sweep.explorer, validator=Trusting())
    check_explorer(mixed, bfcl.tools, pool, bfcl.scenarios("train")[::25])


# The conformance suite


def test_the_scripted_explorer_keeps_the_contract(roles, pool):
    check_explorer(roles, bfcl.tools, pool, bfcl.scenarios("train")[::12])


def lengthened(roles, batch, limits, shorten):
    """Adds a call that nobody made to every proposal."""
    groups = roles.abstractor.abstract(batch, limits, shorten)
    more = lambda p: dataclasses.replace(p, turns=(Turn("q", p.calls[:-1] + (Call("pwd", {"x": 1}),)),))
    return [[more(p) for p in group] for group in groups]


def without_replay(roles, batch, limits, shorten):
    """Proposes unshortened goals, whose steps need others before them."""

    def bare(goals):
        steps = lambda g: tuple(t for t in g.exploration.triplets if t.index in g.wanted)
        return [dataclasses.replace(g, steps=steps(g)) for g in goals]

    return roles.abstractor.abstract(batch, limits, bare)


def spoil(roles, batch):
    """Acts correctly and changes the tools that it is given."""
    calls = roles.explorer.act(batch)
    for e in batch:
        e.tools[0]["function"]["description"] += "!"
    return calls


def unled(roles, batch):
    """Acts as if there were no signal and no plan."""
    free = lambda context: unguided(context.task, context.id)
    return roles.explorer.act([dataclasses.replace(e, context=free(e.context)) for e in batch])


FAULTS = [
    ("reflector", "reflect", lambda r, b: r.reflector.reflect(b)[::-1],
        "reflector.reflect answers otherwise"),
    ("reflector", "reflect", lambda r, b: tuple(r.reflector.reflect(b)), "must be a list"),
    ("reflector", "reflect",
        lambda r, b: [dataclasses.replace(c, summary="") for c in r.reflector.reflect(b)],
        "without summary"),
    ("reflector", "reflect",
        lambda r, b: [dataclasses.replace(c, focus_pattern=()) for c in r.reflector.reflect(b)],
        "without focus_pattern"),
    ("reflector", "reflect",
        lambda r, b: [dataclasses.replace(c, avoid=["x"]) for c in r.reflector.reflect(b)],
        "avoid is .* tuple of texts"),
    ("reflector", "reflect",
        lambda r, b: [dataclasses.replace(c, signal=None) for c in r.reflector.reflect(b)],
        "a context of None"),
    ("reflector", "reflect", lambda r, b: [dataclasses.replace(c, id="c") for c in r.reflector.reflect(b)],
        "the id .'c'. to several"),
    ("reflector", "reflect",
        lambda r, b: [dataclasses.replace(c, id=f"{c.signal}/{c.task.id}") for c in r.reflector.reflect(b)],
        "contexts of two steps"),
    ("explorer", "act", lambda r, b: r.explorer.act(b)[:1] * len(b), "explorer.act answers otherwise"),
    ("explorer", "act", lambda r, b: r.explorer.act(b)[:-1], "returns .* entries for a batch of"),
    ("explorer", "act", lambda r, b: r.explorer.act(b) if b else None, "returns a NoneType"),
    ("explorer", "act", lambda r, b: [r.explorer.act(b)[0]] and r.explorer.act(b),
        "IndexError.* on a batch of 0"),
    ("explorer", "act", lambda r, b: [Call("book_flight", {}) for _ in b],
        "book_flight.* not among the tools"),
    ("explorer", "act", lambda r, b: [Call(e.tools[0]["function"]["name"], {"x": {1}}) for e in b],
        "no JSON object"),
    ("explorer", "act", lambda r, b: [None for _ in b], "calls no tool"),
    ("explorer", "act",
        lambda r, b: r.explorer.act([dataclasses.replace(e, rng=np.random.default_rng()) for e in b]),
        "generator only"),
    ("explorer", "act", spoil, "changes what it is given"),
    ("explorer", "act", unled, "explorer.act leaves the plan .* of the context planned-. aside"),
    ("abstractor", "abstract", lambda r, b, n, s: r.abstractor.abstract(b, n, s)[::-1],
        "abstractor.abstract answers otherwise"),
    ("abstractor", "abstract",
        lambda r, b, n, s: r.abstractor.abstract(b, dataclasses.replace(n, proposals=9), s),
        "at most 3 are wanted"),
    ("abstractor", "abstract",
        lambda r, b, n, s: r.abstractor.abstract(b, dataclasses.replace(n, max_turns=3), s),
        "the limits are .*max_turns=1"),
    ("abstractor", "abstract", lambda r, b, n, s: [g[:1] * 2 for g in r.abstractor.abstract(b, n, s)],
        "the same proposal of one context"),
    ("abstractor", "abstract",
        lambda r, b, n, s: r.abstractor.abstract(b, n, lambda goals: s(goals[::-1])[::-1]),
        "leaves the plan .* out of its first goal"),
    ("abstractor", "abstract", lengthened, "are not those of the exploration"),
    ("abstractor", "abstract", without_replay, "answers otherwise in a fresh environment"),
    ("validator", "judge", lambda r, p, e: [[None] for _ in p], "1 reasons for a proposal of"),
    ("validator", "judge", lambda r, p, e: [["bad"] * len(x.turns) for x in p], "none was accepted .*'bad'"),
    ("validator", "judge", lambda r, p, e: [[False] * len(x.turns) for x in p], "False. as a reason"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("role, method, fault, message", FAULTS)
def test_the_suite_finds_the_fault(roles, pool, role, method, fault, message):
    faulty = type("Faulty", (), {method: lambda self, *batch: fault(roles, *batch)})()
    scenarios = bfcl.scenarios("train")[::25]
    tools = lambda task: copy.deepcopy(bfcl.tools(task))
    with pytest.raises(AssertionError, match=message):
        check_explorer(roles._replace(**{role: faulty}), tools, pool, scenarios)


def test_the_suite_finds_what_only_a_second_run_shows(roles, pool):
    class Remembers:
        """Is exhausted after a whole run, so that the second round ends early."""

        full = False

        def act(self, episodes):
            calls = [
                None if self.full and (e.round, len(e.history)) == (1, 3) else call
                for e, call in zip(episodes, roles.explorer.act(episodes))
            ]
            self.full |= any((e.round, len(e.history)) == (1, 7) for e in episodes)
            return calls

    with pytest.raises(AssertionError, match="Two runs from equal generators"):
        check_explorer(roles._replace(explorer=Remembers()), bfcl.tools, pool, bfcl.scenarios("train")[::25])
