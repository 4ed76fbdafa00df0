"""BFCL's tools: their documentation, their whitelist, and the execution of one call.

A tool is called by its whitelisted name on the instance of its class. No text of the model is ever evaluated.
See environment.py for worlds and grading.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import datetime
import decimal
import functools
import importlib
import importlib.resources
import inspect
import json
import keyword
from collections.abc import Iterable, Mapping
from typing import Any, cast

import mpmath
from bfcl_eval.constants import executable_backend_config as backend

from coevolve_jax.envs.calls import bind, plain, short
from coevolve_jax.types import Call, Observation, Task

TOOLSETS = (
    "GorillaFileSystem",
    "MathAPI",
    "MessageAPI",
    "TwitterAPI",
    "TicketAPI",
    "TradingBot",
    "TravelAPI",
    "VehicleControlAPI",
)
# TravelAPI.verify_traveler_information computes an age from today's date. The day of the package's release
# stands for today, so that a task has the same answer next year.
TODAY = datetime.datetime(2026, 3, 23)

HINT = " Note that the provided function is in Python 3 syntax."
_JSON_TYPES = {
    "dict": "object",
    "float": "number",
    "tuple": "array",
    "list": "array",
    "int": "integer",
    "str": "string",
    "bool": "boolean",
    "any": "string",
}


# --- Tools -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tool:
    """A documented method.

    doc: for Hugging Face chat templates. official: the doc in BFCL's data. parameters: names in the order of
    the method's signature, which is not always the doc's order. defaults: mutable default values, which
    worlds would share.
    """

    name: str
    toolset: str
    doc: dict
    official: dict
    parameters: tuple[str, ...]
    required: tuple[str, ...]
    defaults: dict
    more = False  # a tool takes no other parameters


class _Clock(datetime.datetime):
    @classmethod
    def today(cls):
        return cls(TODAY.year, TODAY.month, TODAY.day)


@functools.cache
def load_class(toolset: str) -> type:
    """Returns BFCL's class of that name. Its clock is stopped where it would change a result."""
    module = importlib.import_module(backend.CLASS_FILE_PATH_MAPPING[toolset])
    if toolset == "TravelAPI":
        vars(module)["datetime"] = _Clock
    return getattr(module, toolset)


def read_data(*path: str) -> list[dict]:
    """Reads a JSON-lines file of bfcl_eval/data."""
    text = importlib.resources.files("bfcl_eval").joinpath("data", *path).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def json_schema(schema: Mapping) -> dict:
    """Converts BFCL's parameter doc to JSON schema."""
    out = dict(schema)
    if "type" in out:
        out["type"] = _JSON_TYPES.get(out["type"], out["type"])
    if "items" in out:
        out["items"] = json_schema(out["items"])
    if "properties" in out:
        out["properties"] = {name: json_schema(value) for name, value in out["properties"].items()}
    return out


@functools.cache
def _toolset(toolset: str) -> dict[str, Tool]:
    """Returns the documented public methods by name, in the order of the documentation."""
    tools = {}
    for doc in read_data("multi_turn_func_doc", backend.MULTI_TURN_FUNC_DOC_FILE_MAPPING[toolset]):
        name = doc["name"]
        method = inspect.getattr_static(load_class(toolset), name, None)
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        parameters = list(inspect.signature(method).parameters.values())[1:]
        function = {
            "name": name,
            "description": doc["description"].split("Tool description: ", 1)[-1],
            "parameters": json_schema(doc["parameters"]),
        }
        tools[name] = Tool(
            name=name,
            toolset=toolset,
            doc={"type": "function", "function": function},
            official=doc,
            parameters=tuple(p.name for p in parameters if p.name in function["parameters"]["properties"]),
            required=tuple(function["parameters"]["required"]),
            defaults={p.name: p.default for p in parameters if isinstance(p.default, (list, dict, set))},
        )
    return tools


def documented(toolsets: Iterable[str]) -> dict[str, Tool]:
    """Returns tools by name, in the order of `toolsets` and BFCL's docs. ValueError: unknown toolset."""
    unknown = [name for name in toolsets if name not in TOOLSETS]
    if unknown:
        raise ValueError(f"Unknown toolset {unknown[0]!r}: use some of {', '.join(TOOLSETS)}.")
    return {name: tool for toolset in toolsets for name, tool in _toolset(toolset).items()}


