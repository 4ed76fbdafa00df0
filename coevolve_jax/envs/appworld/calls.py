"""The one tool, `execute(code)`: valid code, the APIs that it calls, and a user's words for them."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

from coevolve_jax.envs import base
from coevolve_jax.envs.calls import bind, signatures
from coevolve_jax.types import Call, Task

MAX_CODE = 20_000  # characters
NO_API = "python"  # the action of code that calls no API
TOKEN = "access_token"  # ends the names of arguments that no user says
EXECUTE = {
    "type": "function",
    "function": {
        "name": "execute",
        "description": "Runs Python code in a session that keeps its variables, and returns what it prints. "
        "You act for the supervisor through apis.APP.API(name=value, ...), which returns JSON values. "
        "Read before you call: print(apis.api_docs.show_app_descriptions()), "
        "print(apis.api_docs.show_api_descriptions(app_name=...)), "
        "print(apis.api_docs.show_api_doc(app_name=..., api_name=...)). "
        "apis.supervisor has the supervisor's profile, addresses, cards and account passwords; "
        "an app's login returns the access_token that its other APIs take. "
        "Lists come in pages: ask for all of them. Work in small steps and look at what they print. "
        "When the task is done call apis.supervisor.complete_task(), "
        "with answer=... where the task asks for something.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "Python code."}},
            "required": ["code"],
        },
    },
}
_SIGNATURES = signatures([EXECUTE])


class ApiCall(NamedTuple):
    """A call apis.<app>.<api>(...) in code.

    arguments: the keyword arguments that are literals. whole: whether all are but for access tokens.
    """

    app: str
    api: str
    arguments: dict[str, Any]
    whole: bool = True

    @property
    def name(self) -> str:
        return f"{self.app}.{self.api}"


def read(call: Call) -> str:
    """Returns the code of a call. ValueError says in one sentence what is wrong with it."""
    code = bind(call, _SIGNATURES)["code"]
    if not isinstance(code, str):
        raise ValueError("The code must be text.")
    if len(code) > MAX_CODE:
        raise ValueError(f"The code has {len(code)} characters: at most {MAX_CODE} are allowed.")
    return code


def api_calls(call: Call) -> list[ApiCall]:
    """Returns the APIs that code calls, in the order of the text; none for invalid code. It parses only."""
    try:
        return list(_parse(read(call)))
    except ValueError:
        return []


@functools.lru_cache(maxsize=4096)
def _parse(code: str) -> tuple[ApiCall, ...]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Attribute(value=ast.Name(id="apis"), attr=app), attr=api)
            ):
                written = {}
                for keyword in node.keywords:
                    with contextlib.suppress(ValueError):
                        written[keyword.arg or ""] = _literal(keyword.value)
                written.pop("", None)  # **arguments
                said = {k.arg for k in node.keywords if not (k.arg or "").endswith(TOKEN)}
                whole = not node.args and said <= written.keys()
                found.append((node.lineno, node.col_offset, ApiCall(app, api, written, whole)))
    return tuple(call for *_, call in sorted(found, key=lambda f: f[:2]))


def _literal(node: ast.expr) -> Any:
    """Returns the value of a literal that JSON can hold. ValueError for other code."""
    try:
        return json.loads(json.dumps(ast.literal_eval(node), allow_nan=False))
    except (TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"The code is no literal ({error}): JSON cannot hold its value.") from None


def action_pattern(call: Call) -> str:
    """Returns the first API that code calls, "python" where it calls none, the tool's name for no code."""
    try:
        calls = _parse(read(call))
    except ValueError:
        return call.name
    return calls[0].name if calls else NO_API


def wording(call: Call) -> str:
    """Returns a user's words for code that calls one API with literals, "" for other code.

    Words for a part of the arguments would ask for another call.
    """
    calls = api_calls(call)
    if len(calls) != 1:
        return ""
    ((app, api, arguments, whole),) = calls
    title = app.replace("_", " ").title()
    if api == "login":
        return f"log in to {title}"
    if not whole:
        return ""
    given = [
        f"{name.replace('_', ' ')} {value!r}" for name, value in arguments.items() if not name.endswith(TOKEN)
    ]
    return f"in {title}, {api.replace('_', ' ')}" + (f" with {', '.join(given)}" if given else "")


def features(task: Task) -> Counter[str]:
    """Counts features like the default (envs/base.py), with each API as a tool."""
    turns = tuple(
        replace(turn, calls=tuple(Call(a.name, a.arguments) for call in turn.calls for a in api_calls(call)))
        for turn in task.turns
    )
    return base.features(replace(task, turns=turns))
