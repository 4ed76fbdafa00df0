"""A user's own tools: schemas, refusals and their words, worlds, grading, and the same class in TRL."""

import collections
import dataclasses
import enum
import inspect
import itertools
import json
import os
import re
import sys
import textwrap
import time
from pathlib import Path
from typing import Any, Literal, NewType, Optional, Union

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coevolve_jax import build, envs
from coevolve_jax import config as configs
from coevolve_jax.envs.tools import schema as schemas
from coevolve_jax.envs.tools.deadline import deadline
from coevolve_jax.envs.tools.environment import MAX_ANSWER, World
from coevolve_jax.envs.tools.source import Refused, load
from coevolve_jax.envs.tools.state import NoState, plain
from coevolve_jax.envs.tools.values import of_state
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.envs.worker_process import KEPT
from coevolve_jax.testing.environment import check_environment
from coevolve_jax.toolcheck import rewards
from coevolve_jax.types import Call, Task, Turn
from tests.support.paths import ROOT

SHOP = "examples/shop.py:Shop"
HEAD = "import datetime, functools, os, random, sys, threading, time, typing\n"
COUNTER = '''
class Counter:
    def reset(self, seed=0):
        self.n = seed % 7

    def add(self, x: int) -> int:
        """Adds a number.

        Args:
            x: The number, from 1 to 5.
        """
        self.n += x
        return self.n

    def look(self) -> int:
        """Shows the number."""
        return self.n
'''


@pytest.fixture
def written(tmp_path):
    """Writes a class's file, with the methods given, and returns its source."""

    def write(methods="", before=COUNTER, name="Own"):
        body = textwrap.indent(textwrap.dedent(methods), "    ") or "    pass\n"
        base = "(Counter)" if "class Counter" in before else ""
        path = tmp_path / "own_tools.py"
        path.write_text(f"{HEAD}{before}\n\nclass {name}{base}:\n{body}")
        return f"{path}:{name}"

    return write


def scenarios(source, split="train", **settings):
    return envs.load("tools").scenarios(split, {"source": source, **settings})


def worlds(source):
    """Returns scenarios made in this process: for sources that are known to be harmless."""
    return envs.family.module("tools").scenarios("train", {"source": source})


def played(source, *calls, scenario=None):
    """Returns a world of the source after some calls, and their observations."""
    world = World()
    world.reset(scenario or worlds(source)[0])
    return world, [world.step(call) for call in calls]


# ---- Schemas -------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Address:
    street: str
    number: int = 1


OLD_OPTIONAL, OLD_UNION = Optional[int], Union[int, str]  # noqa: UP007, UP045
HINTS = [
    str, int, float, bool, list, dict, tuple, Any, OLD_OPTIONAL, OLD_UNION, int | None, str | float | None,
    Literal["a", "b"], Literal[1, "x"], Literal[True], Colour, Colour | None, list[int], list[Colour],
    list[list[str]], list[int | None], dict[str, int], dict[str, list[float]], tuple[int, str],
    tuple[str, Colour], list[str] | None, list[int] | str, Literal["a"] | int, list[dict[str, Any]],
    dict[str, bool] | None, float | int, dict | list,
]  # fmt: skip