def tools(task: Task) -> list[dict]:
    """Returns the docs of the tools that `task` offers, in the form of Hugging Face chat templates.

    Where the scenario says so, they are BFCL's own docs with the suffix of its harness
    (bfcl_eval.utils.add_language_specific_hint_to_function_doc). They are ordered by the scenario's toolsets,
    then by BFCL's documentation. The dicts are shared: do not change them. ValueError for an unknown toolset.
    """
    start = task.scenario
    hidden = {*start["excluded"], *start.get("announced", ())}
    offered = [tool for name, tool in documented(start["toolsets"]).items() if name not in hidden]
    if start.get("documents") != "official":
        return [tool.doc for tool in offered]
    return [{**doc, "description": doc["description"] + HINT} for doc in (tool.official for tool in offered)]


# --- Calls -------------------------------------------------------------------------------------


def _bind(allowed: Mapping[str, Tool], call: Call) -> tuple[Tool, dict]:
    """Returns the tool and the keyword arguments of a call. ValueError says what the model wrote wrong."""
    arguments = bind(call, allowed)
    tool = allowed[call.name]
    return tool, {**copy.deepcopy(tool.defaults), **arguments}


def _result_text(result: Any) -> str:
    """Renders a tool's result like the official executor (multi_turn_utils.execute_multi_turn_func_call)."""
    if type(result) is dict:
        try:
            return json.dumps(result)
        except (TypeError, ValueError, RecursionError):
            return str(result)
    return str(result)


def _refused(result: Any) -> bool:
    """Recognises a tool's refusal: {"error": ...}, a list of one such dict, or ["Error: ..."]."""
    if isinstance(result, list) and len(result) == 1:
        result = result[0]
        if isinstance(result, str):
            return result.startswith("Error:")
    return isinstance(result, dict) and "error" in result


def execute(world: Mapping[str, Any], allowed: Mapping[str, Tool], call: Call) -> Observation:
    """Calls the tool on the instance of its class (`world`: instances by class name). Never raises."""
    # MathAPI changes these two process-wide settings; the next world must not see that.
    mpmath.mp.dps = 15
    decimal.setcontext(decimal.Context())
    try:
        tool, arguments = _bind(allowed, call)
    except ValueError as error:
        return Observation(json.dumps({"error": str(error)}), error=True)
    try:
        result = getattr(world[tool.toolset], tool.name)(**arguments)
        return Observation(_result_text(result), error=_refused(result))
    except RecursionError:  # its own message depends on how deep the caller's stack is
        problem = "maximum recursion depth exceeded"
    except Exception as error:  # any exception of a tool is the model's fault, as in the official executor
        problem = str(error)
    return Observation(json.dumps({"error": f"Error during execution: {problem}"}), error=True)


def parse(text: str) -> Call:
    """Parses BFCL's notation "mv(source='a', destination='b')".

    Positional arguments get the names in the method's signature. ValueError for an unknown tool and for
    anything but literals.
    """
    try:
        node = cast(Any, ast.parse(text, mode="eval").body)  # AttributeError where it is no call
        tool = documented(TOOLSETS)[node.func.id]
        if len(node.args) > len(tool.parameters):
            raise ValueError("too many positional arguments")
        pairs = [*zip(tool.parameters, node.args), *((k.arg, k.value) for k in node.keywords)]
        arguments = {name: ast.literal_eval(value) for name, value in pairs}
        if len(arguments) != len(pairs) or not set(arguments) <= set(tool.parameters):
            raise ValueError("an argument is given twice or has no such parameter")
        return Call(tool.name, plain(arguments))
    except (AttributeError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError, ValueError) as e:
        raise ValueError(f"{short(text)} is no BFCL call with literal arguments: {e}.") from None


def render(call: Call) -> str:
    """Renders a Call in BFCL's notation.

    The official checker evaluates this text. So ValueError for anything but a documented tool, identifiers as
    parameter names and plain JSON values.
    """
    if not isinstance(call.name, str) or call.name not in documented(TOOLSETS):
        raise ValueError("The call names no tool of BFCL.")
    arguments = plain(call.arguments)
    for name in arguments:
        if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name):
            raise ValueError(f"{short(name)} is not the name of a parameter.")
    return f"{call.name}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
