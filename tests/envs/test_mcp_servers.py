"""Published MCP servers as environments, and `mcp` as the reference client: `make mcp` sets them up."""

import json
import os
import sqlite3
import subprocess

import pytest

from coevolve_jax.envs import mcp
from coevolve_jax.envs.mcp import answers
from coevolve_jax.types import Call
from tests.support.paths import ROOT
from tests.support.two_worlds import execute

BIN, SQLITE = ROOT / ".mcp" / "bin", ROOT / ".mcp" / "sqlite" / "bin"
NODE = ROOT / ".mcp" / "node" / "node_modules" / ".bin"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BIN.exists(), reason="The servers are not set up: make mcp does it"),
]
for_node = pytest.mark.skipif(not NODE.exists(), reason="make mcp found no npm for the servers of node")
GIT = " ".join(f"GIT_{role}_{what}={value}" for role in ("AUTHOR", "COMMITTER")
               for what, value in (("NAME", "a"), ("EMAIL", "a@b")))  # fmt: skip


@pytest.fixture
def sqlite(tmp_path):
    (tmp_path / "shop").mkdir()
    with sqlite3.connect(tmp_path / "shop" / "shop.db") as database:
        database.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)")
        database.execute("INSERT INTO orders VALUES (1, 'tea')")
    database.close()
    command = f"{SQLITE}/mcp-server-sqlite --db-path {{world}}/shop.db"
    calls = [
        Call("list_tables", {}),
        Call("read_query", {"query": "SELECT * FROM orders"}),
        Call("write_query", {"query": "INSERT INTO orders VALUES (2, 'milk')"}),
        Call("read_query", {"query": "SELECT * FROM orders"}),
        Call("read_query", {"query": "DELETE FROM orders"}),
        Call("write_query", {"query": "INSERT INTO nothing VALUES (2)"}),
        Call("describe_table", {"table_name": "orders"}),
        Call("append_insight", {"insight": "Tea sells."}),
    ]
    return {"command": command, "template": str(tmp_path / "shop")}, calls


@pytest.fixture
def git(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "a.txt").write_text("one\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q", "-b", "main"], ["add", "."], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    (folder / "b.txt").write_text("two\n")
    repository = {"repo_path": "/world"}
    calls = [
        Call("git_status", repository),
        Call("git_add", {**repository, "files": ["b.txt"]}),
        Call("git_commit", {**repository, "message": "second"}),
        Call("git_log", repository),
        Call("git_create_branch", {**repository, "branch_name": "side"}),
        Call("git_checkout", {**repository, "branch_name": "side"}),
    ]
    command = f"{GIT} {BIN}/mcp-server-git --repository {{world}}"
    return {"command": command, "template": str(folder)}, calls


@pytest.fixture
def files(tmp_path):
    (tmp_path / "notes" / "old").mkdir(parents=True)
    (tmp_path / "notes" / "a.txt").write_text("one")
    calls = [
        Call("list_allowed_directories", {}),
        Call("list_directory", {"path": "/world"}),
        Call("write_file", {"path": "/world/b.txt", "content": "two"}),
        Call("move_file", {"source": "/world/a.txt", "destination": "/world/old/a.txt"}),
        Call("read_text_file", {"path": "/world/old/a.txt"}),
        Call("read_text_file", {"path": "/etc/passwd"}),
        Call("get_file_info", {"path": "/world/b.txt"}),
    ]
    command = f"{NODE}/mcp-server-filesystem {{world}}"
    return {"command": command, "template": str(tmp_path / "notes")}, calls


@pytest.fixture
def memory(tmp_path):
    (tmp_path / "graph").mkdir()
    entity = {"name": "Ada", "entityType": "person", "observations": ["likes tea"]}
    calls = [
        Call("create_entities", {"entities": [entity]}),
        Call("add_observations", {"observations": [{"entityName": "Ada", "contents": ["is here"]}]}),
        Call("read_graph", {}),
        Call("search_nodes", {"query": "tea"}),
    ]
    command = f"MEMORY_FILE_PATH={{world}}/memory.jsonl {NODE}/mcp-server-memory"
    return {"command": command, "template": str(tmp_path / "graph")}, calls


def steps(settings, calls, **changed):
    (scenario,) = mcp.scenarios("train", {**settings, **changed})
    found = execute(mcp.make, scenario, calls)
    assert len(found) == len(calls)
    return found