def function_of(hint, default=inspect.Parameter.empty, doc="Does it.\n\n    Args:\n        x: What.\n    "):
    def tool(x): ...

    tool.__doc__ = doc
    tool.__annotations__ = {"x": hint}
    parameter = inspect.Parameter("x", inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
    tool.__signature__ = inspect.Signature([parameter])  # type: ignore[attr-defined]
    return tool


def theirs(function):
    from transformers.utils import get_json_schema

    return get_json_schema(function)


@pytest.mark.parametrize("hint", HINTS, ids=str)
def test_a_schema_is_the_one_that_transformers_gives(hint):
    for default in (inspect.Parameter.empty, None):
        function = function_of(hint, default)
        assert schemas.schema(function) == theirs(function)


@pytest.mark.parametrize(
    "doc",
    [
        "Does it.\n\nArgs:\n    x: What\n",
        "Does it\nover two lines.\n\n    Args:\n        x: What\n            it is,\n            in full.\n",
        'Does it.\n\n    Args:\n        x: Which (choices: ["a", "b"])\n\n    Returns:\n        Not much.\n',
        "Does it.\n\n    Args:\n        x: What\n\n    Returns:\n        It.\n\n    Raises:\n        A: b\n",
        "Does it.\n\n    Args:\n\n        x: What: with a colon\n    Returns:\n        It.",
        "Fährt los.\n\n    Args:\n        x: Wohin – ans Ziel.\n",
        "Does it.\n\n    Args:\n        x: What.\n            Note: positive.\n            Or zero.\n",
        "Does it.\n\n    Args:\n        x: What.\n\n    Note:\n        Slow.\n\n    Example:\n        y: no",
        "Gets it. Returns: a thing.\n\n    Args:\n        x: What.\n",
        "Gets it.\n\n    Args:\n        x: What it Returns: not.\n    Returns: the thing",
    ],
)
def test_a_docstring_is_read_as_transformers_reads_it(doc):
    function = function_of(str, doc=doc)
    function.__annotations__["return"] = dict[str, int]
    assert schemas.schema(function) == theirs(function)


def test_a_dataclass_is_an_object_and_arrives_as_one():
    found = schemas.of_hint(Address)
    properties = {"street": {"type": "string"}, "number": {"type": "integer"}}
    assert found == {"type": "object", "properties": properties, "required": ["street"]}
    assert schemas.convert(Address, {"street": "Elm"}) == Address("Elm", 1)
    assert schemas.convert(list[Colour], ["red"]) == [Colour.RED]
    assert schemas.convert(tuple[int, str] | None, [1, "a"]) == (1, "a")
    assert schemas.convert(int, "no number") == "no number"  # as TRL passes it
    for hint, value, kind in [(float, 5, float), (int, 5.0, int), (int, 5.5, float), (int, True, bool)]:
        assert schemas.convert(hint, value) == value and type(schemas.convert(hint, value)) is kind
    with pytest.raises(ValueError, match="no field 'town'"):
        schemas.convert(Address, {"street": "Elm", "town": "X"})


@pytest.mark.parametrize(
    "hint, said",
    [
        (set, "its type set cannot be written as JSON"),
        (object, "its type object"),
        (tuple[int, ...], "no fixed length"),
        (enum.Enum("Empty", {}), "has values that JSON cannot"),
        (Literal[b"x"], "has values that JSON cannot"),
        (dict[Colour, int], "has keys of Colour, and JSON's are text"),
        (Address | int, "does not say whether it is Address or another type of the union"),
        (str | Colour | None, "does not say whether it is Colour"),
    ],
)
def test_a_type_without_a_schema_is_refused_with_the_argument(hint, said):
    with pytest.raises(schemas.Unfit, match=f"argument x: .*{said}"):
        schemas.schema(function_of(hint))
    assert schemas.of_hint(Address | None) == {**schemas.of_hint(Address), "nullable": True}


def test_a_tool_that_yields_is_refused():
    def lines() -> list[str]:
        """Reads lines."""
        yield "a"

    async def pages() -> list[str]:
        """Reads pages."""
        yield "a"

    for function in (lines, pages):
        with pytest.raises(schemas.Unfit, match="yields its answer, .*: return a list"):
            schemas.schema(function)


# ---- The state -----------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.tuples(inner, inner)
        | st.sets(st.integers() | st.text())
    ),
)


@settings(max_examples=50)
@given(VALUES)
def test_a_state_is_json_and_equal_for_equal_values(value):
    import copy

    found = plain(value, "x")
    assert json.loads(json.dumps(found)) == found
    assert json.dumps(plain(copy.deepcopy(value), "x"), sort_keys=True) == json.dumps(found, sort_keys=True)


