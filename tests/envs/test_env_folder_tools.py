"""Folders of JSON tables with tool code, in Agent-World's format: three made-up ones."""

import json
import shutil
import textwrap
from pathlib import Path

import pytest

from coevolve_jax.envs import folder_tools
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.testing.environment import check_environment
from coevolve_jax.types import Call
from tests.support.paths import ROOT
from tests.support.two_worlds import execute

NEEDS_CC = pytest.mark.skipif(not shutil.which("cc"), reason="clocks are frozen by a C compiler's work")
pytestmark = [pytest.mark.slow, NEEDS_CC]

# As the published checkpoints begin each function: they look for the tables when they are called.
TABLES = """
    import json, os
    folder = os.environ.get("MCP_DB_DIR") or "/app/database"
    def load(name):
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            return json.load(file)
    def save(name, rows):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            json.dump(rows, file, ensure_ascii=False, indent=2)
"""
TEXT, WHOLE = {"type": "string"}, {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}


def tool(name, parameters, body, description="", required=()):
    named = ", ".join([*(f"{p}=None" for p in parameters), "**_extra"])
    code = f"def {name.replace('-', '_')}({named}):{TABLES}{body}"
    schema = {"type": "object", "properties": parameters, "required": list(required)}
    described = {"description": description or f"Does {name}.", "parameters": schema}
    return {"name": name, **described, "implementation": code}


FIND = tool("find-flights", {"city": TEXT, "limit": WHOLE}, """
    rows = [row for row in load("flights.json") if city in (None, row["city"])]
    return {"data": rows[:limit], "meta": {"total": len(rows)}}
""")  # fmt: skip
BOOK = tool("book_flight", {"flight_id": TEXT, "seats": {"type": "integer"}}, """
    import uuid, datetime
    rows = load("flights.json")
    row = next((row for row in rows if row["id"] == flight_id), None)
    if row is None:
        return {"error": {"code": "NOT_FOUND", "message": "There is no such flight."}}
    row["free"] -= seats
    save("flights.json", rows)
    bookings = load("bookings.json")
    now = datetime.datetime.utcnow().isoformat()
    bookings.append({"id": uuid.uuid4().hex, "flight_id": flight_id, "seats": seats, "created_at": now})
    save("bookings.json", bookings)
    return bookings[-1]
""", required=("flight_id", "seats"))  # fmt: skip
LOGS = tool("list_products", {}, """
    rows = load("requests.json")
    rows.append(len(rows))
    save("requests.json", rows)
    print("What a tool prints is no message.")
    return load("products.json")
""")  # fmt: skip
PRICE = tool("set_price", {"product_id": {"type": "integer"}, "price": {"type": "number"}}, """
    rows = load("products.json")
    [row for row in rows if row["product_id"] == product_id][0]["price"] = price
    save("products.json", rows)
    return "ok"
""")  # fmt: skip
CURIOUS = tool("read_secrets", {}, """
    import socket
    try:
        socket.socket()
    except OSError as error:
        found = [type(error).__name__]
    try:
        open(os.path.join(folder, "..", "..", "escaped"), "w")
    except OSError as error:
        found.append(type(error).__name__)
    return {"found": found}
""")  # fmt: skip
BROKEN = {"name": "broken", "description": "", "parameters": {}, "implementation": "def broken(:"}
FLIGHTS = [{"id": f"F{n}", "city": ["Oslo", "Rome"][n % 2], "free": 9 - n} for n in range(4)]
PRODUCTS = [
    {"product_id": n, "name": name, "price": 1.5 * n} for n, name in enumerate(("tea", "milk", "rice"), 1)
]


