"""A user's own tools: worlds that share a state, chance of NumPy, odd states, rewards, errors and files."""

import dataclasses
import enum
import os
import re
import subprocess
import sys
import textwrap
import typing

import pytest

from coevolve_jax import config as configs
from coevolve_jax import envs
from coevolve_jax.envs.tools import schema as schemas
from coevolve_jax.envs.tools.environment import Instance, World
from coevolve_jax.envs.tools.source import Refused, load
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.toolcheck import facts, findings, rewards
from coevolve_jax.toolcheck.lines import Lines
from coevolve_jax.types import Call, Turn
from tests.support.paths import ROOT


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a file and returns its source."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text, name="own_world", kind="Own"):
        path = tmp_path / f"{name}.py"
        path.write_text(textwrap.dedent(text))
        return f"{path}:{kind}" if kind else str(path)

    return write


def worlds(source):
    """Returns scenarios made in this process: the sources below are harmless."""
    return envs.family.module("tools").scenarios("train", {"source": source})


def played(source, *calls):
    """Returns a new world of the source, and its answers to the calls."""
    world = Instance(source, {"seed": 1})
    return world, [world.call(call) for call in calls]


def graded(source, made, reference):
    """Returns the outcome of a task, with these reference calls, in whose world calls were made."""
    world = World()
    world.reset(dataclasses.replace(worlds(source)[0], turns=(Turn("Do it.", reference),)))
    for call in made:
        world.step(call)
    world.end_turn()
    return world.score()


# ---- Worlds that share a state -------------------------------------------------------------------

SHARED = '''
import own_store

class Own:
    def reset(self, seed=0):
        own_store.SUM[:] = [seed]

    def state(self):
        return list(own_store.SUM)

    def add(self, n: int) -> str:
        """Adds.

        Args:
            n: From 1 to 5.
        """
        own_store.SUM[0] += n
        return "added"
'''


def test_a_state_that_worlds_share_is_found_and_gives_no_reward(written):
    written("SUM = [0]", name="own_store")
    source, add = written(SHARED), Call("add", {"n": 2})
    assert [graded(source, made, (add,)).reason for made in ((), (add,), (add, add))] == ["state_shared"] * 3
    config = configs.load_file(ROOT / "configs" / "tools.py", f"source={source}")
    config.environment.workers = 1
    jobs = [(world, (add, add)) for world in worlds(source)[:2]]
    with ProcessPool("tools", workers=1) as pool:
        first, second = pool.execute(jobs), pool.execute(jobs)
        assert not facts._unlike(config, jobs, first, second)
        (unlike,) = facts._unlike(config, jobs, first, facts._side_by_side(pool, jobs))
    assert unlike.call == add and not unlike.alone


@pytest.mark.slow
@pytest.mark.nightly
def test_the_check_stops_at_worlds_that_share_a_state_and_at_a_reward_outside_0_to_1(written):
    written("SUM = [0]", name="own_store")
    source = written(SHARED + "\n    def get_reward(self):\n        return 100.0\n")
    config = configs.load_file(ROOT / "configs" / "tools.py", f"source={source}")
    found = facts.gather(config, ["train"], worlds=2)
    assert found.proposed < 100  # 18, where a long search in vain proposes 399
    stops = [str(f) for f in findings.findings(config, found, Lines(source.partition(":")[0])) if f.stops]
    assert re.match(r".*own_world.py:11: add depends on other worlds beside it: add\(n=", stops[0])
    assert stops[1].partition(":20: ")[2].startswith("Own.get_reward returns 100.0. Let it return")


LOOSE = '''
class Own:
    values = {"owner": ["Ada", "Ben", "Cleo"]}

    def reset(self, seed=0):
        self.owners = {"Ada": 1, "Ben": 2, "Cleo": 3}

    def is_poor(self, owner: str) -> bool:
        """Tells whether an owner is poor.

        Args:
            owner: It.
        """
        return self.owners[owner] < 0

    def balance(self, owner: str) -> int:
        """Tells the balance of an owner.

        Args:
            owner: It.
        """
        return self.owners[owner]
'''


def test_tasks_that_pass_with_another_argument_are_counted_by_their_tools(written):
    (world,) = worlds(written(LOOSE))
    of = lambda name, owner: Call(name, {"owner": owner})
    turns = [
        [[of("is_poor", "Ada")]],
        [[of("balance", "Ben")], [of("is_poor", "Ben")]],  # passes where the second turn has another owner
        [[of("balance", "Ben"), of("balance", "Cleo")]],
        [[Call("is_poor", {})]],  # nothing to exchange
    ]
    tasks = [
        dataclasses.replace(world, id=f"t{i}", turns=tuple(Turn("Do it.", tuple(calls)) for calls in each))
        for i, each in enumerate(turns)
    ]
    with ProcessPool("tools", workers=1) as pool:
        assert facts._loose(pool, tasks) == (3, {"is_poor": 2})
        assert facts._loose(pool, []) == (0, {})