def test_objects_are_written_by_class_and_attributes_in_any_order():
    class Open: ...

    class Shut: ...

    first, second = Open(), Open()
    first.__dict__.update(a=1, b={2, 1})
    second.__dict__.update(b={1, 2}, a=1)
    assert plain(first, "x") == plain(second, "x") != plain(Shut(), "x")
    assert plain([Colour.RED, np.random.default_rng(0)], "x") == ["red", "Generator"]


@pytest.mark.parametrize("kind", ["a method", "a function", "a class", "an iterator", "a generator"])
def test_what_has_no_json_form_is_named(kind):
    class Here: ...

    values = {"a method": [].append, "a function": lambda: 0, "a class": Here, "an iterator": iter([])}
    value = values.get(kind, (i for i in ()))
    with pytest.raises(NoState, match=r"shop\['a'\] is a "):
        plain({"a": value}, "shop")
    loop: list = []
    loop.append(loop)
    with pytest.raises(NoState, match="contains itself"):
        plain(loop, "loop")


def test_what_a_file_defines_once_is_written_by_its_name():
    found = plain([sys, Address, played, len, re.compile("a|b"), {"of": np.ndarray}], "x")
    name = __name__
    assert found == ["sys", f"{name}.Address", f"{name}.played", "builtins.len", "re.compile('a|b')",
                     {"of": "numpy.ndarray"}]  # fmt: skip


def test_an_entry_of_a_defaultdict_that_is_as_empty_as_a_new_one_is_no_state():
    counts, tags = collections.defaultdict(int, a=0, b=2), collections.defaultdict(set)
    assert plain(counts, "x") == {"b": 2} and plain(tags, "x") == {}
    assert tags["later"] == set() and plain(tags, "x") == {} and set(tags) == {"later"}
    mixed = collections.defaultdict(list, a="", b=[0], c={}, d=[])
    assert plain(mixed, "x") == {"a": "", "b": [0], "c": {}}
    made = collections.defaultdict(itertools.count().__next__, a=0)  # to ask it for a new one would change it
    assert plain(made, "x") == {"a": 0} and made["b"] == 0
    assert plain({"a": 0, "b": []}, "x") == {"a": 0, "b": []}