def environment(folder: Path, name: str, tools, questions=(), **tables) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "README.md").write_text("Schema and rules.")
    for table, rows in tables.items():
        (folder / name / f"{table}.json").write_text(json.dumps(rows, indent=2))
    checkpoint = {"index": 0, "data": {"ToolDesignAgent": {"tool_schemas": tools}}}
    (folder / f"{name}_step4_checkpoint.json").write_text(json.dumps(checkpoint))
    if questions:
        (folder / "questions").mkdir(exist_ok=True)
        chains = [
            {
                "task": task,
                "reference_answer": "",
                "grading_rubric": {
                    "success_criteria": [],
                    "verified_tool_chain": [{"tool": t, "args": a} for t, a in chain],
                },
            }
            for task, chain in questions
        ]
        (folder / "questions" / f"{name}.json").write_text(json.dumps({"env_id": name, "tasks": chains}))


ASKED = [
    ("Book two seats to Rome.",
     [("find-flights", {"city": "Rome"}), ("book_flight", {"flight_id": "F1", "seats": 2})]),
    ("Which flights are there?", [("find-flights", {"limit": 2})]),
]  # fmt: skip


@pytest.fixture
def mix(tmp_path):
    """Three environments in one folder."""
    environment(tmp_path, "0001000", [FIND, BOOK], ASKED, flights=FLIGHTS, bookings=[])
    environment(tmp_path, "0002000", [LOGS, PRICE, BROKEN], products=PRODUCTS, requests=[])
    environment(tmp_path, "0003000", [CURIOUS], numbers=[1])
    return {"template": str(tmp_path)}


def test_each_environment_is_a_scenario_with_its_own_tools(mix):
    scenarios = folder_tools.scenarios("train", mix)
    assert [s.id for s in scenarios] == ["train_0001000", "train_0002000", "train_0003000"]
    assert scenarios[0].scenario == {
        "template": f"{mix['template']}/0001000",
        "freeze_time": folder_tools.NOON,
        "values": {"city": ["Oslo", "Rome"], "flight_id": ["F0", "F1", "F2", "F3"]},
    }
    assert scenarios[1].scenario["values"] == {"product_id": [1, 2, 3], "price": [1.5, 3.0, 4.5]}
    names = [[t["function"]["name"] for t in folder_tools.tools(s)] for s in scenarios]
    assert names == [["find-flights", "book_flight"], ["list_products", "set_price"], ["read_secrets"]]
    limit = folder_tools.tools(scenarios[0])[0]["function"]["parameters"]["properties"]["limit"]
    assert limit == {"type": "integer", "default": None}


def test_published_questions_are_tasks_with_their_chains_as_references(mix):
    asked, other = folder_tools.tasks("test", mix)
    assert (asked.id, asked.turns[0].query) == ("test_0001000_0", "Book two seats to Rome.")
    assert asked.calls == (
        Call("find-flights", {"city": "Rome"}),
        Call("book_flight", {"flight_id": "F1", "seats": 2}),
    )
    with ProcessPool("folder_tools", workers=1, timeout=10.0) as pool:
        done, undone = env_ids = pool.reset([asked, asked])
        pool.step([done], [asked.calls])
        pool.end_turn(env_ids)
        assert [o.success for o in pool.score(env_ids)] == [True, False]
        # Another look before it changes nothing, and not the number of the booking either.
        (looked,) = pool.reset([asked])
        pool.step([looked], [[*other.calls, *asked.calls]])
        pool.end_turn([looked])
        assert pool.score([looked])[0].success


def test_time_and_chance_repeat_and_errors_are_seen(mix):
    flights, products, _ = folder_tools.scenarios("train", mix)
    calls = [
        Call("book_flight", {"flight_id": "F1", "seats": 2}),
        Call("book_flight", {"flight_id": "F1", "seats": 2}),
        Call("book_flight", {"flight_id": "F9", "seats": 2}),
        Call("book_flight", {"flight_id": "F1", "seats": "two"}),
    ]
    steps = execute(folder_tools.make, flights, calls)
    assert all(step.repeats and not step.differ for step in steps)
    assert [step.first.error for step in steps] == [False, False, True, True]
    first, second = (json.loads(step.first.text) for step in steps[:2])
    assert first["created_at"].startswith("2026-01-01T12:00:00") and first["id"] != second["id"]
    assert "TypeError" in steps[3].first.text
    steps = execute(
        folder_tools.make,
        products,
        [Call("list_products", {}), Call("set_price", {"product_id": 1, "price": 2})],
    )
    assert steps[0].changed == ["requests.json"] and steps[0].first.text.startswith('[{"product_id": 1')