def test_numpy_draws_what_the_world_decides_whoever_draws_beside_it(written):
    source = written(
        '''
        import numpy as np

        class Own:
            def reset(self, seed=0):
                if seed:
                    np.random.seed(seed)
                self.first = int(np.random.randint(10**9))

            def roll(self) -> int:
                """Rolls."""
                return int(np.random.randint(10**9))
        '''
    )
    for seed in (0, 1):  # one that does not seed, and one that does
        a, b = Instance(source, {"seed": seed}), Instance(source, {"seed": seed})
        rolls = [[world.call(Call("roll", {})).text for world in (a, b)] for _ in range(3)]
        assert a.state() == b.state() and all(one == other for one, other in rolls)
        assert len({one for one, _ in rolls}) == 3


@pytest.mark.parametrize("imported", ["numpy as np", "numpy.random, numpy as np"])
@pytest.mark.parametrize("drawn", ["self.first", "Own.drawn"])
def test_the_first_world_of_a_process_is_seeded_though_its_file_imports_numpy(written, imported, drawn):
    """NumPy loads its random numbers late, and no other code of a worker has imported it before."""
    source = written(
        f'''
        import {imported}

        class Own:
            drawn = int(np.random.randint(10**9))

            def reset(self, seed=0):
                self.first = int(np.random.randint(10**9))

            def roll(self) -> int:
                """Rolls."""
                return int(np.random.randint(10**9)) + {drawn}
        '''
    )
    code = f"""
import sys
from coevolve_jax.envs.tools.environment import Instance
from coevolve_jax.types import Call
assert "numpy" not in sys.modules
print(*(Instance({source!r}, {{"seed": 0}}).call(Call("roll", {{}})).text for _ in range(2)))
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    first, second = done.stdout.split()
    assert first == second


def test_types_of_a_file_are_those_of_the_world_that_is_called(written):
    """Type hints written as text are looked up when a call comes, and other worlds began meanwhile."""
    source = written(
        '''
        from __future__ import annotations
        import dataclasses, enum, pickle

        class Color(enum.Enum):
            RED = "red"

        @dataclasses.dataclass
        class Item:
            color: Color

        class Own:
            def reset(self, seed=0):
                self.red = 0

            def paint(self, item: Item) -> int:
                """Paints.

                Args:
                    item: What.
                """
                pickle.dumps(item)
                self.red += item.color is Color.RED
                return self.red
        '''
    )
    paint = Call("paint", {"item": {"color": "red"}})
    several = [Instance(source, {"seed": 0}) for _ in range(3)]
    assert [world.call(paint).text for world in several] == ["1"] * 3
    world, turn = World(), Turn("Paint.", (paint,))
    world.reset(dataclasses.replace(worlds(source)[0], turns=(turn, turn)))
    for _ in range(2):  # grading the first turn begins the reference's world
        world.step(paint)
        world.end_turn()
    assert world.score().success


# ---- The state -----------------------------------------------------------------------------------


def test_an_attribute_hides_no_data_of_the_file(written):
    source = written(
        '''
        stock = {"tea": 3}

        class Own:
            def reset(self, seed=0):
                self.stock = 0

            def take(self, n: int) -> str:
                """Takes some.

                Args:
                    n: From 1 to 3.
                """
                stock["tea"] -= n
                return "ok"
        '''
    )
    take = lambda n: (Call("take", {"n": n}),)
    assert graded(source, take(3), take(3)).success
    assert graded(source, take(1), take(3)).reason == "state_differs"


def test_scalars_that_a_class_changes_are_state_and_constants_are_not(written):
    source = written(
        '''
        TOTAL, RATE, SIZES = 0, 0.5, (1, [2])

        class Own:
            sold, label = 0, "x"

            def reset(self, seed=0): ...

            def sell(self, n: int) -> str:
                """Sells.

                Args:
                    n: From 1 to 5.
                """
                global TOTAL, LAST
                TOTAL += n
                LAST = SIZES[1][0] = n
                Own.sold += 1
                return "sold"
        '''
    )
    world, (said,) = played(source)[0], played(source, Call("sell", {"n": 3}))[1]
    assert world.state() == {} and not said.error
    assert played(source, Call("sell", {"n": 3}))[0].state() == {
        "LAST": 3, "Own.sold": 1, "SIZES": [1, [3]], "TOTAL": 3,
    }  # fmt: skip
    one, two = (Call("sell", {"n": n}) for n in (1, 2))
    assert graded(source, (one,), (two,)).reason == "state_differs"


def test_a_long_integer_is_state(written):
    source = written(
        '''
        class Own:
            def reset(self, seed=0):
                self.n = 7

            def grow(self) -> str:
                """Grows."""
                self.n = self.n ** 10_000
                return "grown"
        '''
    )
    assert graded(source, (), (Call("grow", {}),)).reason == "state_differs"
    assert played(source, Call("grow", {}))[0].state() == {"n": hex(7**10_000)}


TOOL = '''
def put(x: int) -> int:
    """Puts.

    Args:
        x: It.
    """
    state["x"] = x
    return x
'''
SLOTS = '''
class Base:
    __slots__ = "n"

class Own(Base):
    __slots__ = ("__hidden",)

    def reset(self, seed=0):
        self.n, self.__hidden = seed, [1]

    def look(self) -> int:
        """Looks."""
        return self.n
'''


def test_a_state_that_is_data_and_slots_are_state(written):
    functions = written("state = {'x': 0}\n" + TOOL, kind="")
    assert played(functions, Call("put", {"x": 4}))[0].state() == {"state": {"x": 4}}
    assert played(written(SLOTS))[0].state() == {"_Own__hidden": [1], "n": 1}
    kind = SLOTS.replace("class Own(Base):", "class Own(Base):\n    state = {'a': 1}")
    assert played(written(kind))[0].state()["Own.state"] == {"a": 1}


def test_a_tool_with_the_name_state_is_refused(written):
    source = written(
        SLOTS + '\n    def state(self, name: str) -> str:\n        """Of it."""\n        return name\n'
    )
    with pytest.raises(
        Refused, match=r"own_world.py:15: Own.state needs name, and the name state is reserved"
    ):
        load(source)


@pytest.mark.parametrize("decorator", ["property", "functools.cached_property"])
def test_a_state_that_is_a_property_is_refused_with_its_line(written, decorator):
    source = written(f"import functools\n{SLOTS}\n    @{decorator}\n    def state(self): return self.n\n")
    kind = decorator.rpartition(".")[2]
    with pytest.raises(Refused, match=rf"own_world.py:1[67]: Own.state is a {kind}: make it a method, def"):
        load(source)


VALUES = """
import collections, datetime, decimal, os, types
import own_model