def test_the_sqlite_server(sqlite):
    found = steps(*sqlite)
    assert all(step.repeats and not step.differ for step in found)
    assert [step.first.error for step in found] == [False] * 4 + [True] * 2 + [False] * 2
    assert [sorted(step.changed) for step in found] == [["shop.db"] if n == 2 else [] for n in range(8)]
    assert found[3].first.text == "[{'id': 1, 'item': 'tea'}, {'id': 2, 'item': 'milk'}]"


@pytest.mark.nightly
def test_the_git_server_needs_a_clock_that_stands_still(git):
    running = steps(*git)
    assert not all(step.repeats for step in running) and any(step.differ for step in running)
    frozen = steps(*git, freeze_time="2026-01-01T12:00:00")
    assert all(step.repeats and not step.differ for step in frozen)
    assert not any(step.first.error for step in frozen)
    assert ".git/index" in frozen[1].changed and "/world" in frozen[0].first.text + str(git)


@pytest.mark.nightly
def test_the_time_server_needs_a_clock_that_stands_still(tmp_path):
    (tmp_path / "empty").mkdir()
    settings = {"command": f"{BIN}/mcp-server-time --local-timezone UTC", "template": str(tmp_path / "empty")}
    now, conversion = (
        Call("get_current_time", {"timezone": "Europe/Rome"}),
        Call(
            "convert_time",
            {"source_timezone": "Europe/Rome", "time": "12:00", "target_timezone": "Asia/Tokyo"},
        ),
    )
    asked, converted = steps(settings, [now, conversion])
    assert not asked.repeats and converted.repeats and converted.first.error is False
    (frozen,) = steps(settings, [now], freeze_time="2026-01-01T12:00:00")
    assert frozen.repeats and "2026-01-01T13:00:00+01:00" in frozen.first.text


@for_node
def test_the_filesystem_server(files):
    settings, calls = files
    *found, info = steps(settings, calls)
    assert not info.repeats and not info.first.error  # it tells when a file was made
    assert all(step.repeats and not step.differ for step in found)
    assert [step.first.error for step in found] == [False] * 5 + [True]
    assert "/world" in found[0].first.text and found[4].first.text == "one"
    assert sorted(found[3].changed) == ["a.txt", "old/a.txt"]


@for_node
def test_the_memory_server(memory):
    found = steps(*memory)
    assert all(step.repeats and not step.differ and not step.first.error for step in found)
    assert [bool(step.changed) for step in found] == [True, True, False, False]
    assert "likes tea" in found[3].first.text


# --- The reference client -------------------------------------------------------------------------

CLIENT = """
import asyncio, json, sys
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

async def main():
    command, calls = json.loads(sys.argv[1])
    async with stdio_client(StdioServerParameters(command=command[0], args=command[1:])) as streams:
        async with ClientSession(*streams) as session:
            await session.initialize()
            tools = (await session.list_tools()).tools
            found = [await session.call_tool(name, arguments) for name, arguments in calls]
    dump = lambda value: value.model_dump(mode="json", by_alias=True, exclude_none=True)
    print(json.dumps([[dump(tool) for tool in tools], [dump(result) for result in found]]))

asyncio.run(main())
"""


@pytest.mark.parametrize("server", ["sqlite", pytest.param("files", marks=for_node)])
def test_our_client_reads_what_the_reference_client_reads(server, request, tmp_path):
    settings, calls = request.getfixturevalue(server)
    calls = [call for call in calls if call.name != "get_file_info"]
    (scenario,) = mcp.scenarios("train", settings)
    world = mcp.make()
    world.reset(scenario)
    ours = [world.step(call) for call in calls]
    world.close()
    folder = tmp_path / "world"
    folder.symlink_to(settings["template"])
    folder = os.path.realpath(folder)
    command = [word.replace("{world}", folder) for word in settings["command"].split()]
    asked = json.dumps([command, [[c.name, c.arguments] for c in calls]]).replace("/world", folder)
    client = [str(BIN / "python"), "-c", CLIENT, asked]
    done = subprocess.run(client, capture_output=True, text=True, check=True, timeout=60)
    listed, results = json.loads(done.stdout)
    assert answers.schemas(listed, ()) == mcp.tools(scenario)
    theirs = [answers.observation(result) for result in results]
    assert [o.text for o in ours] == [o.text.replace(folder, "/world") for o in theirs]
    assert [o.error for o in ours] == [o.error for o in theirs]
