"""MCP servers as environments: the protocol, folders as states, grading, servers that misbehave."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from coevolve_jax.envs import lockdown, mcp, worker_process
from coevolve_jax.envs.calls import bind, signatures
from coevolve_jax.envs.mcp import answers, servers, state, templates, values
from coevolve_jax.envs.mcp import world as worlds
from coevolve_jax.envs.mcp.client import Client, Failed, Pipes
from coevolve_jax.envs.mcp.client import Refused as CallRefused
from coevolve_jax.envs.mcp.spares import MOST_SPARES, SPARES, Spares
from coevolve_jax.envs.mcp.spec import Spec
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.testing.environment import check_environment
from coevolve_jax.types import Call, Turn
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

SERVER = f"python {ROOT}/tests/support/mcp_server.py {{world}}"
RESTOCK, COUNT = Call("restock", {"item": "tea", "pieces": 2}), Call("count", {"item": "tea"})
FAULT = Call("fault", {})
GOOD = (RESTOCK, COUNT)


def shop(folder: Path, **stock: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "stock.json").write_text(json.dumps(stock))
    return folder


@pytest.fixture
def settings(tmp_path) -> dict:
    """A shop as the section config.environment."""
    return {"command": SERVER, "template": str(shop(tmp_path / "shop", tea=3, milk=1))}


@pytest.fixture
def splits(tmp_path) -> dict:
    """Shops for training and for the test, of which one begins alike. Two tasks are written down."""
    for name, stock in {"a": {"tea": 3}, "b": {"tea": 5}, "c": {"milk": 2, "tea": 1}}.items():
        shop(tmp_path / "shops" / "train" / name, **stock)
    for name, stock in {"d": {"tea": 3}, "e": {"tea": 7}}.items():
        shop(tmp_path / "shops" / "test" / name, **stock)
    calls = [call.to_json() for call in GOOD]
    tasks = [
        {"query": "Buy two teas and count.", "calls": calls},
        {"turns": [{"query": "Buy.", "calls": calls[:1]}, {"query": "Count.", "calls": calls[1:]}]},
    ]
    notes = {"values": {"item": ["tea", "milk"]}, "tasks": tasks}
    (tmp_path / "shops" / "coevolve.json").write_text(json.dumps(notes))
    return {"command": SERVER, "template": str(tmp_path / "shops")}


def scenario(settings, **changed):
    (found,) = mcp.scenarios("train", {**settings, **changed})
    return found


def task(settings, *turns, **changed):
    """A task whose turns have these reference calls."""
    return dataclasses.replace(scenario(settings, **changed), turns=tuple(Turn("Do it.", t) for t in turns))


def play(a_task, *turns):
    """The outcome of these calls, turn by turn, with the observations."""
    world = mcp.make()
    world.reset(a_task)
    seen = []
    for calls in turns:
        seen += [world.step(call) for call in calls]
        world.end_turn()
    outcome = world.score()
    world.close()
    return outcome, seen


# --- The family -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_conformance_suite(splits):
    check_environment("mcp", settings=splits, timeout=10.0)


def test_scenarios_are_the_templates_of_a_split(splits):
    train = mcp.scenarios("train", splits)
    assert [s.id for s in train] == ["train_a", "train_b", "train_c"]
    assert train[0].scenario == {
        "command": SERVER,
        "template": f"{splits['template']}/train/a",
        "values": {"item": ["tea", "milk"]},
    }
    assert [s.id for s in mcp.scenarios("test", splits)] == ["test_d", "test_e"]
    assert [s.id for s in mcp.scenarios("test", splits, apart_from="train")] == ["test_e"]
    assert [len(t.turns) for t in mcp.tasks("test", splits)] == [1, 2, 1, 2]


def test_one_template_is_in_every_split(settings):
    train, test = mcp.scenarios("train", settings), mcp.scenarios("test", settings, apart_from="train")
    assert [s.scenario for s in train] == [s.scenario for s in test] and len(train) == 1
    assert mcp.tasks("test", settings) == []


def test_a_world_with_a_folder_of_a_splits_name_is_still_one_world(tmp_path):
    folder = shop(tmp_path / "repository", tea=1)
    (folder / "test").mkdir()
    assert not templates.split_folders(folder)


@pytest.mark.parametrize(
    "changed, why",
    [
        ({"template": "no/such/folder"}, "template is 'no/such/folder', which is no folder here"),
        ({"command": "no-such-server {world}"}, "there is no program 'no-such-server'"),
        ({"command": ""}, "it names no program"),
        ({"command": "python 'x"}, "No closing quotation"),
        ({"freeze_time": "noon"}, "freeze_time is 'noon': it must be a time"),
        (
            {"server_disk": 1e-6},
            "holds more than 1e-06 MiB, and config.environment.server_disk allows no more",
        ),
        ({"tools": ("sell",)}, "has no tool 'sell', which config.environment.tools names: it has count"),
        ({"command": "python -c pass"}, "The server 'python -c pass' ended."),
        ({"command": f"{SERVER} dies_at_start"}, "ended with code 1 .its last words: out of cheese.*"),
        ({"command": f"{SERVER} silent_at_start", "server_timeout": 0.5}, "gave no answer within 0.5 s"),
        ({"command": f"{SERVER} no_tools"}, "offers no tools"),
        ({"command": f"{SERVER} many_tools"}, "offers 400 tools, .* name those to use in config.env"),
        ({"command": f"{SERVER} two_of_a_name"}, "lists two tools of the name 'restock'"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(settings, changed, why):
    with pytest.raises(ValueError, match=why):
        scenario(settings, **changed)


def test_a_split_without_templates_and_notes_of_another_shape_are_one_sentence(splits):
    with pytest.raises(ValueError, match="There is no split 'dev': use one of train, dev"):
        mcp.scenarios("dev", splits)
    with pytest.raises(
        ValueError, match="development holds no folder: .* or choose another split by config.env"
    ):
        mcp.scenarios("development", splits)
    notes = Path(splits["template"]) / "coevolve.json"
    for text in ("[]", "{", '{"value": {}}', '{"values": {"item": 3}}'):
        notes.write_text(text)
        with pytest.raises(ValueError, match="coevolve.json cannot be used"):
            mcp.scenarios("train", splits)
    call = '{"name": "count", "arguments": ["tea"]}'
    for wrong in (
        '"x"',
        '{"turns": 3}',
        '{"turns": []}',
        '{"query": "Buy."}',
        '{"query": 5, "calls": []}',
        f'{{"query": "Count.", "calls": [{call}]}}',
    ):
        notes.write_text(f'{{"tasks": [{wrong}]}}')
        with pytest.raises(ValueError) as raised:
            mcp.tasks("train", splits)
        assert f"{notes} cannot be used (a task is {wrong}, and each turn has a query, a" in str(raised.value)


def test_tools_can_be_chosen(settings):
    chosen = scenario(settings, tools=("count,restock",))
    assert chosen.scenario["tools"] == ["count", "restock"]
    assert [t["function"]["name"] for t in mcp.tools(chosen)] == ["restock", "count"]
    _, (seen,) = play(dataclasses.replace(chosen, turns=(Turn("Look."),)), [Call("inventory", {})])
    assert seen.error and "no tool named 'inventory'" in seen.text


def test_variables_precede_the_command_and_words_stand_for_folders(settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "say.py").write_text("import os, sys; print(os.getcwd(), os.environ['SHOP'], *sys.argv)")
    (tmp_path / "data").mkdir()
    words, variables = Spec.of(
        {**settings, "command": "SHOP='{world}/a b' HOME={here}/x python say.py data --db=say.py {world}/c"}
    ).words("/w")
    assert variables == {"SHOP": "/w/a b", "HOME": f"{tmp_path}/x"}
    assert words[1:] == [f"{tmp_path}/say.py", "data", "--db=say.py", "/w/c"]
    with pytest.raises(ValueError, match=r"is no message: '/tmp/.*/world /tmp/.*/world/a b /"):
        scenario(settings, command="SHOP='{world}/a b' python say.py")


# --- Schemas and answers --------------------------------------------------------------------------


def test_all_pages_of_the_tools_are_read_and_schemas_are_made_simple(settings):
    functions = {t["function"]["name"]: t["function"] for t in mcp.tools(scenario(settings))}
    assert list(functions) == ["restock", "count", "inventory", "today", "fault"]
    assert functions["restock"]["parameters"] == {
        "type": "object",
        "properties": {"item": {"type": "string"}, "pieces": {"type": "integer"}},
        "required": ["item", "pieces"],
    }
    assert functions["today"]["parameters"] == {"type": "object", "properties": {}}


def test_references_and_lists_of_types_become_one_type_each():
    schema = {
        "$defs": {"Size": {"title": "S", "properties": {"w": {"type": ["null", "integer"]}}}},
        "properties": {
            "size": {"$ref": "#/$defs/Size", "description": "How large."},
            "tags": {"type": "array", "items": {"oneOf": [{"type": "string"}, {"type": "integer"}]}},
            "odd": True,
            "lost": {"$ref": "#/$defs/Nothing"},
            "both": {"allOf": [{"$ref": "#/$defs/Size"}, {"required": ["w"]}], "description": "Two."},
            "pair": {"type": "array", "prefixItems": [{"$ref": "#/$defs/Size"}, {"type": "string"}]},
            "free": {"type": "object", "additionalProperties": {"$ref": "#/$defs/Size"}},
            "shut": {"type": "object", "additionalProperties": False},
        },
        "required": ["size", 3],
    }  # fmt: skip
    size = {"properties": {"w": {"type": "integer"}}}
    assert answers.simple(schema, schema) == {
        "properties": {
            "size": {"properties": {"w": {"type": "integer"}}, "description": "How large."},
            "tags": {"type": "array", "items": {"type": "string"}},
            "odd": {},
            "lost": {},
            "both": {**size, "required": ["w"], "description": "Two."},
            "pair": {"type": "array", "prefixItems": [size, {"type": "string"}]},
            "free": {"type": "object", "additionalProperties": size},
            "shut": {"type": "object", "additionalProperties": False},
        },
        "required": ["size"],
    }
    endless = {"properties": {"next": {"$ref": "#"}}}
    assert answers.simple(endless, endless) == {"properties": {"next": {"properties": {"next": {}}}}}


def test_of_several_schemas_only_what_all_require_is_required_and_constants_are_choices():
    either = {"properties": {"id": {}, "email": {}}, "anyOf": [{"required": ["id"]}, {"required": ["email"]}]}
    assert answers.simple(either, either) == {"properties": {"id": {}, "email": {}}}
    both = {"oneOf": [{"required": ["a", "b"]}, {"required": ["b", "c"]}]}
    assert answers.simple(both, both) == {"required": ["b"]}
    speed = {
        "anyOf": [{"const": "fast", "type": "string"}, {"const": 2, "type": "integer"}, {"type": "null"}]
    }
    assert answers.simple(speed, speed) == {"enum": ["fast", 2]}


def test_pointers_lead_into_lists_and_through_escaped_names():
    a, b = {"type": "integer"}, {"type": "string"}
    schema = {
        "$defs": {"A/B~": b},
        "properties": {
            "a": {"prefixItems": [a]},
            "first": {"$ref": "#/properties/a/prefixItems/0"},
            "second": {"$ref": "#/properties/a/prefixItems/1"},
            "named": {"$ref": "#/$defs/A~1B~0"},
        },
    }
    found = answers.simple(schema, schema)["properties"]
    assert (found["first"], found["second"], found["named"]) == (a, {}, b)


@pytest.mark.parametrize(
    "more, taken", [(True, True), ({"type": "string"}, True), (False, False), (None, False)]
)
def test_a_tool_takes_other_arguments_where_its_schema_says_so(more, taken):
    parameters = {"properties": {"id": {}}, **({} if more is None else {"additionalProperties": more})}
    allowed = signatures([{"function": {"name": "put", "parameters": parameters}}])
    call = Call("put", {"id": 1, "colour": "red"})
    if taken:
        assert bind(call, allowed) == call.arguments
    else:
        with pytest.raises(ValueError, match="put has no parameter 'colour'"):
            bind(call, allowed)


@contextlib.contextmanager
def connected(timeout, watch=lambda: None, **how):
    """A client, and what a server would write its answers into."""
    (theirs0, input), (output, theirs1), (errors, theirs2) = (os.pipe() for _ in range(3))
    client = Client(Pipes(input, output, errors), timeout, watch, **how)
    yield client, theirs1
    client.close()
    for descriptor in (theirs0, theirs1, theirs2):
        os.close(descriptor)


def test_numbers_as_text_errors_without_one_and_an_empty_cursor_are_understood():
    said = [
        {"id": "1", "result": {}},
        {"id": 2, "result": {"tools": [{"name": "a"}], "nextCursor": ""}},
        {"id": None, "error": {"code": -32700, "message": "no JSON"}},
        {"id": "9", "result": {}},
        {"id": 4, "result": {"b": 1}},
    ]
    with connected(5.0) as (client, server):
        os.write(server, "".join(json.dumps({"jsonrpc": "2.0", **m}) + "\n" for m in said).encode())
        client.begin()
        assert client.tools() == [{"name": "a"}]
        with pytest.raises(CallRefused, match="no JSON"):
            client.request("tools/call", {})
        assert client.request("tools/call", {}) == {"b": 1}


def test_looks_at_a_slow_server_take_a_small_part_of_the_wait():
    """Their processor time counts as the call's: a look at many files would use up what a call may take."""
    looks: list[None] = []
    with connected(1.5, lambda: looks.append(time.sleep(0.05))) as (client, _):
        with pytest.raises(Failed, match="gave no answer within 1.5 s"):
            client.begin()
    assert len(looks) <= 3  # one of them at the end


