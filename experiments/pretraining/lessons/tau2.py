"""tau2's lessons: tasks from unguided exploration of telecom's training states. A habit belongs to a tool."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import numpy as np
from tqdm import tqdm

from coevolve_jax import envs
from coevolve_jax.explorers import scripted
from coevolve_jax.explorers.base import Limits as TaskLimits
from coevolve_jax.rollout.limits import Limits
from coevolve_jax.synthesis.explore import unguided
from coevolve_jax.synthesis.lineage import Birth
from coevolve_jax.synthesis.pipeline import run_pipeline
from coevolve_jax.synthesis.settings import Settings
from coevolve_jax.types import Call, Task

PYTHON = ".tau2/bin/python"
LIMITS = Limits(max_length=512, max_new_tokens=64, max_observation=100)
DOMAINS = {"domains": ("telecom",)}  # as in configs/tau2_tiny.py
PROPOSALS = 6  # per context
ARGUMENT = re.compile(r'": "([^"\\]{2,})"')  # a text in a call, or in an answer
QUERY = re.compile(r"user\n(.*?)<\|im_end\|>", re.DOTALL)


def tools(task: Task) -> list[dict]:
    return envs.load("tau2", PYTHON).tools(task)


def action(call: Call) -> str:
    return call.name


def actions() -> frozenset[str]:
    return frozenset(_documented())


@functools.cache
def _documented() -> dict[str, dict[str, dict]]:
    """Tool -> parameter -> its schema."""
    functions = [tool["function"] for tool in tools(Task("", "tau2", {"domain": "telecom"}))]
    return {f["name"]: f["parameters"]["properties"] for f in functions}


def make_tasks(pool, count: int, rng: np.random.Generator) -> list[Task]:
    """Validated tasks from unguided exploration of the states of the train split."""
    family = envs.load("tau2", PYTHON)
    states, roles = family.scenarios("train", DOMAINS), scripted.make(None, family)
    tasks: dict[str, Task] = {}
    made = 0
    with tqdm(total=count, desc="tasks", unit="task") as bar:
        while len(tasks) < count:
            drawn = rng.integers(len(states), size=min(64, 1 + count // PROPOSALS))
            contexts = [unguided(states[i], f"pretrain-{made + n}") for n, i in enumerate(drawn)]
            made += len(contexts)
            settings = Settings(TaskLimits(PROPOSALS), rounds=3, steps=10)
            birth = Birth("initial", first_id=(PROPOSALS + 1) * made)
            verdicts = run_pipeline(roles, tools, pool, contexts, settings, birth, rng).verdicts
            before = len(tasks)
            for task in (v.task for v in verdicts if v.task is not None):
                tasks.setdefault(family.task_key(task), task)
            bar.update(min(len(tasks), count) - before)
    return list(tasks.values())[:count]


@functools.cache
def _sibling(name: str) -> str:
    """The tool with most words of its name in common, then most parameters, then fewest other parameters."""
    known = _documented()
    words, takes = set(name.split("_")), set(known[name])

    def likeness(other: str) -> tuple:
        theirs = set(known[other])
        return len(words & set(other.split("_"))), len(takes & theirs), -len(theirs - takes), other

    return max(known.keys() - {name}, key=likeness)


def sibling(call: Call) -> Call:
    name = _sibling(call.name)
    return Call(name, {k: v for k, v in call.arguments.items() if k in _documented()[name]})


def wrong_argument(call: Call, task: Task, rng: np.random.Generator) -> Call:
    """Replaces one argument by another value from the scenario, or from the tool's documentation."""
    schemas = _documented()[call.name]
    named = lambda key: task.scenario["values"].get(key) or schemas[key].get("enum", [])
    others = [(key, v) for key, value in call.arguments.items() for v in named(key) if v != value]
    if not others:
        return sibling(call)
    key, wrong = others[rng.integers(len(others))]
    return Call(call.name, {**call.arguments, key: wrong})


def retell(text: str, another: Callable[[str], str]) -> str:
    """Replaces names: the arguments of calls that also stand in quotes in a query."""
    queries = "".join(QUERY.findall(text))
    names = {value for value in ARGUMENT.findall(text) if f"'{value}'" in queries}
    # Longest first: a name may be part of another.
    for name in sorted(names, key=lambda n: (-len(n), n)):
        other = another(name)
        for quote in "'\"":
            text = text.replace(quote + name + quote, quote + other + quote)
    return text
