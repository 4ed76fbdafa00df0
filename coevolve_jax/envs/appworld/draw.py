"""Possible calls for explorers without a language model: documented APIs with arguments from earlier answers.

The code keeps an app's access token in the variable <app>_token, so that it can be read and replayed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

SAMPLES = 2  # calls of one API with different arguments
KEPT = 8  # latest values of a name
MAX_VALUE = 40  # characters: a user would not spell out more
SECRET = ("password", "access_token", "token_type")
# APIs that end the task or an account, or show the instruction: another task of the scenario has another one.
LEFT_OUT = frozenset(("complete_task", "delete_account", "logout", "signup", "show_active_task"))
TEXTS = {
    "title": ("Weekend plans", "Packing list", "Ideas for June"),
    "name": ("Weekend plans", "Housework", "Ideas for June"),
    "content": ("Call the plumber on Friday.", "Two tickets, row seven."),
    "description": ("Lunch on Friday", "Tickets for the museum"),
    "message": ("See you at six.", "I will be ten minutes late."),
    "comment": ("Thanks a lot!", "Looks good to me."),
    "query": ("plan", "list"),
    "label": ("Stretch", "Water the plants"),
    "time": ("08:15", "19:40"),
}
_LOGIN = re.compile(r"^(\w+)_token = apis\.(\w+)\.login\(", re.MULTILINE)


class Draw:
    """Collects the values seen in one world, and builds calls from them."""

    def __init__(self, docs: Sequence[Mapping[str, Any]]):
        self._docs = [d for d in docs if d["app_name"] != "api_docs" and d["api_name"] not in LEFT_OUT]
        self._known: dict[str, list[Any]] = {}
        self._passwords: dict[str, str] = {}
        self._tokens: set[str] = set()

    def ran(self, code: str) -> None:
        """Notes the tokens that the variables of successful code hold."""
        self._tokens |= {app for variable, app in _LOGIN.findall(code) if variable == app}

    def answered(self, value: Any) -> None:
        """Collects the values of an API's answer by name."""
        if isinstance(value, list):
            for item in value[:KEPT]:
                self.answered(item)
        elif isinstance(value, dict):
            if {"account_name", "password"} <= value.keys():
                self._passwords[value["account_name"]] = value["password"]
            for name, item in value.items():
                if isinstance(item, list | dict):
                    self.answered(item)
                elif item is not None and len(str(item)) <= MAX_VALUE and name not in SECRET:
                    values = self._known.setdefault(name, [])
                    self._known[name] = [item, *(v for v in values if v != item)][:KEPT]

    def options(self) -> list[str]:
        """Returns pieces of code: calls of the supervisor's app and of apps with a login, and logins."""
        open = {"supervisor", *self._tokens}
        return [
            code
            for doc in self._docs
            if doc["app_name"] in open or doc["api_name"] == "login"
            for code in self._calls(doc)
        ]

    def _calls(self, doc: Mapping[str, Any]) -> Iterator[str]:
        app, api = doc["app_name"], doc["api_name"]
        if api == "login":
            if app in self._passwords and app not in self._tokens:
                for name in ("phone_number",) if app == "phone" else ("email",):
                    for user in self._known.get(name, [])[-1:]:
                        given = f"username={user!r}, password={self._passwords[app]!r}"
                        yield f"{app}_token = apis.{app}.login({given})['access_token']"
            return
        choices = [(p["name"], self._values(app, p)) for p in doc["parameters"] if p["required"]]
        if not all(values for _, values in choices):
            return
        for n in range(min(SAMPLES, max((len(values) for _, values in choices), default=1))):
            given = ", ".join(f"{name}={values[n % len(values)]}" for name, values in choices)
            yield f"print(apis.{app}.{api}({given}))"

    def _values(self, app: str, parameter: Mapping[str, Any]) -> list[str]:
        """Returns possible values of a required parameter, as code."""
        name, kind = parameter["name"], parameter["type"]
        if name.endswith("access_token"):
            of = name.removesuffix("access_token").rstrip("_") or app
            return [f"{of}_token"] if of in self._tokens else []
        if kind == "boolean":
            return ["True", "False"]
        allowed = re.search(r"value in \[(.*)\]", " ".join(parameter["constraints"]))
        if allowed:
            return allowed[1].split(", ")
        found = [
            v for v in self._known.get(name, []) if isinstance(v, str if kind == "string" else int | float)
        ]
        if name in TEXTS:
            found = [*TEXTS[name], *found]
        if kind in ("number", "integer") and re.match(
            r"value >= 1.0, <= 5", " ".join(parameter["constraints"])
        ):
            found = [3, 5]
        return [repr(v) for v in found] if kind in ("string", "integer", "number") else []