@pytest.mark.parametrize(("share", "answered"), [(0.0, False), (0.9, True)])
def test_time_in_which_a_server_waits_for_a_processor_is_not_counted(share, answered):
    begun = time.monotonic()
    starved = lambda: share * (time.monotonic() - begun)
    with connected(1.0, starved=starved) as (client, server):
        told = b'{"jsonrpc": "2.0", "id": 1, "result": {}}\n'
        answer = threading.Timer(2.5, os.write, (server, told))
        answer.start()
        refused = pytest.raises(Failed, match="gave no answer within 1 s")
        with contextlib.nullcontext() if answered else refused:
            client.begin()
        answer.join()


def test_a_silent_server_is_waited_for_ten_times_the_limit_at_most():
    begun = time.monotonic()
    starved = lambda: 100 * (time.monotonic() - begun)
    with (
        connected(0.3, starved=starved) as (client, _),
        pytest.raises(Failed, match="no answer within 0.3 s"),
    ):
        client.begin()


@pytest.mark.skipif(not os.path.exists("/proc/self/schedstat"), reason="the kernel counts no waits")
def test_a_correct_call_on_a_busy_processor_stays_correct(settings):
    """The server needs a second of it, has two, and gets a quarter of the processor."""
    world = worlds.World(Spec.of({**settings, "command": f"{SERVER} works", "server_timeout": 2.0}))
    burn = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(burn, start_new_session=True) for _ in range(3)]
    try:
        for pid in (world._pid, *(process.pid for process in busy)):
            os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))})
        world.begin()
        assert world.call("fault", {}).text == "nothing"
    finally:
        world.close()
        for process in busy:
            process.kill()
            process.wait()