# ---- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "methods, said",
    [
        ("def f(self, x): \n    '''F.'''\n", "Own.f has no type hint for x"),
        ("def f(self, x: int): ...\n", "Own.f has no docstring"),
        ("def f(self, *x: int):\n    '''F.'''\n", r"Own.f takes \*x"),
        ("def f(self, x: int, /):\n    '''F.'''\n", "Own.f takes x by position only"),
        ("def f(self, x: 'Nowhere'):\n    '''F.'''\n", "Own.f has type hints that cannot be read"),
        ("def f(self, x: datetime.date):\n    '''F.'''\n", "argument x: its type date cannot be written"),
        ("plus = Counter.add\n", r"own_tools.py:\d+: Own has two names for one tool, plus and add"),
        (
            "def f(self, x: typing.TypedDict('At', {'x': int})):\n    '''F.'''\n",
            "its type At is a TypedDict: make it a dataclass",
        ),
        ("g = functools.partialmethod(Counter.add, k=1)\n", "Own.g is a functools.partialmethod"),
        (
            "def reset(self, seed=0):\n    raise KeyError('db')\n",
            r"Own.reset\(seed=0\) raises KeyError: 'db'",
        ),
        ("def reset(self, seed=0):\n    return 5\n", "Own.reset returns a int"),
        ("def __init__(self, path): ...\n", r"Own\(\) raises TypeError"),
        ("def reset(self, seed=0):\n    self.lock = threading.Lock()\n", "Own.lock is a _thread.lock"),
        ("def reset(self, seed=0):\n    self.at = time.time_ns()\n", "begins otherwise each time, at"),
        ("scenarios = [1]\n", r'Own.scenarios must be \{"train"'),
        ("scenarios = {'dev': [{}]}\n", "Own.scenarios has no split 'train', but dev"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_in_one_sentence_with_its_line(written, methods, said):
    source = written(methods)
    with pytest.raises(ValueError, match=said) as refusal:
        worlds(source)
    text = str(refusal.value)
    assert "\n" not in text
    assert "own_tools.py" in text or "partialmethod" in text


@pytest.mark.parametrize(
    "source, said",
    [
        ("", "is '': give a class, such as \"my_env:Shop\""),
        ("nowhere:Shop", "names the module nowhere, which is neither in"),
        ("examples/nowhere.py:Shop", "names the file examples/nowhere.py, which does not exist"),
        ("examples/shop.py:Stop", "has no class Stop: it has Shop"),
    ],
)
def test_a_source_that_is_not_there_is_named(source, said, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match=said):
        worlds(source)


def test_a_file_that_cannot_be_executed_is_named_with_its_line(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("x = 1\n\nimport no_such_package\n")
    with pytest.raises(
        Refused, match=r"broken.py:3: .*ModuleNotFoundError: No module named 'no_such_package'"
    ):
        load(f"{path}:Shop")
    path.write_text("class A:\n    def f(self:\n")
    with pytest.raises(Refused, match=r"broken.py:2: .*SyntaxError"):
        load(str(path))
    path.write_text("class A:\n    def reset(self): ...\nclass B:\n    def reset(self): ...\n")
    with pytest.raises(Refused, match=r"several classes \(A, B\)"):
        load(str(path))


def test_code_that_does_not_return_is_stopped_also_where_it_sleeps():
    import time

    for wait in (lambda: time.sleep(60), lambda: [None for _ in iter(int, 1)]):
        with pytest.raises(Refused, match="reset does not return within 0.2 seconds"), deadline(0.2, "reset"):
            wait()


def test_a_reset_that_ends_the_process_is_a_sentence(written):
    said = r"asked for its scenarios .* ended with code 3, in .*own_tools.py:\d+: Own.reset\(seed=2\);"
    with pytest.raises(ValueError, match=said):
        scenarios(written("def reset(self, seed=0):\n    seed == 2 and os._exit(3)\n    self.n = seed\n"))


def test_what_a_tool_prints_stays_off_the_terminal_and_its_end_is_shown_where_it_dies(written, capfd):
    source = written("def shout(self):\n    '''S.'''\n    sys.stderr.write('e' * 10**6 + chr(10))\n"
        "def die(self):\n    '''D.'''\n    sys.stderr.write('out of cheese')\n    os._exit(3)\n")  # fmt: skip
    (world,) = scenarios(source)[:1]
    with ProcessPool("tools", workers=1, timeout=10.0) as pool:
        (env_id,) = pool.reset([world])
        ((said,),) = pool.step([env_id], [[Call("shout", {})]])
        assert not said.error and capfd.readouterr().err == ""
        assert pool.step([env_id], [[Call("die", {})]])[0][0].fatal
    shown = capfd.readouterr().err
    assert shown.endswith("out of cheese") and len(shown) <= 2 * KEPT


def test_of_many_scenarios_the_first_are_read_where_that_is_asked(written):
    source = written(
        "scenarios = {'train': [{'seed': i} for i in range(9)]}\ndef reset(self, seed): self.n = seed\n"
    )
    found = envs.tools.scenarios("train", {"source": source, "most": 3})
    assert [world.scenario["reset"] for world in found] == [{"seed": 0}, {"seed": 1}, {"seed": 2}]


def test_what_a_world_prints_is_no_part_of_the_check(written, capfd):
    source = written(
        "def reset(self, seed=0): print('noise')\ndef get_reward(self):\n    print('noise')\n    return 2\n"
    )
    config = configs.override(
        configs.load_file(ROOT / "configs" / "tools.py"), {"environment.source": source}
    )
    world = Task("w", "tools", {"source": source, "reset": {}})
    assert "get_reward returns 2" in rewards.fault(config, [(world, ())]) and capfd.readouterr().out == ""


# ---- Worlds --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_shop_conforms():
    settings = {"source": str(ROOT / SHOP.partition(":")[0]) + ":Shop", "eval_split": "development"}
    family = envs.load("tools")
    task = family.scenarios("train", settings)[0]
    assert len(family.tools(task)) == 10
    # The suite asks for tasks of the benchmark, and this family has none without get_reward.
    with pytest.raises(AssertionError, match="gives no tasks"):
        check_environment("tools", settings=settings)


REWARDED = '''
class Guess:
    def reset(self, seed=0, **row):
        self.secret, self.tries = seed % 50, []
        return f"Guess a number from 0 to 49. Hint: {self.secret}"

    def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: From 0 to 49.
        """
        if not 0 <= number < 50:
            raise ValueError(f"{number} is not from 0 to 49")
        self.tries.append(number)
        return "right" if number == self.secret else "wrong"

    def get_reward(self) -> float:
        return 1.0 if self.secret in self.tries else 0.2 * bool(self.tries)
'''


@pytest.mark.slow
def test_a_class_that_rewards_conforms_and_its_reward_is_the_score(tmp_path):
    path = tmp_path / "guess.py"
    path.write_text(REWARDED)
    settings = {"source": f"{path}:Guess", "eval_split": "development"}
    check_environment("tools", settings=settings, calls=[Call("guess", {"number": 3})])
    task = envs.load("tools").tasks("test", settings)[0]
    secret = task.scenario["initial_state"]["Guess"]["secret"]
    assert task.turns[0].query.endswith(str(secret)) and not task.system
    for numbers, reward in ((), 0.0), ((secret + 1 % 50,), 0.2), ((1, secret), 1.0):
        world, _ = played(settings["source"], *(Call("guess", {"number": n}) for n in numbers), scenario=task)
        assert world.score().reward == 0.0  # the turn has not ended
        world.end_turn()
        assert (world.score().reward, world.score().success) == (reward, reward >= 0.5)


def test_splits_share_no_world_and_a_single_world_is_in_all(written):
    parts = {
        split: {s.scenario["begins"] for s in scenarios(SHOP, split)}
        for split in ("train", "development", "test")
    }
    assert [len(part) for part in parts.values()] == [72, 24, 24]
    assert len(set().union(*parts.values())) == 120
    seven = {split: [s.scenario["reset"]["seed"] for s in scenarios(written(), split)] for split in parts}
    assert seven == {"train": [0, 3, 4, 5], "development": [1, 6], "test": [2]}
    single = written("def reset(self):\n    self.n = 0\n")
    assert [len(scenarios(single, split)) for split in parts] == [1, 1, 1]


def test_worlds_are_begun_once_until_the_file_changes(written, tmp_path):
    log = tmp_path / "log"
    source = written(
        f"def reset(self, seed=0):\n    open({str(log)!r}, 'a').write('.')\n    super().reset(seed)\n"
    )
    family, settings = envs.family.module("tools"), {"source": source}
    first = [family.scenarios(split, settings) for split in ("train", "development", "train")]
    assert len(log.read_text()) == 2 * 120 and first[0] == first[2] != first[1]
    os.utime(tmp_path / "own_tools.py", (0, 0))
    assert family.scenarios("train", settings) == first[0] and len(log.read_text()) == 4 * 120


def test_an_edited_file_has_its_new_tools_at_once(written, tmp_path):
    source, path, family = written(), tmp_path / "own_tools.py", envs.load("tools")
    names = lambda: [tool["function"]["name"] for tool in family.tools(scenarios(source)[0])]
    assert names() == ["add", "look"]
    path.write_text(path.read_text().replace("def add", "def increase"))
    os.utime(path, (0, 0))
    assert names() == ["increase", "look"]  # though its worlds begin as before


def test_named_scenarios_are_the_splits_and_none_begins_as_one_of_the_other(written):
    source = written(
        'scenarios = {"train": [{"seed": 1}, {"seed": 8}, {"seed": 2}],\n'
        '    "development": [{"seed": 2}, {"seed": 3}]}\n'
        'values = {"x": [4, 5]}\n'
    )
    assert [s.scenario["reset"] for s in worlds(source)] == [{"seed": 1}, {"seed": 2}]  # 8 begins as 1
    family = envs.load("tools")
    apart = family.scenarios("development", {"source": source}, "train")
    assert [s.scenario["reset"] for s in apart] == [{"seed": 3}]
    assert apart[0].scenario["values"] == {"x": [4, 5]}


def test_what_resets_text_says_is_the_system_message_also_of_new_tasks():
    config = configs.load_file(ROOT / "configs" / "tools.py", f"source={ROOT / 'examples/shop.py'}:Shop")
    from coevolve_jax.loop.initial import explore, task_pool
    from coevolve_jax.synthesis.pipeline import Synthesizer

    family, tasks = build.family(config), task_pool(config)
    with build.env_pool(config) as pool:
        roles = build.explorer(config, None, None)
        explore(
            Synthesizer(roles, family.tools, pool, config, None),
            tasks,
            build.scenarios(config),
            6,
            "initial",
            0,
        )
    assert {task.system for task in tasks} == {
        "You help in a shop. Use its tools, and answer with what the user asks for."
    }
    for task in tasks:  # by another reading of the calls: the class itself
        namespace: dict[str, Any] = {}
        exec((ROOT / "examples/shop.py").read_text(), namespace)
        shop = namespace["Shop"]()
        shop.reset(**task.scenario["reset"])
        for call in task.calls:
            getattr(shop, call.name)(**call.arguments)


def test_answers_are_text_json_or_str_and_errors_are_errors(written):
    source = written(
        """
        async def wait(self) -> dict:
            '''Waits.'''
            return {"n": self.n, "set": {1}}

        def big(self) -> str:
            '''Says much.'''
            return "x" * 10**8

        def leave(self) -> str:
            '''Leaves.'''
            sys.exit(4)

        def polite(self) -> dict:
            '''Refuses.'''
            return {"error": "not today"}

        def kind(self, of: Kind) -> dict:
            '''Returns what it was given, as an agent gives it.'''
            self.last = of
            return {"kind": of, "count": {of: 1}, "all": [Kind.ONE]}
        """,
        before=COUNTER + "\nimport enum\nKind = enum.Enum('Kind', {'ONE': 'a room', 'TWO': 2})\n",
    )
    calls = [Call(n, {}) for n in ("wait", "big", "leave", "polite", "nothing")] + [Call("add", {"x": "one"})]
    _, (*others, kind) = played(source, *calls, Call("kind", {"of": 2}))
    wait, big, leave, polite, nothing, add = others
    assert json.loads(kind.text) == {"kind": 2, "count": {"2": 1}, "all": ["a room"]}
    assert json.loads(wait.text) == {"n": 0, "set": [1]} and not wait.error
    assert len(big.text) < MAX_ANSWER + 60 and "99980000 more characters" in big.text
    assert all(o.error for o in (leave, polite, nothing, add))
    assert "ended the program (exit 4)" in leave.text and "There is no tool" in nothing.text
    assert "unsupported operand" in add.text


def test_worlds_share_neither_class_attributes_nor_globals_nor_chance(written):
    source = written(
        """
        seen = []

        def remember(self, word: str) -> int:
            '''Remembers.'''
            self.seen.append(word)
            HEARD.append(word)
            return len(self.seen) + len(HEARD)

        def roll(self) -> int:
            '''Rolls a die.'''
            return random.randint(1, 10**9)
        """,
        before=COUNTER + "\nHEARD = []\n",
    )
    a, b = World(), World()
    for world in (a, b):
        world.reset(worlds(source)[0])
    rolls = [[], []]
    for _ in range(3):
        for world, own in zip((a, b), rolls):
            own.append(world.step(Call("roll", {})).text)
    assert rolls[0] == rolls[1] and len(set(rolls[0])) == 3
    before = b.fingerprint()
    assert [a.step(Call("remember", {"word": "x"})).text for _ in range(2)] == ["2", "4"]
    assert b.fingerprint() == before != a.fingerprint()
    assert b.step(Call("remember", {"word": "x"})).text == "2"


def test_a_turn_needs_the_state_and_what_was_looked_up():
    scenario = scenarios(SHOP)[0]
    customer = next(iter(scenario.scenario["initial_state"]["Shop"]["customers"]))
    look, pay = (
        Call("show_balance", {"customer": customer}),
        Call("pay_in", {"customer": customer, "amount": 5}),
    )
    task = dataclasses.replace(scenario, turns=(Turn("Look, then pay.", (look, pay)),))
    for calls, passes, reason in [
        ((look, pay), True, "passed"),
        ((look, Call("list_customers", {}), pay), True, "passed"),
        ((pay,), False, "answer_missing"),
        ((look,), False, "state_differs"),
        ((look, pay, pay), False, "state_differs"),
        ((), False, "state_differs"),
    ]:
        world, _ = played(SHOP, *calls, scenario=task)
        world.end_turn()
        assert (world.score().success, world.score().reason) == (passes, reason)


def test_a_file_of_functions_is_an_environment(tmp_path):
    path = tmp_path / "lamp.py"
    path.write_text(
        'LIT = {"hall": False}\nCOUNT = 0\n\ndef switch(room: str) -> bool:\n    """Switches a lamp.\n\n'
        '    Args:\n        room: The room.\n    """\n    global COUNT\n    COUNT += 1\n'
        "    LIT[room] = not LIT[room]\n    return LIT[room]\n\ndef _helper(): ...\n"
    )
    world, (first, wrong) = played(
        str(path), Call("switch", {"room": "hall"}), Call("switch", {"room": "attic"})
    )
    assert (first.text, wrong.error) == ("true", True)
    assert world._own.state() == {"COUNT": 2, "LIT": {"hall": True}}


def test_arguments_get_the_values_of_their_name_and_others_what_is_left():
    state = {
        "customers": {"Ada": 5, "Ben": 7},
        "stock": {"lamp": {"price": 3, "maker": "Acme"}, "mug": {"price": 1, "maker": "Bolt"}},
        "orders": {},
        "open": [{"product": "rug", "by": "Cleo"}],
    }
    text, described = {"type": "string"}, lambda d: {"type": "string", "description": d}
    parameters = {
        "customer": text, "order_id": text, "product": text, "maker_name": text, "count": {"type": "integer"},
        "other": text, "message": text, "mode": described("One of: a, b"), "file": described("A new file"),
        "colour": {"type": "string", "enum": ["red"]},
    }  # fmt: skip
    tool = {"function": {"name": "do", "parameters": {"properties": parameters}}}
    assert of_state(state, [tool]) == {
        "do.customer": ["Ada", "Ben"],
        "do.product": ["rug"],
        "do.maker_name": ["Acme", "Bolt"],
        "do.other": ["lamp", "mug", "Cleo"],
    }


# ---- Hostile tools in worker processes -----------------------------------------------------------


def test_tools_that_hang_fork_print_or_exit_cost_their_own_world_alone(written):
    source = written(
        """
        def hang(self) -> int:
            '''Hangs.'''
            while True: pass

        def fork(self) -> int:
            '''Forks.'''
            os.fork()
            self.n += 1
            return self.n

        def say(self) -> int:
            '''Prints.'''
            print("{"); sys.stdout.flush(); os.write(1, b"raw"); os.write(2, b"")
            return len(sys.stdin.read())

        def kill(self) -> int:
            '''Kills.'''
            os._exit(4)

        def close(self) -> int:
            '''Closes streams.'''
            sys.stdout.close(); os.close(0); os.close(1)
            return 7
        """
    )
    scenario = worlds(source)[0]
    add = Call("add", {"x": 1})
    with ProcessPool("tools", workers=1, timeout=5.0) as pool:
        ids = pool.reset([scenario] * 2)
        close, say = pool.step(ids, [[Call("close", {}), Call("say", {})], [Call("say", {}), add]])
        assert [o.text for o in close] == ["7", "0"] and [o.text for o in say] == ["0", "1"]
        assert pool.restarts == 0
    with ProcessPool("tools", workers=2, timeout=1.0) as pool:
        ids = pool.reset([scenario] * 6)
        calls = [[add, Call(name, {}), add] for name in ("hang", "fork", "say", "kill", "look", "add")]
        calls[-1][1] = add
        hang, fork, say, kill, look, plain_world = pool.step(ids, calls)
    assert [o.text for o in fork] == ["1", "2", "3"]
    assert [o.text for o in say] == ["1", "0", "2"]
    assert [o.text for o in look] == ["1", "1", "2"] and [o.text for o in plain_world] == ["1", "2", "3"]
    for broken, why in ((hang, "timeout"), (kill, "crash")):
        assert broken[0].text == "1" and all(o.fatal and o.valid for o in broken[1:])
        assert why in broken[1].text


@pytest.mark.parametrize("killed", [True, False])
def test_what_a_tool_starts_ends_with_its_worker(written, killed):
    """Also where the worker ends because nobody asks it any more."""
    source = written(
        """
        def background(self) -> int:
            '''Starts a program.'''
            import subprocess
            return subprocess.Popen(["sleep", "600"]).pid
        """
    )

    def state():
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return "Z"

    with ProcessPool("tools", workers=1, timeout=5.0) as pool:
        ((started,),) = pool.step(pool.reset([worlds(source)[0]]), [[Call("background", {})]])
        pid = int(started.text)
        assert state() != "Z"
        if not killed:
            (worker,) = pool._workers
            worker._questions.close()
            worker.process.wait()
    while state() != "Z":  # nobody may be there to bury it
        time.sleep(0.05)


# ---- The same class in TRL -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.nightly
def test_trl_finds_the_same_tools_and_trains_on_the_class_unchanged(tmp_path, monkeypatch):
    trl = pytest.importorskip("trl")
    from pathlib import Path

    from datasets import Dataset
    from transformers import AutoTokenizer

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from shop import Shop

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "tiny_qwen3")
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    question = [{"role": "user", "content": "Add 5 to the balance of Ada."}]
    trainer = trl.GRPOTrainer(
        model=str(ROOT / "models" / "tiny_qwen3"),
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        environment_factory=Shop,
        train_dataset=Dataset.from_dict({"prompt": [question] * 2}),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path), max_steps=1, num_generations=2, per_device_train_batch_size=2,
            max_completion_length=8, report_to=[], use_cpu=True, save_strategy="no",
        ),
    )  # fmt: skip
    found = [theirs(method) for method in trainer._env_tools[None]]
    assert found == load(str(ROOT / SHOP.partition(":")[0]) + ":Shop").schemas()
    trainer.train()
    assert trainer.state.global_step == 1


def test_values_are_read_for_items_and_for_fields_within_an_argument():
    text = {"type": "string"}
    payment = {"type": "object", "properties": {"target": text, "amount": {"type": "integer"}}}
    properties = {"payment": payment, "friends": {"type": "array", "items": text}}
    tool = {"function": {"name": "pay", "parameters": {"properties": properties}}}
    found = of_state({"targets": {"Ada": 1}, "friends": ["Ben"]}, [tool])
    assert found == {"pay.target": ["Ada"], "pay.friends": ["Ben"]}


def test_a_new_type_is_what_it_is_made_of():
    Id = NewType("Id", int)
    assert schemas.of_hint(Id) == {"type": "integer"} and schemas.convert(Id, 5.0) == 5
