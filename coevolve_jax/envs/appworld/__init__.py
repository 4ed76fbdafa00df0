"""AppWorld (arXiv 2407.18901) as an environment family: everyday tasks in nine apps, done by writing code.

An agent has one tool, `execute(code)` (calls.py). data.py finds the tasks, environment.py grades the worlds.
A world has two processes:
* host.py forks the first, which holds AppWorld's own engine (engine.py).
* sandbox.py forks the second, which runs the agent's code, locked down by envs/lockdown.py. interpreter.py is
  the engine's side of it.

AppWorld has a virtual environment of its own (`make appworld`). This repository contains nothing of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from coevolve_jax.envs import base
from coevolve_jax.envs.appworld.calls import EXECUTE, NO_API
from coevolve_jax.envs.appworld.calls import action_pattern as action_pattern
from coevolve_jax.envs.appworld.calls import features as features
from coevolve_jax.envs.appworld.calls import wording as wording
from coevolve_jax.envs.base import Environment
from coevolve_jax.types import Group, Task, Turn

PACKAGES = ("appworld",)


def scenarios(split: str, settings: Mapping[str, Any] | None = None, apart_from: str = "") -> list[Task]:
    """Returns a split's initial states, each once. apart_from: a split whose initial states are left out."""
    from coevolve_jax.envs.appworld import data

    seen = {data.beginning(id) for id in data.ids(apart_from)} if apart_from else set()
    found = []
    for id in data.ids(split):
        if data.beginning(id) not in seen:
            seen.add(data.beginning(id))
            found.append(Task(f"scenario_{id}", "appworld", {"task": id}))
    return found


def tasks(split: str, settings: Mapping[str, Any] | None = None) -> list[Task]:
    """Returns the tasks of a split in AppWorld's words, with the supervisor who asks.

    They have no reference calls: AppWorld's own tests grade them.
    """
    from coevolve_jax.envs.appworld import data

    made = []
    for id in data.ids(split):
        who = data.specs(id)["supervisor"]
        query = (
            f"I am {who['first_name']} {who['last_name']}, your supervisor; my email is {who['email']}, "
            f"my phone number {who['phone_number']}.\n{data.specs(id)['instruction']}"
        )
        made.append(Task(id, "appworld", {"task": id}, (Turn(query),)))
    return made


def tools(task: Task) -> list[dict]:
    return [EXECUTE]


def actions() -> list[str]:
    """Returns what `action_pattern` may answer: code may name APIs that do not exist."""
    from coevolve_jax.envs.appworld import data

    return [EXECUTE["function"]["name"], NO_API, *data.apis()]


def make() -> Environment:
    from coevolve_jax.envs.appworld import environment

    return environment.Environment()


def warm_up() -> None:
    """Imports AppWorld, so that no call waits for it."""
    from coevolve_jax.envs.appworld import host

    host.host()


def report(groups: Sequence[Group], judge) -> dict:
    """Reports AppWorld's two scores; each is None where it has no rollouts.

    task_goal_completion: the share of rollouts that pass all tests of their task.
    scenario_goal_completion: the share of scenarios (ids before "_") whose tasks all pass. The i-th rollouts
    of all tasks form one trial of the benchmark, so a scenario has a score per trial. A scenario with an
    invalid rollout has no score in that trial. scenario_trials, scenario_trials_invalid: how many trials of
    scenarios have a score, and how many have none.
    """
    by_scenario = defaultdict(list)
    for group in groups:
        for t in group.trajectories:
            by_scenario[group.task.id.partition("_")[0], t.rollout_index].append(t.outcome)
    scenarios = [
        all(o.success for o in trial) for trial in by_scenario.values() if all(o.valid for o in trial)
    ]
    completed = base.share_of(base.outcomes_of(groups))
    own = all(group.task.id.startswith("own") for group in groups)
    return {
        "benchmark": "tasks of our own in AppWorld's engine" if own else "AppWorld",
        "scoring": "AppWorld's evaluation",
        **completed,
        "task_goal_completion": completed["success"],
        "scenario_goal_completion": sum(scenarios) / len(scenarios) if scenarios else None,
        "scenario_trials": len(scenarios),
        "scenario_trials_invalid": len(by_scenario) - len(scenarios),
        "tasks": len(groups),
        "scenarios": len({group.task.id.partition("_")[0] for group in groups}),
    }