def test_an_answer_that_is_nested_too_deeply_is_an_error():
    deep: dict = {}
    for _ in range(5000):
        deep = {"a": deep}
    found = answers.observation({"structuredContent": deep})
    assert found.error and "nested too deeply" in found.text


@pytest.mark.parametrize("properties", [None, [], "x"])
def test_a_tool_whose_properties_are_no_object_has_no_parameters(properties):
    (tool,) = answers.schemas(
        [{"name": "f", "inputSchema": {"properties": properties, "required": None}}], ()
    )
    assert tool["function"]["parameters"] == {"type": "object", "properties": {}, "required": []}


def test_references_that_repeat_do_not_make_a_schema_grow_without_end():
    node = {"type": "object", "properties": {name: {"$ref": "#/$defs/N"} for name in "abcd"}}
    found = answers.simple({"properties": {"one": {"$ref": "#/$defs/N"}}}, {"$defs": {"N": node}})
    assert found["properties"]["one"] == {"type": "object", "properties": {name: {} for name in "abcd"}}
    doubling = {
        f"N{n}": {"properties": {name: {"$ref": f"#/$defs/N{n + 1}"} for name in "abcdef"}} for n in range(9)
    }
    found = answers.simple({"$ref": "#/$defs/N0"}, {"$defs": doubling})
    assert json.dumps(found).count(":") <= 2 * answers.MAX_PARTS


@pytest.mark.parametrize(
    "result, text, error",
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb", False),
        ({"content": [{"type": "text", "text": "no"}], "isError": True}, '{"error": "no"}', True),
        ({"content": [{"type": "text", "text": "Database error: locked"}]}, "Database error: locked", True),
        ({"content": [{"type": "text", "text": '{"error": {"code": 4}}'}]}, '{"error": {"code": 4}}', True),
        ({"content": [{"type": "text", "text": '{"error": null}'}]}, '{"error": null}', False),
        ({"content": [{"type": "text", "text": "errors are rare"}]}, "errors are rare", False),
        ({"content": [], "structuredContent": {"b": 1.0, "a": 2}}, '{"a":2,"b":1}', False),
        ({"structuredContent": {"a": 2}}, '{"a":2}', False),
        (
            {"content": [{"type": "image", "mimeType": "image/png", "data": "AAAA"}]},
            "[image/png, 3 bytes, sha256 709e80c88487]",
            False,
        ),
        ({"content": [{"type": "resource", "resource": {"uri": "a", "text": "hi"}}]}, "hi", False),
        ({"content": [{"type": "resource_link", "uri": "file:///x"}]}, "[file:///x]", False),
        ({"content": [{"type": "hologram"}, 3]}, "[hologram]\n[None]", False),
        ({"content": "no list"}, "", False),
    ],
)
def test_results_become_observations(result, text, error):
    found = answers.observation(result)
    assert (found.text, found.error) == (text, error)


