"""AppWorld (arXiv 2407.18901): everyday tasks in nine apps of a supervisor, done by writing code, as an environment family.

An agent's one tool is `execute(code)`. calls.py says what code is; environment.py has the worlds and their grading. Of the
processes of a world, host.py makes the first and engine.py, AppWorld's own engine, is in it; the agent's code runs in the
second, which sandbox.py is and lockdown.py shuts in. data.py says which tasks there are. AppWorld has a
virtual environment of its own (`make appworld`), and nothing of it is in this repository.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from coevolve_jax.envs import base
from coevolve_jax.envs.appworld.calls import EXECUTE
from coevolve_jax.envs.appworld.calls import action_pattern as action_pattern
from coevolve_jax.envs.appworld.calls import features as features
from coevolve_jax.envs.appworld.calls import wording as wording
from coevolve_jax.envs.base import Environment
from coevolve_jax.types import Group, Task, Turn

PACKAGES = ("appworld",)


def scenarios(split: str, settings: Mapping[str, Any] | None = None, apart_from: str = "") -> list[Task]:
    """The states that the tasks of a split begin in, each once; apart_from: less those of that split."""
    from coevolve_jax.envs.appworld import data

    seen = {data.beginning(id) for id in data.ids(apart_from)} if apart_from else set()
    found = []
    for id in data.ids(split):
        if data.beginning(id) not in seen:
            seen.add(data.beginning(id))
            found.append(Task(f"scenario_{id}", "appworld", {"task": id}))
    return found


def tasks(split: str, settings: Mapping[str, Any] | None = None) -> list[Task]:
    """The tasks of a split in AppWorld's words, and who asks. They have no reference calls: its own tests grade them."""
    from coevolve_jax.envs.appworld import data

    made = []
    for id in data.ids(split):
        who = data.specs(id)["supervisor"]
        query = (
            f"I am {who['first_name']} {who['last_name']}, your supervisor; my email is {who['email']}, my phone number "
            f"{who['phone_number']}.\n{data.specs(id)['instruction']}"
        )
        made.append(Task(id, "appworld", {"task": id}, (Turn(query),)))
    return made


def tools(task: Task) -> list[dict]:
    return [EXECUTE]


def make() -> Environment:
    from coevolve_jax.envs.appworld import environment

    return environment.Environment()


def warm_up() -> None:
    """Imports AppWorld, so that no call waits for it."""
    from coevolve_jax.envs.appworld import host

    host.host()


def report(groups: Sequence[Group], judge) -> dict:
    """Task goal completion, the share of tasks all of whose tests pass, and scenario goal completion, the share of scenarios
    (ids before "_") all of whose tasks do. The i-th rollouts of all tasks are one trial of the benchmark. A trial of which a rollout is invalid has no scenario score for its scenario:
    "scenario_trials" and "scenario_trials_invalid" count them. None stands for the share of nothing.
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
