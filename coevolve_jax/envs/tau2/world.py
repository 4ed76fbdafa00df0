"""One world of a tau2 domain: the package's environment and tools over records of its own."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from pydantic import ValidationError

from coevolve_jax.envs.base import digest
from coevolve_jax.envs.calls import bind, signatures
from coevolve_jax.envs.tau2 import records
from coevolve_jax.envs.tau2.arithmetic import calculate
from coevolve_jax.envs.tau2.package import load
from coevolve_jax.envs.tau2.protocol import SOLO, TELL_USER
from coevolve_jax.types import Call, Observation

# The user's tools refuse in words, not by an exception.
REFUSED = re.compile(r"(Cannot|Error|Failed|No active|VPN already|You do not have|App '.*' not found)\b")


@functools.cache
def original(domain: str) -> Any:
    """Returns the package's environment of a domain. Worlds are copied from it; nobody calls its tools."""
    environment = load(f"domains.{domain}.environment").get_environment
    return environment(solo_mode=True) if domain in SOLO else environment()


@functools.cache
def _tools(domain: str) -> dict[str, Any]:
    environment = original(domain)
    offered = [*environment.get_tools(), *(environment.get_user_tools() if domain in SOLO else ())]
    return {tool.name: tool for tool in offered}


@functools.cache
def documented(domain: str) -> list[dict]:
    """Returns the function schemas of a domain's tools, in the package's order."""
    return [simplified(tool.openai_schema) for tool in _tools(domain).values()]


@functools.cache
def _signatures(domain: str) -> dict:
    return signatures(documented(domain))


def simplified(schema: Any, definitions: dict | None = None) -> Any:
    """Returns a schema without titles, references and alternatives.

    The first alternative stays: it says most (a record, not any object; some words, not any text).
    """
    if isinstance(schema, list):
        return [simplified(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    definitions = schema.get("$defs", definitions)
    if "$ref" in schema:
        schema = {**(definitions or {})[schema["$ref"].rpartition("/")[2]], **schema}
    if "anyOf" in schema:
        schema = {**simplified(schema["anyOf"][0], definitions), **schema}
    kept = {k: v for k, v in schema.items() if k not in ("$defs", "$ref", "anyOf")}
    if isinstance(kept.get("title"), str):
        del kept["title"]
    return {k: simplified(v, definitions) for k, v in kept.items()}


def environment(domain: str, user_id: str = "", solo_mode: bool = False) -> Any:
    """Returns an environment of the package in its initial state. It shares nothing that its tools change.

    Three things differ from the package:
    * Records are copied when they are touched.
    * `calculate` does not use eval.
    * A new bill has the next number instead of a random one.

    solo_mode: whether the agent may call the user's tools.
    """
    first = original(domain)
    tools = type(first.tools)(records.copied(first.tools.db, domain, user_id))
    tools.get_db_hash = lambda: load("utils").get_dict_hash(records.changes(tools.db))
    if domain in SOLO:
        user_tools = type(first.user_tools)(records.copied(first.user_tools.db, domain))
        made = type(first)(domain, first.policy, tools, user_tools)
        _number_bills(tools)
    else:
        made = type(first)(domain, first.policy, tools)
        tools.calculate = calculate
    made.solo_mode = solo_mode
    return made


def _number_bills(tools: Any) -> None:
    charge, module = tools._apply_one_time_charge, load("domains.telecom.tools")

    def charge_with_number(*arguments: Any) -> None:
        number = SimpleNamespace(hex=f"{len(tools.db.bills):08d}")
        vars(module)["uuid"] = SimpleNamespace(uuid4=lambda: number)
        charge(*arguments)

    tools._apply_one_time_charge = charge_with_number


class World:
    """One world of a domain.

    messages: the messages and calls so far, as the package's evaluators take them. Calls that were refused
    before they reached a tool are left out.
    """

    def __init__(self, domain: str, user_id: str = "", actions: Sequence[dict] = (), tells: bool = False):
        """actions: the package's initialization_actions, which build the initial state.

        tells: whether there is a user to send messages to.
        """
        self._domain, self._user_id, self._tells = domain, user_id, tells
        self._environment = environment(domain, user_id, domain in SOLO)
        action = load("data_model.tasks").EnvFunctionCall
        self._environment.set_state(None, [action(**a) for a in actions], [])
        self.messages: list[Any] = []

    def call(self, call: Call) -> Observation:
        """Calls a tool and returns its answer in the package's words."""
        message = load("data_model.message")
        try:
            if self._tells and call.name == TELL_USER["function"]["name"]:
                said = bind(call, signatures([TELL_USER]))["message"]
                self.messages.append(message.AssistantMessage(role="assistant", content=said))
                return Observation("")
            arguments = self._arguments(call)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            return Observation(f"Error: {call.name} does not take this {place}: {first['msg']}.", error=True)
        except ValueError as error:
            return Observation(f"Error: {error}", error=True)
        asked = message.ToolCall(id=str(len(self.messages)), name=call.name, arguments=arguments)
        answer = self._environment.get_response(asked)
        self.messages += [message.AssistantMessage(role="assistant", tool_calls=[asked]), answer]
        return Observation(answer.content, error=answer.error or bool(REFUSED.match(answer.content)))

    def _arguments(self, call: Call) -> dict:
        """Returns a call's arguments, checked for the tool's types: tau2's tools would store any value."""
        arguments = bind(call, _signatures(self._domain))
        _tools(self._domain)[call.name].params.model_validate_json(json.dumps(arguments), strict=True)
        return arguments

    @property
    def database(self) -> Any:
        return self._environment.tools.db

    @property
    def phone_number(self) -> str | None:
        """The phone number of telecom's user; None in other domains."""
        user = self._environment.user_tools
        return user and user.db.surroundings.phone_number

    def fingerprint(self) -> str:
        made = self._environment
        return digest([self._domain, self._user_id, made.get_db_hash(), made.get_user_db_hash()])


def begin(scenario: Mapping[str, Any]) -> World:
    """Opens a world in the initial state of a scenario."""
    domain = scenario["domain"]
    tells = "official" in scenario and domain not in SOLO
    return World(domain, scenario.get("user_id", ""), scenario.get("actions", ()), tells)