def test_an_error_that_is_too_long_to_read_is_still_an_error():
    said = json.dumps({"error": "x" * (answers.MAX_SAID + 1)})
    found = answers.observation({"content": [{"type": "text", "text": said}]})
    assert found.error and len(found.text) == answers.MAX_SAID


def test_junk_arguments_never_reach_the_server(settings):
    surrogate = Call("count", {"item": "\ud800"})
    _, seen = play(
        task(settings, ()), [surrogate, Call("sell", {}), Call("count", {"item": 1, "x": 2}), COUNT]
    )
    assert [o.error for o in seen] == [True, True, True, False]
    assert "half of a character" in seen[0].text and "no parameter 'x'" in seen[2].text


# --- The folder as the state ----------------------------------------------------------------------


def rows(path, *statements):
    with sqlite3.connect(path) as database:
        for statement in statements:
            database.execute(statement)
    database.close()


def test_databases_count_by_their_rows(tmp_path):
    make, ten, two = (
        "CREATE TABLE t (x, y)",
        "INSERT INTO t VALUES (10, 'a')",
        "INSERT INTO t VALUES (2.0, x'00')",
    )
    for name, statements in {"a": (make, ten, two), "b": ("PRAGMA page_size = 1024", make, two, ten)}.items():
        (tmp_path / name).mkdir()
        rows(tmp_path / name / "s.db", *statements)
    a, b = (state.content(str(tmp_path / name)) for name in "ab")
    assert (tmp_path / "a/s.db").read_bytes() != (tmp_path / "b/s.db").read_bytes()
    assert a == b and list(a) == ["s.db"]
    rows(tmp_path / "b" / "s.db", "UPDATE t SET y = 'b' WHERE x = 10")
    assert state.content(str(tmp_path / "b")) != a
    rows(tmp_path / "b" / "s.db", "UPDATE t SET y = 'a' WHERE x = 10", "CREATE INDEX i ON t (x)")
    assert state.content(str(tmp_path / "b")) != a


def test_rows_that_lie_in_a_log_beside_the_database_count(tmp_path):
    rows(tmp_path / "s.db", "PRAGMA journal_mode = WAL", "CREATE TABLE t (x)")
    before = state.content(str(tmp_path))
    server = sqlite3.connect(tmp_path / "s.db")
    with server:
        server.execute("INSERT INTO t VALUES (1)")
    assert (tmp_path / "s.db-wal").stat().st_size > 0
    after = state.content(str(tmp_path))
    assert list(after) == ["s.db"] and after != before
    server.close()
    assert state.content(str(tmp_path)) == after


def test_json_counts_by_its_values_and_other_files_by_their_bytes(tmp_path):
    files = {"a.json": '{"x": 1.0, "y": [2]}', "b.jsonl": '{"x": 1}\n\n{"y": 2}', "c.txt": "x", "d.json": "{"}
    same = {"a.json": '{"y":[2],"x":1}', "b.jsonl": '{"x":1}\n{"y":2}\n', "c.txt": "x", "d.json": "{"}
    for folder, contents in {"a": files, "b": same}.items():
        (tmp_path / folder).mkdir()
        for name, text in contents.items():
            (tmp_path / folder / name).write_text(text)
    assert state.content(str(tmp_path / "a")) == state.content(str(tmp_path / "b"))
    for name in files:
        (tmp_path / "b" / name).write_text("[3]")
    a, b = (state.content(str(tmp_path / name)) for name in "ab")
    assert all(a[name] != b[name] for name in files)
    assert list(state.content(str(tmp_path / "a"), ["*.json", "c.*"])) == ["b.jsonl"]


def test_sums_of_floats_in_another_order_are_equal_in_json_and_in_rows(tmp_path):
    def held(name, total):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "a.json").write_text(json.dumps({"total": total, "far": float("inf")}))
        (folder / "b.jsonl").write_text(f"{json.dumps([total])}\n{{}}\n")
        rows(folder / "s.db", "CREATE TABLE t (x REAL)", f"INSERT INTO t VALUES ({total!r}), (9e999)")
        return state.content(str(folder))

    one, other = held("a", 0.1 + 0.2 + 0.3), held("b", 0.3 + 0.2 + 0.1)
    assert 0.1 + 0.2 + 0.3 != 0.3 + 0.2 + 0.1 and one == other
    apart = held("c", 0.6001)
    assert all(one[name] != apart[name] for name in one)


