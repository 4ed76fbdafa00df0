"""BFCL's lessons: tasks from unguided exploration of the train split. A habit belongs to a tool."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Sequence

import numpy as np
from tqdm import tqdm

from coevolve_jax import envs
from coevolve_jax.envs import bfcl
from coevolve_jax.envs.bfcl.toolsets import TOOLSETS
from coevolve_jax.explorers import scripted
from coevolve_jax.explorers.base import Limits as TaskLimits
from coevolve_jax.rollout.limits import Limits
from coevolve_jax.synthesis.explore import unguided
from coevolve_jax.synthesis.lineage import Birth
from coevolve_jax.synthesis.pipeline import run_pipeline
from coevolve_jax.synthesis.settings import Settings
from coevolve_jax.types import Call, Task

PYTHON = ""
LIMITS = Limits(max_length=512, max_new_tokens=64, max_observation=160)
DEMO_TOOLSETS = ("GorillaFileSystem", "MessageAPI", "TicketAPI", "TwitterAPI")
OTHER_TOOLSETS = tuple(t for t in TOOLSETS if t not in DEMO_TOOLSETS)
DEMO_SHARE = 0.9  # of the tasks; the other four classes share the rest
QUOTED = re.compile(r"'([^'\"\\\n]{2,})'")  # a value in a query

tools = bfcl.tools


def make_tasks(pool, count: int, rng: np.random.Generator) -> list[Task]:
    """Validated tasks from unguided exploration, with one or two tool classes on offer."""
    roles = scripted.make(None, envs.load("bfcl"))
    scenarios = {t: [s for s in bfcl.scenarios("train") if t in s.scenario["toolsets"]] for t in TOOLSETS}
    tasks: dict[str, Task] = {}
    contexts_made = 0
    with tqdm(total=count, desc="tasks", unit="task") as bar:
        while len(tasks) < count:
            contexts = []
            for _ in range(64):
                toolset = str(rng.choice(DEMO_TOOLSETS if rng.random() < DEMO_SHARE else OTHER_TOOLSETS))
                scenario = _offer(scenarios[toolset], toolset, rng)
                contexts.append(unguided(scenario, f"pretrain-{contexts_made}"))
                contexts_made += 1
            settings = Settings(TaskLimits(proposals=4), rounds=2, steps=10)
            birth = Birth("initial", first_id=5 * contexts_made)
            verdicts = run_pipeline(roles, bfcl.tools, pool, contexts, settings, birth, rng).verdicts
            before = len(tasks)
            for task in (v.task for v in verdicts if v.task is not None):
                tasks.setdefault(
                    json.dumps([task.scenario["toolsets"], [c.to_json() for c in task.calls]]), task
                )
            bar.update(min(len(tasks), count) - before)
    return list(tasks.values())[:count]


def _offer(among: Sequence[Task], toolset: str, rng: np.random.Generator) -> Task:
    """A random scenario that offers a tool class, alone or with another class of the scenario."""
    drawn = among[int(rng.integers(len(among)))]
    offered = {toolset, str(rng.choice(drawn.scenario["toolsets"]))} if rng.random() < 0.3 else {toolset}
    kept = [t for t in drawn.scenario["toolsets"] if t in offered]
    return dataclasses.replace(drawn, scenario={**drawn.scenario, "toolsets": kept})


def action(call: Call) -> str:
    return call.name


def actions() -> frozenset[str]:
    return frozenset(name for tools in parameters().values() for name in tools)


@functools.cache
def parameters() -> dict[str, dict[str, tuple[str, ...]]]:
    """Toolset -> tool -> names of its parameters."""
    docs = {t: bfcl.tools(Task("", "bfcl", bfcl.scenario([t]))) for t in TOOLSETS}
    return {
        toolset: {d["function"]["name"]: tuple(d["function"]["parameters"]["properties"]) for d in ds}
        for toolset, ds in docs.items()
    }


@functools.cache
def _siblings() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Tool -> (the tool of its class that shares most parameters with it, that tool's parameters)."""
    found = {}
    for tools in parameters().values():
        for name in tools:
            others = [n for n in tools if n != name]
            overlap = lambda n: len(set(tools[n]) & set(tools[name]))
            sibling = max(others, key=lambda n: (overlap(n), n))
            found[name] = sibling, tools[sibling]
    return found


def sibling(call: Call) -> Call:
    name, takes = _siblings()[call.name]
    return Call(name, {k: v for k, v in call.arguments.items() if k in takes})


def wrong_argument(call: Call, task: Task, rng: np.random.Generator) -> Call:
    if not call.arguments:
        return sibling(call)
    key = str(rng.choice(sorted(call.arguments)))
    value = call.arguments[key]
    others = [v for c in task.calls for v in c.arguments.values() if type(v) is type(value) and v != value]
    if others:
        wrong = others[int(rng.integers(len(others)))]
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        wrong = value + 1
    elif isinstance(value, str) and " " in value:
        wrong = value.split(" ")[0]
    else:
        return Call(call.name, {k: v for k, v in call.arguments.items() if k != key})
    return Call(call.name, {**call.arguments, key: wrong})


def retell(text: str, another: Callable[[str], str]) -> str:
    """Replaces names. They are quoted in a query, and unquoted in the environment's longer answers."""
    # Longest first: a value may be part of another.
    for value in sorted(set(QUOTED.findall(text)), key=lambda v: (-len(v), v)):
        other = another(value)
        for quote in "'\"":
            text = text.replace(quote + value + quote, quote + other + quote)
        if len(value) > 3:
            text = re.sub(rf"\b{re.escape(value)}\b", lambda _: other, text)
    return text