balance, jobs, box = decimal.Decimal("100.0"), collections.deque(), types.SimpleNamespace(n=0)
cart, day, seen = own_model.Cart(), datetime.date(2026, 1, 1), frozenset()
"""
CHANGES = {
    "balance": "balance -= n",
    "jobs": "jobs.append(n)",
    "box": "box.n += n",
    "cart": "cart.items.append(n)",
    "day": "day += datetime.timedelta(n)",
    "seen": "seen |= {n}",
}


@pytest.mark.parametrize("name", CHANGES)
def test_all_data_of_a_file_of_functions_is_state_and_of_a_classs_file_once_it_changes(written, name):
    written("class Cart:\n    def __init__(self):\n        self.items = []\n", name="own_model")
    words = '    """Does it.\n\n    Args:\n        n: How much.\n    """\n'
    change = f"{words}    global {name}\n    {CHANGES[name]}\n"
    source = written(f"{VALUES}\ndef change(n: int) -> None:\n{change}", kind="")
    call = lambda n: (Call("change", {"n": n}),)
    outcomes = [graded(source, call(made), call(2)) for made in (2, 1)]
    assert [o.reason for o in outcomes] == ["passed", "state_differs"]
    assert set(played(source)[0].state()) == set(CHANGES)

    body = textwrap.indent(change, "    ")
    method = f"class Own:\n    def reset(self, seed=0): ...\n    def change(self, n: int) -> None:\n{body}"
    source = written(VALUES + method)
    assert [graded(source, call(made), call(2)).success for made in (2, 1)] == [True, False]
    assert set(played(source)[0].state()) == {"jobs", "box"}  # these may change; the others have not
    assert set(played(source, *call(1))[0].state()) == {"jobs", "box", name}


REGISTRY = '''
import enum, threading

class Kind(enum.Enum):
    SLOW = "slow"

class Account:
    rate, kinds, registry = 3, {"slow": Kind.SLOW}, {}

    class Log:
        lines = []

class Own:
    def reset(self, seed=0):
        Account.registry = {"Ada": seed, "Ben": seed}
        self.owners = ["Ada", "Ben"]

    def pay_in(self, owner: str, amount: int) -> str:
        """Pays in.

        Args:
            owner: Of the account.
            amount: From 1 to 9.
        """
        Account.registry[owner] += amount
        return "done"

    def note(self, line: str) -> str:
        """Notes.

        Args:
            line: It.
        """
        Account.Log.lines.append(line)
        mark.last = line
        return "done"

def mark(): ...
'''


def test_what_calls_change_in_other_classes_and_functions_of_the_file_is_state(written):
    source = written(REGISTRY)
    pay = lambda owner, amount: (Call("pay_in", {"owner": owner, "amount": amount}),)
    note = lambda line: (Call("note", {"line": line}),)
    assert graded(source, pay("Ada", 5), pay("Ada", 5)).success
    for made in (pay("Ben", 5), pay("Ada", 1), ()):
        assert graded(source, made, pay("Ada", 5)).reason == "state_differs"
    assert graded(source, note("a"), note("b")).reason == "state_differs"
    state = played(source, *note("a"))[0].state()
    assert state == {
        "Account.Log.lines": ["a"], "Account.registry": {"Ada": 1, "Ben": 1}, "mark.last": "a",
        "owners": ["Ada", "Ben"],
    }  # fmt: skip
    assert len(worlds(source)) == 72  # they differ in nothing but the registry


STORE = '''
values = {}

def put(name: str, amount: int) -> str:
    """Puts.

    Args:
        name: It.
        amount: From 1 to 9.
    """
    values[name] = amount
    return "done"
'''


def test_a_store_with_the_name_values_is_state_once_it_changes_and_values_for_the_explorer_are_not(written):
    put = lambda name, amount: (Call("put", {"name": name, "amount": amount}),)
    method = STORE.replace("(name", "(self, name").replace(" values[", " self.values[")
    kind = f"class Own:\n    def reset(self, seed=0): ...\n{textwrap.indent(method, '    ')}"
    for source in (written(STORE, kind=""), written(kind, name="own_class")):
        assert graded(source, put("a", 3), put("a", 3)).success
        assert graded(source, put("b", 9), put("a", 3)).reason == "state_differs"
        assert played(source)[0].state() == {}
    declared = written('values = {"x": ["a"]}\nstate = {}\n' + TOOL, kind="")
    assert played(declared, Call("put", {"x": 4}))[0].state() == {"state": {"x": 4}}


CLOSURE = '''
def _make():
    basket = {}

    def add(item: str) -> str:
        """Adds.

        Args:
            item: It.
        """
        basket[item] = 1
        return "added"

    def take(item: str) -> str:
        """Takes.

        Args:
            item: It.
        """
        basket.pop(item)
        return "taken"

    return add, take


add, take = _make()
_again, _ = _make()
def count() -> str:
    """Counts elsewhere."""
    _again("x")
    return "done"
'''


def test_what_functions_keep_of_the_functions_around_them_is_state(written):
    source, add = written(CLOSURE, kind=""), lambda item: Call("add", {"item": item})
    assert graded(source, [add("a")], (add("a"),)).success
    assert graded(source, [add("b")], (add("a"),)).reason == "state_differs"
    assert graded(source, [], (Call("count", {}),)).reason == "state_differs"  # another basket of that name
    assert graded(source, [add("b"), Call("take", {"item": "b"}), add("a")], (add("a"),)).success


def test_data_of_an_imported_module_in_the_files_folder_is_state_that_worlds_share(written):
    written("ORDERS, PRICES, TABLE = {}, (1, 2), [1]\nclass Log:\n    lines = []\n", name="own_orders")
    change: dict[str, dict] = {"own_orders.ORDERS[name] = 1": {"ORDERS": {"a": 1}}}
    change["own_orders.Log.lines.append(name)"] = {"Log.lines": ["a"]}
    for line, changed in change.items():
        source = written(f"import own_orders\n{PUT.replace('return name', f'{line}; return 1')}", kind="")
        before = worlds(source)
        put = lambda name: Call("put", {"name": name})
        assert graded(source, [put("b")], (put("a"),)).reason == "state_shared"
        with pytest.raises(ValueError, match="begins in another state .* a file or module that worlds share"):
            World().reset(before[0])  # the next world of this process
        own = sys.modules["own_orders"]
        own.ORDERS.clear()
        own.Log.lines.clear()
        assert played(source)[0].state() == {}  # constants do not count
        state = played(source, put("a"))[0].state()
        assert state == {f"own_orders.{name}": value for name, value in changed.items()}
        own.ORDERS.clear()
        own.Log.lines.clear()


PUT = '''
def put(name: str) -> str:
    """Puts.

    Args:
        name: It.
    """
    return name
'''


@pytest.mark.parametrize(
    "data, said",
    [
        ("STATE = {'orders': {}, 'lock': threading.Lock()}", r"STATE\['lock'\] is a _thread.lock"),
        ("SEEN = [iter([])]", r"SEEN\[0\] is a list_iterator"),
        ("JOBS = queue.Queue()", "JOBS is a queue.Queue"),
        ("GRID = numpy.zeros(3)", "GRID is a numpy.ndarray"),
        ("ROWS = array.array('i')", "ROWS is a array.array"),
        ("BASE = sqlite3.connect(':memory:')", "BASE is a sqlite3.Connection"),
        ("CART = contextvars.ContextVar('cart')", "CART is a _contextvars.ContextVar"),
        ("OURS = own_stock.Store()", "OURS.lock is a _thread.lock"),
        ("class Account:\n    held = [threading.Lock()]", r"Account.held\[0\] is a _thread.lock"),
    ],
)
def test_data_beside_the_object_that_json_cannot_write_is_refused_by_its_name(written, data, said):
    store = "import threading\nclass Store:\n    def __init__(self): self.lock = threading.Lock()\n"
    written(store, name="own_stock")
    head = "import array, contextvars, queue, sqlite3, threading\nimport numpy, own_stock\n"
    source = written(f"{head}{data}\n{PUT}", kind="")
    with pytest.raises(Refused, match=rf"{said}, .*define state\(\), which returns"):
        worlds(source)
    method = textwrap.indent(PUT.replace("(name", "(self, name"), "    ")
    kind = f"class Own:\n    def reset(self, seed=0): ...\n{method}"
    with pytest.raises(Refused, match=rf"own_world.py:\d+: {said}, .*hold plain data .*state\(self\), which"):
        worlds(written(f"{head}{data}\n{kind}"))
    own = kind + "    def state(self): return 0\n"
    assert worlds(written(f"{head}{data}\n{own}"))[0].scenario["initial_state"] == {"Own": 0}


HARMLESS = """
import enum, functools, itertools, json, logging, os, pathlib, random, re, threading, typing
import numpy as np