def test_what_takes_too_much_to_read_counts_by_its_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "MAX_VALUES", 100)
    monkeypatch.setattr(state, "MAX_PARSED", 100_000)
    (tmp_path / "list.json").write_text(json.dumps([0] * 200))
    (tmp_path / "long.json").write_text(json.dumps("x" * 100_000))
    (tmp_path / "a.json").write_text("[1.0]")
    rows(tmp_path / "s.db", "CREATE TABLE t (x)", "INSERT INTO t VALUES (1)" + ", (1)" * 60)
    rows(tmp_path / "one.db", "CREATE TABLE t (x)", "INSERT INTO t VALUES (1)")
    found = state.content(str(tmp_path))
    assert state.too_large(found) == {"list.json", "long.json", "s.db"}
    assert state.content(str(tmp_path)) == found
    rows(tmp_path / "s.db", "UPDATE t SET x = 2")
    (tmp_path / "a.json").write_text("[1]")
    changed = state.content(str(tmp_path))
    assert {name for name in found if found[name] != changed[name]} == {"s.db"}
    monkeypatch.setattr(state, "SCHEMA_STEPS", 1000)
    rows(tmp_path / "a.db", "CREATE TABLE t (x)", *(f"CREATE VIEW v{n} AS SELECT 1" for n in range(300)))
    digest = hashlib.sha256(hashlib.sha256((tmp_path / "a.db").read_bytes()).digest()).hexdigest()
    assert state.content(str(tmp_path))["a.db"] == digest
    monkeypatch.setattr(state, "MAX_BYTES", 10)
    assert state.content(str(tmp_path))["list.json"] == "too large, 600 bytes"


def test_json_is_read_to_the_same_depth_by_every_python(tmp_path):
    """Python 3.11 and 3.13 differ in the depth that they read."""
    lists, objects = ("[", "]"), ('{"a": ', "}")
    for (begin, end), depth in ((lists, 200), (objects, 200), (lists, 201), (objects, 201), (lists, 50_000)):
        (tmp_path / "deep.json").write_text(begin * depth + "1" + end * depth)
        assert state.too_large(state.content(str(tmp_path))) == ({"deep.json"} if depth > 200 else set())


def test_links_folders_and_the_path_of_the_world_itself(tmp_path):
    for name in "ab":
        world = tmp_path / name
        (world / "empty").mkdir(parents=True)
        (world / "link").symlink_to(world / "file")
        (world / "file").write_text(f"I lie in {world}.")
        os.mkfifo(world / "pipe")
    a, b = (state.content(str(tmp_path / name)) for name in "ab")
    assert a == b and a["empty"] == "folder" and a["link"] == "-> /world/file" and a["pipe"] == "no file"


def test_gits_index_counts_by_its_entries(tmp_path):
    date = "2026-01-01T00:00:00"
    who = {f"GIT_{role}_{what}": value for role in ("AUTHOR", "COMMITTER")
           for what, value in (("NAME", "a"), ("EMAIL", "a@b"), ("DATE", date))}  # fmt: skip
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
        for command in ("init --quiet -b main", "add file", "commit --quiet -m first"):
            subprocess.run(["git", *command.split()], cwd=tmp_path / name, check=True, env=os.environ | who)
    assert (tmp_path / "a/.git/index").read_bytes() != (tmp_path / "b/.git/index").read_bytes()
    a, b = (state.content(str(tmp_path / name)) for name in "ab")
    assert a == b
    (tmp_path / "b" / "more").write_text("y")
    subprocess.run(["git", "add", "more"], cwd=tmp_path / "b", check=True)
    assert state.content(str(tmp_path / "b"))[".git/index"] != a[".git/index"]


def test_agents_read_the_same_path_in_every_world(settings, tmp_path):
    Path(settings["template"], "stock.json").unlink()
    Path(settings["template"], "stock.json").symlink_to("nowhere")
    _, (one,) = play(task(settings, ()), [Call("inventory", {})])
    _, (other,) = play(task(settings, ()), [Call("inventory", {})])
    assert one.fatal and "/world/stock.json" in one.text and one.text == other.text


# --- Grading --------------------------------------------------------------------------------------


def test_a_turn_passes_by_the_folder_and_by_the_answers(settings):
    asked = task(settings, (RESTOCK,), (COUNT,))
    both = play(asked, [RESTOCK], [COUNT])[0]
    assert both.success and both.progress == 1.0
    early = play(asked, [RESTOCK, COUNT], [])[0]
    assert early.success  # the answer was given, if in the turn before
    wrong, missing = play(asked, [], [COUNT])[0], play(asked, [RESTOCK], [])[0]
    assert (wrong.reason, wrong.progress) == ("state_differs", 0.0)
    assert (missing.reason, missing.progress) == ("answer_missing", 0.5)
    other = Call("restock", {"item": "tea", "pieces": 1})
    assert play(asked, [other, other], [COUNT, Call("count", {"item": "cocoa"})])[0].success


def test_what_is_looked_up_after_a_change_has_to_be_told_too(settings):
    asked = task(settings, (RESTOCK, COUNT))
    assert play(asked, [RESTOCK, COUNT])[0].success
    assert play(asked, [RESTOCK])[0].reason == "answer_missing"


def test_errors_of_the_reference_are_no_answers_to_give(settings):
    sold_out = Call("restock", {"item": "milk", "pieces": -5})
    asked = task(settings, (sold_out, Call("count", {"item": "cocoa"})))
    outcome, (seen,) = play(asked, [sold_out])
    assert seen.error and outcome.success


@pytest.mark.parametrize(
    "fault, why",
    [("nests_json", "state_too_large"), ("zeros", "state_differs"), ("odd_name", "state_differs")],
)
def test_a_folder_that_a_call_made_unreadable_fails_the_rollout(settings, fault, why):
    left = task(settings, (RESTOCK,), command=f"{SERVER} {fault}")
    with ProcessPool("mcp", workers=1, timeout=10.0) as pool:
        env_ids = pool.reset([left])
        ((seen,),) = pool.step(env_ids, [[FAULT]])
        pool.end_turn(env_ids)
        (outcome,) = pool.score(env_ids)
        assert (seen.text, seen.error, pool.restarts) == ("nothing", False, 0)
        assert (outcome.valid, outcome.reward, outcome.reason) == (True, 0.0, why)


def test_reference_calls_that_leave_what_cannot_be_compared_are_our_fault(settings):
    left = task(settings, (FAULT,), command=f"{SERVER} nests_json")
    with ProcessPool("mcp", workers=1, timeout=10.0) as pool:
        env_ids = pool.reset([left])
        pool.end_turn(env_ids)
        (outcome,) = pool.score(env_ids)
    assert not outcome.valid and "makes 'deep.json' too large to compare" in outcome.reason


