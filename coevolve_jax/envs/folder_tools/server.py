"""Serves the tools of one environment in Agent-World's format over MCP, with the standard library only.

    MCP_DB_DIR=DATABASE python server.py CHECKPOINT

CHECKPOINT is a JSON file whose data.ToolDesignAgent.tool_schemas are the tools: name, description, parameters
(a JSON schema) and implementation, the source of a Python function that reads and writes files in MCP_DB_DIR.
The code is trusted no further than the process that runs it, which envs/mcp confines.
"""

import hashlib
import json
import os
import random
import re
import sys
import traceback
from collections import Counter


def load(path):
    """Returns the tools of a checkpoint and their functions, by name. A tool without one is left out."""
    with open(path, encoding="utf-8") as file:
        schemas = json.load(file)["data"]["ToolDesignAgent"]["tool_schemas"]
    shared, spaces, tools, functions = {"__name__": "tools"}, [], [], {}
    for schema in schemas:
        names = dict(shared)  # its own: a constant or helper of another tool replaces none of it
        try:
            exec(schema["implementation"], names)
            functions[schema["name"]] = names[re.sub(r"\W", "_", schema["name"], flags=re.ASCII)]
        except Exception:
            traceback.print_exc()  # the log says which, the other tools go on
            continue
        spaces.append(names)
        shared.update(names)
        parameters = schema.get("parameters") or {"type": "object", "properties": {}}
        described = {"description": schema.get("description") or "", "inputSchema": parameters}
        tools.append({"name": schema["name"], **described})
    for names in spaces:
        names.update({**shared, **names})  # a tool may call those after it
    return tools, functions


def seed(call, made):
    """Makes chance depend on the call alone, and on how often it was made before. made: counts of calls."""
    text = json.dumps(call, sort_keys=True)
    random.seed(hashlib.sha256(f"{text} {made[text]}".encode()).digest())
    made[text] += 1


def answer(functions, name, arguments):
    """Returns the result of tools/call."""
    try:
        value, error = functions[name](**arguments), False
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    except Exception as failure:
        text, error = f"{type(failure).__name__}: {failure}", True
    return {"content": [{"type": "text", "text": text}], "isError": error}


def serve(checkpoint):
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what tools print is no message
    os.urandom = lambda length: random.getrandbits(8 * length).to_bytes(length, "big")  # for uuid.uuid4
    tools, functions = load(checkpoint)
    made = Counter()
    for line in sys.stdin:
        message = json.loads(line)
        if "id" not in message:
            continue
        parameters = message.get("params") or {}
        reply = {"jsonrpc": "2.0", "id": message["id"]}
        if message["method"] == "initialize":
            about = {"name": "folder_tools", "version": "1"}
            reply["result"] = {
                "protocolVersion": parameters["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": about,
            }
        elif message["method"] == "tools/list":
            reply["result"] = {"tools": tools}
        elif message["method"] == "tools/call":
            call = parameters["name"], parameters.get("arguments") or {}
            seed(call, made)
            reply["result"] = answer(functions, *call)
        else:
            reply["error"] = {"code": -32601, "message": f"There is no method {message['method']!r}."}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1])