def test_helpers_of_one_tool_replace_none_of_another_and_tools_call_each_other(tmp_path):
    code = """
        TABLE = "{0}.json"
        def _load():
            with open(os.path.join(os.environ["MCP_DB_DIR"], TABLE)) as file:
                return json.load(file)
        def read_{0}():
            return _load()
    """
    both = "def read_both():\n    return read_flights() + read_products()"
    implementations = {
        "read_both": both,
        **{
            f"read_{name}": "import json, os" + textwrap.dedent(code.format(name))
            for name in ("flights", "products")
        },
        "read_again": both.replace("both", "again"),
    }
    tools = [{"name": name, "implementation": written} for name, written in implementations.items()]
    environment(tmp_path, "0001", tools, flights=["F0"], products=["tea"])
    (flights_and_products,) = folder_tools.scenarios("train", {"template": str(tmp_path)})
    steps = execute(folder_tools.make, flights_and_products, [Call(name, {}) for name in implementations])
    answers = [json.loads(step.first.text) for step in steps]
    assert answers == [["F0", "tea"], ["F0"], ["tea"], ["F0", "tea"]]


def test_a_log_can_be_left_out_of_the_state(mix):
    _, products, _ = folder_tools.scenarios("train", {**mix, "ignore": ("requests.json",)})
    (step,) = execute(folder_tools.make, products, [Call("list_products", {})])
    assert step.changed == []


def test_tool_code_is_confined(mix):
    *_, curious = folder_tools.scenarios("train", mix)
    (step,) = execute(folder_tools.make, curious, [Call("read_secrets", {})])
    assert json.loads(step.first.text) == {"found": ["PermissionError", "PermissionError"]}


def test_folders_for_the_splits_hold_different_environments(tmp_path):
    for split, names in {"train": ("0001", "0002"), "test": ("0002", "0003")}.items():
        for name in names:
            environment(tmp_path / split, name, [FIND, BOOK], ASKED, flights=FLIGHTS, bookings=[])
    settings = {"template": str(tmp_path)}
    assert [s.id for s in folder_tools.scenarios("test", settings)] == ["test_0002", "test_0003"]
    assert [s.id for s in folder_tools.scenarios("test", settings, apart_from="train")] == ["test_0003"]
    with pytest.raises(ValueError, match="There is no split 'dev'"):
        folder_tools.scenarios("dev", settings)


def test_what_is_not_of_that_format_is_one_sentence(tmp_path, mix):
    with pytest.raises(ValueError, match="holds no environment in Agent-World's format: each is a folder ID"):
        folder_tools.scenarios("train", {"template": str(ROOT / "docs")})
    Path(mix["template"], "questions", "0001000.json").write_text('{"tasks": [{"task": "?"}]}')
    with pytest.raises(ValueError, match="holds no questions in Agent-World's format"):
        folder_tools.tasks("train", mix)
    (tmp_path / "0004000").mkdir()
    (tmp_path / "0004000_step4_checkpoint.json").write_text("{}")
    with pytest.raises(ValueError, match="ended with code 1 .its last words: KeyError: 'data'"):
        folder_tools.scenarios("train", mix)


@pytest.mark.slow
def test_the_conformance_suite(tmp_path):
    for split, free in {"train": 0, "test": 1}.items():
        flights = [{**row, "free": row["free"] + free} for row in FLIGHTS]
        environment(tmp_path / split, f"000{free}", [FIND, BOOK], ASKED, flights=flights, bookings=[])
    check_environment("folder_tools", settings={"template": str(tmp_path)}, timeout=10.0)
