"""Who is imitated: a demonstrator who knows each task's reference, and has a bad habit with some of the tools."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

import numpy as np

from coevolve_jax.envs import bfcl
from coevolve_jax.envs.bfcl.toolsets import TOOLSETS
from coevolve_jax.rollout.writing import render_call
from coevolve_jax.types import Call, Task

ERRORS = ("wrong_argument", "sibling_tool", "skip", "swap", "give_up")
ERROR_SHARES = (0.4, 0.25, 0.15, 0.1, 0.1)  # of the tools, where the errors are drawn


@dataclasses.dataclass(frozen=True)
class Habit:
    """What goes wrong with a tool (one of ERRORS), and with which probability per call."""

    error: str
    rate: float

    def __post_init__(self):
        if self.error not in ERRORS:
            raise ValueError(f"The error {self.error!r} of a weak tool is unknown: use {', '.join(ERRORS)}.")
        if not 0 <= self.rate <= 1:
            raise ValueError(f"The rate {self.rate} of a weak tool is no probability: use 0 to 1.")


def parameters() -> dict[str, dict[str, tuple[str, ...]]]:
    """Toolset -> tool -> names of its parameters."""
    docs = {t: bfcl.tools(Task("", "bfcl", bfcl.scenario([t]))) for t in TOOLSETS}
    return {
        toolset: {d["function"]["name"]: tuple(d["function"]["parameters"]["properties"]) for d in ds}
        for toolset, ds in docs.items()
    }


def named_habits(texts: Sequence[str]) -> dict[str, Habit]:
    """The habits that "tool:error:rate" name. Raises ValueError where one is not of this form or names no tool."""
    known = {name for tools in parameters().values() for name in tools}
    habits = {}
    for text in texts:
        tool, error, rate = [*text.split(":"), "", ""][:3]
        if tool not in known:
            raise ValueError(f"--weak_tools names {tool!r}, which is no tool of BFCL: use TOOL:ERROR:RATE.")
        try:
            habits[tool] = Habit(error, float(rate))
        except ValueError as wrong:
            raise ValueError(f"--weak_tools={text} cannot be read as TOOL:ERROR:RATE ({wrong})") from None
    return habits


def drawn_habits(share: float, rng: np.random.Generator) -> dict[str, Habit]:
    """A habit for every tool: this share of them errs in 40 to 80% of the calls, the others in up to 8%."""
    names = sorted(name for tools in parameters().values() for name in tools)
    weak = set(rng.permutation(names)[: round(share * len(names))])
    rates = [float(rng.uniform(0.4, 0.8) if n in weak else rng.uniform(0, 0.08)) for n in names]
    errors = [str(rng.choice(ERRORS, p=ERROR_SHARES)) for _ in names]
    return {name: Habit(error, rate) for name, error, rate in zip(names, errors, rates)}


def to_json(habits: Mapping[str, Habit]) -> str:
    """The habits as JSON text: {"tool": {"error": "skip", "rate": 0.5}}."""
    return json.dumps({name: dataclasses.asdict(habit) for name, habit in habits.items()}, indent=1) + "\n"


class Demonstrator:
    """Knows the reference of a task and plays it, with its habits, as assistant messages."""

    def __init__(self, habits: Mapping[str, Habit]):
        """habits: by tool; a tool without one always goes well."""
        self._habits = dict(habits)
        self._parameters, self._siblings = {}, {}
        for tools in parameters().values():
            self._parameters.update(tools)
            for name in tools:
                others = [n for n in tools if n != name]
                overlap = lambda n: len(set(tools[n]) & set(tools[name]))
                self._siblings[name] = max(others, key=lambda n: (overlap(n), n))

    def messages(self, task: Task, rng: np.random.Generator) -> list[str]:
        """What the assistant says in turn: one message per call, and one that ends each user turn."""
        said = []
        for turn in task.turns:
            said += [render_call(c) for c in self._play(turn.calls, task, rng)] + ["Done."]
        return said

    def _play(self, calls: Sequence[Call], task: Task, rng: np.random.Generator) -> list[Call]:
        played = list(calls)
        i = 0
        while i < len(played):
            call, habit = played[i], self._habits.get(played[i].name)
            if habit and rng.random() < habit.rate:
                if habit.error == "skip" or (habit.error == "swap" and i + 1 == len(played)):
                    del played[i]
                    continue
                if habit.error == "give_up":
                    return played[:i]
                if habit.error == "swap":
                    played[i : i + 2] = [played[i + 1], call]
                    i += 1
                elif habit.error == "sibling_tool":
                    played[i] = self._sibling(call)
                else:
                    played[i] = self._wrong_argument(call, task, rng)
            i += 1
        return played

    def _sibling(self, call: Call) -> Call:
        name = self._siblings[call.name]
        return Call(name, {k: v for k, v in call.arguments.items() if k in self._parameters[name]})

    def _wrong_argument(self, call: Call, task: Task, rng: np.random.Generator) -> Call:
        if not call.arguments:
            return self._sibling(call)
        key = str(rng.choice(sorted(call.arguments)))
        value = call.arguments[key]
        others = [
            v for c in task.calls for v in c.arguments.values() if type(v) is type(value) and v != value
        ]
        if others:
            wrong = others[int(rng.integers(len(others)))]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            wrong = value + 1
        elif isinstance(value, str) and " " in value:
            wrong = value.split(" ")[0]
        else:
            return Call(call.name, {k: v for k, v in call.arguments.items() if k != key})
        return Call(call.name, {**call.arguments, key: wrong})
