"""A small MCP server in the standard library: a shop whose stock lies in a JSON file of its world.

    python mcp_server.py WORLD [FAULT]

FAULT is a way to misbehave: at the start, in the list of tools, or in the tool `fault` alone.
"""

import ctypes
import json
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import uuid

TEXT = {"type": "string"}
TOOLS = [
    {
        "name": "restock",
        "description": "Adds pieces of an item to the stock.",
        "inputSchema": {
            "type": "object",
            "properties": {"item": TEXT, "pieces": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
            "required": ["item", "pieces"],
        },
    },
    {
        "name": "count",
        "description": "Counts the pieces of an item.",
        "inputSchema": {"type": "object", "properties": {"item": TEXT}, "required": ["item"]},
    },
    {
        "name": "inventory",
        "description": "Lists all items with their pieces.",
        "inputSchema": {"type": "object", "properties": {}},
    },
    {"name": "today", "description": "Tells the time.", "inputSchema": {"type": "object"}},
    {"name": "fault", "description": "Misbehaves.", "inputSchema": {"type": "object"}},
]
world, fault = sys.argv[1], (sys.argv[2:] or [""])[0]
STORE = os.path.join(world, "stock.json")


def send(message):
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def said(text, error=False):
    return {"content": [{"type": "text", "text": text}], "isError": error}


def restock(item, pieces):
    if not isinstance(item, str) or not item.isidentifier() or not isinstance(pieces, int):
        return said("An item is a name, pieces are a number.", error=True)
    stock = json.load(open(STORE))
    stock[item] = stock.get(item, 0) + pieces
    json.dump(stock, open(STORE, "w"))
    return said(f"Error: {item} cannot be sold out twice." if stock[item] < 0 else "done")


def count(item):
    stock = json.load(open(STORE))
    known = isinstance(item, str) and item in stock
    return said(str(stock[item])) if known else said("There is no such item.", error=True)


def inventory():
    return said(open(STORE).read())


def today():
    return said(f"{time.time()} {uuid.uuid4()}")


def misbehave():
    if fault == "dies":
        sys.exit("out of cheese")
    if fault == "silent":
        time.sleep(600)
    if fault == "sends_much":
        while True:
            sys.stdout.write("x" * 65536)
    if fault == "malformed":
        sys.stdout.write("{this is no JSON\n")
        sys.stdout.flush()
        time.sleep(600)
    if fault == "wrong_id":
        send({"id": message["id"] + 1000, "result": said("late")})
        time.sleep(600)
    if fault == "asks":
        send({"id": "q1", "method": "sampling/createMessage", "params": {"messages": []}})
        reply = json.loads(sys.stdin.readline())
        return said(f"{reply['id']} {reply['error']['code']}")
    if fault == "writes_outside":
        try:
            open(os.environ["MARK"], "w")
        except OSError as error:
            return said(f"{error.strerror}", error=True)
    if fault == "reads_environ":
        powers = [
            line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapEff", "CapBnd"))
        ]
        try:
            open(f"/proc/{os.environ['PID']}/environ").read()
        except OSError as error:
            return said(f"{error.strerror} {powers}", error=True)
    if fault == "disturbs":
        libc, other = ctypes.CDLL(None, use_errno=True), int(os.environ["PID"])
        resource.prlimit(0, resource.RLIMIT_NOFILE)
        os.setpriority(os.PRIO_PROCESS, 0, 5)
        attempts = (
            lambda: libc.shmget(0x7E57C, 4096, 0o1600),
            lambda: libc.msgget(0x7E57C, 0o1600),
            lambda: libc.semget(0x7E57C, 1, 0o1600),
            lambda: libc.mq_open(b"/coevolve", os.O_CREAT | os.O_RDWR, 0o600, None),
            lambda: libc.prlimit(other, resource.RLIMIT_NOFILE, None, None),
            lambda: libc.setpriority(os.PRIO_PROCESS, other, 5),
            lambda: libc.setpriority(os.PRIO_USER, 0, 5),
        )
        return said(str([attempt() == -1 and os.strerror(ctypes.get_errno()) for attempt in attempts]))
    if fault == "forks_behind":
        for _ in range(70):
            if not os.fork():
                time.sleep(600)
        return said("nothing")
    if fault == "fills":
        for n in range(100):
            open(os.path.join(world, f"{n}.bin"), "wb").write(b"x" * 2**20)
    if fault == "nests_json":
        open(os.path.join(world, "deep.json"), "w").write("[" * 700 + "]" * 700)
    if fault in ("zeros", "odd_name"):
        database = sqlite3.connect(
            os.path.join(os.fsencode(world), b"\xff.db" if fault == "odd_name" else b"z.db")
        )
        database.execute("CREATE TABLE t (x, zeros AS (zeroblob(900000000)))")
        with database:
            database.execute("INSERT INTO t VALUES (1)")
        database.close()
    if fault == "remembers":
        TOOLS.append({})
        return said(f"called {len(TOOLS)} times")
    if fault == "nests":
        os.chdir(world)
        for _ in range(2000):
            os.mkdir("deeper")
            os.chdir("deeper")
    if fault == "slow":
        time.sleep(8)
    if fault == "works":
        while time.process_time() < 1.0:
            pass
    if fault == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "empties":
        shutil.rmtree(world, ignore_errors=True)
    if fault == "forks":
        while os.fork() >= 0:
            pass
    if fault == "leaves_processes":
        child = "import os, time; os.setsid(); time.sleep(600)"
        process = subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
        return said(str(process.pid))
    if fault == "connects":
        import socket

        try:
            socket.create_connection(("127.0.0.1", int(os.environ["PORT"])), 5)
        except OSError as error:
            return said(f"{error.strerror}", error=True)
        return said("connected")
    return said("nothing")


def listed(cursor):
    if fault == "many_tools":
        return {"tools": [{**TOOLS[1], "name": f"tool_{n}"} for n in range(400)]}
    if fault == "two_of_a_name":
        return {"tools": TOOLS + TOOLS[:1]}
    if fault == "no_tools":
        return {"tools": []}
    at = int(cursor or 0)
    more = {"nextCursor": str(at + 2)} if at + 2 < len(TOOLS) else {}
    page = {"tools": TOOLS[at : at + 2], **more}
    if fault == "changes_tools" and not more:
        TOOLS[0] = {**TOOLS[0], "name": "renamed"}
        send({"method": "notifications/tools/list_changed"})
    return page


if fault == "dies_at_start":
    sys.exit("out of cheese")
if fault == "silent_at_start":
    time.sleep(600)
if fault == "prints":
    print("Welcome to the shop!")
    print("[1, 2]", flush=True)
    threading.Thread(target=lambda: sys.stderr.write("log " * 100_000), daemon=True).start()
TOOLBOX = {"restock": restock, "count": count, "inventory": inventory, "today": today, "fault": misbehave}
for line in sys.stdin:
    message = json.loads(line)
    if message.get("method") == "initialize":
        send({"id": "p1", "method": "ping"})
        send({"method": "notifications/message", "params": {"level": "info", "data": "hello"}})
        result = {
            "protocolVersion": "2024-11-05",
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "shop"},
        }
    elif message.get("method") == "tools/list":
        result = listed(message["params"].get("cursor"))
    elif message.get("method") == "tools/call":
        name, arguments = message["params"]["name"], message["params"]["arguments"]
        if name not in TOOLBOX:
            send({"id": message["id"], "error": {"code": -32602, "message": f"no tool {name}"}})
            continue
        if fault == "logs":
            open(os.path.join(world, "log.txt"), "a").write(f"{time.time()} {name}\n")
        result = TOOLBOX[name](**arguments)
    else:
        continue
    send({"id": message["id"], "result": result})