class Kind(enum.Enum):
    SLOW = "slow"

class Point(typing.NamedTuple):
    x: int = 0
    how: typing.Callable = len

class Rule:
    def __init__(self, test): self.test = test
    def __call__(self, text): return self.test(text)

class Held:
    lock = threading.Lock()

def _upper(text): return text.upper()

lock, again, log, word = threading.Lock(), threading.RLock(), logging.getLogger("own"), re.compile("a")
names, chance, draw = itertools.count(), random.Random(0), np.random.default_rng(0)
T, Text, Number = typing.TypeVar("T"), list[str], int | None
HANDLERS, WORDS = {"upper": _upper, "cut": lambda text: text[:1], "len": len, "of": Kind}, [word]
RULE, POINT, HOME, KINDS = Rule(_upper), Point(), pathlib.Path("/"), frozenset({Kind.SLOW})
short, cached, out = functools.partial(json.dumps, indent=1), functools.cache(_upper), os.sys.stdout
"""


def test_constants_and_a_lock_that_stands_by_itself_are_neither_refused_nor_state(written):
    method = textwrap.indent(PUT.replace("(name", "(self, name"), "    ")
    source = written(f"{HARMLESS}\nclass Own:\n    def reset(self, seed=0): self.n = seed\n{method}")
    state = played(source)[0].state()
    # Of these calls could change some; they are written by their names.
    assert set(state) == {"n", "HANDLERS", "WORDS", "RULE", "POINT"}
    assert state["HANDLERS"]["upper"] == "own_world._upper" and state["RULE"]["test"] == "own_world._upper"
    assert len(worlds(source)) == 72 and played(written(HARMLESS + PUT, kind=""))[0].state()


def test_a_look_into_a_defaultdict_is_no_change(written):
    source = written(
        '''
        import collections

        class Own:
            def reset(self, seed=0):
                self.by_kind = collections.defaultdict(list)

            def tag(self, job: str, kind: str) -> dict:
                """Tags.

                Args:
                    job: It.
                    kind: It.
                """
                self.by_kind[kind].append(job)
                return "tagged"

            def kinds(self, kind: str) -> list:
                """Lists.

                Args:
                    kind: It.
                """
                return self.by_kind[kind]
        '''
    )
    look, tag = Call("kinds", {"kind": "later"}), Call("tag", {"job": "dig", "kind": "urgent"})
    assert graded(source, (look, tag), (tag,)).reason == "passed"
    assert graded(source, (tag,), (look, tag)).reason == "answer_missing"


def test_another_way_to_the_same_result_passes(written):
    source = written(
        '''
        import decimal

        class Stock(dict): ...

        class Own:
            def reset(self, seed=0):
                self.paid, self.rate, self.stock = 0.0, decimal.Decimal("1"), Stock()

            def pay(self, amount: float) -> str:
                """Pays.

                Args:
                    amount: How much.
                """
                self.paid += amount
                return f"{amount} euros"

            def set_rate(self, rate: str) -> None:
                """Sets.

                Args:
                    rate: It.
                """
                self.rate = decimal.Decimal(rate)

            def give(self, name: str) -> None:
                """Gives.

                Args:
                    name: To whom.
                """
                self.stock[name], self.stock.owner = 1.5, self.stock.__dict__.get("owner", name)

            def quote(self, amount: float) -> str:
                """Quotes.

                Args:
                    amount: How much.
                """
                return f"{amount * 2} euros"

            def show(self) -> dict:
                """Shows."""
                return self.stock | {"paid": self.paid}
        '''
    )
    pay, give = (lambda amount: Call("pay", {"amount": amount})), (lambda name: Call("give", {"name": name}))
    rate, quote, show = (lambda text: Call("set_rate", {"rate": text})), "quote", Call("show", {})
    asked = lambda amount: Call(quote, {"amount": amount})
    same = [
        ((pay(0.1), pay(0.2), pay(0.3)), (pay(0.3), pay(0.2), pay(0.1))),  # sums of floats
        ((pay(0.1), pay(0.2), show), (pay(0.3), show)),  # also in answers
        ((pay(0.1), pay(0.2), pay(-0.3), show), (show,)),  # and where they come to 0
        ((rate("105"),), (rate("105.0"),)),
        ((asked(5),), (asked(5.0),)),  # one number of JSON
        ((give("a"), pay(1), show), (pay(1), give("a"), show)),  # the order of keys
    ]
    for made, reference in same:
        for one, other in ((made, reference), (reference, made)):
            assert graded(source, one, other).reason == "passed", (one, other)
    other = [
        ((pay(0.1),), (pay(0.1001),)),
        ((pay(1764276000123.25),), (pay(1764276000123.5),)),
        ((pay(1.602e-19),), (pay(9.1e-31),)),  # small ones, also in answers
        ((pay(7e-14), show, pay(-7e-14)), (pay(2.5e-13), show, pay(-2.5e-13))),
        ((rate("105"),), (rate("105.01"),)),
        ((asked(5),), (asked(6),)),
        ((give("a"), give("b")), (give("b"), give("a"))),  # an attribute of a mapping
    ]
    for made, reference in other:
        assert not graded(source, made, reference).success, (made, reference)


def test_each_world_has_the_folder_that_its_code_changes_into(written, tmp_path, monkeypatch):
    source = written(
        '''
        import os, tempfile

        class Own:
            def reset(self, seed=0):
                os.chdir(tempfile.mkdtemp())
                self.names = []

            def write(self, name: str) -> list:
                """Writes.

                Args:
                    name: The file.
                """
                open(name, "w").close()
                self.names = sorted(os.listdir())
                return self.names
        '''
    )
    monkeypatch.chdir(tmp_path)
    own = f"own_world.py:{source.rpartition(':')[2]}"
    a, b = (Instance(own, {}) for _ in range(2))
    said = [w.call(Call("write", {"name": n})).text for w, n in ((a, "x"), (b, "y"), (a, "z"))]
    assert said == ['["x"]', '["y"]', '["x", "z"]'] and os.getcwd() == str(tmp_path)


def test_a_package_imports_its_own_files(tmp_path):
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").write_text("from .inside import Own\n")
    (tmp_path / "own_package" / "inside.py").write_text(SLOTS)
    source = f"{tmp_path}/own_package/__init__.py:Own"
    assert Instance(source, {"seed": 3}).call(Call("look", {})).text == "3"


# ---- Errors and files ----------------------------------------------------------------------------


def test_what_can_be_read_once_is_an_error_and_views_and_awaitables_are_answers(written):
    source = written(
        '''
        class Later:
            def __await__(self):
                return None
                yield

        class Own:
            def reset(self, seed=0): ...

            def once(self) -> list:
                """Maps."""
                return map(str, [1])

            def twice(self) -> list:
                """Nests."""
                return [x for x in [(y for y in "ab")]]

            def keys(self) -> list:
                """Lists."""
                return {"a": 1}.keys()

            def later(self) -> None:
                """Waits."""
                return Later()
        '''
    )
    calls = [Call(name, {}) for name in ("once", "twice", "keys", "later")]
    _, (once, twice, keys, later) = played(source, *calls)
    assert once.error and "returns a map, which can be read once: return a list" in once.text
    assert twice.error and "a generator" in twice.text
    assert (keys.text, keys.error, later.text, later.error) == ('["a"]', False, "null", False)


def test_a_reset_that_hangs_is_told_as_one_that_does_not_return(written, monkeypatch):
    tools = envs.family.module("tools")
    monkeypatch.setattr(tools, "SECONDS", 0.3)
    source = written("import time\n" + SLOTS.replace("self.n, self", "time.sleep(60)\n        self.n, self"))
    with pytest.raises(Refused, match=r"Own.reset\(seed=0\) does not return within 0.3 seconds"):
        worlds(source)


def test_a_reset_too_slow_for_all_seeds_is_told_with_its_line_and_scenarios_as_the_remedy(
    written, monkeypatch
):
    tools = envs.family.module("tools")
    monkeypatch.setattr(tools, "BEGINNING", 0.1)
    spin = "end = time.process_time() + 0.03\n        while time.process_time() < end: pass\n        "
    source = written("import time\n" + SLOTS.replace("self.n, self", spin + "self.n, self"))
    with pytest.raises(Refused, match=r"Own.reset takes [\d.]+ s, too long to begin 120") as why:
        worlds(source)
    assert "own_world.py:9: Own.reset" in str(why.value)
    assert "name fewer in `scenarios`" in str(why.value)


def test_a_reset_and_a_turns_end_may_take_longer_than_a_call(written):
    spin = "end = time.process_time() + 0.3\n{0}while time.process_time() < end: pass\n"
    slow = SLOTS.replace("return self.n", spin.format(" " * 8) + "        return self.n")
    one = slow.replace("    def reset", "    scenarios = {'train': [{'seed': 1}]}\n\n    def reset")
    source = written("import time\n" + spin.format("") + one)
    look = Call("look", {})
    task = dataclasses.replace(worlds(source)[0], turns=(Turn("Look.", (look, look, look)),))
    with ProcessPool("tools", workers=1, timeout=0.5) as pool:
        (world,) = pool.reset([task])
        (seen,) = pool.step([world], [[look]])
        pool.end_turn([world])
        (outcome,) = pool.score([world])
    assert not seen[0].error and (outcome.valid, outcome.reason) == (True, "passed")


def test_errors_that_cannot_be_said_reach_the_agent(written):
    source = written(
        '''
        import asyncio

        class Mute(Exception):
            def __str__(self):
                raise KeyError("mute")

        class Odd:
            def __bool__(self):
                raise ValueError("neither true nor false")

        class Own:
            def reset(self, seed=0): ...

            def mute(self) -> int:
                """Raises."""
                raise Mute

            def odd(self) -> dict:
                """Answers oddly."""
                return {"error": Odd()}

            async def cancel(self) -> int:
                """Is cancelled."""
                raise asyncio.CancelledError("by itself")

            def stop(self) -> int:
                """Is cancelled, and not async."""
                raise asyncio.CancelledError("at once")

            def lone(self) -> int:
                """Raises a lone surrogate."""
                raise ValueError("a \\ud800 b")
        '''
    )
    said = played(source, *(Call(name, {}) for name in ("mute", "odd", "cancel", "stop", "lone")))[1]
    assert all(each.error for each in said)
    assert [each.text.encode() for each in said] == [
        b'{"error": "Mute"}',
        b'{"error": "neither true nor false"}',
        b'{"error": "CancelledError: by itself"}',
        b'{"error": "CancelledError: at once"}',
        b'{"error": "a ? b"}',
    ]


def test_files_in_other_encodings_are_read_and_broken_ones_named_with_their_line(tmp_path):
    path = tmp_path / "own_text.py"
    for head, encoding in (("", "utf-8-sig"), ("# -*- coding: latin-1 -*-\n", "latin-1")):
        path.write_bytes((head + SLOTS.replace("Looks", "Schaut über")).encode(encoding))
        os.utime(path, (len(head), len(head)))
        assert "über" in load(f"{path}:Own").schemas()[0]["function"]["description"]
        assert Lines(str(path), "Own").of("look").endswith(f":{head.count(chr(10)) + 11}")
    for body, line in ((b"x = 1\n\ny = '\xe9'\n", 3), (b"x = '\0'\n", 1), (b"x = 1\ndef f(:\n", 2)):
        path.write_bytes(body)
        os.utime(path, (line + 100, line + 100))
        for read in (load, Lines):
            with pytest.raises(Refused, match=rf"own_text.py:{line}: "):
                read(str(path))


# ---- Rewards -------------------------------------------------------------------------------------

REWARDED = '''
import random

class Own:
    def reset(self, seed=0):
        self.n = seed

    def add(self) -> int:
        """Adds one."""
        self.n += 1
        return self.n

    def get_reward(self):
        return {}
'''


@dataclasses.dataclass
class Reward:
    reward: str


@pytest.mark.parametrize(
    "code, said",
    [
        ("100.0 * (self.n > 1)", "Own.get_reward returns 100.0."),
        ("float('nan')", "Own.get_reward returns nan."),
        ("1 / 0", "Own.get_reward raises ZeroDivisionError: division by zero."),
        ("random.SystemRandom().random()", r"Own.get_reward returns 0\.\d+ and 0\.\d+ in equal worlds."),
        ("(self.n > 1) + 1e-9", ""),
    ],
)
def test_a_reward_is_a_number_from_0_to_1_that_follows_from_the_state(written, code, said):
    source = written(REWARDED.replace("{}", code))
    config = configs.load_file(ROOT / "configs" / "tools.py", f"source={source}")
    wrong = rewards.fault(config, [(worlds(source)[0], [Call("add", {})] * 3)])
    assert re.fullmatch(said, wrong)
    lines = Lines(source.partition(":")[0], "Own")
    found = list(findings._reward(Reward(wrong), lines))  # type: ignore[arg-type]
    assert [str(each) for each in found if each.stops] == [
        f"{each.place}: {wrong} Let it return a number from 0 to 1 that follows from the state alone."
        for each in found
        if each.place.endswith("own_world.py:13")
    ]
    assert len(found) == bool(said)


def test_a_reward_outside_0_to_1_is_refused_and_rounding_is_not(written):
    source = written(REWARDED.replace("{}", "self.n"))
    with pytest.raises(Refused, match=r"Own.get_reward returns 100.0: return a number from 0 to 1\.$"):
        Instance(source, {"seed": 100.0}).reward()
    assert Instance(source, {"seed": 1 + 1e-9}).reward() == 1.0


# ---- What a source says of its worlds ------------------------------------------------------------


@pytest.mark.parametrize(
    "line, said",
    [
        ("values = {'x': 5}", r"Own.values\['x'\] is 5: give a list"),
        ("values = {'x': 'Ada'}", r"Own.values\['x'\] is 'Ada': give a list"),
        ("values = {'x': [date(2024, 1, 2)]}", r"Own.values\['x'\] is \[datetime.date\(2024, 1, 2\)\]: give"),
        ("values = {3: ['Ada']}", r"Own.values\[3\] is \['Ada'\]: give a list"),
        ("values = ['Ada']", r"Own.values is \['Ada'\]: give a mapping"),
        ("scenarios = {}", r'Own.scenarios must be \{"train"'),
        (
            "scenarios = {'train': [{'seed': date(2024, 1, 2)}]}",
            r"Own.scenarios\['train'\]\[0\] is {'seed': d",
        ),
        ("scenarios = {'train': [{'seed': 1}, {'seed': {1}}]}", r"Own.scenarios\['train'\]\[1\] is {'seed'"),
        (
            "scenarios = {'train': [{'seed': {1: 'a'}}]}",
            r"Own.*\[0\] is {'seed': {1: 'a'}}, which is no JSON",
        ),
        ("scenarios = {'train': [{1: 'a'}]}", r"Own.scenarios\['train'\]\[0\] is {1: 'a'}, which is no JSON"),
    ],
)
def test_values_and_scenarios_that_are_no_json_are_refused_in_a_sentence(written, line, said):
    body = REWARDED.replace("    def reset", f"    {line}\n    def reset", 1)
    with pytest.raises(Refused, match=rf"own_world.py:5: {said}") as refusal:
        worlds(written("from datetime import date\n" + body))
    assert "\n" not in str(refusal.value)


def test_a_reset_that_needs_more_than_a_seed_is_refused_with_scenarios_as_the_remedy(written):
    source = written(SLOTS.replace("seed=0", "seed, prompt, target: int, **row"))
    said = r'Own.reset needs prompt and target: name worlds, such as scenarios = {"train": \[{"prompt": ..., '
    with pytest.raises(Refused, match=rf"own_world.py:8: {said}"):
        worlds(source)
    named = "class Own(Base):\n    scenarios = {'train': [{'seed': 1, 'prompt': 'a', 'target': 2}]}"
    assert worlds(written(SLOTS.replace("seed=0", "seed, prompt, target").replace("class Own(Base):", named)))


def test_tuples_in_values_and_scenarios_are_lists(written):
    lines = "    values = {'x': (1, (2,))}\n    scenarios = {'train': ({'seed': (1, 2)},)}\n    def reset"
    (world,) = worlds(written(REWARDED.replace("    def reset", lines, 1)))
    assert (world.scenario["values"], world.scenario["reset"]) == ({"x": [1, [2]]}, {"seed": [1, 2]})


# ---- Type hints ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Node:
    below: "Node | None" = None


class Color(enum.Enum):
    RED = "red"


class Typed:
    def either(self, items: "list[Color] | str") -> int:
        """Takes colours or a word."""
        return 1

    def bare(self: "Typed", items: typing.List, sizes: typing.Dict) -> "Node":  # noqa: UP006
        """Takes a list and a mapping of anything."""
        return Node()

    def recursive(self, node: Node) -> int:
        """Takes a node."""
        return 1


def test_bare_lists_an_annotated_self_and_recursive_classes_have_their_schemas():
    found = schemas.schema(Typed.bare)["function"]["parameters"]
    assert found["properties"] == {"items": {"type": "array"}, "sizes": {"type": "object"}}
    hints = schemas.hints_of(Typed.bare)
    assert schemas.convert(hints["items"], [1, "a"]) == [1, "a"]
    assert schemas.convert(hints["sizes"], {"a": 1}) == {"a": 1}
    with pytest.raises(schemas.Unfit, match="whether it is list.*Color. or another type of the union"):
        schemas.schema(Typed.either)
    with pytest.raises(schemas.Unfit, match="argument node: its type Node contains itself: let it hold"):
        schemas.schema(Typed.recursive)