# --- Servers that misbehave -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, why",
    [
        ("dies", "ended with code 1 .its last words: out of cheese"),
        ("wrong_id", r"gave no answer within 2 s .an answer came with the id 1\d\d\d, not \d"),
        ("silent", "gave no answer within 2 s"),
        ("malformed", "gave no answer within 2 s .its last line that is no message: '{this is no JSON'"),
        ("sends_much", "sent more than 8 MiB at once"),
        ("stops", "gave no answer within 2 s"),
        ("nests", "has made a folder that holds a path of more than 1000 characters"),
        ("forks_behind", "runs .* processes, and 64 are allowed"),
        ("forks", "runs .* processes, and 64 are allowed"),
        ("fills", "has made a folder that holds more than 32 MiB"),
    ],
)
def test_a_call_that_ends_its_server_fails_its_rollout_and_no_other(settings, tmp_path, fault, why):
    limits = {"server_timeout": 2.0, "server_disk": 32.0}
    hostile = task(settings, GOOD, command=f"{SERVER} {fault} {tmp_path}", **limits)
    harmless = task(settings, GOOD)
    with ProcessPool("mcp", workers=1, timeout=10.0) as pool:
        good, bad = pool.reset([harmless, hostile])
        pool.step([good, bad], [GOOD[:1]] * 2)
        ((lost, after),) = pool.step([bad], [[FAULT, COUNT]])
        assert lost.fatal and lost.valid and lost.error and after.fatal
        assert pool.step([good], [GOOD[1:]])[0][0].text == "5"
        pool.end_turn([good, bad])
        fine, failed = pool.score([good, bad])
        assert fine.success and failed.valid and not failed.success
        assert re.search(f"the server {why}", failed.reason)
        assert pool.restarts == 0
        for _ in range(600):  # on busy cores what was killed ends late
            if len(left := _running(tmp_path)) <= SPARES:
                break
            time.sleep(0.1)
        assert len(left) <= SPARES
        pool.close([good])


@pytest.mark.slow
def test_an_answer_within_the_servers_limit_is_waited_for_beyond_the_limit_of_a_call(settings, monkeypatch):
    monkeypatch.setattr(worker_process, "WALL_FACTOR", 0.0)
    monkeypatch.setattr(worker_process, "WALL_SECONDS", 6.0)
    slow = task(settings, (FAULT,), command=f"{SERVER} slow", server_timeout=60.0)
    with ProcessPool("mcp", workers=1, timeout=60.0) as pool:
        env_ids = pool.reset([slow])
        ((seen,),) = pool.step(env_ids, [[FAULT]])
        pool.end_turn(env_ids)  # makes the reference's call too
        (outcome,) = pool.score(env_ids)
        assert (seen.text, seen.error, outcome.success, pool.restarts) == ("nothing", False, True, 0)


