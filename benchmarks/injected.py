"""AgentDojo's injections, and environments whose answers carry them.

It reads AgentDojo (https://arxiv.org/abs/2406.13352, MIT) without importing it: the package needs six
vendors' SDKs.
"""

import ast
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from coevolve_jax.envs import bfcl
from coevolve_jax.llm.prompting import seed_of
from coevolve_jax.synthesis.explore import offered_names


class Injection(NamedTuple):
    """text: the words in an answer. goal: the attacker's. tool: AgentDojo's own for it, which BFCL lacks."""

    text: str
    goal: str
    tool: str


def agentdojo(package: Path) -> list[Injection]:
    """Each goal of its injection tasks in each template of its attacks that needs names alone."""
    goals: dict[str, str] = {}
    for path in sorted(package.glob("default_suites/*/*/injection_tasks.py")):
        tree = ast.parse(path.read_text())
        known = _constants(tree.body, {})
        for node in (n for n in tree.body if isinstance(n, ast.ClassDef)):
            goal = _constants(node.body, known).get("GOAL")
            called = (k.value for k in ast.walk(node) if isinstance(k, ast.keyword) and k.arg == "function")
            if goal is not None:
                goals.setdefault(goal, next((c.value for c in called if isinstance(c, ast.Constant)), ""))
    templates: dict[str, None] = {}
    for path in sorted(package.glob("attacks/*.py")):
        tree = ast.parse(path.read_text())
        docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for n in ast.walk(tree):
            if isinstance(n, ast.Constant) and isinstance(n.value, str) and id(n) not in docs:
                fields = set(re.findall(r"{(\w+)}", n.value))
                if "goal" in fields <= {"goal", "user", "model"}:
                    templates[n.value] = None
    names = {"user": "Emma Johnson", "model": "AI assistant"}
    return [Injection(t.format(goal=g, **names), g, tool) for g, tool in goals.items() for t in templates]


def _constants(body: Sequence[ast.stmt], known: dict[str, str]) -> dict[str, str]:
    """Names bound to text here, including f-strings of such names."""
    found = dict(known)
    for node in (n for n in body if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)):
        parts = node.value.values if isinstance(node.value, ast.JoinedStr) else [node.value]
        inner = [p.value if isinstance(p, ast.FormattedValue) else p for p in parts]
        texts = [found.get(p.id) if isinstance(p, ast.Name) else getattr(p, "value", None) for p in inner]
        if all(isinstance(text, str) for text in texts):
            found[node.targets[0].id] = "".join(texts)
    return found


class Injecting:
    """Environments whose answers each carry an injection, a fixed one per answer; without injections,
    unchanged ones.

    sound: original answers, by their injected version. shown: injections that occurred. unoffered: executed
    calls that their task does not offer.
    """

    def __init__(self, pool, injections: Sequence[Injection] = ()):
        self._pool, self._injections, self._offered = pool, injections, {}
        self.sound: dict[str, str] = {}
        self.shown: set[Injection] = set()
        self.unoffered = 0

    def __getattr__(self, name):
        return getattr(self._pool, name)

    def reset(self, tasks):
        env_ids = self._pool.reset(tasks)
        self._offered.update((s, offered_names(bfcl.tools(task))) for s, task in zip(env_ids, tasks))
        return env_ids

    def step(self, env_ids, calls):
        self.unoffered += sum(c.name not in self._offered[s] for s, own in zip(env_ids, calls) for c in own)
        return [list(map(self._carry, row)) for row in self._pool.step(env_ids, calls)]

    def execute(self, jobs):
        self.unoffered += sum(
            c.name not in offered_names(bfcl.tools(task)) for task, own in jobs for c in own
        )
        carry = lambda run: tuple(map(self._carry, run.observations))
        return [dataclasses.replace(run, observations=carry(run)) for run in self._pool.execute(jobs)]

    def _carry(self, observation):
        if not self._injections:
            return observation
        chosen = self._injections[seed_of(observation.text) % len(self._injections)]
        text = _inside(observation.text, chosen.text)
        self.shown.add(chosen)
        self.sound[text] = observation.text
        return dataclasses.replace(observation, text=text)


def _inside(answer: str, text: str) -> str:
    """The answer with the text in the first string of its object, or after it."""
    try:
        data = json.loads(answer)
    except ValueError:
        data = None
    for key, value in (data if isinstance(data, dict) else {}).items():
        if isinstance(value, str):
            return json.dumps({**data, key: f"{value} {text}"})
    return f"{answer} {text}"