def _running(mark):
    """The processes that have the text of a mark among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(mark).encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
    return found


def test_what_the_user_wrote_down_reaches_no_world(settings):
    template = Path(settings["template"])
    (template / "deeper").mkdir()
    for folder in (template, template / "deeper"):
        (folder / "coevolve.json").write_text("{}")
    world = mcp.make()
    world.reset(scenario(settings))
    assert sorted(world.state()) == ["deeper", "deeper/coevolve.json", "stock.json"]
    assert world.state() == templates.content(template)
    world.close()


def test_a_world_without_files_is_a_state_too(settings):
    outcome, (seen,) = play(task(settings, GOOD, command=f"{SERVER} empties"), [FAULT])
    assert not seen.error and outcome.reason == "state_differs"


@pytest.mark.parametrize("fault", ["prints", "changes_tools"])
def test_what_is_harmless_is_tolerated(settings, fault):
    outcome, seen = play(task(settings, GOOD, command=f"{SERVER} {fault}"), GOOD)
    assert outcome.success and [o.text for o in seen] == ["done", "5"]


def test_requests_of_a_server_are_refused(settings):
    _, (seen,) = play(task(settings, (), command=f"{SERVER} asks"), [FAULT])
    assert (seen.text, seen.error) == ("q1 -32601", False)


@pytest.mark.skipif(not lockdown.guards_files(), reason="this kernel has no Landlock")
def test_nothing_is_written_outside_the_world(settings, tmp_path):
    command = f"MARK={tmp_path}/mark {SERVER} writes_outside"
    _, (seen,) = play(task(settings, (), command=command), [FAULT])
    assert seen.text == '{"error": "Permission denied"}' and not (tmp_path / "mark").exists()


@pytest.mark.skipif(not lockdown.guards_files(), reason="this kernel has no Landlock")
def test_a_server_has_no_capabilities_and_reads_no_variables_of_its_worker(settings):
    command = f"PID={os.getpid()} {SERVER} reads_environ"
    _, (seen,) = play(task(settings, (), command=command), [FAULT])
    bounds = "0" * 16 if os.geteuid() == 0 else ".*"  # another user cannot lower that bound, nor use it
    assert re.search(f"Permission denied .'{'0' * 16}', '{bounds}'", seen.text)


def test_a_server_leaves_nothing_in_the_kernel_and_changes_no_other_process(settings):
    command = f"PID={os.getpid()} {SERVER} disturbs"
    _, (seen,) = play(task(settings, (), command=command), [FAULT])
    assert seen.text == str(["Operation not permitted"] * 7)


@pytest.mark.parametrize(
    "network, said", [(False, '{"error": "Operation not permitted"}'), (True, "connected")]
)
def test_the_network_is_shut_unless_it_is_allowed(settings, network, said):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        command = f"PORT={listening.getsockname()[1]} {SERVER} connects"
        _, (seen,) = play(task(settings, (), command=command, network=network), [FAULT])
    assert seen.text == said


def test_processes_that_a_server_leaves_end_with_its_world(settings):
    _, (seen,) = play(task(settings, (), command=f"{SERVER} leaves_processes"), [FAULT])
    assert _gone(int(seen.text))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_stays_behind_a_killed_worker(settings, how):
    """A scheduler that ends a job sends SIGTERM to the launcher too."""
    left = scenario(settings, command=f"{SERVER} leaves_processes")
    with ProcessPool("mcp", workers=1, timeout=10.0) as pool:
        ((seen,),) = pool.step(pool.reset([left]), [[FAULT]])
        folder = os.readlink(f"/proc/{seen.text}/cwd")
        assert folder.endswith("/world") and os.path.exists(folder)
        if how == signal.SIGTERM:
            tasks = Path(f"/proc/{pool.pids[0]}/task").glob("*/children")
            (launcher,) = " ".join(file.read_text() for file in tasks).split()
            os.kill(int(launcher), how)
        os.kill(pool.pids[0], how)
    assert _gone(int(seen.text))
    assert _eventually(lambda: not os.path.exists(Path(folder).parents[1]))


def test_a_server_that_somebody_kills_is_built_anew(settings):
    world = mcp.make()
    world.reset(task(settings, GOOD))
    assert world.step(RESTOCK).text == "done"
    os.kill(world._world._pid, signal.SIGKILL)
    assert world.step(COUNT) == answers.observation({"content": [{"type": "text", "text": "5"}]})
    world.end_turn()
    assert world.score().success
    world.close()


def test_a_world_that_is_closed_twice_costs_no_other(settings):
    closed, other = (worlds.World(Spec.of(settings)) for _ in range(2))
    for _ in range(2):
        closed.close()
    servers.launcher().end(closed._pid)  # by now another process may have this number
    other.begin()
    assert other.call("count", {"item": "tea"}).text == "3"
    other.close()
    assert not os.path.exists(closed.folder) and not os.path.exists(other.folder)


def test_a_launcher_that_fails_leaves_nothing_behind(settings, monkeypatch):
    monkeypatch.setattr(servers, "launcher", functools.cache(servers.Launcher))
    monkeypatch.setattr(worlds, "launcher", servers.launcher)
    world = worlds.World(Spec.of({**settings, "command": f"{SERVER} leaves_processes"}))
    world.begin()
    child = int(world.call("fault", {}).text)
    with pytest.raises(ValueError):
        servers.launcher()._ask({"no": "request"}, [])
    assert _gone(world._pid) and _gone(child) and _eventually(lambda: not os.path.exists(world.folder))


def test_a_server_that_no_longer_starts_costs_its_rollouts_and_not_the_run(settings, tmp_path):
    program = tmp_path / "serve.py"
    program.write_text((ROOT / "tests/support/mcp_server.py").read_text())
    fine = task(settings, GOOD, command=f"python {program} {{world}}")
    program.write_text("raise SystemExit('disk full')")
    with ProcessPool("mcp", workers=1, timeout=10.0) as pool:
        env_ids = pool.reset([fine, task(settings, GOOD)])
        lost, kept = pool.step(env_ids, [GOOD] * 2)
        assert not any(o.valid for o in lost) and [o.text for o in kept] == ["done", "5"]
        assert "the server ended with code 1 (its last words: disk full)" in pool.score(env_ids)[0].reason


def _gone(pid):
    """Whether a process ends within seconds; a zombie has ended."""

    def ended():
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    return _eventually(ended)


def _eventually(holds):
    end = time.monotonic() + 20
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


# --- Time and chance ------------------------------------------------------------------------------


@pytest.mark.skipif(not shutil.which("cc"), reason="clocks are frozen by a C compiler's work")
def test_clocks_and_random_numbers_can_be_frozen(settings):
    today = [Call("today", {})]
    answered = [
        play(task(settings, (), freeze_time=t), today)[1][0].text for t in ("2026-01-01",) * 2 + ("",) * 2
    ]
    assert answered[0] == answered[1] and answered[0].startswith("1767225600.0 ")
    assert answered[2] != answered[3]


# --- Values -------------------------------------------------------------------------------------


def test_values_come_from_names_in_json_files_and_databases(tmp_path):
    (tmp_path / "orders.json").write_text(
        json.dumps({"orders": [{"order_id": n, "city": "Oslo", "paid": True} for n in range(20)]})
    )
    long = "A name that is longer than any user would type."
    rows(
        tmp_path / "people.db",
        "CREATE TABLE people (name TEXT, age REAL)",
        f"INSERT INTO people VALUES ('Ada', 36.5), (NULL, 3), ('{long}', 1)",
    )
    (tmp_path / "broken.json").write_text("{")
    names = {"order_id": "integer", "city": "string", "paid": "boolean", "name": "string", "age": "number"}
    names |= {"people_name": "string", "table_name": "string", "orderId": "string", "colour": "string"}
    properties = {name: {"type": kind} for name, kind in names.items()}
    tool = {"function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    assert values.of_template(tmp_path, [tool]) == {
        "order_id": list(range(12)),
        "city": ["Oslo"],
        "name": ["Ada"],
        "age": [36.5, 3.0, 1.0],
        "people_name": ["Ada"],
        "table_name": ["people"],
    }


def test_what_the_user_wrote_down_gives_no_values_but_those_it_names(settings):
    told = {"query": "Count the cocoa.", "calls": [{"name": "count", "arguments": {"item": "cocoa"}}]}
    (Path(settings["template"]) / "coevolve.json").write_text(
        json.dumps({"values": {"pieces": [2]}, "tasks": [told]})
    )
    (Path(settings["template"]) / "items.json").write_text('[{"item": "tea"}]')
    assert scenario(settings).scenario["values"] == {"item": ["tea"], "pieces": [2]}


# --- Servers that wait ----------------------------------------------------------------------------


def test_without_a_compiler_no_clock_is_frozen(settings, monkeypatch):
    monkeypatch.setenv("PATH", "/no/such/folder")
    monkeypatch.setattr(servers, "launcher", functools.cache(servers.Launcher))
    monkeypatch.setattr(worlds, "launcher", servers.launcher)
    with pytest.raises(ValueError, match="needs a C compiler, and cc failed .*: install gcc"):
        scenario(settings, freeze_time="2026-01-01", command=f"{sys.executable} -c pass {{world}}")


def test_from_the_second_world_of_a_kind_on_servers_wait_for_the_next(settings):
    shelf, spec = Spares(), Spec.of(settings)
    others = [dataclasses.replace(spec, server_timeout=float(n)) for n in range(30, 40)]
    waiting = lambda: sum(map(len, shelf._waiting.values()))
    taken = [shelf.take(spec)]
    assert waiting() == 0
    taken.append(shelf.take(spec))
    assert waiting() == SPARES
    expected = shelf._waiting[spec][0]
    taken.append(shelf.take(spec))
    assert taken[-1] is expected and waiting() == SPARES
    for other in others[:4]:
        taken += [shelf.take(other), shelf.take(other)]
    assert waiting() <= MOST_SPARES and spec not in shelf._waiting
    assert len({world.folder for world in taken}) == len(taken)
    for world in taken:
        world.begin()
        assert world.call("count", {"item": "tea"}).text == "3"
        world.close()
    for world in (world for kind in shelf._waiting.values() for world in kind):
        world.close()


def test_a_server_is_reused_where_it_may_be(splits):
    shelf = Spares()
    a, b, _ = (Spec.of({**s.scenario, "reuse_server": True}) for s in mcp.scenarios("train", splits))
    world = shelf.take(a)
    world.begin()
    world.call("restock", {"item": "tea", "pieces": 4})
    Path(world.home, "cache").write_text("x")
    shelf.give(world)
    assert world.state() == {} and os.listdir(world.home) == []  # another world's server may look there
    again = shelf.take(b)
    assert again is world and os.listdir(world.home) == []
    again.begin()
    assert again.call("count", {"item": "tea"}).text == "5"  # the stock of b
    other = shelf.take(b)
    assert other is not again
    other.close()
    shelf.give(again)
    assert shelf.take(dataclasses.replace(b, ignore=("x",))) is not again


@pytest.mark.parametrize("name", ["stock.json", "sub"])
def test_links_that_a_reused_server_plants_meanwhile_lead_nowhere(settings, tmp_path, monkeypatch, name):
    (tmp_path / "shop" / "sub").mkdir()
    (tmp_path / "shop" / "sub" / "file").write_text("of the template")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("precious")
    targets = {"stock.json": tmp_path / "outside" / "file", "sub": tmp_path / "outside"}
    shelf, spec = Spares(), Spec.of({**settings, "reuse_server": True})
    world = shelf.take(spec)
    world.begin()
    shelf.give(world)
    monkeypatch.setattr(world, "empty", lambda: os.symlink(targets[name], os.path.join(world.folder, name)))
    other = shelf.take(spec)
    assert other is not world and other.state() == templates.content(tmp_path / "shop")
    assert (tmp_path / "outside" / "file").read_text() == "precious"
    other.close()


def test_a_world_is_a_copy_of_its_template_with_modes_and_times(settings):
    folder = Path(settings["template"], "sub")
    folder.mkdir()
    (folder / "tool").write_text("x")
    (folder / "tool").chmod(0o750)
    (folder / "link").symlink_to("tool")
    for path in (folder / "tool", folder):
        os.utime(path, (1, 2))
    world = mcp.make()
    world.reset(scenario(settings))
    copies = [Path(world._world.folder, "sub", name) for name in ("", "tool")]
    assert [oct(path.stat().st_mode & 0o777) for path in copies] == [
        oct(folder.stat().st_mode & 0o777),
        "0o750",
    ]
    assert [path.stat().st_mtime for path in copies] == [2, 2]
    assert os.readlink(copies[0] / "link") == "tool"
    world.close()
    os.mkfifo(folder / "pipe")
    with pytest.raises(
        ValueError, match="cannot be copied: .*pipe is neither a file nor a folder nor a link"
    ):
        world.reset(scenario(settings))


@pytest.mark.parametrize("fault", ["silent", "dies", "leaves_processes"])
def test_a_server_that_misbehaved_serves_no_other_world(settings, fault):
    left = task(settings, (), command=f"{SERVER} {fault}", reuse_server=True, server_timeout=1.0)
    folders = []
    for _ in range(2):
        world = mcp.make()
        world.reset(left)
        folders.append(world._world.folder)
        world.step(FAULT)
        world.close()
    assert folders[0] != folders[1]


@pytest.mark.nightly
def test_rollouts_with_a_reused_server_are_those_with_a_fresh_one(settings):
    asked = task(settings, (RESTOCK,), (COUNT,), reuse_server=True)
    for _ in range(3):
        outcome, seen = play(asked, [RESTOCK], [COUNT])
        assert outcome.success and [o.text for o in seen] == ["done", "5"]


def test_folders_that_are_shut_or_too_deep_are_deleted_too(tmp_path):
    (tmp_path / "outside").mkdir(mode=0o500)
    code = """
import os, sys
from coevolve_jax.envs import lockdown
from coevolve_jax.envs.mcp import launcher
folder = sys.argv[1]
lockdown.confine([folder], network=False)  # root, too, then has to heed modes
os.makedirs(f"{folder}/world/shut/inner")
os.chdir(f"{folder}/world")
os.symlink("../outside", "link")
os.chmod("shut", 0)
for _ in range(1200):
    os.mkdir("d")
    os.chdir("d")
launcher.delete(f"{folder}/world")
"""
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, cwd=ROOT)
    assert os.listdir(tmp_path) == ["outside"] and (tmp_path / "outside").stat().st_mode & 0o777 == 0o500


def test_a_folder_that_cannot_be_read_is_a_state_too(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0)
    found = state.content(str(tmp_path))
    assert found["loop"] == "-> loop" and found["secret"]
